"""Forward attention whose V is the first columns of K, on Hopper's tensor cores (sm_90a): warpgroups alternate.

This is multi-head latent attention with absorbed weights (MLA; DeepSeek-V2, 2024). With few queries all query heads of
a key head are rows of the same blocks, and the keys are split (`combine`).

As in `hopper_wide_forward`, two warpgroups have the same 64 rows and half of O's columns each. But they alternate, in
FlashMLA's "seesaw" order (DeepSeek, 2025): of each pair of tiles of 64 keys, the first computes
    S = Q K[n]^T            for its tile, over all of Dk
    m, P                    against the maxima that the other one has left
    O = O alpha + P V[n]    for both tiles, the first tile first, and its half of the columns
and gives m and P to the other through shared memory (`Seesaw`). So while one computes its softmax, the other
multiplies, and products are 64 x 64, which take no longer to read shared memory than to multiply. Each l covers only a
warpgroup's own tiles until the end.

Storage: S, m, l, P and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Q, a pair of
tiles, one P and the maxima are in shared memory (`Tiles.shared_bytes`), which has no room for another tile. So each
half of a tile's columns is replaced as soon as the warpgroup with these columns of O is done with it; the other one has
read it before, for S. A producer warpgroup loads Q and the halves by TMA (`uopattn.dsl.nvidia.tensor_pipeline`), as if
they were K and V. S begins with the first half. Nothing spills.

Speed on an H200, float16, Dk=576, Dv=512, N=8192, B=16: 81 us with 128 query heads (448 TFLOP/s), 55.5 us with 64.
scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma, wgmma_mainloop
from uopattn.dsl.nvidia.exchange import WARPGROUPS, WarpgroupExchange
from uopattn.dsl.nvidia.mma_layout import HALVES, WORDS, loaded
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import TensorPipeline, WorkTile, loop
from uopattn.dsl.nvidia.tma import fits
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.nvidia.wgmma_softmax import ScoreRows, packed_words, row_maxima
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16, Kernel, Schedule, group_of_few, splits_on_gpu
from uopattn.kernels.hopper_wide_forward import SharedRows, preferred, split_of_keys

KEYS = 64  # of a warpgroup's tile
STEPS = KEYS // wgmma.K  # of a product with P


@dataclass(frozen=True)
class Columns(SwizzledTiles):
  """Whole panels of wider tiles.

  Attributes:
    first: the first element of the first panel in a tile.
    whole: elements per tile.
  """

  first: int = 0
  whole: int = 0

  def tile(self, n_tile: UOp, *after: UOp) -> "Columns":
    return replace(self, memory=self.memory.after(*after), base=n_tile % self.slots * self.whole + self.first)


@dataclass(frozen=True)
class Tiles(SharedRows):
  """The block sizes, of which there is one choice."""

  values_in_keys: ClassVar[bool] = True  # V is the first columns of K, and read from K's tiles

  @property
  def block_n(self) -> int:
    """Keys per pair of tiles."""
    return WARPGROUPS * KEYS

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[SwizzledTiles, ...]:
    """Allocate Q and a pair of tiles in shared memory, which are given as their first columns and the others."""
    Dk, half = round_up(Dk, wgmma.K), self.columns(Dv)
    q = SwizzledTiles.make(s, self.block_m, Dk, 1, 1, least=wgmma.PANEL)
    k = SwizzledTiles.make(s, KEYS, max(Dk, WARPGROUPS * half), WARPGROUPS, 1, least=wgmma.PANEL)
    first, second = (
      Columns(k.memory, KEYS, x, k.slots, 1, least=wgmma.PANEL, first=at, whole=k.size)
      for x, at in ((half, 0), (k.columns - half, half // wgmma.PANEL * k.panel))
    )
    return q, first, second

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return sum(x.bytes for x in self.panels(Scope(), Dk, Dv)) + 4 * sum(WarpgroupExchange.words(STEPS))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16 or bfloat16.
    k: keys, as `rules` finds them.
    v: not read.
    lse: (heads, M), or (heads * splits, M), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: tensor maps cannot describe the rows of q or k.
  """
  (_, M, Dk), (results, _, Dv) = sizes(q), sizes(o)
  s = Scope()
  half = tiles.columns(Dv)
  group, head_rules, key_range, rows = split_of_keys(s, o, q, rules, tiles, tiles.block_n)
  queries, keys = HeadView.of(q, group.head, UOp.const(M)), head_rules.keys(k)
  strides = keys.strides
  if strides is None or not all(fits(x, of_one_head=True) for x in (queries, keys)):
    raise ValueError("q and k must have rows that tensor maps can describe: regular, from multiples of 16 bytes on")
  others = replace(keys, size=Dk - half, strides=strides._replace(offset=strides.offset + half))
  work_tile = WorkTile(group.block, (queries, replace(keys, size=half), others), singles(key_range))

  exchange = Seesaw.of(s, group)
  pipeline = TensorPipeline(s, group, lambda trip: work_tile, tiles.panels(s, Dk, Dv), WARPGROUPS, users=WARPS)
  trip = pipeline.trip(exchange.begin(pipeline.start(*exchange.init())))
  scores, maxima = s.buffer(KEYS // 2), s.buffer(HALVES)
  main = Mainloop(
    s, group, q.dtype, trip, scores, rows, head_rules, key_range, tiles.block_n, maxima=maxima, exchange=exchange
  )
  state = State.make(s, half, trip.entry)

  state = state.after(trip.q.wait(UOp.const(0), trip.entry))
  for first, count, masked in full_then_masked(UOp.const(0), key_range.n_full, key_range.n_tiles):
    state = main.attend(first, count, masked, state)

  sums, first = exchange.sums(state.l_i, exchange.sync(*state)), exchange.warpgroup * half
  own = {"first": first, "pairs": True, "stores_lse": first.eq(0)}
  stores = main.epilogue(o, lse, group.result, state.acc, state.m_i, sums, **own)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


def singles(pairs: TileRange) -> TileRange:
  """The tiles of pairs of tiles, one after another."""

  def tile(position: UOp) -> UOp:
    return WARPGROUPS * pairs.tile(position // WARPGROUPS) + position % WARPGROUPS

  return TileRange(WARPGROUPS * pairs.n_full, WARPGROUPS * pairs.n_tiles, tile)


class State(NamedTuple):
  """What a lane carries from pair to pair.

  Attributes:
    acc: O of two rows, relative to m_i.
    p: P of a tile, in words of two.
    kept: P of the other tile.
    m_i: row max of each row.
    l_i: running sum of each row, over this lane's keys.
  """

  acc: UOp
  p: UOp
  kept: UOp
  m_i: UOp
  l_i: UOp

  @classmethod
  def make(cls, s: Scope, width: int, *after: UOp) -> "State":
    """The state before the first pair; O has `width` columns."""
    acc = s.filled(0.0, width // 2, after=after)
    m_i, l_i = (s.filled(x, HALVES, after=after) for x in (LOWEST, 0.0))
    p, kept = (s.buffer(STEPS * WORDS, dtype=dtypes.uint) for _ in range(2))
    return cls(acc, p, kept, m_i, l_i)

  def after(self, *after: UOp) -> "State":
    return State(*(x.after(*after) for x in self))


@dataclass(frozen=True)
class Seesaw(WarpgroupExchange):
  """The exchange of warpgroups that alternate: one reads what the other has written, then writes to the same words.

  So one P suffices; it has the words given last. The index of a warpgroup is that of its tile in a pair.

  Attributes:
    handoff: a barrier per warpgroup: it has given what it has of a pair.
  """

  handoff: UOp

  @classmethod
  def of(cls, s: Scope, group: Workgroup) -> "Seesaw":
    """Allocate the memory."""
    return cls.make(s, group, STEPS, handoff=s.buffer(WARPGROUPS, dtype=dtypes.ulong, space=AddrSpace.LOCAL))

  def init(self) -> list[UOp]:
    """Initialize the barriers."""
    return [CUDA.mbarrier_init(self.handoff[i], THREADS, self.group.thread.eq(0)) for i in range(WARPGROUPS)]

  def begin(self, *after: UOp) -> UOp:
    """Write what the first warpgroup reads before its first tile: the lowest maxima, and any P."""
    first, per = UOp.const(LOWEST, dtypes.float), STEPS // WARPGROUPS
    stored = self.store_words([UOp.const(0, dtypes.uint)] * (per * WORDS), self.warpgroup * per, *after)
    return self.sync(self.store_row([first] * HALVES, *after), *stored)

  def give(self, rows: list[UOp], words: list[UOp], *after: UOp) -> UOp:
    """Give the other warpgroup a number for each of this lane's two rows, and words of P, after `after`."""
    arrived = self.store_row(rows, *after), *self.store_words(words, 0, *after)
    return CUDA.mbarrier_arrive(self.handoff[self.warpgroup], UOp.const(True), *arrived)

  def wait(self, warpgroup: int, n: UOp, *after: UOp) -> UOp:
    """Wait until a warpgroup has given what it has of pair n; there is no pair -1."""
    return CUDA.mbarrier_wait(self.handoff[warpgroup], n % 2, *after)


@dataclass(frozen=True, kw_only=True)
class Mainloop(wgmma_mainloop.Mainloop):
  """A warpgroup's loop over pairs of tiles, which are numbered by their position in `key_range`.

  Attributes:
    maxima: registers for the maxima of its rows.
    exchange: shared memory of the two warpgroups.

  Of the operands in shared memory `k` has the first columns of K's tiles, `v` the others.
  """

  maxima: UOp
  exchange: Seesaw

  @property
  def warpgroup(self) -> UOp:
    """Index of this warpgroup."""
    return self.exchange.warpgroup

  @property
  def is_second(self) -> UOp:
    """Whether this warpgroup has the second tile of a pair."""
    return self.warpgroup > 0

  def attend(self, first: UOp, trips: UOp, masked: bool, state: State) -> State:
    """Process the pairs from `first` on."""
    trip, entry = loop(self.s, trips)
    n, old, exchange = first + trip, state.after(*entry), self.exchange
    waited = self.start_qk(WARPGROUPS * n + self.warpgroup, *entry, *state)
    exchanged, words, before, own = self.softmax_of_pair(n, masked, old, waited)

    # the first tile, whose P the second warpgroup has been given; each keeps its own
    factors = [self.is_second.where(a, a * b) for a, b in zip(before, own, strict=True)]
    changed = self.rescale(old.acc.after(exchanged), factors)
    read = [old.kept.after(exchanged)[i].load() for i in range(len(words))]
    changed += [
      old.p.after(exchanged)[i].store(self.is_second.where(*x)) for i, x in enumerate(zip(read, words, strict=True))
    ]
    changed += [old.kept.after(*changed)[i].store(word) for i, word in enumerate(words)]
    done = self.tile_done(WARPGROUPS * n, self.add(WARPGROUPS * n, old, *changed))

    # the second tile, which the first warpgroup has been given
    met = exchange.wait(1, n, done)
    last, now = exchange.rows(1, met), old.after(done, met)
    factors = [self.alpha(now.m_i[half].load(), m) for half, m in enumerate(last)]
    changed = [
      now.p[i].store(self.is_second.where(now.kept[i].load(), word))
      for i, word in enumerate(exchange.load_words(STEPS, met, where=self.warpgroup.eq(0)))
    ]
    stored = [now.l_i[half].store(now.l_i[half].load() * factors[half]) for half in range(HALVES)]
    changed += [now.m_i.after(*stored)[half].store(m) for half, m in enumerate(last)]
    of_both = [x * self.is_second.where(y, 1.0) for x, y in zip(factors, own, strict=True)]
    changed += self.rescale(now.acc, of_both)
    done = self.tile_done(WARPGROUPS * n + 1, self.add(WARPGROUPS * n + 1, now, *changed))
    return state.after(done.end(trip))

  def start_qk(self, n_tile: UOp, *after: UOp) -> UOp:
    """S = Q K^T, (64, 64), for a tile: with its first columns, then with the others."""
    k, v, q = self.pipe.k, self.pipe.v, self.pipe.q.tile(UOp.const(0), *after)
    first, second = k.tile(n_tile, *after), v.tile(n_tile, *after)
    steps, to, panels = first.columns // wgmma.K, self.scores[0], (q.panel, first.panel)
    others, address = q.columns // wgmma.K - steps, q.memory[q.base + first.columns // wgmma.PANEL * q.panel]
    started = wgmma.start(self.dtype, KEYS, steps, to, q.address(), first.address(), panels, k.wait(n_tile, *after))
    arrived, form = v.wait(n_tile, started), wgmma.Form.ADDED
    started = wgmma.start(self.dtype, KEYS, others, to, address, second.address(), panels, arrived, form=form)
    return wgmma.wait(0, KEYS, to, started)

  def add(self, n_tile: UOp, state: State, *after: UOp) -> UOp:
    """O += P V, (64, Dv / 2), for this warpgroup's columns of a tile; who gave P has waited for them."""
    tile, to = self.pipe.k.tile(n_tile, *after), state.acc[0]
    columns, panels = tile.columns, (0, tile.panel)
    v = tile.memory[tile.base + self.warpgroup * (columns // wgmma.PANEL * tile.panel)]
    form = wgmma.Form.REGISTERS
    started = wgmma.start(self.dtype, columns, STEPS, to, state.p[0], v, panels, *after, form=form)
    return wgmma.wait(0, columns, to, started)

  def tile_done(self, n_tile: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with its half of a tile's columns."""
    done = self.pipe.k.release(n_tile, *after, when=self.warpgroup.eq(0))
    return self.pipe.v.release(n_tile, done, when=self.is_second)

  def alpha(self, old: UOp, new: UOp) -> UOp:
    """The factor on what was summed relative to the maximum `old`."""
    return self.rules.scaling.alpha(CUDA.exp2, old, new)

  def rescale(self, acc: UOp, factors: list[UOp]) -> list[UOp]:
    return [acc[i].store(acc[i].load() * factors[i % 4 // 2]) for i in range(sizes(acc)[0])]

  def softmax_of_pair(
    self, n: UOp, masked: bool, state: State, waited: UOp
  ) -> tuple[UOp, list[UOp], list[UOp], list[UOp]]:
    """The softmax of this warpgroup's tile of pair n, once it has been `waited` for.

    Returns:
      What comes after m and P are given, m and l stored, and the other warpgroup's P kept; the words of P; and for each
      row two factors: from the maxima before the pair to those that the other warpgroup gave last, and from these to
      the new ones.
    """
    first_key = (self.key_range.tile(n) * WARPGROUPS + self.warpgroup) * KEYS + self.lane_key
    rows = ScoreRows(self.rules, self.rows, first_key, masked)
    seen = rows.scores(self.scores.after(waited))
    # in registers, so that this is done before the wait
    maxima = [self.maxima.after(waited)[i].store(x) for i, x in enumerate(row_maxima(seen))]
    # the second waits for the first one's tile, and the first one knows that the second has given the one before
    met = self.exchange.wait(0, n + 1 + self.warpgroup, *maxima)
    m_other = self.exchange.rows(1 - self.warpgroup, met)
    kept = [state.kept.after(met)[i].store(word) for i, word in enumerate(self.exchange.load_words(STEPS, met))]
    before = [self.alpha(state.m_i[half].load(), m_other[half]) for half in range(HALVES)]
    l_old = [state.l_i[half].load() * before[half] for half in range(HALVES)]
    softmax = rows.softmax(seen, m_other, l_old, loaded(self.maxima.after(met)))
    words = packed_words(softmax.p, self.dtype)
    arrival = self.exchange.give(softmax.m_i, words, met, *kept)
    stored = [state.l_i.after(arrival)[half].store(softmax.l_i[half]) for half in range(HALVES)]
    # m after l, which is made of it
    stored = [state.m_i.after(*stored)[half].store(softmax.m_i[half]) for half in range(HALVES)]
    return UOp.group(arrival, *stored), words, before, softmax.alpha


SCHEDULE = Schedule(
  "hopper_latent_forward",
  devices=("CUDA",),
  dtypes=DTYPES_16,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  preferred=preferred,
)
