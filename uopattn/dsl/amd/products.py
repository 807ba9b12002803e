"""Matrix products on AMD's matrix cores, from loading the operands to storing the accumulators.

Attention needs two kinds. In both, D's columns belong to lanes, 16 per wave; see `uopattn.dsl.amd.fragments`. Types are
those of the matrices, float32 also where bfloat16 terms of it are multiplied.
    D = A B         `mma_abt`: A is a tile of rows in LDS; B, other rows of the same size, is in registers
    C + A^T D       `mma_ab`: A^T is a transposed tile in LDS; D comes from the first product by `as_operands`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import Ops

from uopattn.dsl.amd.fnuz import from_ocp, to_ocp
from uopattn.dsl.amd.fragments import CHUNK_WORDS, MMA_SIZE, Fragments
from uopattn.dsl.amd.staging import LdsRows, in_terms
from uopattn.dsl.gpu.terms import PAIRS, upper_terms
from uopattn.dsl.instructions import HIP
from uopattn.dsl.packed import ALWAYS, Words, as_type, words_of
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.quantized import LARGEST
from uopattn.dsl.scope import View, contains, gated, row_start, sizes

# The `width` elements of A, or of B, that a lane holds for a step, of each term in turn; in 8 bits words of four.
Operand = list[UOp]
LoadOperand = Callable[..., Operand]  # (*after) -> the operand of a step


@dataclass(frozen=True)
class Mma:
  """The matrix instruction of a wave, for operands of one type.

  Attributes:
    f: the fragments of the instruction.
    dtype: type of the matrices.
    lane: index of the thread in its wave.

  Raises:
    ValueError: the tiles, whose fragments these are, are for elements of another size.
  """

  f: Fragments
  dtype: DType
  lane: UOp

  def __post_init__(self) -> None:
    if (bits := self.f.memory_bits) != self.dtype.bitsize:
      raise ValueError(f"Tiles.bits={bits}: must be {self.dtype.bitsize} for {self.dtype}")

  def row_offsets(self, warp: UOp, tiles: int) -> list[UOp]:
    """This lane's row of each of the `tiles` tiles of 16 rows that a wave has, among the rows of the workgroup."""
    return [(warp * tiles + i) * MMA_SIZE + self.lane % MMA_SIZE for i in range(tiles)]

  def load(self, rows: HeadView, row: UOp, exists: UOp = ALWAYS) -> list[LoadOperand]:
    """This lane's B operand of each step, of a row; zeros where `exists` is false.

    Split into terms they would take too many registers: then they are loaded and split where they are needed.
    """
    f, dtype = self.f, self.dtype
    chunk, count = f.per_chunk * f.memory_bits // 32, f.width * f.memory_bits // 32  # words

    def load(step: int, *after: UOp) -> Operand:
      word, first = words_of(rows, exists, *after), f.chunk(UOp.const(step), self.lane) * chunk
      words = [word(row, first + w) for w in range(count)]
      if f.terms > 1:
        return self.operand_of([x.bitcast(dtypes.float) for x in words])
      return self.elements([from_ocp(x, dtype) for x in words] if f.fnuz else words)

    def held(operand: Operand) -> LoadOperand:
      return lambda *after: operand

    if f.terms > 1:
      # Of a row that LLVM knows it keeps the address of each load in registers, from one loop over keys to the next.
      row = HIP.pin(row.cast(dtypes.int)).cast(dtypes.weakint)
    steps = range(ceildiv(rows.size, f.step))
    return [partial(load, i) if f.terms > 1 else held(load(i)) for i in steps]

  def multiply(self, a: Operand, b: Operand, c: UOp | None) -> UOp:
    """C + A B over one step, or over the steps of `chains`.

    If c is None, it counts as 0. Products of terms are summed separately, and C is added last.

    tinygrad's renderers lack most products of 8 bits. `uopattn.runtime.amd` renders those whose operands are words.
    """
    f, dtype = self.f, self.dtype
    per_unit = 4 if f.bits == 8 else 1  # elements
    length = len(a) // f.terms
    size = length if length > f.width // per_unit else f.operand // per_unit
    dims = (MMA_SIZE, MMA_SIZE, f.k * size * per_unit // f.operand)
    total = UOp.const((0.0,) * f.result, dtypes.float) if c is None or f.terms > 1 else c
    for left_term, right_term in PAIRS[f.terms]:
      for i in range(0, length, size):
        left, right = (UOp.stack(*x[p * length + i :][:size]) for x, p in ((a, left_term), (b, right_term)))
        total = UOp(Ops.WMMA, src=(left, right, total), arg=(dims, f.dtype(dtype), "AMD", f.lanes, None))
    return total if c is None or f.terms == 1 else UOp.stack(*[c[e] + total[e] for e in range(f.result)])

  def chains(self, steps: int) -> list[range]:
    """The steps that are multiplied at once: `Fragments.together` where so many remain, else one."""
    f = self.f
    whole = steps // f.together * f.together
    return [range(i, i + f.together) for i in range(0, whole, f.together)] + [
      range(i, i + 1) for i in range(whole, steps)
    ]

  def elements(self, words: Words) -> Operand:
    """Reinterpret words as elements.

    tinygrad's lowering does not terminate if an operand is all of one vector that is no STACK. So the operand is made
    of half a vector, or of two.
    """
    f, dtype = self.f, self.dtype
    if f.bits == 8:
      return words
    if f.bits == 32:
      return [word.bitcast(dtype) for word in words]
    size = len(words) // 2 if f.products == 1 else len(words)
    result: Operand = []
    for chunk in (words[i : i + size] for i in range(0, len(words), size)):
      if all(word.vmin == word.vmax == 0 for word in chunk):  # past the head size; C cannot index a constant vector
        result += [UOp.const(0.0, f.dtype(dtype))] * (2 * size)
      else:
        vector = UOp.stack(*chunk).bitcast(f.dtype(dtype))
        result += [vector[e] for e in range(2 * size)]
    return result

  def read_row(self, lds: LdsRows, row: UOp, steps: Sequence[int]) -> Operand:
    """Load this lane's operand for some steps from a row in LDS."""
    f = self.f
    first, chunks = [f.chunk(UOp.const(step), self.lane) for step in steps], range(f.words // CHUNK_WORDS)
    words = [
      [word for i in chunks for word in lds.load(row, chunk + i, term)] for chunk in first for term in range(f.terms)
    ]
    return [x for step in words for x in self.elements(step)]

  def mma_abt(
    self, lds: LdsRows, rows: int, operands: list[list[LoadOperand]], starts: list[list[UOp]] | None = None
  ) -> list[list[UOp]]:
    """This lane's elements of C + A B for each tile of columns; `lane_rows` says which rows they are in.

    Args:
      lds: A (rows, size).
      operands: B (size, 16) for each tile of columns and each step.
      starts: this lane's elements of C; None is 0.
    """
    f, numbers, chained = self.f, range(rows // MMA_SIZE), self.chains(len(operands[0]))
    tiles: list[list[Any]] = [[None for _ in numbers] for _ in operands]
    if starts is not None:
      tiles = [[UOp.stack(*x[n * f.result :][: f.result]) for n in numbers] for x in starts]
    pace = Pace(f.paced(len(operands[0]) * f.step), 1, lds)
    held: dict[range, list[Operand]] = {}
    # With terms each operand is held for as short as possible.
    order = [(n, x) for x in chained for n in numbers] if f.terms > 1 else [(n, x) for n in numbers for x in chained]
    for n, steps in order:
      after = pace.after()
      if steps not in held:
        held[steps] = [[x for step in steps for x in operand[step](*after)] for operand in operands]
      frag = self.read_row(lds.after(*after), n * MMA_SIZE + self.lane % MMA_SIZE, steps)
      for tile, operand in zip(tiles, held[steps], strict=True):
        tile[n] = self.multiply(frag, operand, tile[n])
      pace.done.append(tiles[-1][n][0])
    return [[tile[e] for tile in column for e in range(f.result)] for column in tiles]

  def lane_rows(self, rows: int) -> tuple[UOp, list[int]]:
    """The first row of a tile that this lane has elements of, and the offset of each element's row from it.

    The rows of the tile are those of `RegisterPipeline.as_is`, permuted so that a lane has neighbours.
    """
    f = self.f
    per_step = f.row_tiles * f.result  # elements
    return self.lane // MMA_SIZE * per_step, [step + i for step in range(0, rows, f.step) for i in range(per_step)]

  def words_of_terms(self, values: list[UOp]) -> list[Words]:
    """Pack float32 values into the words of each term, rounded to 16 bits if there is only one."""
    f, dtype = self.f, self.dtype
    if f.terms > 1:
      return in_terms(f, [x.bitcast(dtypes.uint) for x in values])
    return [[word_of(dtype, *values[i : i + 2]) for i in range(0, len(values), 2)]]

  def operand_of(self, values: list[UOp]) -> Operand:
    """The operand of one step that consists of this lane's float32 values."""
    f, dtype = self.f, self.dtype
    if f.terms == 1:
      return [rounded(dtype, x) for x in values]
    terms = zip(*map(upper_terms, values), strict=True)
    return [(x >> 16).cast(dtypes.ushort).bitcast(f.dtype(dtype)) for term in terms for x in term]

  def as_operands(self, values: list[list[UOp]], lds: LdsRows | None, row_offsets: list[UOp]) -> list[list[Operand]]:
    """Turn D of each tile of columns, float32, into the B operand of each step of `mma_ab`.

    On RDNA3 D goes through `lds` (columns, rows), where this lane's column is row `row_offsets[tile]`. One fence serves
    all tiles.
    """
    f, dtype = self.f, self.dtype
    per_step = f.row_tiles * f.result  # elements
    tiles = [[x[i : i + per_step] for i in range(0, len(x), per_step)] for x in values]
    if f.bits == 8:
      return [[[word_of_bytes(dtype, x[i : i + 4]) for i in range(0, per_step, 4)] for x in steps] for steps in tiles]
    if lds is None:
      return [[self.operand_of(step) for step in steps] for steps in tiles]
    stores = []
    for steps, offset in zip(tiles, row_offsets, strict=True):
      for i, step in enumerate(steps):
        stores += lds.store(offset, f.step // f.per_chunk * i + self.lane // MMA_SIZE, self.words_of_terms(step))
    fenced = lds.fenced(*stores)
    return [[self.read_row(fenced, offset, [i]) for i in range(len(tiles[0]))] for offset in row_offsets]

  def mma_ab(self, operands: list[list[Operand]], lds: LdsRows, acc: UOp, starts: list[list[UOp]]) -> list[UOp]:
    """The stores of C + A^T D to acc (tiles of columns, tiles of 16 of A's columns, `result` elements in this lane).

    Args:
      operands: D for each tile of columns and each step.
      lds: A^T (A's columns, A's rows).
      starts: C, in the tiles of acc.
    """
    f = self.f
    stores, pace = [], Pace(f.paced(sizes(acc)[1] * MMA_SIZE), 0, lds)
    for d in range(sizes(acc)[1]):
      out = [tiles[d] for tiles in starts]
      for steps in self.chains(len(operands[0])):
        frag = self.read_row(lds.after(*pace.after()), d * MMA_SIZE + self.lane % MMA_SIZE, steps)
        out = [self.multiply(frag, joined(x, steps), c) for x, c in zip(operands, out, strict=True)]
        pace.done.append(out[-1][0])
      stores += [acc[i, d].store(c) for i, c in enumerate(out)]
    return stores

  def other_group(self, value: UOp, distance: int) -> UOp:
    """The 32-bit value in the lane of the same column, `distance` groups away."""
    if self.f.lanes == 32:
      return HIP.permlanex16(value)
    if distance == 1:
      return HIP.shuffle_xor(value, MMA_SIZE)
    return HIP.shuffle(value, (self.lane ^ 32).cast(dtypes.int))

  def row_reduce(self, operation: Callable[[UOp, UOp], UOp], value: UOp) -> UOp:
    """Reduce the values of all lanes of a column by `operation`."""
    distance = 1
    while distance < self.f.groups:
      value, distance = operation(value, self.other_group(value, distance)), 2 * distance
    return value

  def store_acc(self, o: UOp | View, head: UOp, row: UOp, acc: UOp, finished: Callable[[UOp], UOp]) -> list[UOp]:
    """Store finished(acc) to o[head, row], unless the row is past o's end.

    acc is (tiles of 16 columns, `result` elements in this lane). o is of 8 or 16 bits, or float32, as for a split of
    the keys that `combine` reads.
    """
    f = self.f
    stores = []
    for j in range(sizes(acc)[0]):
      values = [finished(acc[j, e].load()) for e in range(f.result)]
      if o.dtype == dtypes.float:
        stores += [
          store_column(o, head, row, j * MMA_SIZE + f.result_row(self.lane // MMA_SIZE, e), x)
          for e, x in enumerate(values)
        ]
        continue
      first = j * MMA_SIZE + self.lane // MMA_SIZE * f.result
      if o.dtype in LARGEST:
        stores += self.store_bytes(o, head, row, first, values)
      else:
        stores += store_columns(o, head, row, first, self.neighbours([x.cast(o.dtype) for x in values]))
    return stores

  def neighbours(self, values: list[UOp]) -> list[UOp]:
    """This lane's elements of 16 columns, as neighbours. On RDNA3 a lane has every second one, so lanes swap halves."""
    if not self.f.interleaved:
      return values
    low, half, result = self.lane < MMA_SIZE, len(values) // 2, []
    for near, far in zip(values[:half], values[half:], strict=True):
      bits = low.where(far, near).bitcast(dtypes.ushort).cast(dtypes.uint)
      other = self.other_group(bits, 1).cast(dtypes.ushort).bitcast(near.dtype)
      result += [low.where(near, other), low.where(other, far)]
    return result

  def store_bytes(self, o: UOp | View, head: UOp, row: UOp, first: UOp, values: list[UOp]) -> list[UOp]:
    """Round float32 `values` to 8 bits and store them as `store_columns` does.

    Values out of range, infinities too, become the largest finite number.
    """
    largest, stores = LARGEST[o.dtype], []
    values = [(x > largest).where(largest, (x < -largest).where(-largest, x)) for x in values]
    for e in range(0, len(values), 4):
      four, start = values[e : e + 4], row_start(o, head, row) + first + e
      word = to_ocp(word_of_bytes(o.dtype, [x * 0.5 for x in four])) if self.f.fnuz else word_of_bytes(o.dtype, four)
      word = HIP.pin(word)
      if sizes(o)[2] % 4 == 0:
        inside = contains(o, row, first + e)
        stores.append(as_type(o, dtypes.uint)[(start // 4).valid(inside)].store(word))
        continue
      for i in range(4):
        inside = contains(o, row, first + e + i)
        stores.append(as_type(o, dtypes.uchar)[(start + i).valid(inside)].store((word >> 8 * i).cast(dtypes.uchar)))
    return stores


class Pace:
  """Lets a product load its operands only once the products before it are done, for want of registers.

  Attributes:
    slows: whether it does so.
    overlap: how many of the latest products may still be unfinished.
    done: an element of each product so far.
  """

  def __init__(self, slows: bool, overlap: int, lds: LdsRows):
    self.slows, self.overlap, self.ready = slows, overlap, lds.words
    self.done = [UOp.const(0.0, dtypes.float)] * (overlap + 1)

  def after(self) -> tuple[UOp, ...]:
    """What the loads of the next product come after."""
    return (HIP.read_later(self.done[-1 - self.overlap], self.ready),) if self.slows else ()


def joined(operands: list[Operand], steps: Sequence[int]) -> Operand:
  """The elements of some steps, one after another."""
  return [x for step in steps for x in operands[step]]


def rounded(dtype: DType, x: UOp) -> UOp:
  """Round x to the nearest float of a type. Ties of bfloat16 go away from 0, which takes only one addition.

  A NaN whose bits are 0x7FFF8000 or more, but for the sign, becomes 0 in bfloat16. To notice it would take two more
  instructions for each element: a sixth to a third more in the mainloop (forward, gfx942 and gfx1201).
  """
  if dtype != dtypes.bfloat16:
    return x.cast(dtype)
  return ((x.bitcast(dtypes.uint) + 0x8000) >> 16).cast(dtypes.ushort).bitcast(dtype)


def word_of(dtype: DType, low: UOp, high: UOp) -> UOp:
  """Round two float32 to 16 bits and pack them into a word."""
  if dtype == dtypes.half:
    low, high = (rounded(dtype, x).bitcast(dtypes.ushort).cast(dtypes.uint) for x in (low, high))
    return low | (high << 16)
  return HIP.high_halves(*(x.bitcast(dtypes.uint) + 0x8000 for x in (low, high)))


def word_of_bytes(dtype: DType, elements: Sequence[UOp]) -> UOp:
  """Round four float32 to 8 bits and pack them into a word. Values out of range become NaN, or in e5m2 infinity."""
  low = HIP.convert_pair(elements[0], elements[1], UOp.const(0, dtypes.uint), False, dtype)
  return HIP.convert_pair(elements[2], elements[3], low, True, dtype)


def store_column(o: UOp | View, head: UOp, row: UOp, column: UOp, value: UOp) -> UOp:
  """Store one float32 element."""
  return gated(o, contains(o, row, column), head, row, column).store(HIP.pin(value))


def store_columns(o: UOp | View, head: UOp, row: UOp, first: UOp, values: list[UOp]) -> list[UOp]:
  """Store `values` to o[head, row, first:], in words if rows are whole words; nothing outside o.

  All lanes compute the values, also those that store none, because lanes exchange elements to make them.
  """
  width, stores = 2 - sizes(o)[2] % 2, []
  for e in range(0, len(values), width):
    inside = contains(o, row, first + e)
    if width == 1:
      word = HIP.pin(values[e].bitcast(dtypes.ushort).cast(dtypes.uint))
      stores.append(gated(o, inside, head, row, first + e).store(word.cast(dtypes.ushort).bitcast(o.dtype)))
      continue
    low, high = (x.bitcast(dtypes.ushort).cast(dtypes.uint) for x in values[e : e + 2])
    at = row_start(o, head, row) // 2 + (first + e) // 2
    stores.append(as_type(o, dtypes.uint)[at.valid(inside)].store(HIP.pin(low | (high << 16))))
  return stores
