"""Forward attention on Hopper's matrix cores, sm_90a: `wgmma`, one warpgroup to 64 query rows.

FlashAttention-2 (Dao, 2023), with the products of one tile under way while the softmax of the next is worked out, as in
FlashAttention-3 (Shah et al., 2024). Each warpgroup keeps its queries and runs through the keys, a tile at a time:
    start S = Q K[n]^T  (64, block_n), then O += P V[n-1]   (64, Dv)
    wait for S          while the second product goes on:
    m, l, P'            in registers; the maximum joins the four lanes of a row; l stays apart until the end
    wait for O          O = O alpha, P = P'

Who holds what. S, m, l, P and O are in registers; `uopattn.dsl.quads` says which elements a lane has. Q, once, and
tiles of K and V, `stages` of each, are in shared memory (`uopattn.dsl.panels`), where the matrix cores read them;
cp.async fills the slots, all threads taking part. See `Tiles.shared_bytes` and `Tiles.registers`.

Tiles of keys that all queries of the workgroup see whole come first and carry no mask; the rest follow.
"""

from dataclasses import dataclass
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import LOG2E, Scope, as_type, sizes, wgmma
from uopattn.dsl import instructions as ins
from uopattn.dsl.keys import last_seen, tile_counts
from uopattn.dsl.panels import Panels
from uopattn.dsl.quads import COLUMNS, HALVES, QUAD, columns, join, row_of, store_row
from uopattn.dsl.softmax import mask_scores, online_softmax

CUDA = "cuda"
WARP = 32
WARPS = 4  # in a warpgroup
BUDGET = 200  # of 255 registers; the rest is for addresses and temporaries


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

  def registers(self, Dv: int) -> int:
    """32-bit registers a lane for O, S and P."""
    return round_up(Dv, wgmma.STEP) // 2 + self.block_n // 2 + self.block_n // 4

  @classmethod
  def choose(cls, arch: str, M: int, N: int, Dk: int, Dv: int, limit: int) -> "Tiles":
    """Tiles for a problem.

    Args:
      arch: "sm_90" alone has these instructions.
      limit: bytes of shared memory that a workgroup may have.

    Raises:
      ValueError: another architecture; head sizes that are no multiples of 8, or too large.
    """
    if arch != "sm_90":
      raise ValueError(f"{arch} has no wgmma; sm_90 alone has")
    if Dk % 8 or Dv % 8 or max(Dk, Dv) > 256:
      raise ValueError(f"head sizes {Dk} and {Dv}: must be multiples of 8, and at most 256")
    for block_n in (128, 64, 32, 16):
      tiles = cls(min(2, ceildiv(M, wgmma.ROWS)), min(block_n, round_up(N, wgmma.STEP)))
      if tiles.registers(Dv) <= BUDGET and tiles.shared_bytes(Dk, Dv) <= limit:
        return tiles
    raise ValueError(f"head sizes {Dk} and {Dv}: no tile fits {BUDGET} registers and {limit} bytes of shared memory")


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
  # A positive factor keeps the order of the scores: it waits for the subtraction in the exponent, to join it.
  early, late = (1.0, scale * LOG2E) if scale > 0 else (scale * LOG2E, 1.0)

  scores = s.buffer(block_n // 2)
  acc = s.filled(0.0, width // 2, after=(item,))
  m_i = s.filled(-inf, HALVES, after=(item,))
  l_i = s.filled(0.0, HALVES, after=(item,))  # of this lane's keys
  p = s.buffer(block_n // 4, dtype=dtypes.uint)
  q_tile, k_tiles, v_tiles = tiles.panels(s, Dk, Dv)
  q_bits, k_bits, v_bits = (as_type(x, dtypes.ushort) for x in (q, k, v))
  q_rows = q_tile.address(warp // WARPS * wgmma.ROWS)

  def start(n_tile: UOp | int, *after: UOp) -> UOp:
    """Starts copying a tile of K, and the tile of V before it, as one group."""
    n_tile = UOp.const(n_tile) if isinstance(n_tile, int) else n_tile
    copies = k_tiles.fill_tile(n_tile, k_bits, kv_head, N, Dk, thread, *after)
    if n_tile.vmax > 0:
      copies += v_tiles.fill_tile(n_tile - 1, v_bits, kv_head, N, Dv, thread, *after)
    return ins.cp_async_commit(CUDA, *copies)

  def arrived(pending: int, *after: UOp) -> UOp:
    """All copies but those of the `pending` youngest groups are there, for all."""
    return UOp.barrier(ins.fence_async(CUDA, ins.cp_async_wait(CUDA, pending, *after)))

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
    """Waits for S. Returns alpha and the words of P, and the stores of m and l."""
    waited = wgmma.wait(pending, block_n, scores[0], qk)
    done = scores.after(waited)
    alphas, stores, parts = [], [], []
    for half in range(HALVES):
      seen = last_seen(rows[half] + q_start, N, causal) - n_tile * block_n - lane % QUAD * 2 if masked else None
      row = [done[4 * n + 2 * half + e].load() for n in range(block_n // COLUMNS) for e in range(2)]
      row = mask_scores(row, columns(block_n // COLUMNS), early, seen)
      part, m_new, l_new, alpha = online_softmax(CUDA, row, late, m_old[half].load(), l_old[half].load(), join)
      parts.append([ins.pack(CUDA, part[i], part[i + 1], dtype) for i in range(0, len(part), 2)])
      alphas.append(alpha)
      # scores times a scale of 0 are no scores, and nothing else may be left that waits for the product
      stores += [m_i.after(waited)[half].store(m_new), l_i.after(waited)[half].store(l_new)]
    words = [parts[half][n] for n in range(block_n // COLUMNS) for half in range(HALVES)]
    return alphas, words, stores

  def attend(first: UOp, trips: UOp, masked: bool, *state: UOp) -> tuple[UOp, ...]:
    """The tiles of keys from `first` on, each with the weighted sum of the tile before it."""
    trip = s.axis(trips, AxisType.REDUCE)
    n_tile = first + trip
    acc_old, p_old, m_old, l_old = (x.after(trip) for x in state)
    ready = arrived(ahead - 1, trip, *state)
    following = start(n_tile + ahead, ready)
    qk = start_qk(n_tile, ready)
    pv = start_pv(n_tile - 1, acc_old, p_old, qk, following)
    alphas, words, stores = softmax(n_tile, masked, pv, 1, m_old, l_old)
    out = acc_old.after(wgmma.wait(0, width, acc_old[0], pv, *stores))
    stores += [acc[i].store(out[i].load() * alphas[i % 4 // 2]) for i in range(width // 2)]
    stores += [p.after(out)[i].store(word) for i, word in enumerate(words)]
    end = UOp.group(*stores).end(trip)
    return tuple(x.after(end) for x in (acc, p, m_i, l_i))

  started = UOp.group(*q_tile.fill_tile(block_row // block_m, q_bits, head, M, Dk, thread))
  for i in range(ahead + 1):
    started = start(i, started)
  ready = arrived(ahead, started)
  zero = UOp.const(0)
  whole, count = tile_counts(block_row, block_m, M, block_n, N, causal, q_start)
  _, words, stores = softmax(zero, whole.vmin == 0, start_qk(zero, ready), 0, m_i, l_i)
  begun = UOp.group(*stores, *[p[i].store(word) for i, word in enumerate(words)])
  state = tuple(x.after(begun) for x in (acc, p, m_i, l_i))
  whole_left = whole.maximum(1) - 1
  for first, trips, masked in ((zero + 1, whole_left, False), (whole_left + 1, count - 1 - whole_left, True)):
    if trips.vmax > 0:  # tinygrad misplaces what stands in a loop of no trips
      state = attend(first, trips, masked, *state)
  acc, p, m_i, l_i = state
  ready = arrived(0, *state)
  pv = start_pv(count - 1, acc, p, ready)
  acc = acc.after(wgmma.wait(0, width, acc[0], pv)).reshape(width // COLUMNS, 4)
  stores = []
  for half, row in enumerate(rows):
    stores += store_row(o, lse, head, row, half, acc, m_i[half].load(), l_i[half].load(), lane)
  name = f"attention_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{'_causal' * causal}"
  # A tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores).end(warp, lane).end(item).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)
