"""The rules of one attention: its masks, score functions, dropout and score gradients, and where its keys are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, nan

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops

from uopattn.dsl.instructions import GENERIC, Dialect
from uopattn.dsl.math import LN2, LOG2E, tanh
from uopattn.dsl.random import kept
from uopattn.dsl.rules.head_view import Chosen, HeadView, Pages, Scales
from uopattn.dsl.rules.masks import HeadMasks, Masks
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.rules.softmax import Factor, Row, Scaling, normalize
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope, sizes

LARGEST_CAP = 2.0**20  # of a softcap below which m in base 2 is far from `softmax.LARGEST_M_8`
KEYS, VALUES = range(2)  # indices of `Scales`
LEAST_SCALE = 2.0**-100  # of a head; smaller ones are this: scores are 0 by either


@dataclass(frozen=True, eq=False)
class Rules(Masks):
  """Everything between q.k and the weighted sum except the softmax, in the fields of `Masks` and these.

  Also how keys are stored.

  Attributes:
    group: query heads per key head.
    pages: layout of paged keys; None if keys are contiguous.
    scales: scales of quantized keys and values; None without scales.
    q_scale, k_scale, v_scale: (B or 1, kv_heads or 1) float32 factors of q, k and v; None is 1.
    scale: factor on q.k.
    softcap: bounds the scores to (-softcap, softcap).
    score_mod: (score, b, h, q_idx, kv_idx) -> score, on float32 and int32.
    sinks: (heads,) float32 logits that are added to the softmax's sum of exponentials.
    dropout_p: probability that a weight is dropped.
    seed: (2,) uint32 seed of dropout; None without dropout.
    bias_slope: (score, b, h, q_idx, kv_idx, grad) -> grad times the derivative of score_mod with respect to a number
      that it reads, whose gradient is wanted; None if that is the additive mask's.
    dialect: of the instructions in score functions.
  """

  group: int = 1
  pages: Pages | None = None
  scales: Scales | None = None
  q_scale: UOp | None = None
  k_scale: UOp | None = None
  v_scale: UOp | None = None
  scale: float = 1.0
  softcap: float | None = None
  score_mod: Callable[..., UOp] | None = None
  sinks: UOp | None = None
  dropout_p: float = 0.0
  seed: UOp | None = None
  bias_slope: Callable[..., UOp] | None = None
  dialect: Dialect = GENERIC

  @property
  def kv_heads(self) -> int:
    """Key heads per batch element."""
    return self.heads // self.group

  @property
  def heads_per_key_head(self) -> int:
    """The kernel's heads that share a key head: 1 where these are packed."""
    return self.group // self.pack_gqa

  @property
  def name(self) -> str:
    """Suffix of a kernel's name: of its masks, such as "_causal", then "_paged", "_chosen" or nothing."""
    masks = "".join(x.name for x in self.masks)
    return masks if self.pages is None else masks + self.pages.name

  @property
  def moves(self) -> bool:
    """Whether a score_mod or an additive mask follows softcap."""
    return self.score_mod is not None or self._adds

  @property
  def has_score_mods(self) -> bool:
    """Whether scores are more than q.k times a factor."""
    return self.softcap is not None or self.moves

  @property
  def scales_weights(self) -> bool:
    """Whether the weights of values are more than exponentials; see `HeadRules.weights`."""
    return self.seed is not None or self.scales is not None

  @property
  def scaling(self) -> Scaling:
    """The factors on q.k and on the scores; see `Scaling`."""
    if not self.has_score_mods:
      return Scaling.of(self.scale)
    cap = 1.0 if self.softcap is None else self.softcap
    if self.moves or cap > LARGEST_CAP:
      return Scaling(self.scale / cap, 1.0 if self.moves else cap)
    return Scaling(self.scale / cap, cap, False)  # scores are at most 1

  @property
  def scaling_of_q(self) -> Scaling:
    """The factors of a kernel that multiplies q in float32: it has `Scaling.pre` for free, and always subtracts.

    Plain scores are in base 2 then, unless they could become infinite by that.
    """
    if self.has_score_mods:
      return self.scaling._replace(subtracts=True)
    return Scaling(self.scale * LOG2E, LN2) if 0 < self.scale <= LN2 else Scaling(self.scale, 1.0)

  def at(self, head: UOp) -> "HeadRules":
    """The rules for a head of the kernel, numbered through all batch elements."""
    heads = self.heads // self.pack_gqa
    return HeadRules(self, head // heads, head % heads * self.pack_gqa)


@dataclass(frozen=True, eq=False)
class HeadRules(HeadMasks):
  """The rules for query head `h` of batch `b`, or for the `pack_gqa` packed heads from `h` on.

  Attributes:
    rules: the rules of all heads.
    scales_near: load the scale of a key, and of its value, from on chip; of a key that does not exist it is 0. None
      reads scales from global memory.
  """

  rules: Rules
  scales_near: tuple[Callable[[UOp], UOp], Callable[[UOp], UOp]] | None = None

  @property
  def length(self) -> UOp:
    pages = self.rules.pages
    return pages.length(self.b, self._kv_head) if isinstance(pages, Chosen) else super().length

  @property
  def scaling(self) -> Scaling:
    """The factors on q.k and on the scores, with the scales of q and k in one of them; see `Scaling`."""
    r, scaling = self.rules, self.rules.scaling
    if (factor := self._of_head(r.q_scale, r.k_scale)) is None:
      return scaling
    if r.has_score_mods or r.scale <= 0:
      return scaling._replace(pre=factor * scaling.pre)
    # In the exponent it costs nothing per score, but must be greater than 0: -inf * 0 is NaN, and the max a minimum.
    return Scaling(1.0, (factor > -LEAST_SCALE).where(factor.maximum(LEAST_SCALE), nan) * r.scale, False)

  @property
  def o_scale(self) -> UOp | None:
    """The factor on the output, the scale of v; None is 1."""
    return self._of_head(self.rules.v_scale)

  def _of_head(self, *scales: UOp | None) -> UOp | None:
    """The product of this head's scales; None if there are none."""
    zero, present = UOp.const(0), [x for x in scales if x is not None]
    indices = [(self.b if sizes(x)[0] > 1 else zero, self._kv_head if sizes(x)[1] > 1 else zero) for x in present]
    factors = [x[i].load() for x, i in zip(present, indices, strict=True)]
    return reduce(UOp.__mul__, factors) if factors else None

  def keys(self, x: UOp, to: DType | None = None, kv_head: UOp | None = None) -> HeadView:
    """View this head's keys or values: x is (B * kv_heads, N, size), or (pages * kv_heads, rows per page, size).

    Elements that have fewer bits than `to` are widened to it, or, if they have scales, to `Scales.operand`. A kernel
    that numbers the key heads of all batches may give its number, `kv_head`.
    """
    r = self.rules
    operand = to if r.scales is None else r.scales.operand
    if r.pages is None:
      head = self.b * r.kv_heads + self._kv_head if kv_head is None else kv_head
      view = HeadView.of(x, head, self.length, operand)
    else:
      view = replace(HeadView.paged(x, r.pages, self.b, self._kv_head, self.length), to=operand)
    stored = None if r.scales is None else r.scales.stored
    return view.of_four(stored) if isinstance(stored, FourBits) and x.dtype == dtypes.uchar else view  # not scales

  def of_tile(self, s: Scope, first: UOp, block_n: int, within: tuple[UOp, ...]) -> "HeadRules":
    """The rules for a CPU's tile of `block_n` keys from `first` on, with its pages looked up inside the axes `within`.

    Keys from the length on then map to the row of the last key.
    """
    if (pages := self.rules.pages) is None:
      return self
    pages = pages.of_tile(s, self.b, self._kv_head, first, block_n, self.length, within)
    return replace(self, rules=replace(self.rules, pages=pages))

  def of_mask_tile(
    self, s: Scope, row: UOp, block_m: int, key: UOp, block_n: int, within: tuple[UOp, ...]
  ) -> "HeadRules":
    """The rules for a CPU's tile of `block_n` keys from `key` on and `block_m` rows from `row` on, one per lane.

    A mask that differs from row to row is copied to the stack, keys first: so the lanes load it as vectors, which clang
    does not do across rows.
    """
    mask = self.rules.attn_mask
    if mask is None or sizes(mask)[2] == 1:
      return self
    tile = s.buffer(block_n, block_m, dtype=mask.dtype)
    m, n = s.axis(block_m), s.axis(block_n)
    tile = tile.after(tile.after(*within)[n, m].store(self._mask(row + m, key + n)).end(m, n))
    return replace(self, rules=replace(self.rules, mask_tile=lambda i, j: tile[j - key, i - row].load()))

  @property
  def _kv_head(self) -> UOp:
    """The key head within its batch element."""
    return self.h // self.rules.group

  def sink(self, row: UOp) -> UOp | None:
    """The sink logit of a row; None without sinks."""
    return None if self.rules.sinks is None else self.rules.sinks[self.head_and_query(row)[0]].load()

  def finished(self, m_i: UOp, l_i: UOp, row: UOp, exp2: Callable[[UOp], UOp], unit: Factor = 1.0) -> Row:
    """A row after its last key, with the scale of v in its factor; see `normalize`.

    Args:
      m_i: its largest score.
      l_i: the sum of P over all keys.
    """
    finished_row = normalize(m_i * self.scaling.natural, l_i, self.sink(row), exp2, unit)
    return finished_row if self.o_scale is None else finished_row._replace(factor=finished_row.factor * self.o_scale)

  def scores(self, products: list[UOp], row: UOp, first: UOp, offsets: Sequence[int], masked: bool) -> list[UOp]:
    """The scores of a query, before the factor `Scaling.natural`; -inf where hidden.

    Args:
      products: q.k in float32.
      row: the query.
      first, offsets: the keys are first + offset.
      masked: whether any key may be hidden, as the tile is not full.
    """
    factor = self.scaling.pre
    scaled = [
      self.apply_score_mods(x if isinstance(factor, float) and factor == 1 else x * factor, row, first + i, masked)
      for x, i in zip(products, offsets, strict=True)
    ]
    if not masked:
      return scaled
    last, start = self.last_seen(row) - first, self.first_seen(row)
    result = []
    for x, offset in zip(scaled, offsets, strict=True):
      hidden = [last < offset, *self.hidden_by_masks(row, first + offset)]
      if start is not None:
        hidden.append(start - first > offset)
      result.append(reduce(UOp.__or__, hidden).where(-inf, x))
    return result

  def apply_score_mods(self, score: UOp, row: UOp, key: UOp, masked: bool = True) -> UOp:
    """Apply the key's scale, softcap, score_mod and the additive mask to `score`, which is q.k times `Scaling.pre`.

    The result is still to be multiplied by `Scaling.natural`. It is NaN for a key with an invalid page id, unless the
    key is hidden. `masked` says whether the key may not exist.
    """
    r = self.rules
    if r.scales is not None:
      score = score * self._scale(KEYS, key, masked)
    if r.softcap is not None:
      score = tanh(score, r.dialect.reciprocal)
      score = score * r.softcap if r.moves else score
    if r.score_mod is not None:
      score = self._mod(score, row, key)
    score = score + self._mask(row, key).cast(dtypes.float) if r._adds else score
    if r.pages is None or not r.pages.may_lack:
      return score
    right = r.pages.exists(self.b, key, self.length)
    return (right | score.eq(-inf) if r.moves else right).where(score, nan)

  def weights(self, p: list[UOp], row: UOp, first: UOp, offsets: Sequence[int], masked: bool) -> list[UOp]:
    """The weights of a query's values: exponentials after dropout, times the scales of the values.

    Args:
      p: exponentials in float32, already summed.
      row: the query.
      first, offsets: the keys are first + offset.
      masked: whether any key may not exist.
    """
    p = self.dropped(p, row, first, offsets)
    if self.rules.scales is None:
      return p
    return [x * self._scale(VALUES, first + i, masked) for x, i in zip(p, offsets, strict=True)]

  def dropped(self, p: list[UOp], row: UOp, first: UOp, offsets: Sequence[int]) -> list[UOp]:
    """P of a query for the keys first + offset, after dropout: 0, or scaled by 1 / (1 - dropout_p)."""
    r = self.rules
    if r.seed is None:
      return p
    seed = r.seed[0].load(), r.seed[1].load()
    b, h, query, first = self.numbers(row, first)
    score_row = ((b * (r.origin.heads or r.heads) + h) * (r.origin.M or r.M) + query).cast(dtypes.uint)
    keep = [kept(seed, score_row, (first + i).cast(dtypes.uint), r.dropout_p) for i in offsets]
    return [keeps.where(x * (1 / (1 - r.dropout_p)), 0.0) for keeps, x in zip(keep, p, strict=True)]

  def _scale(self, which: int, key: UOp, masked: bool) -> UOp:
    """The factor on a widened key or value. For a key that does not exist it is 0, and its scale is not read."""
    r = self.rules.scales
    assert r is not None
    if self.scales_near is not None:
      return self.scales_near[which](key) * r.unit
    inside = None if not masked or key.vmax < self.length.vmin else key < self.length
    # A tile's pages have a row for each of its keys, so that no gate is needed. It would do harm: tinygrad simplifies
    # an index by its gate, and if the key is a constant, so the loop that looked up the rows, for each key differently.
    in_tile = self.rules.pages is not None and self.rules.pages.tile is not None
    scale = self.scale_rows(which).element(key, UOp.const(0), None if in_tile else inside) * r.unit
    return scale if inside is None else inside.where(scale, 0.0)

  def scale_rows(self, which: int) -> HeadView:
    """The scales of this head's `KEYS` or `VALUES`, one per row."""
    assert self.rules.scales is not None
    scales = self.rules.scales[:2][which]
    return self.keys(scales.reshape(-1, sizes(scales)[-1], 1))

  def score_vjp(
    self,
    grads: list[UOp],
    products: list[UOp],
    row: UOp,
    first: UOp,
    offsets: Sequence[int],
    scaled: bool = True,
  ) -> list[UOp]:
    """Turn gradients of a query's final scores into gradients of its products q.k.

    Args:
      grads: gradients of the scores, in natural units, float32; 0 where a key is hidden.
      products: q.k in float32.
      row: the query.
      first, offsets: the keys are first + offset.
      scaled: whether to multiply by `Rules.scale`. If not, multiply the sums of the results by it.
    """
    pulled = [self._score_vjp(g, x, row, first + i) for g, x, i in zip(grads, products, offsets, strict=True)]
    return [x * self.rules.scale for x in pulled] if scaled else pulled

  def _score_vjp(self, grad: UOp, product: UOp, row: UOp, key: UOp) -> UOp:
    """`score_vjp` of one score, with respect to q.k times `Rules.scale`. An additive mask does not change it."""
    r = self.rules
    if not r.has_score_mods:
      return grad
    score, slope = self._capped(product)
    if r.score_mod is not None:
      # The slope of score_mod may be infinite at a hidden key, and 0 times that is NaN.
      grad = grad.eq(0).where(0.0, vjp(lambda x: self._mod(x, row, key), score, grad))
    return grad if slope is None else grad * slope

  def _capped(self, product: UOp) -> tuple[UOp, UOp | None]:
    """The score before score_mod, from q.k, and its derivative with respect to q.k times `Rules.scale`; None is 1."""
    score = product * self.rules.scaling.pre
    if self.rules.softcap is None:
      return score, None
    bounded = tanh(score, self.rules.dialect.reciprocal)
    return bounded * self.rules.softcap, 1.0 - bounded * bounded

  def bias_vjp(self, grad: UOp, product: UOp, row: UOp, key: UOp) -> UOp:
    """Turn the gradient of a final score into that of the number that `Rules.bias_slope` is about, or of the mask.

    Args:
      grad, product: as for `score_vjp`.
    """
    if (slope := self.rules.bias_slope) is None:
      return grad
    score, _ = self._capped(product)
    # As in `_score_vjp`.
    return grad.eq(0).where(0.0, slope(score, *self._indices(row, key), grad))

  def _mod(self, score: UOp, row: UOp, key: UOp) -> UOp:
    assert self.rules.score_mod is not None
    return self.rules.score_mod(score, *self._indices(row, key))


def query_ranges(
  at: Callable[[UOp], HeadRules], members: int, key: UOp, block_n: int, block_m: int
) -> Callable[[UOp], TileRange]:
  """`query_range` for each of `members` query heads that share keys, with equally many tiles; `at` gives their rules.

  If the number of tiles depended on the head, tinygrad would end the loop over heads together with the loop over tiles.
  So with tile lists every head has as many tiles as the longest list. No query exists in a surplus tile.
  """
  rules = at(UOp.const(0)).rules

  def query_range(member: UOp) -> TileRange:
    return at(member).query_range(key, block_n, block_m)

  if rules.tile_lists is None or members == 1 or sizes(rules.tile_lists[0])[1] == 1:
    return query_range
  count, beyond = (
    reduce(UOp.maximum, (query_range(UOp.const(i)).n_tiles for i in range(members))),
    ceildiv(rules.M, block_m),
  )

  def padded(member: UOp) -> TileRange:
    mine = query_range(member)
    return TileRange(UOp.const(0), count, lambda position: (position < mine.n_tiles).where(mine.tile(position), beyond))

  return padded


def vjp(function: Callable[[UOp], UOp], x: UOp, grad: UOp) -> UOp:
  """grad times the derivative of `function` at a float32 x, by tinygrad's own rules.

  Values computed from x through ints or bools, such as a table lookup, count as constants. The derivative is taken with
  respect to a symbol, because tinygrad's rules would otherwise walk through everything that x is computed from.
  """
  at, seed = (UOp.variable(name, -inf, inf, dtypes.float, param=True) for name in ("x", "grad"))
  result = function(at)
  constant = [u for u in result.toposort() if u.op is Ops.LOAD or (u.op is Ops.CAST and not _among_floats(u))]
  result = result.substitute({u: u.detach() for u in constant}, walk=True)
  gradient = compute_gradient(result, seed, {at}).get(at)
  if gradient is None:
    return UOp.const(0.0, dtypes.float)
  gradient = gradient.substitute({u: u.src[0] for u in gradient.toposort() if u.op is Ops.DETACH}, walk=True)
  return gradient.substitute({at: x, seed: grad}, walk=True)


def _among_floats(cast: UOp) -> bool:
  return dtypes.is_float(cast.dtype) and dtypes.is_float(cast.src[0].dtype)
