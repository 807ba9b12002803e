"""Tiles of the kernels with `mma.sync`: what registers and shared memory hold, and what keeps schedulers busy."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinygrad import dtypes
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.nvidia.mma import PAIR, STEP_BYTES, check_type
from uopattn.dsl.nvidia.mma_layout import MMA_M
from uopattn.dsl.nvidia.narrow import whole_blocks
from uopattn.dsl.rules.bias import BiasWork, IndexedBy
from uopattn.dsl.schedule import HEAD_SCALES, Problem
from uopattn.dsl.target import Target
from uopattn.kernels.cuda_backward import BITS
from uopattn.kernels.cuda_backward import Tiles as Backward
from uopattn.kernels.cuda_bias_backward import Tiles as BiasBackward
from uopattn.kernels.cuda_forward import Tiles as Forward
from uopattn.kernels.cuda_wide_backward import COLUMNS
from uopattn.kernels.cuda_wide_backward import Tiles as WideBackward
from uopattn.kernels.cuda_wide_forward import Tiles as Wide
from uopattn.plan.tiles.bias import with_splits

# Limits of `Tiles.registers`, of 255 per lane, as seen in compile reports: P, addresses and temporaries need the rest.
# With the smallest tile they need less, and it may spill a little, because the alternative is no kernel.
# Forward: with the queries in registers, by `Tiles.step` (in 8 bits P needs more; on sm_90 the compiler spills from 144
# on); with queries that are read, with and without a mask; and with the smallest tile.
BUDGET, READING_MASKED, READING, LIMIT = {8: 180, 16: 180, 32: 130}, 196, 216, 220
NARROW = 156  # where keys and values are widened in registers
WIDE_BUDGET = 200
# Backward: of dQ, and of dK and dV; of these on sm_75; with one sum, and stationary rows that are read for each tile;
# and with the smallest tile.
BACKWARD_BUDGET, BACKWARD_TURING, BACKWARD_READING, BACKWARD_LIMIT = (192, 224), 160, 140, 230
WIDE_SUMS = 128  # 32-bit registers per lane of the sums of `wide_backward`
WARPS = 4  # per workgroup, or twice as many if each multiprocessor gets a workgroup
BUSY = 8  # warps per multiprocessor, two for each of its schedulers: one multiplies while the other does its softmax
STREAMING = 64  # queries; up to here reading the keys takes the time, and more stages help instead of larger tiles
WIDE = (  # groups, slices, m_tiles and stages
  (2, 4, 2, 1),
  (4, 2, 1, 1),
  (1, 4, 2, 1),
  (2, 2, 1, 1),
  (1, 4, 1, 1),
  (1, 2, 1, 2),
  (1, 2, 1, 1),
)

# Of a bias: keys of a tile, whether queries stay in registers, and most warps.
BIAS = (64, True, 4), (32, True, 4), (64, False, 4), (32, False, 4), (16, False, 4), (16, False, 1)


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles for sm_75 or newer (bfloat16 and float32 need sm_80, 8-bit types sm_89).

  After the chosen ones: the others in order, and those with more stages and with other warps.

  Raises:
    ValueError: the architecture is older; the head sizes are too large even for the smallest tile.
  """
  check_type(problem.dtype, target.arch)
  M, Dk, Dv = problem.M, problem.Dk, problem.Dv
  in_order = [_narrow(x, problem) for x in _forward_in_order(problem, target)]
  best = _first_fitting(in_order, problem, target)
  yield best

  others = in_order + [replace(best, stages=n) for n in (2, 3, 4) if not best.turing]
  others += [replace(best, warps=n, narrow=0) for n in (8, 2)]
  for x in others:
    in_registers = x.registers(Dk, Dv) <= max(_budget(x, problem), best.registers(Dk, Dv))
    has_rows = (x.warps - 1) * x.m_tiles * MMA_M < M  # for each warp
    if in_registers and _shared_bytes(x, problem) <= target.lds and has_rows:
      yield x


def _narrow(x: Forward, problem: Problem) -> Forward:
  """The tiles with K and V as they are in memory, if these have 8 or 4 bits and one warp multiplies them in 16."""
  bits, alone = problem.stored.bitsize, x.warps == 1 and x.in_registers
  return replace(x, narrow=bits) if bits < 16 == x.step and alone and whole_blocks(problem.Dk, problem.Dv, bits) else x


def _shared_bytes(x: Forward, problem: Problem) -> int:
  """Shared memory of the tiles; of narrow ones if they are widened after all, as are rows that are no whole words."""
  return replace(x, narrow=0).shared_bytes(problem.Dk, problem.Dv)


def _first_fitting(in_order: Sequence[Forward], problem: Problem, target: Target) -> Forward:
  """The first of these tiles that fit and keep the GPU busy; if none do, the first that fit, or the last and smallest.

  Raises:
    ValueError: not even the smallest fit.
  """
  M, Dk, Dv = problem.M, problem.Dk, problem.Dv
  *candidates, smallest = in_order
  idle = None
  for x in candidates:
    if x.registers(Dk, Dv) > _budget(x, problem) or _shared_bytes(x, problem) > target.lds:
      continue
    if x.m_tiles > 1 and x.block_m // 2 >= M:  # half of it, or more, would have no queries
      continue
    if x.warps > WARPS and problem.heads * ceildiv(M, x.block_m) < target.multiprocessors:
      continue
    if M <= STREAMING or x.warps * x.resident(problem, target) >= BUSY:
      return x
    idle = idle or x
  if idle is not None:
    return idle
  registers, shared = smallest.registers(Dk, Dv), _shared_bytes(smallest, problem)
  if registers > LIMIT or shared > target.lds:
    raise _too_large(problem, registers, LIMIT, shared, target)
  return smallest


def _forward_in_order(problem: Problem, target: Target) -> list[Forward]:
  """Tiles for a problem, best first, whether or not they fit; the last one is the smallest that there is.

  Tiles whose queries stay in registers are best if two tiles of queries per warp do, as each read of K and V then
  serves two products. Next are those that read their queries, and last those with one tile of queries. Without a mask,
  reading the queries is better than tiles of only 32 keys.
  """
  step, turing = STEP_BYTES // problem.dtype.itemsize, int(target.arch.removeprefix("sm_")) < 80
  warps, keys = min(WARPS, ceildiv(problem.M, MMA_M)), round_up(problem.N, max(step, PAIR))

  if step == 8 and not problem.tf32:
    exact = ((warps, 64),) * (problem.M > STREAMING) + ((warps, 32), (warps, 16), (min(warps, 2), 16))
    return [Forward(w, 1, min(n, keys), 2, step, in_registers=False) for w, n in exact]

  def of(sizes: Sequence[tuple[int, int]]) -> list[Forward]:
    tf32 = step == 8
    return [Forward(warps, m, min(n, keys), step=step, turing=turing, tf32=tf32) for m, n in sizes if n >= step]

  if turing:  # it waits for its copies through registers; 32 keys leave room for a second workgroup, busy meanwhile
    return of(((2, 32), (1, 32), (1, 16)))
  two, one = of(((2, 64), (2, 32))), of(((1, 64), (1, 32), (1, 16)))
  if problem.M <= STREAMING:
    return [Forward(warps, 1, min(32, keys), 3, step, tf32=step == 8), *two, *one]
  if step != 16 or max(problem.Dk, problem.Dv) > 128 or not problem.light_on_registers:
    return [*two, *one]
  sizes = ((2 * WARPS, 64), (WARPS, 64), (WARPS, 48), (2 * WARPS, 48), (2 * WARPS, 32), (WARPS, 32))
  reading = [Forward(w, 2, min(n, keys), in_registers=False) for w, n in sizes]
  return [*two, *reading, *one] if _masked(problem, two[0].block_n) else [two[0], *reading, *two[1:], *one]


def _budget(tiles: Forward, problem: Problem) -> int:
  """The limit of `Tiles.registers` for a problem."""
  if tiles.in_registers:
    return NARROW if tiles.narrow else BUDGET[tiles.step]
  return READING_MASKED if _masked(problem, tiles.block_n) else READING


def _masked(problem: Problem, block_n: int) -> bool:
  """Whether any tile of `block_n` keys may need a mask."""
  return bool(problem.masks) or not set(problem.features).issubset(HEAD_SCALES) or problem.N % block_n > 0


def wide_forward(problem: Problem, target: Target) -> Iterator[Wide]:
  """Yield tiles for sm_75 or newer (bfloat16 and float32 need sm_80, 8-bit types sm_89), then with other stages.

  Many queries per workgroup come first, as each tile of keys is read for all of them; then many per warp.

  Raises:
    ValueError: the architecture is older; float32, but not in tf32; the head sizes are too large even for the smallest
      tile.
  """
  check_type(problem.dtype, target.arch)
  Dk, Dv, shared = problem.Dk, problem.Dv, problem.values_in_keys
  if problem.dtype == dtypes.float32 and not problem.tf32:
    raise ValueError(f"float32 with head sizes {Dk} and {Dv}: supported in tf32 only; set ALLOW_TF32=1")
  step, turing = STEP_BYTES // problem.dtype.itemsize, int(target.arch.removeprefix("sm_")) < 80
  few = ceildiv(problem.M, MMA_M)  # tiles of queries
  in_order = [
    Wide(groups, slices, m_tiles, slices * max(step, PAIR), stages + shared, step, turing, shared)
    for groups, slices, m_tiles, stages in WIDE
    if groups * m_tiles == 1 or groups * m_tiles < 2 * few
  ]

  def fits(x: Wide) -> bool:
    return x.registers(Dv) <= WIDE_BUDGET and x.shared_bytes(Dk, Dv) <= target.lds

  fitting = filter(fits, in_order)
  first = next(fitting, None)
  if first is None:
    x = min(in_order, key=lambda x: (x.shared_bytes(Dk, Dv), x.registers(Dv)))
    raise _too_large(problem, x.registers(Dv), WIDE_BUDGET, x.shared_bytes(Dk, Dv), target)
  yield first
  yield from fitting
  yield from filter(fits, (replace(x, stages=x.stages + 1) for x in in_order))


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles for sm_80 or newer, or in float16 for sm_75.

  After the chosen ones: more rows or longer tiles in registers, more warps, more stages.

  Args:
    gradients: of the kernel: "dq", "dk_dv", "dk" or "dv".

  Raises:
    ValueError: an older architecture; another dtype; head sizes too large even for the smallest tile.
  """
  p, of_keys, Dk, Dv = problem, gradients != "dq", problem.Dk, problem.Dv
  rows, others = (p.N, p.M) if of_keys else (p.M, p.N)
  sums, most = sum(Dv if x == "dv" else Dk for x in gradients.split("_")), round_up(others, PAIR)
  best = _first_backward(problem, target, gradients, sums)
  yield best

  sizes = [(2, 16, True), (1, 32, True), (1, 64, True), (2, 32, True)] if best.terms == 1 else []
  sizes += [(1, 64, False), (1, 32, False)]
  resized = [replace(best, row_tiles=m, block=min(n, most), in_registers=kept) for m, n, kept in sizes]
  for x in (*resized, replace(best, warps=8), replace(best, stages=3)):
    in_registers, has_rows = x.registers(Dk, Dv, sums) <= BACKWARD_BUDGET[of_keys], x.rows < rows + x.rows // x.warps
    if in_registers and x.shared_bytes(Dk, Dv) <= target.lds and has_rows:
      yield x


def _first_backward(problem: Problem, target: Target, gradients: str, sums: int) -> Backward:
  """The first tiles that fit, of those that have been fast; `sums` is the columns of all sums."""
  dtype, Dk, Dv, of_keys = problem.dtype, problem.Dk, problem.Dv, gradients != "dq"
  rows, others = (problem.N, problem.M) if of_keys else (problem.M, problem.N)
  step, turing = STEP_BYTES // dtype.itemsize, _check_backward(problem, target)
  warps, most = min(4, ceildiv(rows, MMA_M)), round_up(others, PAIR)
  if step == 8 and not problem.tf32:
    masked = bool(problem.masks or problem.features)
    wide = max(Dk, Dv) <= 64 and not (of_keys and masked)  # else ptxas spills, or fewer workgroups fit
    choices = (*([(warps, 32)] if wide else []), (warps, 16), (min(warps, 2), 16))
    candidates = [Backward(w, 1, min(n, most), in_registers=False, step=step) for w, n in choices]
  else:
    fast = ((2, 16, True),) if of_keys else ((2, 32, True), (1, 64, True))
    sizes = (*fast, (1, 32, True), (1, 32, False), (1, 16, False))
    if turing and of_keys:  # its copies go through registers: others spill
      sizes = (1, 64, True), (1, 16, False)
    candidates = [Backward(warps, m, min(n, most), 2, kept, step, problem.tf32, turing) for m, n, kept in sizes]
    candidates.append(replace(candidates[-1], warps=min(2, warps)))  # for shared memory
  for tiles in candidates:
    if tiles.row_tiles > 1 and tiles.rows // 2 >= rows:
      continue
    smallest = tiles.block == candidates[-1].block and not tiles.in_registers
    fast_budget = BACKWARD_TURING if turing and of_keys else BACKWARD_BUDGET[of_keys]
    budget = fast_budget if tiles.in_registers or gradients == "dk_dv" else BACKWARD_READING
    budget = BACKWARD_LIMIT if smallest else budget
    if (registers := tiles.registers(Dk, Dv, sums)) <= budget and tiles.shared_bytes(Dk, Dv) <= target.lds:
      return tiles
  raise _too_large(problem, registers, BACKWARD_LIMIT, tiles.shared_bytes(Dk, Dv), target)


def wide_backward(problem: Problem, target: Target, gradients: str) -> Iterator[WideBackward]:
  """Yield tiles for sm_80 or newer, or in float16 for sm_75, with any head sizes; then with other shapes and stages.

  Args:
    gradients: "scores", "dq", "dk" or "dv".

  Raises:
    ValueError: an older architecture; another dtype.
  """
  turing, step = _check_backward(problem, target), STEP_BYTES // problem.dtype.itemsize
  of_keys, exact = gradients in ("dk", "dv"), step == 8 and not problem.tf32
  rows, others = (problem.N, problem.M) if of_keys else (problem.M, problem.N)
  warps, two = min(4, ceildiv(rows, MMA_M)), 1 if exact or turing or rows <= 4 * MMA_M else 2
  block, width = min(64, round_up(others, COLUMNS)), 64 if exact or turing else 128
  options = {"in_registers": False, "step": step, "tf32": problem.tf32, "turing": turing}
  best = WideBackward(warps, two, block, 2, width=64 if gradients == "scores" else width, **options)
  changes: tuple[dict[str, int], ...] = ({}, {"stages": 3}, {"row_tiles": 3 - two}, {"warps": 8}, {"block": 32})
  for x in (replace(best, **x) for x in changes):
    if x.bytes_of(gradients) <= target.lds and x.sums(gradients) <= WIDE_SUMS:
      yield x


def _check_backward(problem: Problem, target: Target) -> bool:
  """Whether the architecture is sm_75. Raises ValueError if it has no backward kernels for the dtype."""
  arch, dtype = target.arch, problem.dtype
  number = int(arch.removeprefix("sm_"))
  turing = number == 75 and dtype == dtypes.half
  if (number < 80 and not turing) or STEP_BYTES // dtype.itemsize not in BITS:
    known = "must be sm_80 or newer, with 16 or 32 bits, or sm_75 with half"
    raise ValueError(f"{arch} with {str(dtype).removeprefix('dtypes.')}: {known}")
  return turing


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield tiles for sm_80 or newer, or in float16 for sm_75: the first that fit.

  Raises:
    ValueError: as for `backward`.
  """
  p, Dk, Dv, turing = problem, problem.Dk, problem.Dv, _check_backward(problem, target)
  assert p.bias is not None
  step, square = STEP_BYTES // p.dtype.itemsize, p.bias.indexed_by is IndexedBy.DISTANCES
  exact = step == 8 and not p.tf32
  for keys, kept, warps in BIAS:
    if exact and (kept or keys > 32):  # ptxas spills
      continue
    block = min(keys, round_up(p.N, PAIR))
    rows = keys // MMA_M if square else min(warps, ceildiv(p.M, MMA_M))
    loop = Backward(rows, 1, keys if square else block, 2, kept, step, p.tf32, turing)
    tiles = with_splits(BiasBackward, loop, p, target)
    registers, shared = loop.registers(Dk, Dv, loop.block), tiles.shared_bytes(BiasWork.of(p, tiles), Dk, Dv)
    if registers <= BACKWARD_BUDGET[0] and shared <= target.lds:
      yield tiles
      return
  raise _too_large(problem, registers, BACKWARD_BUDGET[0], shared, target)


def _too_large(problem: Problem, registers: int, limit: int, shared: int, target: Target) -> ValueError:
  """What the smallest tile needs of a lane's registers, and of shared memory."""
  return ValueError(
    f"head sizes {problem.Dk} and {problem.Dv}: the smallest tile needs {registers} registers a lane, of {limit}, and "
    f"{shared} bytes of shared memory, of {target.lds}"
  )
