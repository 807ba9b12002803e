"""Scales of q, k and v, per tensor and per head."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import inputs, on, placed, qkv, served_by
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import attention, attention_paged, attention_varlen
from uopattn.api.attention import Call
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.schedule import DTYPES_8, HEAD_SCALES
from uopattn.proof.gate import verify
from uopattn.spec.arguments import Arguments

E4M3, HALF = dtypes.fp8e4m3, dtypes.half
Sizes = tuple[int, int, int, int, int, int, int]
PREFILL, DECODE = (2, 4, 2, 40, 70, 32, 16), (2, 4, 2, 1, 600, 32, 16)
HOPPER, CUDA, AMD = ("hopper_forward", "sm_90"), ("cuda_forward", "sm_89"), ("amd_forward", "gfx942")
PER_HEAD: dict[str, Any] = {
  name: np.exp2(np.random.default_rng(seed).uniform(-3, 1, (2, 2))).astype(np.float32)
  for seed, name in enumerate(HEAD_SCALES)
}
PER_BATCH = {"k_scale": np.array([[0.5], [0.25]], np.float32), "v_scale": np.array([3, 0.5], np.float32)}
PER_TENSOR = {"q_scale": 0.5, "k_scale": 0.25, "v_scale": 3}


def tensors(options: dict[str, Any]) -> Any:
  return {name: placed(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def check(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], cut: bool = False, backend: str = "kernel") -> None:
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **tensors(options))
  Tensor.realize(out, lse)
  assert out.dtype == q.dtype
  for report in verify(q, k, v, out, lse, cut=cut, **options):
    assert report.correct, str(report)


@contextmanager
def machine(kernel: str, arch: str) -> Iterator[None]:
  with on(arch), served_by(kernel):
    yield


@pytest.mark.parametrize(
  ("kernel", "sizes", "options", "dtype"),
  [
    (HOPPER, PREFILL, PER_HEAD | {"is_causal": True}, E4M3),
    (CUDA, DECODE, PER_HEAD | {"softcap": 2.0}, E4M3),  # packed heads, and two splits
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        *((HOPPER, PREFILL, options, dtype) for options in (PER_HEAD, PER_BATCH, PER_TENSOR) for dtype in DTYPES_8),
        *((CUDA, PREFILL, options, dtype) for options in (PER_HEAD, PER_BATCH, PER_TENSOR) for dtype in DTYPES_8),
        (HOPPER, PREFILL, PER_HEAD, HALF),
        (AMD, PREFILL, PER_HEAD | {"is_causal": True}, E4M3),
        (AMD, PREFILL, PER_TENSOR | {"softcap": 2.0}, E4M3),
        (AMD, DECODE, PER_HEAD, HALF),
        (("cuda_wide_forward", "sm_80"), (2, 4, 2, 3, 70, 272, 264), PER_HEAD, HALF),
        (("amd_forward", "gfx1201"), PREFILL, PER_HEAD, E4M3),
        (CUDA, PREFILL, PER_HEAD | {"scale": -0.3, "window": (20, 0)}, E4M3),
        (CUDA, PREFILL, PER_HEAD | {"scale": 1.0, "score_mod": lambda s, b, h, i, j: s - 0.1 * h}, E4M3),
        (CUDA, PREFILL, PER_HEAD | {"sinks": np.arange(-2, 2, dtype=np.float32)}, E4M3),
        (HOPPER, PREFILL, PER_HEAD | {"sinks": np.arange(-2, 2, dtype=np.float32)}, E4M3),
        (CUDA, DECODE, PER_HEAD, E4M3),
        (CUDA, PREFILL, {"q_scale": np.array([0, 1e-30], np.float32), "is_causal": True}, E4M3),
        (CUDA, PREFILL, {"k_scale": np.array([[1e-38, 100]], np.float32), "v_scale": 0, "is_causal": True}, HALF),
      )
    ),
  ],
)
def test_kernels(kernel: tuple[str, str], sizes: Sizes, options: dict[str, Any], dtype: DType) -> None:
  with machine(*kernel):
    check(*inputs(*sizes, dtype), options, kernel is HOPPER and dtype in DTYPES_8)


@pytest.mark.parametrize(
  "options", [PER_HEAD, pytest.param(PER_TENSOR, marks=pytest.mark.slow)], ids=["head", "tensor"]
)
def test_plain_ops(options: dict[str, Any]) -> None:
  check(*qkv(2, 4, 2, 5, 7, 16, 8), options, backend="reference")


def of_another_head(self: HeadRules, *scales: UOp | None) -> UOp | None:
  return right(HeadRules(self.rules, self.b, 1 - self.h // self.rules.group), *scales)


def of_another_batch(self: HeadRules, *scales: UOp | None) -> UOp | None:
  return right(HeadRules(self.rules, 1 - self.b, self.h), *scales)


def not_of_values(self: HeadRules, *scales: UOp | None) -> UOp | None:
  return None if len(scales) == 1 else right(self, *scales)


def of_queries_alone(self: HeadRules, *scales: UOp | None) -> UOp | None:
  return right(self, scales[0])


right = HeadRules._of_head


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [HOPPER, CUDA], ids=str)
@pytest.mark.parametrize("mistake", [of_another_head, of_another_batch, not_of_values, of_queries_alone])
def test_a_mistake_is_caught(mistake: Any, kernel: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(HeadRules, "_of_head", mistake)
  with machine(*kernel), pytest.raises(AssertionError, match="relative error"):
    check(*inputs(*PREFILL, E4M3), PER_HEAD, kernel is HOPPER)


def test_one_kernel_serves_all_numbers() -> None:
  q, k, v = qkv(*PREFILL)
  specs = {Call.of(q, k, v, Arguments(enable_gqa=True, k_scale=x)).spec for x in (0.5, 2, 1e-9)}
  assert len(specs) == 1


@pytest.mark.slow
def test_negative_scales_are_nan() -> None:
  with machine(*CUDA):
    q, k, v = inputs(1, 2, 2, 3, 40, 16, 16, HALF)
    out = attention(q, k, v, k_scale=placed(np.array([1, -1], np.float32)), backend="kernel").numpy()
  assert np.isnan(out[0, 1]).all()
  assert np.isfinite(out[0, 0]).all()


@pytest.mark.slow
def test_packed_sequences() -> None:
  scales = {name: x[:1] for name, x in PER_HEAD.items()}
  with machine(*CUDA):
    q, k, v = (x[0].transpose(0, 1).contiguous().realize() for x in inputs(1, 4, 2, 60, 60, 32, 16, E4M3))
    out = attention_varlen(q, k, v, [0, 20, 60], [0, 20, 60], enable_gqa=True, backend="kernel", **tensors(scales))
    for rows in (slice(0, 20), slice(20, 60)):
      own = [x[rows].transpose(0, 1).unsqueeze(0).contiguous().realize() for x in (q, k, v, out)]
      (report,) = verify(own[0], own[1], own[2], own[3], **scales)
      assert report.correct, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_pages(backend: str) -> None:
  def paged(x: Tensor) -> Tensor:
    return x.reshape(2, 2, 3, 16, -1).permute(0, 2, 1, 3, 4).reshape(6, 2, 16, -1).contiguous().realize()

  with machine(*CUDA):
    q, k, v = inputs(2, 4, 2, 3, 48, 32, 16, E4M3)
    table, lengths = placed(np.arange(6, dtype=np.int32).reshape(2, 3)), placed(np.array([48, 48], np.int32))
    given = {"enable_gqa": True, "backend": backend} | tensors(PER_HEAD)
    out = attention_paged(q, paged(k), paged(v), table, lengths, **given).realize()
    (report,) = verify(q, k, v, out, **PER_HEAD)
  assert report.correct, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_several_devices(axis: int | None) -> None:
  """Heads, batches or the sequence divided; every device has the scales of its shard."""
  devices = ("CPU", "CPU:1")
  given = qkv(2, 4, 2, 8, 8, 16, 8)
  q, k, v = (x.shard(devices, axis) for x in given)
  of_scales = axis if axis in (0, 1) else None
  scales: Any = {name: placed(x).shard(devices, of_scales) for name, x in PER_HEAD.items()}
  out, lse = attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True, **scales)
  Tensor.realize(out, lse)
  for report in verify(*given, placed(out.numpy()), placed(lse.numpy()), is_causal=True, **PER_HEAD):
    assert report.correct, str(report)


@pytest.mark.slow
def test_gradients_by_plain_ops() -> None:
  """They are those of operands that were multiplied before."""
  found = []
  for before in (False, True):
    q, k, v = (x.is_param_() for x in qkv(2, 4, 2, 5, 7, 16, 8))
    scales = tensors(PER_HEAD)
    if before:
      of_q, of_k, of_v = (x.reshape(2, 2, 1, 1) for x in scales.values())
      given = q * of_q.repeat_interleave(2, 1), k * of_k, v * of_v
      out = attention(*given, enable_gqa=True, backend="reference")
    else:
      out = attention(q, k, v, enable_gqa=True, **scales)
    out.square().sum().backward()
    found.append([x.grad.numpy() for x in (q, k, v) if x.grad is not None])
  for a, b in zip(*found, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


BOUNDS = r"it must be a number, finite in float32 and at least 0, or a float Tensor that broadcasts to .* = \(2, 2\)"


@pytest.mark.parametrize("name", HEAD_SCALES)
@pytest.mark.parametrize(
  ("value", "error", "said"),
  [
    (-1.0, ValueError, f"is -1.0; {BOUNDS}"),
    (math.nan, ValueError, f"is nan; {BOUNDS}"),
    (math.inf, ValueError, "is inf; "),
    (1e39, ValueError, r"is 1e\+39; "),
    pytest.param(10**400, ValueError, "is inf; ", id="10**400"),
    (True, TypeError, "is True; "),
    ("one", TypeError, "is 'one'; "),
    ([1.0, 2.0], TypeError, f"is a list; {BOUNDS}"),
    (Tensor([1, 2]), TypeError, f"has dtype int; {BOUNDS}"),
    (Tensor([1.0, 2.0, 3.0, 4.0]), ValueError, rf"has shape \(1, 4\); {BOUNDS}"),
    (Tensor.ones(2, 2, 1), ValueError, r"has shape \(2, 2, 1\); "),
  ],
)
def test_what_is_refused(name: str, value: Any, error: type[Exception], said: str) -> None:
  with pytest.raises(error, match=f"{name} {said}"):
    attention(*qkv(*PREFILL), enable_gqa=True, **{name: value})


def test_other_kernels_say_so() -> None:
  with served_by("cpu_forward"), pytest.raises(ValueError, match="cpu_forward does not support v_scale; multiply"):
    attention(*qkv(*PREFILL), enable_gqa=True, v_scale=2.0, backend="kernel")
