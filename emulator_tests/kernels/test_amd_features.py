"""What may stand between q.k and the softmax in the AMD kernel, on the emulator, against the oracle."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, inputs, on, on_device, placed, poisoned
from tinygrad import Tensor, UOp, dtypes
from tinygrad.renderer import Estimates

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.rules.rules import Rules
from uopattn.kernels.amd_forward import Tiles, forward

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction
QUICK = ("gfx1201", "gfx942")
EACH = [pytest.param(arch, marks=() if arch in QUICK else pytest.mark.slow) for arch in ARCHES]
B, HQ, HKV, M, N, DK, DV = SHAPE = (2, 4, 2, 20, 107, 24, 40)
Options = dict[str, Any]

random = np.random.default_rng(0)
ADDED = random.standard_normal((1, HQ, M, N)).astype(np.float32)
SINKS = np.array([0.5, 2.0, -3.0, 1.0], np.float32)
SLOPES = np.array([0.05, 0.1, 0.2, 0.4], np.float32)
PARTS = (np.arange(N) // 30).astype(np.int32)

FEATURES: dict[str, Options] = {
  "window": {"window": (30, 5), "q_start": 60},
  "window and causal": {"window": (40, None), "is_causal": True, "q_start": 70},
  "window behind all keys": {"window": (3, None), "q_start": 98},  # for the last queries
  "softcap": {"softcap": 2.0},
  "q_start": {"is_causal": True, "q_start": np.array([3, 90])},
  "kv_lengths": {"kv_lengths": np.array([0, 77])},
  "sinks": {"sinks": SINKS},
  "added mask": {"attn_mask": np.where(ADDED > 1.5, -np.inf, ADDED)},
  "bool mask of keys": {"attn_mask": random.random((2, 1, 1, N)) < 0.5},
  "bool mask for all heads": {"attn_mask": random.random((1, 1, M, N)) < 0.5},
  "score_mod": {"score_mod": lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j), "aux": (SLOPES,)},
  "mask_mod": {"mask_mod": lambda b, h, i, j, parts: (parts[i] == parts[j]) | ((i + j) % 3 == h), "aux": (PARTS,)},
}
TOGETHER: dict[str, Options] = {
  "lengths, causal, sinks": {
    "is_causal": True,
    "q_start": np.array([-9, 60]),
    "kv_lengths": np.array([100, 70]),
    "sinks": SINKS,
  },
  "scores changed thrice": {"softcap": 1.0, "attn_mask": ADDED, "score_mod": lambda s, b, h, i, j: s + h * 0.1},
  "all": {
    "window": (30, 7),
    "q_start": np.array([40, 80]),
    "kv_lengths": np.array([90, 77]),
    "softcap": 3.0,
    "sinks": SINKS,
    "attn_mask": ADDED,
    "mask_mod": lambda b, h, i, j: (i + j) % 3 != 0,
  },
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
  """Two waves and 32 keys: several blocks and tiles of few queries and keys."""
  monkeypatch.setattr(Tiles, "choose", lambda problem, target: Tiles(target.arch, 2, 1, 32))


def check_features(q: Tensor, k: Tensor, v: Tensor, options: Options, given: Options | None = None) -> None:
  """Fails unless output and LSE pass the gate; `given` has what is to be passed in another form than to the oracle."""
  passed = {name: on_device(x) for name, x in options.items()} | (given or {})
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **passed)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("arch", EACH)
@pytest.mark.parametrize("name", FEATURES)
def test_each_alone(name: str, arch: str) -> None:
  with on(arch):
    check_features(*inputs(*SHAPE), FEATURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", FEATURES | TOGETHER)
def test_with_the_tiles_of_choice(name: str, arch: str) -> None:
  with on(arch):
    check_features(*inputs(B, HQ, HKV, 100, 300, DK, DV, dtypes.bfloat16), stretched((FEATURES | TOGETHER)[name]))


def stretched(options: Options) -> Options:
  """The same for 100 queries and 300 keys."""
  sizes = {M: 100, N: 300}

  def repeated(x: Any) -> Any:
    if isinstance(x, tuple):
      return tuple(map(repeated, x))
    if isinstance(x, np.ndarray):
      for axis, size in enumerate(x.shape):
        x = np.take(x, np.arange(sizes.get(size, size)) % size, axis)
    return x

  return {name: repeated(x) for name, x in options.items()}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
  ("name", "arch"), list(zip(TOGETHER, ("gfx1201", "gfx950", "gfx1100"), strict=True)), ids=list(TOGETHER)
)
def test_together(name: str, arch: str) -> None:
  with on(arch):
    check_features(*inputs(*SHAPE, dtypes.bfloat16), TOGETHER[name])


@pytest.mark.usefixtures("small_tiles")
def test_numbers_as_ints_and_as_variables() -> None:
  with on("gfx942"):
    q, k, v = inputs(*SHAPE)
    for length in (0, 64, 77):
      check_features(q, k, v, {"kv_lengths": np.full(B, length)}, {"kv_lengths": length})
    for start, length in ((50, 0), (50, 66), (-9, 107)):
      variables = UOp.variable("start", -100, 200).bind(start), UOp.variable("length", 0, 150).bind(length)
      options = {"is_causal": True, "q_start": start, "kv_lengths": np.full(B, length)}
      check_features(q, k, v, options, dict(zip(("q_start", "kv_lengths"), variables, strict=True)))


LENGTHS = np.array([0, 45])


def spoiled_behind(lengths: Any, x: Tensor) -> Tensor:
  """x with NaN and infinities in all keys that do not exist."""
  array = x.float().numpy()
  for b, length in enumerate(lengths):
    array[b, :, length:] = np.resize([math.nan, math.inf, -math.inf], array[b, :, length:].shape)
  return placed(array, x.dtype)


def check_what_is_behind() -> None:
  q, k, v = inputs(*SHAPE)
  options = {"kv_lengths": LENGTHS, "sinks": SINKS, "is_causal": True, "q_start": 70}
  passed = {name: on_device(x) for name, x in options.items()}
  bad = spoiled_behind(LENGTHS, k), spoiled_behind(LENGTHS, v)
  out, lse = attention(q, *bad, enable_gqa=True, return_lse=True, backend="kernel", **passed)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("arch", EACH)
def test_what_lies_behind_the_length_does_not_matter(arch: str) -> None:
  with on(arch):
    check_what_is_behind()


right_load = RegisterPipeline.load


def length_ignored(self: RegisterPipeline, first: UOp, *after: UOp) -> UOp:
  self.length = UOp.const(N)
  return right_load(self, first, *after)


@pytest.mark.usefixtures("small_tiles")
def test_reading_behind_the_length_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(RegisterPipeline, "load", length_ignored)
  with on("gfx942"), pytest.raises(AssertionError, match="worst at"):
    check_what_is_behind()


BLIND: dict[str, Options] = {
  "no keys": {"kv_lengths": np.array([0, 0])},
  "window before all keys": {"window": (3, 2), "q_start": np.array([-60, -70])},
  "window behind all keys": {"window": (3, None), "q_start": 160},
  "bool mask": {"attn_mask": np.zeros((1, 1, 1, N), bool)},
  "added infinity": {"attn_mask": np.full((2, 1, 1, 1), -np.inf, np.float32)},
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", BLIND)
def test_rows_that_see_no_key_are_zero_with_sinks_too(name: str) -> None:
  with on("gfx942"):
    passed = {key: on_device(x) for key, x in (BLIND[name] | {"sinks": SINKS}).items()}
    out, lse = attention(*inputs(*SHAPE), enable_gqa=True, return_lse=True, backend="kernel", **passed)
    Tensor.realize(out, lse)
    assert (out.numpy() == 0).all()
    assert (lse.numpy() == -math.inf).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("arch", EACH)
def test_each_barrier_deleted(arch: str) -> None:
  options = {"window": (90, 0), "q_start": np.array([60, 80]), "kv_lengths": np.array([100, 90]), "softcap": 3.0}
  with on(arch):
    sources, passed = inputs(2, 1, 1, 40, 130, 16, 16), {name: on_device(x) for name, x in options.items()}
    outcomes = emulator.delete_each_barrier(lambda: attention(*sources, backend="kernel", **passed).realize())
  assert [(o.what, type(o.caught)) for o in outcomes] == [("barrier", emulator.Race)] * 5  # one, and two in each loop


def run_rules(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, name: str, *arrays: np.ndarray[Any, Any]) -> Tensor:
  """The kernel with rules that `attention` does not make of its own arguments: `name` of two buffers."""

  def fxn(o: UOp, q: UOp, k: UOp, v: UOp, *buffers: UOp) -> UOp:
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (o, q, k, v)]
    named: Options = {name: buffers}
    rules = Rules(M, N, heads=HQ, group=HQ // HKV, scale=DK**-0.5, **named)
    kernel = forward(*flat, rules=rules, tiles=tiles)
    return kernel.replace(arg=replace(kernel.arg, estimates=Estimates()))

  return Tensor.custom_kernel(poisoned(q, v), q, k, v, *map(on_device, arrays), fxn=fxn)[0].realize()


@pytest.mark.parametrize("arch", QUICK)
def test_bounds_of_each_row(arch: str) -> None:
  first = np.repeat(np.array([0, 10, 40, 90], np.int32), M // 4)
  last = np.repeat(np.array([5, 66, 80, 106], np.int32), M // 4)
  keys = np.arange(N)
  seen = (keys >= first[:, None]) & (keys <= last[:, None])
  with on(arch):
    q, k, v = inputs(*SHAPE)
    check(q, k, v, run_rules(q, k, v, Tiles(arch, 1, 1, 32), "bounds", first, last), attn_mask=seen[None, None])


@pytest.mark.parametrize("arch", QUICK)
def test_lists_of_tiles(arch: str) -> None:
  order = np.array([[[[2, 0, 1, 3], [3, 1, 0, 2]]]], np.int32)  # of two blocks of queries
  counts = np.array([[[[1, 2], [0, 3]]]], np.int32)
  blocks = np.array([[True, False, True, False], [True, True, False, True]])
  seen = np.repeat(np.repeat(blocks, 16, 0)[:M], 32, 1)[:, :N]
  with on(arch):
    q, k, v = inputs(*SHAPE)
    check(q, k, v, run_rules(q, k, v, Tiles(arch, 1, 1, 32), "tile_lists", order, counts), attn_mask=seen[None, None])
