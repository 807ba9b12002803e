"""The machine code of the AMX kernels on processors that have AVX-512 but no AMX: its tiles and products are C code.

The emulator knows what each word means; here the text of every other word runs, as the compiler makes it.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gradients import check_gradients
from helpers import check_attention, qkv, take_tiles
from test_amx import with_tiles
from tinygrad import Context, Device, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from uopattn.kernels import amx_backward, amx_forward
from uopattn.plan import dispatch, residuals
from uopattn.runtime import threads
from uopattn.runtime.cpu import AlignedRenderer
from uopattn.runtime.prepare import compiled

# Local to the kernel, as tinygrad's loader has no static data.
TILES = ") {\n  typedef unsigned char tile[16][64]; __attribute__((aligned(64))) tile tiles[8];\n"
WORDS = """
#define __builtin_ia32_tile_loadconfig(c) ((void)(c))
#define __builtin_ia32_tilerelease()
#define __builtin_ia32_tilezero(t) __builtin_memset(tiles[t], 0, 1024)
#define __builtin_ia32_tileloadd64(t, p, s) \\
  for (int i = 0; i < 16; i++) __builtin_memcpy(tiles[t][i], (const char *)(p) + i * (s), 64)
#define __builtin_ia32_tilestored64(t, p, s) \\
  for (int i = 0; i < 16; i++) __builtin_memcpy((char *)(p) + i * (s), tiles[t][i], 64)
#define NUMBER(t, i, j) ({ unsigned short h; __builtin_memcpy(&h, &tiles[t][i][2 * (j)], 2); \\
  __builtin_bit_cast(float, (unsigned)h << 16); })
#define __builtin_ia32_tdpbf16ps(c, a, b) for (int i = 0; i < 16; i++) { \\
  float s[16]; __builtin_memcpy(s, tiles[c][i], 64); \\
  for (int k = 0; k < 32; k++) for (int j = 0; j < 16; j++) \\
    s[j] += NUMBER(a, i, k) * NUMBER(b, k / 2, 2 * j + k % 2); \\
  __builtin_memcpy(tiles[c][i], s, 64); }
"""
AMX_FLAGS = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}


class InC(AlignedRenderer):
  """AlignedRenderer with the tiles in C."""

  def render(self, uops: list[UOp]) -> str:
    return WORDS + super().render(uops).replace(") {\n", TILES, 1)


@pytest.fixture
def tiles_in_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  info = Path("/proc/cpuinfo")
  if not info.exists() or not set(info.read_text().split()) >= AMX_FLAGS:
    pytest.skip("this machine has no AVX-512")
  target = replace(Device["CPU"].renderer.target, arch="x86_64,native,prefer-vector-width=512")
  monkeypatch.setattr(threads, "kernel_renderer", lambda device: InC(target))
  for module in dispatch, residuals:
    monkeypatch.setattr(module, "target_of", lambda device: with_tiles())
  for tiles in amx_forward.Tiles(64, 32, 2), amx_backward.Tiles(64, 32, 3):
    take_tiles(monkeypatch, tiles)
  compiled.cache_clear()
  with Context(CACHELEVEL=0):
    yield
  compiled.cache_clear()


@pytest.mark.kinds(dtype=(dtypes.bfloat16,))
@pytest.mark.usefixtures("tiles_in_c")
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def in_c_matches_the_oracle(dtype: DType) -> None:
  check_attention(*(x := qkv(1, 4, 2, 77, 131, 33, 17, dtype)), is_causal=True, q_start=60)
  check_gradients(*x, {"is_causal": True, "q_start": 60})


@pytest.mark.usefixtures("tiles_in_c")
def in_c_matches_the_oracle_in_float32() -> None:
  check_attention(*qkv(1, 2, 1, 77, 131, 100, 40, dtypes.float32), is_causal=True, q_start=60)


@pytest.mark.slow
def test_in_a_process_of_its_own(request: pytest.FixtureRequest) -> None:
  """Kernels call memset here, and tinygrad's loader reaches only 2 GiB: too little where many tests have run before."""
  more = [x for x in ("--values", "--slow") if request.config.getoption(x)]
  words = ["-q", "-n0", "-p", "no:cacheprovider", "-o", "python_functions=in_c_*", __file__, *more]
  done = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout
