"""Forward attention on Hopper's matrix cores, sm_90a: `wgmma`, one warpgroup to 64 query rows.

FlashAttention-2 (Dao, 2023), with the products of one tile under way while the softmax of the next is worked out, as in
FlashAttention-3 (Shah et al., 2024). Each warpgroup keeps its queries and runs through the keys, a tile at a time:
    start S = Q K[n]^T  (64, block_n), then O += P V[n-1]   (64, Dv)
    wait for S          while the second product goes on:
    m, l, P'            in registers; the maximum joins the four lanes of a row; l stays apart until the end
    wait for O          O = O alpha, P = P'

Who holds what. S, m, l, P and O are in registers; `uopattn.dsl.quads` says which elements a lane has. Q, once, and
tiles of K and V, `stages` of each, are in shared memory (`uopattn.dsl.panels`), where the matrix cores read them, see
`Tiles.shared_bytes`; cp.async fills the slots, all threads taking part. For each slot one barrier tells that it is
full, and one that all warps are done with it: no warpgroup waits for another until it is about to run out of tiles.

Tiles of keys that all queries of the workgroup see whole come first and carry no mask; the rest follow.

Measured: 485 TFLOP/s at D=64, 619 at D=128 and 613 at D=256, causal 409, 546 and 550 (H200, B=4, H=32, N=4096, float16,
2026-11-21); no spills, 164 to 248 registers a thread.
"""

from dataclasses import dataclass
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import Scope, as_type, sizes, wgmma
from uopattn.dsl import instructions as ins
from uopattn.dsl.keys import last_seen, tile_counts
from uopattn.dsl.panels import Panels
from uopattn.dsl.quads import COLUMNS, HALVES, QUAD, columns, join, row_of, store_row
from uopattn.dsl.softmax import mask_scores, online_softmax, split_factor

CUDA = "cuda"
WARP = 32
WARPS = 4  # in a warpgroup


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warpgroups: warpgroups in a workgroup.
    block_n: keys a tile.
    stages: slots for tiles of K and of V.
  """

  warpgroups: int
  block_n: int
  stages: int = 2

  def __post_init__(self) -> None:
    if not 16 <= self.block_n <= 256 or self.block_n % wgmma.STEP:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {wgmma.STEP} in 16..256")
    if not 1 <= self.warpgroups <= 8:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be in 1..8")
    if self.stages < 2:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 2")

  @property
  def block_m(self) -> int:
    """Queries a workgroup."""
    return self.warpgroups * wgmma.ROWS

  @property
  def threads(self) -> int:
    return self.warpgroups * WARPS * WARP

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[Panels, Panels, Panels]:
    """Room for Q, K and V in shared memory."""
    Dk, Dv = round_up(Dk, wgmma.STEP), round_up(Dv, wgmma.STEP)
    return (
      Panels.make(s, self.block_m, Dk, 1, self.threads, least=wgmma.PANEL),
      Panels.make(s, self.block_n, Dk, self.stages, self.threads, least=wgmma.PANEL),
      Panels.make(s, self.block_n, Dv, self.stages, self.threads, least=wgmma.PANEL),
    )

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory a workgroup."""
    return sum(2 * x.slots * x.size for x in self.panels(Scope(), Dk, Dv))

  @staticmethod
  def serves(arch: str, Dk: int, Dv: int) -> bool:
    """Whether there are tiles for an architecture and head sizes."""
    return arch == "sm_90" and Dk % 8 == 0 and Dv % 8 == 0 and max(Dk, Dv) <= LARGEST

  @classmethod
  def choose(cls, arch: str, heads: int, M: int, N: int, Dk: int, Dv: int, causal: bool, limit: int) -> "Tiles":
    """The tiles that promise most: their speed where there is plenty to do, times the shares of rows and places in use.

    Args:
      arch: "sm_90" alone has these instructions.
      heads: query heads of all batches.
      causal: half the tiles or so are left out.
      limit: bytes of shared memory that a workgroup may have.

    Raises:
      ValueError: another architecture; head sizes that are no multiples of 8, or too large.
    """
    if not cls.serves(arch, Dk, Dv):
      raise ValueError(
        f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of 8 up to {LARGEST}"
      )

    def promise(candidate: tuple["Tiles", int, int, int]) -> float:
      tiles, resident, full, half = candidate
      blocks, places = ceildiv(M, tiles.block_m), MULTIPROCESSORS * resident
      rows, turns = M / (blocks * tiles.block_m), heads * blocks / round_up(heads * blocks, places)
      return (half if causal else full) * rows * turns

    size = next(size for size in MEASURED if max(Dk, Dv) <= size)
    best = max(MEASURED[size], key=promise)[0]
    tiles = cls(min(best.warpgroups, ceildiv(M, wgmma.ROWS)), min(best.block_n, round_up(N, wgmma.STEP)), best.stages)
    if tiles.shared_bytes(Dk, Dv) > limit:
      raise ValueError(f"head sizes {Dk} and {Dv}: {tiles} needs {tiles.shared_bytes(Dk, Dv)} bytes, of {limit}")
    return tiles


LARGEST = 256  # head size
MULTIPROCESSORS = 132  # of an H100 or H200
# By the largest head size: tiles, workgroups at once on a multiprocessor, and TFLOP/s without and with a causal mask,
# measured on an H200 (B=4, H=32, N=4096, float16) on 2026-11-21.
MEASURED = {
  64: ((Tiles(3, 128, 3), 1, 485, 389), (Tiles(1, 128, 2), 3, 462, 406), (Tiles(1, 64, 2), 4, 463, 409)),
  128: ((Tiles(2, 128, 3), 1, 619, 546), (Tiles(1, 64, 2), 2, 512, 450)),
  192: ((Tiles(2, 96, 2), 1, 612, 546),),
  256: ((Tiles(2, 64, 2), 1, 613, 550), (Tiles(1, 64, 2), 1, 487, 376)),
}


def forward(
  o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, scale: float, causal: bool, q_start: int, tiles: Tiles
) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float16 or bfloat16, Dk a multiple of 8.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv), Dv a multiple of 8.
    lse: (heads, M) float32, receives the natural logarithm of the sum of exponentials of each row.
    scale: factor on q.k.
    causal: key j is seen by query i iff j <= i + q_start.
    q_start: position of the first query; may be negative.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv), dtype = sizes(q), sizes(v), q.dtype
  block_m, block_n, ahead = tiles.block_m, tiles.block_n, tiles.stages - 1
  blocks, steps, width = ceildiv(M, block_m), block_n // wgmma.STEP, round_up(Dv, wgmma.STEP)
  s = Scope()
  item = s.axis(heads * blocks, AxisType.GLOBAL)
  lane, warp = s.axis(WARP, AxisType.WARP), s.axis(tiles.warpgroups * WARPS, AxisType.LOCAL)
  thread = warp * WARP + lane
  head, block = item // blocks, item % blocks
  kv_head = head // (heads // kv_heads)
  block_row = (blocks - 1 - block if causal else block) * block_m  # the blocks with the most tiles start first
  rows = [block_row + warp * 16 + row_of(lane, half) for half in range(HALVES)]
  early, late = split_factor(scale)

  scores = s.buffer(block_n // 2)
  acc = s.filled(0.0, width // 2, after=(item,))
  m_i = s.filled(-inf, HALVES, after=(item,))
  l_i = s.filled(0.0, HALVES, after=(item,))  # of this lane's keys
  p = s.buffer(block_n // 4, dtype=dtypes.uint)
  q_tile, k_tiles, v_tiles = tiles.panels(s, Dk, Dv)
  q_bits, k_bits, v_bits = (as_type(x, dtypes.ushort) for x in (q, k, v))
  barriers = s.buffer(2 * tiles.stages, dtype=dtypes.ulong, space=AddrSpace.LOCAL)
  q_rows = q_tile.address(warp // WARPS * wgmma.ROWS)

  def full(n_tile: UOp) -> UOp:
    """The barrier that tells of a tile that is there."""
    return barriers[n_tile % tiles.stages]

  def empty(n_tile: UOp) -> UOp:
    """The barrier that tells of a tile that is no longer needed."""
    return barriers[tiles.stages + n_tile % tiles.stages]

  def start(n_tile: UOp, *after: UOp) -> UOp:
    """Starts copying a tile of K, and the tile of V before it, once all warps are done with what was there."""
    if n_tile.vmax >= tiles.stages:  # there was something
      after = (ins.mbarrier_wait(CUDA, empty(n_tile), (n_tile // tiles.stages + 1) % 2, *after),)
    copies = k_tiles.fill_tile(n_tile, k_bits, kv_head, N, Dk, thread, *after)
    if n_tile.vmax > 0:
      copies += v_tiles.fill_tile(n_tile - 1, v_bits, kv_head, N, Dv, thread, *after)
    return ins.cp_async_arrive(CUDA, full(n_tile), *copies)

  def arrived(n_tile: UOp, *after: UOp) -> UOp:
    """Waits until a tile of K, and the tile of V before it, are there."""
    return ins.fence_async(CUDA, ins.mbarrier_wait(CUDA, full(n_tile), n_tile // tiles.stages % 2, *after))

  def release(n_tile: UOp, *after: UOp) -> UOp:
    """This warp is done with a tile of K and the tile of V before it."""
    return ins.mbarrier_arrive(CUDA, empty(n_tile), lane.eq(0), *after)

  def start_qk(n_tile: UOp, *after: UOp) -> UOp:
    k_tile = k_tiles.tile(n_tile, *after)
    panels = q_tile.panel, k_tile.panel
    return wgmma.start(
      dtype, block_n, round_up(Dk, wgmma.STEP) // wgmma.STEP, scores[0], q_rows, k_tile.address(), panels, *after
    )

  def start_pv(n_tile: UOp, acc: UOp, p: UOp, *after: UOp) -> UOp:
    v_tile = v_tiles.tile(n_tile, *after)
    return wgmma.start(dtype, width, steps, acc[0], p[0], v_tile.address(), (0, v_tile.panel), *after, registers=True)

  def softmax(
    n_tile: UOp, masked: bool, qk: UOp, pending: int, m_old: UOp, l_old: UOp
  ) -> tuple[list[UOp], list[UOp], list[UOp]]:
    """Waits for S, and starts copying the tile `ahead`. Returns alpha and the words of P, and the stores of m and l."""
    waited = wgmma.wait(pending, block_n, scores[0], qk)
    following = start(n_tile + ahead, waited)
    done = scores.after(waited, following)
    alphas, stores, parts = [], [], []
    for half in range(HALVES):
      seen = last_seen(rows[half] + q_start, N, causal) - n_tile * block_n - lane % QUAD * 2 if masked else None
      row = [done[4 * n + 2 * half + e].load() for n in range(block_n // COLUMNS) for e in range(2)]
      row = mask_scores(row, columns(block_n // COLUMNS), early, seen)
      part, m_new, l_new, alpha = online_softmax(CUDA, row, late, m_old[half].load(), l_old[half].load(), join)
      parts.append([ins.pack(CUDA, part[i], part[i + 1], dtype) for i in range(0, len(part), 2)])
      alphas.append(alpha)
      # scores times a scale of 0 are no scores, and nothing else may be left that waits for the product
      stores += [x.after(waited, following)[half].store(y) for x, y in ((m_i, m_new), (l_i, l_new))]
    words = [parts[half][n] for n in range(block_n // COLUMNS) for half in range(HALVES)]
    return alphas, words, stores

  def attend(first: UOp, trips: UOp, masked: bool, *state: UOp) -> tuple[UOp, ...]:
    """The tiles of keys from `first` on, each with the weighted sum of the tile before it."""
    trip = s.axis(trips, AxisType.REDUCE)
    n_tile = first + trip
    acc_old, p_old, m_old, l_old = (x.after(trip) for x in state)
    qk = start_qk(n_tile, arrived(n_tile, trip, *state))
    pv = start_pv(n_tile - 1, acc_old, p_old, qk)
    alphas, words, stores = softmax(n_tile, masked, pv, 1, m_old, l_old)
    out = acc_old.after(wgmma.wait(0, width, acc_old[0], pv, *stores))
    stores += [acc[i].store(out[i].load() * alphas[i % 4 // 2]) for i in range(width // 2)]
    stores += [p.after(out)[i].store(word) for i, word in enumerate(words)]
    stores.append(release(n_tile, out))
    end = UOp.group(*stores).end(trip)
    return tuple(x.after(end) for x in (acc, p, m_i, l_i))

  zero, first_thread = UOp.const(0), thread.eq(0)
  made = [ins.mbarrier_init(CUDA, full(UOp.const(i)), tiles.threads, first_thread) for i in range(tiles.stages)]
  made += [
    ins.mbarrier_init(CUDA, empty(UOp.const(i)), tiles.threads // WARP, first_thread) for i in range(tiles.stages)
  ]
  started = UOp.group(*q_tile.fill_tile(block_row // block_m, q_bits, head, M, Dk, thread, UOp.barrier(*made)))
  for i in range(ahead):
    started = start(UOp.const(i), started)
  whole, count = tile_counts(block_row, block_m, M, block_n, N, causal, q_start)
  qk = start_qk(zero, arrived(zero, started))
  _, words, stores = softmax(zero, whole.vmin == 0, qk, 0, m_i, l_i)
  stores.append(release(zero, *stores))
  begun = UOp.group(*stores, *[p[i].store(word) for i, word in enumerate(words)])
  state = tuple(x.after(begun) for x in (acc, p, m_i, l_i))
  whole_left = whole.maximum(1) - 1
  for first, trips, masked in ((zero + 1, whole_left, False), (whole_left + 1, count - 1 - whole_left, True)):
    if trips.vmax > 0:  # tinygrad misplaces what stands in a loop of no trips
      state = attend(first, trips, masked, *state)
  acc, p, m_i, l_i = state
  pv = start_pv(count - 1, acc, p, arrived(count, *state))
  if ahead > 1:  # no copy may be under way when the workgroup ends
    pv = ins.cp_async_wait(CUDA, 0, ins.cp_async_commit(CUDA, pv))
  acc = acc.after(wgmma.wait(0, width, acc[0], pv)).reshape(width // COLUMNS, 4)
  stores = []
  for half, row in enumerate(rows):
    stores += store_row(o, lse, head, row, half, acc, m_i[half].load(), l_i[half].load(), lane)
  name = f"attention_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{'_causal' * causal}"
  # A tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores).end(warp, lane).end(item).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)
