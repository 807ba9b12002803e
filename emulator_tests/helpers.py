"""What the tests share: inputs, the one way to check an output, and machines other than this one."""

from typing import Any

import numpy as np
import pytest
from tinygrad import Context, Device, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.target import Target
from uopattn.toolchain import NoCompiler
from uopattn.verify import verify

DTYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


def qkv(
  B: int, Hq: int, Hkv: int, M: int, N: int, Dk: int, Dv: int, dtype: DType = dtypes.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
  """Normal random q, k and v of four dimensions."""
  random = np.random.default_rng(seed)  # numpy's, as tinygrad would compile three kernels for every shape
  shapes = ((B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv))
  q, k, v = (Tensor(random.standard_normal(shape, np.float32)).cast(dtype).realize() for shape in shapes)
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


def cpu_target(arch: str) -> Target:
  """A CPU in tinygrad's spelling, "arm64,cortex-a72"; skips the test where the compiler has no code for it."""
  Device["CPU"]  # compiles programs of its own when it is first asked for: they are for this machine
  try:
    with Context(DEV=f"CPU::{arch}"):
      return Target.of("CPU")
  except NoCompiler as error:
    pytest.skip(str(error))
