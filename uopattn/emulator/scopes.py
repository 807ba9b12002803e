"""Check of where a lowered kernel computes its values: each before its uses, in a block that encloses them.

A block is the body of a loop or of a condition. C forgets a value at the end of the block in which it is computed, so
that a use elsewhere does not compile. Here, where values are remembered, it would be the value of another trip.
"""

from collections.abc import Sequence

from tinygrad.uop.ops import Ops, UOp

from .errors import OutOfScope, describe, expression

Path = tuple[UOp, ...]  # the RANGEs and IFs around a line, outermost first


def check_scopes(uops: Sequence[UOp]) -> None:
  """Check the linearised UOps of a kernel.

  Raises:
    OutOfScope: a value is used before it is computed, or outside of the block in which it is computed.
  """
  kernel = uops[-1].arg.name if uops[-1].arg is not None else "without a name"
  path: Path = ()
  computed: dict[UOp, Path] = {}
  for u in uops:
    values = _values(u)
    for x in u.src:
      if _is_text(x):
        continue
      if (inside := computed.get(x)) is None:
        raise OutOfScope(f"kernel {kernel}: {expression(x)} is used before it is computed\n  at {describe(u)}")
      if inside and inside[-1] not in path and x in values:
        where = f"computed {_named(inside)}, and used {_named(path)}, where it is not known"
        raise OutOfScope(f"kernel {kernel}: {expression(x)} is {where}\n  at {describe(u)}")
    if u.op in (Ops.END, Ops.ENDIF):
      path = path[:-1]
    elif u.op in (Ops.RANGE, Ops.IF):
      path = (*path, u)
    computed[u] = path


def _values(u: UOp) -> tuple[UOp, ...]:
  """Return the sources whose values `u` uses; others only come before it."""
  if u.op in (Ops.BARRIER, Ops.GROUP, Ops.NOOP, Ops.SINK):
    return ()
  return u.src[:1] if u.op is Ops.AFTER else u.src[1:] if u.op is Ops.END else u.src


def _is_text(u: UOp) -> bool:
  """Return whether `u` is written out wherever it is used: a literal, or nothing."""
  return u.op in (Ops.CONST, Ops.NOOP) or (u.op is Ops.CAST and u.src[0].op is Ops.CONST)


def _named(path: Path) -> str:
  names = [f"loop {x.arg[0]}" if x.op is Ops.RANGE else f"the condition {expression(x.src[0])}" for x in path]
  return "outside of all loops" if not path else "in " + ", in ".join(reversed(names))
