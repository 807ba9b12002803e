"""Arguments and sizes that leave constants in a kernel, which tinygrad then folds: in both passes, on every target."""

from typing import Any

import numpy as np
import pytest
from gradients import check_gradients
from helpers import check, inputs, on, qkv
from test_features import Shape, as_given
from tinygrad import Context, Device, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl.schedule import DTYPES_16, DTYPES_16_32

Options = dict[str, Any]
ARCHES = ("gfx942", "gfx1100", "gfx1201", "sm_75", "sm_80", "sm_90", "amx", "CPU")
QUICK = ("gfx942", "sm_80", "amx", "CPU")


def options_of(random: np.random.Generator, B: int, Hq: int, M: int, N: int) -> Options:
  """A few arguments, each with a value that folds much of what is computed with it."""

  def one_of(*values: Any) -> Any:
    return values[random.integers(len(values))]

  one = np.ones((1, 1, 1, 1), np.float32)
  every: Options = {
    "scale": one_of(0.0, 0.0, -0.0, -0.3, 1.0),
    "softcap": one_of(1e-3, 1.0, 1e30),
    "score_mod": one_of(
      lambda s, b, h, i, j: s * 0 + 3,
      lambda s, b, h, i, j: s + 1,
      lambda s, b, h, i, j: s * 1.0 - 0.0,
    ),
    "mask_mod": one_of(
      lambda b, h, i, j, *aux: i >= 0,
      lambda b, h, i, j, *aux: j < 0,
      lambda b, h, i, j, *aux: j == 0,
    ),
    "attn_mask": one_of(one, 0 * one, -np.inf * one, one > 0, one < 0),
    "sinks": one_of(0.0, 1.0) * np.ones(Hq, np.float32),
    "window": one_of((0, 0), (None, 0), (1000, 1000), (0, None)),
    "q_start": np.full(B, one_of(1, N - M, -M, 1000)),
    "kv_lengths": np.full(B, one_of(0, 1, N)),
    "is_causal": True,
  }
  chosen = {name: x for name, x in every.items() if random.random() < 0.3}
  if "score_mod" in chosen and one_of(True, False):
    chosen["score_mod"] = lambda s, b, h, i, j, table: s + table[h * 0]
    chosen["aux"] = (np.full(1, 0.5, np.float32),)
  return chosen


def check_folded(arch: str, shape: Shape, dtype: DType, options: Options) -> None:
  """Outputs and gradients of such a shape, (B, Hq, Hkv, M, N, Dk, Dv), pass the gate."""
  with Context() if arch == "CPU" else on(arch):
    q, k, v = (qkv if arch == "CPU" else inputs)(*shape, dtype)
    given = as_given(options, Device.DEFAULT, "int")
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
    Tensor.realize(out, lse)
    check(q, k, v, out, lse, **options)
    check_gradients(q, k, v, options, given)


def mark(arch: str, seed: int) -> Any:
  """Of the first seed, some targets are quick."""
  return pytest.mark.slowest if seed else () if arch in QUICK else pytest.mark.slow


@pytest.mark.parametrize(
  ("arch", "seed"), [pytest.param(arch, seed, marks=mark(arch, seed)) for arch in ARCHES for seed in range(13)]
)
def test_drawn(arch: str, seed: int) -> None:
  random = np.random.default_rng(100 * ARCHES.index(arch) + seed)
  sizes = ((1, 2), (1, 2), (1, 3), *[(1, 1, 2, 20, 33)] * 2, *[(1, 1, 2, 8, 20)] * 2)
  B, Hkv, group, M, N, Dk, Dv = (int(random.choice(x)) for x in sizes)
  options = options_of(random, B, Hkv * group, M, N)
  types = (dtypes.float16,) if arch == "sm_75" else DTYPES_16_32 if seed or arch == "CPU" else DTYPES_16
  dtype = types[random.integers(len(types))]
  check_folded(arch, (B, Hkv * group, Hkv, M, N, Dk, Dv), dtype, options)


SCORES: dict[str, Options] = {
  "softcap": {"softcap": 5.0},
  "score_mod": {"score_mod": lambda s, b, h, i, j: s + 3},
}


@pytest.mark.kinds(arch=("gfx1100",), name=("softcap",))
@pytest.mark.each("arch", "name", evenly=True)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_are_constant(arch: str, name: str) -> None:
  """So are their gradients, which are packed into words: the words, too, are constants then."""
  dtype = dtypes.float16 if arch == "sm_75" else dtypes.bfloat16
  check_folded(arch, (1, 1, 1, 8, 1, 24, 24), dtype, {"scale": 0.0, **SCORES[name]})
