"""Gradients of biases on NVIDIA's tensor cores, sm_75 and newer: of an additive mask, or of what a score_mod reads.

A workgroup adds up dS of the scores that share a tile of elements of the bias, (block_m, block_n), in registers; see
`uopattn.dsl.gpu.bias_mainloop`. S and dP are computed as in `backward_q` of `cuda_backward`: each warp keeps queries,
and all warps stream keys through shared memory. That is two of the five products of a backward pass.

Spills of nvcc 13, in bytes: 8 in float32 at D=128 with a causal mask, where an item has all keys of its queries.
"""

from tinygrad import UOp

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.bias_mainloop import BiasMainloop, BiasTiles, Trips, zeros
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Schedule
from uopattn.kernels import cuda_backward
from uopattn.kernels.cuda_backward import WarpMma, over_keys


class Tiles(BiasTiles):
  """The block sizes of one kernel."""

  loop: cuda_backward.Tiles

  @property
  def tf32(self) -> bool:
    """Whether float32 is multiplied in tf32."""
    return self.loop.tf32


def backward_bias(
  dbias: UOp,
  q: UOp,
  k: UOp,
  v: UOp,
  do: UOp,
  lse: UOp,
  delta: UOp,
  first: UOp | None = None,
  *,
  work: BiasWork,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, float32, in `BiasWork.shape`.
    q, k, v, do, lse, delta: as for `uopattn.kernels.cuda_backward.backward_q`.
    first: (1,) int32, the first query whose gradients are wanted, a multiple of `Tiles.block_m`; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: as for `uopattn.kernels.cuda_backward.backward_q`.
  """
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  s, own = Scope(), tiles.loop
  trips = Trips.of(s, rules, work, own.warps, WARP, first)
  item, free = trips.item, [UOp.barrier(x) for x in trips.axes]  # memory is in use until all warps are done with a trip
  unit, streamed = WarpMma.make(s, trips.group, own, q.dtype, Dk, Dv)
  rows = trips.rows(unit)
  loop, ready = over_keys(BiasMainloop, s, unit, streamed, trips.rules, trips.key_range, q, k, v, do, lse, delta, *free)
  sums = loop.run(unit.stationary(ready), [zeros(s, rows, item.item)], ready, *trips.axes)
  name = f"attention_backward_bias_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  return item.kernel(name, trips.store(dbias, sums[0].acc, rows))


SCHEDULE = Schedule(
  "cuda_bias_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  tf32=True,
)
