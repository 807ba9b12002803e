"""The CUDA backward kernels on the emulator: shapes, tiles, barriers, bank conflicts, rules, mistakes.

On sm_90 `hopper_backward` serves head sizes that are multiples of 8; `cuda_backward` serves all else.
"""

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gradients import check_gradients
from helpers import drawn, inputs, on, placed, problem_of
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn.dsl import instructions, sizes
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.nvidia import mma_layout, swizzled
from uopattn.dsl.nvidia.score_gradients import RowStats
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_backward, hopper_backward
from uopattn.kernels.cuda_backward import Tiles
from uopattn.plan.dispatch import dispatch_backward
from uopattn.proof.oracle import Array
from uopattn.spec.spec import AttentionSpec

HALF, BFLOAT, FLOAT = dtypes.float16, dtypes.bfloat16, dtypes.float32
UNIT = {HALF: 2.0**-11, BFLOAT: 2.0**-8, FLOAT: 2.0**-11}  # roundoff; of float32 as tf32 sees it
Problem = tuple[int, int, int, int, int, int]  # heads, kv_heads, M, N, Dk, Dv
NAMES = ("dq", "dk", "dv")


def exact(q: Array, k: Array, v: Array, do: Array, causal: bool) -> tuple[Array, Array, dict[str, Array]]:
  """lse, delta and the gradients in float64, by the definition; all of three dimensions."""
  (heads, M, Dk), (kv_heads, N, Dv) = q.shape, v.shape
  keys, values = (np.repeat(x, heads // kv_heads, 0) for x in (k, v))
  scores = q @ keys.transpose(0, 2, 1) * Dk**-0.5
  scores = np.where(causal & (np.arange(N) > np.arange(M)[:, None]), -np.inf, scores)
  lse = np.log(np.exp(scores).sum(-1))
  p = np.exp(scores - lse[..., None])
  delta = (p @ values * do).sum(-1)
  ds = p * (do @ values.transpose(0, 2, 1) - delta[..., None]) * Dk**-0.5
  dk, dv = ((x.transpose(0, 2, 1) @ y).reshape(kv_heads, -1, N, D).sum(1) for x, y, D in ((ds, q, Dk), (p, do, Dv)))
  return lse, delta, {"dq": ds @ keys, "dk": dk, "dv": dv}


def on_emulator(x: Array, dtype: DType) -> Tensor:
  return placed(x.astype(np.float32), dtype, "EMU")


def launch(
  module: ModuleType, shape: Problem, operands: list[Tensor], tiles: tuple[Any, Any], causal: bool
) -> dict[str, Array]:
  """The gradients as the kernels of a module make them on the emulator, in outputs full of NaN."""
  (heads, kv_heads, M, N, Dk, Dv), dtype = shape, operands[0].dtype
  rules = Rules(M, N, heads, group=heads // kv_heads, scale=Dk**-0.5, window=(None, 0 if causal else None))
  found: dict[str, Array] = {}
  for kernel, own, names in ((module.backward_q, tiles[0], NAMES[:1]), (module.backward_kv, tiles[1], NAMES[1:])):
    sizes = {"dq": (heads, M, Dk), "dk": (kv_heads, N, Dk), "dv": (kv_heads, N, Dv)}
    outputs = [on_emulator(np.full(sizes[name], np.nan), dtype) for name in names]
    fxn = functools.partial(kernel, rules=rules, tiles=own)
    results = Tensor.custom_kernel(*outputs, *operands, fxn=fxn)[: len(names)]
    Tensor.realize(*results)
    found |= {name: x.to("CPU").float().numpy() for name, x in zip(names, results, strict=True)}
  return found


def problem(shape: Problem, dtype: DType, causal: bool) -> tuple[list[Tensor], dict[str, Array]]:
  """q, k, v, do, lse and delta on the emulator, and the gradients."""
  heads, kv_heads, M, N, Dk, Dv = shape
  random = np.random.default_rng(0)
  sizes = ((heads, M, Dk), (kv_heads, N, Dk), (kv_heads, N, Dv), (heads, M, Dv))
  operands = [on_emulator(random.standard_normal(x), dtype) for x in sizes]
  q, k, v, do = (x.to("CPU").float().numpy().astype(np.float64) for x in operands)
  lse, delta, gradients = exact(q, k, v, do, causal)
  return [*operands, on_emulator(lse, FLOAT), on_emulator(delta, FLOAT)], gradients


def check(
  module: ModuleType, shape: Problem, tiles: tuple[Any, Any], dtype: DType = HALF, causal: bool = False
) -> None:
  operands, expected = problem(shape, dtype, causal)
  for name, x in launch(module, shape, operands, tiles, causal).items():
    # P, dS and the result are rounded: errors of this size, and where terms cancel, of the terms'
    error, scale = np.abs(x - expected[name]).max(), np.abs(expected[name]).max()
    assert error <= 6 * UNIT[dtype] * (scale + 1), f"{name}: {error} of {scale}"


Wide = hopper_backward.Tiles
SCHEDULES: dict[str, ModuleType] = {"sm_80": cuda_backward, "sm_90": hopper_backward}
PAIRS: dict[str, list[tuple[Any, Any]]] = {
  "sm_80": [
    (Tiles(2, 2, 32), Tiles(2, 2, 16)),
    (Tiles(2, 1, 64), Tiles(2, 1, 32)),
    (Tiles(1, 1, 32, 3, False), Tiles(3, 1, 16, 3, False)),
  ],
  "sm_90": [(Wide(1, 32), Wide(1, 16, 3)), (Wide(2, 64), Wide(2, 32)), (Wide(1, 16, 4), Wide(1, 64))],
}
SHAPES: dict[str, Problem] = {
  "smallest": (1, 1, 1, 1, 8, 8),
  "round": (1, 1, 64, 64, 64, 64),
  "odd lengths": (2, 2, 77, 131, 40, 24),
  "one query": (2, 2, 1, 150, 64, 64),
  "one key": (2, 1, 70, 1, 16, 16),
  "grouped": (6, 2, 50, 90, 24, 40),
  "large head": (1, 1, 40, 40, 128, 128),
}


@pytest.mark.each("shape", "causal")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", SCHEDULES)
def test_matches_the_definition(arch: str, shape: str, causal: bool) -> None:
  i = list(SHAPES).index(shape)
  with on(arch):
    check(SCHEDULES[arch], SHAPES[shape], PAIRS[arch][i % 3], (HALF, BFLOAT)[(i + causal) % 2], causal)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 1), (2, 2, 77, 131, 33, 17)], ids=["smallest", "odd everywhere"])
def test_any_head_size(shape: Problem) -> None:
  with on("sm_80"):
    check(cuda_backward, shape, PAIRS["sm_80"][0], BFLOAT, True)


def test_tf32() -> None:
  with on("sm_80"):
    check(cuda_backward, (2, 1, 40, 50, 24, 20), (Tiles(2, 1, 32, step=8), Tiles(2, 2, 16, step=8)), FLOAT, True)


@given(
  pair=st.tuples(*[st.builds(Tiles, st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 32, 48]),
                             st.integers(2, 4), st.booleans())] * 2),
  group=st.integers(1, 3),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.sampled_from([1, 8, 15, 24, 40]),
  Dv=st.sampled_from([1, 8, 15, 24, 40]),
  causal=st.booleans(),
)  # fmt: skip
@drawn(4)
def test_any_tiles(pair: tuple[Tiles, Tiles], group: int, M: int, N: int, Dk: int, Dv: int, causal: bool) -> None:
  with on("sm_89"):
    check(cuda_backward, (group, 1, M, N, Dk, Dv), pair, HALF, causal)


@given(
  pair=st.tuples(*[st.builds(Wide, st.integers(1, 2), st.sampled_from([16, 48, 64]), st.integers(2, 4))] * 2),
  group=st.integers(1, 3),
  M=st.integers(1, 200),
  N=st.integers(1, 200),
  Dk=st.sampled_from([8, 40, 72]),
  Dv=st.sampled_from([8, 40]),
  causal=st.booleans(),
)
@drawn(4)
def test_any_tiles_of_warpgroups(
  pair: tuple[Any, Any], group: int, M: int, N: int, Dk: int, Dv: int, causal: bool
) -> None:
  with on("sm_90"):
    check(hopper_backward, (group, 1, M, N, Dk, Dv), pair, HALF, causal)


def run(module: ModuleType, shape: Problem, tiles: tuple[Any, Any], causal: bool = False) -> dict[str, Array]:
  return launch(module, shape, problem(shape, HALF, causal)[0], tiles, causal)


BARRIERS = {
  "sm_80": ((Tiles(2, 1, 16, 3), Tiles(2, 1, 16)), {"barrier", "cp_async_wait"}),
  "sm_90": ((Wide(1, 16, 3), Wide(2, 16)), {"barrier", "mbarrier_wait", "fence_async", "wgmma_wait"}),
}


@pytest.mark.parametrize("shape", [(1, 1, 130, 130, 32, 16), (2, 1, 70, 70, 32, 16)], ids=["alone", "grouped"])
@pytest.mark.parametrize("arch", SCHEDULES)
def test_each_barrier_and_wait_deleted(arch: str, shape: Problem) -> None:
  tiles, kinds = BARRIERS[arch]
  with on(arch):
    operands = problem(shape, HALF, True)[0]
    outcomes = emulator.delete_each_barrier(lambda: launch(SCHEDULES[arch], shape, operands, tiles, True))
  assert {x.what for x in outcomes} == kinds
  assert len({x.kernel for x in outcomes if x.kernel.startswith("attention_backward")}) == 2
  assert [str(x) for x in outcomes if x.caught is None] == []


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("arch", SCHEDULES)
def test_no_bank_conflict_and_no_more_products_than_there_are(arch: str, D: int) -> None:
  M, N = 64, 128
  tiles = {"sm_80": (Tiles(2, 1, 32), Tiles(2, 2, 16)), "sm_90": (Wide(1, 64), Wide(2, 64))}[arch]
  with on(arch), emulator.profile() as profile:
    run(SCHEDULES[arch], (1, 1, M, N, D, D), tiles)
  for kernel, rows, others, sums in (("q", M, N, 1), ("kv", N, M, 2)):
    count = profile.kernels[f"attention_backward_{kernel}_1_1_{M}_{N}_{D}_{D}"]
    assert count.bank_conflicts == 0
    if arch == "sm_80":
      assert count.matrix == (2 + sums) * M * N * D // (16 * 8 * 16)
    else:  # a warp's part of a product is one: 16 rows, 16 along k, all columns
      assert count.matrix == rows // 16 * (others // 64) * (2 * D // 16 + sums * 64 // 16)


@pytest.mark.parametrize("arch", SCHEDULES)
def test_causal_tiles_are_skipped(arch: str) -> None:
  shape, found = (1, 1, 128, 128, 16, 16), []
  for causal in (False, True):
    with on(arch), emulator.profile() as profile:
      run(SCHEDULES[arch], shape, PAIRS[arch][2], causal)
    found.append({name: x.matrix for name, x in profile.kernels.items()})
  for name, count in found[0].items():
    if name.startswith("attention_backward"):
      assert found[1][f"{name}_causal"] < count


@pytest.mark.parametrize("short", ["q", "k", "v", "do", "lse", "delta"])
@pytest.mark.parametrize("arch", SCHEDULES)
def test_a_shortened_buffer_is_caught(arch: str, short: str) -> None:
  """The kernels take every buffer for 70 rows; one of them has 69."""
  names = ("q", "k", "v", "do", "lse", "delta")
  module, pair = SCHEDULES[arch], PAIRS[arch][1]
  for kernel, tiles, outputs in ((module.backward_q, pair[0], 1), (module.backward_kv, pair[1], 2)):

    def body(*buffers: UOp) -> UOp:
      claimed = [UOp.placeholder((1, 70, *sizes(x)[2:]), x.dtype, x.base.arg.slot) for x in buffers]
      return kernel(*claimed, rules=Rules(70, 70, scale=0.25), tiles=tiles)

    with on(arch):
      shapes = [(1, 69 if x == short else 70, *([] if x in ("lse", "delta") else [16])) for x in names]
      zeros = [Tensor.zeros(*x, dtype=HALF if len(x) == 3 else FLOAT).contiguous().realize() for x in shapes]
      gradients = [Tensor.zeros(1, 70, 16, dtype=HALF).contiguous().realize() for _ in range(outputs)]
      with pytest.raises(emulator.OutOfBounds, match=f"argument {outputs + names.index(short)} "):
        Tensor.custom_kernel(*gradients, *zeros, fxn=body)[0].realize()


@pytest.mark.parametrize(
  ("kind", "arguments", "message"),
  [
    (Tiles, (4, 1, 24), r"Tiles\.block=24: must be a multiple of 16"),
    (Tiles, (4, 0, 32), r"Tiles\.row_tiles=0: must be at least 1"),
    (Tiles, (33, 1, 32), r"Tiles\.warps=33: must be in 1\.\.32"),
    (Tiles, (4, 1, 32, 1), r"Tiles\.stages=1: must be at least 2"),
    (Tiles, (4, 1, 32, 2, True, 12), r"Tiles\.step=12: must be one of 8, 16"),
    (Wide, (2, 24), r"Tiles\.block=24: must be a multiple of 16 in 16\.\.256"),
    (Wide, (0, 64), r"Tiles\.warpgroups=0: must be in 1\.\.8"),
    (Wide, (2, 64, 1), r"Tiles\.stages=1: must be at least 2"),
  ],
)
def test_tiles_state_their_laws(kind: Any, arguments: tuple[Any, ...], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    kind(*arguments)


def test_no_tiles() -> None:
  with pytest.raises(ValueError, match=r"sm_75 with half: must be sm_80 or newer"):
    Tiles.choose(problem_of(1, 64, 64, 64, 64, HALF), Target("CUDA", "sm_75"), False)
  with pytest.raises(ValueError, match=r"head sizes 300 and 300: the smallest tile needs \d+ registers"):
    Tiles.choose(problem_of(1, 64, 64, 300, 300, HALF), Target("CUDA", "sm_80"), True)
  with on("sm_80"), pytest.raises(ValueError, match=r"Tiles\.step=8: must be 16 for"):
    run(cuda_backward, (1, 1, 16, 16, 16, 16), (Tiles(1, 1, 16, step=8),) * 2)
  with pytest.raises(ValueError, match=r"sm_89 with head sizes 64 and 64: must be sm_90"):
    Wide.choose(problem_of(1, 64, 64, 64, 64, HALF), Target("CUDA", "sm_89"), False)
  with pytest.raises(ValueError, match=r"head sizes 256 and 256: .* needs 352 registers a lane, of 224"):
    Wide.choose(problem_of(1, 64, 64, 256, 256, HALF), Target("CUDA", "sm_90"), True)


FEATURES: dict[str, dict[str, Any]] = {
  "plain": {},
  "causal, queries that see no key": {"is_causal": True, "q_start": -10},
  "window": {"window": (5, 3)},
  "softcap": {"softcap": 2.0},
  "score_mod": {"score_mod": lambda score, b, h, i, j: score + (i - j) * 0.1 * score},
  "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
  "lengths": {"kv_lengths": np.array([13], np.int32)},
  "mask": {"attn_mask": np.arange(2000).reshape(1, 1, 40, 50) % 7 > 2},
  "added mask": {"attn_mask": np.sin(np.arange(4000, dtype=np.float32)).reshape(1, 2, 40, 50)},
  "sinks": {"sinks": np.array([0.5, -1], np.float32)},
}


@pytest.mark.each("arch")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("arch", SCHEDULES)
def test_gradients_of_attention(arch: str, feature: str) -> None:
  with on(arch):
    check_gradients(*inputs(1, 2, 1, 40, 50, 16, 24), FEATURES[feature])


@pytest.mark.parametrize(
  ("arch", "D", "module"),
  [("sm_80", 64, cuda_backward), ("sm_90", 64, hopper_backward), ("sm_90", 60, cuda_backward)],
)
def test_which_kernels_serve(arch: str, D: int, module: ModuleType) -> None:
  launches = dispatch_backward(AttentionSpec(1, 1, 1, 100, 100, D, D, HALF, 0.125), Target("CUDA", arch))
  assert [launch.kernel.build for launch in launches] == [module.backward_q, module.backward_kv]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_86"])
@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(arch: str, length: int) -> None:
  for D in (1, 8, 64, 80, 128):
    for launch in dispatch_backward(AttentionSpec(1, 1, 1, length, length, D, D, HALF, 0.125), Target("CUDA", arch)):
      assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
      assert launch.tiles.rows // 2 < max(length, 64)


right_scores, right_store, right_tile = HeadRules.scores, mma_layout.store_scaled, swizzled.SwizzledTiles.tile
right_numbers, right_queries = RowStats.of, HeadRules.query_range


def no_mask(self, products, row, first, offsets, masked):
  return right_scores(self, products, row, first, offsets, False)


def no_scale(o, head, row, half, acc, factor, *rest):
  return right_store(o, head, row, half, acc, UOp.const(1.0), *rest)


def no_delta(*arguments):
  lse, delta = right_numbers(*arguments)
  return lse, delta * 0.0


def natural_lse(*arguments):
  lse, delta = right_numbers(*arguments)
  return lse * 0.6931, delta


def last_tile_dropped(*arguments):
  tile_range = right_queries(*arguments)
  return replace(tile_range, n_tiles=(tile_range.n_tiles - 1).maximum(1))


MISTAKES: dict[str, tuple[Any, str, Any, bool]] = {
  "no causal mask on the diagonal": (HeadRules, "scores", no_mask, True),
  "last tile of queries dropped": (HeadRules, "query_range", last_tile_dropped, False),
  "no scale": (None, "store_scaled", no_scale, False),
  "no delta": (RowStats, "of", no_delta, False),
  "the lse in another base": (RowStats, "of", natural_lse, False),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("arch", SCHEDULES)
def test_a_mistake_is_caught(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  place, phase, mistake, causal = MISTAKES[name]
  shape, tiles = (1, 1, 50, 70, 16, 16), PAIRS[arch][0]
  with on(arch):
    monkeypatch.setattr(place or SCHEDULES[arch], phase, mistake)
    with pytest.raises(AssertionError, match=r"d[qkv]: "):
      check(SCHEDULES[arch], shape, tiles, HALF, causal)
    monkeypatch.undo()
    check(SCHEDULES[arch], shape, tiles, HALF, causal)


def test_what_is_not_transposed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  right = instructions.ldmatrix
  monkeypatch.setattr(instructions, "ldmatrix", lambda *arguments, trans=False: right(*arguments))
  with on("sm_80"), pytest.raises(AssertionError, match=r"d[qkv]: "):
    check(cuda_backward, (1, 1, 50, 70, 16, 16), PAIRS["sm_80"][1])


@pytest.mark.parametrize("arch", SCHEDULES)
def test_a_slot_filled_too_early_is_caught(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Every tile in one slot: the copy of the next overwrites what is being read."""
  monkeypatch.setattr(swizzled.SwizzledTiles, "tile", lambda self, n_tile, *after: right_tile(self, n_tile * 0, *after))
  with on(arch), pytest.raises(emulator.KernelError, match="LDS"):
    run(SCHEDULES[arch], (1, 1, 50, 300, 16, 16), PAIRS[arch][0])
