"""Deliberate mistakes in the forward kernels, each in one phase. With any of them a kernel must fail the gate."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tinygrad import UOp, dtypes

from uopattn.dsl import clamp, sizes
from uopattn.dsl.amd import products
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.cpu import amx_operands
from uopattn.dsl.gpu import tile_scheduler
from uopattn.dsl.gpu.local_tile import LocalTile
from uopattn.dsl.gpu.terms import PAIRS
from uopattn.dsl.gpu.thread_grid import ThreadGrid
from uopattn.dsl.instructions import Amx, Cpu, Cuda, Dialect
from uopattn.dsl.nvidia import mma, mma_layout, swizzled, tensor_pipeline, tma, wgmma, wgmma_mainloop, wgmma_softmax
from uopattn.dsl.nvidia.output_epilogue import OutputEpilogue
from uopattn.dsl.rules.rules import HeadRules
from uopattn.kernels import (
  amd_forward,
  amx_forward,
  apple_forward,
  cpu_decode,
  cpu_forward,
  cuda_forward,
  cuda_wide_forward,
  generic_forward,
  hopper_float32_forward,
  hopper_forward,
  hopper_wide_forward,
)
from uopattn.runtime.prepare import compiled

Phase = Callable[..., Any]
Options = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
  """A wrong phase of a kernel.

  Attributes:
    owner: the module or class that has the phase.
    phase: its name there.
    wrong: makes the wrong phase of the right one.
    options: arguments of an attention in which it shows.
  """

  owner: Any
  phase: str
  wrong: Callable[[Any], Any]
  options: Options = field(default_factory=dict)

  @contextmanager
  def made(self) -> Iterator[None]:
    """The kernels that are built here have the mistake."""
    compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(self.owner, self.phase, self.wrong(getattr(self.owner, self.phase)))
      yield
    compiled.cache_clear()


def instead(phase: Phase) -> Callable[[Phase], Phase]:
  """A wrong phase that has no use for the right one."""
  return lambda right: phase


# masks and key ranges


def no_mask(right: Phase) -> Phase:
  return lambda self, products, row, first, offsets, masked: right(self, products, row, first, offsets, False)


def mask_one_key_late(right: Phase) -> Phase:
  return lambda self, row: right(self, row) + 1


def last_tile_dropped(right: Phase) -> Phase:
  def key_range(*given: Any) -> Any:
    found = right(*given)
    n_tiles = (found.n_tiles - 1).maximum(1)
    return replace(found, n_full=found.n_full.minimum(n_tiles), n_tiles=n_tiles)

  return key_range


MASKS = {
  "no causal mask on the diagonal": Mistake(HeadRules, "scores", no_mask, {"is_causal": True}),
  "keys past the end counted": Mistake(HeadRules, "scores", no_mask),
  "mask one key late": Mistake(HeadRules, "last_seen", mask_one_key_late, {"is_causal": True}),
  "last tile dropped": Mistake(HeadRules, "key_range", last_tile_dropped),
}


# the softmax of a matrix unit: (unit or dialect, scores, scaling, m_old, l_old, ...) -> P, m_i, l_i, alpha


def no_rescale(right: Phase) -> Phase:
  return lambda *given, **options: (*right(*given, **options)[:3], UOp.const(1.0, dtypes.float))


def sum_not_rescaled(right: Phase) -> Phase:
  def softmax(*given: Any, **options: Any) -> tuple[Any, ...]:
    p, m_new, l_new, alpha = right(*given, **options)
    return p, m_new, l_new + given[4] * (1 - alpha), alpha

  return softmax


def softmax_mistakes(owner: Any, phase: str, scale: float | None = None) -> dict[str, Mistake]:
  """Mistakes of the softmax that `owner` has by this name.

  Args:
    scale: of scores whose maxima grow so much that a kernel which keeps its m_i must change it; None for others.
  """
  options = {} if scale is None else {"scale": scale}
  return {
    "no rescale of the accumulator": Mistake(owner, phase, no_rescale, options),
    "no rescale of the sum": Mistake(owner, phase, sum_not_rescaled, options),
  }


def first_warp(group: Any) -> Any:
  """The position of the thread of the workgroup's first warp with this one's lane."""
  found = copy(group)
  found.warp = group.warp * 0
  return found


# AMD


def p_halves_exchanged(right: Phase) -> Phase:
  def exchanged(step: list[UOp]) -> list[UOp]:
    half = len(step) // 2  # 4 or 8 elements
    return step[half:] + step[:half]

  return lambda *given: [[exchanged(step) for step in steps] for steps in right(*given)]


AMD = MASKS | softmax_mistakes(amd_forward.WaveMma, "softmax_row")
AMD |= {
  "lanes of a query not joined": Mistake(products.Mma, "row_reduce", instead(lambda self, operation, value: value)),
  "halves of P exchanged": Mistake(products.Mma, "as_operands", p_halves_exchanged),
  "tiles one key off": Mistake(
    RegisterPipeline, "load", lambda right: lambda self, first, *after: right(self, first + 1, *after)
  ),
}


def without(left_out: tuple[int, int]) -> Callable[[Any], Any]:
  """The products of three terms without one of them."""
  return lambda right: right | {3: tuple(x for x in right[3] if x != left_out)}


# On RDNA.
TERM_MISTAKES = {
  f"terms {pair[0]} and {pair[1]} not multiplied": Mistake(products, "PAIRS", without(pair)) for pair in PAIRS[3]
}


def p_pairs_exchanged(right: Phase) -> Phase:
  return lambda dtype, x: right(dtype, [x[2], x[3], x[0], x[1]])


AMD8 = {name: mistake for name, mistake in AMD.items() if name != "halves of P exchanged"} | {
  "pairs of P exchanged": Mistake(products, "word_of_bytes", p_pairs_exchanged),
  "odd columns are the even ones": Mistake(Dialect, "odd_bytes", instead(Dialect.even_bytes)),
}
AMD32 = {name: mistake for name, mistake in AMD.items() if name != "halves of P exchanged"} | TERM_MISTAKES


# Apple


def read_by_rows(right: Phase) -> Phase:
  """Elements of a tile that is stored by columns read as if it were stored by rows."""
  return lambda self, index: right(replace(self, by_columns=False), index)


def own_lane_only(operation: Any, value: UOp) -> UOp:
  return value


APPLE = MASKS | softmax_mistakes(apple_forward, "online_softmax")
APPLE |= {
  "maximum and sum of a lane's own keys": Mistake(apple_forward, "row_reduce", instead(own_lane_only)),
  "keys read by rows": Mistake(LocalTile, "__getitem__", read_by_rows),
  "tiles one key off": Mistake(
    LocalTile, "fill", lambda right: lambda self, source, first, *given: right(self, source, first + 1, *given)
  ),
  "the first simdgroup's queries": Mistake(
    apple_forward.SimdgroupRows,
    "load",
    lambda right: lambda self, *given: right(replace(self, group=first_warp(self.group)), *given),
  ),
}


# GPUs without matrix units


GENERIC = MASKS | softmax_mistakes(generic_forward, "online_softmax")
GENERIC |= {
  "tiles one key off": APPLE["tiles one key off"],
  "maximum and sum of the first thread's keys": Mistake(
    ThreadGrid, "reduced", lambda right: lambda self, values, operation: right(self, values, lambda first, other: first)
  ),
  "the first threads' queries": Mistake(
    generic_forward.ThreadRows,
    "mma_abt",
    lambda right: lambda self, *given: right(replace(self, grid=replace(self.grid, thread=self.grid.share)), *given),
  ),
  "P of the other rows": Mistake(
    ThreadGrid,
    "keep",
    lambda right: lambda self, to, elements: right(self, to, elements[::-1]),
  ),
}


# NVIDIA


def nvidia(kernel: Any, owner: Any, phase: str) -> dict[str, Mistake]:
  """Mistakes of a kernel on NVIDIA's matrix cores, whose softmax `owner` has."""
  return (
    MASKS
    | softmax_mistakes(owner, phase)
    | {
      "maximum of a lane's own keys": Mistake(kernel, "row_reduce", instead(own_lane_only)),
      "sum of a lane's own keys": Mistake(mma_layout, "row_reduce", instead(own_lane_only)),
    }
  )


def word_halves_exchanged(right: Phase) -> Phase:
  return lambda dialect, low, high, dtype: right(dialect, high, low, dtype)


def not_transposed(right: Phase) -> Phase:
  return lambda *given, trans=False, **options: right(*given, **options)


def key_pairs_exchanged(right: Phase) -> Phase:
  """P's words in the order of 16 keys in 8 bits, as if V's rows came one after another."""
  return lambda self, rows: right(self, [[row[i ^ 2] for i in range(len(row))] for row in rows])


def keys_in_order(right: Phase) -> Phase:
  """A lane's two keys are t and t + 4 of 8, as the hardware counts k."""

  def element(self: Any, row: UOp, column: UOp, *after: UOp) -> UOp:
    pair, odd = row % 8 // 2, row % 2
    return right(self, row // 8 * 8 + pair + 4 * odd, column, *after)

  return element


def k_halves_exchanged(right: Phase) -> Phase:
  """The left operand's only: of both it would be no mistake."""
  return lambda x, i, count: right(x, 1 - i if count == 4 else i, count)


def without_permutation(self: swizzled.SwizzledTiles, row: UOp, chunk: UOp) -> UOp:
  per = self.width // self.chunk
  return self.memory[self.base + (chunk // per * self.height + row) * self.width + chunk % per * self.chunk]


def first_slice(unit: cuda_wide_forward.SliceMma) -> cuda_wide_forward.SliceMma:
  """The unit as if its warp were the first of its group; its tile is the workgroup's only one."""
  group = copy(unit.group)
  group.warp = group.warp // unit.tiles.slices * unit.tiles.slices
  return replace(unit, group=group)


PACK = {"halves of a word exchanged": Mistake(Cuda, "pack", word_halves_exchanged)}
TRANSPOSE = {"values not transposed": Mistake(Cuda, "ldmatrix", not_transposed)}
MMA = nvidia(cuda_forward, cuda_forward, "online_softmax")
OTHER_QUERIES = Mistake(
  mma.Mma, "load_left", lambda right: lambda self, tile, first, lane: right(self, tile, first * 0, lane)
)
CUDA = MMA | PACK | TRANSPOSE | {"the first warp's queries": OTHER_QUERIES}
WIDE = (
  nvidia(cuda_wide_forward, cuda_wide_forward, "online_softmax")
  | PACK
  | TRANSPOSE
  | {
    "maxima of the first warp's keys": Mistake(
      cuda_wide_forward.GroupExchange, "rows", lambda right: lambda self, values: [x[:1] for x in right(self, values)]
    ),
    "each slice's keys are the first": Mistake(
      cuda_wide_forward.SliceMma, "mma_abt", lambda right: lambda self, *given: right(first_slice(self), *given)
    ),
    "each slice's columns are the first": Mistake(
      cuda_wide_forward.SliceMma, "mma_ab", lambda right: lambda self, *given: right(first_slice(self), *given)
    ),
  }
)
FLOAT8 = (
  MMA
  | TRANSPOSE
  | {
    "keys in another order": Mistake(mma.Mma, "as_left", key_pairs_exchanged),
    "odd columns are the even ones": Mistake(Dialect, "odd_bytes", instead(Dialect.even_bytes)),
  }
)
FLOAT32 = MMA | {
  "keys in another order": Mistake(swizzled.SwizzledTiles, "element", keys_in_order),
  "the small term of Q and P times nothing": Mistake(mma, "PAIRS", lambda right: right | {2: right[2][1:]}),
  "the small term of K and V times nothing": Mistake(mma, "PAIRS", lambda right: right | {2: right[2][::2]}),
}
TURING = MMA | {"halves of k exchanged": Mistake(mma, "_share", k_halves_exchanged)}
NO_PERMUTATION = Mistake(swizzled.SwizzledTiles, "at", instead(without_permutation))


def never_too_low(right: Phase) -> Phase:
  return lambda *given: (*right(*given)[:2], UOp.const(False))


def added_as_it_is(_: Any, state: wgmma_mainloop.State, out: UOp) -> list[UOp]:
  return [state.acc[i].store(state.acc[i].load() + out[i].load()) for i in range(sizes(out)[0])]


HOPPER = nvidia(wgmma_softmax, wgmma_softmax, "online_softmax") | PACK
HOPPER |= softmax_mistakes(wgmma_softmax, "online_softmax", scale=5.0)
HOPPER |= {"m_i never too low": Mistake(wgmma_softmax, "speculative_softmax", never_too_low, {"scale": 100.0})}
HOPPER8 = nvidia(wgmma_softmax, wgmma_softmax, "online_softmax") | {
  "values not transposed": Mistake(Cuda, "ldmatrix", not_transposed),
  "odd columns are the even ones": Mistake(Dialect, "odd_bytes", instead(Dialect.even_bytes)),
  "keys in another order": Mistake(
    Cuda,
    "pack4",
    lambda right: lambda dialect, x, dtype: right(dialect, [x[0], x[2], x[1], x[3]] if len(x) == 4 else x, dtype),
  ),
  "products of tiles added up without a rescale": Mistake(
    wgmma_mainloop.SeparatePVMainloop, "add_pv", instead(added_as_it_is)
  ),
}


def term_left_out(term: int) -> Mistake:
  def wrong(right: Phase) -> Phase:
    return lambda *given: [x if i != term else UOp.const(0, dtypes.uint) for i, x in enumerate(right(*given))]

  return Mistake(hopper_float32_forward, "bfloat16_terms", wrong)


HOPPER32 = nvidia(wgmma_softmax, wgmma_softmax, "online_softmax") | {
  "the second term left out": term_left_out(1),
  "the last term left out": term_left_out(2),
  "keys in another order": Mistake(
    hopper_float32_forward.Mainloop,
    "packed",
    lambda right: lambda self, found: right(self, found._replace(p=[row[::-1] for row in found.p])),
  ),
}


def first_warpgroup(main: hopper_wide_forward.Mainloop) -> hopper_wide_forward.Mainloop:
  """The mainloop as if its warpgroup were the first."""
  group = copy(main.group)
  group.warp = group.warp % hopper_wide_forward.WARPS
  return replace(main, exchange=replace(main.exchange, group=group))


HOPPER_WIDE = (
  nvidia(wgmma_softmax, wgmma_softmax, "online_softmax")
  | PACK
  | {
    "maxima and sums of a warpgroup's own keys": Mistake(
      hopper_wide_forward.WarpgroupExchange,
      "swapped",
      lambda right: lambda self, values, *after: (values, right(self, values, *after)[1]),
    ),
    "both warpgroups' keys are the first": Mistake(
      hopper_wide_forward.Mainloop, "start_qk", lambda right: lambda self, *given: right(first_warpgroup(self), *given)
    ),
    "both warpgroups' columns are the first": Mistake(
      hopper_wide_forward.Mainloop, "start_pv", lambda right: lambda self, *given: right(first_warpgroup(self), *given)
    ),
  }
)
# What a producer brings, and the work tiles of persistent workgroups. The gate must reject these.
HOPPER_PRODUCER = {
  "boxes one tile late": Mistake(
    tma.Source,
    "load",
    lambda right: (
      lambda self, view, slot, n_tile, *rest, **numbers: right(self, view, slot, n_tile + 1, *rest, **numbers)
    ),
  ),
  "the first 64 columns twice": Mistake(
    Cuda,
    "tma_load",
    lambda right: (
      lambda dialect, to, number, barrier, corner, *rest: right(
        dialect, to, number, barrier, (corner[0] * 0, *corner[1:]), *rest
      )
    ),
  ),
  "the first head's rows": Mistake(
    Cuda,
    "tma_load",
    lambda right: (
      lambda dialect, to, number, barrier, corner, *rest: right(
        dialect, to, number, barrier, (*corner[:2], corner[2] * 0, corner[3]), *rest
      )
    ),
  ),
  "a section without its last work tile": Mistake(
    tile_scheduler.TileScheduler,
    "_share",
    lambda right: lambda self, workgroup, heads: right(self, workgroup, heads) - (workgroup.eq(1)).cast(dtypes.weakint),
  ),
  "queries of the block as counted from query 0": Mistake(
    tensor_pipeline.TensorPipeline,
    "__init__",
    lambda right: lambda self, *args, before, **given: right(self, *args, **given),
  ),
}
# These the emulator must.
HOPPER_BARRIERS = {
  "the first warpgroup's tiles for all": Mistake(
    hopper_forward.WorkTile, "walk", lambda right: lambda self, M, tiles, warp: right(self, M, tiles, warp * 0)
  ),
  "slots counted anew in each work tile": Mistake(
    tensor_pipeline.Counter, "get", lambda right: lambda self, *after: right(self, *after) * 0
  ),
  "queries given back by nobody": Mistake(
    tma.Slots,
    "release",
    lambda right: (
      lambda self, n, *after, when=None, last=False: right(self, n, *after) if when is None else UOp.group(*after)
    ),
  ),
  "more bytes expected than come": Mistake(
    Cuda,
    "mbarrier_expect",
    lambda right: lambda dialect, barrier, count, *after: right(dialect, barrier, count + 16, *after),
  ),
  "fewer bytes expected than come": Mistake(
    Cuda,
    "mbarrier_expect",
    lambda right: lambda dialect, barrier, count, *after: right(dialect, barrier, count - 16, *after),
  ),
  "tiles that are passed over given back by nobody": Mistake(
    wgmma_mainloop.OverlappedMainloop, "pass_over", instead(lambda self, n_tiles, started: started)
  ),
  "the first arrival by nobody": Mistake(wgmma_mainloop.PingPong, "first_arrival", instead(lambda self, after: after)),
  "more registers than there are": Mistake(
    Cuda,
    "setmaxnreg_dec",
    lambda right: lambda dialect, count, *rest: right(dialect, 2 * count, *rest),
  ),
}
# Of what consumers store by TMA. The gate must reject the first one, the emulator the others.
NEXT_ROWS = Mistake(
  tma.TensorMap, "store", lambda right: lambda self, view, first, *rest: right(self, view, first + 64, *rest)
)
HOPPER_STORES = {
  "the first warpgroup's rows for all": Mistake(
    tma.TensorMap,
    "store",
    lambda right: lambda self, view, first, tile, *rest: right(self, view, first, replace(tile, base=0), *rest),
  ),
  "the first head's": Mistake(
    tma.TensorMap,
    "store",
    lambda right: lambda self, view, *rest: right(self, replace(view, head=UOp.const(0)), *rest),
  ),
  "rows before the first one": Mistake(
    tma.TensorMap, "store", lambda right: lambda self, view, first, *rest: right(self, view, first - 64, *rest)
  ),
  "not awaited at the end": Mistake(OutputEpilogue, "end", instead(lambda self, *after: UOp.group(*after))),
  "by two threads": Mistake(
    OutputEpilogue, "leads", lambda right: property(lambda self: self.group.thread % wgmma.THREADS < 2)
  ),
}
# Every tile in one slot: the copy of the next one overwrites what is being read.
ONE_SLOT = Mistake(swizzled.SwizzledTiles, "tile", lambda right: lambda self, n, *after: right(self, n * 0, *after))


# what attention's arguments ask for


def window_one_key_narrow(right: Phase) -> Phase:
  return lambda self, row: [x + 1 for x in right(self, row)]


# By the feature in which each shows.
FEATURES = {
  "sinks": Mistake(HeadRules, "sink", instead(lambda self, row: None)),
  "lengths": Mistake(HeadRules, "length", lambda right: property(lambda self: UOp.const(self.rules.N))),
  "window": Mistake(HeadRules, "_firsts", window_one_key_narrow),
  "softcap": Mistake(HeadRules, "apply_score_mods", instead(lambda self, score, *rest: score)),
}


# CPU


def filled(s: Any, like: UOp, value: float, within: Any) -> UOp:
  return s.assign(s.buffer(*like.shape), lambda *i: value, within=within)


def strips_not_rescaled(right: Phase) -> Phase:
  return lambda s, p, v, acc, alpha, unroll, loop: right(s, p, v, acc, filled(s, alpha, 1.0, loop.axes), unroll, loop)


def strips_not_masked(right: Phase) -> Phase:
  return lambda s, q_t, k_tile, score, *rest: right(s, q_t, k_tile, lambda x, n, m: x, *rest)


def strips_masked_late(right: Phase) -> Phase:
  return lambda s, q_t, k_tile, score, *rest: right(s, q_t, k_tile, lambda x, n, m: score(x, n - 1, m), *rest)


def old_maximum_forgotten(right: Phase) -> Phase:
  def exponentiate(s: Any, scores: UOp, m_new: UOp, m_old: UOp, l_old: UOp, exponent: Any, loop: Any) -> Any:
    return right(s, scores, m_new, filled(s, m_old, -math.inf, loop.axes), l_old, exponent, loop)

  return exponentiate


def strips_one_key_off(right: Phase) -> Phase:
  def load_tile(s: Any, rows: Any, tile: Any, axes: Any) -> Any:
    return right(s, rows, replace(tile, first=clamp(tile.first + 1, 0, int(rows.length.vmax) - tile.size)), axes)

  return load_tile


CPU = {
  "no rescale of the accumulator": Mistake(cpu_forward, "multiply_pv", strips_not_rescaled),
  "no causal mask on the diagonal": Mistake(cpu_forward, "multiply_qk", strips_not_masked, {"is_causal": True}),
  "last tile counted twice": Mistake(cpu_forward, "multiply_qk", strips_not_masked),
  "mask one key late": Mistake(cpu_forward, "multiply_qk", strips_masked_late, {"is_causal": True}),
  "old maximum forgotten": Mistake(cpu_forward, "exponentiate", old_maximum_forgotten),
  "tiles one key off": Mistake(cpu_forward, "load_tile", strips_one_key_off),
}


def rows_not_rescaled(right: Phase) -> Phase:
  def multiply_pv(s: Any, p: UOp, v: Any, k_next: Any, acc: UOp, alpha: UOp, *rest: Any) -> Any:
    return right(s, p, v, k_next, acc, filled(s, alpha, 1.0, rest[-1]), *rest)

  return multiply_pv


def row_sum_not_rescaled(right: Phase) -> Phase:
  return lambda s, p, l_old, alpha, within: right(s, p, l_old, filled(s, alpha, 1.0, within), within)


def rows_not_masked(right: Phase) -> Phase:
  return lambda s, products, score, *rest: right(s, products, lambda x, r, n: x, *rest)


def rows_masked_late(right: Phase) -> Phase:
  return lambda s, products, score, *rest: right(s, products, lambda x, r, n: score(x, r, n - 1), *rest)


def half_of_the_lanes(right: Phase) -> Phase:
  def fold(s: Any, x: UOp, operation: Any, within: Any) -> Any:
    half = int(x.shape[-1]) // 2
    kept = s.assign(s.buffer(*x.shape), lambda *i: (i[-1] < half).where(x[i], 0.0), within=within)
    return right(s, kept, operation, within)

  return fold


def rest_of_the_head_left_out(right: Phase) -> Phase:
  def multiply_qk(s: Any, q: UOp, k: Any, *rest: Any) -> Any:
    kept = s.assign(s.buffer(*q.shape), lambda r, d: (d < 16).where(q[r, d], 0.0), within=rest[-1])
    return right(s, kept, k, *rest)

  return multiply_qk


# AMX


def groups_not_rescaled(right: Phase) -> Phase:
  return lambda s, acc, group, alpha, *after: right(s, acc, group, filled(s, alpha, 1.0, (alpha, *after)), *after)


def groups_not_masked(right: Phase) -> Phase:
  return lambda s, scores, slot, *where: right(s, scores, slot, *where[:-2], lambda x, *rest: x, where[-1])


def groups_masked_late(right: Phase) -> Phase:
  return lambda s, scores, slot, *where: right(
    s, scores, slot, *where[:-2], lambda x, n, *m: where[-2](x, n - 1, *m), where[-1]
  )


def other_unit(right: Phase) -> Phase:
  return lambda unit, index, units: 0


def second_group_is_the_first(right: Phase) -> Phase:
  return lambda self, to, source, to_stride, stride, *after: right(self, to, source, to_stride, stride * 0, *after)


def steps_left_out(right: Phase) -> Phase:
  return lambda s, a, *rest, **more: right(s, a._replace(steps=1), *rest, **more)


AMX = {
  "no rescale of the accumulator": Mistake(amx_forward, "rescale", groups_not_rescaled, {"scale": 3.0}),
  "weights over those before": Mistake(amx_forward, "slot_of", other_unit),
  "no causal mask on the diagonal": Mistake(amx_forward, "row_maxima", groups_not_masked, {"is_causal": True}),
  "last tile counted twice": Mistake(amx_forward, "row_maxima", groups_not_masked),
  "mask one key late": Mistake(amx_forward, "row_maxima", groups_masked_late, {"is_causal": True}),
  "rows not transposed": Mistake(Amx, "transpose", second_group_is_the_first),
  "steps left out": Mistake(amx_operands, "mma_block", steps_left_out),
}


LATE = {"is_causal": True, "q_start": 140}
DECODE = {
  "no rescale of the accumulator": Mistake(cpu_decode, "multiply_pv", rows_not_rescaled),
  "no rescale of the sum": Mistake(cpu_decode, "add_up", row_sum_not_rescaled),
  "no causal mask": Mistake(cpu_decode, "softmax", rows_not_masked, LATE),
  "last tile counted twice": Mistake(cpu_decode, "softmax", rows_not_masked),
  "mask one key late": Mistake(cpu_decode, "softmax", rows_masked_late, LATE),
  "half of the lanes": Mistake(cpu_decode, "fold", half_of_the_lanes),
  "rest of the head left out": Mistake(cpu_decode, "multiply_qk", rest_of_the_head_left_out),
}
DECODE_PAIRS = {
  "weights the wrong way round": Mistake(
    Cpu, "weighted_pair", lambda right: lambda self, to, weights, a, b, *rest: right(self, to, weights, b, a, *rest)
  ),
  "products of q with itself": Mistake(
    Cpu, "dot_pairs", lambda right: lambda self, to, a, b, *rest: right(self, to, a, a, *rest)
  ),
}
