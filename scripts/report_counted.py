"""Counts of the kernels for GPUs whose compilers run nowhere else: Apple's, and those without matrix units.

What is counted is the program that tinygrad renders for the target, one thread's share of it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from report_table import Row, kernels_of
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import Target as Named
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import GroupOp, Ops

from uopattn.dsl.instructions import BY_TEXT
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target
from uopattn.emulator.device import APPLE, CL, EMUCLRenderer, EMUMetalRenderer
from uopattn.emulator.lanes import buffer_of
from uopattn.plan.launch import Launch
from uopattn.spec.spec import AttentionSpec

ARCHES = ("apple9", "cl")
NAMES = (*APPLE, "cl")
TYPES = {"float16": dtypes.float16, "bfloat16": dtypes.bfloat16, "float32": dtypes.float32}
KINDS = ("matrix", "float", "integer", "lane", "local", "global", "barrier")
COLUMNS = {"words": 5, "LDS": 6, "each": 5} | {name: len(name) for name in KINDS}


def serves(name: str) -> bool:
  """Return whether a name is in `NAMES`."""
  return name in NAMES


def target_of(name: str) -> Target:
  """Return the target of a name in `NAMES`."""
  return Target("METAL", APPLE[name]) if name in APPLE else Target("CL", CL)


def renderer_of(name: str) -> Renderer:
  """Return a renderer of the target's text."""
  return (EMUMetalRenderer if name in APPLE else EMUCLRenderer)(Named("EMU", "", name))


def launches(name: str, dtype: str, H: int, M: int, N: int, D: int, causal: bool) -> list[tuple[str, Launch]]:
  """Return the kernels of both passes, by name. Raises NoKernel."""
  target, masks = target_of(name), Window.of(None, 0 if causal else None)
  spec = AttentionSpec(1, H, H, M, N, D, D, TYPES[dtype], D**-0.5, masks=masks)
  return [x for backward in (False, True) for x in kernels_of(spec, target, backward)]


def kind(u: UOp, generic: bool, depth: int) -> str | None:
  """Return the kind of an operation at a depth of loops; None for what is no instruction by itself.

  In a generic kernel, without matrix instructions, a product of the loops along k counts as one: it is a multiply-add
  with the sum that it is added to.
  """
  if u.op is Ops.WMMA or (generic and depth > 1 and u.op is Ops.MUL and u.dtype == dtypes.float):
    return "matrix"
  if u.op is Ops.BARRIER:
    return "barrier"
  if u.op in (Ops.LOAD, Ops.STORE):
    space = buffer_of(u.src[0]).addrspace
    return {AddrSpace.LOCAL: "local", AddrSpace.GLOBAL: "global"}.get(space)
  if u.op in (Ops.CUSTOM, Ops.CUSTOMI):
    return "lane" if BY_TEXT[u.arg].cross_lane else "float"
  if u.op not in GroupOp.ALU and u.op is not Ops.CAST:
    return None
  fused = u.op is Ops.ADD and any(x.op is Ops.MUL for x in u.src)
  if fused:
    return None
  return "float" if any(dtypes.is_float(x.dtype) for x in (u, *u.src)) else "integer"


def counted(program: Sequence[UOp], generic: bool) -> Counter[str]:
  """Return the instructions of each kind in one trip of the main loop: the longest of the outermost loops.

  A kernel that has no loop, as there is one tile, is counted as a whole.
  """
  loops, trips, kinds, outside = list[Counter[str]](), [1], Counter[str](), Counter[str]()
  for u in program:
    if u.op is Ops.RANGE:
      trips.append(trips[-1] * (int(u.vmax) + 1) if len(trips) > 1 else 1)
    elif u.op is Ops.END:
      trips.pop()
      if len(trips) == 1:
        loops.append(kinds)
        kinds = Counter()
    elif (instruction_kind := kind(u, generic, len(trips) - 1)) is not None:
      (kinds if len(trips) > 1 else outside)[instruction_kind] += trips[-1]
  return max(loops, key=lambda x: x.total(), default=outside)


@dataclass(frozen=True)
class Counted:
  """One kernel's counts.

  Attributes:
    target: its target's name.
    launch: the kernel and its tiles.
    words: 32-bit words per thread of what it keeps in registers from one tile to the next, the least that it needs.
    shared: bytes of local memory per workgroup.
    loop: number of the main loop's instructions of each kind.
  """

  target: str
  launch: Launch
  words: int
  shared: int
  loop: Counter[str]

  @property
  def each(self) -> float:
    """Instructions of the main loop per matrix instruction, or multiply-add."""
    return self.loop.total() / max(1, self.loop["matrix"])


def count(name: str, launch: Launch) -> Counted:
  """Render a kernel and count."""
  program = next(u.src for u in to_program(launch.graph(), renderer_of(name)).src if u.op is Ops.LINEAR)
  sizes = Counter[AddrSpace]()
  for u in program:
    if u.op is Ops.BUFFER:
      sizes[u.addrspace] += u.max_numel() * u.dtype.itemsize
  loop = counted(program, generic=not any(u.op is Ops.WMMA for u in program))
  return Counted(name, launch, sizes[AddrSpace.REG] // 4, sizes[AddrSpace.LOCAL], loop)


def row(kernel: str, dtype: str, c: Counted) -> Row:
  """Return a row of the table."""
  t: Any = c.launch.tiles
  rows, block = (t.block_m, t.block_n) if kernel == "fwd" else (t.rows, t.block)
  cells = (c.words, c.shared, f"{c.each:.1f}", *(c.loop[x] for x in KINDS))
  return Row(f"{c.target:6} {kernel:6} {dtype:8} {rows}x{block}", cells)


def rows(names: Sequence[str], H: int, M: int, N: int, D: int, causal: bool) -> Iterator[Row]:
  """Yield a row for each target, dtype and kernel of both passes. Raises NoKernel."""
  for name in names:
    for dtype in TYPES:
      for kernel, launch in launches(name, dtype, H, M, N, D, causal):
        yield row(kernel, dtype, count(name, launch))
