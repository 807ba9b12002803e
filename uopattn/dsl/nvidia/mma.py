"""NVIDIA's matrix instruction of one warp, mma.sync, and how its operands get into registers.

A step is 32 bytes along k for all types: (16, 8) += (16, step) (step, 8), accumulated in float32. ldmatrix reads the
operands from `uopattn.dsl.nvidia.swizzled` tiles, in 16-byte chunks of eight rows, regardless of the type. So where k
runs along the rows, as for Q and K, all types have the same layout. `uopattn.dsl.nvidia.mma_layout` says which elements
of an accumulator a lane has. Two neighbouring accumulators rounded to 16 bits, or four rounded to 8 bits, are a left
operand, but for the order of k (the keys). Any order will do that the right operand (V) has too.

V's rows are k, so V is read transposed, in units of 16 bits. In 8 bits a unit is a pair of columns, and two byte
permutations separate them: one operand has the even columns of 16, the other the odd ones, and so do the accumulators.
In words of four neighbours, a lane's keys then are in the order of P: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. ldmatrix
cannot transpose 32-bit elements: V is then read element by element, keys 2 t and 2 t + 1 of 8 as P has them.

float32 is multiplied in tf32, whose products ignore the last 13 bits: in one product, or at float32's own accuracy in
three products of terms (`uopattn.dsl.gpu.terms`), which are split in registers. Tensor cores cut off what float32 does
not hold of a sum (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021).

Source: PTX ISA, "Matrix Fragments for mma.m16n8k8", "k16" and "k32", "ldmatrix", "prmt".
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tinygrad import UOp
from tinygrad.dtype import AddrSpace, DType, dtypes

from uopattn.dsl.gpu.terms import PAIRS, tf32_terms
from uopattn.dsl.instructions import CUDA, TURING, Cuda
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, QUAD, WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.schedule import DTYPES_8
from uopattn.dsl.scope import Scope, sizes

STEP_BYTES = 32
PAIR = 2 * MMA_N  # columns of two right operands, loaded together
CHAIN = 4  # steps whose products of terms are added up by the tensor cores
ZERO = UOp.const((0.0,) * 4, dtypes.float)
STEPS = {8: dtypes.uint, 16: dtypes.ushort, 32: dtypes.uchar}  # elements per step -> an integer of their size
# The first architecture that multiplies each type.
SINCE = {dtypes.half: 75, dtypes.bfloat16: 80, dtypes.float32: 80, dtypes.fp8e4m3: 89, dtypes.fp8e5m2: 89}
Operand = list[UOp]  # the terms of an operand of one step
Accumulators = list[list[UOp]]  # for each 16 rows, tiles of 8 columns; see `uopattn.dsl.nvidia.mma_layout`


def check_type(dtype: DType, arch: str) -> None:
  """Raise ValueError if an architecture is too old to multiply a type."""
  if int(arch.removeprefix("sm_")) < (since := SINCE[dtype]):
    name = str(dtype).removeprefix("dtypes.")
    raise ValueError(f"{arch} has no mma.sync for {name} that this kernel uses; sm_{since} and newer have it")


def check_step(step: int, dtype: DType) -> None:
  """Raise ValueError if `Tiles.step` is for elements of another size than a type's."""
  if step * dtype.itemsize != STEP_BYTES:
    raise ValueError(f"Tiles.step={step}: must be {STEP_BYTES // dtype.itemsize} for {dtype}")


class _Sizes(Protocol):
  """The attributes of block sizes that `MmaTiles` takes."""

  @property
  def warps(self) -> int:
    """Warps per workgroup."""

  @property
  def step(self) -> int:
    """Elements in the 32 bytes of a step along k."""

  @property
  def tf32(self) -> bool:
    """Whether float32 is multiplied in tf32."""

  @property
  def turing(self) -> bool:
    """Whether they are for sm_75."""


class MmaTiles:
  """What all block sizes of kernels with `mma.sync` have."""

  @property
  def threads(self: _Sizes) -> int:
    """Threads per workgroup."""
    return self.warps * WARP

  @property
  def terms(self: _Sizes) -> int:
    """Terms of which an operand is the sum; see `uopattn.dsl.gpu.terms`."""
    return 2 if self.step == STEP_BYTES // 4 and not self.tf32 else 1

  @property
  def dialect(self: _Sizes) -> Cuda:
    """Dialect of the instructions that differ on sm_75; see `uopattn.dsl.instructions`."""
    return TURING if self.turing else CUDA

  def check(self: _Sizes, steps: Collection[int], **least: int) -> None:
    """Raise ValueError unless `step` is one of these, and the attributes that are named are at least so large."""
    if self.step not in steps:
      raise ValueError(f"Tiles.step={self.step}: must be one of {', '.join(map(str, steps))}")
    for name, number in least.items():
      if (value := getattr(self, name)) < number:
        raise ValueError(f"Tiles.{name}={value}: must be at least {number}")


def rescaled(acc: UOp, alphas: list[UOp]) -> Accumulators:
  """O times alpha; each tile of 16 rows has two alphas per lane."""
  m_tiles, d_tiles, _ = sizes(acc)
  return [
    [UOp.stack(*[acc[i, d, e].load() * alphas[HALVES * i + e // 2] for e in range(4)]) for d in range(d_tiles)]
    for i in range(m_tiles)
  ]


class Stored(NamedTuple):
  """16 rows of a tile in shared memory, from `first` on."""

  tile: SwizzledTiles
  first: UOp


Left = list[UOp] | Stored  # 16 rows as left operands: in registers, one per step, or where they are


@dataclass(frozen=True)
class Mma:
  """mma.sync for operands of one type.

  Attributes:
    scope: the kernel's scope.
    dtype: float16, bfloat16, fp8e4m3, fp8e5m2, or float32, whose last 13 bits a product ignores (tf32).
    turing: whether a step is two instructions of 8 along k, for float16 on sm_75.
    terms: the terms of an operand, 2 for float32 at its own accuracy.
  """

  scope: Scope
  dtype: DType
  turing: bool = False
  terms: int = 1

  @property
  def step(self) -> int:
    """Elements along k per step."""
    return STEP_BYTES // self.dtype.itemsize

  def multiply(self, a: UOp, b: UOp, acc: UOp) -> UOp:
    """acc + A B over one step, four elements in this lane."""
    if not self.turing:
      return UOp.wmma(a, b, acc, (MMA_N, MMA_M, self.step), "CUDA", 32)
    for half in range(2):
      acc = UOp.wmma(_share(a, half, 4), _share(b, half, 2), acc, (MMA_N, MMA_M, self.step // 2), "CUDA", 32)
    return acc

  def chain(self, left: Sequence[Operand], right: Sequence[Operand], acc: UOp | None) -> UOp:
    """acc + A B over the steps of a chain, four elements in this lane; None stands for 0."""
    total = ZERO if acc is None or self.terms > 1 else acc
    for i, j in PAIRS[self.terms]:
      for a, b in zip(left, right, strict=True):
        total = self.multiply(a[i], b[j], total)
    return total if acc is None or self.terms == 1 else UOp.stack(*[acc[e] + total[e] for e in range(4)])

  def in_terms(self, operand: UOp) -> Operand:
    """The terms of an operand of one step, registers or a value."""
    if self.terms == 1:
      return [operand]
    elements = [operand[i] for i in range(operand.shape[0])]
    values = [tf32_terms(e.load() if operand.addrspace is AddrSpace.REG else e) for e in elements]
    return [UOp.stack(*term) for term in zip(*values, strict=True)]

  def load_left(self, tile: SwizzledTiles, first: UOp, lane: UOp) -> Left:
    """Load the 16 rows from `first` on as left operands, one per step along the columns.

    Split into terms they would need too many registers: then `mma_abt` loads each chain when it is needed.
    """
    rows = Stored(tile, first)
    return rows if self.terms > 1 else [self.load_step(rows, step, lane) for step in range(tile.columns // self.step)]

  def load_step(self, rows: Stored, step: int, lane: UOp, *after: UOp) -> UOp:
    """Load the left operand of one step."""
    frag = self.scope.buffer(self.step // 2, dtype=self.dtype)
    row, chunk = rows.first + lane % MMA_M, 2 * step + lane // MMA_M
    return frag.after(CUDA.ldmatrix(frag[0], rows.tile.at(row, chunk), *after, immediate=rows.tile.is_long))

  def load_for_ab(self, rows: Stored, step: int, lane: UOp, transposed: bool = False) -> UOp:
    """Load the left operand of one step for `mma_ab`: 16 rows of a tile, or 16 columns if transposed."""
    tile, first = rows
    if self.dtype == dtypes.float32:  # in the order of `as_left`
      row, k = first + lane // QUAD, step * 8 + lane % QUAD * 2
      elements = [(row + half * 8, k + i) for i in range(2) for half in range(HALVES)]
      return UOp.stack(*[tile.element(*(x[::-1] if transposed else x)).bitcast(self.dtype) for x in elements])
    if not transposed:
      return self.load_step(rows, step, lane)
    frag = self.scope.buffer(self.step // 2, dtype=self.dtype)
    row, chunk = step * self.step + lane % 8 + lane // MMA_M * 8, first // MMA_N + lane // 8 % 2
    return frag.after(CUDA.ldmatrix(frag[0], tile.at(row, chunk), trans=True, immediate=tile.is_long))

  def mma_abt(
    self,
    left: Sequence[Left],
    tile: SwizzledTiles,
    lane: UOp,
    acc: Accumulators | None = None,
    over: Sequence[int] | None = None,
  ) -> Accumulators:
    """acc + A B^T for each A in `left`, 16 rows from `load_left`, over some steps or all.

    B is as many rows of a tile as acc has columns. By default acc is 0, with a column for each row.
    """
    out: list[list[Any]] = [list(x) for x in acc] if acc else [[None] * (tile.rows // MMA_N) for _ in left]
    after: tuple[UOp, ...] = (tile.memory,) if self.terms > 1 else ()
    for steps in self.chains(over or range(tile.columns // self.step)):
      a = [
        [self.in_terms(self.load_step(rows, i, lane, *after) if isinstance(rows, Stored) else rows[i]) for i in steps]
        for rows in left
      ]
      for n in range(0, len(out[0]), 2):
        pairs = [self.load_right(tile, n * MMA_N, step, lane, *after) for step in steps]
        after = self.add_pair(out, n, a, pairs, *after)
    return out

  def mma_ab(self, left: list[list[UOp]], tile: SwizzledTiles, lane: UOp, acc: Accumulators) -> Accumulators:
    """acc + A B for each A in `left`, 16 rows from `as_left`. B is a tile."""
    out: list[list[Any]] = [list(x) for x in acc]
    after: tuple[UOp, ...] = ()
    for steps in self.chains(range(len(left[0]))):
      a = [[self.in_terms(rows[step]) for step in steps] for rows in left]
      if self.terms > 1:
        after = (CUDA.read_later(a[-1][-1][-1][-1], *after),)
      for d in range(0, len(out[0]), 2):
        pairs = [self.load_right_transposed(tile, step, d * MMA_N, lane, *after) for step in steps]
        after = self.add_pair(out, d, a, pairs, *after)
    return out

  def add_weighted(
    self, left: list[list[UOp]], tile: SwizzledTiles, lane: UOp, acc: UOp, old: UOp, alphas: list[UOp]
  ) -> list[UOp]:
    """Compute acc = old alpha + P V, for P in `left` and V as a tile. Returns the stores to acc."""
    out = self.mma_ab(left, tile, lane, rescaled(old, alphas))
    return [acc[i, d].store(tile) for i, tiles in enumerate(out) for d, tile in enumerate(tiles)]

  def chains(self, steps: Sequence[int]) -> list[Sequence[int]]:
    """The steps of each chain."""
    length = 1 if self.terms == 1 else CHAIN
    return [steps[first : first + length] for first in range(0, len(steps), length)]

  def add_pair(
    self, out: list[list[Any]], first: int, left: list[list[Operand]], pairs: list[list[UOp]], *after: UOp
  ) -> tuple[UOp, ...]:
    """Add A B to the accumulator tiles `first` and `first` + 1 of each A's rows, over the steps of a chain.

    Returns what later loads must come after: terms take so many registers that few may be loaded early.
    """
    for j in range(2):
      right = [self.in_terms(pair[j]) for pair in pairs]
      for tiles, a in zip(out, left, strict=True):
        tiles[first + j] = self.chain(a, right, tiles[first + j])
    return (CUDA.read_later(out[-1][first + 1][-1], *after),) if self.terms > 1 else after

  def load_right(self, tile: SwizzledTiles, first: int, step: int, lane: UOp, *after: UOp) -> list[UOp]:
    """Load rows `first` to `first` + 15 as the columns of two right operands, for one step along the tile's columns."""
    pair = self.scope.buffer(2, self.step // 4, dtype=self.dtype)
    row, chunk = first + lane // MMA_M * MMA_N + lane % MMA_N, 2 * step + lane // MMA_N % 2
    loaded = pair.after(CUDA.ldmatrix(pair[0, 0], tile.at(row, chunk), *after, immediate=tile.is_long))
    return [loaded[0], loaded[1]]

  def load_right_transposed(self, tile: SwizzledTiles, step: int, first: int, lane: UOp, *after: UOp) -> list[UOp]:
    """Load columns `first` to `first` + 15 of a step's rows as two right operands, whose k are these rows."""
    if self.dtype == dtypes.float32:
      rows = [step * self.step + lane % QUAD * 2 + i for i in range(2)]
      columns = [first + j * MMA_N + lane // QUAD for j in range(2)]
      return [UOp.stack(*[tile.element(row, column, *after).bitcast(self.dtype) for row in rows]) for column in columns]
    pair = self.scope.buffer(2, self.step // 4, dtype=self.dtype)
    if self.dtype not in DTYPES_8:
      row, chunk = step * self.step + lane % MMA_M, first // MMA_N + lane // MMA_M
      loaded = pair.after(CUDA.ldmatrix(pair[0, 0], tile.at(row, chunk), trans=True, immediate=tile.is_long))
      return [loaded[0], loaded[1]]
    words = self.scope.buffer(4, dtype=dtypes.uint)
    row, chunk = step * self.step + lane, UOp.const(first // PAIR)
    words = words.after(CUDA.ldmatrix(words[0], tile.at(row, chunk), trans=True, immediate=tile.is_long))
    keys = [(words[i].load(), words[i + 1].load()) for i in (0, 2)]
    packed = [bytes_of(*two) for bytes_of in (CUDA.even_bytes, CUDA.odd_bytes) for two in keys]
    loaded = pair.after(CUDA.set_words(pair[0, 0], *packed))
    return [loaded[0], loaded[1]]

  def as_left(self, rows: list[list[UOp]]) -> list[UOp]:
    """Round accumulators to left operands, one per step along their columns.

    Args:
      rows: this lane's elements of rows g and g + 8, from `mma_layout.row_elements`.
    """
    if self.dtype not in DTYPES_8:
      word = 4 // self.dtype.itemsize  # elements in 32 bits
      steps = range(0, len(rows[0]), 2 * word)
      of_steps = [[(half, i + k_half * word) for k_half in range(2) for half in range(HALVES)] for i in steps]
      return [
        UOp.stack(*[rows[h][i + e].cast(self.dtype) for h, i in words for e in range(word)]) for words in of_steps
      ]
    return [self.left_of(words) for words in self.left_words(rows)]

  def left_words(self, rows: list[list[UOp]]) -> list[list[UOp]]:
    """Round accumulators as `as_left` does, to four 32-bit words per step."""
    word = 4 // self.dtype.itemsize  # elements in 32 bits
    dialect = TURING if self.turing else CUDA

    def packed(elements: list[UOp]) -> UOp:
      return elements[0].bitcast(dtypes.uint) if word == 1 else dialect.pack_word(elements, self.dtype)

    steps = range(0, len(rows[0]), 2 * word)
    return [[packed(rows[h][i + k_half * word :][:word]) for k_half in range(2) for h in range(HALVES)] for i in steps]

  def left_of(self, words: list[UOp]) -> UOp:
    """The left operand of one step that has these words."""
    frag = self.scope.buffer(self.step // 2, dtype=self.dtype)
    return frag.after(CUDA.set_words(frag[0], *words))


def _share(x: UOp, i: int, count: int) -> UOp:
  """Elements i * count to (i + 1) * count - 1 of registers or of a value."""
  elements = [x[i * count + j] for j in range(count)]
  return UOp.stack(*[e.load() if x.addrspace is AddrSpace.REG else e for e in elements])
