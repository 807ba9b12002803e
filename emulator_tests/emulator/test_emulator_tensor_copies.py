"""Copies of boxes by a producer's warpgroup on the emulator: right, and each mistake an error of its kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, reg, threads
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA
from uopattn.emulator.tracks import ORDERS

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
  room: int = 0,
) -> Kernel:
  """A kernel that returns box 2 of a matrix by way of LDS; the keywords each put in a mistake."""

  def body(o: UOp, x: UOp) -> UOp:
    t, memory, barriers = threads(2 * GROUP), lds(1, ROWS * COLUMNS + COLUMNS, dtypes.ushort), lds(2, 1, dtypes.ulong)
    made = CUDA.mbarrier_init(barriers[0], 1, t.eq(0))
    made = CUDA.mbarrier_fence(made) if fence else made
    map_ = lds(3, 64, dtypes.uint)[room], 0, x[first], (COLUMNS, height, 1, 1), (pitch, 8, 8), ROWS
    when = (t // 32).eq(builder) if builder >= 0 else t.eq(0)
    built = CUDA.tensor_map(*map_, when) if mapped else made
    ready = UOp.barrier(made, built) if met else UOp.group(made, built)
    known = CUDA.tensor_map_acquire(0, ready) if acquired else ready
    once = loop((t.eq(elected) if elected >= 0 else t >= GROUP).cast(dtypes.weakint) * 2 // 2)
    begun = CUDA.mbarrier_expect(barriers[0], expected, known, once)
    corner = (UOp.const(0), UOp.const(2 * ROWS), UOp.const(0), UOp.const(0))
    loaded = CUDA.tma_load(memory[to], 0, barriers[0], corner, False, begun).end(once)
    consumers = CUDA.exit_warps(t >= GROUP, loaded)
    waited = memory.after(CUDA.mbarrier_wait(barriers[0], parity, consumers))
    stores = []
    for i in range(ROWS * COLUMNS // GROUP):
      at = t % GROUP + i * GROUP
      stores.append(o[at].store(waited[swizzled(at)].load()))
    return kernel("copied", stores, t)

  return body


def swizzled(at: UOp) -> UOp:
  """Where an element of a box is in LDS."""
  row, column = at // COLUMNS, at % COLUMNS
  return row * COLUMNS + (column // 8 ^ row % 8) * 8 + column % 8


def run(body: Kernel) -> tuple[np.ndarray, np.ndarray]:
  x = np.arange(1, HEIGHT * COLUMNS + 1, dtype=np.uint16)
  return launch(body, np.zeros(ROWS * COLUMNS, np.uint16), x, arch=ARCH), x.reshape(HEIGHT, COLUMNS)


def test_a_box_is_copied_with_zeros_for_rows_that_do_not_exist() -> None:
  got, x = run(copied())
  expected = np.zeros((ROWS, COLUMNS), np.uint16)
  expected[: HEIGHT - 2 * ROWS] = x[2 * ROWS :]
  assert (got.reshape(ROWS, COLUMNS) == expected).all()


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "barrier not fenced": ({"fence": False}, emulator.Race, "a barrier that was initialised without mbarrier_fence"),
  "map not built": ({"mapped": False}, emulator.Unwritten, "uses tensor map 0, which nothing has built"),
  "map not acquired": ({"acquired": False}, emulator.Race, "uses tensor map 0 without tensor_map_acquire"),
  "nobody met": (
    {"met": False, "builder": GROUP // 32},
    emulator.Race,
    "uses a tensor map that another wave built, with no workgroup barrier in between",
  ),
  "too many bytes expected": ({"expected": 1040}, emulator.Divergence, "too few arrivals or bytes: it expects 1040"),
  "too few bytes expected": ({"expected": 1008}, emulator.Divergence, "too few arrivals or bytes: it expects 1008"),
  "the phase before": ({"parity": 1}, emulator.Unwritten, "which nothing has written"),
  "box not aligned": ({"to": 64}, emulator.Misaligned, "copies a box to an LDS address that is not"),
  "box before the start": ({"to": -ROWS * COLUMNS}, emulator.OutOfBounds, r"LDS 1 .* at byte \[-1024\]"),
  "box past the end": ({"to": ROWS * COLUMNS}, emulator.OutOfBounds, r"copies a box to LDS 1 .* at byte \[1024\]"),
  "address not aligned": ({"first": 4, "height": 5}, emulator.Misaligned, "builds a tensor map of a global address"),
  "address before the start": ({"first": -COLUMNS}, emulator.OutOfBounds, r"map of argument 1 at byte \[-128\]"),
  "map at a bad address": ({"room": 1}, emulator.Misaligned, "map at an LDS address that is not a multiple of 128"),
  "stride not aligned": ({"pitch": 60}, emulator.Misaligned, "builds a tensor map with strides of"),
  "matrix of no rows": ({"height": 0}, emulator.OutOfBounds, r"builds a tensor map of \[64, 0, 1, 1\]"),
  "matrix past the buffer": (
    {"height": HEIGHT + 1},
    emulator.OutOfBounds,
    r"builds a tensor map of argument 1 at byte \[0\]",
  ),
  "map built by a lane": ({"builder": -1}, emulator.Divergence, "in lanes that are not exactly one whole warp"),
  "box copied by all lanes": (
    {"elected": -1},
    emulator.KernelError,
    "copies a box in 128 lanes; only one may|arrivals",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str) -> None:
  mistake, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(copied(**mistake))


def two_boxes(
  consumers: int, workgroups: int = 1, producer: bool = True, skipped: tuple[int, int] | None = None, meet: bool = False
) -> Kernel:
  """A kernel whose consumers, warpgroups, each return the two boxes of a matrix.

  skipped: the consumer that does not wait for a box, and that box; meet: whether consumers meet after their waits.
  """

  def body(o: UOp, x: UOp) -> UOp:
    t, g = threads((consumers + producer) * GROUP), groups(workgroups)
    memory, barriers = lds(1, 2 * ROWS * COLUMNS, dtypes.ushort), lds(2, 2, dtypes.ulong)
    made = CUDA.mbarrier_fence(UOp.group(*[CUDA.mbarrier_init(barriers[i], 1, t.eq(0)) for i in range(2)]))
    map_ = lds(3, 64, dtypes.uint)[0], 0, x[0], (COLUMNS, 2 * ROWS, 1, 1), (COLUMNS, 8, 8), ROWS
    last = CUDA.tensor_map_acquire(0, UOp.barrier(made, CUDA.tensor_map(*map_, (t // 32).eq(0))))
    once = loop(t.eq(consumers * GROUP if producer else 0).cast(dtypes.weakint) * 2 // 2)
    for i in range(2):
      last = CUDA.mbarrier_expect(barriers[i], 2 * ROWS * COLUMNS, last, once)
      corner = (UOp.const(0), UOp.const(i * ROWS), UOp.const(0), UOp.const(0))
      last = CUDA.tma_load(memory[i * ROWS * COLUMNS], 0, barriers[i], corner, False, last)
    last = last.end(once)
    last = CUDA.exit_warps(t >= consumers * GROUP, last) if producer else last
    for i in range(2):
      who = skipped[0] if skipped is not None and skipped[1] == i else consumers
      trips = loop((t // GROUP).ne(who).cast(dtypes.weakint) * 2 // 2, 200 + i)
      last = CUDA.mbarrier_wait(barriers[i], 0, last, trips).end(trips)
    last = CUDA.named_barrier_sync(UOp.const(1), consumers * GROUP, last) if meet else last
    first, stores = (g * consumers + t // GROUP) * 2 * ROWS * COLUMNS, []
    for i in range(2 * ROWS * COLUMNS // GROUP):
      at = t % GROUP + i * GROUP
      stores.append(o[first + at].store(memory.after(last)[swizzled(at)].load()))
    return kernel("two_boxes", stores, t, g)

  return body


def run_two_boxes(copies: int, body: Kernel) -> None:
  """Fails unless each of so many outputs is the matrix."""
  x = np.arange(2 * ROWS * COLUMNS, dtype=np.uint16)
  assert (launch(body, np.zeros(copies * x.size, np.uint16), x, arch=ARCH).reshape(copies, -1) == x).all()


def test_boxes_are_copied_without_a_producer() -> None:
  run_two_boxes(2, two_boxes(1, workgroups=2, producer=False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("skipped", [(w, i) for w in range(3) for i in range(2)], ids=str)
def test_a_consumer_that_does_not_wait_is_an_error(
  skipped: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  """For one of the boxes, while it waits for the other one and the others wait for both."""
  monkeypatch.setenv("EMU_ORDER", order)
  with pytest.raises(
    emulator.KernelError, match=r"reads LDS 1 .* (without a wait for it|in flight|nothing has written)"
  ):
    run_two_boxes(3, two_boxes(3, skipped=skipped))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("skipped", [None, (1, 0)], ids=["waits", "is told"])
def test_a_consumer_may_be_told_by_others(
  skipped: tuple[int, int] | None, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("EMU_ORDER", order)
  run_two_boxes(3, two_boxes(3, skipped=skipped, meet=skipped is not None))


def test_an_unknown_order_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("EMU_ORDER", "middle")
  with pytest.raises(ValueError, match="EMU_ORDER=middle: must be one of last, first"):
    run(copied())


# what whole warps and warpgroups do


def statement(make: Callable[[UOp, UOp], UOp], warpgroups: int = 2) -> Kernel:
  """A kernel of warpgroups that adds 1 to each number; `make` returns a statement on the thread before it."""

  def body(o: UOp, x: UOp) -> UOp:
    t = threads(warpgroups * GROUP)
    done = make(t, lds(1, warpgroups * GROUP))
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
    "256 threads arrive at a barrier for 160",
  ),
  "a barrier of several numbers": (
    lambda t, m: CUDA.named_barrier_sync(UOp.const(1), (t % 32 < 16).where(UOp.const(GROUP), 2 * GROUP)),
    "or at several barriers at once",
  ),
  "nobody waits": (
    lambda t, m: CUDA.named_barrier_arrive(UOp.const(1), 2 * GROUP, t >= 0),
    "completes barrier 1 without anyone waiting",
  ),
  "a part of a warp": (
    lambda t, m: CUDA.named_barrier_arrive(UOp.const(1), 2 * GROUP, t < 16),
    "arrives at a named barrier with part of a warp",
  ),
  "a part of a warpgroup ends": (lambda t, m: CUDA.exit_warps(t < 32), "ends a part of a warpgroup"),
  "registers of a warp": (
    lambda t, m: CUDA.setmaxnreg_dec(40, t < 32, apart(t)),
    "sets registers of a part of a warpgroup",
  ),
  "barriers 0 to 15": (
    lambda t, m: CUDA.named_barrier_sync(UOp.const(16), 2 * GROUP),
    "arrives at barrier 16, and there are only 0 to 15",
  ),
  "a barrier of less than a warp": (
    lambda t, m: CUDA.named_barrier_arrive(UOp.const(1), GROUP + 8, t < GROUP),
    "arrives at a barrier for 136 threads, which are not whole warps",
  ),
  "registers kept that it has not": (
    lambda t, m: CUDA.setmaxnreg_dec(48, t < GROUP, CUDA.setmaxnreg_dec(40, t < GROUP, apart(t))),
    "keeps 48 registers where it has 40",
  ),
  "registers taken that it has": (
    lambda t, m: CUDA.setmaxnreg_inc(48, CUDA.setmaxnreg_inc(240, apart(t))),
    "takes 48 registers where it has 240",
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


@pytest.mark.parametrize("count", [128, 136])
def test_more_registers_than_there_are_is_an_error(count: int) -> None:
  """Four warpgroups begin with 128 registers a lane."""
  x = np.arange(4 * GROUP, dtype=np.float32)
  body = statement(lambda t, m: CUDA.setmaxnreg_inc(count, apart(t)), 4)
  if count == 128:
    assert (launch(body, x, x, arch=ARCH) == x + 1).all()
  else:
    with pytest.raises(emulator.Divergence, match=r"needs more than 65536 registers in all: \[136, 136, 136, 136\]"):
      launch(body, x, x, arch=ARCH)


@pytest.mark.parametrize("name", ["statement", "copied"])
def test_barriers_of_warpgroups_are_counted(name: str) -> None:
  """Once when all have come: the three named ones of `in_turns`, or the one of the workgroup."""
  x = np.arange(2 * GROUP, dtype=np.float32)
  with emulator.profile() as profile:
    run(copied()) if name == "copied" else launch(statement(in_turns(0)), x, x, arch=ARCH)
  assert profile.kernels[name].barriers == (1 if name == "copied" else 2)


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
    element = o.after(inside)[t]
    return kernel("vote", [element.store(element.load() + 1).end(i)], t)

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
