"""Attention for tinygrad: kernels written by hand as UOp graphs, verified on every machine."""

from uopattn.toolchain import provide_clang

provide_clang()

import uopattn.emulator  # noqa: E402, F401  (makes the device EMU known)
from uopattn.attention import attention  # noqa: E402
from uopattn.block_mask import BlockMask  # noqa: E402
from uopattn.flash import flash  # noqa: E402
from uopattn.kv_cache import KVCache  # noqa: E402
from uopattn.merge import merge_states  # noqa: E402
from uopattn.paged import attention_paged  # noqa: E402
from uopattn.varlen import attention_varlen  # noqa: E402

__all__ = ["BlockMask", "KVCache", "attention", "attention_paged", "attention_varlen", "flash", "merge_states"]
