"""Barriers that count arrivals, on the emulator: what they order, and each mistake an error of its kind."""

from typing import Any

import numpy as np
import pytest
from emulator_kernels import kernel, launch, lds, loop, threads
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program_cache
from tinygrad.uop.ops import Ops

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA

COUNT = 64  # threads: two waves
NAME = "reversed_at_a_barrier"


def reverse(*, make=None, sync=True, arrivals=COUNT, arrive=None, parity=0, at=0, in_lds=True):
  """o[t] = x[63 - t] through LDS, in which only the mbarrier orders the waves; the keywords each put in a mistake."""

  def body(o, x):
    t, memory, barriers = threads(COUNT), lds(1, COUNT, dtypes.uint), lds(2, 1, dtypes.ulong)
    barrier = barriers[at] if in_lds else x[at]
    made = () if make is False else (CUDA.mbarrier_init(barrier, arrivals, t.eq(0)),)
    if make == "twice":
      again = loop(2)
      made = (CUDA.mbarrier_init(barrier, arrivals, t.eq(0), again).end(again),)
    ready = UOp.barrier(UOp.group(*made)) if sync else UOp.group(*made)
    stored = CUDA.store_word(memory.after(ready)[t], x[t].load())  # before a plain load tinygrad puts a barrier
    done = CUDA.mbarrier_arrive(barrier, t >= 0 if arrive is None else arrive(t), stored)
    done = CUDA.mbarrier_wait(barrier, parity, done)
    return kernel(NAME, [o[t].store(memory.after(done)[COUNT - 1 - t].load())], t)

  return body


def run(**mistake: Any) -> tuple[np.ndarray, np.ndarray]:
  x = np.arange(COUNT, dtype=np.uint32)
  return launch(reverse(**mistake), np.zeros(COUNT, np.uint32), x, arch="sm_90"), x


def test_what_was_stored_before_an_arrival_is_there_after_the_wait():
  got, x = run()
  assert (got == x[::-1]).all()
  program = next(p for p in to_program_cache.values() if p.src[0].arg.name == NAME)
  assert sum(u.op is Ops.BARRIER for u in program.src[1].src) == 1  # the one that makes the mbarrier known


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "never made": ({"make": False}, emulator.Unwritten, r"uses LDS 2 .* as a barrier, but nothing has initialised it"),
  "made twice": ({"make": "twice"}, emulator.Race, "initialises a barrier that exists already and may be in use"),
  "used as it is made": (
    {"sync": False},
    emulator.Race,
    "a barrier that another wave initialised, with no workgroup barrier in between",
  ),
  "only the reader arrives": (
    {"arrivals": 32, "arrive": lambda t: t < 32},
    emulator.Race,
    r"byte \[128, 132, 136, 140\], which another wave wrote, with no barrier between",
  ),
  "too few arrivals": ({"arrive": lambda t: t > 0}, emulator.Divergence, "a phase that has too few arrivals"),
  "more arrivals than threads": ({"arrivals": COUNT + 1}, emulator.Divergence, "a phase that has too few arrivals"),
  "the phase before": ({"parity": 1}, emulator.Divergence, "a phase that has too few arrivals"),
  "not in LDS": ({"in_lds": False}, emulator.OutOfBounds, "uses a barrier at argument 1, which is not in LDS"),
  "past the end": ({"at": 1}, emulator.OutOfBounds, r"uses a barrier at LDS 2 .* at byte \[8\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name):
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(**mistake)
