"""Building blocks for kernels that are written as UOp graphs."""

from uopattn.dsl.math import LOG2E, exp2
from uopattn.dsl.scope import Loop, Scope, as_type, clamp, contains, gated, least, make_kernel, sizes

__all__ = ["LOG2E", "Loop", "Scope", "as_type", "clamp", "contains", "exp2", "gated", "least", "make_kernel", "sizes"]
