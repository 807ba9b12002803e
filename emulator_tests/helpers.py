"""What the tests share: inputs, and the one way to check an output."""

from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.verify import verify

DTYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


def qkv(
  B: int, Hq: int, Hkv: int, M: int, N: int, Dk: int, Dv: int, dtype: DType = dtypes.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
  """Normal random q, k and v of four dimensions."""
  Tensor.manual_seed(seed)
  shapes = ((B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv))
  q, k, v = (Tensor.randn(*shape, dtype=dtypes.float32).cast(dtype).realize() for shape in shapes)
  return q, k, v


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None, **options: Any) -> None:
  """Fails unless the output, and the LSE if given, pass the gate."""
  for report in verify(q, k, v, out, lse, **options):
    assert report.correct, f"worst at {report.worst}: {report}"


def check_attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "kernel", **options: Any) -> None:
  """Runs `attention` and fails unless its output and LSE pass the gate."""
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **options)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)
