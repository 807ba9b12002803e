"""Sums that workgroups add to in order, stores of matrices and copies of bytes on the emulator, and their mistakes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, reg, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA

ARCH = "sm_90"
GROUP, COUNT = 256, 3  # threads per workgroup, and workgroups
Kernel = Callable[..., UOp]


def added(
  *,
  taken: bool = True,
  fenced: bool = True,
  met: bool = True,
  read: bool = True,
  waited: bool = True,
  early: bool = False,
  in_lds: bool = False,
  given: int = 1,
  first: int = 0,
  when: Callable[[UOp], UOp] = lambda t: t.eq(0),
  start: int = 0,
  count: int = 16 * GROUP,
) -> Kernel:
  """A kernel whose workgroups add a number per thread to a sum, twice; the keywords each put in a mistake.

  The first lane adds. The other warps overwrite what it adds once it may be overwritten.
  """

  def body(o: UOp, semaphores: UOp) -> UOp:
    t, g, memory, barriers = threads(GROUP), groups(COUNT), lds(1, 4 * GROUP + 4), lds(2, 1, dtypes.ulong)
    made = UOp.barrier(CUDA.mbarrier_init(barriers[0], 1, t.eq(0)))
    last, lead = CUDA.exit_warps(t < 0, made), when(t)
    for i in range(2):
      number = (g * GROUP + t + i).cast(dtypes.float).bitcast(dtypes.uint)
      stored = CUDA.store_chunk(memory.after(last)[t * 4], *[number] * 4)
      stored = CUDA.fence_proxy_async(stored) if fenced else stored
      stored = CUDA.named_barrier_sync(UOp.const(1), GROUP, stored) if met else stored
      own = (lds(3, 2, dtypes.int) if in_lds else semaphores)[i]
      last = CUDA.semaphore_wait(own, g, lead, stored) if taken else stored
      to = o[i * 4 * GROUP]
      last = CUDA.tma_reduce_add(to, memory[start], count, g.eq(first), lead, last)
      last = CUDA.bulk_wait_read(0, lead, last) if read else last
      last = CUDA.mbarrier_arrive(barriers[0], t.eq(0), last)
      last = CUDA.bulk_wait(lead, last) if waited and not early else last
      last = CUDA.semaphore_release(own, g + given, lead, last)
      last = CUDA.bulk_wait(lead, last) if early else last
      last = CUDA.mbarrier_wait(barriers[0], i, last)
    return UOp.group(last).end(t, g).sink(arg=kernel("added", [], t).arg)

  return body


def run(body: Kernel) -> np.ndarray:
  return launch(body, np.full(8 * GROUP, np.nan, np.float32), np.zeros(2, np.int32), arch=ARCH)


def test_sums_one_after_another() -> None:
  expected = [[sum(g * GROUP + t + i for g in range(COUNT))] * 4 for i in range(2) for t in range(GROUP)]
  np.testing.assert_array_equal(run(added()).reshape(-1, 4), expected)


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "semaphore not waited for": ({"taken": False}, emulator.Race, "in an order that nothing fixes"),
  "not fenced": ({"fenced": False}, emulator.Race, "to copy it, written without a fence_proxy_async since"),
  "other warps have not written": ({"met": False}, emulator.KernelError, "nothing has written|with no barrier between"),
  "overwritten while it is read": ({"read": False}, emulator.Race, "overwritten before the wait"),
  "given before it is in memory": ({"waited": False}, emulator.Race, "ends while a bulk copy reads LDS or adds"),
  "released before it is in memory": ({"early": True}, emulator.Race, "in an order that nothing fixes"),
  "a semaphore in LDS": ({"in_lds": True}, emulator.OutOfBounds, r"at LDS 3 .*, which is not in global memory"),
  "released for nobody": ({"given": 2}, emulator.Divergence, "waits for 1 at a semaphore that is 2"),
  "the last one stores": ({"first": COUNT - 1}, emulator.Race, "stores over what was added"),
  "added by all": ({"when": lambda t: t >= 0}, emulator.Divergence, "in several lanes at once"),
  "a part of 16 bytes": ({"count": 24}, emulator.Misaligned, "adds 24 bytes, which is not a multiple of 16"),
  "past the end": ({"start": 8}, emulator.OutOfBounds, r"adds 4096 bytes from LDS 1 .* at byte \[32\]"),
  "from an address not aligned": ({"start": 2}, emulator.Misaligned, "an LDS address that is not a multiple of 16"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str) -> None:
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(added(**mistake))


@pytest.mark.parametrize("neighbour", [False, True])
def test_a_semaphore_that_is_read_without_a_wait_is_an_error(neighbour: bool) -> None:
  """Also by lanes that do not wait, behind a wait of another lane; one that nobody has released may be read."""

  def body(o: UOp, semaphores: UOp) -> UOp:
    t, g = threads(GROUP), groups(2)
    released = CUDA.semaphore_release(semaphores[0], 1, t.eq(0) & g.eq(0), CUDA.exit_warps(t < 0))
    waited = CUDA.semaphore_wait(semaphores[0], 1, t.eq(0) & g.eq(1), released)
    read = semaphores.after(waited)[UOp.const(int(neighbour))].load().cast(dtypes.float)
    return o[g * GROUP + t].store(read).end(t, g).sink(arg=kernel("read", [], t).arg)

  def run_it() -> None:
    launch(body, np.zeros(2 * GROUP, np.float32), np.zeros(2, np.int32), arch=ARCH)

  if neighbour:
    run_it()
  else:
    with pytest.raises(emulator.Race, match="reads a semaphore in argument 1 without waiting for it"):
      run_it()


@pytest.mark.parametrize("behind", [False, True])
def test_one_warp_fences_what_others_have_written_if_it_knows_of_it(behind: bool) -> None:
  """It does behind the barrier, not before."""

  def body(o: UOp) -> UOp:
    t, g, memory = threads(GROUP), groups(1), lds(1, 4 * GROUP)
    once, number = loop((t < 32).cast(dtypes.weakint) * 2 // 2), t.cast(dtypes.float).bitcast(dtypes.uint)
    last = CUDA.store_chunk(memory.after(UOp.barrier(CUDA.exit_warps(t < 0)))[t * 4], *[number] * 4)
    last = CUDA.named_barrier_sync(UOp.const(1), GROUP, last) if behind else last
    last = CUDA.fence_proxy_async(last, once).end(once)
    last = last if behind else CUDA.named_barrier_sync(UOp.const(1), GROUP, last)
    last = CUDA.tma_reduce_add(o[0], memory[0], 16 * GROUP, UOp.const(True), t.eq(0), last)
    return UOp.group(CUDA.bulk_wait(t.eq(0), last)).end(t, g).sink(arg=kernel("fenced", [], t).arg)

  if behind:
    expected = np.arange(GROUP, dtype=np.float32).repeat(4)
    np.testing.assert_array_equal(launch(body, np.zeros(4 * GROUP, np.float32), arch=ARCH), expected)
  else:
    with pytest.raises(emulator.Race, match="to copy it, written without a fence_proxy_async since"):
      launch(body, np.zeros(4 * GROUP, np.float32), arch=ARCH)


def test_numbers_are_taken_in_turn() -> None:
  """Each workgroup writes where its number says; it gets a second one, which no other gets, only if it takes again."""

  def body(o: UOp, counter: UOp) -> UOp:
    t, g, number = threads(32), groups(COUNT), reg(1, 1, dtypes.int)
    once = loop(t.eq(0).cast(dtypes.weakint) * 2 // 2)
    last = CUDA.take_number(counter[0], number.after(once)[0], g, CUDA.exit_warps(t < 0), once)
    at = number.after(last)[0].load().cast(dtypes.weakint)
    return UOp.group(o[at].store((g + 1).cast(dtypes.float)).end(once)).end(t, g).sink(arg=kernel("taken", [], t).arg)

  counter = np.array([2], np.int32)
  np.testing.assert_array_equal(launch(body, np.zeros(6, np.float32), counter, arch=ARCH), [0, 0, 1, 2, 3, 0])


@pytest.mark.parametrize("taken", [False, True])
def test_where_numbers_are_taken_another_workgroup_might_have_added(taken: bool) -> None:
  """Then only a semaphore can say that what this one added before is there."""

  def body(o: UOp, counter: UOp) -> UOp:
    t, g, memory, number = threads(GROUP), groups(1), lds(1, 4 * GROUP), reg(2, 1, dtypes.int)
    lead, one = t.eq(0), UOp.const(1.0).cast(dtypes.float).bitcast(dtypes.uint)
    stored = CUDA.store_chunk(memory.after(UOp.barrier(CUDA.exit_warps(t < 0)))[t * 4], *[one] * 4)
    last = CUDA.named_barrier_sync(UOp.const(1), GROUP, CUDA.fence_proxy_async(stored))
    if taken:
      once = loop(lead.cast(dtypes.weakint) * 2 // 2)
      last = CUDA.take_number(counter[0], number.after(last, once)[0], g, last, once).end(once)
    for first in (True, False):
      last = CUDA.tma_reduce_add(o[0], memory[0], 16 * GROUP, UOp.const(first), lead, last)
      last = CUDA.bulk_wait(lead, CUDA.bulk_wait_read(0, lead, last))
    return UOp.group(last).end(t, g).sink(arg=kernel("summed", [], t).arg)

  given = np.zeros(4 * GROUP, np.float32), np.zeros(1, np.int32)
  if taken:
    with pytest.raises(emulator.Race, match="in an order that nothing fixes"):
      launch(body, *given, arch=ARCH)
  else:
    np.testing.assert_array_equal(launch(body, *given, arch=ARCH), 2)


@pytest.mark.parametrize("offset", [0, 4])
def test_stmatrix_stores_what_ldmatrix_loads(offset: int) -> None:
  """Four 8x8 matrices, one below the other; rows must start at multiples of 16 bytes."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, words = threads(32), lds(1, 4 * 64 + 8, dtypes.ushort), reg(2, 4, dtypes.uint)
    stored = CUDA.stmatrix(memory[t * 8 + offset], *(x[t * 4 + i].load() for i in range(4)))
    loaded = CUDA.ldmatrix(words[0], memory.after(UOp.barrier(stored))[t * 8], UOp.barrier(stored))
    stores = [o[t * 4 + i].store(words.after(loaded)[i].load()) for i in range(4)]
    return kernel("stored", stores, t)

  x = np.arange(128, dtype=np.uint32) * 65537
  if offset:
    with pytest.raises(emulator.Misaligned, match="writes a row at an LDS address that is not a multiple of 16"):
      launch(body, x, x, arch=ARCH)
  else:
    np.testing.assert_array_equal(launch(body, x, x, arch=ARCH), x)


def copied(
  *,
  expected: int = 64,
  count: int = 64,
  start: int = 4,
  to: int = 0,
  elected: int = 0,
  waits: bool = True,
  reads: bool = True,
) -> Kernel:
  """A kernel that returns 16 numbers by way of LDS; the keywords each put in a mistake."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, barriers = threads(32), lds(1, 16), lds(2, 1, dtypes.ulong)
    made = CUDA.mbarrier_fence(CUDA.mbarrier_init(barriers[0], 1, t.eq(0)))
    once = loop((t.eq(elected) if elected >= 0 else t < 2).cast(dtypes.weakint) * 2 // 2)
    begun = CUDA.mbarrier_expect(barriers[0], expected, UOp.barrier(made), once)
    loaded = CUDA.bulk_load(memory[to], x[start], count, barriers[0], begun).end(once)
    waited = CUDA.mbarrier_wait(barriers[0], 0, loaded) if waits else loaded
    return kernel("copied", [o[t % 16].store((memory if reads else x).after(waited)[t % 16].load())], t)

  return body


COPIES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "too many bytes expected": ({"expected": 80}, emulator.Divergence, "too few arrivals or bytes: it expects 80"),
  "not waited for": ({"waits": False}, emulator.Unwritten, "while a copy to it is in flight"),
  "never waited for": ({"waits": False, "reads": False}, emulator.Race, "ends while a bulk copy is under way"),
  "of a part of 16 bytes": ({"count": 60}, emulator.Misaligned, "copies 60 bytes, which is not a multiple of 16"),
  "from an address not aligned": ({"start": 2}, emulator.Misaligned, "a global address that is not a multiple of 16"),
  "before the start": ({"start": -4}, emulator.OutOfBounds, r"from argument 1 at byte \[-16\]"),
  "to before the start": ({"to": -16}, emulator.OutOfBounds, r"to LDS 1 .* at byte \[-64\]"),
  "past the end": ({"start": 8}, emulator.OutOfBounds, r"copies 64 bytes from argument 1 at byte \[32\]"),
  "by two lanes": ({"elected": -1}, emulator.KernelError, "copies bytes in 2 lanes; only one may|arrivals"),
}


def test_bytes_are_copied() -> None:
  x = np.arange(20, dtype=np.float32)
  np.testing.assert_array_equal(launch(copied(), x[:16], x, arch=ARCH), x[4:])


@pytest.mark.parametrize("name", COPIES)
def test_a_mistake_in_a_copy_is_an_error(name: str) -> None:
  mistake, error, message = COPIES[name]
  with pytest.raises(error, match=message):
    launch(copied(**mistake), np.zeros(16, np.float32), np.arange(20, dtype=np.float32), arch=ARCH)
