"""`hopper_fused_backward`: gradients that match the oracle, what it serves, and mistakes in what only it has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conformance_backward import BFLOAT, HALF, Case, Machine, Shape
from gradients import check_gradients, gradients_of
from helpers import dispatch_among, inputs
from test_dropout import P, kept_by_seed
from test_features import FEATURES, some
from tinygrad import Tensor, UOp

import uopattn.emulator as emulator
from uopattn.dsl.instructions import Cuda
from uopattn.dsl.nvidia import tma, wgmma
from uopattn.dsl.nvidia.gradient_epilogue import GradientEpilogue
from uopattn.dsl.nvidia.gradient_mainloop import GradientMainloop
from uopattn.dsl.nvidia.key_blocks import KeyBlock, KeyBlocks, QueryTiles
from uopattn.dsl.nvidia.tensor_pipeline import Counter
from uopattn.emulator.tracks import ORDERS, ordered
from uopattn.kernels import hopper_fused_backward
from uopattn.runtime.prepare import compiled

FUSED = Machine("fused", "sm_90", HALF)


def case_of(shape: Shape, options: dict[str, Any] | None = None, machine: Machine = FUSED, **fields: int) -> Case:
  """A case with these fields of its tiles; unless they say otherwise no blocks are shared, as in most long passes.

  Of a problem as small as these all would be.
  """
  case = Case.of(machine, shape, options)
  tiles = replace(case.launches[0].tiles, **{"rest": 0, "parts": 1} | fields)
  launches = (replace(case.launches[0], kernel=x, tiles=tiles) for x in hopper_fused_backward.SCHEDULE.kernels)
  return replace(case, launches=tuple(x for x in launches if x.kernel.when(tiles)))


CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
  "smallest": ((1, 1, 1, 1, 1, 8, 8), {}),
  "grouped, causal": ((2, 4, 2, 150, 200, 24, 40), {"is_causal": True, "q_start": np.array([-20, 3])}),
  "wide": ((1, 2, 2, 130, 270, 128, 72), {}),
  "wide, queries before all keys": ((1, 1, 1, 300, 140, 80, 80), {"window": (None, 5), "q_start": -100}),
  "values wider than keys": ((1, 2, 1, 130, 200, 64, 128), {"is_causal": True}),
  "values far wider than keys": ((1, 1, 1, 70, 130, 40, 184), {}),
  "sinks": ((1, 2, 1, 140, 130, 64, 64), {"is_causal": True, "sinks": np.array([0.5, -1], np.float32)}),
}


@pytest.mark.kinds(name=("smallest", "grouped, causal", "values wider than keys"))
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str) -> None:
  machine = FUSED._replace(dtype=BFLOAT if name == "sinks" else HALF)
  with machine.device():
    case_of(*CASES[name], machine).check()


GROUPED: Shape = (2, 4, 2, 150, 200, 24, 40)  # no whole tile at the end


@pytest.mark.kinds(name=("attn_mask", "score_mod"))
@pytest.mark.parametrize("name", ["attn_mask", "mask_mod", "score_mod", "softcap"])
def test_features(name: str) -> None:
  chosen = some(np.random.default_rng(FEATURES.index(name) % 2), GROUPED, name, "is_causal")
  with FUSED.device():
    case_of(GROUPED, chosen).check()


@pytest.mark.slow
def test_dropout() -> None:
  B, Hq, _, M, N, *_ = GROUPED
  with FUSED.device():
    case_of(GROUPED, {"dropout_p": P, "kept": kept_by_seed((1, 2), B, Hq, M, N)}).check()


@pytest.mark.slow
def test_all_features_that_are_served_together() -> None:
  shape: Shape = (1, 2, 1, 150, 200, 72, 72)
  names = ("attn_mask", "is_causal", "mask_mod", "q_start", "score_mod", "sinks", "softcap")
  with FUSED.device():
    case_of(shape, some(np.random.default_rng(3), shape, *names)).check()


@pytest.mark.slow
def test_a_score_mod_that_is_infinite_past_the_last_query() -> None:
  with FUSED.device():
    case_of((1, 2, 1, 50, 140, 16, 16), {"score_mod": lambda s, b, h, i, j: s + 1.0 / (50 - i)}).check()


SMALL: Shape = (1, 2, 1, 70, 270, 16, 8)  # two blocks of keys, two tiles of each of two heads


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("Dk", [16, pytest.param(72, marks=pytest.mark.slowest)])
def test_each_barrier_and_wait_deleted(Dk: int, persistent: bool) -> None:
  """Some of a kernel's waits for its slots are for later tiles only. Above a head size of 64 all warpgroups meet."""
  with FUSED.device():
    case = case_of((1, 1, 1, 190, 260, Dk, 8), persistent=persistent)
    tried = emulator.delete_each_barrier(case.run, f"attention_backward_1_1_190_260_{Dk}_8")
  assert {x.what for x in tried} >= {
    "barrier",
    "fence_proxy_async",
    "mbarrier_wait",
    "named_barrier_sync",
    "semaphore_wait",
    "wgmma_wait",
  }
  assert [str(x) for x in tried if x.caught is None] == []


Mistake = tuple[object, str, Callable[[Any], Any]]
MISTAKES: dict[str, Mistake] = {
  "semaphores released by nobody": (
    Cuda,
    "semaphore_release",
    lambda right: lambda dialect, semaphore, number, when, *after: right(dialect, semaphore, number + 1, when, *after),
  ),
  "the last block stores dQ": (
    Cuda,
    "tma_reduce_add",
    lambda right: (
      lambda dialect, to, source, count, first, *rest: right(dialect, to, source, count, first.logical_not(), *rest)
    ),
  ),
  "dS not fenced": (Cuda, "fence_proxy_async", lambda right: lambda dialect, *after: UOp.group(*after)),
  "numbers not expected": (tma.Source, "bytes", lambda right: property(lambda self: right.fget(self) - 4)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_by_the_emulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  owner, phase, wrong = MISTAKES[name]
  monkeypatch.setattr(owner, phase, wrong(getattr(owner, phase)))
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(emulator.KernelError, match="kernel attention_backward_2_1"):
    case_of(SMALL).run()
  compiled.cache_clear()


@pytest.mark.parametrize("Dk", [16, 72])
def test_dk_where_ds_is_still_read_is_caught(Dk: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(GradientMainloop, "meet", lambda self, *after: UOp.group(*after))
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(emulator.Race, match="which another wave read, with no barrier between"):
    case_of((1, 1, 1, 60, 260, Dk, 8)).run()
  compiled.cache_clear()


@pytest.mark.parametrize("of", [0, 1])
def test_gradients_that_are_overwritten_while_they_are_stored_are_caught(
  of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  """dK by dS of the next block, and dV by the next one."""
  right = GradientEpilogue.wait

  def wrong(self: GradientEpilogue, which: int, trip: UOp, *after: UOp) -> tuple[UOp, ...]:
    return after if which == of else right(self, which, trip, *after)

  monkeypatch.setattr(GradientEpilogue, "wait", wrong)
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(emulator.Race, match="kernel attention_backward_2_1"):
    case_of(SMALL, persistent=True).run()
  compiled.cache_clear()


def test_gradients_that_are_stored_a_row_late_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  right = tma.TensorMap.store
  late: Any = lambda self, view, first, *rest: right(self, view, first + 1, *rest)  # noqa: E731
  monkeypatch.setattr(tma.TensorMap, "store", late)
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(AssertionError, match="gradient of"):
    case_of((1, 1, 1, 10, 100, 8, 8)).check()
  compiled.cache_clear()


def test_warpgroups_that_do_not_add_dq_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  """Up to a head size of 64 each one adds to what the one before it has."""
  start, clearing = wgmma.start, {wgmma.Form.BY_ROWS_ADDED: wgmma.Form.BY_ROWS}

  def cleared(*operands: Any, form: wgmma.Form = wgmma.Form.SHARED) -> UOp:
    return start(*operands, form=clearing.get(form, form))

  monkeypatch.setattr(wgmma, "start", cleared)
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(AssertionError, match="worst at"):
    case_of((1, 1, 1, 10, 140, 8, 8)).check()
  compiled.cache_clear()


def test_any_order_of_warpgroups_gives_the_same_bits() -> None:
  with FUSED.device():
    case, found = case_of((1, 2, 1, 70, 270, 16, 8), {"is_causal": True, "q_start": 200}), []
    for order in ORDERS:
      with ordered(order):
        found.append(case.run())
  for name, x in found[0].items():
    np.testing.assert_array_equal(found[1][name], x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sections_of_a_head_each(is_causal: bool) -> None:
  with FUSED.device():
    case_of((1, 2, 2, 70, 270, 16, 8), {"is_causal": is_causal, "q_start": 200}, section=1).check()


SHARED: dict[str, tuple[Shape, dict[str, Any]]] = {
  "last blocks of two heads": ((1, 2, 2, 150, 270, 16, 8), {"rest": 2, "parts": 2}),
  "several of a head, a tile each": ((1, 4, 2, 170, 270, 128, 72), {"rest": 5, "parts": 3, "section": 2}),
  "two tiles of keys, sections that differ": ((1, 3, 3, 330, 300, 64, 64), {"rest": 4, "parts": 5, "section": 2}),
  "all blocks": ((1, 1, 1, 140, 300, 72, 72), {"rest": 3, "parts": 2}),
  "causal, parts without tiles": ((1, 4, 2, 250, 270, 16, 8), {"rest": 4, "parts": 3}),
  "causal, two of a head": ((1, 2, 1, 330, 300, 72, 128), {"rest": 2, "parts": 2}),
  "all blocks, a tile each": ((1, 2, 2, 150, 130, 72, 72), {"rest": 4, "parts": 3, "section": 2}),
}


@pytest.mark.kinds(name=("last blocks of two heads", "several of a head, a tile each", "causal, parts without tiles"))
@pytest.mark.parametrize("name", SHARED)
def test_shared_blocks_match_the_oracle(name: str) -> None:
  shape, fields = SHARED[name]
  with FUSED.device():
    case = case_of(shape, {"is_causal": True} if name.startswith("causal") else {}, **fields)
    assert len(case.launches) == 4
    case.check()


PERSISTENT: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
  "an odd number of tiles": ((1, 3, 3, 190, 300, 16, 8), {}, {"multiprocessors": 2}),
  "wide, grouped, causal": ((1, 4, 2, 250, 390, 72, 128), {"is_causal": True, "q_start": -30}, {}),
  "two tiles of keys, sections": ((2, 2, 2, 330, 600, 64, 64), {"is_causal": True}, {"section": 1}),
  "a tile of queries, a block of keys": ((1, 1, 1, 1, 1, 8, 8), {}, {}),
  "shared blocks": ((1, 4, 2, 250, 270, 72, 72), {"is_causal": True}, {"rest": 4, "parts": 3}),
  "the last keys first": ((2, 2, 2, 256, 384, 72, 72), {"is_causal": True}, {"descending": 2}),
}


@pytest.mark.kinds(name=("an odd number of tiles", "wide, grouped, causal", "shared blocks", "the last keys first"))
@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_workgroups_match_the_oracle(name: str) -> None:
  """The emulator's first workgroup takes all blocks, as it runs them one after another."""
  shape, options, fields = PERSISTENT[name]
  with FUSED.device():
    case_of(shape, options, persistent=True, **fields).check()


DESCENDING: dict[str, tuple[Shape, dict[str, Any], int]] = {
  "whole tiles": ((1, 2, 2, 320, 320, 72, 72), {"is_causal": True}, 1),
  "grouped, no whole tile": ((1, 4, 2, 250, 390, 72, 128), {"is_causal": True, "q_start": np.array([-30])}, 1),
  "keys that no query sees": ((1, 3, 3, 128, 700, 16, 16), {"is_causal": True}, 2),
  "queries before all keys": ((1, 2, 2, 300, 140, 80, 80), {"window": (None, 5), "q_start": -100}, 1),
  "no mask": ((1, 2, 2, 130, 270, 16, 8), {}, 2),
}


@pytest.mark.kinds(name=("whole tiles", "grouped, no whole tile"))
@pytest.mark.parametrize("name", DESCENDING)
def test_the_last_keys_first(name: str) -> None:
  shape, options, heads = DESCENDING[name]
  with FUSED.device():
    case_of(shape, options, descending=heads, persistent=True).check()


BY_WARPGROUP: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
  "both orders": ((1, 2, 2, 330, 600, 64, 64), {"is_causal": True}, {"persistent": True, "descending": 1}),
  "both orders, values wider than keys": (
    (1, 2, 2, 320, 300, 64, 72),
    {"is_causal": True},
    {"persistent": True, "descending": 1},
  ),
  "grouped, keys that no query sees": ((1, 4, 2, 150, 400, 24, 40), {"is_causal": True}, {}),
  "shared blocks": ((1, 4, 2, 250, 270, 64, 72), {"is_causal": True}, {"rest": 4, "parts": 3}),
  "keys of one warpgroup": ((1, 1, 1, 200, 60, 64, 72), {"is_causal": True, "q_start": np.array([-70])}, {}),
}


@pytest.mark.kinds(name=("both orders", "shared blocks"))
@pytest.mark.parametrize("name", BY_WARPGROUP)
def test_each_warpgroup_by_its_own_keys(name: str) -> None:
  shape, options, fields = BY_WARPGROUP[name]
  with FUSED.device():
    case_of(shape, options, **fields).check()


@pytest.mark.parametrize(("D", "tiles", "steps", "passed"), [(72, 4 + 2, 26, 0), (64, 4, 40, 2)])
def test_a_warpgroup_passes_over_tiles_that_see_none_of_its_keys(D: int, tiles: int, steps: int, passed: int) -> None:
  """The second one passes over two tiles of the one block; above a head size of 64 it has work in all of them."""
  with FUSED.device(), emulator.profile() as profile:
    case_of((1, 1, 1, 256, 256, D, D), {"is_causal": True}).run()
  count = profile.kernels[f"attention_backward_1_1_256_256_{D}_{D}_causal"].matrix
  assert count == 4 * steps * (2 * tiles - passed)  # by four warps of each of two warpgroups


@pytest.mark.slow
@pytest.mark.parametrize("Dv", [8, 72])
def test_each_barrier_and_wait_deleted_where_a_warpgroup_passes_over_tiles(Dv: int) -> None:
  with FUSED.device():
    case = case_of((1, 1, 1, 260, 260, 16, Dv), {"is_causal": True})
    tried = emulator.delete_each_barrier(case.run, f"attention_backward_1_1_260_260_16_{Dv}_causal")
  assert [str(x) for x in tried if x.caught is None] == []


@pytest.mark.slow
def test_the_last_keys_first_with_a_score_mod() -> None:
  options = some(np.random.default_rng(1), GROUPED, "is_causal", "score_mod")
  with FUSED.device():
    case_of(GROUPED, options, descending=3, persistent=True).check()


def test_tiles_that_only_the_first_block_may_open_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  """From the last keys on, the first block of a head adds to few tiles, and others to tiles to which none has yet."""
  right = KeyBlocks.at

  def wrong(*of: Any) -> KeyBlock:
    block = right(*of)
    return replace(block, first_of=lambda tile: block.turn.eq(0))

  monkeypatch.setattr(KeyBlocks, "at", wrong)
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(emulator.KernelError, match="kernel attention_backward_2_2"):
    case_of(*DESCENDING["whole tiles"][:2], descending=1, persistent=True).run()
  compiled.cache_clear()


def test_persistent_workgroups_that_start_each_block_at_the_first_slot_are_caught(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(Counter, "add", lambda self, n, *after: UOp.group(*after))
  compiled.cache_clear()
  with FUSED.device(), pytest.raises(emulator.KernelError, match="kernel attention_backward_3_3"):
    case_of(PERSISTENT["an odd number of tiles"][0], persistent=True).run()
  compiled.cache_clear()


def test_shared_blocks_with_a_score_mod() -> None:
  rng = np.random.default_rng(0)
  with FUSED.device():
    case_of(GROUPED, some(rng, GROUPED, "attn_mask", "score_mod"), rest=3, parts=2).check()


def test_parts_that_begin_at_the_first_tile_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  right = QueryTiles.part
  monkeypatch.setattr(
    QueryTiles, "part", lambda self, i, parts, when: replace(right(self, i, parts, when), tile=self.tile)
  )
  compiled.cache_clear()
  with FUSED.device(), pytest.raises((emulator.KernelError, AssertionError)):
    case_of((1, 1, 1, 150, 270, 16, 8), rest=1, parts=2).check()
  compiled.cache_clear()


def test_parts_that_are_not_added_are_caught() -> None:
  with FUSED.device():
    case = case_of((1, 1, 1, 150, 270, 16, 8), rest=1, parts=2)
    without = tuple(x for x in case.launches if x.kernel.build is not hopper_fused_backward.add_parts)
    with pytest.raises(AssertionError, match="gradient of"):
      replace(case, launches=without).check()


def test_gradients_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
  """With q, k and v that are views, and a gradient of the LSE."""
  always = replace(hopper_fused_backward.SCHEDULE, preferred=lambda problem, target: True)
  dispatch_among(monkeypatch, [always], backward=True)

  def of_views(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **given: Any) -> dict[str, Tensor]:
    q, k, v = (x.transpose(1, 2).contiguous().realize().transpose(1, 2) for x in (q, k, v))
    return gradients_of(q, k, v, *rest, **given)

  with FUSED.device():
    check_gradients(*inputs(1, 2, 1, 20, 140, 16, 24), {"is_causal": True, "q_start": 100}, run=of_views)


def test_graphs_know_what_instructions_write() -> None:
  with FUSED.device() as device:
    launch = case_of(SMALL, rest=1, parts=2, persistent=True).launches[1]
    slots = {x.name: i for i, x in enumerate(launch.buffers())}
    written = "dq_sum", "dk", "dv", "semaphores", "counter", "dk_parts", "dv_parts"
    assert {slots[name] for name in written} == set(launch.build(device).arg.outs)
