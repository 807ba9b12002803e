"""All that may stand between q.k and the softmax, in the CUDA kernels, on the emulator against the oracle."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, drawn, inputs, on, on_device, placed
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.kernels import cuda_forward, hopper_forward
from uopattn.plan.dispatch import FORWARD
from uopattn.plan.forward import forward
from uopattn.plan.launch import Launch
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec

Options = dict[str, Any]

TILES: dict[str, Any] = {"sm_80": cuda_forward.Tiles(2, 1, 16), "sm_90": hopper_forward.Tiles(1, 16)}
SHAPE = B, HEADS, KV_HEADS, M, N, _, DV = 2, 4, 2, 77, 110, 24, 40
RANDOM = np.random.default_rng(5)
NORMAL = RANDOM.standard_normal((1, HEADS, M, N)).astype(np.float32)
SLOPES, PARTS = np.array([0.1, 0.2, 0.3, 0.4], np.float32), (np.arange(N) // 40).astype(np.int32)


def lower(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, parts: Any) -> Any:
  return score - slopes[h] * (i - j)


def same_part(b: Any, h: Any, i: Any, j: Any, slopes: Any, parts: Any) -> Any:
  return (parts[i] == parts[j]) | ((i + 2 * j + b) % 5 == h)


AUX: Options = {"aux": (SLOPES, PARTS)}
FEATURES: dict[str, Options] = {
  "window": {"window": (20, 5)},
  "window behind": {"window": (20, None), "q_start": 60},
  "window ahead": {"window": (0, 30), "q_start": 3},
  "window behind, causal": {"window": (17, None), "is_causal": True, "q_start": -9},
  "softcap": {"softcap": 2.0},
  "lengths": {"kv_lengths": np.array([0, 77])},
  "starts": {"q_start": np.array([3, 100]), "is_causal": True},
  "sinks": {"sinks": np.array([0, 1, -math.inf, 2], np.float32)},
  "added mask": {"attn_mask": np.where(NORMAL > 1.5, -math.inf, NORMAL)},
  "added mask of 16 bits": {"attn_mask": NORMAL[0, 0].astype(np.float16)},
  "mask of keys": {"attn_mask": RANDOM.random((B, 1, 1, N)) < 0.5},
  "mask": {"attn_mask": NORMAL > 0.3},
  "score_mod": {"score_mod": lower, **AUX},
  "mask_mod": {"mask_mod": same_part, **AUX},
}
TOGETHER: dict[str, Options] = {
  "of places": FEATURES["window"] | FEATURES["lengths"] | FEATURES["starts"] | FEATURES["sinks"] | {"scale": -0.3},
  "of scores": FEATURES["softcap"] | FEATURES["score_mod"] | FEATURES["added mask"] | {"is_causal": True},
  "of keys": FEATURES["mask"] | FEATURES["mask_mod"] | FEATURES["window behind"] | FEATURES["softcap"],
}


def plain(name: str, x: Any) -> Any:
  """What the oracle takes for a Variable or an int."""
  x = x.unbind()[1] if isinstance(x, UOp) else x
  return np.full(B, x) if name == "kv_lengths" and isinstance(x, int) else x


def run(arch: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
  """Output and LSE with small tiles, which take the least time to lower."""
  named = {name: on_device(x) for name, x in options.items()}
  arguments = Arguments(enable_gqa=True, return_lse=True, **named)
  spec = make_spec(q, k, v, arguments)
  tiles = TILES[arch]
  (schedule,) = [x for x in FORWARD if x.tiles is type(tiles)]
  out, lse = forward(Launch(schedule, schedule.kernels[0], spec, tiles), q, k, v, arguments=arguments)
  assert lse is not None
  Tensor.realize(out, lse)
  return out, lse


def check_run(arch: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
  check(q, k, v, *run(arch, q, k, v, **options), **{name: plain(name, x) for name, x in options.items()})


@pytest.mark.each("arch")
@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", FEATURES)
def test_each_alone(name: str, arch: str) -> None:
  with on(arch):
    check_run(arch, *inputs(*SHAPE), **FEATURES[name])


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", TOGETHER)
def test_together(name: str, arch: str) -> None:
  with on(arch):
    check_run(arch, *inputs(*SHAPE, dtypes.bfloat16), **TOGETHER[name])


@pytest.mark.slow
@given(arch=st.sampled_from([*TILES]), names=st.sets(st.sampled_from([*FEATURES]), max_size=5), seed=st.integers(0, 99))
@drawn(20)
def test_any_together(arch: str, names: set[str], seed: int) -> None:
  options: Options = {}
  for name in sorted(names):
    options |= FEATURES[name]
  with on(arch):
    check_run(arch, *inputs(*SHAPE, seed=seed), **options)


@pytest.mark.parametrize("arch", TILES)
def test_variables(arch: str) -> None:
  """Also where two tiles of keys are all there are, and no block of queries visits the second one."""
  with on(arch):
    length, start = UOp.variable("length", 0, N).bind(66), UOp.variable("start", 0, 200).bind(50)
    check_run(arch, *inputs(*SHAPE), kv_lengths=length, q_start=start, window=(30, 0))
    check_run(arch, *inputs(2, 4, 2, 77, 32, 24, 40), kv_lengths=UOp.variable("length", 0, 32).bind(15))


@pytest.mark.parametrize(
  ("arch", "dtype"), [("sm_75", dtypes.half), ("sm_89", dtypes.fp8e4m3), ("sm_90", dtypes.half)], ids=str
)
def test_the_tiles_that_dispatch_picks(arch: str, dtype: DType) -> None:
  options = FEATURES["window"] | FEATURES["sinks"] | FEATURES["lengths"]
  with on(arch):
    q, k, v = inputs(*SHAPE, dtype)
    given = {name: on_device(x) for name, x in options.items()}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
    Tensor.realize(out, lse)
    check(q, k, v, out, lse, **options)


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("kind", ["tensor", "int", "variable"])
def test_what_lies_behind_the_lengths_does_not_matter(kind: str, arch: str) -> None:
  lengths = {"tensor": np.array([70, 33]), "int": 70, "variable": UOp.variable("length", 0, N).bind(70)}[kind]
  known = plain("kv_lengths", lengths)
  hidden = (np.arange(N) >= known[:, None]).reshape(B, 1, N, 1)
  with on(arch):
    q, k, v = inputs(*SHAPE)
    bad_k, bad_v = (placed(np.where(hidden, bad, x.numpy()), dtypes.half) for x, bad in ((k, math.inf), (v, math.nan)))
    out, lse = run(arch, q, bad_k, bad_v, kv_lengths=lengths)
    check(q, k, v, out, lse, kv_lengths=known)


@pytest.mark.parametrize("arch", TILES)
def test_rows_that_see_no_key_are_zero_with_sinks_too(arch: str) -> None:
  sinks = np.ones(HEADS, np.float32)
  with on(arch):
    out, lse = run(arch, *inputs(*SHAPE), kv_lengths=np.array([0, 20]), window=(30, 0), sinks=sinks)
  assert (out.numpy()[0] == 0).all()
  assert (lse.numpy()[0] == -math.inf).all()
  assert (out.numpy()[1, :, 50:] == 0).all()
  assert (lse.numpy()[1, :, 50:] == -math.inf).all()
  assert np.isfinite(lse.numpy()[1, :, :50]).all()


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", ["window", "lengths"])
def test_tiles_that_nobody_sees_are_skipped(name: str, arch: str) -> None:
  def matrix(**options: Any) -> int:
    with emulator.profile() as profile:
      run(arch, *inputs(*SHAPE), **options)
    (found,) = [count.matrix for kernel, count in profile.kernels.items() if kernel.startswith("attention")]
    return found

  with on(arch):
    assert matrix(**FEATURES[name]) < 0.7 * matrix()


def with_rules(arch: str, field: str, *tables: np.ndarray[Any, Any]) -> Tensor:
  """The kernel's output by rules that have buffers as a field."""
  q, k, v = (x.reshape(-1, *x.shape[2:]).contiguous().realize() for x in inputs(*SHAPE))
  kernel = cuda_forward if arch == "sm_80" else hopper_forward

  def body(o: UOp, q: UOp, k: UOp, v: UOp, *buffers: UOp) -> UOp:
    given: Options = {field: buffers}
    rules = Rules(M, N, heads=HEADS, group=HEADS // KV_HEADS, scale=24**-0.5, **given)
    graph = kernel.forward(o, q, k, v, rules=rules, tiles=TILES[arch])
    return graph.replace(arg=replace(graph.arg, estimates=Estimates()))  # tinygrad's own fail

  out = Tensor.empty(B * HEADS, M, DV, dtype=dtypes.half, device="EMU")
  found = Tensor.custom_kernel(out, q, k, v, *map(on_device, tables), fxn=body)[0].realize()
  return found.reshape(B, HEADS, M, DV)


@pytest.mark.parametrize("arch", TILES)
def test_a_list_of_tiles(arch: str) -> None:
  """Whole ones and ones whose last keys may be none, in any order."""
  block_m, block_n = TILES[arch].block_m, TILES[arch].block_n
  blocks, tiles = math.ceil(M / block_m), math.ceil(N / block_n)
  order, number = np.zeros((1, 1, blocks, tiles), np.int32), np.full((1, 1, blocks, 2), (0, 1), np.int32)
  order[0, 0, 0, :4], number[0, 0, 0] = (3, 0, 2, 6), (2, 4)
  order[0, 0, 1, :2], number[0, 0, 1] = (2, 4), (1, 2)
  seen = np.zeros((M, N), bool)
  for block in range(blocks):
    for tile in order[0, 0, block, : number[0, 0, block, 1]]:
      seen[block * block_m :, tile * block_n :][:block_m, :block_n] = True
  with on(arch):
    out = with_rules(arch, "tile_lists", order, number)
    check(*inputs(*SHAPE), out, attn_mask=seen)


@pytest.mark.parametrize("arch", TILES)
def test_bounds_of_each_query(arch: str) -> None:
  firsts, lasts = (np.array(x, np.int32)[np.arange(M) // 20] for x in ((0, 50, 60, 90), (40, 40, 100, 105)))
  keys = np.arange(N)
  with on(arch):
    out = with_rules(arch, "bounds", firsts, lasts)
    check(*inputs(*SHAPE), out, attn_mask=(keys >= firsts[:, None]) & (keys <= lasts[:, None]))


@pytest.mark.parametrize("arch", TILES)
def test_each_barrier_and_wait_deleted(arch: str) -> None:
  options = FEATURES["score_mod"] | FEATURES["softcap"] | {"is_causal": True, "sinks": np.ones(1, np.float32)}
  options |= {"kv_lengths": np.array([129]), "q_start": np.array([0]), "attn_mask": NORMAL.reshape(-1)[:130]}
  with on(arch):
    # with 16 columns of Q instead of 32 each warp would copy just the rows that it reads, and need no barrier for them
    sources = inputs(1, 1, 1, 130, 130, 32, 16)
    outcomes = emulator.delete_each_barrier(lambda: run(arch, *sources, **options))
  assert len(outcomes) >= 5
  assert [str(o) for o in outcomes if o.caught is None] == []


right_window = HeadRules._firsts
MISTAKES: dict[str, tuple[str, Any, str]] = {
  "sinks forgotten": ("sink", lambda self, row: None, "sinks"),
  "keys past the length seen": ("length", property(lambda self: UOp.const(self.rules.N)), "lengths"),
  "window one key narrow": ("_firsts", lambda self, row: [x + 1 for x in right_window(self, row)], "window"),
  "softcap forgotten": ("apply_score_mods", lambda self, score, *x: score, "softcap"),
}


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  phase, mistake, feature = MISTAKES[name]
  monkeypatch.setattr(HeadRules, phase, mistake)
  with on(arch), pytest.raises(AssertionError, match="worst at"):
    check_run(arch, *inputs(*SHAPE), **FEATURES[feature])
