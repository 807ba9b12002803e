"""The kernels for GPUs without matrix units where tinygrad's default device is OpenCL's or WebGPU's, a GPU or a CPU.

Nothing else runs them but the emulator. `scripts/opencl` and `scripts/webgpu` bring runtimes for CPUs; that of OpenCL
takes some 10 s to compile a kernel.
"""

from typing import Any

import numpy as np
import pytest
import test_sparse
import test_sparse_gradients
from conformance import SUBJECTS, Sizes
from conformance_backward import Case, machine
from helpers import on_device, qkv, take_tiles
from norm_rope import Case as NormRopeCase
from norm_rope import check_case as check_norm_rope
from test_kv_cache import check_steps
from tiny_model import TinyModel
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

import uopattn
from uopattn import attention
from uopattn.kernels import generic_forward
from uopattn.plan.target import target_of

Options = dict[str, Any]
GENERIC = SUBJECTS["generic"]
HALF, BFLOAT, FLOAT = dtypes.float16, dtypes.bfloat16, dtypes.float32


@pytest.fixture(autouse=True)
def device() -> str:
  """The default device."""
  name = str(Device.DEFAULT)
  if name not in ("CL", "WEBGPU"):
    pytest.skip(f"the default device is {name}")
  return name


FORWARD: dict[str, tuple[DType, Sizes, Options]] = {
  "plain": (FLOAT, (1, 2, 2, 40, 30, 16, 16), {}),
  "causal, grouped": (HALF, (1, 4, 2, 50, 90, 24, 40), {"is_causal": True}),
  "odd": (BFLOAT, (1, 2, 2, 77, 131, 33, 17), {"window": (20, 5)}),
  "rules": (
    FLOAT,
    (2, 2, 2, 40, 70, 16, 16),
    {"softcap": 2.0, "kv_lengths": np.array([0, 61]), "sinks": np.ones(2, np.float32)},
  ),
}


@pytest.mark.parametrize(
  "case",
  [
    "plain",
    pytest.param("causal, grouped", marks=pytest.mark.slow),
    *(pytest.param(x, marks=pytest.mark.slowest) for x in ("odd", "rules")),
  ],
)
def test_forward(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
  dtype, sizes, options = FORWARD[case]
  if dtype == BFLOAT and device == "WEBGPU":
    pytest.skip(f"{device} has no {dtype}")
  take_tiles(monkeypatch, generic_forward.Tiles(16, 8, 2, 4))
  check(dtype, sizes, options)


def test_appending_with_norms_and_rotary_positions(device: str) -> None:
  case, most = NormRopeCase(dtype=FLOAT, of=FLOAT, D=(18, 7), R=3), target_of(device).buffers
  if most is not None and most < 11:
    with pytest.raises(ValueError, match=f"a kernel would take 11 Tensors, and WEBGPU allows {most}"):
      check_norm_rope(case, device)
  else:
    check_norm_rope(case, device)


@pytest.mark.slow
def test_split_keys() -> None:
  check(HALF, (1, 4, 1, 1, 1100, 32, 32), {})


def check(dtype: DType, sizes: Sizes, options: Options) -> None:
  q, k, v = qkv(*sizes, dtype)
  given = {name: on_device(x) for name, x in options.items()}
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  GENERIC.verify(q, k, v, out, lse, **options)


@pytest.mark.parametrize(
  ("dtype", "group", "is_causal"),
  [
    pytest.param(FLOAT, 1, False, marks=pytest.mark.slow, id="plain"),
    pytest.param(BFLOAT, 2, True, marks=pytest.mark.slowest, id="causal, grouped"),
  ],
)
# Not float16: where a device lacks it, as pocl's does, tinygrad's conversions make denormal numbers 0.
def test_gradients(dtype: DType, group: int, is_causal: bool, device: str) -> None:
  if dtype == BFLOAT and device == "WEBGPU":
    pytest.skip(f"{device} has no {dtype}")
  generic = machine("cl", dtype)
  Case.of(generic, (1, group, 1, 50, 70, 24, 16), {"is_causal": is_causal}).check(generic.small())


@pytest.mark.slowest
def test_gradients_of_attention() -> None:
  """Through `Tensor.gradient`, with delta and the tiles of choice, against plain ops."""
  random, shape = np.random.default_rng(3), (1, 2, 40, 16)
  arrays = [random.standard_normal(shape).astype(np.float32) for _ in range(4)]
  found = []
  for backend in ("kernel", "reference"):
    q, k, v, do = (Tensor(x).realize() for x in arrays)
    out = attention(q, k, v, is_causal=True, backend=backend)
    found.append([x.numpy() for x in (out * do).sum().gradient(q, k, v)])
  for got, wanted in zip(*found, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_and_its_gradients() -> None:
  """A small language model by `patch()`, loss and gradients, against tinygrad's own attention."""
  model = TinyModel(letters=20, layers=1, heads=2, head_dim=16, context=24)
  pieces = Tensor(np.random.default_rng(4).integers(0, 20, (2, 25)).astype(np.int32)).realize()

  def losses() -> list[Any]:
    weights = model.weights(0)
    loss = model.loss(weights, pieces, lambda q, k, v, **options: q.scaled_dot_product_attention(k, v, **options))
    return [x.numpy() for x in (loss, *loss.gradient(weights["0.q"], weights["0.k"], weights["0.v"]))]

  wanted = losses()
  with uopattn.patch(backend="kernel"):
    for got, want in zip(losses(), wanted, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_the_number_of_compute_units_is_known(device: str) -> None:
  assert target_of(device).multiprocessors == 64 if device == "WEBGPU" else (target_of(device).units or 0) >= 1


def test_lengths_of_loops_in_memory() -> None:
  """Of full tiles and of those that need a mask; in pages, in packed sequences, by a block mask and by a Variable."""
  random, results = np.random.default_rng(5), list[list[Any]]()

  def made(*shape: int) -> Tensor:
    return Tensor(random.standard_normal(shape).astype(np.float32)).realize()

  def numbers(*x: Any) -> Tensor:
    return Tensor(list(x), dtype=dtypes.int).realize()

  offsets, start = numbers(0, 20, 50), UOp.variable("start", 0, 60).bind(47)
  q, k, v, table = made(2, 4, 3, 16), made(6, 2, 16, 16), made(6, 2, 16, 16), numbers([3, 1, 0], [2, 4, 5])
  a, b, c, x, y, z = (made(50, 4, 16) if i < 3 else made(1, 2, 70, 16) for i in range(6))
  mask = uopattn.BlockMask.of(lambda b, h, i, j: j // 32 <= i // 32, 1, 1, 70, 70, block_m=32, block_n=32)
  for backend in ("kernel", "reference"):
    found = [
      uopattn.attention_paged(q, k, v, table, numbers(40, 20), enable_gqa=True, backend=backend),
      uopattn.attention_varlen(a, b, c, offsets, offsets, is_causal=True, backend=backend),
      attention(x, y, z, block_mask=mask, backend=backend),
      attention(x[:, :, :5], y, z, is_causal=True, q_start=start, backend=backend),
    ]
    results.append([x.numpy() for x in found])
  for got, wanted in zip(*results, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("views", ["x", "halves"])
def test_one_buffer_for_several_arguments(views: str) -> None:
  """Attention of x to x, and keys and values in one cache; with gradients."""
  random, found = np.random.default_rng(6), list[list[Any]]()
  x, cache = (random.standard_normal((1, 2, 20, n)).astype(np.float32) for n in (16, 32))
  for backend in ("kernel", "reference"):
    q, kv = (Tensor(y).realize().is_param_() for y in (x, cache))
    k, v = (q, q) if views == "x" else (kv[..., :16], kv[..., 16:])
    out = attention(q, k, v, backend=backend)
    out.square().sum().backward()
    found.append([out.numpy(), *(y.grad.numpy() for y in (q, kv) if y.grad is not None)])
  for got, wanted in zip(*found, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 520])
def test_gradients_of_chosen_keys(width: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """In chunks of two queries; above some head size through P and dS in memory."""
  test_sparse_gradients.count_of_chunks(monkeypatch, 2)
  case = test_sparse.Case((1, 4, 2, 3, 20, 9, width, width), FLOAT, device)
  test_sparse_gradients.check(
    *test_sparse_gradients.gradients(case, test_sparse_gradients.set_way(monkeypatch, "chosen"))
  )


def test_a_cache_under_tinyjit() -> None:
  check_steps(FLOAT, 60)
