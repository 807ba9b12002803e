"""Barriers that count arrivals, on the emulator: what they order, and each mistake an error of its kind."""

from typing import Any

import numpy as np
import pytest
from emulator_kernels import kernel, launch, lds, loop, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA

COUNT = 64  # threads: two waves


def reverse(*, make=None, sync=True, arrivals=COUNT, arrive=None, parity=0, at=0):
  """o[t] = x[63 - t] through LDS, in which the waves meet at a barrier alone; the keywords each put in a mistake."""

  def body(o, x):
    t, memory, barriers = threads(COUNT), lds(1, COUNT), lds(2, 1, dtypes.ulong)
    barrier = barriers[at]
    made = () if make is False else (CUDA.mbarrier_init(barrier, arrivals, t.eq(0)),)
    if make == "twice":
      again = loop(2)
      made = (CUDA.mbarrier_init(barrier, arrivals, t.eq(0), again).end(again),)
    ready = UOp.barrier(UOp.group(*made)) if sync else UOp.group(*made)
    stored = memory.after(ready)[t].store(x[t].load())
    done = CUDA.mbarrier_arrive(barrier, t >= 0 if arrive is None else arrive(t), stored)
    done = CUDA.mbarrier_wait(barrier, parity, done)
    return kernel("reverse", [o[t].store(memory.after(done)[COUNT - 1 - t].load())], t)

  return body


def run(**mistake: Any) -> tuple[np.ndarray, np.ndarray]:
  x = np.arange(COUNT, dtype=np.float32)
  return launch(reverse(**mistake), np.zeros(COUNT, np.float32), x, arch="sm_90"), x


def test_what_was_stored_before_an_arrival_is_there_after_the_wait():
  got, x = run()
  assert (got == x[::-1]).all()


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "never made": ({"make": False}, emulator.Unwritten, "a barrier in LDS 2 .* that nothing has made one"),
  "made twice": ({"make": "twice"}, emulator.Race, "makes a barrier of what is one already"),
  "used as it is made": ({"sync": False}, emulator.Race, "a barrier that another wave made"),
  "too few arrivals": ({"arrive": lambda t: t > 0}, emulator.Divergence, "a phase that has too few arrivals"),
  "more arrivals than threads": ({"arrivals": COUNT + 1}, emulator.Divergence, "a phase that has too few arrivals"),
  "the phase before": ({"parity": 1}, emulator.Divergence, "a phase that has too few arrivals"),
  "past the end": ({"at": 1}, emulator.OutOfBounds, "names a barrier in LDS 2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name):
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(**mistake)
