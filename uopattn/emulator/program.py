"""A kernel's linearised UOps made into steps that run on numpy, and its launch over batches of workgroups."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import GroupOp, Ops, UOp

from uopattn.dsl.instructions import BY_TEXT, STATEMENT_SLOT

from . import alu, counters, wmma
from .describe import describe
from .errors import Divergence, LaunchError, UnknownInstruction
from .instructions import MEANINGS, NOTHING, Copies
from .lanes import MAX_THREADS, Run, Shape, buffer_of, lds_limit, wave_size
from .memory import LDS, Global, Pointer, Registers

Step = Callable[[Run], None]

# Lanes that run together: enough that numpy's cost per call vanishes, few enough that values stay in cache.
BATCH_LANES = 8192
MEMORY_SPACES = (AddrSpace.GLOBAL, AddrSpace.LOCAL, AddrSpace.REG)
SILENT = (Ops.NOOP, Ops.GROUP, Ops.SINK, Ops.CONST)


def is_pointer(u: UOp) -> bool:
  """Whether `u` is an address (rendered as a pointer) and not a value."""
  return u.op in (Ops.PARAM, Ops.BUFFER, Ops.INDEX, Ops.SHRINK, Ops.AFTER, Ops.BITCAST, Ops.CAST) and u.addrspace in MEMORY_SPACES


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
    if dtype in alu.RAW or dtypes.is_float(dtype):
      return alu.encode(np.float64(value), dtype)[()]
    return alu.storage(dtype).type(value if dtype == dtypes.bool else int(value) & ((1 << dtype.bitsize) - 1)) if (
      dtype in dtypes.uints or dtype == dtypes.bool
    ) else np.array(int(value), np.int64).astype(alu.storage(dtype))[()]

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
    if u.src[0].op in (Ops.PARAM, Ops.BUFFER) or (u.src[0].op is Ops.AFTER and u.src[0].src[0].op in (Ops.PARAM, Ops.BUFFER)):
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
      groups = None
      if run.mask is not None:
        there = run.mask.reshape(run.shape.groups, -1)
        groups = there.any(axis=1)
        if run.check and (part := groups & ~there.all(axis=1)).any():
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

  # ** launch **

  def launch(self, buffers: Sequence[memoryview], global_size: Sequence[int], local_size: Sequence[int], arguments: Sequence[int]):
    """Executes the kernel on `buffers` (one for each PARAM, in order). Raises KernelError."""
    profile = counters.active()
    count = profile.of(self.name) if profile is not None else None
    if count is not None:
      count.launches += 1
    self._check_launch(buffers, local_size)
    data = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    groups, threads = int(np.prod(global_size)), int(np.prod(local_size))
    batch = max(1, BATCH_LANES // threads)
    with np.errstate(all="ignore"):
      for first in range(0, groups, batch):
        shape = Shape(min(batch, groups - first), threads, wave_size(self.arch))
        run = Run(self.name, shape, tuple(local_size), checking(), count)
        run.place(first, tuple(global_size), tuple(arguments))
        self._fill(run, data)
        execute(self.steps, run)

  def _check_launch(self, buffers: Sequence[memoryview], local_size: Sequence[int]) -> None:
    threads = int(np.prod(local_size))
    if threads > MAX_THREADS:
      raise LaunchError(f"kernel {self.name}: {threads} threads in a workgroup, {self.arch} has {MAX_THREADS}")
    used = sum(-(-u.max_numel() * u.dtype.itemsize // 16) * 16 for u in self.buffers if u.addrspace is AddrSpace.LOCAL)
    if used > (limit := lds_limit(self.arch)):
      raise LaunchError(f"kernel {self.name}: {used} bytes of LDS in a workgroup, {self.arch} has {limit}")
    if len(buffers) != len(self.params):
      raise LaunchError(f"kernel {self.name}: {len(buffers)} buffers for {len(self.params)} parameters")

  def _fill(self, run: Run, data: list[np.ndarray]) -> None:
    """Gives a run its values and its memory."""
    run.values = list(self.template)
    run.memory = [Global(run, f"argument {u.arg.slot}", d, d.size) for u, d in zip(self.params, data, strict=True)]
    for u in list(self.buffers)[len(self.params) :]:
      size, kind = u.max_numel(), str(u.dtype).removeprefix("dtypes.")
      if u.addrspace is AddrSpace.LOCAL:
        run.memory.append(LDS(run, f"LDS {u.arg.slot} ({kind} x {size})", size * u.dtype.itemsize, self.granule.get(u, u.dtype.itemsize)))
      else:
        run.memory.append(Registers(run, f"registers {u.arg.slot} ({kind} x {size})", u.dtype, size))
    if self.copies:
      run.copies = Copies(np.zeros(run.shape.lanes, np.int64))


COPY_TEXTS = {text for text, instruction in BY_TEXT.items() if instruction.name == "cp_async"}


def checking() -> bool:
  """Whether checks are on: unless the environment says EMU_CHECK=0."""
  return os.environ.get("EMU_CHECK", "1") != "0"


def execute(steps: list[Step], run: Run) -> None:
  """Runs steps in order."""
  for step in steps:
    step(run)
