"""The mainloop of forward kernels with asynchronous matrix products (`wgmma`): which product overlaps which softmax.

FlashAttention-2 (Dao, 2023) for one warpgroup with 64 query rows. `Mainloop` has the steps, which a kernel may replace:
`start_qk`, `wait_qk`, `softmax`, `start_pv` and `wait_pv`. There are two schedules of them:
- `SequentialMainloop`: S, the softmax and P V of a tile, one after another. A softmax overlaps only with products of
  other warpgroups.
- `OverlappedMainloop`: Q K^T of a tile and P V of the tile before it are in flight at once (intra-warpgroup overlap).
  With `PingPong` a warpgroup starts its products while the next one is at its softmax.

Source: FlashAttention-3 (Shah et al., 2024), sections 3.1 and 3.2.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, QUAD, WORDS, Epilogue, loaded
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import Trip, loop
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.nvidia.wgmma_softmax import ScoreRows, loaded_rows, packed_words, store_rows
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.softmax import LOWEST, p_scale_of
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.scope import Scope, sizes

ZERO = UOp.const(0)


class State(NamedTuple):
  """What a lane keeps in registers from tile to tile.

  Attributes:
    acc: O of two rows, relative to m_i.
    p: P of a tile, in packed words.
    m_i: row max of each row.
    l_i: running sum of each row, over this lane's keys.
    pv: P V of a tile, which the threads add to acc, as the tensor cores would cut off the sum; None if they need not.
    alpha: the factor of each row that brings acc to m_i, where P V is added a tile later; None if acc is always so.
  """

  acc: UOp
  p: UOp
  m_i: UOp
  l_i: UOp
  pv: UOp | None = None
  alpha: UOp | None = None

  @classmethod
  def make(
    cls, s: Scope, words: int, columns: int, *after: UOp, separate_pv: bool = False, lags: bool = False
  ) -> "State":
    """The state before the first tile.

    Args:
      words: words of P.
      columns: columns of O.
      separate_pv: whether P V has registers of its own.
      lags: whether it is added to acc a tile later.
    """
    acc = s.filled(0.0, columns // 2, after=after)
    m_i, l_i = (s.filled(x, HALVES, after=after) for x in (LOWEST, 0.0))
    p, pv = s.buffer(words, dtype=dtypes.uint), s.buffer(columns // 2) if separate_pv else None
    return cls(acc, p, m_i, l_i, pv, s.filled(1.0, HALVES, after=after) if lags else None)

  def after(self, *after: UOp) -> "State":
    """The state once `after` is done."""
    return State(*(x.after(*after) for x in self[:4]), *(None if x is None else x.after(*after) for x in self[4:]))

  @property
  def product(self) -> UOp:
    """Where the tensor cores put P V: O, or registers of its own."""
    return self.acc if self.pv is None else self.pv

  def registers(self) -> tuple[UOp, ...]:
    """All registers, which must not change before they have been used."""
    return tuple(x for x in self if x is not None)


@dataclass(frozen=True)
class Mainloop:
  """The steps of a warpgroup that has rows of its own, with all keys of a tile and all columns of O.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread.
    dtype: dtype of the products' operands.
    pipe: the operands in shared memory.
    scores: registers for S.
    rows: this lane's queries.
    rules: the rules of their head.
    key_range: the tiles. Tiles are numbered by their position in it.
    block_n: keys per tile.
    diverges: whether warpgroups differ in their numbers of tiles.
  """

  s: Scope
  group: Workgroup
  dtype: DType
  pipe: Trip
  scores: UOp
  rows: list[UOp]
  rules: HeadRules
  key_range: TileRange
  block_n: int
  diverges: bool = False
  terms: ClassVar[int] = 1  # of the operands; see `wgmma.start`

  def q_address(self, q_tile: SwizzledTiles) -> UOp:
    """Where the warpgroup's rows begin."""
    return q_tile.address(self.group.warp // WARPS * wgmma.M)

  def k_address(self, k_tile: SwizzledTiles) -> UOp:
    """Where the keys begin whose scores the warpgroup computes."""
    return k_tile.address()

  def v_address(self, v_tile: SwizzledTiles, columns: int) -> UOp:
    """Where the warpgroup's columns of V begin."""
    return v_tile.address()

  @property
  def lane_key(self) -> UOp:
    """This lane's first key of a tile."""
    return self.group.lane % QUAD * 2

  def start_qk(self, n_tile: UOp, *after: UOp) -> UOp:
    """Start S = Q K^T, (64, keys)."""
    q_tile, k_tile = self.pipe.q.tile(ZERO, *after), self.pipe.k.tile(n_tile, *after)
    q, k, panels = self.q_address(q_tile), self.k_address(k_tile), (q_tile.panel, k_tile.panel)
    keys, steps = 2 * sizes(self.scores)[0], k_tile.columns // self.terms // wgmma.K
    return wgmma.start(self.dtype, keys, steps, self.scores[0], q, k, panels, *after, terms=self.terms)

  def wait_qk(self, pending: int, *after: UOp) -> UOp:
    """Wait for S: until at most `pending` products are in flight."""
    return wgmma.wait(pending, 2 * sizes(self.scores)[0], self.scores[0], *after)

  def softmax(self, n_tile: UOp, masked: bool, state: State, *after: UOp) -> tuple[list[UOp], list[UOp], list[UOp]]:
    """Return alpha of both rows, the words of P, and the stores of m and l. S is read once all of `after` is done."""
    rows = self.score_rows(n_tile, masked)
    scores, old = rows.scores(self.scores.after(*after)), (loaded(state.m_i), loaded(state.l_i))
    softmax = rows.softmax(scores, *old, p_scale_log2=p_scale_of(self.dtype))
    # Wait explicitly: with a scale of 0 the scores are constants, and nothing else would depend on the product.
    stores = softmax.stores(state.m_i.after(*after), state.l_i.after(*after))
    return softmax.alpha, self.packed(softmax.p), stores

  def score_rows(self, n_tile: UOp, masked: bool) -> ScoreRows:
    """This lane's rows of S."""
    return ScoreRows(self.rules, self.rows, self.key_range.tile(n_tile) * self.block_n + self.lane_key, masked)

  def packed(self, p: list[list[UOp]]) -> list[UOp]:
    """P of both rows as a left operand."""
    return packed_words(p, self.dtype)

  def start_pv(self, n_tile: UOp, state: State, *after: UOp) -> UOp:
    """Start O += P V, (64, columns), or P V by itself."""
    v_tile, out, p = self.pipe.v.tile(n_tile, *after), state.product, state.p
    columns, steps = 2 * sizes(out)[0], sizes(p)[0] // WORDS // self.terms
    v, panels = self.v_address(v_tile, columns), (0, v_tile.panel)
    form = wgmma.Form.REGISTERS
    return wgmma.start(self.dtype, columns, steps, out[0], p[0], v, panels, *after, form=form, terms=self.terms)

  def wait_pv(self, state: State, *after: UOp) -> UOp:
    """Wait for all products."""
    return wgmma.wait(0, 2 * sizes(state.product)[0], state.product[0], *after)

  def epilogue(
    self, o: UOp, lse: UOp | None, head: UOp, acc: UOp, m_i: UOp, l_i: list[UOp], **options: Any
  ) -> list[UOp]:
    """Store O, normalized, and the LSE of this lane's rows; `options` are attributes of `Epilogue`."""
    epilogue = Epilogue(o, head, self.group.lane, lse, operand=self.dtype, **options)
    tiles = [acc.reshape(-1, 4)]
    return epilogue.store_output(self.rules, self.rows, tiles, m_i, l_i, p_scale_of(self.dtype))


class SequentialMainloop(Mainloop):
  """S, the softmax and P V of a tile, one after another. There is one work tile, whose queries are never released."""

  def run(self, state: State, started: UOp) -> State:
    """Process all tiles once the queries have arrived."""
    state = state.after(started)
    for first, trips, masked in full_then_masked(ZERO, self.key_range.n_full, self.key_range.n_tiles):
      state = self.attend(first, trips, masked, state)
    return state

  def attend(self, first: UOp, trips: UOp, masked: bool, state: State) -> State:
    """Process the tiles from `first` on."""
    trip, entry = loop(self.s, trips, early=self.diverges)
    n_tile, old = first + trip, state.after(*entry)
    waited = self.wait_qk(0, self.start_qk(n_tile, self.pipe.k.wait(n_tile, *entry, *state.registers())))
    released = self.pipe.k.release(n_tile, waited)
    alphas, words, stores = self.softmax(n_tile, masked, old, waited, released)
    elements, acc = range(sizes(old.acc)[0]), old.acc.after(waited)
    if old.pv is None:
      stores += [acc[i].store(acc[i].load() * alphas[i % 4 // 2]) for i in elements]
    stores += [old.p.after(waited)[i].store(word) for i, word in enumerate(words)]
    done = self.wait_pv(old, self.start_pv(n_tile, old, self.pipe.v.wait(n_tile, *stores)))
    if old.pv is not None:
      pv = old.pv.after(done)
      stores += [acc[i].store(acc[i].load() * alphas[i % 4 // 2] + pv[i].load()) for i in elements]
    return state.after(UOp.group(*stores, self.pipe.v.release(n_tile, done)).end(trip))


@dataclass(frozen=True)
class PingPong:
  """The warp scheduler barrier: a warpgroup starts its products once the one before it has started its own.

  Each method acts after `after`, and before whatever is `.after` its result.

  Attributes:
    warp: index of this thread's warp in the workgroup.
    warpgroups: warpgroups that take part; with 1 there is no barrier.
    exclusive: hold the barrier until the products complete, instead of until they are issued.
  """

  warp: UOp
  warpgroups: int
  exclusive: bool

  def first_arrival(self, after: UOp) -> UOp:
    """The last of the warpgroups lets the first one begin."""
    return self._arrive(UOp.const(1), self.warp >= (self.warpgroups - 1) * WARPS, after)

  def sync(self, after: UOp) -> UOp:
    """Wait until the warpgroup before has started its products."""
    if self.warpgroups == 1:
      return after
    return CUDA.named_barrier_sync(1 + self.warp // WARPS, 2 * THREADS, after)

  def arrive(self, after: UOp) -> UOp:
    """Let the next warpgroup start its products."""
    return self._arrive(1 + (self.warp // WARPS + 1) % self.warpgroups, UOp.const(True), after)

  def _arrive(self, barrier: UOp, when: UOp, after: UOp) -> UOp:
    if self.warpgroups == 1:
      return after
    return CUDA.named_barrier_arrive(barrier, 2 * THREADS, when, after)


class Walk(NamedTuple):
  """A warpgroup's way through the tiles of its workgroup, as positions in the key range.

  Attributes:
    passed: the number of tiles at the start that none of its queries sees.
    masked: whether the tile after them, its first one, needs a mask.
    loops: what follows its first tile; see `full_then_masked`.
  """

  passed: UOp
  masked: bool
  loops: list[tuple[UOp, UOp, bool]]


@dataclass(frozen=True, kw_only=True)
class OverlappedMainloop(Mainloop):
  """Q K^T of a tile and P V of the tile before it are in flight at once, in 16 bits.

  P is computed relative to the m_i of the tiles before (`speculative_softmax`), which takes neither maxima nor a
  rescale of O. A warp with a row whose m_i is too low then takes a branch: it computes P again from S, and rescales O.

  Attributes:
    ping_pong: the order in which warpgroups start their products.
    q_words: registers for the queries, a left operand of 16 bits; None if the products read them in shared memory.
  """

  ping_pong: PingPong
  q_words: UOp | None = None

  def run(self, walk: Walk, state: State, started: UOp) -> State:
    """Process all tiles."""
    arrived = self.pipe.q.wait(ZERO, self.pass_over(walk.passed, started))
    if self.q_words is None:
      return self._run(walk, state, arrived)
    loaded_q = self.load_q(self.q_words, arrived)
    return replace(self, q_words=self.q_words.after(loaded_q))._run(walk, state, loaded_q)

  def _run(self, walk: Walk, state: State, arrived: UOp) -> State:
    state = self.begin(walk, state, arrived)
    for first, count, masked in walk.loops:
      state = self.attend(first, count, masked, state)
    return self.finish(state)

  def load_q(self, words: UOp, arrived: UOp) -> UOp:
    """Load the warp's queries, and release them."""
    tile, lane, row = self.pipe.q.tile(ZERO, arrived), self.group.lane, self.group.warp * MMA_M
    steps = range(sizes(words)[0] // WORDS)
    loads = [
      CUDA.ldmatrix(words[WORDS * i], tile.at(row + lane % MMA_M, lane // MMA_M + 2 * i), arrived) for i in steps
    ]
    return self.pipe.q.release(ZERO, *loads)

  def start_qk(self, n_tile: UOp, *after: UOp) -> UOp:
    """Start S = Q K^T, (64, keys)."""
    if self.q_words is None:
      return super().start_qk(n_tile, *after)
    k_tile, keys, steps = self.pipe.k.tile(n_tile, *after), 2 * sizes(self.scores)[0], sizes(self.q_words)[0] // WORDS
    k, panels, form = self.k_address(k_tile), (0, k_tile.panel), wgmma.Form.REGISTERS_CLEARED
    return wgmma.start(self.dtype, keys, steps, self.scores[0], self.q_words[0], k, panels, *after, form=form)

  def pass_over(self, n_tiles: UOp, started: UOp) -> UOp:
    """Leave the first tiles to the other warpgroups: pass the ping-pong barrier, and signal that this warp is done.

    Behind another work tile it waits for V, because a signal could count for the tile of that one in the same slot. All
    warps are done with what was in the slot of K before V is there. Within a work tile the barrier is enough: the last
    warpgroup, which passes over no tile, has begun tile n by then, and so is done with tile n - 2.
    """
    if n_tiles.vmax == 0:
      return started
    n_tile, entry = loop(self.s, n_tiles, started, early=True)
    arrived = entry[0] if self.pipe.counts is None else self.pipe.v.wait(n_tile, *entry)
    passed = self.ping_pong.arrive(self.ping_pong.sync(arrived))
    return UOp.group(self.pipe.k.release(n_tile, passed), self.pipe.v.release(n_tile, passed)).end(n_tile)

  def begin(self, walk: Walk, state: State, started: UOp) -> State:
    """Process this warpgroup's first tile, except for its P V."""
    first = walk.passed
    waited = self.wait_qk(0, self.start_qk(first, self.pipe.k.wait(first, started)))
    _, words, stores = self.softmax(first, walk.masked, state, waited, self.release_k(first, waited))
    stores.append(self.pipe.v.release(ZERO - 1, *stores))
    stores += [state.p[i].store(word) for i, word in enumerate(words)]
    return state.after(UOp.group(*stores))

  def attend(self, first: UOp, trips: UOp, masked: bool, state: State) -> State:
    """Process the tiles from `first` on, each together with P V of the tile before it."""
    if self.diverges:
      first, trips = wgmma.uniform(first.maximum(0)), wgmma.uniform(trips.maximum(0))
    trip, entry = loop(self.s, trips, early=self.diverges)
    n_tile, ping_pong = first + trip, self.ping_pong
    qk = self.start_qk(n_tile, ping_pong.sync(self.pipe.k.wait(n_tile, *entry, *state.registers())))
    old = state.after(*entry)
    pv = self.start_pv(n_tile - 1, old, self.pipe.v.wait(n_tile - 1, qk))
    waited = self.wait_qk(1, pv if ping_pong.exclusive else ping_pong.arrive(pv))
    return state.after(self.update(n_tile, masked, old, pv, waited).end(trip))

  def update(self, n_tile: UOp, masked: bool, old: State, pv: UOp, waited: UOp) -> UOp:
    """Compute P of a tile whose S has been waited for, and wait for P V of the tile before."""
    rows, released, total = self.score_rows(n_tile, masked), self.release_k(n_tile, waited), self.s.buffer(HALVES)
    scores, m_i = (x.after(waited, released) for x in (self.scores, old.m_i))
    seen = rows.scores(scores)
    p, sums, too_low = rows.speculative_softmax(seen, loaded(m_i))
    # Wait explicitly: with a scale of 0 the scores are constants, and nothing else would depend on products.
    summed = UOp.group(*(total.after(waited, released)[half].store(x) for half, x in enumerate(sums)))
    out = self.product(old, pv, summed)
    stores = [old.p.after(out)[i].store(word) for i, word in enumerate(self.packed(p))]
    computed = UOp.group(*stores, store_rows(scores, seen), summed, self.pipe.v.release(n_tile - 1, out))
    checked = self.start_again(rows, too_low, old, total, computed)
    l_i, total = old.l_i.after(checked), total.after(checked)
    return UOp.group(checked, *(l_i[half].store(l_i[half].load() + total[half].load()) for half in range(HALVES)))

  def product(self, state: State, pv: UOp, *after: UOp) -> UOp:
    """P V, once it is complete; then the next warpgroup may start its products, if it had to wait for that."""
    out = state.product.after(self.wait_pv(state, pv, *after))
    return out.after(self.ping_pong.arrive(out)) if self.ping_pong.exclusive else out

  def start_again(self, rows: ScoreRows, too_low: UOp, old: State, total: UOp, computed: UOp) -> UOp:
    """In warps where an m_i is too low, update the whole state, and clear the sums, which are then in l_i."""
    once = self.s.axis(2, AxisType.REDUCE)  # a loop of at most one trip is a branch that a warp takes as a whole
    inside = CUDA.leave_loop_unless_any(too_low, once >= 1, computed, once)
    state, acc = old.after(inside), old.acc.after(inside)
    softmax = rows.softmax(loaded_rows(self.scores.after(inside)), loaded(state.m_i), loaded(state.l_i))
    stores = softmax.stores(state.m_i, state.l_i) + [total.after(inside)[half].store(0.0) for half in range(HALVES)]
    stores += [state.p[i].store(word) for i, word in enumerate(self.packed(softmax.p))]
    stores += [acc[i].store(acc[i].load() * softmax.alpha[i % 4 // 2]) for i in range(sizes(acc)[0])]
    return UOp.group(*stores).end(once)

  def finish(self, state: State) -> State:
    """Add P V of the last tile."""
    last = self.key_range.n_tiles - 1
    pv = self.start_pv(last, state, self.pipe.v.wait(last, *state.registers(), last=True))
    out = state.product.after(self.wait_pv(state, self.pipe.wait_all(pv)))
    done = UOp.group(self.pipe.v.release(last, out, last=True), *self.add_pv(state, out))
    return state._replace(acc=state.acc.after(out, done))

  def add_pv(self, state: State, out: UOp) -> list[UOp]:
    """Add P V, in `out`, to O: nothing to do where the tensor cores have."""
    return []

  def release_k(self, n_tile: UOp, waited: UOp) -> UOp:
    """Signal that this warp is done with tile n of K, and with the queries if it is the last one."""
    if self.q_words is not None:
      return self.pipe.k.release(n_tile, waited)
    last = n_tile.eq(self.key_range.n_tiles - 1).simplify()
    return UOp.group(self.pipe.k.release(n_tile, waited), self.pipe.q.release(ZERO, waited, when=last))


class SeparatePVMainloop(OverlappedMainloop):
  """The same for P V in registers of its own, in 8 bits.

  It is added to O in the multiply-add that rescales O. So nothing is gained by an m_i that stays, nor is there room for
  a P above 1, which is raised to use the type's range.
  """

  def update(self, n_tile: UOp, masked: bool, old: State, pv: UOp, waited: UOp) -> UOp:
    alphas, words, stores = self.softmax(n_tile, masked, old, waited, self.release_k(n_tile, waited))
    out = self.product(old, pv, *stores)
    added = self.add_pv(old, out)
    assert old.alpha is not None
    stores += added + [old.alpha.after(*added)[half].store(x) for half, x in enumerate(alphas)]
    stores += [old.p.after(out)[i].store(word) for i, word in enumerate(words)]
    return UOp.group(*stores, self.pipe.v.release(n_tile - 1, out))

  def add_pv(self, state: State, out: UOp) -> list[UOp]:
    """Add P V, in `out`, to O, with the factors that bring O to the maxima of the tile of P."""
    assert state.alpha is not None
    old, elements = loaded(state.alpha), range(sizes(out)[0])
    return [state.acc[i].store(state.acc[i].load() * old[i % 4 // 2] + out[i].load()) for i in elements]
