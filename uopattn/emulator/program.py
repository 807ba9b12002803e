"""A kernel's linearised UOps made into steps that run on numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import GroupOp, Ops, UOp

from uopattn.dsl.instructions import BY_TEXT, STATEMENT_SLOT

from . import alu, wmma
from .describe import describe
from .errors import Divergence, UnknownInstruction
from .instructions import MEANINGS, NOTHING
from .lanes import Run, buffer_of
from .memory import LDS, Pointer

Step = Callable[[Run], None]

MEMORY_SPACES = (AddrSpace.GLOBAL, AddrSpace.LOCAL, AddrSpace.REG)
ADDRESSES = (Ops.PARAM, Ops.BUFFER, Ops.INDEX, Ops.SHRINK, Ops.AFTER, Ops.BITCAST, Ops.CAST)
COPY_TEXTS = {text for text, instruction in BY_TEXT.items() if instruction.name == "cp_async"}
SILENT = (Ops.NOOP, Ops.GROUP, Ops.SINK, Ops.CONST)


def is_pointer(u: UOp) -> bool:
  """Whether `u` is an address (rendered as a pointer) and not a value."""
  return u.op in ADDRESSES and u.addrspace in MEMORY_SPACES


class Program:
  """The steps of one kernel for one architecture. Built once; `launch` may be called often."""

  def __init__(self, name: str, arch: str, uops: Sequence[UOp], scalars: Sequence[str | None], omit: UOp | None = None):
    self.name, self.arch, self.uops, self.omit = name, arch, list(uops), omit
    self.scalars = list(scalars)  # names of the integer arguments, in the order launch gets them
    self.slot = {u: i for i, u in enumerate(self.uops)}
    self.params = [u for u in self.uops if u.op is Ops.PARAM and u.addrspace is not AddrSpace.ALU]
    self.buffers = {u: i for i, u in enumerate([*self.params, *(u for u in self.uops if u.op is Ops.BUFFER)])}
    self.template: list[Any] = [None] * len(self.uops)
    self.copies = any(u.op in (Ops.CUSTOM, Ops.CUSTOMI) and u.arg in COPY_TEXTS for u in self.uops)
    self.granule = self._granules()
    self.steps = self._block(iter(self.uops))

  @classmethod
  def from_elf(cls, obj: TinyELF, uops: list[UOp]) -> "Program":
    """The program that tinygrad's runtime asks for."""
    sink = uops[-1].arg
    name = ansistrip(sink.name) if sink is not None else obj.name
    buffers = sum(u.op is Ops.PARAM and u.addrspace is not AddrSpace.ALU for u in uops)
    return cls(name, obj.target.arch, uops, [entry[0] for entry in obj.signature[buffers:]])

  def without(self, omit: UOp) -> "Program":
    """The same kernel with one barrier or statement left out."""
    return Program(self.name, self.arch, self.uops, self.scalars, omit)

  def _granules(self) -> dict[UOp, int]:
    """The smallest element, in bytes, that each LDS buffer is accessed by."""
    granule: dict[UOp, int] = {}
    for u in self.uops:
      if is_pointer(u) and u.addrspace is AddrSpace.LOCAL:
        buffer = buffer_of(u)
        granule[buffer] = min(granule.get(buffer, 16), u.dtype.itemsize)
    return granule

  # ** steps **

  def _block(self, uops: Any) -> list[Step]:
    """The steps up to the END or ENDIF that closes this block, or the end of the kernel."""
    steps: list[Step] = []
    for u in uops:
      if u.op in (Ops.END, Ops.ENDIF):
        self.closing = u
        break
      step = self._step(u, uops)
      if step is not None:
        steps.append(step)
    return steps

  def _step(self, u: UOp, uops: Any) -> Step | None:
    i = self.slot[u]
    if u.op in SILENT:
      return None
    if u is self.omit:
      self.template[i] = NOTHING
      return None
    if u.op is Ops.CAST and u.src[0].op is Ops.CONST:
      self.template[i] = self._constant(u.dtype, u.src[0].arg)
      return None
    if is_pointer(u):
      return self._pointer(u)
    make = getattr(self, f"_{u.op.name.lower()}", None)
    if make is not None:
      return make(u, uops) if u.op in (Ops.RANGE, Ops.IF) else make(u)
    if u.op in GroupOp.ALU:
      return self._alu(u)
    raise UnknownInstruction(f"kernel {self.name}: the emulator cannot execute {describe(u)}")

  def _constant(self, dtype: DType, value: Any) -> Any:
    if dtypes.is_float(dtype):
      return alu.encode(np.float64(value), dtype)[()]
    if dtypes.is_bool(dtype):
      return np.bool_(value)
    bits = int(value) & ((1 << dtype.bitsize) - 1)
    return np.array(bits, f"u{dtype.itemsize}").view(alu.storage(dtype))[()]

  def _pointer(self, u: UOp) -> Step | None:
    """An address: its value is an element index in units of its dtype."""
    i = self.slot[u]
    if u.op in (Ops.PARAM, Ops.BUFFER):
      self.template[i] = np.int64(0)
      return None
    base = self.slot[u.src[0]]
    if u.op is Ops.AFTER:
      return lambda run: run.values.__setitem__(i, run.values[base])
    old, new = u.src[0].dtype.itemsize, u.dtype.itemsize
    if u.op in (Ops.BITCAST, Ops.CAST):
      return lambda run: run.values.__setitem__(i, run.values[base] * old // new)
    index = self.slot[u.src[1]]
    if u.src[0].without_after.op in (Ops.PARAM, Ops.BUFFER):
      return lambda run: run.values.__setitem__(i, run.values[index])
    return lambda run: run.values.__setitem__(i, run.values[base] + run.values[index])

  def _after(self, u: UOp) -> Step:
    i, base = self.slot[u], self.slot[u.src[0]]
    return lambda run: run.values.__setitem__(i, run.values[base])

  def _param(self, u: UOp) -> Step:
    i, name = self.slot[u], u.arg.name
    where = self.scalars.index(name)
    to = alu.storage(u.dtype).type
    return lambda run: run.values.__setitem__(i, to(run.arguments[where]))

  def _special(self, u: UOp) -> Step:
    i, kind, axis = self.slot[u], u.arg[0], int(u.arg[-1])
    if kind not in "gl":
      raise UnknownInstruction(f"kernel {self.name}: {u.arg} is neither a workgroup nor a local index")
    return lambda run: run.values.__setitem__(i, run.coordinate(kind, axis))

  def _alu(self, u: UOp) -> Step:
    i, sources = self.slot[u], tuple(self.slot[s] for s in u.src)
    never_negative = u.op is Ops.CDIV and all(s.vmin >= 0 for s in u.src)
    f = alu.function(u.op, u.src[-1].dtype, never_negative)
    if u.op is Ops.EXP2:
      return self._counted_exp2(i, sources[0], f)
    if len(sources) == 1:
      a = sources[0]
      return lambda run: run.values.__setitem__(i, f(run.values[a]))
    if len(sources) == 2:
      a, b = sources
      return lambda run: run.values.__setitem__(i, f(run.values[a], run.values[b]))
    a, b, c = sources
    return lambda run: run.values.__setitem__(i, f(run.values[a], run.values[b], run.values[c]))

  def _counted_exp2(self, i: int, a: int, f: alu.Function) -> Step:
    def step(run: Run) -> None:
      if run.counters is not None:
        run.counters.exp2s += len(run.active())
      run.values[i] = f(run.values[a])

    return step

  def _cast(self, u: UOp) -> Step:
    i, a = self.slot[u], self.slot[u.src[0]]
    f = alu.cast(u.src[0].dtype, u.dtype, saturate_infinity=self.arch.startswith("sm_"))

    def step(run: Run) -> None:
      x = run.values[a]
      run.values[i] = [f(e) for e in x] if isinstance(x, list) else f(x)

    return step

  def _bitcast(self, u: UOp) -> Step:
    i, a, count = self.slot[u], self.slot[u.src[0]], u.max_numel()
    source, target = u.src[0].dtype, u.dtype
    return lambda run: run.values.__setitem__(i, alu.bitcast(run.values[a], source, target, count))

  def _stack(self, u: UOp) -> Step | None:
    if not u.src:
      return None
    i, sources = self.slot[u], tuple(self.slot[s] for s in u.src)
    return lambda run: run.values.__setitem__(i, [run.values[s] for s in sources])

  def _index(self, u: UOp) -> Step:
    """An element of a short vector."""
    i, base, at = self.slot[u], self.slot[u.src[0]], u.src[1]
    if not (at.op is Ops.CAST and at.src[0].op is Ops.CONST):
      raise UnknownInstruction(f"kernel {self.name}: a vector's element must be chosen by a constant at {describe(u)}")
    element = at.src[0].arg
    return lambda run: run.values.__setitem__(i, run.values[base][element])

  def _load(self, u: UOp) -> Step:
    i, pointer, count, dtype = self.slot[u], u.src[0], u.max_numel(), u.dtype
    memory, index = self.buffers[buffer_of(pointer)], self.slot[pointer]
    if len(u.src) == 1:

      def step(run: Run) -> None:
        values = run.memory[memory].load(u, run.values[index], dtype, count)
        run.values[i] = values if count > 1 else values[0]

      return step
    other, gate = self.slot[u.src[1]], self.slot[u.src[2]]

    def gated(run: Run) -> None:
      condition, default = run.values[gate], run.values[other]
      values = run.memory[memory].load(u, run.values[index], dtype, count, condition)
      defaults = default if isinstance(default, list) else [default] * count
      values = [np.where(condition, value, d) for value, d in zip(values, defaults, strict=True)]
      run.values[i] = values if count > 1 else values[0]

    return gated

  def _store(self, u: UOp) -> Step:
    pointer, value, dtype = u.src[0], self.slot[u.src[1]], u.src[0].dtype
    memory, index = self.buffers[buffer_of(pointer)], self.slot[pointer]

    def step(run: Run) -> None:
      x = run.values[value]
      run.memory[memory].store(u, run.values[index], dtype, x if isinstance(x, list) else [x])

    return step

  def _wmma(self, u: UOp) -> Step:
    i, a, b, c = self.slot[u], *(self.slot[s] for s in u.src)
    return lambda run: run.values.__setitem__(i, wmma.multiply(run, u, run.values[a], run.values[b], run.values[c]))

  def _custom(self, u: UOp) -> Step:
    instruction = BY_TEXT.get(u.arg)
    if instruction is None:
      raise UnknownInstruction(
        f"kernel {self.name}: no instruction in uopattn.dsl.instructions has the text {u.arg!r}\n  at {describe(u)}"
      )
    if instruction.cross_lane and u.op is Ops.CUSTOMI:
      raise UnknownInstruction(
        f"kernel {self.name}: {instruction.name} must be Ops.CUSTOM: inlined, it can land in a branch that not all "
        f"lanes take\n  at {describe(u)}"
      )
    meaning, i = MEANINGS[instruction.name], self.slot[u]
    operands = [s for s in u.src if not (is_pointer(s) and buffer_of(s).arg.slot == STATEMENT_SLOT)]
    read = [self._operand(s) for s in operands]
    return lambda run: run.values.__setitem__(i, meaning(run, u, *[get(run) for get in read]))

  _customi = _custom

  def _operand(self, u: UOp) -> Callable[[Run], Any]:
    slot = self.slot[u]
    if not is_pointer(u):
      return lambda run: run.values[slot]
    memory, dtype = self.buffers[buffer_of(u)], u.dtype
    return lambda run: Pointer(run.memory[memory], run.values[slot], dtype)

  # ** control flow **

  def _barrier(self, u: UOp) -> Step:
    def step(run: Run) -> None:
      groups: np.ndarray | None = None
      if run.mask is not None:
        there = run.mask.reshape(run.shape.groups, -1)
        groups = np.asarray(there.any(axis=1))
        part = groups & ~np.asarray(there.all(axis=1))
        if run.check and part.any():
          missing = np.flatnonzero((part[:, None] & ~there).ravel())
          raise run.fail(Divergence, u, "a barrier that not every thread of the workgroup reaches", missing)
      if run.counters is not None:
        run.counters.barriers += run.shape.groups if groups is None else int(groups.sum())
      for memory in run.memory:
        if isinstance(memory, LDS):
          memory.barrier(groups)

    return step

  def _if(self, u: UOp, uops: Any) -> Step:
    gate, body = self.slot[u.src[0]], self._block(uops)

    def step(run: Run) -> None:
      outer, condition = run.mask, run.spread(run.values[gate])
      run.mask = condition if outer is None else outer & condition
      if run.mask.any():
        execute(body, run)
      run.mask = outer

    return step

  def _range(self, u: UOp, uops: Any) -> Step:
    i, body = self.slot[u], self._block(uops)
    if u.dtype == dtypes.void:
      return self._do_while(body, self.slot[self.closing.src[2]])
    bound, to = self.slot[u.src[0]], alu.storage(u.dtype).type

    def step(run: Run) -> None:
      outer, end = run.mask, run.values[bound]
      if np.ndim(end) == 0:
        last = int(end)
      else:
        counts = end if outer is None else end[outer]
        last = int(counts.max())
        if int(counts.min()) == last:
          end = counts[0]
      for n in range(last):
        if np.ndim(end):
          run.mask = (end > n) if outer is None else outer & (end > n)
        run.values[i] = to(n)
        execute(body, run)
      run.mask = outer

    return step

  def _do_while(self, body: list[Step], condition: int) -> Step:
    def step(run: Run) -> None:
      outer = run.mask
      while True:
        execute(body, run)
        again = run.values[condition]
        if np.ndim(again):
          active = again if run.mask is None else again[run.mask]
          if not active.any():
            break
          if not active.all():
            run.mask = again if run.mask is None else again & run.mask
        elif not again:
          break
      run.mask = outer

    return step


def execute(steps: list[Step], run: Run) -> None:
  """Runs steps in order."""
  for step in steps:
    step(run)
