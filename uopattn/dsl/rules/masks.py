"""Masks: which keys a query sees, and which tiles a block of queries or keys processes."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.rules.ranges import Bounds, Lengths, Range
from uopattn.dsl.rules.tile_range import TileRange, full_first
from uopattn.dsl.scope import clamp, least, sizes

FAR = 1 << 30  # beyond any key, and within int32 even after a side of a window and a number of queries are added


@dataclass(frozen=True)
class Origin:
  """The numbers that batches, heads, queries and keys of a part have in the whole, that mods and dropout use.

  Attributes:
    first: numbers of batch, query head, query and key 0 of the part.
    heads, M: query heads and queries of the whole; 0 if they are those of the part.
  """

  first: tuple[int | UOp, int | UOp, int | UOp, int | UOp] = (0, 0, 0, 0)
  heads: int = 0
  M: int = 0


NO_ORIGIN = Origin()


class Table:
  """A buffer that accepts any integers as indices. Elements out of bounds read as 0."""

  def __init__(self, buffer: UOp):
    self.buffer, self.shape, self.ndim, self.dtype = buffer, sizes(buffer), len(sizes(buffer)), buffer.dtype

  def __getitem__(self, index: int | UOp | tuple[int | UOp, ...]) -> UOp:
    given = index if isinstance(index, tuple) else (index,)
    if len(given) != self.ndim:
      raise IndexError(f"{len(given)} indices for a tensor of shape {self.shape}; there must be {self.ndim}")
    indices = [_whole(x).cast(dtypes.weakint) for x in given]
    if 0 in self.shape:  # everything is out of bounds
      return UOp.const(0, self.dtype)
    doubts = [x < size for x, size in zip(indices, self.shape, strict=True) if x.vmax >= size]
    doubts += [x >= 0 for x in indices if x.vmin < 0]
    if not doubts:
      return self.buffer[tuple(indices)].load()
    # tinygrad uses a condition on an index to simplify other expressions of the same numbers, and may so split a loop
    # in two if its trip count is one of them. It does not look into a product, and so there is no gate on the load.
    inside = reduce(UOp.__mul__, [x.cast(dtypes.int) for x in doubts]).ne(0)
    pairs = zip(indices, self.shape, strict=True)
    clamped = [x if x.vmin >= 0 and x.vmax < size else clamp(x, 0, size - 1) for x, size in pairs]
    return inside.where(self.buffer[tuple(clamped)].load(), UOp.const(0, self.dtype))


def _whole(index: object) -> UOp:
  """Return an index of a table as a UOp. Raises TypeError if it is no integer."""
  if not isinstance(index, (int, UOp)) or isinstance(index, bool):
    raise TypeError(f"an index of a tensor is {index!r}; it must be an integer, of which there is one for each axis")
  if isinstance(index, UOp) and not dtypes.is_int(index.dtype):
    raise TypeError(f"an index of a tensor has dtype {index.dtype}; it must be an integer: write x.cast(dtypes.int)")
  return index if isinstance(index, UOp) else UOp.const(index)


@dataclass(frozen=True, eq=False)
class Masks:
  """Everything that hides keys from queries. A feature that is None or () costs nothing.

  Attributes:
    M, N: number of queries and of keys.
    heads: query heads per batch element.
    pack_gqa: query heads whose queries are packed as the rows of one head of the kernel, head after head. Row r of
      head h is query r % M of head h * pack_gqa + r // M.
    q_start: position of query 0: an int, a variable, or a (B,) int32 buffer.
    kv_lengths: number of keys that exist, in the same forms; None is N.
    bounds: the first and the last key that each query sees, (M,) int32 both. Neither decreases from query to query.
    masks: rules that give each query a range of keys, besides `kv_lengths` and `bounds`.
    mask_mods: (b, h, q_idx, kv_idx) -> bool; False hides the key.
    attn_mask: a buffer that broadcasts to (B, heads, M, N). A bool mask hides keys where False; a float mask is added.
    mask_tile: (row, key) -> the element of `attn_mask`, for the rows and keys of one tile; None if it is read in place.
    tile_lists: the tiles of keys that each block of queries processes, full tiles first, (B or 1, heads or 1, blocks,
      tiles) int32; and the number of full tiles and of all tiles, (B or 1, heads or 1, blocks, 2) int32. If a kernel's
      blocks are of keys, the lists are of tiles of queries.
    origin: the numbers that mods and dropout use.
  """

  M: int
  N: int
  heads: int = 1
  pack_gqa: int = 1
  q_start: int | UOp = 0
  kv_lengths: int | UOp | None = None
  bounds: tuple[UOp, UOp] | None = None
  masks: tuple[Range, ...] = ()
  mask_mods: tuple[Callable[..., UOp], ...] = ()
  attn_mask: UOp | None = None
  mask_tile: Callable[[UOp, UOp], UOp] | None = None
  tile_lists: tuple[UOp, UOp] | None = None
  origin: Origin = NO_ORIGIN

  @functools.cached_property
  def ranges(self) -> tuple[Range, ...]:
    """All rules that give each query a range of keys."""
    input_ranges: list[Range] = [] if self.kv_lengths is None else [Lengths()]
    input_ranges += [] if self.bounds is None else [Bounds()]
    return (*self.masks, *input_ranges)

  @property
  def rows(self) -> int:
    """Rows of a head of the kernel: the queries of all packed heads."""
    return self.M * self.pack_gqa

  @property
  def longest_last(self) -> bool:
    """Whether later queries see more keys than earlier ones, as under a causal mask."""
    return any(x.longest_last for x in self.masks)

  @property
  def _adds(self) -> bool:
    return self.attn_mask is not None and self.attn_mask.dtype != dtypes.bool


@dataclass(frozen=True, eq=False)
class HeadMasks:
  """The masks of query head `h` of batch `b`, or of the `pack_gqa` packed heads from `h` on."""

  rules: Masks
  b: UOp
  h: UOp

  def head_and_query(self, row: UOp) -> tuple[UOp, UOp]:
    """The query head and the query of a row. A row past the last one, which is no query, gets the last head."""
    r = self.rules
    return (self.h, row) if r.pack_gqa == 1 else (self.h + clamp(row // r.M, 0, r.pack_gqa - 1), row % r.M)

  @property
  def is_prefix(self) -> bool:
    """Whether every row sees a prefix of the tiles, and later rows see at least as many (causal, kv_lengths)."""
    row = UOp.const(0)
    return bool(self._lasts(row)) and not self._firsts(row) and self.rules.tile_lists is None

  @property
  def length(self) -> UOp:
    """The number of keys that exist. No key from there on may be read."""
    r = self.rules
    return UOp.const(r.N) if r.kv_lengths is None else clamp(self._number(r.kv_lengths), 0, r.N)

  def last_seen(self, row: UOp) -> UOp:
    """The last key that a query sees; less than the first one, or negative, if it sees none."""
    return reduce(UOp.minimum, [*self._lasts(self.head_and_query(row)[1]), UOp.const(self.rules.N - 1)])

  def first_seen(self, row: UOp) -> UOp | None:
    """The first key that a query sees; None if it is 0 for all queries."""
    firsts = self._firsts(self.head_and_query(row)[1])
    return reduce(UOp.maximum, firsts) if firsts else None

  def key_range(self, row: UOp, block_m: int, block_n: int) -> TileRange:
    """The tiles of `block_n` keys that rows `row` to row + block_m - 1 attend to; all rows if heads are packed.

    tinygrad's linearizer decides what is outside a loop by how often it runs. A loop of at most one trip, if it is not
    known to have exactly one, would swallow the code before it. So `n_full` is 0 where it could be at most 1.
    """
    r, tiles = self.rules, ceildiv(self.rules.N, block_n)
    row, last_row = (row, (row + block_m).minimum(r.M) - 1) if r.pack_gqa == 1 else (UOp.const(0), UOp.const(r.M - 1))
    lasts, firsts = self._lasts(last_row), self._firsts(row)
    if r.tile_lists is not None:
      return self._listed(row // block_m, tiles, bool(lasts or firsts or self._hides(2)))
    n_tiles = UOp.const(tiles)
    if not lasts and not firsts:
      return TileRange(UOp.const(0 if self._hides(1) else r.N // block_n), n_tiles, lambda position: position)
    end = clamp(least(lasts), 0, r.N - 1) // block_n + 1 if lasts else n_tiles
    full_end = clamp(least(self._lasts(row)) + 1, 0, r.N) // block_n if lasts else UOp.const(r.N // block_n)
    begin = clamp(_largest(firsts), 0, r.N - 1) // block_n if firsts else UOp.const(0)
    full_begin = (clamp(_largest(self._firsts(last_row)), 0, r.N) + block_n - 1) // block_n if firsts else begin
    n_full = full_end if not firsts else (full_end - full_begin).maximum(0)
    n_full = n_full if n_full.vmax > 1 and not self._hides(1) else UOp.const(0)
    if not firsts:
      return TileRange(n_full, end, lambda position: position)
    return TileRange(n_full, clamp(end - begin, 1, tiles), full_first(begin, full_begin, n_full, tiles))

  def reaches(self, row: UOp, block_m: int, key: UOp, block_n: int) -> list[UOp]:
    """Conditions, without any of which no row from `row` to row + block_m - 1 sees a key up to key + block_n - 1.

    They are about rules that give each query a range of keys. Heads are not packed.
    """
    last_row = least([row + block_m, UOp.const(self.rules.M)]) - 1
    return [key <= x for x in self._lasts(last_row)] + [key + block_n > x for x in self._firsts(row)]

  def query_range(self, key: UOp, block_n: int, block_m: int, padded: bool = False) -> TileRange:
    """The tiles of `block_m` queries that see any of the keys `key` to key + block_n - 1; see `key_range`.

    In a full tile all keys exist, and all queries unless it is `padded`. `bounds` and masks on single keys skip no tile
    here, and with them no tile is known to be full; nor does any mask if heads are packed. `tile_lists` must be lists
    of tiles of queries.

    Args:
      key: a multiple of `block_n`.
      padded: whether a tile in which M ends may be full, as what is past it has no weight.
    """
    r, tiles = self.rules, ceildiv(self.rules.rows, block_m)
    if r.tile_lists is not None:
      return self._listed(key // block_n, tiles, bool(r.ranges) or self._hides(2))
    last_key = least([key + block_n, UOp.const(r.N)]) - 1
    # The first queries that see the first key and the last key; then the last queries that see them.
    firsts, all_firsts = (self._first_queries(k) for k in (key, last_key))
    all_lasts, lasts = (_known(x.last_query(self, k) for x in r.ranges) for k in (key, last_key))
    begin, end = UOp.const(0), UOp.const(tiles)
    full_begin, full_end = begin, UOp.const(tiles if padded else r.rows // block_m)
    if r.pack_gqa > 1:
      firsts, lasts = [], []
    if firsts:
      begin = self.first_tile(key, block_m)
      full_begin = (clamp(_largest(all_firsts), 0, r.M) + block_m - 1) // block_m
    if lasts:
      end = clamp(least(lasts), 0, r.M - 1) // block_m + 1
      full_end = clamp(least(all_lasts) + 1, 0, r.M) // block_m
    n_full = (full_end - full_begin).maximum(0)
    hides = self._hides(1) or not all(x.by_keys for x in r.ranges)
    exist = key + block_n <= self.length
    # Decide at build time if possible: the linearizer fails on a loop that turns out to have no trips.
    n_full = UOp.const(0) if hides or n_full.vmax < 2 or not exist.vmax else n_full
    n_full = n_full if exist.vmin or n_full.vmax == 0 else exist.where(n_full, 0)
    n_tiles = clamp(end - begin, 1, tiles)
    n_tiles = n_tiles if r.kv_lengths is None else (key < self.length).where(n_tiles, 1)
    return TileRange(n_full, n_tiles, full_first(begin, full_begin, n_full, tiles) if firsts else lambda x: x)

  def first_tile(self, key: UOp, block_m: int) -> UOp:
    """The first tile of `query_range`."""
    firsts = [] if self.rules.pack_gqa > 1 else self._first_queries(key)
    return clamp(_largest(firsts), 0, self.rules.M - 1) // block_m if firsts else UOp.const(0)

  def _first_queries(self, key: UOp) -> list[UOp]:
    return _known(x.first_query(self, key) for x in self.rules.ranges)

  def hidden(self, row: UOp, key: UOp) -> list[UOp]:
    """Conditions, any of which hides a key below N from a query."""
    query = self.head_and_query(row)[1]
    late = [key > last for last in self._lasts(query)]
    return late + [key < first for first in self._firsts(query)] + self.hidden_by_masks(row, key)

  def hidden_by_masks(self, row: UOp, key: UOp) -> list[UOp]:
    """The conditions of masks on single keys: `mask_mods` and a bool `attn_mask`."""
    seen = [mod(*self._indices(row, key)) for mod in self.rules.mask_mods]
    seen += [] if self.rules.attn_mask is None or self.rules._adds else [self._mask(row, key)]
    return [x.logical_not() for x in seen]

  def _hides(self, more_than: int) -> bool:
    """Whether there are at least `more_than` masks on single keys."""
    r = self.rules
    return len(r.mask_mods) + (r.attn_mask is not None and not r._adds) >= more_than

  def _listed(self, block: UOp, tiles: int, others: bool) -> TileRange:
    """The tiles in `tile_lists`. With `others`, other masks in use, no tile is known to be full."""
    assert self.rules.tile_lists is not None
    order, counts = self.rules.tile_lists
    first_axes = (
      self.b if sizes(order)[0] > 1 else UOp.const(0),
      self.h if sizes(order)[1] > 1 else UOp.const(0),
      block,
    )
    n_full, n_tiles = (
      clamp(counts[(*first_axes, UOp.const(i))].load().cast(dtypes.weakint), i, tiles) for i in range(2)
    )
    n_full = UOp.const(0) if others or tiles < 2 else n_full

    def tile(position: UOp) -> UOp:
      return clamp(order[(*first_axes, clamp(position, 0, tiles - 1))].load().cast(dtypes.weakint), 0, tiles - 1)

    return TileRange(n_full, n_tiles if tiles > 1 else UOp.const(1), tile)

  def _lasts(self, query: UOp) -> list[UOp]:
    """Bounds on the last key that a query sees, besides N - 1."""
    return _known(rule.last(self, query) for rule in self.rules.ranges)

  def _firsts(self, query: UOp) -> list[UOp]:
    """Bounds on the first key that a query sees, besides 0."""
    return _known(rule.first(self, query) for rule in self.rules.ranges)

  def bound(self, last: bool, query: UOp) -> UOp:
    """The first or the last key of a query by `Masks.bounds`; past the last query, that of the last one."""
    assert self.rules.bounds is not None
    return self.rules.bounds[last][query.minimum(self.rules.M - 1)].load().cast(dtypes.weakint)

  @property
  def first_key(self) -> int | UOp:
    """The number of key 0 in the whole; see `Origin`."""
    return self.rules.origin.first[3]

  @property
  def start(self) -> UOp:
    """The position of query 0. One from a buffer is clamped to [-FAR, FAR], as tinygrad adds to it in int32."""
    start = self._number(x := self.rules.q_start)
    return start if isinstance(x, int) or x.shape == () else clamp(start, -FAR, FAR)

  def _number(self, x: int | UOp) -> UOp:
    """The value for this batch element of an int, a variable or a (B,) buffer."""
    if isinstance(x, int):
      return UOp.const(x)
    return x if x.shape == () else x[self.b].load().cast(dtypes.weakint)

  def numbers(self, row: UOp, key: UOp) -> list[UOp]:
    """The batch, head, query and key that mods and dropout use; see `Origin`."""
    positions = zip((self.b, *self.head_and_query(row), key), self.rules.origin.first, strict=True)
    return [x + first if isinstance(first, UOp) or first else x for x, first in positions]

  def _indices(self, row: UOp, key: UOp) -> list[UOp]:
    return [x.cast(dtypes.int) for x in self.numbers(row, key)]

  def _mask(self, row: UOp, key: UOp) -> UOp:
    """The element of `attn_mask`; 0 or False past the last query or key."""
    if self.rules.mask_tile is not None:
      return self.rules.mask_tile(row, key)
    mask = self.rules.attn_mask
    assert mask is not None
    positions = (self.b, *self.head_and_query(row), key)
    index = [UOp.const(0) if size == 1 else x for x, size in zip(positions, sizes(mask), strict=True)]
    return Table(mask)[tuple(index)]


def _known(bounds: Iterable[UOp | None]) -> list[UOp]:
  return [x for x in bounds if x is not None]


def _largest(values: list[UOp]) -> UOp:
  return reduce(UOp.maximum, values)
