"""Rounding dQ, which the workgroups of a pass for gradients add up in float32 (`uopattn.dsl.nvidia.gradient_mainloop`).

A kernel of its own may do it after the pass. Or warps of persistent workgroups that neither load nor compute do it
beside the pass, for each head as soon as all its blocks of keys have been added. It then takes hardly any time, and may
find dQ in the L2 cache. They may wait for any workgroup, since none of what others do waits for them.
"""

from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.gradient_mainloop import SLICE
from uopattn.dsl.nvidia.key_blocks import BLOCK, KeyBlock
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, WARP, Epilogue, row_of
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.tile_range import blurred
from uopattn.dsl.scope import Scope, clamp, sizes

AT_ONCE = 4  # loads of 16 bytes per lane, for which a producer's warp has registers


@dataclass(frozen=True)
class DQSums:
  """The sums for dQ, and where it is rounded to.

  Attributes:
    dq: (heads, M, Dk), receives dQ.
    dq_sum: (heads, tiles, slices, 4096) float32, the sums as accumulators lie in registers.
    semaphores: (heads, tiles) int32; 0 if nothing was added, because no query of the tile sees a key.
    scale: factor of the sums.
  """

  dq: UOp
  dq_sum: UOp
  semaphores: UOp
  scale: float

  @property
  def chunks(self) -> int:
    """Chunks of 8 columns of a tile."""
    return sizes(self.dq_sum)[2] * (SLICE // MMA_N)

  def round(self, s: Scope, tile: UOp, warp: UOp, lane: UOp, first: UOp | int, count: int, *after: UOp) -> list[UOp]:
    """Round, by one of four warps, its 16 rows of a tile; returns the stores.

    Args:
      tile: counted through all heads.
      first, count: the chunks of 8 columns.
    """
    n_tiles = sizes(self.semaphores)[1]
    added, sums = self.semaphores.base.after(*after)[tile].load().ne(0), self.dq_sum.base.after(*after)
    values = s.buffer(4 * count)
    stores = []
    for i in range(count):
      at = ((tile * self.chunks + first + i) * THREADS + warp * WARP + lane) * 4
      stores += [values.after(*after)[4 * i + e].store(added.where(sums[at + e].load(), 0.0)) for e in range(4)]
    row = tile % n_tiles * BLOCK + warp * MMA_M
    rows = [row + row_of(lane, half) for half in range(HALVES)]
    epilogue = Epilogue(self.dq, tile // n_tiles, lane, first=first * MMA_N)
    return epilogue.store_halves(rows, values.after(UOp.group(*stores)), self.scale)


@dataclass(frozen=True)
class RoundingBeside:
  """The rounding of dQ beside a pass of persistent workgroups.

  Attributes:
    sums: what is rounded.
    done: (kv_heads,) int32, 0 before: of each key head how many blocks have been added, each counted `parts` times.
    blocks: blocks of keys of a head.
    parts: workgroups per block that is shared. Each counts once.
  """

  sums: DQSums
  done: UOp
  blocks: int
  parts: int

  def count(self, block: KeyBlock, leads: UOp, *after: UOp) -> UOp:
    """Count a block, or a part of one, that has been added, by the lane that `leads`."""
    times = UOp.const(self.parts) if block.part is None else block.part.exists.where(UOp.const(1), self.parts)
    return CUDA.semaphore_add(self.done.base[block.head], times, leads, *after)

  def run(self, s: Scope, group: Workgroup, workgroups: int, of: range, after: UOp) -> UOp:
    """Round all of dQ, by the warps `of` each workgroup, its last ones."""
    heads, n_tiles = sizes(self.sums.semaphores)
    items, step = heads * n_tiles * WARPS, workgroups * len(of)
    once = s.axis(blurred((group.warp >= of[0]).cast(dtypes.weakint)), AxisType.REDUCE)
    turn = s.axis(ceildiv(items, step), AxisType.REDUCE)
    item = group.item * len(of) + clamp(group.warp - of[0], 0, len(of) - 1) + turn * step
    entry = CUDA.leave_loop(item >= items, after, once, turn)
    tile, warp = clamp(item // WARPS, 0, heads * n_tiles - 1), item % WARPS
    key_head = tile // n_tiles // (heads // sizes(self.done)[0])
    waited = CUDA.semaphore_wait(self.done.base[key_head], self.blocks * self.parts, group.lane.eq(0), entry)
    known = CUDA.read_later(UOp.const(0.0, dtypes.float), waited)  # to all lanes
    i = s.axis(self.sums.chunks // AT_ONCE, AxisType.REDUCE)
    stores = self.sums.round(s, tile, warp, group.lane, i * AT_ONCE, AT_ONCE, known, i)
    return UOp.group(*stores).end(i).end(turn).end(once)
