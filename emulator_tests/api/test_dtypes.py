"""q, k and v of different dtypes: the table in kernels/README.md, cell by cell."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import placed
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import KVCache, attention, attention_paged, attention_varlen
from uopattn.api.attention import Call
from uopattn.plan.dispatch import every_schedule
from uopattn.spec.arguments import Arguments

README = Path(__file__).parents[2] / "kernels/README.md"
TYPES = ("float32", "float16", "bfloat16", "fp8e4m3", "fp8e5m2")
EPSILONS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}


def table() -> dict[tuple[str, str], tuple[str, bool]]:
  """By the dtypes of q, and of k and v: the dtype in the table, and whether k and v stay as they are."""
  lines = README.read_text().splitlines()
  start = lines.index("## Dtypes that differ")
  rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:] if line.startswith("|")][:7]
  (_, *columns), _, *cells = rows
  assert tuple(columns) == tuple(row[0] for row in cells) == TYPES
  return {
    (row[0], column): (cell.removesuffix(" †"), cell.endswith(" †"))
    for row in cells
    for column, cell in zip(columns, row[1:], strict=True)
  }


TABLE = table()


def named(name: str) -> DType:
  dtype: DType = getattr(dtypes, name)
  return dtype


def tensors(*names: str) -> tuple[Tensor, Tensor, Tensor]:
  random = np.random.default_rng(0)
  shapes = ((1, 4, 18, 16), (1, 2, 20, 16), (1, 2, 20, 24))
  q, k, v = (placed(random.standard_normal(x, np.float32), named(n)) for x, n in zip(shapes, names, strict=True))
  return q, k, v


@pytest.mark.parametrize("of_kv", TYPES)
@pytest.mark.parametrize("of_q", TYPES)
def test_pairs(of_q: str, of_kv: str) -> None:
  common, stays = TABLE[of_q, of_kv]
  q, k, v = tensors(of_q, of_kv, of_kv)
  call = Call.of(q, k, v, Arguments(enable_gqa=True))
  assert (call.spec.dtype, call.spec.stored) == (named(common), named(of_kv if stays else common))
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True)
  cast = [x.cast(named(common)).realize() for x in (q, k, v)]
  want, want_lse = attention(cast[0], cast[1], cast[2], enable_gqa=True, return_lse=True, backend="reference")
  assert (out.dtype, lse.dtype) == (named(common), dtypes.float32)
  if common.startswith("fp8"):  # no kernels on CPUs: both are plain ops
    np.testing.assert_array_equal(out.float().numpy(), want.float().numpy())
  else:
    np.testing.assert_allclose(out.float().numpy(), want.float().numpy(), atol=4 * EPSILONS[common])
    np.testing.assert_allclose(lse.numpy(), want_lse.numpy(), atol=EPSILONS[common])
  assert q[:, :2].scaled_dot_product_attention(k, v).dtype == out.dtype  # tinygrad's own
  q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
  assert attention_varlen(q, k, v, [0, 18], [0, 20], enable_gqa=True).dtype == out.dtype


def test_three_dtypes() -> None:
  """The first dtype to which all are promoted is computed in, and the output has the dtype for q and v."""
  for three in product(TYPES, repeat=3):
    of_q, of_k, of_v = three
    order = ("fp8e4m3", "fp8e5m2", "float16", "bfloat16", "float32")
    common = next(x for x in order if all(TABLE[given, x][0] == x for given in three))
    call = Call.of(*tensors(*three), Arguments(enable_gqa=True))
    stored = of_k if of_k == of_v and TABLE[of_q, of_k][1] else common
    assert (call.spec.dtype, call.spec.stored, call.dtype) == (*map(named, (common, stored, TABLE[of_q, of_v][0])),)


def test_which_kernels_widen_k_and_v() -> None:
  (line,) = [x for x in README.read_text().split("\n\n") if x.startswith("†")]
  schedules = every_schedule() + every_schedule("backward")
  assert set(re.findall("`([a-z_]+)`", line)) == {x.name for x in schedules if x.mixed}


@pytest.mark.parametrize("dtype", ["fp8e4m3", "fp8e5m2"])
def test_additive_masks_of_8_bits(dtype: str) -> None:
  q, k, v = tensors("float32", "float32", "float32")
  numbers, found = np.random.default_rng(0).normal(size=(18, 20)).astype(np.float32), []
  mask = placed(numbers, named(dtype))
  for x, backend in ((mask, "kernel"), (mask.float().realize(), "reference")):
    out = attention(q, k, v, x, enable_gqa=True, backend=backend)
    (grad,) = out.square().sum().gradient(x)
    Tensor.realize(out, grad)
    found.append((out.numpy(), grad.float().numpy()))
  np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
  np.testing.assert_allclose(found[0][1], found[1][1], rtol=0.25, atol=0.02)


def test_what_is_stored_is_not_promoted() -> None:
  q, k, v = tensors("float16", "bfloat16", "bfloat16")
  pages = Tensor.zeros(1, 2, dtype=dtypes.int).contiguous(), Tensor([5])
  with pytest.raises(TypeError, match=r"^k_pages has dtype bfloat16, q has half; they must be the same"):
    attention_paged(q, k, v, *pages, enable_gqa=True)
  out = attention_paged(q.float(), k, v, *pages, enable_gqa=True, backend="kernel")
  want = attention(q.float(), k[:, :, :5].float(), v[:, :, :5].float(), enable_gqa=True, backend="reference")
  np.testing.assert_allclose(out.numpy(), want.numpy(), atol=4e-6)
  with pytest.raises(TypeError, match="k has dtype bfloat16, the cache has half"):
    KVCache(1, 2, 30, 16, 24, dtype=dtypes.half).append(k, v, 0)
