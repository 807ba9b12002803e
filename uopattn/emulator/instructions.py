"""The meaning in numpy of each instruction of `uopattn.dsl.instructions`, by name.

A meaning takes the run, the UOp and the operands: an array or shared scalar for a value, a Pointer for an address. It
returns the instruction's value, None for a statement.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from uopattn.dsl.instructions import INSTRUCTIONS

from . import alu, copies, mbarrier, semaphores, tiles, tracks, warpgroup
from .alu import without_denormals
from .errors import Divergence
from .lanes import Run
from .memory import CHUNK, WORD, Pointer, aligned
from .wmma import check_whole_waves

Meaning = Callable[..., Any]


def _from_lane(run: Run, u: UOp, value: Any, lane: Any) -> np.ndarray:
  """Return the value held by `lane`, an index in the wave. Raises Divergence."""
  lane = run.spread(np.asarray(lane, np.int64))
  source = run.wave_start + lane
  inside = (lane >= 0) & (lane < run.shape.wave) & (lane + run.thread - run.lane_in_wave < run.shape.threads)
  there = inside if run.mask is None else inside & run.mask[np.where(inside, source, 0)]
  active = run.active()
  if run.check and (bad := active[~there[active]]).size:
    raise run.fail(Divergence, u, "shuffles from a lane that is not active", bad)
  if run.counters is not None:
    run.counters.shuffles += run.active_waves()
  return run.spread(value)[np.where(inside, source, 0)]


def _shuffle_xor(run: Run, u: UOp, value: Any, offset: Any) -> Any:
  return _from_lane(run, u, value, run.lane_in_wave ^ int(offset))


def _shuffle(run: Run, u: UOp, value: Any, lane: Any) -> Any:
  return _from_lane(run, u, value, np.asarray(lane, np.int64) % run.shape.wave)


def _exp2(run: Run, u: UOp, x: Any) -> Any:
  if run.counters is not None:
    run.counters.exp2s += len(run.active())
  return without_denormals(np.exp2(x))


def word_of(fields: Any, bits: int) -> Any:
  """Return the uint32 made of unsigned bit fields of `bits` bits each, the first one the lowest."""
  word: Any = np.uint32(0)
  for i, field in enumerate(fields):
    word = word | np.asarray(field).astype(np.uint32) << np.uint32(bits * i)
  return word


def _pack(dtype: DType) -> Meaning:
  return lambda run, u, low, high: word_of((_bits(x, dtype) for x in (low, high)), 16)


def _bits(x: Any, dtype: DType) -> Any:
  """Return the bits of numbers rounded to a 16-bit type."""
  return alu.encode(np.asarray(x), dtype).view(np.uint16)


def _pack4(dtype: DType) -> Meaning:
  return lambda run, u, *numbers: word_of(
    (alu.encode(np.asarray(x), dtype, saturate_infinity=True) for x in numbers), 8
  )


def _convert_pair(dtype: DType) -> Meaning:
  def convert_pair(run: Run, u: UOp, low: Any, high: Any, word: Any, upper: Any) -> Any:
    of = alu.float8_of(run.arch, dtype)
    pair = word_of((alu.encode_or_overflow(np.asarray(x), of) for x in (low, high)), 8)
    shift = np.uint32(16 * int(upper))
    return word & ~np.uint32(0xFFFF << shift) | pair << shift

  return convert_pair


def _bytes_of(first: int) -> Meaning:
  """Return the meaning that packs bytes `first` and `first` + 2 of two words into one word."""

  def permute(run: Run, u: UOp, a: Any, b: Any) -> Any:
    return word_of((_byte(word, first + i) for word in (a, b) for i in (0, 2)), 8)

  return permute


def _byte(word: Any, i: int) -> Any:
  return word >> np.uint32(8 * i) & np.uint32(0xFF)


def _pick_bytes(run: Run, u: UOp, a: Any, b: Any, selector: Any) -> Any:
  numbers = [int(selector) >> 4 * i & 7 for i in range(4)]
  return word_of((_byte((a, b)[n // 4], n % 4) for n in numbers), 8)


def _fma_pairs(dtype: DType) -> Meaning:
  def numbers(word: Any, half: int) -> Any:
    bits = (np.asarray(word) >> np.uint32(16 * half)).astype(np.uint16)
    return np.asarray(alu.decode(bits.view(alu.storage(dtype)), dtype), np.float64)

  def fma(run: Run, u: UOp, a: Any, b: Any, c: Any) -> Any:
    exact = (numbers(a, half) * numbers(b, half) + numbers(c, half) for half in range(2))
    return word_of((_bits(x, dtype) for x in exact), 16)

  return fma


def _set_words(run: Run, u: UOp, to: Pointer, *words: Any) -> None:
  _fill(run, u, to, np.stack([run.spread(word) for word in words], axis=-1))


def _add_neighbours(lanes: int, sums: Callable[[Any, Any], list[Any]]) -> Callable[..., Any]:
  def meaning(run: Run, u: UOp, to: Pointer, a: Pointer, b: Pointer) -> None:
    left, right = (x.memory.load(u, x.index, x.dtype, lanes) for x in (a, b))
    to.memory.store(u, to.index, to.dtype, sums(left, right))

  return meaning


def _add_pairs(lanes: int) -> Callable[..., Any]:
  def sums(left: Any, right: Any) -> list[Any]:
    return [x[i] + x[i + 1] for q in range(0, lanes, 4) for x in (left, right) for i in (q, q + 2)]

  return _add_neighbours(lanes, sums)


def _add_quads(lanes: int) -> Callable[..., Any]:
  def sums(left: Any, right: Any) -> list[Any]:
    return [x[q + i] + x[q + i + 4] for x in (left, right) for q in range(0, lanes, 8) for i in range(4)]

  return _add_neighbours(lanes, sums)


def _group_scales(run: Run, u: UOp, lanes: int, each: int, to: Pointer, words: Pointer, offset: Any, bias: Any) -> None:
  offsets = [int(offset) + i // each for i in range(lanes)]
  bits = [(_byte(_word(u, words, i // 4), i % 4) & 0x7F) << 20 for i in offsets]
  to.memory.store(u, to.index, to.dtype, [(x + np.uint32(bias)).view(np.float32) for x in bits])


def _look_up(run: Run, u: UOp, lanes: int, per_word: int, to: Pointer, words: Pointer, shift: Any, *table: Any) -> None:
  numbers = np.array([float(x) for x in table], np.float32)
  shifts = [np.uint32(int(shift) + i % per_word * 16) for i in range(lanes)]
  bits = [_word(u, words, i // per_word) >> shift & 15 for i, shift in enumerate(shifts)]
  _word(u, words, lanes // per_word)  # bytes of it may be read, too
  to.memory.store(u, to.index, to.dtype, [numbers[x] for x in bits])


def _word(u: UOp, words: Pointer, i: int) -> Any:
  """Return the uint32 word `i` words behind a pointer."""
  return words.memory.load(u, words.index + i, words.dtype, 1)[0]


def _dot_pairs(run: Run, u: UOp, to: Pointer, a: Pointer, b: Pointer) -> None:
  _add_products(u, to, *(_bfloat16(u, x, 32) for x in (a, b)))


def _weighted_pair(run: Run, u: UOp, to: Pointer, weights: Pointer, a: Pointer, b: Pointer) -> None:
  rows = zip(*(_bfloat16(u, x, 16) for x in (a, b)), strict=True)
  _add_products(u, to, _bfloat16(u, weights, 2) * 16, [x for pair in rows for x in pair])


def _bfloat16(u: UOp, x: Pointer, count: int) -> list[Any]:
  stored = x.memory.load(u, x.index, x.dtype, count)
  return [without_denormals(alu.decode(value, x.dtype)) for value in stored]


def _add_products(u: UOp, to: Pointer, left: list[Any], right: list[Any]) -> None:
  """Add the products of each pair to one number of `to`, the second product first."""
  sums = to.memory.load(u, to.index, to.dtype, 16)
  for i in (1, 0):
    sums = [without_denormals(y + a * b) for y, a, b in zip(sums, left[i::2], right[i::2], strict=True)]
  to.memory.store(u, to.index, to.dtype, sums)


def _store_chunk(run: Run, u: UOp, to: Pointer, *words: Any) -> None:
  aligned(run, u, to, CHUNK, "stores 16 bytes at", run.active())
  _set_words(run, u, to, *words)


def _store_word(run: Run, u: UOp, to: Pointer, word: Any) -> None:
  aligned(run, u, to, WORD, "stores 4 bytes at", run.active())
  _set_words(run, u, to, word)


def _fill(run: Run, u: UOp, to: Pointer, block: np.ndarray) -> None:
  """Store the bytes of each lane's row of `block` (lanes, ...) to registers or LDS, of any dtype."""
  elements = np.ascontiguousarray(block).reshape(run.shape.lanes, -1).view(alu.storage(to.dtype))
  to.memory.store(u, to.index, to.dtype, list(np.ascontiguousarray(elements.T)))


def _ldmatrix(run: Run, u: UOp, to: Pointer, first: Pointer, offset: Any, trans: bool) -> None:
  check_whole_waves(run, u, 32, "ldmatrix")
  row = replace(first, index=first.index + int(offset) // first.dtype.itemsize)
  aligned(run, u, row, CHUNK, "reads a row at", run.active())
  rows = row.memory.load(u, run.spread(row.index), row.dtype, CHUNK // row.dtype.itemsize)
  block = np.stack(rows, axis=-1).view(np.uint16).reshape(-1, 4, 8, 8)  # (waves, matrix, row, column)
  if trans:
    block = block.swapaxes(2, 3)
  pairs = block.reshape(-1, 4, 32, 2)  # row-major: lane l holds row l // 4, columns 2 * (l % 4) and the next
  _fill(run, u, to, pairs.swapaxes(1, 2))


def _stmatrix(run: Run, u: UOp, row: Pointer, *words: Any) -> None:
  check_whole_waves(run, u, 32, "stmatrix")
  aligned(run, u, row, CHUNK, "writes a row at", run.active())
  block = np.stack([run.spread(word) for word in words], axis=0).reshape(4, -1, 32)  # (matrix, wave, lane)
  rows = np.ascontiguousarray(block.swapaxes(0, 1)).view(np.uint16).reshape(-1, 4, 8, 8)
  _fill(run, u, row, rows.reshape(-1, 8))


def _read_later(run: Run, u: UOp, value: Any) -> None:
  check_whole_waves(run, u, 32, "bar.warp.sync")


MEANINGS: dict[str, Meaning] = {
  "shuffle_xor": _shuffle_xor,
  "shuffle": _shuffle,
  "permlanex16": lambda run, u, value: _from_lane(run, u, value, run.lane_in_wave ^ 16),
  "low_halves": lambda run, u, a, b: (a & np.uint32(0xFFFF)) | (b << np.uint32(16)),
  "high_halves": lambda run, u, a, b: (a >> np.uint32(16)) | (b & np.uint32(0xFFFF0000)),
  "fmax": lambda run, u, a, b: np.fmax(a, b),
  "fmin": lambda run, u, a, b: np.fmin(a, b),
  "fabs": lambda run, u, x: np.abs(x),
  "exp2": _exp2,
  "reciprocal": lambda run, u, x: without_denormals(1 / without_denormals(x)),
  "pack_half": _pack(dtypes.half),
  "pack_bfloat16": _pack(dtypes.bfloat16),
  "pack_e4m3": _pack4(dtypes.fp8e4m3),
  "pack_e5m2": _pack4(dtypes.fp8e5m2),
  "convert_e4m3": _convert_pair(dtypes.fp8e4m3),
  "convert_e5m2": _convert_pair(dtypes.fp8e5m2),
  "even_bytes": _bytes_of(0),
  "odd_bytes": _bytes_of(1),
  "pick_bytes": _pick_bytes,
  "and_xor": lambda run, u, a, mask, b: (a & np.uint32(mask)) ^ b,
  "fma_halves": _fma_pairs(dtypes.half),
  "fma_bfloats": _fma_pairs(dtypes.bfloat16),
  "set_words": _set_words,
  "store_chunk": _store_chunk,
  "store_word": _store_word,
  "cp_async": copies.start,
  **{f"cp_async_or_zero_{size}": partial(copies.start, size=size) for size in (16, 8, 4)},
  "cp_async_commit": copies.commit,
  "cp_async_wait": copies.wait,
  "mbarrier_init": mbarrier.init,
  "mbarrier_arrive": mbarrier.arrive,
  "mbarrier_wait": mbarrier.wait,
  "mbarrier_expect": mbarrier.expect,
  "mbarrier_fence": mbarrier.fence,
  "tensor_map": copies.build,
  "tensor_map_acquire": copies.acquire,
  "tma_load": copies.load,
  "tma_prefetch": copies.prefetch,
  "bulk_load": copies.bulk,
  "stmatrix": _stmatrix,
  "semaphore_wait": semaphores.wait_for,
  "semaphore_release": semaphores.release,
  "take_number": semaphores.take,
  "tma_reduce_add": semaphores.tma_reduce_add,
  "tma_store": semaphores.tma_store,
  "bulk_wait_read": semaphores.wait_read,
  "bulk_wait": semaphores.wait,
  "setmaxnreg_dec": tracks.give_registers,
  "setmaxnreg_inc": tracks.take_registers,
  "exit_warps": tracks.exit_warps,
  "leave_loop": tracks.leave_loop,
  "leave_loop_unless_any": tracks.leave_loop_unless_any,
  "skip_trip": tracks.skip_trip,
  "named_barrier_sync": tracks.named_barrier,
  "named_barrier_arrive": tracks.named_barrier,
  "cp_async_arrive": mbarrier.arrive_copies,
  "fence_proxy_async": warpgroup.fence_proxy_async,
  "wgmma": warpgroup.from_shared,
  "wgmma_added": warpgroup.added_from_shared,
  "wgmma_registers": warpgroup.from_registers,
  "wgmma_registers_bytes": warpgroup.from_registers,
  "wgmma_registers_cleared": warpgroup.cleared_from_registers,
  "wgmma_by_rows": warpgroup.from_rows,
  "wgmma_by_rows_added": warpgroup.added_from_rows,
  "wgmma_wait": warpgroup.wait,
  "pin": lambda run, u, x: x,
  "tied": lambda run, u, value, other: other * np.float32(0) + value,
  "read_later": _read_later,
  "wave_fence": lambda run, u: None,  # lanes run in step here
  "prefetch": lambda run, u, pointer: None,
  **{f"add_pairs_{lanes}": _add_pairs(lanes) for lanes in (4, 8, 16)},
  **{f"add_quads_{lanes}": _add_quads(lanes) for lanes in (8, 16)},
  **{name: _group_scales for name in INSTRUCTIONS if name.startswith("group_scales_")},
  **{name: _look_up for name in INSTRUCTIONS if name.startswith("look_up_")},
  "dot_pairs": _dot_pairs,
  "weighted_pair": _weighted_pair,
  "tile_config": tiles.config,
  "tile_release": tiles.release,
  "tile_zero": tiles.zero,
  "tile_load": tiles.load,
  "tile_store": tiles.store,
  "tile_product": tiles.product,
  "transpose": tiles.transpose,
  "scale_rows": tiles.scale_rows,
  **{name: tiles.weigh for name in INSTRUCTIONS if name.startswith("weigh_")},
  **{name: tiles.pack for name in INSTRUCTIONS if name.startswith("pack_terms_")},
  "ldmatrix": lambda run, u, to, row, offset: _ldmatrix(run, u, to, row, offset, trans=False),
  "ldmatrix_trans": lambda run, u, to, row, offset: _ldmatrix(run, u, to, row, offset, trans=True),
}
