"""Copies of boxes by a producer's warpgroup on the emulator: right, and each mistake an error of its kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import kernel, launch, lds, loop, reg, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA

ARCH = "sm_90"
ROWS, COLUMNS = 8, 64  # of a box
HEIGHT = 21  # of the matrix, whose last box has 3 rows that do not exist
GROUP = 128  # threads of a warpgroup; the second one is the producer

Kernel = Callable[..., UOp]


def copied(
  *,
  fence: bool = True,
  mapped: bool = True,
  met: bool = True,
  acquired: bool = True,
  expected: int = 2 * ROWS * COLUMNS,
  parity: int = 0,
  to: int = 0,
  first: int = 0,
  pitch: int = COLUMNS,
  height: int = HEIGHT,
  builder: int = 0,
  elected: int = GROUP,
  box: int = 2,
) -> Kernel:
  """A kernel that returns box 2 of a matrix by way of LDS; the keywords each put in a mistake."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, barriers = threads(2 * GROUP), lds(1, ROWS * COLUMNS + COLUMNS, dtypes.ushort), lds(2, 1, dtypes.ulong)
    made = CUDA.mbarrier_init(barriers[0], 1, t.eq(0))
    made = CUDA.mbarrier_fence(made) if fence else made
    room, shape = lds(3, 64, dtypes.uint)[0], (COLUMNS, height, 1, 1)
    when = (t // 32).eq(builder) if builder >= 0 else t.eq(0)
    built = CUDA.tensor_map(room, 0, x[first], shape, (pitch, 8, 8), ROWS, when) if mapped else made
    ready = UOp.barrier(made, built) if met else UOp.group(made, built)
    known = CUDA.tensor_map_acquire(0, ready) if acquired else ready
    once = loop((t.eq(elected) if elected >= 0 else t >= GROUP).cast(dtypes.weakint) * 2 // 2)
    begun = CUDA.mbarrier_expect(barriers[0], expected, known, once)
    place = (UOp.const(0), UOp.const(box * ROWS), UOp.const(0), UOp.const(0))
    loaded = CUDA.tma_load(memory[to], 0, barriers[0], place, False, begun).end(once)
    consumers = CUDA.exit_warps(t >= GROUP, loaded)
    waited = memory.after(CUDA.mbarrier_wait(barriers[0], parity, consumers))
    stores = []
    for i in range(ROWS * COLUMNS // GROUP):
      at = t % GROUP + i * GROUP
      row, column = at // COLUMNS, at % COLUMNS
      swizzled = row * COLUMNS + (column // 8 ^ row % 8) * 8 + column % 8
      stores.append(o[at].store(waited[swizzled].load()))
    return kernel("copied", stores, t)

  return body


def run(body: Kernel) -> tuple[np.ndarray, np.ndarray]:
  x = np.arange(1, HEIGHT * COLUMNS + 1, dtype=np.uint16)
  return launch(body, np.zeros(ROWS * COLUMNS, np.uint16), x, arch=ARCH), x.reshape(HEIGHT, COLUMNS)


def test_a_box_is_copied_with_zeros_for_rows_that_do_not_exist() -> None:
  got, x = run(copied())
  expected = np.zeros((ROWS, COLUMNS), np.uint16)
  expected[: HEIGHT - 2 * ROWS] = x[2 * ROWS :]
  assert (got.reshape(ROWS, COLUMNS) == expected).all()


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "barrier not fenced": ({"fence": False}, emulator.Race, "a barrier that was made without mbarrier_fence"),
  "map not built": ({"mapped": False}, emulator.Unwritten, "uses tensor map 0, which nothing has built"),
  "map not acquired": ({"acquired": False}, emulator.Race, "uses tensor map 0 without tensor_map_acquire"),
  "nobody met": ({"met": False}, emulator.Unwritten, "uses tensor map 0, which nothing has built"),
  "too many bytes expected": ({"expected": 1040}, emulator.Divergence, "too few arrivals or bytes: it expects 1040"),
  "too few bytes expected": ({"expected": 1008}, emulator.Divergence, "too few arrivals or bytes: it expects 1008"),
  "the phase before": ({"parity": 1}, emulator.Unwritten, "which nothing has written"),
  "place not aligned": ({"to": 64}, emulator.OutOfBounds, "copies a box to byte 128"),
  "place past the end": ({"to": ROWS * COLUMNS}, emulator.OutOfBounds, "copies a box to byte 1024"),
  "address not aligned": ({"first": 4, "height": 5}, emulator.OutOfBounds, "builds a tensor map"),
  "stride not aligned": ({"pitch": 60}, emulator.OutOfBounds, "builds a tensor map"),
  "matrix past the buffer": ({"height": HEIGHT + 1}, emulator.OutOfBounds, "builds a tensor map that ends after"),
  "map built by a lane": ({"builder": -1}, emulator.Divergence, "builds a tensor map by other than one whole warp"),
  "box copied by all lanes": ({"elected": -1}, emulator.KernelError, "copies a box 128 times|arrivals"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str) -> None:
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(copied(**mistake))


# what whole warps and warpgroups do


def statement(make: Callable[[UOp, UOp], UOp]) -> Kernel:
  """A kernel of two warpgroups that adds 1 to each number; `make` returns a statement on the thread before it."""

  def body(o: UOp, x: UOp) -> UOp:
    t = threads(2 * GROUP)
    done = make(t, lds(1, 2 * GROUP))
    return kernel("statement", [o[t].store(x.after(done)[t].load() + 1)], t)

  return body


def warpgroup(t: UOp) -> UOp:
  return t // GROUP


def in_turns(first: int) -> Callable[[UOp, UOp], UOp]:
  """Warpgroup 0, then warpgroup 1 meets at its own barrier; `first` gives the first turn."""

  def make(t: UOp, memory: UOp) -> UOp:
    given = CUDA.named_barrier_arrive(UOp.const(1), 2 * GROUP, warpgroup(t).eq(1 if first >= 0 else 2))
    met = CUDA.named_barrier_sync(1 + warpgroup(t), 2 * GROUP, given)
    return CUDA.named_barrier_arrive(UOp.const(2), 2 * GROUP, warpgroup(t).eq(0), met)

  return make


def left(t: UOp, memory: UOp) -> UOp:
  """Leave a loop of 5 trips in the fourth."""
  i = loop(5)
  return memory.after(CUDA.leave_loop(i.eq(3), apart(t), i))[t].store(i.cast(dtypes.float)).end(i)


def handed_on(sees: bool = True) -> Callable[[UOp, UOp], UOp]:
  """Warpgroup 1 writes what it has read, after warpgroup 0 has read it and, if it `sees`, has come to its barrier."""

  def make(t: UOp, memory: UOp) -> UOp:
    room, first = reg(3, 1), warpgroup(t).eq(0)
    filled = UOp.barrier(memory[(t % GROUP).valid(first)].store(1.0))

    def read(when: UOp, *after: UOp) -> UOp:
      return room.after(*after)[0].store(memory.after(*after)[(t % GROUP).valid(when)].load())

    given = CUDA.named_barrier_arrive(UOp.const(2), 2 * GROUP, first, read(first, filled))
    met = CUDA.named_barrier_sync(1 + warpgroup(t), first.where(UOp.const(GROUP), 2 * GROUP), given)
    seen = read(first.logical_not(), met if sees else read(first, filled))
    return memory.after(seen)[(t % GROUP).valid(first.logical_not())].store(2.0)

  return make


def told_by(warp: int) -> Callable[[UOp, UOp], UOp]:
  """Warp 4 writes, then a warp of warpgroup 1 comes to the barrier at which warpgroup 0 waits to read that."""

  def make(t: UOp, memory: UOp) -> UOp:
    words, first, count = lds(3, 2 * GROUP, dtypes.uint), warpgroup(t).eq(0), GROUP + 32
    written = CUDA.store_word(words[t], t.cast(dtypes.uint))
    told = CUDA.named_barrier_arrive(UOp.const(1), count, (t // 32).eq(warp), written)
    met = CUDA.named_barrier_sync(1 + warpgroup(t), first.where(UOp.const(count), GROUP), told)
    read = words.after(met)[(GROUP + t % 32).valid(first)].load()
    return reg(2, 1, dtypes.uint).after(met)[0].store(read)

  return make


RIGHT = {
  "in turns": in_turns(0),
  "told by who wrote": told_by(4),
  "handed on": handed_on(),
  "a loop left": left,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_warpgroups_do_apart(name: str) -> None:
  x = np.arange(2 * GROUP, dtype=np.float32)
  assert (launch(statement(RIGHT[name]), x, x, arch=ARCH) == x + 1).all()


def apart(t: UOp) -> UOp:
  """No warp ends, but warpgroups run apart."""
  return CUDA.exit_warps(t < 0)


WRONG: dict[str, tuple[Callable[[UOp, UOp], UOp], str]] = {
  "no first turn": (in_turns(-1), "waits at barrier 1 of 256 threads, where too few arrive"),
  "a barrier of fewer": (
    lambda t, m: CUDA.named_barrier_sync(UOp.const(1), GROUP + 32),
    "has 256 threads meet at a barrier of 160",
  ),
  "a barrier of several numbers": (
    lambda t, m: CUDA.named_barrier_sync(UOp.const(1), (t % 32 < 16).where(UOp.const(GROUP), 2 * GROUP)),
    "meets at a barrier without whole warps, or at several",
  ),
  "nobody waits": (
    lambda t, m: CUDA.named_barrier_arrive(UOp.const(1), 2 * GROUP, t >= 0),
    "completes barrier 1 without anyone waiting",
  ),
  "a part of a warp": (
    lambda t, m: CUDA.named_barrier_arrive(UOp.const(1), 2 * GROUP, t < 16),
    "meets at a barrier without whole warps",
  ),
  "a part of a warpgroup ends": (lambda t, m: CUDA.exit_warps(t < 32), "ends a part of a warpgroup"),
  "registers of a warp": (
    lambda t, m: CUDA.setmaxnreg_dec(40, t < 32, apart(t)),
    "sets registers of a part of a warpgroup",
  ),
  "registers not in steps of 8": (
    lambda t, m: CUDA.setmaxnreg_dec(44, t < GROUP, apart(t)),
    "not 24 to 256 in steps of 8",
  ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_of_warpgroups_is_an_error(name: str) -> None:
  make, message = WRONG[name]
  x = np.arange(2 * GROUP, dtype=np.float32)
  with pytest.raises(emulator.Divergence, match=message):
    launch(statement(make), x, x, arch=ARCH)


def test_a_write_of_what_another_warpgroup_may_still_read_is_an_error() -> None:
  x = np.arange(2 * GROUP, dtype=np.float32)
  with pytest.raises(emulator.Race, match="which another wave read, with no barrier between"):
    launch(statement(handed_on(sees=False)), x, x, arch=ARCH)


def test_a_barrier_says_nothing_of_who_did_not_come_to_it() -> None:
  x = np.arange(2 * GROUP, dtype=np.float32)
  with pytest.raises(emulator.Race, match="which another wave wrote, with no barrier between"):
    launch(statement(told_by(5)), x, x, arch=ARCH)


def test_a_warp_stays_in_a_loop_for_any_of_its_lanes() -> None:
  """Warp 1 for lane 5 for three trips, warp 6 for lane 8 until all are done, after the fourth."""

  def body(o: UOp, x: UOp) -> UOp:
    t, i = threads(2 * GROUP), loop(9)
    before = o[t].store(x[t].load())
    stays = (t.eq(37) & (i < 3)) | t.eq(200)
    inside = CUDA.leave_loop_unless_any(stays, i > 3, apart(t), before, i)
    place = o.after(inside)[t]
    return kernel("vote", [place.store(place.load() + 1).end(i)], t)

  x = np.arange(2 * GROUP, dtype=np.float32)
  trips = np.repeat([0, 3, 0, 0, 0, 0, 4, 0], 32)
  np.testing.assert_array_equal(launch(body, x, x, arch=ARCH), x + trips)


def test_a_vote_without_whole_warps_is_an_error() -> None:
  def make(t: UOp, memory: UOp) -> UOp:
    i, some = loop(2), loop((t % 32 < 8).cast(dtypes.weakint))
    inside = CUDA.leave_loop_unless_any(t.eq(3), i > 0, apart(t), some, i)
    return memory.after(inside)[t].store(1.0).end(i).end(some)

  x = np.zeros(2 * GROUP, dtype=np.float32)
  with pytest.raises(emulator.Divergence, match="votes without whole warps"):
    launch(statement(make), x, x, arch=ARCH)


def test_a_loop_left_by_a_part_of_the_lanes_is_an_error() -> None:
  def make(t: UOp, memory: UOp) -> UOp:
    i = loop(5)
    return memory.after(CUDA.leave_loop(t < 16, apart(t), i))[t].store(i.cast(dtypes.float)).end(i)

  x = np.arange(2 * GROUP, dtype=np.float32)
  with pytest.raises(emulator.Divergence, match="leaves a loop with a part of the lanes"):
    launch(statement(make), x, x, arch=ARCH)
