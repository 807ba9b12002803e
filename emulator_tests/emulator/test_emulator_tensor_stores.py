"""Boxes that one lane stores from LDS on the emulator: right, and each mistake an error of its kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA

ARCH = "sm_90"
ROWS, COLUMNS = 8, 64  # of a box
BOX = ROWS * COLUMNS
HEIGHT, WIDTH = 21, 56  # of the matrix
CORNERS = (3, 0), (16, 0)  # of the two boxes, the second of which ends after the matrix
GROUP = 128

Kernel = Callable[..., UOp]


def stored(
  *,
  acquired: bool = True,
  fenced: bool = True,
  read: bool = True,
  pending: int = 0,
  changed: int | None = None,
  rows: int = ROWS,
  start: int = 0,
  elsewhere: bool = False,
  by: Callable[[UOp], UOp] = lambda t: t.eq(0),
  workgroups: int = 1,
  prefetched: bool = False,
  before: int = 0,
) -> Kernel:
  """A kernel that stores two boxes from LDS to a matrix; the keywords each put in a mistake.

  Args:
    pending: boxes whose reading is waited for only at the end, after one of them is `changed`.
  """

  def body(o: UOp, x: UOp) -> UOp:
    t, g, memory = threads(GROUP), groups(workgroups), lds(1, 2 * BOX + COLUMNS, dtypes.ushort)
    map_ = lds(2, 32, dtypes.uint)[0], 0, o[0], (WIDTH, HEIGHT, 1, 1), (WIDTH, 8, 8), ROWS
    ready = UOp.barrier(CUDA.tensor_map(*map_, (t // 32).eq(0)))
    ready = CUDA.tensor_map_acquire(0, ready) if acquired else ready
    ready = CUDA.exit_warps(t < 0, ready)
    written = []
    for i in range(2 * BOX // GROUP):
      at = t + i * GROUP
      row, column = at // COLUMNS, at % COLUMNS
      to = row * COLUMNS + (column // 8 ^ row % 8) * 8 + column % 8
      written.append(memory.after(ready)[to.valid(row % ROWS < rows)].store(x[at].load()))
    last = CUDA.fence_proxy_async(*written) if fenced else UOp.group(*written)
    last = CUDA.named_barrier_sync(UOp.const(1), GROUP, last)
    for i, (row, column) in enumerate(CORNERS):
      corner = (UOp.const(column), g + row - before, UOp.const(0), UOp.const(0))
      if prefetched:
        last = CUDA.tma_prefetch(0, corner, by(t), last)
      else:
        last = CUDA.tma_store((x if elsewhere else o)[0], 0, memory[i * BOX + start], corner, by(t), last)
    last = CUDA.bulk_wait_read(pending, t.eq(0), last) if read else last
    if changed is not None:
      last = memory.after(last)[changed * BOX + 4 * COLUMNS + t % 32].store(UOp.const(0, dtypes.ushort))
      last = CUDA.bulk_wait_read(0, t.eq(0), last)
    return UOp.group(last).end(t, g).sink(arg=kernel("stored", [], t).arg)

  return body


def run(body: Kernel) -> tuple[np.ndarray, np.ndarray]:
  x = np.arange(1, 2 * BOX + 1, dtype=np.uint16)
  return launch(body, np.zeros(HEIGHT * WIDTH, np.uint16), x, arch=ARCH), x.reshape(2, ROWS, COLUMNS)


@pytest.mark.parametrize("options", [{}, {"pending": 1, "changed": 0}])
def test_boxes_are_stored_as_far_as_the_matrix_goes(options: dict[str, Any]) -> None:
  """Also if the first one changes while only the second one is still read."""
  got, x = run(stored(**options))
  expected = np.zeros((HEIGHT, WIDTH), np.uint16)
  expected[3 : 3 + ROWS], expected[16:] = x[0, :, :WIDTH], x[1, : HEIGHT - 16, :WIDTH]
  np.testing.assert_array_equal(got.reshape(HEIGHT, WIDTH), expected)


def test_a_prefetch_stores_nothing() -> None:
  assert not run(stored(prefetched=True))[0].any()


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "map not acquired": ({"acquired": False}, emulator.Race, "uses tensor map 0 without tensor_map_acquire"),
  "prefetched without a map": (
    {"acquired": False, "prefetched": True},
    emulator.Race,
    "uses tensor map 0 without tensor_map_acquire",
  ),
  "prefetched by all": ({"by": lambda t: t >= 0, "prefetched": True}, emulator.Divergence, "prefetches a box in"),
  "not fenced": ({"fenced": False}, emulator.Race, "to copy it, written without a fence_proxy_async since"),
  "not waited for": ({"read": False}, emulator.Race, "ends while a bulk copy reads LDS"),
  "the last one not waited for": ({"pending": 1}, emulator.Race, "ends while a bulk copy reads LDS"),
  "changed while it is read": ({"pending": 1, "changed": 1}, emulator.Race, "overwritten before the wait"),
  "a row not written": ({"rows": ROWS - 1}, emulator.Unwritten, "nothing has written"),
  "box not aligned": ({"start": COLUMNS}, emulator.Misaligned, "stores a box from an LDS address that is not"),
  "begins before the matrix": ({"before": 4}, emulator.OutOfBounds, r"a box from \[0, -1, 0, 0\] on, before the"),
  "another buffer": ({"elsewhere": True}, emulator.LaunchError, "stores to argument 1 by a map of argument 0"),
  "stored by all": ({"by": lambda t: t >= 0}, emulator.Divergence, "in several lanes at once"),
  "stored by two workgroups": ({"workgroups": 2}, emulator.Race, "to which another workgroup stores too"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str) -> None:
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(stored(**mistake))
