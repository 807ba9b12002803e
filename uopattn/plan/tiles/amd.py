"""Tiles of AMD's kernels: as many queries per wave, and keys per tile, as registers and LDS allow by count.

Where no tile fits the registers, it is the one that needs the fewest, and spills; kernels/README.md says how much.
"""

from collections.abc import Iterator
from dataclasses import replace

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.amd.fragments import MMA_SIZE, Fragments
from uopattn.dsl.rules.bias import IndexedBy
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.kernels.amd_backward import Tiles as Backward
from uopattn.kernels.amd_bias_backward import Tiles as BiasBackward
from uopattn.kernels.amd_forward import Tiles as Forward
from uopattn.plan.tiles.bias import with_splits


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield the tiles with as many queries per wave, then as many keys, as fit.

  Then tiles with other numbers of waves, queries and keys follow.

  Raises:
    ValueError: the architecture is unknown, or the head size is too large for LDS even with the smallest tile.
  """
  M, Dk, Dv = problem.M, problem.Dk, problem.Dv
  best = _largest_forward(problem, target)
  f = best.fragments
  yield best

  least, most = Forward.least(f), 220 if f.lanes == 32 else 440  # registers, of 256 and 512
  waves = max(min(8, ceildiv(M, MMA_SIZE)), best.waves)
  others = [replace(best, block_n=n) for n in (best.block_n // 2, 2 * best.block_n) if n and n % least == 0]
  others += [replace(best, waves=w, m_tiles=m) for m in (1, 2) for w in (2, 4, 8) if m * w <= waves]
  for x in others:
    if x.registers(Dk, Dv) <= most and x.lds_bytes(Dk, Dv) <= target.lds:
      yield x


def _largest_forward(problem: Problem, target: Target) -> Forward:
  """The first tiles that fit, with three waves per SIMD if there are any; else those that use the fewest registers.

  Raises:
    ValueError: as `forward`.
  """
  M, N, Dk, Dv, bits = problem.M, problem.N, problem.Dk, problem.Dv, 8 * problem.dtype.itemsize
  f = Fragments.of(target.arch, bits)
  least, waves = Forward.least(f), ceildiv(M, MMA_SIZE)
  # The loop over masked tiles needs many registers then. With kv_lengths, LLVM spills if tiles have fewer keys.
  masked = bool(problem.masks) or "attn_mask" in problem.features
  masked = masked and "kv_lengths" not in problem.features
  wanted: tuple[int, ...]
  budget = 200 if f.lanes == 32 else 300  # of 256 and 512: addresses and temporaries need the rest
  wanted, in_turn = (64, 32, 16), (4, 8)
  if bits == 8:
    wanted = (least,)
    if f.lanes == 64:  # eight waves share a large tile; addresses and temporaries take less of their registers
      budget, in_turn = 360, (8, 4)
  if masked and f.lanes == 32 and not f.repeated:  # RDNA4: LLVM spills the masked loop's values in the full loop
    budget, wanted = 170, (64, 48, 32, 16)
  if f.terms > 1:  # the loop over masked tiles spills otherwise
    budget, wanted = (190, (16,)) if f.repeated else (140, wanted)
  elif f.paced(Dk) or f.paced(Dv):  # gfx1100 spills with more; eight waves stage less each
    budget, in_turn = 184, (8, 4)
  sizes_n = dict.fromkeys(min(n, round_up(N, least)) for n in wanted if n % least == 0)
  # With terms each tile of queries is split for each tile of keys, which more keys save, and more queries do not.
  two = M // MMA_SIZE if f.terms == 1 else 0
  shapes = [(w, 2, n) for n in sizes_n for w in in_turn if 2 * w <= two]
  shapes += [(min(w, waves), 1, n) for n in sizes_n for w in in_turn]
  candidates = [Forward(target.arch, *x, bits) for x in shapes]

  def resident_waves(x: Forward) -> int:
    """Waves per SIMD, as limited by LDS: two SIMDs on RDNA, and four on CDNA, share it.

    Of gfx950's 160 KiB, smaller tiles count on 64 KiB: then as many waves have registers.
    """
    return max(1, (64 << 10) // x.lds_bytes(Dk, Dv)) * x.waves // (2 if f.lanes == 32 else 4)

  def used(x: Forward) -> float:
    """The share of the budget that tiles count. With eight waves a CDNA SIMD has two, which share its registers."""
    return x.registers(Dk, Dv) / (budget // 2 if f.lanes == 64 and x.waves > 4 else budget)

  check_lds(min(x.lds_bytes(Dk, Dv) for x in candidates), problem, target)
  in_lds = [x for x in candidates if x.lds_bytes(Dk, Dv) <= target.lds]
  for enough in (3, 1):  # waves per SIMD, so that one computes while another waits
    for tiles in in_lds:
      if used(tiles) <= 1 and resident_waves(tiles) >= enough:
        return tiles
  return min(in_lds, key=used)


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles for a kernel (see `Tiles.gradients`): the largest that fit first, else those with the fewest registers.

  Raises:
    ValueError: the architecture is unknown, or the head size is too large for LDS even with the smallest tile, or for
      the registers, if they are to hold both dK and dV, or are split into terms.
  """
  p, Dk, Dv, bits = problem, problem.Dk, problem.Dv, 8 * problem.dtype.itemsize
  f = Fragments.of(target.arch, bits)
  registers = _registers(f)
  if gradients == "dq" and f.terms == 1 and f.paced(max(Dk, Dv)):
    registers = 190  # gfx1100 spills with more
  rows, others = (p.N, p.M) if gradients != "dq" else (p.M, p.N)
  least, waves = Backward.least(f), min(4, ceildiv(rows, MMA_SIZE))
  row_tiles = 1 if f.lanes == 32 or rows <= waves * MMA_SIZE else 2  # RDNA has registers for only one
  blocks = [block for block in (32, 16) if block % least == 0 and block < others + least] or [least]
  sizes = [(n, block) for n in sorted({row_tiles, 1}, reverse=True) for block in blocks]
  candidates = [Backward(target.arch, gradients, waves, *x, bits) for x in sizes]

  def fits(x: Backward, most: int = registers) -> bool:
    return x.registers(Dk, Dv) <= most and x.lds_bytes(Dk, Dv) <= target.lds

  best = next(filter(fits, candidates), None)
  if best is None:
    best = min(candidates, key=lambda x: x.registers(Dk, Dv))
    if f.terms > 1 or gradients == "dk_dv":
      check_registers(best.registers(Dk, Dv), registers if f.terms > 1 else _registers_of_both(f), p)
    check_lds(best.lds_bytes(Dk, Dv), p, target)
  yield best

  most = max(registers, best.registers(Dk, Dv))
  shapes = [(best.waves, best.row_tiles, n) for n in (best.block // 2, 2 * best.block)]
  shapes += [(n, best.row_tiles, best.block) for n in (8, 2)] + [(best.waves, 3 - best.row_tiles, best.block)]
  for waves, row_tiles, block in shapes:
    has_rows = (waves - 1) * row_tiles * MMA_SIZE < rows
    if has_rows and block and block % least == 0:
      tiles = replace(best, waves=waves, row_tiles=row_tiles, block=block)
      if fits(tiles, most):
        yield tiles


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield the largest tiles that fit. Raises ValueError as `backward`."""
  p, bits = problem, 8 * problem.dtype.itemsize
  assert p.bias is not None
  f = Fragments.of(target.arch, bits)
  least, square = Backward.least(f), p.bias.indexed_by is IndexedBy.DISTANCES
  blocks = [n for n in (64, 32, 16) if n % least == 0 and (square or n < p.N + least)] or [least]
  for block in blocks:
    waves = block // MMA_SIZE if square else min(4, ceildiv(p.M, MMA_SIZE))
    loop = Backward(target.arch, "bias", waves, 1, block, bits)
    registers, lds = loop.registers(p.Dk, p.Dv), loop.lds_bytes(p.Dk, p.Dv)
    if registers <= _registers(f) and lds <= target.lds:
      yield with_splits(BiasBackward, loop, p, target)
      return
  check_lds(lds, p, target)
  check_registers(registers, _registers(f), p)


def _registers(f: Fragments) -> int:
  """Registers per lane that the tiles of a backward kernel may count, of 256 and 512."""
  return 224 if f.lanes == 32 else 340


def _registers_of_both(f: Fragments) -> int:
  """Registers per lane that one kernel for dK and dV may count; beyond them each has a kernel of its own.

  RDNA4 spills above 256, which are all that there are, CDNA above 340. RDNA3 spills before, as at a head size of 128,
  where 320 are counted: there one more product would take about as long as the spills, and only a card can decide.
  """
  return 320 if f.repeated else 256 if f.lanes == 32 else _registers(f)


def check_registers(needed: int, available: int, problem: Problem) -> None:
  """Raise ValueError if a tile's registers exceed those available."""
  if needed > available:
    size = max(problem.Dk, problem.Dv)
    raise ValueError(
      f"head size {size}: the smallest tile needs {needed} registers per lane; {available} are available"
    )


def check_lds(needed: int, problem: Problem, target: Target) -> None:
  """Raise ValueError if a tile's bytes exceed the LDS."""
  if needed > target.lds:
    size = max(problem.Dk, problem.Dv)
    raise ValueError(f"head size {size}: a tile needs {needed} bytes of LDS, the limit is {target.lds}")
