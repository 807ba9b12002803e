"""Which keys a query sees, and which tiles of them a block of queries visits."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.rules.ranges import Bounds, Lengths, Range, Window
from uopattn.dsl.rules.table import Table
from uopattn.dsl.rules.tile_range import TileRange, full_first
from uopattn.dsl.scope import clamp, least, sizes

FAR = 1 << 30  # farther than any key, and still within int32 with a side of a window and a number of queries added


@dataclass(frozen=True, eq=False)
class Masks:
  """All that hides keys. Buffers are the kernel's own; a feature that is None, or (), costs nothing.

  Attributes:
    M, N: queries and keys.
    heads: query heads of a batch.
    pack_gqa: query heads whose queries a kernel sees as the rows of one head, one head after another. Row r of head h
      is then query r % M of head h pack_gqa + r // M.
    window: key j is seen by query i iff position - left <= j <= position + right, its position being i + q_start; None
      is no bound. A causal mask is a right side of 0.
    q_start: an int, a variable, or a (B,) int32 buffer.
    kv_lengths: keys that exist, likewise; None is N.
    bounds: the first and the last key that each query sees, (M,) int32 both, none of which decreases with the query.
    masks: further rules by which a query sees the keys from one to another.
    mask_mods: (b, h, q_idx, kv_idx) -> bool; False hides the key.
    attn_mask: a buffer that broadcasts to (B, heads, M, N); bool hides, a float is added.
    tile_lists: the tiles of keys that each block of queries visits, (B or 1, heads or 1, blocks, tiles) int32, those
      that it sees whole first; and how many these are and how many all, (B or 1, heads or 1, blocks, 2) int32. For a
      kernel whose blocks are of keys, the tiles of queries likewise.
  """

  M: int
  N: int
  heads: int = 1
  pack_gqa: int = 1
  window: tuple[int | None, int | None] = (None, None)
  q_start: int | UOp = 0
  kv_lengths: int | UOp | None = None
  bounds: tuple[UOp, UOp] | None = None
  masks: tuple[Range, ...] = ()
  mask_mods: tuple[Callable[..., UOp], ...] = ()
  attn_mask: UOp | None = None
  tile_lists: tuple[UOp, UOp] | None = None

  @functools.cached_property
  def ranges(self) -> tuple[Range, ...]:
    """All rules by which a query sees the keys from one to another."""
    found: list[Range] = [] if self.window == (None, None) else [Window(*self.window)]
    found += [] if self.kv_lengths is None else [Lengths()]
    found += [] if self.bounds is None else [Bounds(*self.bounds)]
    return (*found, *self.masks)

  @property
  def longest_last(self) -> bool:
    """Whether later queries see more keys than earlier ones."""
    return self.window[1] is not None and self.window[0] is None

  @property
  def _adds(self) -> bool:
    return self.attn_mask is not None and self.attn_mask.dtype != dtypes.bool


@dataclass(frozen=True, eq=False)
class HeadMasks:
  """Those for query head `h` of batch `b`, or for those that are packed from there on."""

  rules: Masks
  b: UOp
  h: UOp

  def place(self, row: UOp) -> tuple[UOp, UOp]:
    """The query head, and the query, that a row is; past the last row, which is none, the last head."""
    r = self.rules
    return (self.h, row) if r.pack_gqa == 1 else (self.h + clamp(row // r.M, 0, r.pack_gqa - 1), row % r.M)

  @property
  def length(self) -> UOp:
    """How many keys exist: none from there on may be read."""
    r = self.rules
    return UOp.const(r.N) if r.kv_lengths is None else clamp(self._number(r.kv_lengths), 0, r.N)

  def last_seen(self, row: UOp) -> UOp:
    """The last key that a query sees; before the first one, or before 0, if it sees none."""
    return reduce(UOp.minimum, [*self._lasts(self.place(row)[1]), UOp.const(self.rules.N - 1)])

  def first_seen(self, row: UOp) -> UOp | None:
    """The first key that a query sees; None if that is 0 for all queries."""
    firsts = self._firsts(self.place(row)[1])
    return reduce(UOp.maximum, firsts) if firsts else None

  def key_range(self, row: UOp, block_m: int, block_n: int) -> TileRange:
    """The tiles of `block_n` keys that the queries from `row` to row + block_m - 1 visit; all queries, if packed.

    tinygrad's linearizer knows what is outside a loop by how often it runs: a loop of one trip at most, if that is not
    known to be one, would swallow what comes before it. So `n_full` is 0 where it could be at most 1.
    """
    r, tiles = self.rules, ceildiv(self.rules.N, block_n)
    row, last_row = (row, (row + block_m).minimum(r.M) - 1) if r.pack_gqa == 1 else (UOp.const(0), UOp.const(r.M - 1))
    lasts, firsts = self._lasts(last_row), self._firsts(row)
    if r.tile_lists is not None:
      return self._listed(row // block_m, tiles, bool(lasts or firsts or self._hides(2)))
    count = UOp.const(tiles)
    if not lasts and not firsts:
      return TileRange(UOp.const(0 if self._hides(1) else r.N // block_n), count, lambda position: position)
    end = clamp(least(lasts), 0, r.N - 1) // block_n + 1 if lasts else count
    full_end = clamp(least(self._lasts(row)) + 1, 0, r.N) // block_n if lasts else UOp.const(r.N // block_n)
    begin = clamp(_largest(firsts), 0, r.N - 1) // block_n if firsts else UOp.const(0)
    full_begin = (clamp(_largest(self._firsts(last_row)), 0, r.N) + block_n - 1) // block_n if firsts else begin
    whole = full_end if not firsts else (full_end - full_begin).maximum(0)
    whole = whole if whole.vmax > 1 and not self._hides(1) else UOp.const(0)
    if not firsts:
      return TileRange(whole, end, lambda position: position)
    return TileRange(whole, clamp(end - begin, 1, tiles), full_first(begin, full_begin, whole, tiles))

  def query_range(self, key: UOp, block_n: int, block_m: int) -> TileRange:
    """The tiles of `block_m` queries that see any of the keys from `key` to key + block_n - 1; see `key_range`.

    Of a tile that is seen whole all queries exist, and so do all the keys. What bounds and rules for single keys hide
    is not left out, so with these no tile is known to be seen whole. Lists of tiles are those of tiles of queries.

    Args:
      key: a multiple of `block_n`.
    """
    r, tiles = self.rules, ceildiv(self.rules.M, block_m)
    if r.tile_lists is not None:
      return self._listed(key // block_n, tiles, bool(r.ranges) or self._hides(2))
    last_key = least([key + block_n, UOp.const(r.N)]) - 1
    # The first queries that see the first key, and the last key; likewise the last ones.
    firsts, all_firsts = (_known(x.first_query(self, k) for x in r.ranges) for k in (key, last_key))
    all_lasts, lasts = (_known(x.last_query(self, k) for x in r.ranges) for k in (key, last_key))
    begin, end = UOp.const(0), UOp.const(tiles)
    full_begin, full_end = begin, UOp.const(r.M // block_m)
    if firsts:
      begin = clamp(_largest(firsts), 0, r.M - 1) // block_m
      full_begin = (clamp(_largest(all_firsts), 0, r.M) + block_m - 1) // block_m
    if lasts:
      end = clamp(least(lasts), 0, r.M - 1) // block_m + 1
      full_end = clamp(least(all_lasts) + 1, 0, r.M) // block_m
    whole = (full_end - full_begin).maximum(0)
    hides = self._hides(1) or not all(x.by_keys for x in r.ranges)
    exist = key + block_n <= self.length
    # decided here, if it can be: a loop that turns out to have no trips is more than the linearizer bears
    whole = UOp.const(0) if hides or whole.vmax < 2 or not exist.vmax else whole
    whole = whole if exist.vmin or whole.vmax == 0 else exist.where(whole, 0)
    count = clamp(end - begin, 1, tiles)
    count = count if r.kv_lengths is None else (key < self.length).where(count, 1)
    return TileRange(whole, count, full_first(begin, full_begin, whole, tiles) if firsts else lambda x: x)

  def hidden(self, row: UOp, key: UOp) -> list[UOp]:
    """The rules by which a query does not see a key below N."""
    query = self.place(row)[1]
    late = [key > last for last in self._lasts(query)]
    return late + [key < first for first in self._firsts(query)] + self._hidden(row, key)

  def _hidden(self, row: UOp, key: UOp) -> list[UOp]:
    """What the rules that speak of single keys hide."""
    seen = [mod(*self._indices(row, key)) for mod in self.rules.mask_mods]
    seen += [] if self.rules.attn_mask is None or self.rules._adds else [self._mask(row, key)]
    return [x.logical_not() for x in seen]

  def _hides(self, more_than: int) -> bool:
    """Whether at least `more_than` rules say of single keys whether they are seen."""
    r = self.rules
    return len(r.mask_mods) + (r.attn_mask is not None and not r._adds) >= more_than

  def _listed(self, block: UOp, tiles: int, others: bool) -> TileRange:
    """What the lists say; with other rules at work no tile is known to be seen whole."""
    assert self.rules.tile_lists is not None
    order, counts = self.rules.tile_lists
    place = (self.b if sizes(order)[0] > 1 else UOp.const(0), self.h if sizes(order)[1] > 1 else UOp.const(0), block)
    whole, count = (clamp(counts[(*place, UOp.const(i))].load().cast(dtypes.weakint), i, tiles) for i in range(2))
    whole = UOp.const(0) if others or tiles < 2 else whole

    def tile(position: UOp) -> UOp:
      return clamp(order[(*place, clamp(position, 0, tiles - 1))].load().cast(dtypes.weakint), 0, tiles - 1)

    return TileRange(whole, count if tiles > 1 else UOp.const(1), tile)

  def _lasts(self, query: UOp) -> list[UOp]:
    """Bounds on the last key that a query sees, other than N - 1."""
    return _known(rule.last(self, query) for rule in self.rules.ranges)

  def _firsts(self, query: UOp) -> list[UOp]:
    """Bounds on the first key that a query sees, other than 0."""
    return _known(rule.first(self, query) for rule in self.rules.ranges)

  def bound(self, bounds: UOp, query: UOp) -> UOp:
    """The element of a (M,) buffer for a query; past the last one that of the last."""
    return bounds[query.minimum(self.rules.M - 1)].load().cast(dtypes.weakint)

  @property
  def start(self) -> UOp:
    """The position of the first query; from a buffer within FAR of 0, as tinygrad takes sums with it in int32."""
    start = self._number(x := self.rules.q_start)
    return start if isinstance(x, int) or x.shape == () else clamp(start, -FAR, FAR)

  def _number(self, x: int | UOp) -> UOp:
    """A value of this batch: an int, a variable, or an element of a buffer."""
    if isinstance(x, int):
      return UOp.const(x)
    return x if x.shape == () else x[self.b].load().cast(dtypes.weakint)

  def _indices(self, row: UOp, key: UOp) -> list[UOp]:
    return [x.cast(dtypes.int) for x in (self.b, *self.place(row), key)]

  def _mask(self, row: UOp, key: UOp) -> UOp:
    """The element of the mask; 0 or False past the last query or key."""
    mask = self.rules.attn_mask
    assert mask is not None
    places = (self.b, *self.place(row), key)
    index = [UOp.const(0) if size == 1 else x for x, size in zip(places, sizes(mask), strict=True)]
    return Table(mask)[tuple(index)]


def _known(bounds: Iterable[UOp | None]) -> list[UOp]:
  return [x for x in bounds if x is not None]


def _largest(values: list[UOp]) -> UOp:
  return reduce(UOp.maximum, values)
