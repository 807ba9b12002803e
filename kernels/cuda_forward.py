"""Forward attention on NVIDIA's matrix cores, sm_75 and newer: `mma.sync`, one warp to 16 `m_tiles` query rows.

FlashAttention-2 (Dao, 2023). Each warp keeps its queries and runs through the keys, a tile of `block_n` at a time:
    S = Q K^T           (16 m_tiles, block_n)
    m, l, P             in registers; the maximum joins the four lanes of a row; l stays apart until the end
    O = O alpha + P V   (16 m_tiles, Dv)   P is the second product's left operand as it is, in registers

Who holds what. Q, m, l, P and O are in registers, Q for the whole loop; `uopattn.dsl.quads` says which elements a lane
has. All warps share Q once, and tiles of K and V, `stages` of each, in shared memory (`uopattn.dsl.panels`): cp.async
fills one slot while another is worked on (sm_75 copies by way of registers), ldmatrix reads K as it is and V transposed
(`uopattn.dsl.mma`). See `Tiles.shared_bytes`.

In 8 bits P is in the inputs' type too: raised by a power of two, and l with it, so that it cancels; see `P_EXPONENTS`.

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
from uopattn.dsl.mma import PAIR, STEP_BYTES, Mma
from uopattn.dsl.panels import Panels
from uopattn.dsl.quads import COLUMNS, HALVES, QUAD, ROWS, columns, join, row_elements, row_of, store_row
from uopattn.dsl.softmax import mask_scores, online_softmax, split_factor

CUDA, TURING = "cuda", "sm_75"
WARP = 32
STEPS = {8: dtypes.uint, 16: dtypes.ushort, 32: dtypes.uchar}  # elements of a step: an integer of their size
# The first architecture with instructions for a type.
SINCE = {dtypes.half: 75, dtypes.bfloat16: 80, dtypes.float32: 80, dtypes.fp8e4m3: 89, dtypes.fp8e5m2: 89}
# P is in [0, 1]: in 8 bits it is multiplied by 2 to this power, nearly the type's largest number, to use its range.
P_EXPONENTS = {dtypes.fp8e4m3: 8, dtypes.fp8e5m2: 15}

Tile = list[UOp]  # an accumulator's elements in this lane


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warps: warps in a workgroup.
    m_tiles: tiles of 16 queries a warp.
    block_n: keys a tile.
    stages: slots for tiles of K and of V.
    step: elements in the 32 bytes along k of a step: 8 for float32, 16 for float16 and bfloat16, 32 for 8-bit types.
    turing: for sm_75, whose products have half as many steps of k, and which copies tiles by way of registers.
  """

  warps: int
  m_tiles: int
  block_n: int
  stages: int = 2
  step: int = 16
  turing: bool = False

  def __post_init__(self) -> None:
    if self.step not in STEPS:
      raise ValueError(f"Tiles.step={self.step}: must be one of {', '.join(map(str, STEPS))}")
    if self.block_n < 1 or self.block_n % max(self.step, PAIR):
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {max(self.step, PAIR)}")
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

  @property
  def family(self) -> str:
    """Of instructions, where sm_75 has not the same; see `uopattn.dsl.instructions`."""
    return TURING if self.turing else CUDA

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[Panels, Panels, Panels]:
    """Room for Q, K and V in shared memory."""
    Dk, Dv = round_up(Dk, self.step), round_up(Dv, PAIR)
    options = {"bits": STEPS[self.step], "family": self.family}
    return (
      Panels.make(s, self.block_m, Dk, 1, self.threads, **options),
      Panels.make(s, self.block_n, Dk, self.stages, self.threads, **options),
      Panels.make(s, self.block_n, Dv, self.stages, self.threads, **options),
    )

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory a workgroup."""
    return sum(x.bits.itemsize * x.slots * x.size for x in self.panels(Scope(), Dk, Dv))

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers a lane for Q, O and S."""
    return self.m_tiles * (ceildiv(Dk, self.step) * 4 + round_up(Dv, PAIR) // 2 + self.block_n // 2)

  @classmethod
  def choose(cls, arch: str, dtype: DType, M: int, N: int, Dk: int, Dv: int, limit: int) -> "Tiles":
    """Tiles for a problem.

    Args:
      arch: "sm_75" or newer; for bfloat16 "sm_80", for 8-bit types "sm_89".
      dtype: of q, k and v.
      limit: bytes of shared memory that a workgroup may have.

    Raises:
      ValueError: an older architecture; head sizes too large even for the smallest tile.
    """
    version, step = int(arch.removeprefix("sm_")), STEP_BYTES // dtype.itemsize
    if version < SINCE[dtype]:
      name = str(dtype).removeprefix("dtypes.")
      raise ValueError(f"{arch} has no mma.sync of this kernel's for {name}; sm_{SINCE[dtype]} and newer have")
    warps, keys = min(4, ceildiv(M, ROWS)), round_up(N, max(step, PAIR))
    # Copies by way of registers are waited for: tiles of 32 keys leave room for a second workgroup, at work meanwhile.
    turing = version < 80
    sizes = ((2, 32), (1, 32), (1, 16)) if turing else ((2, 64), (2, 32), (1, 64), (1, 32), (1, 16))
    candidates = [cls(warps, m, min(n, keys), step=step, turing=turing) for m, n in sizes if n >= step]
    for tiles in candidates:
      if tiles.m_tiles > 1 and tiles.block_m // 2 >= M:
        continue
      budget = LIMIT if tiles == candidates[-1] else BUDGET[step]
      if tiles.registers(Dk, Dv) <= budget and tiles.shared_bytes(Dk, Dv) <= limit:
        return tiles
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {tiles.registers(Dk, Dv)} registers a lane, of {LIMIT}, "
      f"and {tiles.shared_bytes(Dk, Dv)} bytes of shared memory, of {limit}"
    )


# Of 255 registers, what Q, O and S may take, by `Tiles.step`: P, addresses and temporaries need the rest, and in 8 bits
# more (on sm_90 the compiler spills from 144 on). The smallest tile has few of these, and may spill a little where the
# alternative is no kernel.
BUDGET, LIMIT = {8: 180, 16: 180, 32: 130}, 220


def forward(
  o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, scale: float, causal: bool, q_start: int, tiles: Tiles
) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float16, bfloat16, fp8e4m3, fp8e5m2, or float32, whose products are then in tf32.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    lse: (heads, M) float32, receives the natural logarithm of the sum of exponentials of each row.
    scale: factor on q.k.
    causal: key j is seen by query i iff j <= i + q_start.
    q_start: position of the first query; may be negative.
    tiles: block sizes.

  Raises:
    ValueError: the tiles are for elements of another size.
  """
  if tiles.step * q.dtype.itemsize != STEP_BYTES:
    raise ValueError(f"Tiles.step={tiles.step}: must be {STEP_BYTES // q.dtype.itemsize} for {q.dtype}")
  block = Block(q, k, v, scale, causal, q_start, tiles)
  whole, count = tile_counts(block.row, tiles.block_m, block.M, tiles.block_n, block.N, causal, q_start)
  state = block.begin()
  for first, trips, masked in ((UOp.const(0), whole, False), (whole, count - whole, True)):
    if trips.vmax > 0:  # tinygrad misplaces what stands in a loop of no trips
      state = block.attend(first, trips, masked, state)
  stores = block.finish(o, lse, state)
  name = "_".join(map(str, ("attention", block.heads, block.kv_heads, block.M, block.N, block.Dk, block.Dv)))
  # A tag keeps tinygrad from rearranging the axes.
  return (
    UOp.group(*stores)
    .end(block.warp, block.lane)
    .end(block.item)
    .sink(arg=KernelInfo(name=name + "_causal" * causal, opts_to_apply=()), tag=1)
  )


State = tuple[UOp, ...]  # O, m and l, as registers


class Block:
  """A workgroup's block of queries, on its way through the tiles of keys.

  Attributes:
    item, warp, lane: the axes: blocks of all heads, warps, lanes.
    row: the block's first query.
    rows: this lane's two of each tile of 16 queries.
    q_frags: Q as left operands, for each tile of queries one for each step along Dk; see `begin`.
  """

  q_frags: list[list[UOp]]

  def __init__(self, q: UOp, k: UOp, v: UOp, scale: float, causal: bool, q_start: int, tiles: Tiles):
    (self.heads, self.M, self.Dk), (self.kv_heads, self.N, self.Dv) = sizes(q), sizes(v)
    self.causal, self.q_start, self.tiles = causal, q_start, tiles
    blocks = ceildiv(self.M, tiles.block_m)
    self.s = s = Scope()
    self.mma = Mma(s, q.dtype, tiles.turing)
    self.item = s.axis(self.heads * blocks, AxisType.GLOBAL)
    self.lane, self.warp = s.axis(WARP, AxisType.WARP), s.axis(tiles.warps, AxisType.LOCAL)
    self.thread = self.warp * WARP + self.lane
    self.head, block = self.item // blocks, self.item % blocks
    self.kv_head = self.head // (self.heads // self.kv_heads)
    self.row = (blocks - 1 - block if causal else block) * tiles.block_m  # the blocks with the most tiles start first
    self.rows = [
      [self.row + (self.warp * tiles.m_tiles + i) * ROWS + row_of(self.lane, half) for half in range(HALVES)]
      for i in range(tiles.m_tiles)
    ]
    self.early, self.late = split_factor(scale)
    self.p_exponent = P_EXPONENTS.get(q.dtype, 0)
    self.acc = s.filled(0.0, tiles.m_tiles, round_up(self.Dv, PAIR) // COLUMNS, 4, after=(self.item,))
    self.m_i = s.filled(-inf, tiles.m_tiles, HALVES, after=(self.item,))
    self.l_i = s.filled(0.0, tiles.m_tiles, HALVES, after=(self.item,))  # of this lane's keys
    self.q_tile, self.k_tiles, self.v_tiles = tiles.panels(s, self.Dk, self.Dv)
    self.q_bits, self.k_bits, self.v_bits = (as_type(x, STEPS[tiles.step]) for x in (q, k, v))

  def start(self, n_tile: UOp, *after: UOp) -> UOp:
    """Starts copying a tile of K and of V, as one group."""
    copies = self.k_tiles.fill_tile(n_tile, self.k_bits, self.kv_head, self.N, self.Dk, self.thread, *after)
    copies += self.v_tiles.fill_tile(n_tile, self.v_bits, self.kv_head, self.N, self.Dv, self.thread, *after)
    return ins.cp_async_commit(self.tiles.family, *copies)

  def arrived(self, *after: UOp) -> UOp:
    """Waits until the oldest of the tiles under way is there, and all warps are done with the tile before it."""
    return UOp.barrier(ins.cp_async_wait(self.tiles.family, self.tiles.stages - 2, *after))

  def begin(self) -> State:
    """Q into registers, and the first tiles of keys under way."""
    q_rows = self.q_tile.fill_tile(self.row // self.tiles.block_m, self.q_bits, self.head, self.M, self.Dk, self.thread)
    started = tuple(q_rows)
    for i in range(self.tiles.stages - 1):
      started = (self.start(UOp.const(i), *started),)
    self.filled = self.arrived(*started)
    q_tile, first = self.q_tile.tile(UOp.const(0), self.filled), self.warp * self.tiles.m_tiles
    self.q_frags = [self.mma.load_left(q_tile, (first + i) * ROWS, self.lane) for i in range(self.tiles.m_tiles)]
    return self.acc, self.m_i, self.l_i

  def attend(self, first: UOp, trips: UOp, masked: bool, state: State) -> State:
    """The tiles of keys from `first` on."""
    trip = self.s.axis(trips, AxisType.REDUCE)
    n_tile = first + trip
    acc_old, m_old, l_old = (x.after(trip) for x in state)
    ready = self.arrived(trip, self.filled, *state)
    following = self.start(n_tile + self.tiles.stages - 1, ready)
    k_tile, v_tile = (x.tile(n_tile, ready, following) for x in (self.k_tiles, self.v_tiles))
    scores = multiply_qk(self.mma, self.q_frags, k_tile, self.lane)
    p_frags, alphas, updates = [], [], []
    for i in range(self.tiles.m_tiles):
      p, alpha, stores = self.softmax(i, scores[i], n_tile, masked, m_old, l_old)
      p_frags.append(self.mma.as_left(p))
      alphas.append(alpha)
      updates += stores
    out = multiply_pv(self.mma, p_frags, v_tile, acc_old, alphas, self.lane)
    updates += [self.acc[i, d].store(tile) for i, tiles in enumerate(out) for d, tile in enumerate(tiles)]
    end = UOp.group(*updates).end(trip)
    return tuple(x.after(end) for x in (self.acc, self.m_i, self.l_i))

  def softmax(
    self, i: int, scores: list[UOp], n_tile: UOp, masked: bool, m_old: UOp, l_old: UOp
  ) -> tuple[list[list[UOp]], list[UOp], list[UOp]]:
    """P and alpha of both of this lane's rows of query tile `i`, and the stores of m and l."""
    p, alphas, stores = [], [], []
    for half, row in enumerate(self.rows[i]):
      last = last_seen(row + self.q_start, self.N, self.causal) - n_tile * self.tiles.block_n - self.lane % QUAD * 2
      seen = mask_scores(row_elements(scores, half), columns(len(scores)), self.early, last if masked else None)
      p_row, m_new, l_new, alpha = online_softmax(
        CUDA, seen, self.late, m_old[i, half].load(), l_old[i, half].load(), join, self.p_exponent
      )
      p.append(p_row)
      alphas.append(alpha)
      stores += [self.m_i[i, half].store(m_new), self.l_i[i, half].store(l_new)]
    return p, alphas, stores

  def finish(self, o: UOp, lse: UOp | None, state: State) -> list[UOp]:
    """The stores of the output, and of the log-sum-exp, once no copy is under way: none may be when the kernel ends."""
    drained = ins.cp_async_wait(self.tiles.family, 0, *state)
    acc, m_i, l_i = (x.after(drained) for x in state)
    stores = []
    for i, rows in enumerate(self.rows):
      for half, row in enumerate(rows):
        m, l = m_i[i, half].load(), l_i[i, half].load()
        stores += store_row(o, lse, self.head, row, half, acc[i], m, l, self.lane, self.p_exponent, self.tiles.family)
    return stores


def multiply_qk(mma: Mma, q_frags: list[list[UOp]], k_tile: Panels, lane: UOp) -> list[list[UOp]]:
  """S = Q K^T: for each tile of queries, accumulator tiles of 8 keys."""
  zero = UOp.const((0.0,) * 4, dtypes.float)
  scores = [[zero] * (k_tile.rows // COLUMNS) for _ in q_frags]
  for step in range(len(q_frags[0])):
    for n in range(0, len(scores[0]), 2):
      for j, k_frag in enumerate(mma.load_right(k_tile, n * COLUMNS, step, lane)):
        for tile, q_frag in zip(scores, q_frags, strict=True):
          tile[n + j] = mma.multiply(q_frag[step], k_frag, tile[n + j])
  return scores


def multiply_pv(
  mma: Mma, p_frags: list[list[UOp]], v_tile: Panels, acc: UOp, alphas: list[list[UOp]], lane: UOp
) -> list[list[UOp]]:
  """O = O alpha + P V: for each tile of queries, accumulator tiles of 8 columns."""
  m_tiles, d_tiles, _ = sizes(acc)
  out = [
    [UOp.stack(*[acc[i, d, e].load() * alphas[i][e // 2] for e in range(4)]) for d in range(d_tiles)]
    for i in range(m_tiles)
  ]
  for step in range(len(p_frags[0])):
    for d in range(0, d_tiles, 2):
      for j, v_frag in enumerate(mma.load_right_transposed(v_tile, step, d * COLUMNS, lane)):
        for tile, p_frag in zip(out, p_frags, strict=True):
          tile[d + j] = mma.multiply(p_frag[step], v_frag, tile[d + j])
  return out
