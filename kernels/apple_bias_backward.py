"""Gradients of biases on Apple's GPUs (METAL): of an additive mask, or of what a score_mod reads.

A workgroup adds up dS of the scores that share a tile of elements of the bias, (block_m, block_n), in registers; see
`uopattn.dsl.gpu.bias_mainloop`. S and dP are computed as in `backward_q` of `apple_backward`: each simdgroup keeps
queries, and all simdgroups stream keys through threadgroup memory. That is two of the five products of a backward pass.

Not yet run on an Apple GPU: checked on the emulator.
"""

from tinygrad import UOp

from uopattn.dsl import Scope
from uopattn.dsl.apple.simdgroup import LANES, Simdgroup
from uopattn.dsl.gpu.bias_mainloop import BiasMainloop, BiasTiles, Trips, zeros
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Kernel, Schedule
from uopattn.kernels import apple_backward
from uopattn.kernels.apple_backward import SimdgroupRows, over_keys


class Tiles(BiasTiles):
  """The block sizes of one kernel."""

  loop: apple_backward.Tiles


def backward_bias(
  dbias: UOp, inputs: BackwardInputs, first: UOp | None = None, *, work: BiasWork, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, in `BiasWork.shape`.
    inputs: as for `uopattn.kernels.apple_backward.backward_q`.
    first: (1,) int32, the first query whose gradients are wanted, a multiple of `Tiles.block_m`; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  s = Scope()
  trips = Trips.of(s, rules, work, tiles.loop.warps, LANES, first)
  unit = SimdgroupRows(Simdgroup(trips.item.lane, inputs.q.dtype), trips.group, tiles.loop)
  rows = trips.rows(unit)
  total = zeros(s, rows, trips.item.item)
  loop, stationary = over_keys(BiasMainloop, s, unit, trips.rules, trips.key_range, inputs)
  sums = loop.run(stationary, [total], total.acc, *trips.axes)
  return trips.item.kernel(inputs.kernel_name("_bias", rules), trips.store(dbias, sums[0].acc, rows))


SCHEDULE = Schedule(
  "apple_bias_backward",
  devices=("METAL",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
)
