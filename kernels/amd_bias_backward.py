"""Gradients of biases on AMD's matrix cores (WMMA and MFMA): of an additive mask, or of what a score_mod reads.

A workgroup adds up dS of the scores that share a tile of elements of the bias, (block_m, block_n), in registers; see
`uopattn.dsl.gpu.bias_mainloop`. S and dP are computed as in `backward_q` of `amd_backward`, transposed: each wave keeps
queries, and all waves stream keys through LDS, in which no tile is needed transposed. That is two of the five products
of a backward pass.

Not measured: no AMD GPU at hand.
"""

from tinygrad import UOp

from uopattn.dsl import Scope
from uopattn.dsl.amd.products import Mma
from uopattn.dsl.gpu.bias_mainloop import BiasMainloop, BiasTiles, Trips, zeros
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Kernel, Schedule
from uopattn.kernels import amd_backward
from uopattn.kernels.amd_backward import WaveMma, over_keys


class Tiles(BiasTiles):
  """The block sizes of one kernel."""

  loop: amd_backward.Tiles


def backward_bias(
  dbias: UOp, inputs: BackwardInputs, first: UOp | None = None, *, work: BiasWork, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, in `BiasWork.shape`.
    inputs: as for `uopattn.kernels.amd_backward.backward_q`.
    first: (1,) int32, the first query whose gradients are wanted, a multiple of `Tiles.block_m`; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: as for `uopattn.kernels.amd_backward.backward_q`.
  """
  s, own = Scope(), tiles.loop
  f = own.fragments
  trips = Trips.of(s, rules, work, own.waves, f.lanes, first)
  unit = WaveMma(Mma(f, inputs.q.dtype, trips.item.lane), trips.group, own, {})
  loop, pipeline, stationary = over_keys(BiasMainloop, s, unit, trips.rules, trips.key_range, inputs)
  rows = trips.rows(unit)
  total = zeros(s, rows, trips.item.item)
  sums = loop.run(stationary, [total], pipeline.prologue(total.acc), *trips.axes)
  return trips.item.kernel(inputs.kernel_name(f"_bias_{own.arch}", rules), trips.store(dbias, sums[0].acc, rows))


SCHEDULE = Schedule(
  "amd_bias_backward",
  devices=("AMD",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
)
