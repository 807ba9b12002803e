"""Which Python lines built a kernel, so that an error can name them.

Lowering rewrites a kernel's UOps until none is the one that Python made, and tinygrad keeps no record. What survives
are buffers, barriers and instruction texts: for an error at a store to LDS 1, the lines that store to LDS 1 are known.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import tinygrad
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import KernelInfo, Ops, UOp

TINYGRAD = os.path.dirname(tinygrad.__file__) + os.sep
# Files between a kernel's line and the UOp it makes: tinygrad, the words, the emulator, code that tinygrad generates.
PACKAGE = os.path.dirname(os.path.dirname(__file__))
BETWEEN = (TINYGRAD, os.path.join(PACKAGE, "dsl") + os.sep, os.path.join(PACKAGE, "emulator") + os.sep, "<")
# UOps made under these come from lowering and running, not from writing a kernel.
LOWERING = tuple(TINYGRAD + part + os.sep for part in ("codegen", "engine", "schedule"))
TRACED = (Ops.STORE, Ops.INDEX, Ops.LOAD, Ops.BARRIER, Ops.WMMA, Ops.CUSTOM, Ops.CUSTOMI)
MAKES_UOP = type(UOp).__call__.__code__

Key = tuple[Any, ...]
_lines: dict[str, dict[Key, set[str]]] = {}  # by kernel and by what survives lowering


def _key(u: UOp) -> Key:
  if u.op in (Ops.STORE, Ops.INDEX, Ops.LOAD):
    buffer = u.src[0].buf_uop
    kind = "store" if u.op is Ops.STORE else "use"
    return kind, buffer.arg.slot if buffer.op in (Ops.PARAM, Ops.BUFFER) else None, buffer.addrspace
  return (u.op, u.arg if u.op in (Ops.CUSTOM, Ops.CUSTOMI) else None)


def _caller(frame: FrameType | None) -> str | None:
  """The first line outside tinygrad and the kernel words; None while a kernel is being lowered."""
  while frame is not None and (name := frame.f_code.co_filename).startswith(BETWEEN):
    if name.startswith(LOWERING):
      return None
    frame = frame.f_back
  return None if frame is None else f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextmanager
def located() -> Iterator[None]:
  """Records the Python lines of the kernels built inside the `with` block (which slows whatever runs in it).

  Building is what `Tensor.custom_kernel` does at once, before anything is lowered or runs. Debuggers and coverage tools
  that use `sys.setprofile` pause meanwhile.
  """
  found: dict[Key, set[str]] = defaultdict(set)

  def watch(frame: FrameType, event: str, result: Any) -> None:
    if event != "return" or frame.f_code is not MAKES_UOP or not isinstance(result, UOp):
      return
    sink = result.op is Ops.SINK and isinstance(result.arg, KernelInfo)
    if not (sink or result.op in TRACED) or (line := _caller(frame)) is None:
      return
    if not sink:
      found[_key(result)].add(line)
    else:
      _lines[ansistrip(result.arg.name)] = {key: set(lines) for key, lines in found.items()}
      found.clear()

  before = sys.getprofile()
  sys.setprofile(watch)
  try:
    yield
  finally:
    sys.setprofile(before)


def lines_of(kernel: str, u: UOp) -> list[str]:
  """The Python lines, as file:line, that may have built the lowered UOp `u`: none unless the kernel was `located`."""
  if (known := _lines.get(kernel)) is None or u.op not in TRACED:
    return []
  key = _key(u)
  found = known.get(key, set())
  if key[0] == "use":
    found = found - known.get(("store", *key[1:]), set()) or found
  return sorted(found)
