"""Sums that workgroups add to in turns, stores of matrices and copies of bytes on the emulator, and their mistakes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, reg, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl import instructions as ins

CUDA, ARCH = "cuda", "sm_90"
GROUP, COUNT = 64, 3  # threads per workgroup, and workgroups
Kernel = Callable[..., UOp]


def added(
  *,
  taken: bool = True,
  met_before: bool = True,
  met_after: bool = True,
  given: int = 1,
  first: int = 0,
  when: Callable[[UOp], UOp] = lambda t: t.eq(0),
  step: int = 4,
) -> Kernel:
  """A kernel whose workgroups add their numbers times the thread to one sum; the keywords each put in a mistake."""

  def body(o: UOp, turn: UOp) -> UOp:
    t, g, all_of = threads(GROUP), groups(COUNT), UOp.const(1)
    begun = ins.take_turn(CUDA, turn[0], g, when(t)) if taken else ins.meet(CUDA, all_of, GROUP)
    begun = ins.meet(CUDA, all_of, GROUP, begun) if met_before else begun
    numbers = [(g * GROUP + t + i).cast(dtypes.float) for i in range(4)]
    done = ins.add_four(CUDA, o[t * step], numbers, g.eq(first), begun)
    done = ins.meet(CUDA, all_of, GROUP, done) if met_after else done
    done = ins.give_turn(CUDA, turn[0], g + given, when(t), done)
    return UOp.group(done).end(t, g).sink(arg=kernel("added", [], t).arg)

  return body


def run(body: Kernel) -> np.ndarray:
  return launch(body, np.full(4 * GROUP, np.nan, np.float32), np.zeros(1, np.int32), arch=ARCH)


def test_sums_in_turns() -> None:
  expected = sum(g * GROUP + np.arange(GROUP)[:, None] + np.arange(4) for g in range(COUNT))
  np.testing.assert_array_equal(run(added()).reshape(GROUP, 4), expected)


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "turn not taken": ({"taken": False}, emulator.Race, "in an order that nothing fixes"),
  "other warps do not know of the turn": ({"met_before": False}, emulator.Race, "in an order that nothing fixes"),
  "given before other warps have added": ({"met_after": False}, emulator.Race, "in an order that nothing fixes"),
  "given to nobody": ({"given": 2}, emulator.Divergence, "waits for turn 1 where 2 was given"),
  "the last one stores": ({"first": COUNT - 1}, emulator.Race, "stores over what was added"),
  "taken by all": ({"when": lambda t: t >= 0}, emulator.Divergence, "by several lanes"),
  "one place for two lanes": ({"step": 2}, emulator.KernelError, "16 does not divide"),
  "one place for all lanes": ({"step": 0}, emulator.Race, "from several lanes at once"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str) -> None:
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(added(**mistake))


@pytest.mark.parametrize("offset", [0, 4])
def test_stmatrix_stores_what_ldmatrix_loads(offset: int) -> None:
  """Four 8x8 matrices, one below the other; rows must start at multiples of 16 bytes."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, words = threads(32), lds(1, 4 * 64 + 8, dtypes.ushort), reg(2, 4, dtypes.uint)
    stored = ins.stmatrix(CUDA, memory[t * 8 + offset], *(x[t * 4 + i].load() for i in range(4)))
    loaded = ins.ldmatrix(CUDA, words[0], memory.after(UOp.barrier(stored))[t * 8], UOp.barrier(stored))
    stores = [o[t * 4 + i].store(words.after(loaded)[i].load()) for i in range(4)]
    return kernel("stored", stores, t)

  x = np.arange(128, dtype=np.uint32) * 65537
  if offset:
    with pytest.raises(emulator.OutOfBounds, match="writes a row at an LDS address that 16 does not divide"):
      launch(body, x, x, arch=ARCH)
  else:
    np.testing.assert_array_equal(launch(body, x, x, arch=ARCH), x)


def copied(*, expected: int = 64, start: int = 4, elected: int = 0, waits: bool = True) -> Kernel:
  """A kernel that returns 16 numbers by way of LDS; the keywords each put in a mistake."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, barriers = threads(32), lds(1, 16), lds(2, 1, dtypes.ulong)
    made = ins.mbarrier_fence(CUDA, ins.mbarrier_init(CUDA, barriers[0], 1, t.eq(0)))
    once = loop((t.eq(elected) if elected >= 0 else t < 2).cast(dtypes.weakint) * 2 // 2)
    begun = ins.mbarrier_expect(CUDA, barriers[0], expected, UOp.barrier(made), once)
    loaded = ins.bulk_load(CUDA, memory[0], x[start], 64, barriers[0], begun).end(once)
    apart = ins.exit_warps(CUDA, t < 0, loaded)
    waited = memory.after(ins.mbarrier_wait(CUDA, barriers[0], 0, apart) if waits else apart)
    return kernel("copied", [o[t % 16].store(waited[t % 16].load())], t)

  return body


COPIES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "too many bytes expected": ({"expected": 80}, emulator.Divergence, "too few arrivals or bytes: it expects 80"),
  "not waited for": ({"waits": False}, emulator.Unwritten, "while a copy to it is in flight"),
  "from an address not aligned": ({"start": 2}, emulator.OutOfBounds, "copies bytes that 16 does not divide"),
  "past the end": ({"start": 8}, emulator.OutOfBounds, "copies 64 bytes from byte 32"),
  "by two lanes": ({"elected": -1}, emulator.KernelError, "copies bytes 2 times|arrivals"),
}


def test_bytes_are_copied() -> None:
  x = np.arange(20, dtype=np.float32)
  np.testing.assert_array_equal(launch(copied(), x[:16], x, arch=ARCH), x[4:])


@pytest.mark.parametrize("name", COPIES)
def test_a_mistake_in_a_copy_is_an_error(name: str) -> None:
  mistake, error, message = COPIES[name]
  with pytest.raises(error, match=message):
    launch(copied(**mistake), np.zeros(16, np.float32), np.arange(20, dtype=np.float32), arch=ARCH)
