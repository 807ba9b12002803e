"""On-disk cache of lowered kernels, shared by all processes.

tinygrad caches compiled binaries in a database on disk (`CACHEDB`), but not the sources, and lowering a graph to its
source is the slowest part of a first call. This module stores the sources in the same database, under tinygrad's own
key for a program (the graph, the renderer, its target and the settings), with the versions of what else they depend on.
A changed kernel, tile size, flag or machine therefore gets a new entry. `CACHELEVEL=0` turns off both caches.
"""

import contextlib
import functools
import gc
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program, to_program_key
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import diskcache_put
from tinygrad.renderer import Estimates, Renderer
from tinygrad.renderer.isa import ISARenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from uopattn.dsl.instructions import BY_TEXT
from uopattn.runtime.machine import installed_version
from uopattn.runtime.store import Damaged, checksum, stored, with_checksum

log = logging.getLogger("uopattn")
TABLE = "uopattn_source"
INSTRUCTIONS = "uopattn.dsl.instruction"  # the module, and how the names of those that declare instructions begin
ONLY_CACHED: ContextVar[bool] = ContextVar("only_cached", default=False)


class NotCachedError(Exception):
  """Raised inside `only_cached` for a kernel that would have to be lowered."""


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
  """Lower nothing inside the `with` block: a kernel that is not in the cache raises NotCachedError."""
  token = ONLY_CACHED.set(True)
  try:
    yield
  finally:
    ONLY_CACHED.reset(token)


def finished(kernel: UOp, renderer: Renderer, estimates: Estimates) -> UOp:
  """Compile a kernel and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo.
    renderer: the renderer of the device that runs the kernel.
    estimates: the work that tinygrad reports for the kernel.
  """
  params = sorted((u for u in kernel.toposort() if u.op is Ops.PARAM), key=lambda u: u.arg.slot)
  # tinygrad numbers its own arguments from the count of the used buffers on and sorts all by number, and its CUDA
  # graphs pass all buffers. So every buffer must be used. Only lowering shows which are not: an attention that sees no
  # key does not read q.
  buffers = [u for u in params if u.arg.slot >= 0]
  try:
    info, source, binary = program(_numbered(kernel, buffers), renderer)
    used = info.globals
  except TypeError:  # tinygrad's argument got the number of a buffer of ints, and sorting cannot order the two
    stride = len(buffers) + 1
    used = tuple(i - stride for i in program(_numbered(kernel, buffers, stride), renderer)[0].globals)
  if len(used) < len(buffers):
    rest = (u for i, u in enumerate(buffers) if i not in used)
    info, source, binary = program(_numbered(kernel.replace(src=(*kernel.src, *rest)), buffers), renderer)
  globals_, outs, ins = (tuple(buffers[i].arg.slot for i in x) for x in (info.globals, info.outs, info.ins))
  info = replace(info, globals=globals_, outs=tuple(sorted({*outs, *_written(kernel)})), ins=ins)
  # A new SINK, because tinygrad would inspect the kernel's own graph and reject its open axes. It is without buffers,
  # which tinygrad would renumber in the gradient of a `tinygrad.function`; but with them where there are Variables, as
  # runtimes look for these behind the buffers.
  seen = params if len(params) > len(buffers) else []
  sink = UOp.sink(*seen, arg=KernelInfo(name=kernel.arg.name, estimates=estimates))
  code = UOp(Ops.SOURCE, arg=source), UOp(Ops.BINARY, arg=binary)
  return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*sink.src, sink)), *code), arg=info)


def _written(kernel: UOp) -> set[int]:
  """Return the slots of the buffers that instructions write to, of which tinygrad knows only stores."""
  customs = (u for u in kernel.toposort() if u.op is Ops.CUSTOM and u.arg in BY_TEXT and BY_TEXT[u.arg].writes)
  return {u.src[0].buf_uop.arg.slot for u in customs}


def _numbered(kernel: UOp, buffers: list[UOp], first: int = 0) -> UOp:
  """Return the kernel with these buffers numbered from `first` on."""
  anew = {u: u.replace(arg=replace(u.arg, slot=i)) for i, u in enumerate(buffers, first) if u.arg.slot != i}
  return kernel.substitute(anew, walk=True)  # all at once: a new number may be another buffer's old one


def program(kernel: UOp, renderer: Renderer) -> tuple[ProgramInfo, str, bytes]:
  """Return a kernel's launch information, source and machine code.

  Args:
    kernel: a SINK with KernelInfo.
    renderer: the renderer of the device that runs the kernel.
  """
  # tinygrad would count them, and nothing uses the result.
  kernel = kernel.replace(arg=replace(kernel.arg, estimates=Estimates()))
  # The source of an ISARenderer cannot be compiled again. Another tinygrad release lowers differently, so without a
  # known version nothing is cached.
  if isinstance(renderer, ISARenderer) or None in _releases():
    return _unpacked(to_program(kernel, renderer))
  key = checksum(repr((to_program_key(kernel, renderer), _versions(type(renderer).__module__))))
  if (entry := _read(key)) is not None:
    return _info(entry["info"], renderer), entry["source"], renderer.compiler.compile_cached(entry["source"])
  if ONLY_CACHED.get():
    raise NotCachedError(kernel.arg.name)
  log.info("lowering %s", kernel.arg.name)
  with _no_garbage_collection():
    info, source, binary = _unpacked(to_program(kernel, renderer))
  diskcache_put(TABLE, key, with_checksum(json.dumps({"info": _record(info), "source": source})))
  return info, source, binary


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
  """Disable garbage collection; lowering takes a third longer with it, as it makes millions of objects that live on."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


@functools.cache
def _versions(renderers: str) -> tuple[str | None, ...]:
  """Return what a source depends on besides its key: the releases, and a hash of the texts of modules.

  They are the renderer's, and those of instructions, whose LLVM IR is in no graph.
  """
  names = [renderers, *sorted(x for x in sys.modules if x.startswith(INSTRUCTIONS))]
  with contextlib.suppress(OSError):  # the source of a module is not available
    return *_releases(), checksum("".join(inspect.getsource(sys.modules[x]) for x in names))
  return _releases()


@functools.cache
def _releases() -> tuple[str | None, str | None]:
  return installed_version("tinygrad"), installed_version("uopattn")


def _unpacked(lowered: UOp) -> tuple[ProgramInfo, str, bytes]:
  """Return what `program` does.

  Raises:
    RuntimeError: tinygrad made two loops of one, of which it ends only one: it simplified the number of trips
      by a condition that holds at some of its uses alone.
  """
  _, linear, source, binary = lowered.src
  axes = Counter(u.arg for u in linear.src if u.op is Ops.RANGE)
  if twice := [axis for axis, count in axes.items() if count > 1]:
    raise RuntimeError(
      f"{lowered.arg.name}: tinygrad lowers axis {twice[0][0]} to two loops; please report this kernel"
    )
  return lowered.arg, source.arg, binary.arg


def _read(key: str) -> Any:
  """Return the cache entry, or None if it is missing or damaged."""
  try:
    return stored(TABLE, key)
  except Damaged:
    log.info("a damaged cache entry is replaced")
    return None


def _record(info: ProgramInfo) -> dict[str, Any]:
  """Return the fields of `info` that JSON can hold."""
  variables = [(v.arg.slot, v.dtype.name, v.arg.vmin_vmax, v.arg.multiple_of, v.arg.name) for v in info.vars]
  fields = ("name", "global_size", "local_size", "globals", "outs", "ins")
  return {name: getattr(info, name) for name in fields} | {"vars": variables}


def _info(record: dict[str, Any], renderer: Renderer) -> ProgramInfo:
  variables = [
    UOp.param(
      slot,
      getattr(dtypes, dtype),
      (),
      vmin_vmax=bounds and tuple(bounds),
      multiple_of=multiple,
      name=name,
      addrspace=AddrSpace.ALU,
    )
    for slot, dtype, bounds, multiple, name in record["vars"]
  ]
  rest: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
  return ProgramInfo(**(rest | {"vars": tuple(variables), "target": renderer.target}))
