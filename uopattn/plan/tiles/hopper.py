"""Tiles of the kernels with `wgmma`: those that were the fastest on an H200 or H100, where they fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.gradient_mainloop import SLICE, WARPGROUPS
from uopattn.dsl.rules.bias import BiasWork, IndexedBy
from uopattn.dsl.schedule import DTYPES_16, LIGHT, Problem
from uopattn.dsl.target import Target
from uopattn.kernels.cuda_bias_backward import streams_queries
from uopattn.kernels.hopper_backward import Tiles as Backward
from uopattn.kernels.hopper_bias_backward import Tiles as BiasBackward
from uopattn.kernels.hopper_float32_forward import MOST
from uopattn.kernels.hopper_float32_forward import Tiles as Float32
from uopattn.kernels.hopper_forward import Tiles as Forward
from uopattn.kernels.hopper_forward import largest_head, serves
from uopattn.kernels.hopper_fused_backward import Tiles as Fused
from uopattn.kernels.hopper_fused_backward import slices
from uopattn.kernels.hopper_latent_forward import Tiles as Latent
from uopattn.kernels.hopper_wide_forward import MOST_COLUMNS
from uopattn.kernels.hopper_wide_forward import Tiles as Wide
from uopattn.plan.tiles.bias import with_splits

T = TypeVar("T", Forward, Float32)


class Measured(NamedTuple):
  """What is known of tiles: how fast they are for rows of `LENGTH` queries and keys (H200, H=32, float16).

  Attributes:
    tiles: block sizes, of a GPU with any number of multiprocessors.
    resident: workgroups per multiprocessor at once.
    speed: TFLOP/s, divided by the shares of rows and of residency in use.
    ends: the cost of a work tile's start and end, as the number of keys that could be processed in that time. It
      follows from the speed at N=512.
  """

  tiles: Forward
  resident: int
  speed: float
  ends: float

  def promise(self, problem: Problem, target: Target) -> float:
    """The predicted speed.

    It is that measured, times the shares of rows and of residency in use, times the share of time that the start and
    the end of workgroups leave.
    """
    p, block_m = problem, self.tiles.block_m
    blocks, concurrent = ceildiv(p.M, block_m), target.multiprocessors * self.resident
    rows, waves = p.M / (blocks * block_m), p.heads * blocks / round_up(p.heads * blocks, concurrent)
    keys, measured = (p.N / 2, LENGTH / 2) if p.is_causal else (p.N, LENGTH)  # a causal mask skips about half the tiles
    return self.speed * rows * waves * (1 + self.ends / measured) / (1 + self.ends / keys)


LENGTH = 4096
# By the largest head size, and whether causal; 2026-11-23, those of 80 keys and in registers 2026-11-26, those of 192
# without a mask 2026-11-28 (H100, bfloat16). Without a producer, `ends` above head size 128 is that of 128. Causal 256
# with a producer is from N=512 and 2048. All were timed before most tiles did without maxima (2026-11-29). Since then
# queries in registers are the faster for 128, causal; the speed is that of queries in shared memory.
MEASURED = {
  (64, False): (
    Measured(Forward(3, 128, 2, producer=True, persistent=True, q_stages=2), 1, 501, 112),
    Measured(Forward(2, 128, 3, producer=True, persistent=True, q_stages=2), 1, 444, 117),
    Measured(Forward(3, 128, 3), 1, 464, 290),
    Measured(Forward(1, 128, 2), 3, 421, 174),
    Measured(Forward(1, 64, 2), 4, 421, 174),
  ),
  (64, True): (
    Measured(Forward(3, 128, 2, producer=True, persistent=True, q_stages=2), 1, 482, 221),
    Measured(Forward(2, 128, 3, producer=True, persistent=True, q_stages=2), 1, 409, 213),
    Measured(Forward(1, 128, 2), 3, 366, 236),
    Measured(Forward(1, 64, 2), 4, 369, 236),
  ),
  (128, False): (
    Measured(Forward(2, 128, 2, producer=True, persistent=True, q_stages=2, in_registers=True), 1, 625, 139),
    Measured(Forward(2, 128, 3), 1, 541, 231),
    Measured(Forward(1, 64, 2), 2, 447, 277),
  ),
  (128, True): (
    Measured(Forward(2, 128, 2, producer=True, persistent=True, in_registers=True), 1, 586, 283),
    Measured(Forward(2, 128, 3), 1, 504, 367),
    Measured(Forward(1, 64, 2), 2, 415, 440),
  ),
  (192, False): (
    Measured(Forward(2, 96, 2, producer=True, persistent=True), 1, 690, 242),
    Measured(Forward(2, 64, 2, producer=True, persistent=True), 1, 665, 213),
    Measured(Forward(2, 96, 2), 1, 542, 231),
  ),
  (192, True): (
    Measured(Forward(2, 96, 2, producer=True, persistent=True), 1, 586, 304),
    Measured(Forward(2, 64, 2, producer=True, persistent=True), 1, 565, 222),
    Measured(Forward(2, 96, 2), 1, 491, 367),
  ),
  (256, False): (
    Measured(Forward(2, 80, 2, producer=True, persistent=True), 1, 703, 153),
    Measured(Forward(2, 64, 2, producer=True, persistent=True), 1, 630, 153),
    Measured(Forward(2, 64, 2), 1, 527, 231),
    Measured(Forward(1, 64, 2), 1, 419, 231),
  ),
  (256, True): (
    Measured(Forward(2, 64, 2, producer=True, persistent=True), 1, 585, 209),
    Measured(Forward(2, 64, 2), 1, 491, 271),
    Measured(Forward(1, 64, 2), 1, 347, 367),
  ),
}

# In 8 bits. `ends` are those of float16, but for 128, causal, where they rank the tiles as they were timed (H100,
# 2026-11-25): 3 stages are 1.02 times as fast as 2 up to N=2048, and 2 stages 1.03 times as fast as 3 from N=4096 on.
EIGHT = Forward(2, 128, 3, producer=True, persistent=True, step=32)
EIGHT_OF_64 = Forward(3, 128, 2, producer=True, persistent=True, step=32)
MEASURED_8 = {
  (64, False): (Measured(EIGHT_OF_64, 1, 605, 112), Measured(EIGHT, 1, 531, 117)),
  (64, True): (Measured(EIGHT, 1, 499, 221), Measured(EIGHT_OF_64, 1, 499, 277)),
  (128, False): (Measured(replace(EIGHT, stages=2), 1, 847, 139), Measured(EIGHT, 1, 840, 139)),
  (128, True): (Measured(replace(EIGHT, stages=2), 1, 758, 283), Measured(EIGHT, 1, 733, 140)),
}
SIZES = ((64, 2), (64, 1), (32, 2), (32, 1))  # block_n and stages of head sizes above 256, the best first
SERVED = LIGHT | {"kv_lengths"}
OTHER_BYTES = 1024  # of shared memory: barriers and tensor maps
# Of float32, by the largest head size, the best first; those of one warpgroup have not been timed.
FLOAT32 = {
  64: (Float32(2, 64, 3), Float32(2, 96, 2), Float32(3, 64, 2), Float32(1, 64, 2)),
  128: (Float32(2, 64, 1), Float32(2, 32, 2), Float32(1, 64, 1)),
}
# Of gradients in two passes: limit of `Tiles.registers`, of 255 registers per lane, as P, dS, addresses and temporaries
# need the rest; warpgroups, block and stages of dQ, and of dK and dV, for head sizes up to 64 and above.
BACKWARD_LIMIT = 224
BACKWARD = (((2, 64, 2), (2, 128, 2)), ((1, 64, 3), (2, 64, 2)))
FUSED_LIMIT = 192  # of `Tiles.registers`
# Of biases: warpgroups, block and stages for head sizes up to 64 and above, the fastest (H100, 2026-11-27). By distance
# the block has as many keys as queries.
BIAS = (((1, 128, 2), (2, 64, 2)), ((2, 128, 2), (1, 64, 3)))
# Of gradients in one pass: features with which blocks of keys from the first one on add to dQ of a query, one by one.
ONE_PASS = LIGHT | {"attn_mask", "score_mod", "mask_mod", "softcap", "dropout_p"}


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield all tiles whose speed is known for such head sizes, those of the highest predicted speed first.

  Raises:
    ValueError: another architecture; head sizes that are not multiples of 8, or too large.
  """
  Dk, Dv = problem.Dk, problem.Dv
  if not serves(problem, target):
    chunk, most = 16 // problem.dtype.itemsize, largest_head(problem.dtype)
    only = "; in 8 bits only is_causal, window, q_start, sinks and scales, and rows that start at multiples of 16 bytes"
    raise ValueError(
      f"{target.arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of {chunk} up "
      f"to {most}{only if chunk == 16 else ''}"
    )
  known = MEASURED if problem.dtype in DTYPES_16 else MEASURED_8
  size = next(size for size, _ in known if max(Dk, Dv) <= size)
  producers = problem.light_on_registers and problem.fits_tensor_maps
  allowed = [x for x in known[size, problem.is_causal] if producers or not x.tiles.producer]
  for best in sorted(allowed, key=lambda x: x.promise(problem, target), reverse=True):
    tiles = replace(_no_larger(best.tiles, problem, best.tiles.step), multiprocessors=target.multiprocessors)
    yield _storing_by_tma(tiles, problem, target) if tiles.producer else tiles


def _storing_by_tma(tiles: Forward, problem: Problem, target: Target) -> Forward:
  """The tiles with `tma_store`, if there is shared memory for O."""
  storing = replace(tiles, tma_store=True)
  return storing if storing.shared_bytes(problem.Dk, problem.Dv) + OTHER_BYTES <= target.lds else tiles


def wide_forward(problem: Problem, target: Target) -> Iterator[Wide]:
  """Yield all tiles that may be the fastest for such head sizes.

  Raises:
    ValueError: another architecture; head sizes or features that it does not serve; rows that tensor maps cannot
      describe.
  """
  arch, Dk, Dv = target.arch, problem.Dk, problem.Dv
  check_measured(problem)
  if arch != "sm_90" or Dv > MOST_COLUMNS or not problem.fits_tensor_maps:
    raise ValueError(
      f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with values of up to {MOST_COLUMNS} columns, and rows "
      "that start at multiples of 16 bytes"
    )
  tiles = (Wide(*x) for x in SIZES)
  fitting = (x for x in tiles if x.shared_bytes(Dk, Dv) + OTHER_BYTES <= target.lds)
  first = next(fitting, None)
  if first is None:
    raise ValueError(f"head sizes {Dk} and {Dv}: too large for the {target.lds} bytes of shared memory")
  yield first
  yield from fitting


def latent_forward(problem: Problem, target: Target) -> Iterator[Latent]:
  """Yield the tiles, of which there is one choice.

  Raises:
    ValueError: another architecture; V is not in K; head sizes or features that it does not serve; rows that tensor
      maps cannot describe.
  """
  arch, Dk, Dv, tiles = target.arch, problem.Dk, problem.Dv, Latent()
  check_measured(problem)
  if arch != "sm_90" or not problem.values_in_keys or Dv > MOST_COLUMNS or not problem.fits_tensor_maps:
    raise ValueError(
      f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with values that are the first columns of the keys, up to "
      f"{MOST_COLUMNS}, and rows that start at multiples of 16 bytes"
    )
  if Dk <= (columns := tiles.columns(Dv)):
    raise ValueError(f"head size {Dk} of the keys: must be more than the {columns} columns of a warpgroup")
  if (needed := tiles.shared_bytes(Dk, Dv) + OTHER_BYTES) > target.lds:
    raise ValueError(f"head sizes {Dk} and {Dv}: need {needed} of {target.lds} bytes of shared memory")
  yield tiles


def check_measured(problem: Problem) -> None:
  """Raise ValueError if a problem of large head sizes has features with which no tiles were measured."""
  if not SERVED.issuperset(problem.features):
    raise ValueError(
      "supports only is_causal, window, q_start, kv_lengths and sinks; tiles for other features have not been measured"
    )


def float32_forward(problem: Problem, target: Target) -> Iterator[Float32]:
  """Yield all tiles that may be the fastest for such head sizes.

  Raises:
    ValueError: another architecture; head sizes that are too large; features for which there are too few registers.
  """
  arch, Dk, Dv = target.arch, problem.Dk, problem.Dv
  if arch != "sm_90" or max(Dk, Dv) > MOST:
    raise ValueError(f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes up to {MOST}")
  if not problem.light_on_registers:
    raise ValueError("supports only is_causal, window, q_start and sinks; others need too many registers")
  for best in FLOAT32[min(x for x in FLOAT32 if max(Dk, Dv) <= x)]:
    yield _no_larger(best, problem, wgmma.K)


def _no_larger(tiles: T, problem: Problem, step: int) -> T:
  """Return tiles with no more warpgroups, and keys in steps of `step`, than a problem has queries and keys for."""
  warpgroups, block_n = ceildiv(problem.M, wgmma.M), round_up(problem.N, step)
  return replace(tiles, warpgroups=min(tiles.warpgroups, warpgroups), block_n=min(tiles.block_n, block_n))


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles for the kernel of `gradients`, "dq" or "dk_dv"; then those of other warpgroups, blocks and stages.

  Raises:
    ValueError: another architecture; head sizes that are not multiples of 8, or too large.
  """
  p, arch, Dk, Dv, of_keys = problem, target.arch, problem.Dk, problem.Dv, gradients != "dq"
  if arch != "sm_90" or Dk % 8 or Dv % 8:
    raise ValueError(f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of 8")
  rows, others = (p.N, p.M) if of_keys else (p.M, p.N)

  def make(warpgroups: int, block: int, stages: int) -> Backward:
    return Backward(min(warpgroups, ceildiv(rows, wgmma.M)), min(block, round_up(others, wgmma.K)), stages)

  def fits(x: Backward) -> bool:
    return x.registers(Dk, Dv, of_keys) <= BACKWARD_LIMIT and x.shared_bytes(Dk, Dv) <= target.lds

  fastest = make(*BACKWARD[of_keys][max(Dk, Dv) > 64])
  smallest = replace(fastest, warpgroups=1)
  first = next(filter(fits, (fastest, smallest)), None)
  if first is None:
    registers, shared = smallest.registers(Dk, Dv, of_keys), smallest.shared_bytes(Dk, Dv)
    raise ValueError(
      f"head sizes {Dk} and {Dv}: {smallest} needs {registers} registers a lane, of {BACKWARD_LIMIT}, and {shared} "
      f"bytes of shared memory, of {target.lds}"
    )
  yield first
  others_to_try = ((2, 64, 2), (1, 64, 3), (2, 128, 2), (1, 64, 2), (1, 128, 2), (2, 64, 3))
  yield from filter(fits, (make(*x) for x in others_to_try))


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield the tiles, of which there is one choice.

  Raises:
    ValueError: another architecture; head sizes that are not multiples of 8, or too large; a bias whose items do not
      have one tile of keys in each of several trips.
  """
  arch, Dk, Dv, bias = target.arch, problem.Dk, problem.Dv, problem.bias
  assert bias is not None
  if arch != "sm_90" or Dk % 8 or Dv % 8:
    raise ValueError(f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of 8")
  loop = BIAS[bias.indexed_by is IndexedBy.DISTANCES][max(Dk, Dv) > 64]
  tiles = with_splits(BiasBackward, Backward(*loop), problem, target)
  if not streams_queries(BiasWork.of(problem, tiles)):
    raise ValueError(f"{bias}: elements must be shared by heads or blocks of queries that have a tile of keys each")
  if (needed := tiles.shared_bytes(Dk, Dv)) > target.lds:
    raise ValueError(f"head sizes {Dk} and {Dv}: need {needed} of {target.lds} bytes of shared memory")
  yield tiles


def fused_backward(problem: Problem, target: Target) -> Iterator[Fused]:
  """Yield tiles for all kernels of the pass, then those for another order of keys, and for other stages.

  Raises:
    ValueError: another architecture; head sizes that are not multiples of 8, or too large; features for which there are
      too few registers.
  """
  arch, Dk, Dv = target.arch, problem.Dk, problem.Dv
  if arch != "sm_90" or Dk % 8 or Dv % 8:
    raise ValueError(f"{arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of 8")
  if others := [x for x in problem.features if x not in ONE_PASS]:
    raise ValueError(f"{', '.join(others)}: not supported, because some blocks of keys would add nothing to dQ")
  if not problem.fits_tensor_maps:
    raise ValueError("q, k and v: must have rows that start at multiples of 16 bytes")
  if bounded := [x for x in problem.masks if x.has_first]:
    raise ValueError(f"{bounded[0]}: must have no left bound")
  best = Fused.of(problem).scheduled(problem, target.multiprocessors)
  fits = best.registers(Dk, Dv) <= FUSED_LIMIT and best.shared_bytes(Dk, Dv) <= target.lds
  if slices(Dk) > WARPGROUPS or not fits:
    most = WARPGROUPS * SLICE
    raise ValueError(
      f"head sizes {Dk} and {Dv}: that of keys must be at most {most}, and all sums must fit in registers"
    )
  yield best
  first_keys = replace(best, section=Fused.of(problem).section, descending=0)
  other = first_keys if best.descending else best.from_the_last_keys(problem)
  if other != best:
    yield other
  for stages in (1, 3):
    tiles = replace(best, stages=stages)
    if tiles.shared_bytes(Dk, Dv) <= target.lds:
      yield tiles
