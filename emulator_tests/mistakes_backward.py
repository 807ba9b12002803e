"""Deliberate mistakes in the backward kernels: the wrong phase, what it breaks, and where each schedule has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance_backward import Options, Shape
from mistakes import not_transposed, read_by_rows
from test_features import banded
from tinygrad import UOp

from uopattn.dsl import clamp
from uopattn.dsl.amd.products import Mma
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.cpu import gradients
from uopattn.dsl.cpu.gradients import Gradients
from uopattn.dsl.gpu.backward_mainloop import QueryHeads, RowStats
from uopattn.dsl.gpu.local_tile import LocalTile
from uopattn.dsl.gpu.thread_grid import ThreadGrid
from uopattn.dsl.instructions import Amx, Cuda
from uopattn.dsl.nvidia import mma
from uopattn.dsl.nvidia.mma_layout import Epilogue
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.rules import HeadRules
from uopattn.kernels import amd_backward, amx_backward, cpu_backward, cuda_backward, hopper_backward

Phase = Callable[..., Any]
Owner = tuple[object, str]  # a module or class, and the name of the phase in it
GPU: Shape = (1, 2, 1, 50, 90, 16, 16)
CPU: Shape = (1, 2, 1, 140, 150, 16, 16)
LONG: Shape = (1, 1, 1, 50, 300, 16, 16)
CAUSAL: Options = {"is_causal": True}


@dataclass(frozen=True)
class Mistake:
  """A wrong phase.

  Attributes:
    wrong: makes it of the right one.
    owners: of the phase, by the name of the schedule.
    options: what the attention is given.
    shape: at which it shows; None is GPU or CPU.
    noticed_by: "gate", or "emulator" where the checks of memory stop the kernel.
  """

  wrong: Callable[[Phase], Phase]
  owners: Mapping[str, Owner]
  options: Options = field(default_factory=dict)
  shape: Shape | None = None
  noticed_by: str = "gate"


def instead(result: Any) -> Callable[[Phase], Phase]:
  """A phase that gives `result` whatever it is asked."""
  return lambda right: lambda *arguments, **named: result


def unmasked(right: Phase) -> Phase:
  return lambda self, products, row, first, offsets, masked: right(self, products, row, first, offsets, False)


def last_tile_dropped(right: Phase) -> Phase:
  def query_range(*arguments: Any) -> Any:
    found = right(*arguments)
    n_tiles = (found.n_tiles - 1).maximum(1)
    return replace(found, n_full=found.n_full.minimum(n_tiles), n_tiles=n_tiles)

  return query_range


def no_delta(right: Phase) -> Phase:
  return lambda *arguments: (right(*arguments)[0], right(*arguments)[1] * 0.0)


def no_delta_of_block(right: Phase) -> Phase:
  def load_row_sums(s: Any, lse: Any, delta: Any, block: Any, rules: Any) -> Any:
    lse_i, _ = right(s, lse, delta, block, rules)
    return lse_i, s.assign(s.buffer(block.block_m), lambda m: 0.0, within=block.axes)

  return load_row_sums


def natural_lse(right: Phase) -> Phase:
  return lambda *arguments: (right(*arguments)[0] * 0.6931, right(*arguments)[1])


def unscaled_store(right: Phase) -> Phase:
  return lambda self, half, row, acc, factor: right(self, half, row, acc, UOp.const(1.0))


def halves_exchanged(right: Phase) -> Phase:
  def as_operands(*arguments: Any) -> Any:
    tiles = right(*arguments)
    return [[step[len(step) // 2 :] + step[: len(step) // 2] for step in steps] for steps in tiles]

  return as_operands


def first_of_the_group(right: Phase) -> Phase:
  def of(*arguments: Any) -> Any:
    heads = right(*arguments)
    return replace(heads, rules=heads.rules.rules.at(heads.head - heads.member))

  return of


def twice_the_first_head(right: Phase) -> Phase:
  def block_of(*arguments: Any) -> Any:
    block = right(*arguments)
    return replace(block, head=block.head // 2 * 2)

  return block_of


def idle_blocks_kept(right: Phase) -> Phase:
  def block_of(item: UOp, number: UOp, blocks: int, group: int, M: int, *rest: int) -> Any:
    block = right(item, number, blocks, group, M, *rest)
    return replace(block, end=UOp.const(M), busy=UOp.const(True))

  return block_of


def begun_anew(right: Phase) -> Phase:
  def mma_ab(self: Any, operands: Any, lds: Any, acc: Any, starts: Any) -> Any:
    return right(self, operands, lds, acc, [[x * 0.0 for x in tile] for tile in starts])

  return mma_ab


def begun_anew_in_memory(right: Phase) -> Phase:
  def multiply_ds_k(s: Any, dq_t: UOp, k_tile: Any, ds: UOp, tiles: Any, loop: Any) -> Any:
    return right(s, s.assign(dq_t, lambda d, m: 0.0, within=loop.axes), k_tile, ds, tiles, loop)

  return multiply_ds_k


def one_key_off(right: Phase) -> Phase:
  def add_product(s: Any, out: UOp, item: UOp, first: UOp, *rest: Any) -> Any:
    return right(s, out, item, clamp(first - 1, 0, out.shape[1]), *rest)

  return add_product


def steps_left_out(right: Phase) -> Phase:
  return lambda s, a, *rest: right(s, a._replace(steps=1), *rest)


def queries_in_pairs(right: Phase) -> Phase:
  return lambda self, *given: right(self, *given[:7], True, *given[8:])


def rows_reversed(right: Phase) -> Phase:
  return lambda *arguments: (right(*arguments)[0], right(*arguments)[1][::-1])


CUDA_AND_HOPPER = {"cuda": cuda_backward, "hopper": hopper_backward}
GPUS = ("amd", "cuda", "hopper", "apple", "generic")
BY_ROWS = (*CUDA_AND_HOPPER, "apple", "generic")  # which take `RowStats` row by row
CPUS = {"cpu": cpu_backward, "amx": amx_backward}


def on_cpus(phase: str) -> Mapping[str, Owner]:
  """The phase of that name in each CPU kernel's module."""
  return {name: (module, phase) for name, module in CPUS.items()}


MISTAKES: dict[str, Mistake] = {
  "no causal mask on the diagonal": Mistake(unmasked, dict.fromkeys(GPUS, (HeadRules, "scores")), CAUSAL),
  "no causal mask": Mistake(instead([]), dict.fromkeys(CPUS, (HeadRules, "hidden")), CAUSAL),
  "mask one key late": Mistake(
    lambda right: lambda self, row, key: right(self, row, key - 1), dict.fromkeys(CPUS, (HeadRules, "hidden")), CAUSAL
  ),
  "keys past the end counted": Mistake(unmasked, {"amd": (HeadRules, "scores")}),
  "last tile of queries dropped": Mistake(last_tile_dropped, dict.fromkeys(GPUS, (HeadRules, "query_range"))),
  "last tile counted twice": Mistake(
    lambda right: lambda self, *rest: right(replace(self, tile=replace(self.tile, shared=False)), *rest),
    dict.fromkeys(CPUS, (Gradients, "of")),
  ),
  "no scale": Mistake(
    unscaled_store, dict.fromkeys(CUDA_AND_HOPPER, (Epilogue, "store_scaled"))
  ),
  "no factor on a sum": Mistake(
    lambda right: lambda factor, exists: right(1.0, exists), {"amd": (amd_backward, "scaled")}
  ),
  "scores not pulled back": Mistake(
    lambda right: lambda self, grads, *rest: grads, dict.fromkeys(CPUS, (HeadRules, "score_vjp"))
  ),
  "no delta": Mistake(no_delta, dict.fromkeys(BY_ROWS, (RowStats, "of"))),
  "no delta of a block": Mistake(no_delta_of_block, on_cpus("load_row_sums")),
  "the LSE in another base": Mistake(natural_lse, dict.fromkeys(BY_ROWS, (RowStats, "of"))),
  "the LSE not subtracted": Mistake(
    lambda right: lambda *arguments: right(*arguments) * 0.0, {"amd": (amd_backward, "row_lse")}
  ),
  "the LSE and delta of other rows": Mistake(rows_reversed, {"amd": (Mma, "lane_rows")}),
  "halves of P and dS exchanged": Mistake(halves_exchanged, {"amd": (Mma, "as_operands")}),
  "a matrix not transposed": Mistake(not_transposed, {"cuda": (Cuda, "ldmatrix")}),
  "halves of k exchanged": Mistake(
    lambda right: lambda x, i, count: right(x, 1 - i if count == 4 else i, count), {"turing": (mma, "_share")}
  ),
  "a tile read by columns": Mistake(read_by_rows, dict.fromkeys(("apple", "generic"), (LocalTile, "__getitem__"))),
  "copies one row off": Mistake(
    lambda right: lambda self, source, first, *rest: right(self, source, first + 1, *rest),
    dict.fromkeys(("apple", "generic"), (LocalTile, "fill")),
  ),
  "tiles one row off": Mistake(
    lambda right: lambda self, first, *after, base=0: right(self, first + 1, *after, base=base),
    {"amd": (RegisterPipeline, "load")},
  ),
  "keys one off": Mistake(one_key_off, on_cpus("add_product")),
  "sums begun anew with each tile": Mistake(begun_anew, {"amd": (Mma, "mma_ab")}),
  "P and dS of the other rows": Mistake(
    lambda right: lambda self, to, elements: right(self, to, elements[::-1]), {"generic": (ThreadGrid, "keep")}
  ),
  "stationary rows one off": Mistake(
    lambda right: lambda self, source, first, *rest: right(self, source, first + 1, *rest),
    {"generic": (ThreadGrid, "stationary")},
  ),
  "dq of the last tile only": Mistake(begun_anew_in_memory, {"cpu": (cpu_backward, "multiply_ds_k")}),
  "steps left out": Mistake(steps_left_out, {"amx": (amx_backward, "mma_block")}),
  "queries of P and dS in pairs": Mistake(queries_in_pairs, {"amx": (Amx, "pack")}),
  "sums not cleared": Mistake(lambda right: lambda s, x, item: x, dict.fromkeys(CPUS, (gradients, "clear"))),
  "the mask of the group's first head for all": Mistake(
    first_of_the_group, dict.fromkeys(GPUS, (QueryHeads, "of")), {"mask_mod": banded}
  ),
  "a group's first head for all": Mistake(twice_the_first_head, dict.fromkeys(CPUS, (gradients, "block_of"))),
  "idle blocks not idle": Mistake(idle_blocks_kept, dict.fromkeys(CPUS, (gradients, "block_of"))),
  "every tile in one slot": Mistake(
    lambda right: lambda self, n_tile, *after: right(self, n_tile * 0, *after),
    dict.fromkeys(CUDA_AND_HOPPER, (SwizzledTiles, "tile")),
    shape=LONG,
    noticed_by="emulator",
  ),
}  # fmt: skip
