"""Transposing tiles of 8-bit elements in NVIDIA's shared memory, for `wgmma`, whose 8-bit operands have k along rows.

A tile (keys, columns) becomes (columns, keys) with both orders changed, so that whole words move:
- Of 16 columns the even ones come first, then the odd ones: `uopattn.dsl.nvidia.mma_layout.Epilogue` expects
  accumulators in that order.
- Of 16 keys, byte 4 t + i is key 2 t + i % 2 + 8 (i // 2): what lane t of a quad has of P in two accumulator tiles.

A warp moves 32 keys of 16 columns at a time. ldmatrix.trans gives lane 4 g + t pairs of neighbouring columns, 2 g and
2 g + 1, of keys 2 t and 2 t + 1 of each 8; two byte permutations per pair of words separate the columns, and stmatrix
stores them. Neither has bank conflicts.

Source: FlashAttention-3 (Shah et al., 2024), section 3.3; PTX ISA, "ldmatrix", "stmatrix" and "prmt".
"""

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.tile_range import blurred
from uopattn.dsl.scope import Scope

KEYS, COLUMNS = 32, 16  # that a warp moves at a time


def transpose(s: Scope, source: SwizzledTiles, to: SwizzledTiles, warp: UOp, warps: int, lane: UOp, *after: UOp) -> UOp:
  """Transpose the tile of `source` that is in use to that of `to`, by `warps` warps together.

  Args:
    source: tiles of (keys, columns / 2) units of 16 bits.
    to: tiles of (columns, keys / 2) units.
    warp: index of this warp among them.
    after: what the reads and writes must wait for.
  """
  groups = source.rows // KEYS
  pieces, moved = groups * (to.rows // COLUMNS), UOp.group(*after)
  for i in range(ceildiv(pieces, warps)):
    piece = (warp + i * warps).simplify()
    if (i + 1) * warps <= pieces:
      moved = _move(s, source, to, piece // groups, piece % groups, lane, moved)
    else:  # not all warps have one
      there = s.axis(blurred((piece < pieces).cast(dtypes.weakint)), AxisType.REDUCE)
      moved = _move(s, source, to, piece // groups, piece % groups, lane, moved, there).end(there)
  return moved


def _move(s: Scope, source: SwizzledTiles, to: SwizzledTiles, columns: UOp, keys: UOp, lane: UOp, *after: UOp) -> UOp:
  """Move a piece: 16 columns of 32 keys."""
  words = s.buffer(4, dtype=dtypes.uint)
  address = source.after(*after).at(keys * KEYS + lane, columns)
  words = words.after(CUDA.ldmatrix(words[0], address, *after, trans=True))
  pairs = [(words[i].load(), words[i + 1].load()) for i in (0, 2)]
  packed = [bytes_of(*pair) for pair in pairs for bytes_of in (CUDA.even_bytes, CUDA.odd_bytes)]
  row, chunk = columns * COLUMNS + lane % 16, keys * 2 + lane // 16
  return CUDA.stmatrix(to.after(*after).at(row, chunk), *packed)
