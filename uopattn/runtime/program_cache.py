"""Lowered kernels, kept on disk: a process that meets a kernel for the first time need not lower it again.

tinygrad keeps what its compilers make in a database of its own (`CACHEDB`), but not the sources, and lowering a graph
to its source takes longer than all else that a first call does. The sources are put into the same database, under what
tinygrad itself takes for a program's identity: the graph, the renderer, its target, and the settings. So a changed
kernel, tile size, flag or machine is another entry. `CACHELEVEL=0` turns both off.
"""

import contextlib
import functools
import gc
import hashlib
import inspect
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program, to_program_key
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.renderer import Estimates, Renderer
from tinygrad.renderer.isa import ISARenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from uopattn.runtime.machine import installed_version

log = logging.getLogger("uopattn")
TABLE = "uopattn_source"


def finished(kernel: UOp, renderer: Renderer, estimates: Estimates) -> UOp:
  """The compiled PROGRAM that `Tensor.custom_kernel` takes in the place of a kernel's graph.

  Args:
    kernel: a SINK with KernelInfo.
    renderer: of the device that is to run it.
    estimates: what tinygrad is to report as the kernel's work.
  """
  params = sorted((u for u in kernel.toposort() if u.op is Ops.PARAM), key=lambda u: u.arg.slot)
  # tinygrad numbers its own arguments after as many buffers as are used, and orders all by number; and its CUDA graphs
  # pass all buffers. So all are to be used. Which are not, lowering tells: an attention that sees no key reads no q.
  buffers = [u for u in params if u.arg.slot >= 0]
  try:
    info, source, binary = program(_numbered(kernel, buffers), renderer)
    found = info.globals
  except TypeError:  # its own argument got the number of a buffer of ints, and it cannot tell which comes first
    apart = len(buffers) + 1
    found = tuple(i - apart for i in program(_numbered(kernel, buffers, apart), renderer)[0].globals)
  if len(found) < len(buffers):
    rest = (u for i, u in enumerate(buffers) if i not in found)
    info, source, binary = program(_numbered(kernel.replace(src=(*kernel.src, *rest)), buffers), renderer)
  globals_, outs, ins = (tuple(buffers[i].arg.slot for i in x) for x in (info.globals, info.outs, info.ins))
  info = replace(info, globals=globals_, outs=outs, ins=ins)
  # tinygrad would look into the kernel's own graph and find its axes open.
  sink = UOp.sink(*params, arg=KernelInfo(name=kernel.arg.name, estimates=estimates))
  code = UOp(Ops.SOURCE, arg=source), UOp(Ops.BINARY, arg=binary)
  return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*sink.src, sink)), *code), arg=info)


def _numbered(kernel: UOp, buffers: list[UOp], first: int = 0) -> UOp:
  """The kernel with these buffers numbered from `first` on."""
  anew = {u: u.replace(arg=replace(u.arg, slot=i)) for i, u in enumerate(buffers, first) if u.arg.slot != i}
  return kernel.substitute(anew, walk=True)  # at once: one may have had the number that another gets


def program(kernel: UOp, renderer: Renderer) -> tuple[ProgramInfo, str, bytes]:
  """How a kernel is launched, its source and its machine code.

  Args:
    kernel: a SINK with KernelInfo.
    renderer: of the device that is to run it.
  """
  # An ISARenderer's source is none that a compiler takes. Another tinygrad lowers otherwise: its version must be known.
  if isinstance(renderer, ISARenderer) or None in _releases():
    return _parts(to_program(kernel, renderer))
  key = _sum(repr((to_program_key(kernel, renderer), _versions(type(renderer).__module__))))
  if (entry := _read(key)) is not None:
    return _info(entry["info"], renderer), entry["source"], renderer.compiler.compile_cached(entry["source"])
  log.info("lowering %s", kernel.arg.name)
  with _no_garbage_collection():
    info, source, binary = _parts(to_program(kernel, renderer))
  text = json.dumps({"info": _record(info), "source": source})
  diskcache_put(TABLE, key, _sum(text) + text)
  return info, source, binary


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
  """Lowering makes millions of objects, nearly all of them alive: looking for dead ones takes a third longer."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


@functools.cache
def _versions(renderers: str) -> tuple[str | None, ...]:
  """What a source depends on besides its key: the releases, and the text of the module that renders."""
  with contextlib.suppress(OSError):  # no text at hand
    return *_releases(), _sum(inspect.getsource(sys.modules[renderers]))
  return _releases()


@functools.cache
def _releases() -> tuple[str | None, str | None]:
  return installed_version("tinygrad"), installed_version("uopattn")


def _parts(lowered: UOp) -> tuple[ProgramInfo, str, bytes]:
  return lowered.arg, lowered.src[2].arg, lowered.src[3].arg


def _sum(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _read(key: str) -> dict[str, Any] | None:
  """The entry, or None where there is none or it is damaged."""
  try:
    stored = diskcache_get(TABLE, key)
  except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, IndexError):
    stored = ""
  if stored is None:
    return None
  if not isinstance(stored, str) or stored[:64] != _sum(stored[64:]):
    log.info("a damaged entry of the cache is made anew")
    return None
  return cast(dict[str, Any], json.loads(stored[64:]))


def _record(info: ProgramInfo) -> dict[str, Any]:
  """What JSON can hold of it."""
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
