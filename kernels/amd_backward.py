"""Backward attention on AMD's matrix cores: dQ by a pass over tiles of keys, dK and dV by one over tiles of queries.

FlashAttention-2 (Dao, 2023), transposed, without atomics. In both passes each wave has some tiles of 16 rows, its own,
one of them a lane, and runs through the tiles of the others, which all waves share in LDS. With S the scores, dO the
gradient of the output, L the logarithm of the sum of exponentials and delta = rowsum(O dO) - dL, which is given:
    own queries, dQ     S^T = K Q^T    dP^T = V dO^T - delta    P = exp(S - L)    dS = P dP    dQ^T += K^T dS^T
    own keys, dK, dV    S = Q K^T      dP = dO V^T - delta      P, dS likewise    dV^T += dO^T P    dK^T += Q^T dS
Delta is where the sums of dP begin. P and dS are the last products' operands where they are, in registers, as in
`amd_forward`; the factor on Q K^T joins at the end.

Who holds what. In registers: the operands of the own rows, the sums of their gradients; of own queries L and delta. In
LDS, in rows padded so that no bank is asked twice: the tile of the others as it is, and transposed; of queries L and
delta. While all work on a tile, the next one is on its way: `uopattn.dsl.staging`.

A query's L and delta are its lane's alone in the pass for dQ; in that for dK and dV each lane reads those of its rows.
A workgroup there adds up all query heads of its key head's group: two runs give the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import LOG2E, Scope, clamp, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.fragments import CHUNK, HIP, ROWS, Fragments
from uopattn.dsl.keys import spans
from uopattn.dsl.products import Operand, accumulate, as_operands, load_operands, multiply_rows, own_rows, store_acc
from uopattn.dsl.rules import HeadRules, Rules, Visit
from uopattn.dsl.staging import Rows, Stage
from uopattn.dsl.words import words_of
from uopattn.dsl.workgroup import Workgroup

LDS_LIMIT = 64 << 10  # bytes a workgroup


@dataclass(frozen=True)
class Tiles:
  """The block sizes of both passes.

  Attributes:
    arch: the target, which decides the matrix instruction.
    waves: waves in a workgroup.
    m_tiles: for dQ, tiles of 16 queries a wave.
    block_n: for dQ, keys a tile.
    n_tiles: for dK and dV, tiles of 16 keys a wave.
    block_m: for dK and dV, queries a tile.
  """

  arch: str
  waves: int
  m_tiles: int
  block_n: int
  n_tiles: int
  block_m: int

  def __post_init__(self) -> None:
    f = self.fragments
    least = self.least(f)
    for name, block in (("block_n", self.block_n), ("block_m", self.block_m)):
      if block < 1 or block % least:
        raise ValueError(f"Tiles.{name}={block}: must be a multiple of {least} on {self.arch}")
    for name, count in (("m_tiles", self.m_tiles), ("n_tiles", self.n_tiles)):
      if count < 1:
        raise ValueError(f"Tiles.{name}={count}: must be at least 1")
    if not 1 <= self.waves <= 1024 // f.lanes:
      raise ValueError(f"Tiles.waves={self.waves}: must be in 1..{1024 // f.lanes} on {self.arch}")

  @staticmethod
  def least(f: Fragments) -> int:
    """The smallest block: whole steps of the last products, and whole pieces of what is transposed."""
    return max(f.step, 2 * CHUNK * f.pad)

  @property
  def fragments(self) -> Fragments:
    return Fragments.of(self.arch)

  @property
  def queries(self) -> int:
    """Of a workgroup, for dQ."""
    return self.waves * self.m_tiles * ROWS

  @property
  def keys(self) -> int:
    """Of a workgroup, for dK and dV."""
    return self.waves * self.n_tiles * ROWS

  def lds_bytes(self, Dk: int, Dv: int) -> tuple[int, int]:
    """Bytes of LDS of either pass: for dQ, and for dK and dV."""
    f = self.fragments
    pad = f.pad * CHUNK
    straight = sum(round_up(x, f.step) + pad for x in (Dk, Dv))
    dq = self.block_n * straight + round_up(Dk, ROWS) * (self.block_n + pad)
    dkv = self.block_m * straight + (round_up(Dk, ROWS) + round_up(Dv, ROWS)) * (self.block_m + pad)
    if f.repeated:  # lanes swap dS, and P
      dq, dkv = dq + self.queries * (self.block_n + pad), dkv + 2 * self.keys * (self.block_m + pad)
    return 2 * dq, 2 * dkv + 8 * round_up(self.block_m, self.waves * f.lanes)

  @classmethod
  def choose(cls, arch: str, M: int, N: int, Dk: int, Dv: int) -> "Tiles":
    """Tiles for a target.

    Raises:
      ValueError: the target is unknown, or the head size too large for LDS even with the smallest tile.
    """
    least = cls.least(Fragments.of(arch))
    return cls(arch, 4, 1, least, 1, least)


class Pairs(NamedTuple):
  """Pairs of a query and keys that a lane has the scores of, in the order of its elements.

  Attributes:
    row: the query.
    first, offsets: the keys are first + offset.
    shift: what the query's scores begin with: -L, by the factor in the exponent.
    start: what its dP begin with: -delta.
  """

  row: UOp
  first: UOp
  offsets: Sequence[int]
  shift: UOp
  start: UOp


@dataclass(frozen=True)
class Walk:
  """A wave's way through the tiles of the others.

  Attributes:
    s: the kernel's axes.
    f: what a lane holds.
    dtype: of all matrices.
    lane: this lane.
    stage: brings the tiles.
    swaps: room for what is summed up, where lanes swap it.
    own: this lane's own rows: of Q and dO, or of K and V.
    places: where they are in the block.
    accs: the sums: dQ, or dV and dK.
    here: the rules.
    visit: the tiles.
    pairs: (start of a tile, what is to precede) -> the pairs of each own row.
    fetch: (position, what is to precede) -> loads the tile that follows; None if none ever does.
  """

  s: Scope
  f: Fragments
  dtype: DType
  lane: UOp
  stage: Stage
  swaps: list[Rows | None]
  own: list[list[list[Operand]]]
  places: list[UOp]
  accs: list[UOp]
  here: HeadRules
  visit: Visit
  pairs: Callable[..., list[list[Pairs]]]
  fetch: Callable[..., UOp] | None

  def attend(self, first: UOp, trips: UOp, masked: bool, *ready: UOp) -> UOp:
    """The tiles from position `first` on, which is in LDS when `ready`; each is followed there by the next."""
    f, stage, lane = self.f, self.stage, self.lane
    trip = self.s.axis(trips, AxisType.REDUCE)
    position = first + trip
    now = (*ready, trip) if self.fetch is None else (*ready, trip, self.fetch(position, *ready, trip))
    pairs = self.pairs(self.visit.tile(position) * stage.block, *now)
    products, dots = self.products(pairs, now)
    weights, grads = self.weigh(products, dots, pairs, masked)
    stores: list[UOp] = []
    for acc, values, swap, lds in zip(
      self.accs, (weights, grads)[-len(self.accs) :], self.swaps, stage.transposed, strict=True
    ):
      operands = as_operands(f, self.dtype, values, swap and swap.after(*ready, trip), self.places, lane)
      old = acc.after(*ready, trip)
      begun = [
        [UOp.stack(*[old[i, d, e].load() for e in range(f.result)]) for d in range(sizes(acc)[1])]
        for i in range(len(operands))
      ]
      stores += accumulate(f, self.dtype, operands, lds.after(*now), acc, begun, lane)
    if self.fetch is None:
      return UOp.group(*stores).end(trip)
    read = UOp.barrier(UOp.group(*stores))  # no wave overwrites a tile before all have read it
    return UOp.barrier(stage.store(read)).end(trip)

  def products(self, pairs: list[list[Pairs]], now: tuple[UOp, ...]) -> list[list[list[UOp]]]:
    """S, before all rules, and dP of each own row, with what they begin with, if that may come first."""
    f, rules, result = self.f, self.here.rules, []
    shifts = [[x.shift for x in row for _ in x.offsets] for row in pairs] if shifts_early(rules) else None
    starts = [[x.start for x in row for _ in x.offsets] for row in pairs] if rules.seed is None else None
    for own, lds, begun in zip(self.own, self.stage.as_is, (shifts, starts), strict=True):
      c = begun and [[UOp.stack(*row[i : i + f.result]) for i in range(0, len(row), f.result)] for row in begun]
      tiles = multiply_rows(f, self.dtype, lds.after(*now), self.stage.block, own, self.lane, c)
      result.append([[tile[e] for tile in row for e in range(f.result)] for row in tiles])
    return result

  def weigh(
    self, products: list[list[UOp]], dots: list[list[UOp]], pairs: list[list[Pairs]], masked: bool
  ) -> tuple[list[list[UOp]], list[list[UOp]]]:
    """P, after dropout, and dS of each own row."""
    weights: list[list[UOp]] = [[] for _ in pairs]
    grads: list[list[UOp]] = [[] for _ in pairs]
    for i, row in enumerate(pairs):
      done = 0
      for x in row:
        piece = slice(done, done := done + len(x.offsets))
        p, ds = self.weigh_row(products[i][piece], dots[i][piece], x, masked)
        weights[i] += p
        grads[i] += ds
    return weights, grads

  def weigh_row(self, products: list[UOp], dots: list[UOp], x: Pairs, masked: bool) -> tuple[list[UOp], list[UOp]]:
    """P, after dropout, and dS of a query's pairs: of Q K^T, but for the factor if that is all that there is."""
    here, rules, keys = self.here, self.here.rules, (x.row, x.first, x.offsets)
    scores = here.scores(products, *keys, masked)
    if masked and x.row.vmax >= rules.M:
      scores = [(x.row < rules.M).where(score, -inf) for score in scores]
    factor = rules.factors[1]
    p = [ins.exp2(HIP, score * factor if shifts_early(rules) else (score + x.shift) * factor) for score in scores]
    if rules.seed is not None:
      dots = [dot + x.start for dot in here.dropped(dots, *keys)]
    grads = [weight * dot for weight, dot in zip(p, dots, strict=True)]
    return here.dropped(p, *keys), here.pulled_back(grads, products, *keys) if rules.modifies else grads


def backward_q(dq: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Builds the kernel for dQ.

  Args:
    dq: (heads, M, Dk), the gradient of q, in q's dtype.
    q: (heads, M, Dk), float16 or bfloat16.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    do: (heads, M, Dv), the gradient of the output.
    lse: (heads, M) float32, the natural logarithm of the sum of exponentials of each row.
    delta: (heads, M) float32, of each row the sum of output times `do`, less the gradient of the LSE.
    rules: what stands between q.k and the softmax.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv), f, count = sizes(q), sizes(v), tiles.fragments, tiles.m_tiles
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.queries), tiles.waves, f.lanes)
  lane, head, start, here = group.lane, group.head, group.block * tiles.queries, rules.at(group.head)
  kv_head, exists = head // (heads // kv_heads), here.length.ne(0)
  places = [(group.warp * count + i) * ROWS + lane % ROWS for i in range(count)]
  queries = [clamp(start + place, 0, M - 1) for place in places]  # past the end: again
  visit = here.visit(start, tiles.queries, tiles.block_n)

  straight = [(words_of(x, kv_head, exists), round_up(sizes(x)[2], f.step)) for x in (k, v)]
  turned = [(words_of(k, kv_head, exists), round_up(Dk, ROWS))]
  stage = Stage(s, f, tiles.block_n, tiles.waves * f.lanes, group.thread, here.length, straight, turned)
  swap = Rows.make(s, tiles.queries, tiles.block_n, f.pad) if f.repeated else None
  own = [[load_operands(f, x, head, query, lane) for query in queries] for x in (q, do)]
  acc = s.filled(0.0, count, ceildiv(Dk, ROWS), f.result, after=(group.item,))
  rows = [(shift(lse[head, query].load(), rules), -delta[head, query].load()) for query in queries]
  first, offsets = own_rows(f, tiles.block_n, lane)

  def pairs(tile: UOp, *_: UOp) -> list[list[Pairs]]:
    return [[Pairs(query, first + tile, offsets, *row)] for query, row in zip(queries, rows, strict=True)]

  def fetch(position: UOp, *after: UOp) -> UOp:
    return stage.load(visit.tile(position + 1) * tiles.block_n, *after)

  walk = Walk(
    s, f, q.dtype, lane, stage, [swap], own, places, [acc], here, visit, pairs, fetch if visit.count.vmax > 1 else None
  )
  done = UOp.barrier(stage.store(stage.load(visit.tile(UOp.const(0)) * tiles.block_n, acc)))
  for begun, trips, masked in spans(UOp.const(0), visit.whole, visit.count):
    done = walk.attend(begun, trips, masked, done)
  acc, stores = acc.after(done), []
  for i, place in enumerate(places):
    stores += store_acc(f, dq, head, start + place, acc[i], lambda x: x * late_factor(rules), lane)
  return group.kernel(f"attention_backward_q_{tiles.arch}_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


def backward_kv(
  dk: UOp, dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Builds the kernel for dK and dV.

  Args:
    dk: (kv_heads, N, Dk), the gradient of k, in q's dtype, summed over the query heads of each key head.
    dv: (kv_heads, N, Dv), that of v, likewise.
    q, k, v, do, lse, delta, rules, tiles: as `backward_q` has them.
  """
  (heads, M, Dk), (kv_heads, N, Dv), f, count = sizes(q), sizes(v), tiles.fragments, tiles.n_tiles
  s, members = Scope(), heads // kv_heads
  group = Workgroup(s, kv_heads, ceildiv(N, tiles.keys), tiles.waves, f.lanes)
  member = s.axis(members, AxisType.REDUCE)  # of the query heads that read this key head
  lane, kv_head, start, of_batch = group.lane, group.head, group.block * tiles.keys, rules.heads // members
  here = HeadRules(rules, kv_head // of_batch, kv_head % of_batch * members + member)
  places = [(group.warp * count + i) * ROWS + lane % ROWS for i in range(count)]
  keys = [clamp(start + place, 0, N - 1) for place in places]
  there = [clamp(key, 0, (here.length - 1).maximum(0)) for key in keys]
  visit = here.visit_queries(start, tiles.keys, tiles.block_m)

  def row_of(x: UOp) -> Callable[[UOp], UOp]:
    return lambda row: x.reshape(heads * M)[row].load()

  flat = [x.reshape(1, heads * M, sizes(x)[2]) for x in (q, do)]
  straight, turned = (
    [(words_of(x, UOp.const(0)), round_up(sizes(x)[2], to)) for x in order]
    for order, to in ((flat, f.step), (flat[::-1], ROWS))
  )
  numbers = [lambda row: shift(row_of(lse)(row), rules), lambda row: -row_of(delta)(row)]
  stage = Stage(s, f, tiles.block_m, tiles.waves * f.lanes, group.thread, UOp.const(M), straight, turned, numbers)
  swaps = [Rows.make(s, tiles.keys, tiles.block_m, f.pad) if f.repeated else None for _ in range(2)]
  own = [[load_operands(f, x, kv_head, key, lane, here.length.ne(0)) for key in there] for x in (k, v)]
  accs = [s.filled(0.0, count, ceildiv(size, ROWS), f.result, after=(group.item,)) for size in (Dv, Dk)]
  first, offsets = own_rows(f, tiles.block_m, lane)

  def pairs(tile: UOp, *after: UOp) -> list[list[Pairs]]:
    lse_i, delta_i = ([x.after(*after)[first + i].load() for i in offsets] for x in stage.numbers)
    return [
      [Pairs(tile + first + i, key, [0], *x) for i, *x in zip(offsets, lse_i, delta_i, strict=True)] for key in keys
    ]

  def fetch(position: UOp, *after: UOp) -> UOp:
    more = position + 1 < visit.count
    following = clamp(member + more.where(0, 1), 0, members - 1)
    tile = visit.tile(more.where(position + 1, 0))
    return stage.load(tile * tiles.block_m, *after, base=(kv_head * members + following) * M)

  several = members > 1 or visit.count.vmax > 1
  walk = Walk(s, f, q.dtype, lane, stage, swaps, own, places, accs, here, visit, pairs, fetch if several else None)
  done = UOp.barrier(
    stage.store(stage.load(visit.tile(UOp.const(0)) * tiles.block_m, *accs, base=kv_head * members * M))
  )
  for begun, trips, masked in spans(UOp.const(0), visit.whole, visit.count):
    done = walk.attend(begun, trips, masked, done, member)
  done, stores = done.end(member), []
  for o, acc, factor in ((dv, accs[0], 1.0), (dk, accs[1], late_factor(rules))):
    for i, (place, key) in enumerate(zip(places, keys, strict=True)):
      exists = None if rules.kv_lengths is None else key < here.length
      stores += store_acc(f, o, kv_head, start + place, acc.after(done)[i], finished(factor, exists), lane)
  return group.kernel(f"attention_backward_kv_{tiles.arch}_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


def late_factor(rules: Rules) -> float:
  """The factor on Q K^T where dS has not had it before."""
  return 1.0 if rules.modifies else rules.scale


def finished(factor: float, exists: UOp | None) -> Callable[[UOp], UOp]:
  """What turns sums into gradients: those of a key that does not exist are 0."""
  return lambda x: x * factor if exists is None else exists.where(x * factor, 0.0)


def shifts_early(rules: Rules) -> bool:
  """Whether scores are products times one factor, so that the sums of the products can begin with -L by that factor."""
  return not rules.modifies and rules.factors[0] == 1 and rules.factors[1] > 2**-60


def shift(lse: UOp, rules: Rules) -> UOp:
  """-L by the factor in the exponent; 0 if L is -inf, as all scores of the row are then."""
  return lse.eq(-inf).where(0.0, lse * (-LOG2E / rules.factors[1]))
