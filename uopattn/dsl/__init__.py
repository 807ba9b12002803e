"""The words that kernels are written in."""

from uopattn.dsl.math import LN2, LOG2E, exp2
from uopattn.dsl.scope import Loop, Scope, clamp, gated, least, sizes
from uopattn.dsl.words import as_type

__all__ = ["LN2", "LOG2E", "Loop", "Scope", "as_type", "clamp", "exp2", "gated", "least", "sizes"]
