"""The kernels for GPUs without matrix units where a runtime of OpenCL or WebGPU runs them: a GPU's, or one for CPUs.

Nothing else runs them but the emulator. OpenCL on a CPU is Debian's pocl-opencl-icd, which takes some 10 s to compile a
kernel. WebGPU on a CPU is PyPI's dawn-python, whose library `WEBGPU_PATH` names, on Debian's mesa-vulkan-drivers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conformance import SUBJECTS, Sizes
from conformance_backward import Case, machine
from helpers import on_device, qkv, take_tiles
from norm_rope import Case as NormRopeCase
from norm_rope import check_case as check_norm_rope
from tiny_model import TinyModel
from tinygrad import Context, Device, Tensor, dtypes
from tinygrad.dtype import DType

import uopattn
from uopattn import attention
from uopattn.kernels import generic_forward
from uopattn.measure.program import reason
from uopattn.plan.target import target_of

Options = dict[str, Any]
GENERIC = SUBJECTS["generic"]
HALF, BFLOAT, FLOAT = dtypes.float16, dtypes.bfloat16, dtypes.float32


@pytest.fixture(autouse=True, params=["CL", pytest.param("WEBGPU", marks=pytest.mark.slowest)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
  """The default device."""
  name = str(request.param)
  try:
    with Context(ALLOW_DEVICE_USAGE=1):
      Device[name]
  except Exception as error:  # whatever a missing driver raises
    pytest.skip(f"no {name}: {reason(error)}")
  with Context(DEV=name):
    yield name


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
  if device == "WEBGPU" and "kv_lengths" in options:
    with pytest.raises(ValueError, match="no barriers in a loop whose length is in memory"):
      check(dtype, sizes, options)
    return
  take_tiles(monkeypatch, generic_forward.Tiles(16, 8, 2, 4))
  check(dtype, sizes, options)


def test_appending_with_norms_and_rotary_positions() -> None:
  check_norm_rope(NormRopeCase(dtype=FLOAT, of=FLOAT, D=(18, 7), R=3), Device.DEFAULT)


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
