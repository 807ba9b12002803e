"""Which keys a query sees, and what becomes of its scores: all that stands between q.k and the softmax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, nan

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops

from uopattn.dsl.math import LOG2E, tanh
from uopattn.dsl.random import kept
from uopattn.dsl.rows import HeadRows, Pages, Scales
from uopattn.dsl.scope import Scope, clamp, gated, least, sizes
from uopattn.dsl.softmax import split_factor


@dataclass(frozen=True, eq=False)
class Rules:
  """Those of one attention. Buffers are the kernel's own; a feature that is None, or (), costs nothing.

  Attributes:
    M, N: queries and keys.
    heads: query heads of a batch.
    group: query heads that share a key head.
    packs: query heads whose queries a kernel sees as the rows of one head, one head after another. Row r of head h is
      then query r % M of head h packs + r // M.
    scale: factor on q.k.
    window: key j is seen by query i iff position - left <= j <= position + right, its position being i + q_start; None
      is no bound. A causal mask is a right side of 0.
    q_start: an int, a variable, or a (B,) int32 buffer.
    kv_lengths: keys that exist, likewise; None is N.
    bounds: the first and the last key that each query sees, (M,) int32 both, none of which decreases with the query.
    softcap: bounds the scores to (-softcap, softcap).
    score_mod: (score, b, h, q_idx, kv_idx) -> score, on float32 and int32.
    mask_mods: (b, h, q_idx, kv_idx) -> bool; False hides the key.
    attn_mask: a buffer that broadcasts to (B, heads, M, N); bool hides, a float is added.
    sinks: (heads,) float32 logits that join the sum of exponentials.
    dropout_p: probability of dropping a weight.
    seed: (2,) uint32, of the random numbers that say which; None if none are dropped.
    scales: of keys and values of 8 bits; None if they are multiplied as they are.
    tile_lists: the tiles of keys that each block of queries visits, (B or 1, heads or 1, blocks, tiles) int32, those
      that it sees whole first; and how many these are and how many all, (B or 1, heads or 1, blocks, 2) int32. For a
      kernel whose blocks are of keys, the tiles of queries likewise.
    pages: where the keys are that lie in pages; None if they lie one after another.
  """

  M: int
  N: int
  heads: int = 1
  group: int = 1
  packs: int = 1
  scale: float = 1.0
  window: tuple[int | None, int | None] = (None, None)
  q_start: int | UOp = 0
  kv_lengths: int | UOp | None = None
  bounds: tuple[UOp, UOp] | None = None
  scales: Scales | None = None
  softcap: float | None = None
  score_mod: Callable[..., UOp] | None = None
  mask_mods: tuple[Callable[..., UOp], ...] = ()
  attn_mask: UOp | None = None
  sinks: UOp | None = None
  dropout_p: float = 0.0
  seed: UOp | None = None
  tile_lists: tuple[UOp, UOp] | None = None
  pages: Pages | None = None

  @property
  def kv_heads(self) -> int:
    """Key heads of a batch."""
    return self.heads // self.group

  @property
  def name(self) -> str:
    """For the name of a kernel: "_causal", "_window" or nothing, and "_paged" or nothing."""
    window = "" if self.window == (None, None) else "_causal" if self.window == (None, 0) else "_window"
    return window if self.pages is None else f"{window}_paged"

  @property
  def longest_last(self) -> bool:
    """Whether later queries see more keys than earlier ones."""
    return self.window[1] is not None and self.window[0] is None

  @property
  def _adds(self) -> bool:
    return self.attn_mask is not None and self.attn_mask.dtype != dtypes.bool

  @property
  def _moves(self) -> bool:
    """Whether anything comes after softcap."""
    return self.score_mod is not None or self._adds

  @property
  def modifies(self) -> bool:
    """Whether scores are more than products times a factor."""
    return self.softcap is not None or self._moves

  @property
  def weighs(self) -> bool:
    """Whether the weights of values are more than exponentials; see `HeadRules.weights`."""
    return self.seed is not None or self.scales is not None

  @property
  def factors(self) -> tuple[float, float]:
    """A factor on q.k, for `HeadRules.scores` to apply, and one in the exponent, of base 2, which is greater than 0."""
    if not self.modifies:
      return split_factor(self.scale)
    cap = 1.0 if self.softcap is None else self.softcap
    return self.scale / cap, LOG2E if self._moves else LOG2E * cap

  def at(self, head: UOp) -> "HeadRules":
    """The rules for a head of the kernel's, counted through all batches."""
    heads = self.heads // self.packs
    return HeadRules(self, head // heads, head % heads * self.packs)


@dataclass(frozen=True, eq=False)
class Visit:
  """The tiles of keys that a block of queries visits, or the reverse, by their position in the order of the visit.

  Attributes:
    whole: the first `whole` are seen whole and need no mask.
    count: all of them, at least 1.
    tile: the tile at a position below `count`.
  """

  whole: UOp
  count: UOp
  tile: Callable[[UOp], UOp]

  def part(self, i: UOp, parts: int) -> "Visit":
    """Part i of as many as equal parts as can be; it may have no tile."""
    if parts == 1:
      return self
    begin, end = self.count * i // parts, self.count * (i + 1) // parts
    count = clamp(end - begin, 0, ceildiv(int(self.count.vmax), parts))

    def tile(position: UOp) -> UOp:  # what is loaded ahead, past the last one, is that one again: it is in a cache
      return self.tile(begin + clamp(position, 0, (count - 1).maximum(0)))

    if (self.count - self.whole).simplify().vmax == 0:  # all are seen whole
      return Visit(count, count, tile)
    return Visit(clamp(self.whole - begin, 0, count) if self.whole.vmax > 0 else self.whole, count, tile)


@dataclass(frozen=True, eq=False)
class HeadRules:
  """The rules for query head `h` of batch `b`, or for those that are packed from there on."""

  rules: Rules
  b: UOp
  h: UOp

  def place(self, row: UOp) -> tuple[UOp, UOp]:
    """The query head, and the query, that a row is; past the last row, which is none, the last head."""
    r = self.rules
    return (self.h, row) if r.packs == 1 else (self.h + clamp(row // r.M, 0, r.packs - 1), row % r.M)

  def keys(self, x: UOp) -> HeadRows:
    """The keys, or values, in a buffer (B kv_heads, N, size), or in pages (pages kv_heads, rows of a page, size)."""
    r = self.rules
    if r.pages is not None:
      return HeadRows.paged(x, r.pages, self.b, self._kv_head, self.length)
    operand = None if r.scales is None else r.scales.operand
    return HeadRows.of(x, self.b * r.kv_heads + self._kv_head, self.length, operand)

  def of_tile(self, s: Scope, first: UOp, block_n: int, within: tuple[UOp, ...]) -> "HeadRules":
    """The same for a CPU's tile of `block_n` keys from `first` on, whose pages are looked up inside the axes `within`.

    From the length on its keys are then where the last one is.
    """
    if (pages := self.rules.pages) is None:
      return self
    pages = pages.of_tile(s, self.b, self._kv_head, first, block_n, self.length, within)
    return replace(self, rules=replace(self.rules, pages=pages))

  @property
  def _kv_head(self) -> UOp:
    """The key head, of those of its batch."""
    return self.h // self.rules.group

  @property
  def length(self) -> UOp:
    """How many keys exist: none from here on may be read."""
    r = self.rules
    return UOp.const(r.N) if r.kv_lengths is None else clamp(self._number(r.kv_lengths), 0, r.N)

  def sink(self, row: UOp) -> UOp | None:
    """The logit that joins a row's sum of exponentials, in base 2."""
    return None if self.rules.sinks is None else self.rules.sinks[self.place(row)[0]].load() * LOG2E

  def last_seen(self, row: UOp) -> UOp:
    """The last key that a query sees; before the first one, or before 0, if it sees none."""
    return reduce(UOp.minimum, [*self._lasts(self.place(row)[1]), UOp.const(self.rules.N - 1)])

  def first_seen(self, row: UOp) -> UOp | None:
    """The first key that a query sees; None if that is 0 for all queries."""
    firsts = self._firsts(self.place(row)[1])
    return reduce(UOp.maximum, firsts) if firsts else None

  def visit(self, row: UOp, block_m: int, block_n: int) -> Visit:
    """The tiles of `block_n` keys that the queries from `row` to row + block_m - 1 visit; all queries, if packed.

    tinygrad's linearizer knows what is outside a loop by how often it runs: a loop of one trip at most, if that is not
    known to be one, would swallow what comes before it. So `whole` is 0 where it could be at most 1.
    """
    r, tiles = self.rules, ceildiv(self.rules.N, block_n)
    row, last_row = (row, (row + block_m).minimum(r.M) - 1) if r.packs == 1 else (UOp.const(0), UOp.const(r.M - 1))
    lasts, firsts = self._lasts(last_row), self._firsts(row)
    if r.tile_lists is not None:
      return self._listed(row // block_m, tiles, bool(lasts or firsts or self._hides(2)))
    count = UOp.const(tiles)
    if not lasts and not firsts:
      return Visit(UOp.const(0 if self._hides(1) else r.N // block_n), count, lambda position: position)
    end = clamp(least(lasts), 0, r.N - 1) // block_n + 1 if lasts else count
    whole_end = clamp(least(self._lasts(row)) + 1, 0, r.N) // block_n if lasts else UOp.const(r.N // block_n)
    begin = clamp(_largest(firsts), 0, r.N - 1) // block_n if firsts else UOp.const(0)
    whole_begin = (clamp(_largest(self._firsts(last_row)), 0, r.N) + block_n - 1) // block_n if firsts else begin
    whole = whole_end if not firsts else (whole_end - whole_begin).maximum(0)
    whole = whole if whole.vmax > 1 and not self._hides(1) else UOp.const(0)
    if not firsts:
      return Visit(whole, end, lambda position: position)
    return Visit(whole, clamp(end - begin, 1, tiles), whole_first(begin, whole_begin, whole, tiles))

  def visit_queries(self, key: UOp, block_n: int, block_m: int) -> Visit:
    """The tiles of `block_m` queries that see any of the keys from `key` to key + block_n - 1; see `visit`.

    Of a tile that is seen whole all queries exist, and so do all the keys. What bounds and rules for single keys hide
    is not left out, so with these no tile is known to be seen whole. Lists of tiles are those of tiles of queries.

    Args:
      key: a multiple of `block_n`.
    """
    r, tiles = self.rules, ceildiv(self.rules.M, block_m)
    left, right = r.window
    if r.tile_lists is not None:
      others = r.window != (None, None) or r.kv_lengths is not None or r.bounds is not None or self._hides(2)
      return self._listed(key // block_n, tiles, others)
    shift = UOp.const(0) if r.window == (None, None) else self._number(r.q_start)
    # Of the first and of the last key, as positions of queries count.
    near, far = key - shift, least([key + block_n, UOp.const(r.N)]) - 1 - shift
    begin, end = UOp.const(0), UOp.const(tiles)
    whole_begin, whole_end = begin, UOp.const(r.M // block_m)
    if right is not None:
      begin = clamp(near - right, 0, r.M - 1) // block_m
      whole_begin = (clamp(far - right, 0, r.M) + block_m - 1) // block_m
    if left is not None:
      end = clamp(far + left, 0, r.M - 1) // block_m + 1
      whole_end = clamp(near + left + 1, 0, r.M) // block_m
    whole = (whole_end - whole_begin).maximum(0)
    hides = self._hides(1) or r.bounds is not None
    exist = key + block_n <= self.length
    # decided here, if it can be: a loop that turns out to have no trips is more than the linearizer bears
    whole = UOp.const(0) if hides or whole.vmax < 2 or not exist.vmax else whole
    whole = whole if exist.vmin or whole.vmax == 0 else exist.where(whole, 0)
    count = clamp(end - begin, 1, tiles)
    count = count if r.kv_lengths is None else (key < self.length).where(count, 1)
    return Visit(whole, count, whole_first(begin, whole_begin, whole, tiles) if right is not None else lambda x: x)

  def scores(self, products: list[UOp], row: UOp, first: UOp, offsets: Sequence[int], masked: bool) -> list[UOp]:
    """The scores of a query before the factor in the exponent, -inf where hidden.

    Args:
      products: q.k in float32.
      row: the query.
      first, offsets: the keys are first + offset.
      masked: whether any of them may be hidden; their tile is not seen whole.
    """
    factor = self.rules.factors[0]
    scaled = [
      self.modified(x if factor == 1 else x * factor, row, first + i, masked)
      for x, i in zip(products, offsets, strict=True)
    ]
    if not masked:
      return scaled
    last, start = self.last_seen(row) - first, self.first_seen(row)
    result = []
    for x, offset in zip(scaled, offsets, strict=True):
      hidden = [last < offset, *self._hidden(row, first + offset)]
      if start is not None:
        hidden.append(start - first > offset)
      result.append(reduce(UOp.__or__, hidden).where(-inf, x))
    return result

  def modified(self, score: UOp, row: UOp, key: UOp, masked: bool = True) -> UOp:
    """q.k times the first of `Rules.factors`, after softcap, score_mod and the additive mask; times the second next.

    Before all of these comes the key's scale. `masked` is whether the key may be none. NaN of a key in what is no page,
    unless it is hidden.
    """
    r = self.rules
    if r.scales is not None:
      score = score * self._scale(r.scales.keys, key, masked)
    if r.softcap is not None:
      score = tanh(score) * r.softcap if r._moves else tanh(score)
    if r.score_mod is not None:
      score = self._mod(score, row, key)
    score = score + self._mask(row, key).cast(dtypes.float) if r._adds else score
    if r.pages is None:
      return score
    right = r.pages.exists(self.b, key, self.length)
    return (right | score.eq(-inf) if r._moves else right).where(score, nan)

  def pulled_back(
    self,
    grads: list[UOp],
    products: list[UOp],
    row: UOp,
    first: UOp,
    offsets: Sequence[int],
    scaled: bool = True,
  ) -> list[UOp]:
    """Gradients of a query's scores, once they are finished, made those of its products.

    Args:
      grads: by the scores in natural units, float32; 0 where a key is hidden.
      products: q.k in float32.
      row: the query.
      first, offsets: the keys are first + offset.
      scaled: whether the factor `Rules.scale` is in them; if not, it is left for the sums of these.
    """
    pulled = [self._pulled_back(g, x, row, first + i) for g, x, i in zip(grads, products, offsets, strict=True)]
    return [x * self.rules.scale for x in pulled] if scaled else pulled

  def _pulled_back(self, grad: UOp, product: UOp, row: UOp, key: UOp) -> UOp:
    """The same by the product times scale. What comes after score_mod is added, and so of no account."""
    r = self.rules
    if not r.modifies:
      return grad
    score, slope = product * r.factors[0], None
    if r.softcap is not None:
      bounded = tanh(score)
      score, slope = bounded * r.softcap, 1.0 - bounded * bounded
    if r.score_mod is not None:
      # Of a hidden key the slope of score_mod may be infinite, and 0 times that is NaN.
      grad = grad.eq(0).where(0.0, vjp(lambda x: self._mod(x, row, key), score, grad))
    return grad if slope is None else grad * slope

  def weights(self, p: list[UOp], row: UOp, first: UOp, offsets: Sequence[int], masked: bool) -> list[UOp]:
    """What a query's values are multiplied by: exponentials after dropout, times the values' scales.

    Args:
      p: exponentials in float32, already summed.
      row: the query.
      first, offsets: the keys are first + offset.
      masked: whether any of them may be none.
    """
    p, scales = self.dropped(p, row, first, offsets), self.rules.scales
    if scales is None:
      return p
    return [x * self._scale(scales.values, first + i, masked) for x, i in zip(p, offsets, strict=True)]

  def dropped(self, p: list[UOp], row: UOp, first: UOp, offsets: Sequence[int]) -> list[UOp]:
    """P of a query for the keys first + offset, once dropout has set some to 0 and scaled the others."""
    r = self.rules
    if r.seed is None:
      return p
    seed = r.seed[0].load(), r.seed[1].load()
    h, query = self.place(row)
    place = ((self.b * r.heads + h) * r.M + query).cast(dtypes.uint)
    keep = [kept(seed, place, (first + i).cast(dtypes.uint), r.dropout_p) for i in offsets]
    return [keeps.where(x * (1 / (1 - r.dropout_p)), 0.0) for keeps, x in zip(keep, p, strict=True)]

  def _scale(self, scales: UOp, key: UOp, masked: bool) -> UOp:
    """What a key, or value, is to be multiplied by once it is widened; 0 for none, whose scale is not read."""
    assert self.rules.scales is not None
    inside = None if not masked or key.vmax < self.length.vmin else key < self.length
    rows = self.keys(scales.reshape(-1, sizes(scales)[-1], 1))
    scale = rows.element(key, UOp.const(0), inside) * self.rules.scales.unit
    return scale if inside is None else inside.where(scale, 0.0)

  def hidden(self, row: UOp, key: UOp) -> list[UOp]:
    """The rules by which a query does not see a key below N."""
    query = self.place(row)[1]
    late = [key > last for last in self._lasts(query)]
    return late + [key < first for first in self._firsts(query)] + self._hidden(row, key)

  def _number(self, x: int | UOp) -> UOp:
    """A value of this batch: an int, a variable, or an element of a buffer."""
    if isinstance(x, int):
      return UOp.const(x)
    return x if x.shape == () else x[self.b].load().cast(dtypes.weakint)

  def _lasts(self, query: UOp) -> list[UOp]:
    """Bounds on the last key that a query sees, other than N - 1."""
    r, found = self.rules, []
    if r.window[1] is not None:
      found.append(query + self._number(r.q_start) + r.window[1])
    if r.kv_lengths is not None:
      found.append(self.length - 1)
    if r.bounds is not None:
      found.append(self._bound(r.bounds[1], query))
    return found

  def _firsts(self, query: UOp) -> list[UOp]:
    """Bounds on the first key that a query sees, other than 0."""
    r, found = self.rules, []
    if r.window[0] is not None:
      found.append(query + self._number(r.q_start) - r.window[0])
    if r.bounds is not None:
      found.append(self._bound(r.bounds[0], query))
    return found

  def _bound(self, bounds: UOp, query: UOp) -> UOp:
    return bounds[query.minimum(self.rules.M - 1)].load().cast(dtypes.weakint)

  def _hides(self, more_than: int) -> bool:
    """Whether at least `more_than` rules say of single keys whether they are seen."""
    r = self.rules
    return len(r.mask_mods) + (r.attn_mask is not None and not r._adds) >= more_than

  def _listed(self, block: UOp, tiles: int, others: bool) -> Visit:
    """What the lists say; with other rules at work no tile is known to be seen whole."""
    assert self.rules.tile_lists is not None
    order, counts = self.rules.tile_lists
    place = (self.b if sizes(order)[0] > 1 else UOp.const(0), self.h if sizes(order)[1] > 1 else UOp.const(0), block)
    whole, count = (clamp(counts[(*place, UOp.const(i))].load().cast(dtypes.weakint), i, tiles) for i in range(2))
    whole = UOp.const(0) if others or tiles < 2 else whole

    def tile(position: UOp) -> UOp:
      return clamp(order[(*place, clamp(position, 0, tiles - 1))].load().cast(dtypes.weakint), 0, tiles - 1)

    return Visit(whole, count if tiles > 1 else UOp.const(1), tile)

  def _hidden(self, row: UOp, key: UOp) -> list[UOp]:
    """What the rules that speak of single keys hide."""
    seen = [mod(*self._indices(row, key)) for mod in self.rules.mask_mods]
    seen += [] if self.rules.attn_mask is None or self.rules._adds else [self._mask(row, key)]
    return [x.logical_not() for x in seen]

  def _mod(self, score: UOp, row: UOp, key: UOp) -> UOp:
    assert self.rules.score_mod is not None
    return self.rules.score_mod(score, *self._indices(row, key))

  def _indices(self, row: UOp, key: UOp) -> list[UOp]:
    return [x.cast(dtypes.int) for x in (self.b, *self.place(row), key)]

  def _mask(self, row: UOp, key: UOp) -> UOp:
    """The element of the mask; 0 or False past the last query or key."""
    mask = self.rules.attn_mask
    assert mask is not None
    places = (self.b, *self.place(row), key)
    index = [UOp.const(0) if size == 1 else x for x, size in zip(places, sizes(mask), strict=True)]
    return Table(mask)[tuple(index)]


class Table:
  """A buffer that is indexed with any integers: what is outside of it reads as 0."""

  def __init__(self, buffer: UOp):
    self.buffer, self.shape, self.ndim, self.dtype = buffer, sizes(buffer), len(sizes(buffer)), buffer.dtype

  def __getitem__(self, index: int | UOp | tuple[int | UOp, ...]) -> UOp:
    places = index if isinstance(index, tuple) else (index,)
    if len(places) != self.ndim:
      raise IndexError(f"{len(places)} indices for a tensor of shape {self.shape}; there must be {self.ndim}")
    found = [(x if isinstance(x, UOp) else UOp.const(x)).cast(dtypes.weakint) for x in places]
    doubts = [x < size for x, size in zip(found, self.shape, strict=True) if x.vmax >= size]
    doubts += [x >= 0 for x in found if x.vmin < 0]
    if not doubts:
      return self.buffer[tuple(found)].load()
    inside = reduce(UOp.__and__, doubts)
    return inside.where(gated(self.buffer, inside, *found).load(), UOp.const(0, self.dtype))


def whole_first(begin: UOp, whole_begin: UOp, whole: UOp, tiles: int) -> Callable[[UOp], UOp]:
  """The tile at a position, of those from `begin` on, `whole` of which, from `whole_begin` on, come first."""

  def tile(position: UOp) -> UOp:
    rest = begin + position - whole
    after = (rest < whole_begin).where(rest, rest + whole)
    return clamp((position < whole).where(whole_begin + position, after), 0, tiles - 1)

  return tile


def vjp(function: Callable[[UOp], UOp], x: UOp, grad: UOp) -> UOp:
  """grad times the derivative of a function at a float32 x, by tinygrad's own rules.

  What is computed from x by way of ints and bools, as an element looked up, is constant. The derivative is taken of
  symbols, as those rules would walk through all that x is computed from.
  """
  at, seed = (UOp.variable(name, -inf, inf, dtypes.float, param=True) for name in ("x", "grad"))
  result = function(at)
  constant = [u for u in result.toposort() if u.op is Ops.LOAD or (u.op is Ops.CAST and not _among_floats(u))]
  result = result.substitute({u: u.detach() for u in constant}, walk=True)
  found = compute_gradient(result, seed, {at}).get(at)
  if found is None:
    return UOp.const(0.0, dtypes.float)
  found = found.substitute({u: u.src[0] for u in found.toposort() if u.op is Ops.DETACH}, walk=True)
  return found.substitute({at: x, seed: grad}, walk=True)


def _among_floats(cast: UOp) -> bool:
  return dtypes.is_float(cast.dtype) and dtypes.is_float(cast.src[0].dtype)


def _largest(values: list[UOp]) -> UOp:
  return reduce(UOp.maximum, values)
