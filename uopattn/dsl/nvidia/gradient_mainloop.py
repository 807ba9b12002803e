"""The mainloop of gradients in one pass on Hopper: the order of the asynchronous products of a warpgroup.

FlashAttention-2 (Dao, 2023) with the pipeline of FlashAttention-3 (Shah et al., 2024). A workgroup has a block of keys
and values, and loops over tiles of 64 queries. Per tile, and for each 64 of a warpgroup's keys:
    start S = K Q^T, then dP = V dO^T      (64, 64)      from shared memory
    wait for S, compute P; wait for dP, compute dS, to shared memory
    start dV += P dO                       (64, Dv)
    start dK += dS Q                       (64, Dk)
Before the last dK of the tile is started:
    sync, start dQ = dS^T K                (64, 64)
    wait for dQ                            to shared memory, from where `add_dq` adds it to memory
Where Dk is above 64 a warpgroup has 64 keys: both wait for each other, and each computes 64 columns of dQ over all
keys. Up to 64 it computes dQ over its own keys only, and the second warpgroup adds its share to the first one's in
shared memory. So the first one never waits, and one computes P and dS while the other multiplies.

With score functions where Dk is above 64, dV is started before dP is waited for, as otherwise more would spill.

A warpgroup that computes dQ over its own keys may pass over a tile none of whose queries sees them: it computes
nothing, and adds nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.gpu.backward_mainloop import Elements, dropped, score_vjp, weights
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.gradient_pipeline import Operands
from uopattn.dsl.nvidia.key_blocks import BLOCK_M, KeyBlock, QueryTiles, Sight
from uopattn.dsl.nvidia.mma_layout import MMA_M, MMA_N, WARP
from uopattn.dsl.nvidia.score_gradients import elements_of, left_words, queries_of_columns, score_rows_by_column
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import loop
from uopattn.dsl.nvidia.tma import Slots
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.scope import Scope, sizes

SLICE = 64  # columns of dQ that a warpgroup computes
WARPGROUPS = 2  # that compute
LSE, DELTA = range(2)  # of each query, as they come with Q
DS_STORED = UOp.const(1)  # the first named barrier of the consumers: dS is in shared memory
DS_READ = DS_STORED + WARPGROUPS + 1  # the first one for which the last dS has been read
STAGED = DS_READ + WARPGROUPS  # that of dK and dV


def add_dq(
  s: Scope, group: Workgroup, free: UOp, semaphores: UOp, dq_sum: UOp, dq_tile: UOp, of_keys: KeyBlock, *after: UOp
) -> UOp:
  """Add dQ of a block's tiles to memory, by a separate warp: waiting for semaphores takes as long as some products.

  Args:
    free: a barrier that signals that `dq_tile` may be written again.
    dq_tile: shared memory for dQ of a tile.
  """
  queries, turn = of_keys.queries, of_keys.turn
  n, entry = loop(s, queries.n_tiles, *after)
  head, tile = queries.at(n)
  at, size = head * sizes(semaphores)[1] + tile, sizes(dq_tile)[0]
  leads, first = group.lane.eq(0), of_keys.first_of(tile)
  taken = CUDA.semaphore_wait(semaphores.base[at], turn, leads & ~first, *entry)
  givers = sizes(dq_sum)[2]  # a warpgroup for each slice
  met = CUDA.named_barrier_sync(DS_STORED + WARPGROUPS, givers * THREADS + WARP, taken)
  # Those that stored dQ need not wait until it is visible.
  fenced = CUDA.fence_proxy_async(met)
  added = CUDA.tma_reduce_add(dq_sum.base[at * size], dq_tile.after(fenced)[0], 4 * size, first, leads, fenced)
  arrived = CUDA.mbarrier_arrive(free, leads, CUDA.bulk_wait_read(0, leads, added))
  return CUDA.semaphore_release(semaphores.base[at], turn + 1, leads, CUDA.bulk_wait(leads, arrived)).end(n)


def first_key(warpgroup: UOp, row_tiles: int, row_tile: int) -> UOp:
  """The first key of one of a warpgroup's `row_tiles` tiles of 64, counted from the first one of the workgroup."""
  return (warpgroup * row_tiles + row_tile) * wgmma.M


def all_after(sums: list[list[UOp]], *after: UOp) -> list[list[UOp]]:
  """The accumulators of each tile of keys, after something."""
  return [[x.after(*after) for x in of_tile] for of_tile in sums]


def wait_for(count: int, acc: UOp, *after: UOp) -> UOp:
  """Wait until at most `count` later products than that to the accumulators `acc` are pending."""
  return wgmma.wait(count, 2 * sizes(acc)[0], acc[0], *after)


@dataclass(frozen=True)
class GradientMainloop:
  """A warpgroup's loop over tiles of queries.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread.
    dtype: dtype of q, k and v.
    rules: the rules of all heads.
    queries: the tiles of queries.
    free: a barrier that signals that dQ of the tile before has been read.
    slots: the operands.
    ds: shared memory for dS.
    rows: this lane's keys, of each tile of 64.
    dq: shared memory for dQ of a tile, which is then added to memory.
    ds_free: (after) -> waits until dS may be stored.
  """

  s: Scope
  group: Workgroup
  dtype: DType
  rules: Rules
  queries: QueryTiles
  free: UOp
  slots: Operands
  ds: SwizzledTiles
  rows: list[dict[tuple[int, int], UOp]]
  dq: UOp
  ds_free: Callable[[UOp], tuple[UOp, ...]]

  @property
  def warpgroup(self) -> UOp:
    return wgmma.uniform(self.group.warp) // WARPS

  @property
  def splits_columns(self) -> bool:
    """Whether each warpgroup has some columns of dQ; else each adds the product of its keys to the one before it."""
    return sizes(self.dq)[0] > BLOCK_M * SLICE

  def first_key(self, row_tile: int) -> UOp:
    """The first key of one of this warpgroup's tiles; see `first_key`."""
    return first_key(self.warpgroup, len(self.rows), row_tile)

  def run(self, sums: list[list[UOp]], *after: UOp) -> list[list[UOp]]:
    """Add all tiles to dK and dV, of each tile of keys, and release keys and values. Returns the sums."""
    zero = UOp.const(0)
    v_ready = UOp.group(*self.ds_free(self.slots.v.wait(zero, *after)))
    scores = [self.s.buffer(BLOCK_M // 2) for _ in range(2)]  # S and dP
    words = [self.s.buffer(BLOCK_M // 4, dtype=dtypes.uint) for _ in range(2)]  # P and dS
    dq, queries = self.s.buffer(SLICE // 2), self.queries
    inside, done = sums, v_ready
    for first, trips, sight in queries.loops():
      trip, entry = loop(self.s, trips, done, early=trips.vmin < 0)  # at most one, see `blurred`
      old = all_after(inside, *entry)
      if sight is Sight.NONE:
        done = self.pass_over(first + trip, *entry, *(x for of_tile in old for x in of_tile)).end(trip)
      else:
        done = self.attend(first + trip, sight is Sight.SOME, scores, words, dq, old, *entry).end(trip)
      inside = all_after(inside, done)
    return all_after(sums, self.meet(self.slots.k.release(zero, done)))

  def attend(
    self,
    n: UOp,
    masked: bool,
    scores: list[UOp],
    words: list[UOp],
    dq: UOp,
    sums: list[list[UOp]],
    *after: UOp,
  ) -> UOp:
    """Add the n-th tile to the sums. Returns the end of its work.

    Args:
      scores: registers for S and dP.
      words: registers for P and dS, in packed 16-bit words.
      dq: registers for this warpgroup's slice of dQ.
      sums: dK and dV of each tile of keys.
    """
    slots, (head, tile) = self.slots, self.queries.at(n)
    rules = self.rules.at(head)
    columns = queries_of_columns(UOp.const(0), BLOCK_M, self.group.lane)
    queries = queries_of_columns(tile * BLOCK_M, BLOCK_M, self.group.lane)
    early = self.splits_columns and rules.rules.has_score_mods  # else P is packed with dS, for want of registers
    issued = slots.q.wait(n, *after, *(x for of_tile in sums for x in of_tile))
    for i, (rows, (of_dk, of_dv)) in enumerate(zip(self.rows, sums, strict=True)):
      issued = self.start_scores(i, slots.k, slots.q.tile(n), scores[0], issued)
      issued = issued if i else slots.do.wait(n, issued)
      issued = self.start_scores(i, slots.v, slots.do.tile(n), scores[1], issued)
      if i:
        issued = wait_for(2, sums[i - 1][0], issued)
      ready = wait_for(1, scores[0], issued)
      lse = slots.q.numbers(n, LSE, columns, ready)
      score_rows = score_rows_by_column(rows, queries, [(x, x) for x in lse])
      products = elements_of(scores[0].after(ready))
      p = weights(CUDA, rules, score_rows, products, masked)
      before, kept = ready, dropped(rules, score_rows, p)
      if early:
        ready = self.start_dv(words[0], kept, of_dv, n, before)
      ready = wait_for(int(early), scores[1], ready)
      delta = slots.q.numbers(n, DELTA, columns, ready)  # only now, for want of registers
      score_rows = score_rows_by_column(rows, queries, list(zip(lse, delta, strict=True)))
      elements = score_vjp(rules, score_rows, p, products, elements_of(scores[1].after(ready)))
      ds = self.packed(words[1], elements, ready)
      issued = UOp.group(*self.store_ds(i, n, [ds[i].load() for i in range(BLOCK_M // 4)]))
      if not early:
        issued = UOp.group(issued, self.start_dv(words[0], kept, of_dv, n, before, ready))
      if i + 1 < len(sums):  # words of P are free before the next products start, for want of registers
        issued = wait_for(1, of_dv, self.start_sum(of_dk, ds, slots.q.tile(n), issued))
    started = self.start_dq(n, dq, self.sync(CUDA.fence_proxy_async(issued)))
    started = self.start_sum(of_dk, ds, slots.q.tile(n), started)
    arrival = self.hand_on(n, dq, wait_for(1, dq, wait_for(2, of_dv, started)))
    return slots.q.release(n, wait_for(0, of_dk, arrival))

  def hand_on(self, n: UOp, dq: UOp, *after: UOp) -> UOp:
    """Store this warpgroup's slice of the n-th tile's dQ, once that of the tile before has been read, and signal it."""
    free = CUDA.mbarrier_wait(self.free, (n + self.slots.q.count + 1) % 2, *after)
    return self.give(*self.store_dq(dq.after(free), free))

  def pass_over(self, n: UOp, *after: UOp) -> UOp:
    """Add nothing for the n-th tile, none of whose queries sees a key of this warpgroup. Returns the end of its work.

    That is right only if no warpgroup has columns of dQ over the keys of others.
    """
    assert not self.splits_columns
    return self.slots.q.release(n, self.give(self.sync(*after)))

  def sync(self, *after: UOp) -> UOp:
    """Wait until dS, and what this warpgroup adds its slice of dQ to, are in shared memory."""
    if self.splits_columns:
      return CUDA.named_barrier_sync(DS_STORED, WARPGROUPS * THREADS, *after)
    threads = self.warpgroup.eq(0).where(UOp.const(THREADS), 2 * THREADS)
    return CUDA.named_barrier_sync(DS_STORED + self.warpgroup, threads, *after)

  def meet(self, *after: UOp) -> UOp:
    """Wait until this warpgroup's dS of all tiles has been read."""
    if self.splits_columns:
      return self.sync(*after)
    return CUDA.named_barrier_sync(DS_READ + self.warpgroup, THREADS, *after)

  def give(self, *after: UOp) -> UOp:
    """Signal that the slice of dQ is in shared memory: to the next warpgroup, or to the warp that adds it to memory."""
    if self.splits_columns:
      return CUDA.named_barrier_arrive(DS_STORED + WARPGROUPS, WARPGROUPS * THREADS + WARP, UOp.const(True), *after)
    threads = self.warpgroup.eq(WARPGROUPS - 1).where(UOp.const(THREADS + WARP), 2 * THREADS)
    return CUDA.named_barrier_arrive(DS_STORED + self.warpgroup + 1, threads, UOp.const(True), *after)

  def start_scores(self, row_tile: int, stationary: Slots, tile: SwizzledTiles, into: UOp, *after: UOp) -> UOp:
    """Start the product of a tile of this warpgroup's keys with the rows of a tile, (64, block)."""
    keys = stationary.tile(UOp.const(0), *after)
    steps, panels = keys.columns // wgmma.K, (keys.panel, tile.panel)
    rows = keys.address(self.first_key(row_tile))
    return wgmma.start(self.dtype, tile.rows, steps, into[0], rows, tile.after(*after).address(), panels, *after)

  def packed(self, words: UOp, elements: Elements, *after: UOp) -> UOp:
    """Round elements to 16 bits in registers for words of two, as they are left operands of products."""
    stores = [words.after(*after)[i].store(x) for i, x in enumerate(left_words(elements, BLOCK_M, self.dtype))]
    return words.after(UOp.group(*stores))

  def start_sum(self, acc: UOp, words: UOp, tile: SwizzledTiles, *after: UOp) -> UOp:
    """Start acc += the elements of packed words times a tile, (64, columns)."""
    steps, panels = tile.rows // wgmma.K, (0, tile.panel)
    address, form = tile.after(*after).address(), wgmma.Form.REGISTERS
    return wgmma.start(self.dtype, tile.columns, steps, acc[0], words[0], address, panels, *after, form=form)

  def start_dv(self, words: UOp, p: Elements, of_dv: UOp, number: UOp, scored: UOp, *after: UOp) -> UOp:
    """Start dV += P dO, where P is rounded to `words` once S is there (`scored`)."""
    return self.start_sum(of_dv, self.packed(words, p, scored), self.slots.do.tile(number), scored, *after)

  def store_ds(self, row_tile: int, number: UOp, words: list[UOp], *after: UOp) -> list[UOp]:
    """Store this warp's rows of dS, of a tile of keys, to shared memory."""
    tile = self.ds.tile(number + self.slots.q.count, *after)
    row = self.first_key(row_tile) + self.group.warp % WARPS * MMA_M
    return tile.store_rows(row, words, self.group.lane)

  def start_dq(self, number: UOp, dq: UOp, *after: UOp) -> UOp:
    """Start this warpgroup's slice of dS^T K, (64, 64): some columns of it, or the product of its keys."""
    ds, k = self.ds.tile(number + self.slots.q.count, *after), self.slots.k.tile(UOp.const(0), *after)
    if self.splits_columns:
      form = wgmma.Form.BY_ROWS
      keys, left, right = ds.rows, ds.base, k.base + self.warpgroup * k.panel
    else:
      form = wgmma.Form.BY_ROWS_ADDED
      first, keys = self.first_key(0) * SLICE, len(self.rows) * wgmma.M
      left, right = ds.base + first, k.base + first
      partial_dq = [self.dq.after(*after)[i.valid(self.warpgroup > 0)].load() for i in self.dq_offsets()]
      after = tuple(dq.after(*after)[i].store(x.bitcast(dtypes.float)) for i, x in enumerate(partial_dq))
    a, b, steps = ds.memory[left], k.memory[right], keys // wgmma.K
    return wgmma.start(self.dtype, SLICE, steps, dq[0], a, b, (ds.panel, k.panel), *after, form=form)

  def dq_offsets(self) -> list[UOp]:
    """Where the elements of this thread's slice of dQ are in shared memory, as accumulators lie in registers."""
    first = self.warpgroup * self.splits_columns * (SLICE // MMA_N)
    return [
      ((first + i) * THREADS + self.group.thread % THREADS) * 4 + e for i in range(SLICE // MMA_N) for e in range(4)
    ]

  def store_dq(self, dq: UOp, *after: UOp) -> list[UOp]:
    """Store this warpgroup's slice of dQ to shared memory."""
    memory, words = self.dq.after(*after), [dq[i].load().bitcast(dtypes.uint) for i in range(SLICE // 2)]
    offsets = self.dq_offsets()
    return [CUDA.store_chunk(memory[offsets[i]], *words[i : i + 4]) for i in range(0, len(words), 4)]
