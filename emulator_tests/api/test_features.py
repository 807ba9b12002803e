"""All that may stand between q.k and the softmax, alone and together, against the oracle."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, check, drawn, inputs, lower, on, placed, qkv, same_segment, served_by
from hypothesis import example, given
from hypothesis import strategies as st
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from uopattn import BlockMask, attention
from uopattn.dsl.rules.rules import HeadRules
from uopattn.runtime.prepare import compiled

Array = np.ndarray[Any, Any]
Options = dict[str, Any]
Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv

SLOW = [pytest.param(arch, marks=pytest.mark.slow) for arch in ("gfx1100", "gfx1201")]
EMULATED = ("gfx942", "sm_80", "sm_90", *SLOW)
CORNER: Shape = (2, 4, 2, 37, 150, 24, 40)
FEW: Shape = (2, 4, 2, 3, 150, 24, 40)  # queries: on a CPU another kernel takes these


def banded(b: Any, h: Any, i: Any, j: Any) -> Any:
  return (j <= i + 40) & (j % 60 < 30 + 10 * h)


def some(random: np.random.Generator, shape: Shape, *names: str) -> Options:
  """Values for these arguments, as the oracle takes them."""
  B, Hq, _, M, N, *_ = shape
  sides = [None if random.random() < 0.2 else int(x) for x in random.integers(0, N, 2)]
  broad = tuple(n if random.random() < 0.5 else 1 for n in (B, Hq, M, N))
  added = random.standard_normal(broad).astype(np.float32)
  values = {
    "is_causal": True,
    "scale": float(random.choice([-0.3, 0.0, 0.5])),
    "window": (sides[0], sides[1]),
    "softcap": float(random.choice([0.5, 3.0, 50.0])),
    "q_start": random.integers(-M, N, B),
    "kv_lengths": random.integers(0, N + 1, B),
    "sinks": random.standard_normal(Hq).astype(np.float32),
    "attn_mask": random.random(broad) < 0.7 if random.random() < 0.5 else np.where(added > 1.5, -np.inf, added),
    "score_mod": lower,
    "mask_mod": same_segment,
  }
  chosen = {name: values[name] for name in names}
  if {"score_mod", "mask_mod"} & set(names):
    segments = np.sort(random.integers(0, 4, max(M, N))).astype(np.int32)
    chosen["aux"] = np.linspace(0.05, 0.5, Hq, dtype=np.float32), segments
  return chosen


FEATURES = ("attn_mask", "is_causal", "kv_lengths", "mask_mod", "q_start", "scale", "score_mod", "sinks", "softcap",
            "window")  # fmt: skip


def as_given(options: Options, device: str, numbers: str = "tensor") -> Options:
  """What `attention` takes for what the oracle does; with `numbers` "int" or "variable" all batches have the same."""

  def converted(name: str, x: Any) -> Any:
    if name == "aux":
      return tuple(converted("", y) for y in x)
    if name in ("q_start", "kv_lengths") and numbers != "tensor":
      value = int(x[0])
      return value if numbers == "int" else UOp.variable(name, -300, 300).bind(value)
    if not isinstance(x, np.ndarray):
      return x
    return placed(x, device=device)

  return {name: converted(name, x) for name, x in options.items()}


def alike(options: Options, numbers: str) -> Options:
  """The same with q_start and kv_lengths of the first batch for all."""
  same = {name: np.full_like(options[name], options[name][0]) for name in ("q_start", "kv_lengths") if name in options}
  return options if numbers == "tensor" else options | same


def arguments(
  shape: Shape, options: Options, numbers: str = "tensor", blocks: tuple[int, int] | None = None
) -> tuple[Options, Options]:
  """What the oracle takes, and what `attention` does on the default device; with `blocks`, sizes, a block mask too."""
  options, device = alike(options, numbers), Device.DEFAULT
  given = as_given(options, device, numbers)
  if blocks is not None:
    given["block_mask"] = BlockMask.of(banded, 1, shape[1], *shape[3:5], (), *blocks, device=device)
    given["mask_mod"] = seen = options.get("mask_mod")
    options = options | {"mask_mod": lambda *x: banded(*x[:4]) & (seen is None or seen(*x))}
  return options, given


def check_features(
  shape: Shape, dtype: Any, options: Options, numbers: str = "tensor", blocks: tuple[int, int] | None = None
) -> None:
  """Runs `attention` on the default device with such arguments and fails unless output and LSE pass the gate."""
  options, given = arguments(shape, options, numbers, blocks)
  q, k, v = (inputs if Device.DEFAULT == "EMU" else qkv)(*shape, dtype)
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)


@pytest.mark.each("seed", evenly=True)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_alone(shape: Shape, name: str, seed: int) -> None:
  check_features(shape, DTYPES[1], some(np.random.default_rng(seed), shape, name))


SUBSETS = given(
  B=st.integers(1, 3),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 3),
  M=st.integers(1, 9) | st.integers(10, 140),
  N=st.integers(1, 200),
  Dk=st.integers(1, 40),
  Dv=st.integers(1, 40),
  dtype=st.sampled_from(DTYPES),
  names=st.sets(st.sampled_from(FEATURES), min_size=1),
  numbers=st.sampled_from(("int", "tensor", "variable")),
  blocks=st.none() | st.tuples(st.integers(1, 70), st.integers(1, 70)),
  seed=st.integers(0, 1000),
)


SMALL: dict[str, Any] = {"B": 2, "Hkv": 1, "group": 2, "M": 20, "N": 60, "Dk": 16, "Dv": 12, "dtype": dtypes.float16,
                         "numbers": "tensor", "blocks": None, "seed": 1}  # fmt: skip
ALL = example(**SMALL | {"names": set(FEATURES), "blocks": (16, 30)})
# A sink takes all but e**-59 of a row, whose errors the gate must still know.
FAR_BELOW_A_SINK = example(
  **SMALL
  | {"B": 1, "M": 115, "N": 18, "Dk": 1, "Dv": 1, "dtype": dtypes.float32, "numbers": "int"}
  | {"names": {"q_start", "score_mod", "is_causal", "attn_mask", "kv_lengths", "sinks"}}
)


def check_subset(B, Hkv, group, M, N, Dk, Dv, dtype, names, numbers, blocks, seed) -> None:
  shape = (B, Hkv * group, Hkv, M, N, Dk, Dv)
  on_cpu = Device.DEFAULT == "CPU"
  dtype = dtype if on_cpu or dtype != dtypes.float32 else dtypes.float16  # GPU kernels have no float32
  check_features(shape, dtype, some(np.random.default_rng(seed), shape, *sorted(names)), numbers, blocks)


@drawn(0)
@SUBSETS
@FAR_BELOW_A_SINK
@ALL
@example(
  **SMALL | {"M": 3, "names": {"attn_mask", "is_causal", "kv_lengths", "q_start", "sinks"}, "numbers": "variable"}
)
def test_any_of_them_together(**subset: Any) -> None:
  check_subset(**subset)


@pytest.mark.parametrize(
  "arch",
  [
    "sm_90",
    pytest.param("gfx1100", marks=pytest.mark.slow),
    *(pytest.param(x, marks=pytest.mark.slowest) for x in ("gfx942", "gfx1201", "sm_80")),
  ],
)
@drawn(0)
@SUBSETS
@ALL
def test_any_of_them_together_on_the_emulator(arch: str, **subset: Any) -> None:
  with on(arch):
    check_subset(**subset)


WIDEST = 2**29
# What the oracle takes, and as what `attention` does.
FAR: dict[str, tuple[Options, str]] = {
  "lengths of 64 bits": ({"kv_lengths": np.array([2**31, -(2**32) + 7])}, "tensor"),
  "unsigned lengths": ({"kv_lengths": np.array([2**32 - 1, 9], np.uint32)}, "tensor"),
  "unsigned lengths of 64 bits": ({"kv_lengths": np.array([2**64 - 1, 9], np.uint64)}, "tensor"),
  "an int of keys": ({"kv_lengths": np.full(2, 2**40)}, "int"),
  "starts of 64 bits": ({"q_start": np.array([2**32 + 3, -(2**31) - 9]), "is_causal": True}, "tensor"),
  "unsigned starts": ({"q_start": np.array([2**32 - 1, 5], np.uint32), "is_causal": True}, "tensor"),
  "ends of int32": ({"q_start": np.array([2**31 - 1, -(2**31)], np.int32), "window": (None, 3)}, "tensor"),
  "a start and a window": ({"q_start": np.array([2**31 - 1, 70], np.int32), "window": (40, WIDEST)}, "tensor"),
  "starts and the widest window": ({"q_start": np.array([2**31, -(2**33)]), "window": (WIDEST, WIDEST)}, "tensor"),
  "an int before all keys": ({"q_start": np.full(2, -(2**40)), "window": (None, 3)}, "int"),
  "an int behind all keys": ({"q_start": np.full(2, 2**40), "is_causal": True}, "int"),
}


@pytest.mark.kinds(
  name=(
    "lengths of 64 bits",
    "unsigned lengths",
    "starts of 64 bits",
    "ends of int32",
    "a start and a window",
    "an int before all keys",
  )
)
@pytest.mark.each("shape", evenly=True)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("name", FAR)
def test_places_beyond_int32_or_near_its_ends(name: str, shape: Shape) -> None:
  options, numbers = FAR[name]
  q, k, v = qkv(*shape)
  given = as_given(options, Device.DEFAULT, numbers)
  for backend in ("kernel", "reference"):
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **given)
    Tensor.realize(out, lse)
    check(q, k, v, out, lse, **options)


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.each("arch")
@pytest.mark.parametrize("arch", ["sm_80", "gfx1100"])
@pytest.mark.parametrize("name", ["lengths of 64 bits", "a start and a window"])
def test_places_beyond_int32_on_the_emulator(name: str, arch: str) -> None:
  with on(arch):
    check_features(FEW, dtypes.float16, *FAR[name])


BLIND: dict[str, Options] = {
  "no keys": {"kv_lengths": np.array([0, 0])},
  "window before all keys": {"window": (3, 2), "q_start": np.array([-60, -70])},
  "window behind all keys": {"window": (3, None), "q_start": np.array([160, 170])},
  "bool mask": {"attn_mask": np.zeros((1, 1, 1, 150), bool)},
  "added infinity": {"attn_mask": np.full((2, 1, 1, 1), -np.inf, np.float32)},
  "mask_mod": {"mask_mod": lambda b, h, i, j: j < 0},
  "two rules together": {"is_causal": True, "mask_mod": lambda b, h, i, j: j > i},
  "sinks": {"kv_lengths": np.array([0, 0]), "sinks": np.array([1.0, -3, 0, 9], np.float32)},
}


@pytest.mark.each("shape", evenly=True)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("name", BLIND)
def test_rows_that_see_no_key(shape: Shape, name: str) -> None:
  q, k, v = qkv(*shape, dtypes.float16)
  given = as_given(BLIND[name], Device.DEFAULT)
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  assert (out.numpy() == 0).all()
  alone = BLIND[name].get("sinks", np.full(shape[1], -math.inf, np.float32))  # the sink of the row's head
  np.testing.assert_array_equal(lse.numpy(), np.broadcast_to(alone[:, None], (shape[0], shape[1], shape[3])))


@pytest.mark.parametrize("M", [1, 2, 20])
def test_sinks_where_a_call_has_more_blocks_of_queries_than_a_block_has_rows(M: int) -> None:
  """Where what the loops after a do-while loop share was computed in the first of them, it did not compile."""
  q, k, v = qkv(2, 64, 64, M, 98, 8, 8)
  sinks = np.linspace(-3, 3, 64, dtype=np.float32)
  mask = BlockMask.of(lambda b, h, i, j: j != i + 1, 1, 1, M, 98)
  given = as_given({"sinks": sinks, "block_mask": mask}, "CPU")
  out, lse = attention(q, k, v, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, sinks=sinks, mask_mod=mask.mask_mod)


# Arguments that meet scores of any size: those that bound or move them, and those that hide some.
MEETING: dict[str, Options] = {
  "softcap": {"softcap": 20.0},
  "window": {"window": (30, 3), "q_start": np.array([5, 90])},
  "added": {"attn_mask": np.random.default_rng(3).normal(size=(1, 1, 1, 150)).astype(np.float32) * 1e4},
  "sinks": {"sinks": np.array([1e4, -1e4, 0, 30], np.float32), "kv_lengths": np.array([149, 0])},
  "score_mod": {"score_mod": lambda score, b, h, i, j: score * -0.5 + 3.0},
}


@pytest.mark.each("shape", "size", evenly=True)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("size", [1e4, 1.0, 1e-40, 0.0])
@pytest.mark.parametrize("name", MEETING)
def test_scores_large_denormal_and_equal(name: str, size: float, shape: Shape) -> None:
  q, k, v = qkv(*shape)
  q = Tensor(q.numpy() * np.float32(size))
  options = MEETING[name]
  given = as_given(options, "CPU")
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)


@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
def test_values_may_be_denormal(shape: Shape) -> None:
  q, k, v = qkv(*shape)
  v = Tensor(v.numpy() * np.float32(1e-40))
  with served_by("cpu_decode" if shape == FEW else "cpu_forward"):  # to matrix tiles (AMX) these are zeros
    check(q, k, v, attention(q, k, v, softcap=5.0, enable_gqa=True, backend="kernel"), softcap=5.0)


@pytest.mark.each("numbers", "lengths", evenly=True)
@pytest.mark.parametrize("numbers", ["int", "variable", "tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("lengths", [(0, 77), (150, 1), (64, 65), (50, 100)], ids=str)
def test_keys_that_do_not_exist_may_hold_anything(lengths, shape: Shape, dtype, numbers: str) -> None:
  inputs = qkv(*shape, dtype)
  options = alike({"kv_lengths": np.array(lengths)}, numbers)
  spoilt = [inputs[0]]
  for x, bad in zip(inputs[1:], (math.nan, math.inf), strict=True):
    numbers_of = x.float().numpy().copy()
    for b, length in enumerate(options["kv_lengths"]):
      numbers_of[b, :, length:] = bad
    spoilt.append(Tensor(numbers_of).cast(dtype).realize())
  given = as_given(options, "CPU", numbers)
  results = [attention(*x, enable_gqa=True, return_lse=True, backend="kernel", **given) for x in (inputs, spoilt)]
  for clean, same in zip(*results, strict=True):
    Tensor.realize(clean, same)
    np.testing.assert_array_equal(same.float().numpy(), clean.float().numpy())


@pytest.mark.parametrize("shape", [(1, 4, 2, 1, 150, 16, 16), (1, 4, 2, 40, 150, 16, 16)], ids=["few", "many"])
def test_one_kernel_serves_all_values_of_variables(shape: Shape) -> None:
  q, k, v = qkv(*shape)
  start, length = UOp.variable("start", 0, 150), UOp.variable("length", 0, 150)

  @TinyJit
  def run(first: UOp, keys: UOp) -> list[Tensor]:
    given: Options = {"q_start": first, "kv_lengths": keys, "is_causal": True, "enable_gqa": True}
    return [x.realize() for x in attention(q, k, v, return_lse=True, backend="kernel", **given)]

  before = compiled.cache_info().misses
  for first, keys in ((5, 60), (7, 61), (20, 0), (0, 150), (149, 150), (63, 64), (64, 129), (110, 90)):
    out, lse = run(start.bind(first), length.bind(keys))
    check(q, k, v, out, lse, is_causal=True, q_start=first, kv_lengths=np.array([keys]))
  assert compiled.cache_info().misses == before + 1


right = {name: getattr(HeadRules, name) for name in ("_firsts", "_lasts", "hidden_by_masks", "apply_score_mods")}
MISTAKES: dict[str, tuple[str, Any, str]] = {
  "first key of the window left out": ("_firsts", lambda *x: [y + 1 for y in right["_firsts"](*x)], "window"),
  "a key behind the window": ("_lasts", lambda *x: [y + 1 for y in right["_lasts"](*x)], "window"),
  "a key that does not exist": ("_lasts", lambda *x: [y + 1 for y in right["_lasts"](*x)], "kv_lengths"),
  "no mask_mod": ("hidden_by_masks", lambda *x: [], "mask_mod"),
  "mask_mod of the next key": (
    "hidden_by_masks",
    lambda self, row, key: right["hidden_by_masks"](self, row, key + 1),
    "mask_mod",
  ),
  "mask of the next query": (
    "hidden_by_masks",
    lambda self, row, key: right["hidden_by_masks"](self, row + 1, key),
    "attn_mask",
  ),
  "no softcap": ("apply_score_mods", lambda self, score, *x: score, "softcap"),
  "no score_mod": ("apply_score_mods", lambda self, score, *x: score, "score_mod"),
  "no sink": ("sink", lambda self, row: None, "sinks"),
}


@pytest.mark.kinds(name=("a key behind the window", "no mask_mod", "mask of the next query", "no score_mod", "no sink"))
@pytest.mark.each("shape", evenly=True)
@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
  method, mistake, feature = MISTAKES[name]
  mask = np.random.default_rng(6).random((shape[3], shape[4])) < 0.7
  fixed = {"window": (20, 5), "attn_mask": mask, "softcap": 0.5, "kv_lengths": np.array([30, 77])}
  options = some(np.random.default_rng(6), shape, feature)
  options |= {feature: fixed[feature]} if feature in fixed else {}
  options |= {"q_start": np.array([60, 70])} if feature == "window" else {}
  check_features(shape, dtypes.float32, options)
  compiled.cache_clear()
  monkeypatch.setattr(HeadRules, method, mistake)
  with pytest.raises(AssertionError, match="worst at"):
    check_features(shape, dtypes.float32, options)
  compiled.cache_clear()
