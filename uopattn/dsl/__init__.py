"""The words that kernels are written in."""

from uopattn.dsl.math import LN2, LOG2E, exp2
from uopattn.dsl.scope import Loop, Scope, clamp, gated, sizes

__all__ = ["LN2", "LOG2E", "Loop", "Scope", "clamp", "exp2", "gated", "sizes"]
