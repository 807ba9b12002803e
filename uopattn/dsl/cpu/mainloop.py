"""The main loop of CPU kernels: a block of queries, the tiles of keys that it sees, their readers, the epilogue.

The products and the softmax between them are each kernel's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd, inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl.instructions import CPU
from uopattn.dsl.math import exp2
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import Scaling, normalize, store_lse
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Loop, Scope, clamp, least, sizes
from uopattn.dsl.target import LINE

Tile = Callable[[UOp, UOp], UOp]  # (key of the tile, column) -> its float32 element


@dataclass(frozen=True, eq=False)
class KeyTile:
  """A tile of keys.

  Attributes:
    rules: the rules of the block's head, for this tile.
    first: its first key. The last tile is moved back to end at N.
    start: the first key that it adds.
    shared: whether the keys before `start` may be another tile's.
    size: its number of keys, more than N if all keys do not fill it.
    past_end: whether it may contain keys from N on although `size` is at most N.
  """

  rules: HeadRules
  first: UOp
  start: UOp
  shared: bool
  size: int
  past_end: bool = False

  @property
  def length(self) -> UOp | None:
    """The number of keys that exist; None if those of every tile do."""
    rules = self.rules.rules
    return self.rules.length if rules.kv_lengths is not None or self.reaches_past_end else None

  @property
  def reaches_past_end(self) -> bool:
    """Whether it may have keys from N on."""
    return self.past_end or self.size > self.rules.rules.N

  def with_pages(self, s: Scope, axes: tuple[UOp, ...]) -> "KeyTile":
    """The tile with the rows of its keys looked up in the page table inside the axes, if keys are paged."""
    return replace(self, rules=self.rules.of_tile(s, self.first, self.size, axes))

  def with_mask(self, s: Scope, row: UOp, block_m: int, axes: tuple[UOp, ...]) -> "KeyTile":
    """The tile with its mask for `block_m` rows from `row` on, one per lane, copied inside the axes."""
    return replace(self, rules=self.rules.of_mask_tile(s, row, block_m, self.first, self.size, axes))

  def score(self, product: UOp, row: UOp, n: UOp) -> UOp:
    """The score of key n of the tile: -inf if it is hidden, does not exist or is another tile's.

    Args:
      product: q.k times `Scaling.pre`.
      row: the query.
    """
    key = self.first + n
    hidden = [key < self.start] if self.shared else []
    hidden += [key >= self.rules.rules.N] if self.reaches_past_end else []
    hidden += self.rules.hidden(row, key)
    score = self.rules.apply_score_mods(product, row, key)
    return reduce(UOp.__or__, hidden).where(-inf, score) if hidden else score

  def weight(self, p: UOp, row: UOp, n: UOp) -> UOp:
    """The weight of the value of key n: its exponential after dropout, times its scale."""
    return self.rules.weights([p], row, self.first + n, [0], True)[0]


@dataclass(frozen=True, eq=False)
class KeyTiles:
  """The tiles of keys that a block of queries sees.

  Attributes:
    rules: the rules of the block's head.
    key_range: their numbers.
    size: keys per tile.
  """

  rules: HeadRules
  key_range: TileRange
  size: int

  @property
  def may_be_none(self) -> bool:
    """Whether a split of the keys may be empty. It makes one trip then, in which all keys are hidden."""
    return self.key_range.n_tiles.vmin < 1

  @property
  def count(self) -> int:
    """Tiles of all keys."""
    return ceildiv(self.rules.rules.N, self.size)

  def start(self, position: UOp) -> UOp:
    """The first key that the tile at a position of `key_range` adds."""
    start = self.key_range.tile(clamp(position, 0, self.count - 1)) * self.size
    return self.key_range.n_tiles.eq(0).where(self.rules.rules.N, start) if self.may_be_none else start

  def at(self, position: UOp) -> KeyTile:
    """The tile at a position of `key_range`."""
    N, start = self.rules.rules.N, self.start(position)
    is_moved = self.size < N and N % self.size > 0
    first = clamp(start, 0, max(0, N - self.size))
    return KeyTile(self.rules, first, start, is_moved or self.may_be_none, self.size)

  def loop_up(self, s: Scope, *axes: UOp) -> "LoopUp":
    """Open the loop over them, inside the axes, in order."""
    return LoopUp(s, self.key_range.n_tiles, axes)

  def loop(self, s: Scope, *axes: UOp, busy: UOp | None = None) -> Loop:
    """Open the loop over them, inside the axes; its index counts down. If not `busy`, it makes one trip."""
    trips = self.key_range.n_tiles if busy is None else busy.where(self.key_range.n_tiles, 1)
    return s.loop(trips if trips.vmin < trips.vmax else int(trips.vmax), *axes)


class LoopUp:
  """A `Loop` that counts up from 0: a plain axis if the number of trips is known."""

  def __init__(self, s: Scope, trips: UOp, axes: tuple[UOp, ...]):
    self._loop = s.loop(trips, *axes) if trips.vmin < trips.vmax else None
    self.axes = (*axes, s.axis(int(trips.vmax))) if self._loop is None else self._loop.axes
    self.index = self.axes[-1] if self._loop is None else trips - 1 - self._loop.index

  def end(self, *body: UOp) -> UOp:
    """End the loop after the stores of its body."""
    stored = UOp.group(*body)
    return stored.end(self.axes[-1]) if self._loop is None else self._loop.end(stored)


@dataclass(frozen=True, eq=False)
class QueryBlock:
  """The query rows of one work item of a forward pass, for one split of the keys.

  Attributes:
    axes: the axes around it: calls of the kernel, and blocks per call.
    rules: the rules of its head.
    head: its head of q.
    result: its head in the output: head * splits + split.
    splits: number of splits of the keys.
    top: its first row.
    block_m: rows per block.
    end: rows of the head.
    repeats: whether rows past the last one repeat it, with the same result. If not, they are idle.
  """

  axes: tuple[UOp, UOp]
  rules: HeadRules
  head: UOp
  result: UOp
  splits: int
  top: UOp
  block_m: int
  end: int
  repeats: bool

  @classmethod
  def open(
    cls, s: Scope, q: UOp, o: UOp, rules: Rules, block_m: int, per_call: int, repeats: bool = False
  ) -> "QueryBlock":
    """Open the axes.

    Args:
      q: (heads, M, Dk).
      o: (heads * splits, M, Dv).
      per_call: blocks that one call of the kernel processes in turn.

    Raises:
      ValueError: `per_call` does not divide the number of blocks.
    """
    (heads, M, _), results = sizes(q), sizes(o)[0]
    blocks, splits = ceildiv(M, block_m), results // heads
    if results * blocks % per_call:
      raise ValueError(f"Tiles.blocks_per_call={per_call}: must divide the {results * blocks} blocks of queries")
    axes = s.axis(results * blocks // per_call, AxisType.THREAD), s.axis(per_call)
    item = axes[0] * per_call + axes[1]
    # Items of all heads for one split come one after another: where heads lie next to each other, as in a cache with
    # heads last, threads then read the same pages at the same time.
    work = item // blocks
    result = work % heads * splits + work // heads
    head, top = result // splits, item % blocks * block_m
    return cls(axes, rules.at(head), head, result, splits, top, block_m, M, repeats)

  def key_tiles(self, block_n: int) -> KeyTiles:
    """The tiles of `block_n` keys that it sees, of its split."""
    key_range = self.rules.key_range(self.top, self.block_m, block_n)
    return KeyTiles(self.rules, key_range.split(self.result % self.splits, self.splits), block_n)

  def row(self, m: UOp) -> UOp:
    """The row of the head for row m of the block."""
    row = self.top + m
    return clamp(row, 0, self.end - 1) if self.repeats and self.end % self.block_m else row

  def exists(self, m: UOp) -> UOp:
    """Whether row m of the block is one of the head."""
    return UOp.const(True) if self.repeats else self.top + m < self.end

  def epilogue(
    self, s: Scope, lse: UOp | None, m_i: UOp, l_i: UOp, scaling: Scaling, rows: int, store: Callable[[UOp], UOp]
  ) -> list[UOp]:
    """Store the output and the LSE, see `normalize`. One loop computes what these need of all rows.

    Args:
      m_i, l_i: row maxima and row sums, (block_m,).
      rows: how many rows of the block may exist.
      store: stores the accumulators times the rows' factors, (block_m,).
    """
    r = s.axis(sizes(m_i)[0])
    finished_row = normalize(m_i[r].load() * scaling.natural, l_i[r].load(), self.rules.sink(self.row(r)), exp2)
    values = [finished_row.factor, *(finished_row.numbers(lse) if lse is not None else [])]
    to = [s.buffer(*sizes(m_i)).after(*self.axes) for _ in values]
    end = UOp.group(*(x[r].store(value) for x, value in zip(to, values, strict=True))).end(r)
    factor, *numbers = (x.after(end) for x in to)
    stores = [store(factor)]
    if lse is not None:
      r = s.axis(rows)
      stored = store_lse(lse, self.exists(r), self.result, self.row(r), [x[r].load() for x in numbers])
      stores.append(UOp.group(*stored).end(r))
    return stores


def element(rows: HeadView, row: UOp, d: UOp, length: UOp | None) -> UOp:
  """An element of a row in memory, which may hold anything from `length` on: 0 if the row is not below it."""
  if length is None:
    return rows.element(row, d)
  inside = row < length
  return inside.where(rows.element(row, d, inside).cast(dtypes.float), 0.0)


def load_tile(s: Scope, rows: HeadView, tile: KeyTile, axes: tuple[UOp, ...]) -> Tile:
  """The keys or values of a tile. float32 is read in place; 16-bit types are widened once per tile.

  With a length, keys from there on are not read and are 0 in the tile.
  """
  if rows.x.dtype == dtypes.float and tile.length is None:
    return lambda n, d: rows.element(tile.first + n, d)

  def wide_element(n: UOp, d: UOp) -> UOp:
    return element(rows, tile.first + n, d, tile.length).cast(dtypes.float)

  wide = s.assign(s.buffer(tile.size, rows.size), wide_element, within=axes)
  return lambda n, d: wide[n, d].load()


@dataclass(frozen=True, eq=False)
class KeyRows:
  """The keys or values of a tile where they are in memory.

  Attributes:
    rows: the rows of the head.
    row: maps n to the row of the n-th key.
    counts: maps n to whether the n-th key counts; None if all do.
    trips: to how many keys a loop over them is limited, from 1 to the tile's size; None if it is not.
  """

  rows: HeadView
  row: Callable[[UOp], UOp]
  counts: Callable[[UOp], UOp] | None = None
  trips: UOp | None = None

  @classmethod
  def of(cls, tile: KeyTile, x: UOp) -> "KeyRows":
    """Those of x, k or v. Past the keys' length they hold anything."""
    return cls(tile.rules.keys(x), lambda n: tile.first + n)

  @classmethod
  def repeating(cls, tile: KeyTile, x: UOp) -> "KeyRows":
    """Those of x. Past the keys' length they repeat the last key that exists."""
    last = _last_key(tile)
    return cls(tile.rules.keys(x), lambda n: tile.first + n if last is None else least([tile.first + n, last]))

  @classmethod
  def new(cls, tile: KeyTile, x: UOp) -> "KeyRows":
    """The rows of x that this tile adds, up to the last key that exists. A tile past that key has only that one.

    A loop that ends there has addresses that grow evenly; with a clamp of each row it took half as long again.
    """
    last, rules = _last_key(tile), tile.rules.rules
    first = tile.first if last is None else least([tile.first, last])
    counts = (lambda n: tile.first + n >= tile.start) if rules.N % tile.size else None
    trips = None if last is None else clamp(last - first + 1, 1, tile.size)
    return cls(tile.rules.keys(x), lambda n: first + n, counts, trips)

  def __getitem__(self, index: tuple[UOp, UOp]) -> UOp:
    """An element as float32; 0 if its key does not count."""
    n, d = index
    element = self.rows.element(self.row(n), d).cast(dtypes.float)
    return element if self.counts is None else self.counts(n).where(element, 0.0)

  def address(self, n: UOp, d: UOp) -> UOp:
    """The memory location of an element."""
    return self.rows.address(self.row(n), d)

  def prefetch(
    self, s: Scope, rows: int, first: UOp, count: int, shares: int, within: tuple[UOp, ...], ahead: int = 0
  ) -> UOp:
    """Prefetch `count` of `shares` equal shares of the cache lines of `rows` rows of the tile, from share `first` on.

    `ahead` moves the rows on by this many keys. They may lie past the end of the buffer.
    """
    step = self.rows.per_bytes(LINE)
    lines = ceildiv(self.rows.per_bytes(self.rows.row_bytes), step)
    line = s.axis(ceildiv(rows * lines * count, shares))
    common = gcd(rows * lines, shares)
    at = clamp(first * (rows * lines // common) // (shares // common) + line, 0, rows * lines - 1)
    return CPU.prefetch(self.address(at // lines + ahead, at % lines * step), *within, line).end(line)


def _last_key(tile: KeyTile) -> UOp | None:
  """The last key that exists, 0 if none does; None if all N do."""
  rules = tile.rules.rules
  return None if rules.kv_lengths is None else clamp(tile.rules.length - 1, 0, rules.N - 1)
