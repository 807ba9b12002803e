"""`hopper_forward` with a producer: what it serves, persistent workgroups, and deliberate mistakes in what only it has.

The checks of all kernels, in test_forward, draw tiles with a producer too.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conformance import SUBJECTS, Sizes
from helpers import on_device
from mistakes import HOPPER_BARRIERS, HOPPER_PRODUCER, HOPPER_STORES, NEXT_ROWS, Mistake
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType, Ops

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.nvidia.tensor_pipeline import TensorPipeline
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.softmax import MOST_P
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.hopper_forward import Tiles
from uopattn.plan.dispatch import dispatch
from uopattn.plan.tiles import hopper
from uopattn.runtime.cuda import shared_offsets
from uopattn.runtime.prepare import compiled
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec

HOPPER, ARCH, HALF = SUBJECTS["hopper"], "sm_90", dtypes.half
PRODUCER, PERSISTENT = Tiles(2, 16, 2, producer=True), Tiles(2, 16, 2, producer=True, persistent=True)
IN_REGISTERS = Tiles(2, 16, 2, producer=True, persistent=True, q_stages=2, in_registers=True)
STORING = Tiles(3, 32, 2, producer=True, persistent=True, tma_store=True)
SIZES = (2, 4, 2, 150, 90, 24, 16)  # 16 jobs
SPARE = np.log2(MOST_P)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TensorPipeline]]:
  """A list with an entry for each kernel that has been built with a producer."""
  found: list[TensorPipeline] = []
  start = TensorPipeline.start

  def noted(self: TensorPipeline, **options: Any) -> UOp:
    found.append(self)
    return start(self, **options)

  monkeypatch.setattr(TensorPipeline, "start", noted)
  compiled.cache_clear()
  yield found
  compiled.cache_clear()


N = SIZES[4]
FEATURES: dict[str, dict[str, Any]] = {
  "of positions": {"window": (20, 5), "sinks": np.arange(4, dtype=np.float32), "q_start": np.array([-9, 60])},
  "of scores": {"softcap": 2.0, "score_mod": lambda score, b, h, i, j: score - 0.1 * h * (i - j), "is_causal": True},
  "of keys": {"attn_mask": np.random.default_rng(0).random((1, 1, SIZES[3], N)) < 0.5},
}


def test_each_warpgroup_begins_at_its_own_tile(brought: list[TensorPipeline]) -> None:
  """Blocks whose warpgroups see different tiles, the last block with two that have no queries."""
  options: dict[str, Any] = {"window": (None, 5), "q_start": np.array([-9, 60])}
  with HOPPER.on(ARCH, Tiles(3, 32, 2, producer=True, persistent=True, q_stages=2)):
    given = {key: on_device(x) for key, x in options.items()}
    HOPPER.check(*HOPPER.inputs(ARCH, (2, 4, 2, 200, 230, 24, 16), HALF), given, **options)
  assert brought


@pytest.mark.each("tiles", "causal", "base2", evenly=True)
@pytest.mark.parametrize(
  "tiles", [PERSISTENT, IN_REGISTERS, Tiles(2, 16, 2)], ids=["persistent", "in registers", "copied"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("base2", [0.5 * SPARE, 1.5 * SPARE, 40 * SPARE])
def test_maxima_that_grow_from_tile_to_tile(tiles: Tiles, causal: bool, base2: float) -> None:
  """Of half of the rows, by less and by more than m_i may be too low; of the other half they fall."""
  M, N = SIZES[3:5]
  q, k, v = HOPPER.inputs(ARCH, SIZES, HALF)
  steps = np.arange(N, dtype=np.float32) // tiles.block_n  # the tile of a key
  sign = np.where(np.arange(M) % 2, -1.0, 1.0).astype(np.float32)
  queries, keys = (x.numpy().astype(np.float32) * 0.5 for x in (q, k))
  queries[..., 0], keys[..., 0] = sign, steps
  scale = float(base2 * np.log(2))
  queries[..., 1:] /= max(1.0, scale)
  with HOPPER.on(ARCH, tiles):
    q, k = (Tensor(x).cast(HALF).realize() for x in (queries, keys))
    HOPPER.check(q, k, v, is_causal=causal, scale=scale)


def test_full_tiles_are_processed_from_the_last_one_back() -> None:
  key_range = TileRange(UOp.const(3), UOp.const(5), lambda position: position + 10).full_backwards()
  assert [key_range.tile(UOp.const(i)).simplify().arg for i in range(5)] == [12, 11, 10, 13, 14]


def test_the_few_weights_that_dropout_keeps_stay_within_float16() -> None:
  """P of 239, relative to an m_i that need not change for it, times dropout's 500 would be infinite in float16."""
  scores = np.zeros(96, np.float32)
  for tile in range(1, 5):  # neither the first nor the last one, of which one gives m_i; one key for each lane
    scores[16 * tile : 16 * tile + 8 : 2] = math.log(239)
  queries, keys = np.zeros((2, 8, 64, 16), np.float32), np.zeros((2, 8, 96, 16), np.float32)
  queries[..., 0], keys[..., 0] = 1, scores
  with HOPPER.on(ARCH, PERSISTENT), Context(TRAINING=1):
    Tensor.manual_seed(0)
    q, k = (Tensor(x).cast(HALF).realize() for x in (queries, keys))
    out = attention(q, k, k, scale=1.0, dropout_p=0.998, backend="kernel").numpy()
  assert np.isfinite(out).all()
  assert (out > 0).any()


@pytest.mark.each("tiles", "sizes", "causal", evenly=True)
@pytest.mark.parametrize(
  "tiles",
  [replace(PRODUCER, tma_store=True), replace(IN_REGISTERS, tma_store=True), STORING],
  ids=["producer", "in registers", "three warpgroups"],
)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 200, 90, 24, 16), (1, 2, 2, 77, 131, 72, 72), (1, 1, 1, 300, 40, 24, 136)])
@pytest.mark.parametrize("causal", [False, True])
def test_output_by_tma(tiles: Tiles, sizes: Sizes, causal: bool) -> None:
  """Under a mask the first block of 200 queries, with three warpgroups, begins before query 0."""
  with HOPPER.on(ARCH, tiles):
    HOPPER.check(*HOPPER.inputs(ARCH, sizes, HALF), is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
  ("dtype", "D", "expected"),
  [(HALF, 64, True), (HALF, 128, True), (HALF, 192, False), (HALF, 256, False), (dtypes.fp8e4m3, 128, True)],
)
def test_output_is_stored_by_tma_where_shared_memory_has_room(
  dtype: DType, D: int, expected: bool, causal: bool
) -> None:
  masks, target = (Window(None, 0),) if causal else (), Target("CUDA", ARCH)
  launch = dispatch(AttentionSpec(4, 32, 32, 4096, 4096, D, D, dtype, 1.0, masks=masks), target)
  assert launch.tiles.tma_store == expected
  used = shared_offsets(tuple(launch.graph().toposort()))[1]
  assert launch.tiles.shared_bytes(D, D) <= used <= target.lds


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, brought: list[TensorPipeline]) -> None:
  with HOPPER.on(ARCH, PERSISTENT):
    given = {key: on_device(x) for key, x in FEATURES[name].items()}
    HOPPER.check(*HOPPER.inputs(ARCH, SIZES, HALF), given, **FEATURES[name])
  assert brought


def test_views_with_heads_last(brought: list[TensorPipeline]) -> None:
  with HOPPER.on(ARCH, PRODUCER):
    q, k, v = (x.transpose(1, 2).contiguous().realize().transpose(1, 2) for x in HOPPER.inputs(ARCH, SIZES, HALF))
    HOPPER.check(q, k, v)
  assert brought


def test_what_tensor_maps_cannot_describe_is_copied_by_all_threads(brought: list[TensorPipeline]) -> None:
  """Lengths that only the GPU knows, and rows whose starts are no multiples of 16 bytes."""
  with HOPPER.on(ARCH, PERSISTENT):
    q, k, v = HOPPER.inputs(ARCH, SIZES, HALF)
    lengths = np.array([50, 90])
    HOPPER.check(q, k, v, {"kv_lengths": on_device(lengths)}, kv_lengths=lengths)
    wide = k.pad(((0, 0), (0, 0), (0, 0), (0, 4))).contiguous().realize()
    HOPPER.check(q, wide[..., : SIZES[5]], v)
  assert not brought


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, True),
    ({"masks": (Window(None, 0),)}, True),
    ({"features": ("q_start", "sinks")}, True),
    ({"features": ("softcap",)}, False),
    ({"features": ("kv_lengths",)}, False),
    ({"features": ("sinks", "attn_mask")}, False),
    ({"layouts": (("k", Layout(128 * 4096 * 132, 0, (32 * 4096 * 132, 4096 * 132, 132, 1))),)}, False),
  ],
)
def test_tiles_have_a_producer_where_tensor_maps_and_registers_suffice(options: dict[str, Any], expected: bool) -> None:
  spec = AttentionSpec(4, 32, 32, 4096, 4096, 128, 128, HALF, 1.0, **options)
  assert next(hopper.forward(spec, Target("CUDA", ARCH))).producer == expected


def test_rows_that_all_threads_copy_fit_in_shared_memory() -> None:
  """Their tiles have rows past the end to which the last threads copy."""
  for D in range(8, 257, 8):
    k = Layout(128 * 4096 * (D + 4), 0, (32 * 4096 * (D + 4), 4096 * (D + 4), D + 4, 1))
    for masks in ((), (Window(None, 0),)):
      spec = AttentionSpec(4, 32, 32, 4096, 4096, D, D, HALF, 1.0, masks=masks, layouts=(("k", k),))
      for tiles in hopper.forward(spec, Target("CUDA", ARCH)):
        assert not tiles.producer
        assert tiles.shared_bytes(D, D) <= lds_limit(ARCH)


@pytest.mark.parametrize("count", [114, 132])
def test_there_are_as_many_persistent_workgroups_as_multiprocessors(count: int) -> None:
  launch = dispatch(AttentionSpec(4, 32, 32, 4096, 4096, 128, 128, HALF, 1.0), Target("CUDA", ARCH, units=count))
  assert launch.tiles.persistent
  groups = [u for u in launch.graph().toposort() if u.op is Ops.RANGE and u.arg[-1] is AxisType.GLOBAL]
  assert math.prod(int(u.vmax) + 1 for u in groups) == count


def number(x: UOp) -> int:
  """The value of a constant expression."""
  x = x.simplify()
  assert x.vmin == x.vmax
  return int(x.vmin)


@pytest.mark.parametrize("longest_last", [False, True])
@pytest.mark.parametrize(("heads", "blocks", "cached"), [(7, 5, 100), (13, 4, 5), (25, 8, 6), (1, 1, 1), (3, 44, 1)])
def test_every_job_is_done_once_and_workgroups_do_as_much(
  heads: int, blocks: int, cached: int, longest_last: bool
) -> None:
  for persistent in (False, True):
    scheduler = TileScheduler.of(heads, blocks, cached, longest_last, 6, persistent)
    done, work = Counter[tuple[int, ...]](), [0] * scheduler.workgroups
    for workgroup in range(scheduler.workgroups):
      for trip in range(number(scheduler.trips(UOp.const(workgroup)))):
        head, block = map(number, scheduler.work_tile(UOp.const(workgroup), UOp.const(trip)))
        done[head, block] += 1
        work[workgroup] += block + 1 if longest_last else 1
    assert done == Counter((head, block) for head in range(heads) for block in range(blocks))
    if not persistent:  # each starts where one has ended
      ends = [0] * 6
      for x in work:
        heapq.heapreplace(ends, ends[0] + x)
      work = ends
    assert max(work) - sum(work) / len(work) <= (blocks if longest_last and persistent else 1)


@pytest.mark.parametrize("name", HOPPER_PRODUCER)
def test_a_mistake_is_caught(name: str) -> None:
  caught(HOPPER_PRODUCER[name], AssertionError, "worst at")


@pytest.mark.parametrize("name", HOPPER_BARRIERS)
def test_a_mistake_is_seen_by_the_emulator(name: str) -> None:
  caught(HOPPER_BARRIERS[name], emulator.KernelError, "kernel attention")


def test_output_by_tma_where_the_next_rows_belong_is_caught() -> None:
  caught(NEXT_ROWS, AssertionError, "worst at", STORING)


@pytest.mark.parametrize("name", HOPPER_STORES)
def test_a_mistake_in_output_by_tma_is_seen_by_the_emulator(name: str) -> None:
  caught(HOPPER_STORES[name], emulator.KernelError, "kernel attention", STORING)


def caught(mistake: Mistake, error: type[Exception], message: str, tiles: Tiles = PERSISTENT) -> None:
  with HOPPER.on(ARCH, tiles), mistake.made(), pytest.raises(error, match=message):
    HOPPER.check(*HOPPER.inputs(ARCH, (2, 2, 2, 150, 150, 72, 24), HALF), is_causal=True)


def test_each_wait_between_jobs_deleted() -> None:
  """Of jobs with one tile each, for which no wait stands for another's with both numbers of slots."""
  tried = []
  for stages in (2, 3):
    with HOPPER.on(ARCH, Tiles(1, 16, stages, producer=True, persistent=True, q_stages=2, tma_store=True)):
      sources = HOPPER.inputs(ARCH, (1, 2, 2, 130, 16, 24, 24), HALF)
      tried.append(emulator.delete_each_barrier(lambda: attention(*sources, backend="kernel").realize()))
  found = Counter(x.what for x in tried[0])
  assert found["mbarrier_wait"] == 6  # for q, k and v: that they have come, and are free
  assert (found["bulk_wait_read"], found["named_barrier_sync"]) == (2, 2)  # for o
  assert [str(two) for two, three in zip(*tried, strict=True) if two.caught is three.caught is None] == []


def test_each_wait_where_warpgroups_pass_over_tiles_of_the_next_job_deleted() -> None:
  """No wait stands for the producer's at the slot of queries where a job has several tiles; the test above has it."""
  with HOPPER.on(ARCH, Tiles(2, 16, 2, producer=True, persistent=True)):
    sources = HOPPER.inputs(ARCH, (1, 3, 3, 250, 250, 24, 24), HALF)
    tried = emulator.delete_each_barrier(lambda: attention(*sources, backend="kernel", is_causal=True).realize())
  assert [x.what for x in tried if x.caught is None] == ["mbarrier_wait"]
