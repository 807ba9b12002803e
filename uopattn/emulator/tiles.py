"""The tiles of `uopattn.dsl.instructions.amx`: each lane, a work item of a CPU kernel, has eight of its own."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from uopattn.dsl.instructions.amx import EXP2, LANES, PAIR, ROW_BYTES, ROWS, TILES

from . import alu
from .alu import without_denormals
from .errors import Misaligned, Unwritten
from .lanes import Run
from .memory import Pointer


@dataclass
class Tiles:
  """The tiles of all lanes.

  Attributes:
    configured: whether each lane has tiles, (lanes,).
    written: whether each tile has content, (lanes, tiles).
    content: (lanes, tiles, rows, bytes).
  """

  configured: np.ndarray
  written: np.ndarray
  content: np.ndarray

  @classmethod
  def of(cls, lanes: int) -> "Tiles":
    """Tiles that are not configured."""
    shape = lanes, TILES
    return cls(np.zeros(lanes, bool), np.zeros(shape, bool), np.zeros((*shape, ROWS, ROW_BYTES), np.uint8))


def config(run: Run, u: UOp) -> None:
  lanes = run.active()
  run.tiles.configured[lanes], run.tiles.written[lanes] = True, False


def release(run: Run, u: UOp) -> None:
  run.tiles.configured[run.active()] = False


def _lanes(run: Run, u: UOp, *read: int) -> np.ndarray:
  """Return the active lanes. Raises Unwritten unless they have tiles, and content in those that are read."""
  lanes = run.active()
  if run.check:
    if (bad := lanes[~run.tiles.configured[lanes]]).size:
      raise run.fail(Unwritten, u, "uses a tile without tile_config", bad)
    for tile in read:
      if (bad := lanes[~run.tiles.written[lanes, tile]]).size:
        raise run.fail(Unwritten, u, f"reads tile {tile}, which nothing has written", bad)
  return lanes


def _rows(run: Run, u: UOp, pointer: Pointer, stride: int, rows: int = ROWS) -> np.ndarray:
  """Return each lane's rows of 64 bytes, (lanes, rows, 64). Raises as a load of each row does."""
  count = ROW_BYTES // pointer.dtype.itemsize
  elements = np.empty((rows, count, run.shape.lanes), alu.storage(pointer.dtype))
  for i in range(rows):
    row = pointer.memory.load(u, pointer.index + _elements(run, u, pointer, i * stride), pointer.dtype, count)
    for element, x in zip(elements[i], row, strict=True):
      element[:] = x
  return np.ascontiguousarray(np.moveaxis(elements, 2, 0)).view(np.uint8)


def _store_rows(run: Run, u: UOp, pointer: Pointer, stride: int, content: np.ndarray) -> None:
  """Store (lanes, rows, 64) bytes. Raises as a store of each row does."""
  # A copy, as registers hold values that never change.
  values = np.array(content, order="C").view(alu.storage(pointer.dtype))
  for i in range(content.shape[1]):
    index = pointer.index + _elements(run, u, pointer, i * stride)
    pointer.memory.store(u, index, pointer.dtype, list(np.ascontiguousarray(values[:, i].T)))


def _elements(run: Run, u: UOp, pointer: Pointer, offset: int) -> int:
  elements, rest = divmod(offset, pointer.dtype.itemsize)
  if rest:
    raise run.fail(Misaligned, u, f"addresses a row {offset} bytes on, inside an element of {pointer.memory.name}")
  return elements


def zero(run: Run, u: UOp, tile: Any) -> None:
  lanes = _lanes(run, u)
  run.tiles.content[lanes, tile], run.tiles.written[lanes, tile] = 0, True


def load(run: Run, u: UOp, tile: Any, pointer: Pointer, stride: Any) -> None:
  lanes = _lanes(run, u)
  run.tiles.content[lanes, tile] = _rows(run, u, pointer, int(stride))[lanes]
  run.tiles.written[lanes, tile] = True


def store(run: Run, u: UOp, tile: Any, pointer: Pointer, stride: Any) -> None:
  _lanes(run, u, int(tile))
  _store_rows(run, u, pointer, int(stride), run.tiles.content[:, tile])


def product(run: Run, u: UOp, c: Any, a: Any, b: Any) -> None:
  lanes = _lanes(run, u, int(c), int(a), int(b))
  left, right = (_pairs(run.tiles.content[lanes, x]) for x in (a, b))
  sums = sum(without_denormals(left[..., i] @ right[..., i]) for i in range(PAIR))
  old = np.ascontiguousarray(run.tiles.content[lanes, c]).view(np.float32)
  run.tiles.content[lanes, c] = np.ascontiguousarray(without_denormals(old + sums), np.float32).view(np.uint8)
  if run.counters is not None:
    run.counters.matrix += len(lanes)


def _pairs(content: np.ndarray) -> np.ndarray:
  """Return tiles as float32 numbers in pairs, (lanes, rows, 16, 2), with denormal numbers as 0."""
  numbers = np.ascontiguousarray(content).view(np.uint16).astype(np.uint32) << np.uint32(16)
  return without_denormals(numbers.view(np.float32)).reshape(len(content), ROWS, LANES, PAIR)


def transpose(run: Run, u: UOp, to: Pointer, source: Pointer, to_stride: Any, stride: Any) -> None:
  words = _rows(run, u, source, int(stride)).view(np.uint32)
  _store_rows(run, u, to, int(to_stride), np.ascontiguousarray(words.swapaxes(1, 2)).view(np.uint8))


def scale_rows(run: Run, u: UOp, rows: Pointer, factors: Pointer, count: Any) -> None:
  values = _rows(run, u, rows, ROW_BYTES, int(count)).view(np.float32)
  by = _rows(run, u, factors, ROW_BYTES, 1).view(np.float32)
  _store_rows(run, u, rows, ROW_BYTES, np.ascontiguousarray(values * by).view(np.uint8))


def weigh(run: Run, u: UOp, terms: int, degree: int, subtracts: bool, to: Pointer, scores: Pointer, *rest: Any) -> None:
  sums, rows, term_bytes = rest[1], int(rest[3]), int(rest[4])
  x = _rows(run, u, scores, ROW_BYTES, rows).view(np.float32)
  by, l, factor = (_rows(run, u, pointer, ROW_BYTES, 1).view(np.float32) for pointer in rest[:3])
  product = np.multiply(x, factor, dtype=np.float32 if run.contracted == "never" else np.float64)
  exponent = (x - by) * factor if subtracts else (product - by).astype(np.float32)
  p = _exp2(exponent, degree)
  if run.counters is not None:
    run.counters.exp2s += rows * len(run.active())
  total = np.ascontiguousarray(l + p.sum(1, keepdims=True, dtype=np.float32))
  _store_rows(run, u, sums, ROW_BYTES, total.view(np.uint8))
  _store_terms(run, u, to, p[:, 0::2], p[:, 1::2], terms, term_bytes, in_pairs=True)


def pack(run: Run, u: UOp, terms: int, in_pairs: bool, to: Pointer, a: Pointer, b: Pointer, *rest: Any) -> None:
  stride, count, term_bytes = map(int, rest[:3])
  first, second = (_rows(run, u, x, stride, count).view(np.float32) for x in (a, b))
  _store_terms(run, u, to, first, second, terms, term_bytes, in_pairs)


def _store_terms(
  run: Run, u: UOp, to: Pointer, a: np.ndarray, b: np.ndarray, terms: int, term_bytes: int, in_pairs: bool
) -> None:
  """Store rows of a and b, (lanes, rows, 16) both, as 32 bfloat16 each: rounded, or several terms, truncated."""
  x = np.stack([a, b], axis=-1 if in_pairs else -2).reshape(*a.shape[:2], 2 * LANES)
  for term in range(terms):
    bits = np.ascontiguousarray(x).view(np.uint32)
    high = (bits + np.uint32(0x8000 if terms == 1 else 0)) & np.uint32(0xFFFF0000)
    pointer = Pointer(to.memory, to.index + _elements(run, u, to, term * term_bytes), to.dtype)
    _store_rows(run, u, pointer, ROW_BYTES, (high >> np.uint32(16)).astype(np.uint16).view(np.uint8))
    x = x - high.view(np.float32)


def _exp2(x: np.ndarray, degree: int) -> np.ndarray:
  whole = np.floor(x)
  fraction = np.where(np.isinf(x), np.float32(0), x - whole).astype(np.float32)
  p = np.full_like(fraction, EXP2[degree][-1])
  for c in EXP2[degree][-2::-1]:
    p = (p * fraction + np.float32(c)).astype(np.float32)
  return (p * np.exp2(whole)).astype(np.float32)
