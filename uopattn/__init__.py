"""Attention for tinygrad: kernels written by hand as UOp graphs, checked by an emulator and a float64 oracle."""

from pathlib import Path

from uopattn.runtime.clang import provide_clang

_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():  # in a checkout, kernels/ is beside this folder
  __path__.append(str(_here.parent))

provide_clang()

import uopattn.emulator  # noqa: E402  (registers the device EMU)
import uopattn.mods  # noqa: E402
import uopattn.onnx  # noqa: E402
import uopattn.trust.guard  # noqa: E402, F401  (checks kernels at their first use)
from uopattn.api.append_paged import append_paged  # noqa: E402
from uopattn.api.attention import attention  # noqa: E402
from uopattn.api.flash import flash  # noqa: E402
from uopattn.api.kv_cache import KVCache  # noqa: E402
from uopattn.api.merge import merge_states  # noqa: E402
from uopattn.api.paged import attention_paged  # noqa: E402
from uopattn.api.ring_cache import RingCache  # noqa: E402
from uopattn.api.sparse import attention_sparse  # noqa: E402
from uopattn.api.varlen import attention_varlen  # noqa: E402
from uopattn.integrate.patch import patch  # noqa: E402
from uopattn.spec.block_mask import BlockMask  # noqa: E402
from uopattn.tuning.api import tune, warm  # noqa: E402
from uopattn.version import __version__  # noqa: E402

__all__ = [
  "BlockMask",
  "KVCache",
  "RingCache",
  "__version__",
  "append_paged",
  "attention",
  "attention_paged",
  "attention_sparse",
  "attention_varlen",
  "flash",
  "merge_states",
  "patch",
  "tune",
  "warm",
]
