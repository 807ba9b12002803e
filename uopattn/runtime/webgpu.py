"""Changes to a kernel's graph for WebGPU and its shading language (WGSL).

WGSL takes a barrier in a loop only if it can prove that the loop's length is the same for all threads of a workgroup.
What is read from a buffer that may be written, as all of tinygrad's, counts as different, but not what
`workgroupUniformLoad` reads from the workgroup's memory.

WebGPU runs no kernel to which one such buffer is given twice, as for attention of x to x: it must be one argument.

Sources: W3C, "WebGPU Shading Language", "Uniformity" and "workgroupUniformLoad"; W3C, "WebGPU", "usage scope".
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, PatternMatcher, UPat, graph_rewrite

from uopattn.dsl import clamp
from uopattn.runtime.gpu import webgpu_limits

UNIFORM_LOAD = "workgroupUniformLoad(&{0})"


def with_uniform_loops(kernel: UOp) -> UOp:
  """Return the kernel with each length of a loop that is read from global memory passed through workgroup memory."""
  slots = [u.arg.slot for u in kernel.toposort() if u.op is Ops.BUFFER]
  return graph_rewrite(kernel, _LOOPS, count(max(slots, default=0) + 1), name="uniform loops")


def _uniform(ctx: Iterator[int], loop: UOp) -> UOp | None:
  length = loop.src[0]
  if not _reads_memory(length):
    return None
  memory = UOp.placeholder((1,), dtypes.int, next(ctx), addrspace=AddrSpace.LOCAL)
  stored = memory[0].store(length.cast(dtypes.int))  # the same number by all threads
  loaded = UOp(Ops.CUSTOM, dtypes.int, src=(memory.after(stored)[0],), arg=UNIFORM_LOAD).cast(length.dtype)
  return loop.replace(src=(clamp(loaded, int(length.vmin), int(length.vmax)), *loop.src[1:]))


def _reads_memory(length: UOp) -> bool:
  """Whether a length is computed from a load of global memory, but for one that is already passed on."""
  nodes = length.toposort(gate=lambda u: u.op is not Ops.CUSTOM)
  return any(u.op is Ops.LOAD and u.src[0].addrspace is AddrSpace.GLOBAL for u in nodes)


def with_each_buffer_once(kernel: UOp, arguments: Sequence[UOp]) -> tuple[UOp, list[int]]:
  """Return a kernel that takes each buffer once, and the indices of its arguments among those with slots from 0 on."""
  whole = [x.base if x.base.numel() == x.numel() else x for x in arguments]
  once = list(dict.fromkeys(whole))
  if len(once) == len(whole):
    return kernel, list(range(len(whole)))
  slots = [once.index(x) for x in whole]
  params = [u for u in kernel.toposort() if u.op is Ops.PARAM and 0 <= u.arg.slot < len(slots)]
  renamed = {u: u.replace(arg=replace(u.arg, slot=slots[u.arg.slot])) for u in params}
  return kernel.substitute(renamed, walk=True), [whole.index(x) for x in once]


def check_number(count: int, device: str) -> None:
  """Raise ValueError if a kernel takes more buffers than it may."""
  if count > (most := webgpu_limits(device)[0]):
    raise ValueError(f"a kernel would take {count} Tensors, and {device} allows {most}: use plain ops for a part of it")


_LOOPS = PatternMatcher([(UPat(Ops.RANGE, name="loop"), _uniform)])
