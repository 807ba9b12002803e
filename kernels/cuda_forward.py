"""Forward attention on NVIDIA's matrix cores, sm_80 and newer: `mma.sync`, one warp to 16 `m_tiles` query rows.

FlashAttention-2 (Dao, 2023). Each warp keeps its queries and runs through the keys, a tile of `block_n` at a time:
    S = Q K^T           (16 m_tiles, block_n)
    m, l, P             in registers; the maximum joins the four lanes of a row; l stays apart until the end
    O = O alpha + P V   (16 m_tiles, Dv)   P is the second product's left operand as it is, in registers

Who holds what. Q, m, l, P and O are in registers, Q for the whole loop; `uopattn.dsl.quads` says which elements a lane
has. All warps share Q once, and tiles of K and V, `stages` of each, in shared memory (`uopattn.dsl.panels`): cp.async
fills one slot while another is worked on, ldmatrix reads K as it is and V transposed. See `Tiles.shared_bytes`.

Tiles of keys that all queries of the workgroup see whole come first and carry no mask; the rest follow.

Measured on an H200 (B=4, H=32, N=4096, float16, 2026-11-21), where `hopper_forward` is faster: 342 TFLOP/s at D=64, 284
at D=128, causal 309 and 334.
"""

from dataclasses import dataclass
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import Scope, as_type, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.keys import last_seen, tile_counts
from uopattn.dsl.panels import Panels
from uopattn.dsl.quads import COLUMNS, HALVES, QUAD, ROWS, columns, join, row_elements, row_of, store_row
from uopattn.dsl.softmax import mask_scores, online_softmax, split_factor

CUDA = "cuda"
STEP = 16  # length of k of one matrix instruction
MMA = ((COLUMNS, ROWS, STEP), "CUDA", 32)
WARP = 32

Tile = list[UOp]  # an accumulator's elements in this lane


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warps: warps in a workgroup.
    m_tiles: tiles of 16 queries a warp.
    block_n: keys a tile.
    stages: slots for tiles of K and of V.
  """

  warps: int
  m_tiles: int
  block_n: int
  stages: int = 2

  def __post_init__(self) -> None:
    if self.block_n < 1 or self.block_n % STEP:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {STEP}")
    if self.m_tiles < 1:
      raise ValueError(f"Tiles.m_tiles={self.m_tiles}: must be at least 1")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.warps={self.warps}: must be in 1..32")
    if self.stages < 2:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 2")

  @property
  def block_m(self) -> int:
    """Queries a workgroup."""
    return self.warps * self.m_tiles * ROWS

  @property
  def threads(self) -> int:
    return self.warps * WARP

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[Panels, Panels, Panels]:
    """Room for Q, K and V in shared memory."""
    Dk, Dv = round_up(Dk, STEP), round_up(Dv, STEP)
    return (
      Panels.make(s, self.block_m, Dk, 1, self.threads),
      Panels.make(s, self.block_n, Dk, self.stages, self.threads),
      Panels.make(s, self.block_n, Dv, self.stages, self.threads),
    )

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory a workgroup."""
    return sum(2 * x.slots * x.size for x in self.panels(Scope(), Dk, Dv))

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers a lane for Q, O and S."""
    return self.m_tiles * (round_up(Dk, STEP) // 4 + round_up(Dv, STEP) // 2 + self.block_n // 2)

  @classmethod
  def choose(cls, arch: str, M: int, N: int, Dk: int, Dv: int, limit: int) -> "Tiles":
    """Tiles for a problem.

    Args:
      arch: "sm_80" or newer.
      limit: bytes of shared memory that a workgroup may have.

    Raises:
      ValueError: an older architecture; head sizes too large even for the smallest tile.
    """
    if int(arch.removeprefix("sm_")) < 80:
      raise ValueError(f"{arch} has neither cp.async nor mma.sync with 16 steps of k; sm_80 and newer have")
    warps, keys = min(4, ceildiv(M, ROWS)), round_up(N, STEP)
    candidates = [cls(warps, m, min(n, keys)) for m, n in ((2, 64), (2, 32), (1, 64), (1, 32), (1, 16))]
    for tiles in candidates:
      if tiles.m_tiles > 1 and tiles.block_m // 2 >= M:
        continue
      budget = LIMIT if tiles == candidates[-1] else BUDGET
      if tiles.registers(Dk, Dv) <= budget and tiles.shared_bytes(Dk, Dv) <= limit:
        return tiles
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {tiles.registers(Dk, Dv)} registers a lane, of {LIMIT}, "
      f"and {tiles.shared_bytes(Dk, Dv)} bytes of shared memory, of {limit}"
    )


# Of 255 registers, what Q, O and S may take: P, addresses and temporaries need the rest. The smallest tile has few of
# these, and may spill a little where the alternative is no kernel.
BUDGET, LIMIT = 180, 220


def forward(
  o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, scale: float, causal: bool, q_start: int, tiles: Tiles
) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float16 or bfloat16.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    lse: (heads, M) float32, receives the natural logarithm of the sum of exponentials of each row.
    scale: factor on q.k.
    causal: key j is seen by query i iff j <= i + q_start.
    q_start: position of the first query; may be negative.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv), dtype = sizes(q), sizes(v), q.dtype
  block_m, block_n, m_tiles, ahead = tiles.block_m, tiles.block_n, tiles.m_tiles, tiles.stages - 1
  blocks = ceildiv(M, block_m)
  s = Scope()
  item = s.axis(heads * blocks, AxisType.GLOBAL)
  lane, warp = s.axis(WARP, AxisType.WARP), s.axis(tiles.warps, AxisType.LOCAL)
  thread = warp * WARP + lane
  head, block = item // blocks, item % blocks
  kv_head = head // (heads // kv_heads)
  block_row = (blocks - 1 - block if causal else block) * block_m  # the blocks with the most tiles start first
  rows = [
    [block_row + (warp * m_tiles + i) * ROWS + row_of(lane, half) for half in range(HALVES)] for i in range(m_tiles)
  ]
  early, late = split_factor(scale)

  acc = s.filled(0.0, m_tiles, round_up(Dv, STEP) // COLUMNS, 4, after=(item,))
  m_i = s.filled(-inf, m_tiles, HALVES, after=(item,))
  l_i = s.filled(0.0, m_tiles, HALVES, after=(item,))  # of this lane's keys
  q_tile, k_tiles, v_tiles = tiles.panels(s, Dk, Dv)
  q_bits, k_bits, v_bits = (as_type(x, dtypes.ushort) for x in (q, k, v))

  def start(n_tile: UOp, *after: UOp) -> UOp:
    """Starts copying a tile of K and of V, as one group."""
    copies = k_tiles.fill_tile(n_tile, k_bits, kv_head, N, Dk, thread, *after)
    return ins.cp_async_commit(CUDA, *copies, *v_tiles.fill_tile(n_tile, v_bits, kv_head, N, Dv, thread, *after))

  started = tuple(q_tile.fill_tile(block_row // block_m, q_bits, head, M, Dk, thread))
  for i in range(ahead):
    started = (start(UOp.const(i), *started),)
  filled = UOp.barrier(ins.cp_async_wait(CUDA, ahead - 1, *started))
  q_frags = [load_query(s, dtype, q_tile.tile(UOp.const(0), filled), warp * m_tiles + i, lane) for i in range(m_tiles)]

  def attend(first: UOp, trips: UOp | int, masked: bool, *state: UOp) -> tuple[UOp, ...]:
    """The tiles of keys from `first` on."""
    trip = s.axis(trips, AxisType.REDUCE)
    n_tile = first + trip
    acc_old, m_old, l_old = (x.after(trip) for x in state)
    ready = UOp.barrier(ins.cp_async_wait(CUDA, ahead - 1, trip, filled, *state))
    following = start(n_tile + ahead, ready)
    k_tile, v_tile = (x.tile(n_tile, ready, following) for x in (k_tiles, v_tiles))
    scores = multiply_qk(s, dtype, q_frags, k_tile, lane)
    p_frags, alphas, updates = [], [], []
    for i in range(m_tiles):
      p, alpha = [], []
      for half in range(HALVES):
        seen = last_seen(rows[i][half] + q_start, N, causal) - n_tile * block_n - lane % QUAD * 2 if masked else None
        row = mask_scores(row_elements(scores[i], half), columns(len(scores[i])), early, seen)
        p_row, m_new, l_new, alpha_row = online_softmax(
          CUDA, row, late, m_old[i, half].load(), l_old[i, half].load(), join
        )
        p.append(p_row)
        alpha.append(alpha_row)
        updates += [m_i[i, half].store(m_new), l_i[i, half].store(l_new)]
      p_frags.append(as_operand(p, dtype))
      alphas.append(alpha)
    out = multiply_pv(s, dtype, p_frags, v_tile, acc_old, alphas, lane)
    updates += [acc[i, d].store(out[i][d]) for i in range(m_tiles) for d in range(acc.shape[1])]
    end = UOp.group(*updates).end(trip)
    return tuple(x.after(end) for x in (acc, m_i, l_i))

  whole, count = tile_counts(block_row, block_m, M, block_n, N, causal, q_start)
  state: tuple[UOp, ...] = (acc, m_i, l_i)
  for first, trips, masked in ((UOp.const(0), whole, False), (whole, count - whole, True)):
    if trips.vmax > 0:  # tinygrad misplaces what stands in a loop of no trips
      state = attend(first, trips, masked, *state)

  # No copy may be under way when the workgroup ends.
  drained = ins.cp_async_wait(CUDA, 0, *state)
  acc, m_i, l_i = (x.after(drained) for x in state)
  stores = []
  for i in range(m_tiles):
    for half in range(HALVES):
      stores += store_row(o, lse, head, rows[i][half], half, acc[i], m_i[i, half].load(), l_i[i, half].load(), lane)
  name = f"attention_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{'_causal' * causal}"
  # A tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores).end(warp, lane).end(item).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


def load_query(s: Scope, dtype: DType, q_tile: Panels, tile: UOp, lane: UOp) -> list[UOp]:
  """Q of 16 rows as left operands, one for each step along Dk."""
  frags = []
  for step in range(q_tile.columns // STEP):
    frag = s.buffer(STEP // 2, dtype=dtype)
    row, chunk = tile * ROWS + lane % ROWS, 2 * step + lane // ROWS
    frags.append(frag.after(ins.ldmatrix(CUDA, frag[0], q_tile.at(row, chunk))))
  return frags


def right_operands(s: Scope, dtype: DType, tile: Panels, row: UOp, chunk: UOp, trans: bool) -> list[UOp]:
  """Two neighbouring right operands, four 8x8 matrices."""
  pair = s.buffer(2, 4, dtype=dtype)
  loaded = pair.after(ins.ldmatrix(CUDA, pair[0, 0], tile.at(row, chunk), trans=trans))
  return [loaded[0], loaded[1]]


def multiply_qk(s: Scope, dtype: DType, q_frags: list[list[UOp]], k_tile: Panels, lane: UOp) -> list[list[UOp]]:
  """S = Q K^T: for each tile of queries, accumulator tiles of 8 keys."""
  zero = UOp.const((0.0,) * 4, dtypes.float)
  scores = [[zero] * (k_tile.rows // COLUMNS) for _ in q_frags]
  for step in range(len(q_frags[0])):
    for n in range(0, len(scores[0]), 2):
      row, chunk = n * COLUMNS + lane // ROWS * 8 + lane % 8, 2 * step + lane // 8 % 2
      for j, k_frag in enumerate(right_operands(s, dtype, k_tile, row, chunk, trans=False)):
        for tile, q_frag in zip(scores, q_frags, strict=True):
          tile[n + j] = UOp.wmma(q_frag[step], k_frag, tile[n + j], *MMA)
  return scores


def as_operand(p: list[list[UOp]], dtype: DType) -> list[UOp]:
  """P of 16 rows as left operands, one for each step of 16 keys: elements of row g and of row g + 8 in turn."""
  return [
    UOp.stack(*[p[half][i + 2 * part + e].cast(dtype) for part in range(2) for half in range(HALVES) for e in range(2)])
    for i in range(0, len(p[0]), 4)
  ]


def multiply_pv(
  s: Scope, dtype: DType, p_frags: list[list[UOp]], v_tile: Panels, acc: UOp, alphas: list[list[UOp]], lane: UOp
) -> list[list[UOp]]:
  """O = O alpha + P V: for each tile of queries, accumulator tiles of 8 columns."""
  m_tiles, d_tiles, _ = sizes(acc)
  out = [
    [UOp.stack(*[acc[i, d, e].load() * alphas[i][e // 2] for e in range(4)]) for d in range(d_tiles)]
    for i in range(m_tiles)
  ]
  for step in range(len(p_frags[0])):
    for d in range(0, d_tiles, 2):
      row, chunk = step * STEP + lane % ROWS, d + lane // ROWS
      for j, v_frag in enumerate(right_operands(s, dtype, v_tile, row, chunk, trans=True)):
        for tile, p_frag in zip(out, p_frags, strict=True):
          tile[d + j] = UOp.wmma(p_frag[step], v_frag, tile[d + j], *MMA)
  return out
