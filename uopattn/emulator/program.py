"""Translation of a kernel's linearised UOps, control flow included, into steps that run on numpy.

A step is a slot, the position of a UOp's value in `Run.values`, and a function that computes the value from the run
(None for a UOp that has none). The step of a loop or a condition contains the steps of its body.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import GroupOp, Ops, UOp

from uopattn.dsl.instruction import STATEMENT_SLOT
from uopattn.dsl.instructions import is_wave_fence

from . import alu, wmma
from .errors import Divergence, UnknownInstruction, describe, instruction_of
from .instructions import MEANINGS
from .lanes import Run, buffer_of
from .memory import LDS, Pointer
from .scopes import check_scopes
from .tracks import TripEnded

Compute = Callable[[Run], Any]
Step = tuple[int, Compute]

MEMORY_SPACES = (AddrSpace.GLOBAL, AddrSpace.LOCAL, AddrSpace.REG)
BUFFERS = (Ops.PARAM, Ops.BUFFER)
WORK_ITEM = "core_id"  # tinygrad's name of a CPU kernel's argument that numbers its calls; here each is a workgroup
POINTERS = (*BUFFERS, Ops.INDEX, Ops.SHRINK, Ops.AFTER, Ops.BITCAST, Ops.CAST)
# Prefixes of the instructions by which warps do different work, wait for the work of others, or copy in bulk.
ASYNCHRONOUS = ("bulk_", "exit_warps", "named_barrier_", "semaphore_", "setmaxnreg_", "tensor_map", "tma_")
SILENT = (Ops.NOOP, Ops.GROUP, Ops.SINK, Ops.CONST)


def is_pointer(u: UOp) -> bool:
  """Return whether `u` is rendered as a pointer, and not as a value."""
  return u.op in POINTERS and u.addrspace in MEMORY_SPACES


def is_constant(u: UOp) -> bool:
  """Return whether `u` is a literal: a CONST cast to its dtype."""
  return u.op is Ops.CAST and u.src[0].op is Ops.CONST


def _is_statement_register(u: UOp) -> bool:
  """Return whether `u` loads or stores the register that makes an instruction a statement; a statement has no value."""
  return u.op in (Ops.LOAD, Ops.STORE) and buffer_of(u.src[0]).arg.slot == STATEMENT_SLOT


def elements(u: UOp) -> int:
  """Return the number of elements of a value.

  The pointer to a vector has the number as a source. To find its shape, tinygrad would simplify the index and
  everything computed before the loops over which the index runs.
  """
  if u.op is Ops.LOAD and u.src[0].op is Ops.SHRINK:
    return prod(map(int, u.src[0].src[2].as_shape))
  return u.max_numel()


def execute(steps: list[Step], run: Run) -> None:
  """Run steps in order."""
  values = run.values
  for slot, compute in steps:
    values[slot] = compute(run)


class Program:
  """The steps of one kernel for one architecture, built once and launched many times.

  Raises UnknownInstruction for a UOp or an Ops.CUSTOM text that the emulator cannot execute.
  """

  def __init__(
    self,
    name: str,
    arch: str,
    uops: Sequence[UOp],
    scalars: Sequence[str | None],
    omit: UOp | None = None,
    contracted: str = "first",
  ):
    self.name, self.arch, self.uops, self.omit = name, arch, list(uops), omit
    self.contracted = contracted  # which product of a sum is not rounded, see `alu.contraction`
    self.scalars = list(scalars)  # names of the integer arguments, in the order in which launch gets them
    self.slots = {u: i for i, u in enumerate(self.uops)}
    self.params = [u for u in self.uops if u.op is Ops.PARAM and u.addrspace is not AddrSpace.ALU]
    self.buffers = {u: i for i, u in enumerate([*self.params, *(u for u in self.uops if u.op is Ops.BUFFER)])}
    self.template: list[Any] = [None] * len(self.uops)  # the values known before any step runs
    instructions = (instruction_of(u.arg) for u in self.uops if u.op in (Ops.CUSTOM, Ops.CUSTOMI))
    self.names = {instruction.name for instruction in instructions if instruction is not None}
    self.granule = self._granules()
    self.steps = self._block(iter(self.uops))

  @classmethod
  def from_elf(cls, obj: TinyELF, uops: list[UOp]) -> "Program":
    """Build the program from what tinygrad passes to a runtime. Raises OutOfScope, see `check_scopes`."""
    check_scopes(uops)
    sink = uops[-1].arg
    name = ansistrip(sink.name) if sink is not None else obj.name
    buffers = sum(u.op is Ops.PARAM and u.addrspace is not AddrSpace.ALU for u in uops)
    return cls(name, obj.target.arch, uops, [entry[0] for entry in obj.signature[buffers:]])

  def uses(self, prefix: str) -> bool:
    """Return whether the kernel has an instruction whose name begins with `prefix`."""
    return any(name.startswith(prefix) for name in self.names)

  @property
  def asynchronous(self) -> bool:
    """Whether the kernel has what only warpgroups that run asynchronously can have; see `tracks`."""
    return any(map(self.uses, ASYNCHRONOUS))

  @property
  def most_registers(self) -> int | None:
    """The most registers per lane that the kernel takes by setmaxnreg_inc; None if it takes none."""
    named = ((instruction_of(u.arg), u) for u in self.uops if u.op is Ops.CUSTOM)
    counts = (u.src[0] for instruction, u in named if instruction is not None and instruction.name == "setmaxnreg_inc")
    return max((x.src[0].arg for x in counts), default=None)

  def without(self, omit: UOp) -> "Program":
    """Return a copy of the program without one barrier or statement."""
    return Program(self.name, self.arch, self.uops, self.scalars, omit, self.contracted)

  def contract(self, mode: str) -> "Program":
    """Return the program with another choice of the products that are not rounded; see `alu.contraction`."""
    return Program(self.name, self.arch, self.uops, self.scalars, self.omit, mode)

  def _granules(self) -> dict[UOp, int]:
    """Return the size in bytes of the smallest accessed element of each LDS buffer."""
    granule: dict[UOp, int] = {}
    for u in self.uops:
      if is_pointer(u) and u.addrspace is AddrSpace.LOCAL:
        buffer = buffer_of(u)
        granule[buffer] = min(granule.get(buffer, 16), u.dtype.itemsize)
    return granule

  def _refuse(self, what: str, u: UOp) -> UnknownInstruction:
    return UnknownInstruction(f"kernel {self.name}: {what}\n  at {describe(u)}")

  def _block(self, uops: Iterator[UOp]) -> list[Step]:
    """Return the steps up to the END or ENDIF that closes this block, or to the end of the kernel."""
    steps: list[Step] = []
    for u in uops:
      if u.op in (Ops.END, Ops.ENDIF):
        self.closing = u
        break
      if u is self.omit or _is_statement_register(u):
        continue
      if u.op in (Ops.RANGE, Ops.IF):
        body = self._block(uops)
        steps.append((self.slots[u], self._range(u, body) if u.op is Ops.RANGE else self._if(u, body)))
      elif is_constant(u):
        self.template[self.slots[u]] = self._constant(u.dtype, u.src[0].arg)
      elif u.op in BUFFERS and is_pointer(u):
        self.template[self.slots[u]] = np.int64(0)
      elif u.op not in SILENT and not (u.op is Ops.STACK and not u.src):
        steps.append((self.slots[u], self._compute(u)))
    return steps

  def _compute(self, u: UOp) -> Compute:
    if is_pointer(u) and u.op is not Ops.AFTER:
      return self._pointer(u)
    if u.op in GroupOp.ALU:
      return self._alu(u)
    if u.op not in COMPUTE:
      raise self._refuse("the emulator cannot execute this", u)
    return COMPUTE[u.op](self, u)

  # ** values **

  def _constant(self, dtype: DType, value: Any) -> Any:
    if dtypes.is_float(dtype):
      return alu.encode(np.float64(value), dtype)[()]
    if dtypes.is_bool(dtype):
      return np.bool_(value)
    bits = int(value) & ((1 << dtype.bitsize) - 1)
    return np.array(bits, f"u{dtype.itemsize}").view(alu.storage(dtype))[()]

  def _pointer(self, u: UOp) -> Compute:
    """Return the step of a pointer, whose value is the index of an element of its dtype."""
    base = self.slots[u.src[0]]
    old, new = u.src[0].dtype.itemsize, u.dtype.itemsize
    if u.op in (Ops.BITCAST, Ops.CAST):
      return lambda run: run.values[base] * old // new
    index = self.slots[u.src[1]]
    if u.src[0].without_after.op in BUFFERS:
      return lambda run: run.values[index]
    return lambda run: run.values[base] + run.values[index]

  def _after(self, u: UOp) -> Compute:
    base = self.slots[u.src[0]]
    return lambda run: run.values[base]

  def _argument(self, u: UOp) -> Compute:
    if u.arg.name == WORK_ITEM:
      return lambda run: run.coordinate("g", 0)
    argument, to = self.scalars.index(u.arg.name), alu.storage(u.dtype).type
    return lambda run: to(run.arguments[argument])

  def _special(self, u: UOp) -> Compute:
    kind, axis = u.arg[0], int(u.arg[-1])
    if kind not in "gl":
      raise self._refuse(f"{u.arg} is neither a workgroup nor a local index", u)
    return lambda run: run.coordinate(kind, axis)

  def _alu(self, u: UOp) -> Compute:
    never_negative = u.op is Ops.CDIV and all(s.vmin >= 0 for s in u.src)
    fused = alu.contracted(u, self.contracted)
    f, operands = fused or (alu.function(u.op, u.src[-1].dtype, never_negative), u.src)
    slots = tuple(self.slots[s] for s in operands)
    a, b, c = (*slots, 0, 0)[:3]
    if len(slots) == 3:
      return lambda run: f(run.values[a], run.values[b], run.values[c])
    if len(slots) == 2:
      return lambda run: f(run.values[a], run.values[b])
    if u.op is not Ops.EXP2:
      return lambda run: f(run.values[a])

    def exp2(run: Run) -> Any:
      if run.counters is not None:
        run.counters.exp2s += len(run.active())
      return f(run.values[a])

    return exp2

  def _cast(self, u: UOp) -> Compute:
    a = self.slots[u.src[0]]
    f = alu.cast(u.src[0].dtype, u.dtype, saturate_infinity=self.arch.startswith("sm_"))

    def compute(run: Run) -> Any:
      x = run.values[a]
      return [f(e) for e in x] if isinstance(x, list) else f(x)

    return compute

  def _bitcast(self, u: UOp) -> Compute:
    a, count, source, target = self.slots[u.src[0]], u.max_numel(), u.src[0].dtype, u.dtype
    return lambda run: alu.bitcast(run.values[a], source, target, count)

  def _stack(self, u: UOp) -> Compute:
    slots = tuple(self.slots[s] for s in u.src)
    return lambda run: [run.values[s] for s in slots]

  def _element(self, u: UOp) -> Compute:
    """Return the step of an INDEX into a short vector."""
    base, at = self.slots[u.src[0]], u.src[1]
    if not is_constant(at):
      raise self._refuse("an element of a vector value must be chosen by a constant", u)
    if elements(u.src[0]) == 1:
      raise self._refuse("indexes a vector of one element, which C renders as a scalar", u)
    if u.src[0].addrspace is None:
      raise self._refuse(
        "indexes a vector that comes straight from Ops.CUSTOM, which renderers would treat as an address", u
      )
    element = at.src[0].arg
    return lambda run: run.values[base][element]

  def _load(self, u: UOp) -> Compute:
    pointer, count, dtype = u.src[0], elements(u), u.dtype
    memory, index = self.buffers[buffer_of(pointer)], self.slots[pointer]
    if len(u.src) == 1:

      def load(run: Run) -> Any:
        values = run.memory[memory].load(u, run.values[index], dtype, count)
        return values if count > 1 else values[0]

      return load
    other, gate = self.slots[u.src[1]], self.slots[u.src[2]]

    def gated(run: Run) -> Any:
      condition, default = run.values[gate], run.values[other]
      values = run.memory[memory].load(u, run.values[index], dtype, count, condition)
      defaults = default if isinstance(default, list) else [default] * count
      values = [np.where(condition, value, d) for value, d in zip(values, defaults, strict=True)]
      return values if count > 1 else values[0]

    return gated

  def _store(self, u: UOp) -> Compute:
    pointer, value, dtype = u.src[0], self.slots[u.src[1]], u.src[0].dtype
    memory, index = self.buffers[buffer_of(pointer)], self.slots[pointer]

    def store(run: Run) -> None:
      x = run.values[value]
      run.memory[memory].store(u, run.values[index], dtype, x if isinstance(x, list) else [x])

    return store

  def _wmma(self, u: UOp) -> Compute:
    a, b, c = (self.slots[s] for s in u.src)
    return lambda run: wmma.multiply(run, u, run.values[a], run.values[b], run.values[c])

  def _custom(self, u: UOp) -> Compute:
    instruction = instruction_of(u.arg)
    if instruction is None:
      raise self._refuse(f"no instruction in uopattn.dsl.instructions has the text {u.arg!r}", u)
    if instruction.cross_lane and u.op is Ops.CUSTOMI:
      what = f"{instruction.name} must be Ops.CUSTOM: inlined, it can land in a branch that not all lanes take"
      raise self._refuse(what, u)
    meaning = MEANINGS[instruction.name]
    operands = [s for s in u.src if not (is_pointer(s) and buffer_of(s).arg.slot == STATEMENT_SLOT)]
    values = (s.dtype for s in operands if not is_pointer(s))
    for dtype, wanted in zip(values, instruction.takes, strict=False):
      if dtype != (wanted or u.dtype):
        raise self._refuse(f"{instruction.name} takes {wanted or u.dtype} here, not {dtype}", u)
    read = [self._operand(s) for s in operands]
    built_in = instruction.parameters
    return lambda run: meaning(run, u, *built_in, *[get(run) for get in read])

  def _operand(self, u: UOp) -> Compute:
    slot = self.slots[u]
    if not is_pointer(u):
      return lambda run: run.values[slot]
    memory, dtype = self.buffers[buffer_of(u)], u.dtype
    return lambda run: Pointer(run.memory[memory], run.values[slot], dtype)

  # ** control flow **

  def _barrier(self, u: UOp) -> Compute:
    if is_wave_fence(u):  # lanes run in step here
      return lambda run: None

    def barrier(run: Run) -> None:
      if run.tracks is not None:
        run.tracks.meet(u, 0, run.shape.threads, run.active(), True, lambda: met(run, None))
        return
      if run.check and (missing := run.missing(run.shape.threads)).size:
        raise run.fail(Divergence, u, "a barrier that not every thread of the workgroup reaches", missing)
      groups = None if run.mask is None else np.asarray(run.mask.reshape(run.shape.groups, -1).any(axis=1))
      if run.counters is not None:
        run.counters.barriers += run.shape.groups if groups is None else int(groups.sum())
      met(run, groups)

    def met(run: Run, groups: np.ndarray | None) -> None:
      for memory in run.memory:
        if isinstance(memory, LDS):
          memory.barrier(groups)
      for counting in run.barriers.values():
        counting.known(groups)
      for described in run.maps.values():
        described.maker = -1

    return barrier

  def _if(self, u: UOp, body: list[Step]) -> Compute:
    gate = self.slots[u.src[0]]

    def branch(run: Run) -> None:
      outer, condition = run.mask, run.spread(run.values[gate])
      run.mask = condition if outer is None else outer & condition
      if run.mask.any():
        execute(body, run)
      run.mask = outer

    return branch

  def _range(self, u: UOp, body: list[Step]) -> Compute:
    if u.dtype == dtypes.void:
      return self._do_while(u, body, self.slots[self.closing.src[2]])
    i, bound, to = self.slots[u], self.slots[u.src[0]], alu.storage(u.dtype).type

    def loop(run: Run) -> None:
      outer, end = run.mask, run.values[bound]
      counts = np.atleast_1d(end) if outer is None or np.ndim(end) == 0 else end[outer]
      last, uniform = int(counts.max()), int(counts.max()) == int(counts.min())
      outside, run.left = run.left, None
      for n in range(last):
        run.mask = run.still_in(outer, None if uniform else end > n)
        if run.mask is not None and not run.mask.any():
          break
        run.values[i] = to(n)
        with suppress(TripEnded):
          execute(body, run)
      run.mask, run.left = outer, outside

    return loop

  def _do_while(self, u: UOp, body: list[Step], condition: int) -> Compute:
    if self.names & {"leave_loop", "leave_loop_unless_any", "skip_trip"}:
      what = "leave_loop and skip_trip work only in counted loops, and this kernel also has a do-while loop"
      raise self._refuse(what, u)

    def loop(run: Run) -> None:
      outer = run.mask
      while True:
        execute(body, run)
        again = run.spread(run.values[condition])
        active = again if run.mask is None else again & run.mask
        if not active.any():
          break
        if not active.all():
          run.mask = active
      run.mask = outer

    return loop


COMPUTE: dict[Ops, Callable[[Program, UOp], Compute]] = {
  Ops.AFTER: Program._after,
  Ops.PARAM: Program._argument,
  Ops.SPECIAL: Program._special,
  Ops.CAST: Program._cast,
  Ops.BITCAST: Program._bitcast,
  Ops.STACK: Program._stack,
  Ops.INDEX: Program._element,
  Ops.LOAD: Program._load,
  Ops.STORE: Program._store,
  Ops.WMMA: Program._wmma,
  Ops.CUSTOM: Program._custom,
  Ops.CUSTOMI: Program._custom,
  Ops.BARRIER: Program._barrier,
}
