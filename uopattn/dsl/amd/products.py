"""Matrix products on AMD's matrix cores, from loading the operands to storing the accumulators.

Attention needs two kinds. In both, D's columns belong to lanes, 16 per wave; see `uopattn.dsl.amd.fragments`.
    D = A B         `mma_abt`: A is a tile of rows in LDS; B, other rows of the same size, is in registers
    C + A^T D       `mma_ab`: A^T is a transposed tile in LDS; D comes from the first product by `as_operands`
"""

from collections.abc import Callable, Sequence

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import Ops

from uopattn.dsl import instructions as ins
from uopattn.dsl.amd.fnuz import from_ocp, to_ocp
from uopattn.dsl.amd.fragments import CHUNK_WORDS, HIP, MMA_SIZE, Fragments
from uopattn.dsl.amd.staging import LdsRows
from uopattn.dsl.packed import ALWAYS, Words, as_type, words_of
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.quantized import LARGEST
from uopattn.dsl.scope import gated, sizes
from uopattn.dsl.view import View, row_start

Operand = list[UOp]  # the `width` elements of A, or of B, that a lane holds for a step; in 8 bits words of four


def load_operands(
  f: Fragments, dtype: DType, rows: HeadView, row: UOp, lane: UOp, exists: UOp = ALWAYS
) -> list[Operand]:
  """Load a row as this lane's B operand of each step; zeros where `exists` is false."""
  load, steps = words_of(rows, exists), ceildiv(rows.size, f.step)
  words = [[load(row, f.chunk(UOp.const(i), lane) * CHUNK_WORDS + w) for w in range(f.words)] for i in range(steps)]
  if f.fnuz:
    words = [[from_ocp(word, dtype) for word in step] for step in words]
  return [elements(f, dtype, step) for step in words]


def multiply(f: Fragments, dtype: DType, a: Operand, b: Operand, c: UOp) -> UOp:
  """C + A B over one step, or over the steps of `chains`.

  tinygrad's renderers lack most products of 8 bits. `uopattn.runtime.amd` renders those whose operands are words.
  """
  per_unit = 4 if f.bits == 8 else 1  # elements
  size = len(a) if len(a) > f.width // per_unit else f.operand // per_unit
  dims = (MMA_SIZE, MMA_SIZE, f.k * size * per_unit // f.operand)
  for i in range(0, len(a), size):
    left, right = (UOp.stack(*x[i : i + size]) for x in (a, b))
    c = UOp(Ops.WMMA, src=(left, right, c), arg=(dims, dtype, "AMD", f.lanes, None))
  return c


def chains(f: Fragments, steps: int) -> list[range]:
  """The steps that are multiplied at once: `Fragments.together` where so many remain, else one."""
  whole = steps // f.together * f.together
  return [range(i, i + f.together) for i in range(0, whole, f.together)] + [
    range(i, i + 1) for i in range(whole, steps)
  ]


def elements(f: Fragments, dtype: DType, words: Words) -> Operand:
  """Reinterpret words as elements.

  tinygrad's lowering does not terminate if an operand is all of one vector that is no STACK. So the operand is made of
  half a vector, or of two.
  """
  if f.bits == 8:
    return words
  if f.bits == 32:
    return [word.bitcast(dtype) for word in words]
  size = len(words) // 2 if f.products == 1 else len(words)
  result: Operand = []
  for part in (words[i : i + size] for i in range(0, len(words), size)):
    if all(word.vmin == word.vmax == 0 for word in part):  # past the head size; C cannot index a constant vector
      result += [UOp.const(0.0, dtype)] * (2 * size)
    else:
      vector = UOp.stack(*part).bitcast(dtype)
      result += [vector[e] for e in range(2 * size)]
  return result


def read_row(f: Fragments, dtype: DType, lds: LdsRows, row: UOp, steps: Sequence[int], lane: UOp) -> Operand:
  """Load this lane's operand for some steps from a row in LDS."""
  first = [f.chunk(UOp.const(step), lane) for step in steps]
  words = [[word for i in range(f.words // CHUNK_WORDS) for word in lds.load(row, chunk + i)] for chunk in first]
  return [x for step in words for x in elements(f, dtype, step)]


def mma_abt(
  f: Fragments,
  dtype: DType,
  lds: LdsRows,
  rows: int,
  operands: list[list[Operand]],
  lane: UOp,
  begun: list[list[UOp]] | None = None,
) -> list[list[UOp]]:
  """C + A B for each tile of columns, as tiles of 16 rows with `result` elements in this lane.

  Args:
    lds: A (rows, size).
    operands: B (size, 16) for each tile of columns and each step.
    begun: C, in the tiles of the result; None is 0.
  """
  zero = UOp.const((0.0,) * f.result, dtypes.float)
  tiles = [[zero] * (rows // MMA_SIZE) for _ in operands] if begun is None else [list(tile) for tile in begun]
  for n in range(rows // MMA_SIZE):
    for steps in chains(f, len(operands[0])):
      frag = read_row(f, dtype, lds, n * MMA_SIZE + lane % MMA_SIZE, steps, lane)
      for tile, operand in zip(tiles, operands, strict=True):
        tile[n] = multiply(f, dtype, frag, joined(operand, steps), tile[n])
  return tiles


def joined(operands: list[Operand], steps: Sequence[int]) -> Operand:
  """The elements of some steps, one after another."""
  return [x for step in steps for x in operands[step]]


def lane_rows(f: Fragments, rows: int, lane: UOp) -> tuple[UOp, list[int]]:
  """The first row of a tile that this lane has elements of, and the offset of each element's row from it.

  The rows of the tile are those of `RegisterPipeline.as_is`, permuted so that a lane has neighbours.
  """
  per_step = f.row_tiles * f.result  # elements
  return lane // MMA_SIZE * per_step, [step + i for step in range(0, rows, f.step) for i in range(per_step)]


def rounded(dtype: DType, x: UOp) -> UOp:
  """Round x to the nearest float of a type. Ties of bfloat16 go away from 0, which takes only one addition."""
  if dtype != dtypes.bfloat16:
    return x.cast(dtype)
  return ((x.bitcast(dtypes.uint) + 0x8000) >> 16).cast(dtypes.ushort).bitcast(dtype)


def word_of(dtype: DType, low: UOp, high: UOp) -> UOp:
  """Round two float32 to 16 bits and pack them into a word."""
  if dtype == dtypes.half:
    low, high = (rounded(dtype, x).bitcast(dtypes.ushort).cast(dtypes.uint) for x in (low, high))
    return low | (high << 16)
  return ins.high_halves(HIP, *(x.bitcast(dtypes.uint) + 0x8000 for x in (low, high)))


def word_of_bytes(dtype: DType, elements: Sequence[UOp]) -> UOp:
  """Round four float32 to 8 bits and pack them into a word. Values out of range become NaN, or in e5m2 infinity."""
  low = ins.convert_pair(HIP, elements[0], elements[1], UOp.const(0, dtypes.uint), False, dtype)
  return ins.convert_pair(HIP, elements[2], elements[3], low, True, dtype)


def as_operands(
  f: Fragments, dtype: DType, values: list[list[UOp]], lds: LdsRows | None, places: list[UOp], lane: UOp
) -> list[list[Operand]]:
  """Turn D of each tile of columns, float32, into the B operand of each step of `mma_ab`.

  On RDNA3 D goes through `lds` (columns, rows), where row `places[tile]` is this lane's column. One fence serves all
  tiles.
  """
  per_step = f.row_tiles * f.result  # elements
  tiles = [[x[i : i + per_step] for i in range(0, len(x), per_step)] for x in values]
  if f.bits == 8:
    return [[[word_of_bytes(dtype, x[i : i + 4]) for i in range(0, per_step, 4)] for x in steps] for steps in tiles]
  if lds is None:
    return [[[rounded(dtype, x) for x in step] for step in steps] for steps in tiles]
  stores = []
  for steps, place in zip(tiles, places, strict=True):
    for i, step in enumerate(steps):
      words = [word_of(dtype, *step[j : j + 2]) for j in range(0, per_step, 2)]
      stores += lds.store(place, f.step // f.per_chunk * i + lane // MMA_SIZE, words)
  fenced = lds.fenced(*stores)
  return [[read_row(f, dtype, fenced, place, [i], lane) for i in range(len(tiles[0]))] for place in places]


def mma_ab(
  f: Fragments, dtype: DType, operands: list[list[Operand]], lds: LdsRows, acc: UOp, begun: list[list[UOp]], lane: UOp
) -> list[UOp]:
  """The stores of C + A^T D to acc (tiles of columns, tiles of 16 of A's columns, `result` elements in this lane).

  Args:
    operands: D for each tile of columns and each step.
    lds: A^T (A's columns, A's rows).
    begun: C, in the tiles of acc.
  """
  stores = []
  for d in range(sizes(acc)[1]):
    out = [tiles[d] for tiles in begun]
    for steps in chains(f, len(operands[0])):
      frag = read_row(f, dtype, lds, d * MMA_SIZE + lane % MMA_SIZE, steps, lane)
      out = [multiply(f, dtype, frag, joined(x, steps), c) for x, c in zip(operands, out, strict=True)]
    stores += [acc[i, d].store(c) for i, c in enumerate(out)]
  return stores


def other_group(f: Fragments, value: UOp, lane: UOp, distance: int) -> UOp:
  """The 32-bit value in the lane of the same column, `distance` groups away."""
  if f.lanes == 32:
    return ins.permlanex16(HIP, value)
  return (
    ins.shuffle_xor(HIP, value, MMA_SIZE) if distance == 1 else ins.shuffle(HIP, value, (lane ^ 32).cast(dtypes.int))
  )


def row_reduce(f: Fragments, operation: Callable[[UOp, UOp], UOp], value: UOp, lane: UOp) -> UOp:
  """Reduce the values of all lanes of a column by `operation`."""
  distance = 1
  while distance < f.groups:
    value, distance = operation(value, other_group(f, value, lane, distance)), 2 * distance
  return value


def store_acc(
  f: Fragments, o: UOp | View, head: UOp, row: UOp, acc: UOp, finished: Callable[[UOp], UOp], lane: UOp
) -> list[UOp]:
  """Store finished(acc) to o[head, row], unless the row is past o's end.

  acc is (tiles of 16 columns, `result` elements in this lane). o is of 8 or 16 bits, or float32, as for a split of the
  keys that `combine` reads.
  """
  stores = []
  for j in range(sizes(acc)[0]):
    values = [finished(acc[j, e].load()) for e in range(f.result)]
    if o.dtype == dtypes.float:
      stores += [
        store_part(o, head, row, j * MMA_SIZE + f.result_row(lane // MMA_SIZE, e), x) for e, x in enumerate(values)
      ]
      continue
    first = j * MMA_SIZE + lane // MMA_SIZE * f.result
    if o.dtype in LARGEST:
      stores += store_bytes(f, o, head, row, first, values)
    else:
      stores += store_columns(o, head, row, first, neighbours(f, [x.cast(o.dtype) for x in values], lane))
  return stores


def store_part(o: UOp | View, head: UOp, row: UOp, column: UOp, value: UOp) -> UOp:
  """Store one float32 element."""
  _, M, Dv = sizes(o)
  inside = (row < M) & (column < Dv) if column.vmax >= Dv else row < M
  return gated(o, inside, head, row, column).store(ins.pin(HIP, value))


def neighbours(f: Fragments, values: list[UOp], lane: UOp) -> list[UOp]:
  """This lane's elements of 16 columns, as neighbours. On RDNA3 a lane has every second one, so lanes swap halves."""
  if not f.interleaved:
    return values
  low, half, result = lane < MMA_SIZE, len(values) // 2, []
  for near, far in zip(values[:half], values[half:], strict=True):
    bits = low.where(far, near).bitcast(dtypes.ushort).cast(dtypes.uint)
    other = other_group(f, bits, lane, 1).cast(dtypes.ushort).bitcast(near.dtype)
    result += [low.where(near, other), low.where(other, far)]
  return result


def store_columns(o: UOp | View, head: UOp, row: UOp, first: UOp, values: list[UOp]) -> list[UOp]:
  """Store `values` to o[head, row, first:], in words if rows are whole words; nothing outside o.

  All lanes compute the values, also those that store none, because lanes exchange elements to make them.
  """
  _, M, Dv = sizes(o)
  width = 2 - Dv % 2
  stores = []
  for e in range(0, len(values), width):
    inside = (row < M) & (first + e < Dv) if first.vmax + e >= Dv else row < M
    if width == 1:
      word = ins.pin(HIP, values[e].bitcast(dtypes.ushort).cast(dtypes.uint))
      stores.append(gated(o, inside, head, row, first + e).store(word.cast(dtypes.ushort).bitcast(o.dtype)))
      continue
    low, high = (x.bitcast(dtypes.ushort).cast(dtypes.uint) for x in values[e : e + 2])
    at = row_start(o, head, row) // 2 + (first + e) // 2
    stores.append(as_type(o, dtypes.uint)[at.valid(inside)].store(ins.pin(HIP, low | (high << 16))))
  return stores


def store_bytes(f: Fragments, o: UOp | View, head: UOp, row: UOp, first: UOp, values: list[UOp]) -> list[UOp]:
  """Round float32 `values` to 8 bits and store them as `store_columns` does.

  Values out of range, infinities too, become the largest finite number.
  """
  _, M, Dv = sizes(o)
  largest, stores = LARGEST[o.dtype], []
  values = [(x > largest).where(largest, (x < -largest).where(-largest, x)) for x in values]
  for e in range(0, len(values), 4):
    four, start = values[e : e + 4], row_start(o, head, row) + first + e
    word = to_ocp(word_of_bytes(o.dtype, [x * 0.5 for x in four])) if f.fnuz else word_of_bytes(o.dtype, four)
    word = ins.pin(HIP, word)
    if Dv % 4 == 0:
      inside = (row < M) & (first + e < Dv) if first.vmax + e >= Dv else row < M
      stores.append(as_type(o, dtypes.uint)[(start // 4).valid(inside)].store(word))
      continue
    for i in range(4):
      inside = (row < M) & (first + e + i < Dv) if first.vmax + e + i >= Dv else row < M
      stores.append(as_type(o, dtypes.uchar)[(start + i).valid(inside)].store((word >> 8 * i).cast(dtypes.uchar)))
  return stores
