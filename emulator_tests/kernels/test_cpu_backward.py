"""The CPU's backward kernel against its definition: corners, drawn shapes and tiles, deliberate mistakes, threads."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, problem_of, with_vectors
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import NUM_CPU_THREADS, Context
from tinygrad.renderer import Estimates

from uopattn.dsl import sizes
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.kernels import cpu_backward
from uopattn.kernels.cpu_backward import Block, Tiles
from uopattn.plan.target import target_of
from uopattn.proof.gate import GradientGate, numpy
from uopattn.proof.oracle import PRECISIONS, Array, oracle
from uopattn.runtime.threads import threaded

Shape = tuple[int, int, int, int, int, int]  # heads, key heads, M, N, Dk, Dv

SHAPES: dict[str, Shape] = {
  "smallest": (1, 1, 1, 1, 1, 1),
  "one query": (4, 4, 1, 300, 64, 64),
  "one key": (2, 2, 70, 1, 16, 16),
  "round": (2, 2, 128, 128, 64, 64),
  "odd everywhere": (3, 3, 77, 131, 33, 17),
  "one past the tiles": (2, 2, 65, 129, 65, 65),
  "more queries than keys": (2, 2, 200, 20, 32, 32),
  "grouped": (6, 2, 50, 90, 24, 40),
  "one key head for all": (5, 1, 133, 40, 8, 8),
  "head of 80": (4, 2, 40, 100, 80, 80),
  "large head": (1, 1, 40, 70, 300, 260),
}


class Problem:
  """Normal random inputs, and what the oracle says about them.

  Args:
    length: how many keys exist; the others are NaN in k and v.
  """

  def __init__(
    self,
    shape: Shape,
    dtype: DType = dtypes.float32,
    is_causal: bool = False,
    q_start: int = 0,
    seed: int = 0,
    length: int | None = None,
  ):
    heads, kv_heads, M, N, Dk, Dv = self.shape = shape
    random = np.random.default_rng(seed)
    shapes = ((heads, M, Dk), (kv_heads, N, Dk), (kv_heads, N, Dv), (heads, M, Dv))
    inputs = [Tensor(random.standard_normal((1, *x), np.float32)).cast(dtype).realize() for x in shapes]
    options: dict[str, Any] = {"is_causal": is_causal, "q_start": q_start}
    options |= {} if length is None else {"kv_lengths": np.array([length])}
    self.gate = GradientGate.of(*inputs, **options)
    arrays = [numpy(x) for x in inputs]
    out, lse = oracle(arrays[0], arrays[1], arrays[2], **options)
    delta = (out * arrays[3]).sum(-1)
    delta[np.isinf(lse)] = math.nan  # any value will do
    if length is not None:
      beyond = Tensor.arange(N).reshape(1, N, 1) >= length
      inputs[1:3] = [beyond.where(math.nan, x).cast(dtype) for x in inputs[1:3]]
    inputs += [Tensor(x.astype(np.float32)) for x in (lse, delta)]
    self.inputs = [x.squeeze(0).contiguous().realize() for x in inputs]
    self.rules: dict[str, Any] = {"window": (None, 0 if is_causal else None), "q_start": q_start, "kv_lengths": length}

  def tiles(self) -> Tiles:
    heads, kv_heads, M, N, Dk, Dv = self.shape
    given = problem_of(heads, M, N, Dk, Dv, self.inputs[0].dtype, kv_heads)
    return Tiles.choose(given, replace(target_of("CPU"), threads=2))

  def run(self, tiles: Tiles | None = None) -> list[Array]:
    """What the kernel writes to outputs that were full of NaN: dq, and the sums of dk and dv."""
    (heads, kv_heads, M, N, Dk, Dv), dtype, tiles = self.shape, self.inputs[0].dtype, tiles or self.tiles()
    parts = kv_heads * tiles.parts
    shapes = (((heads, M, Dk), dtype), ((parts, N, Dk), dtypes.float), ((parts, N, Dv), dtypes.float))
    outputs = [Tensor.full(x, math.nan, dtype=of).contiguous().realize() for x, of in shapes]
    buffers = outputs + self.inputs
    places = [UOp.placeholder(sizes(x), x.dtype, slot) for slot, x in enumerate(buffers)]
    rules = Rules(M, N, heads=heads, scale=Dk**-0.5, **self.rules)
    kernel = threaded(cpu_backward.backward(*places, rules=rules, tiles=tiles), "CPU", Estimates())
    call = kernel.call(*(x.uop for x in buffers))
    results = [Tensor(x.uop.after(call)) for x in outputs]
    Tensor.realize(*results)
    return [numpy(x) for x in results]

  def check(self, tiles: Tiles | None = None) -> None:
    """Fails unless all three gradients pass the gate."""
    (_, kv_heads, _, N, *_), keep = self.shape, PRECISIONS[self.inputs[0].dtype].keep
    dq, *sums = self.run(tiles)
    dk, dv = (keep(x.reshape(kv_heads, -1, N, x.shape[2]).sum(1)) for x in sums)
    got = {"q": dq[None], "k": dk[None], "v": dv[None]}
    # Where all rows see one key, what is 0 but for rounding has no size to be measured by.
    zero = [name for name, x in self.gate.exact.named().items() if not x.any()]
    assert all(np.abs(got.pop(name)).max() < 1e-5 for name in zero), f"worst at one of {zero}"
    for report in self.gate.reports(**got):
      assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(shape: str, dtype: DType, is_causal: bool) -> None:
  Problem(SHAPES[shape], dtype, is_causal).check()


@pytest.mark.parametrize("q_start", [-200, -40, -1, 1, 53, 54, 1000])
def test_causal_at_any_start(q_start: int) -> None:
  Problem((2, 1, 77, 130, 16, 16), is_causal=True, q_start=q_start).check()


def test_rows_that_see_no_key_have_no_gradient() -> None:
  dq, dk, dv = Problem((1, 1, 70, 70, 16, 16), is_causal=True, q_start=-5).run()
  assert (dq[0, :5] == 0).all()
  assert (dk[0, 65:] == 0).all()
  assert (dv[0, 65:] == 0).all()
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 64, 100])
def test_keys_that_do_not_exist_are_not_read(dtype: DType, length: int) -> None:
  problem = Problem((4, 2, 70, 130, 16, 24), dtype, length=length)
  problem.check()
  assert all((x[:, length:] == 0).all() for x in problem.run()[1:])


@given(
  kv_heads=st.integers(1, 3),
  group=st.integers(1, 3),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.integers(1, 80),
  Dv=st.integers(1, 80),
  dtype=st.sampled_from(DTYPES),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
@drawn(15)
def test_any_shape(kv_heads, group, M, N, Dk, Dv, dtype, is_causal, q_start, seed) -> None:
  Problem((kv_heads * group, kv_heads, M, N, Dk, Dv), dtype, is_causal, q_start, seed).check()


@given(
  lanes=st.sampled_from([2, 4, 8, 16]),
  blocks=st.integers(1, 5),
  block_n=st.integers(1, 140),
  unroll=st.integers(1, 5),
  vectors=st.integers(1, 3),
  parts=st.integers(1, 9),
  M=st.integers(1, 100),
  N=st.integers(1, 130),
  is_causal=st.booleans(),
)
@drawn(10)
def test_any_tiles(lanes, blocks, block_n, unroll, vectors, parts, M, N, is_causal) -> None:
  Problem((2, 1, M, N, 20, 21), is_causal=is_causal).check(
    Tiles(lanes * blocks, block_n, unroll, vectors, lanes, parts)
  )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_long(dtype: DType, is_causal: bool) -> None:
  Problem((2, 1, 3001, 2050, 64, 64), dtype, is_causal).check()


def test_every_run_gives_the_same_bits() -> None:
  """By however many threads, in whatever order."""
  problem, tiles = Problem((6, 3, 300, 200, 32, 32), is_causal=True), Tiles(32, 64, 4, 2, 16, parts=3)
  first = problem.run(tiles)
  for threads in (1, 2, NUM_CPU_THREADS.value) * 3:
    with Context(NUM_CPU_THREADS=threads):
      again = problem.run(tiles)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def twice_the_first_head(call: UOp, turn: UOp, *rest: Any) -> tuple[Block, UOp]:
  block, busy = right_block(call, turn, *rest)
  return Block(block.head // 2 * 2, block.row, block.end), busy


def idle_turns_kept(call: UOp, turn: UOp, blocks: int, group: int, M: int, tiles: Tiles) -> tuple[Block, UOp]:
  block, _ = right_block(call, turn, blocks, group, M, tiles)
  return Block(block.head, block.row, UOp.const(M)), UOp.const(True)


def without_delta(s, lse, delta, block, block_m, factor, outer):
  lse_i, _ = right_sums(s, lse, delta, block, block_m, factor, outer)
  return lse_i, s.assign(s.buffer(block_m), lambda m: 0.0, within=outer)


def unmasked(self, product, dp, n, m):
  with_all = cpu_backward.Gradients(Unmasking(self.rules.rules, self.rules.b, self.rules.h), *fields(self)[1:])
  return right_of(with_all, product, dp, n, m)


class Unmasking(HeadRules):
  def hidden(self, row: UOp, key: UOp) -> list[UOp]:
    return []


class OneLate(HeadRules):
  def hidden(self, row: UOp, key: UOp) -> list[UOp]:
    return super().hidden(row, key - 1)


def one_late(self, product, dp, n, m):
  late = cpu_backward.Gradients(OneLate(self.rules.rules, self.rules.b, self.rules.h), *fields(self)[1:])
  return right_of(late, product, dp, n, m)


def tile_counted_again(self, product, dp, n, m):
  rules, row, _, *rest = fields(self)
  return right_of(cpu_backward.Gradients(rules, row, UOp.const(0), *rest), product, dp, n, m)


def fields(x: cpu_backward.Gradients) -> tuple[Any, ...]:
  return x.rules, x.row, x.start, x.first, x.lse_i, x.delta_i


def unscaled(self, grads, products, row, first, offsets):
  return grads


def keys_one_off(s, out, item, first, *rest):
  return right_add(s, out, item, cpu_backward.clamp(first - 1, 0, out.shape[1]), *rest)


def last_tile_alone(s, dq_t, k_tile, ds, tiles, loop):
  nothing = s.assign(dq_t, lambda d, m: 0.0, within=loop.axes)
  return right_dq(s, nothing, k_tile, ds, tiles, loop)


right_block, right_sums = cpu_backward.block_of, cpu_backward.load_row_sums
right_of, right_add, right_dq = cpu_backward.Gradients.of, cpu_backward.add_product, cpu_backward.multiply_ds_k
Mistake = tuple[object, str, Callable[..., Any], dict[str, Any]]
MISTAKES: dict[str, Mistake] = {
  "a group's first head for all": (cpu_backward, "block_of", twice_the_first_head, {}),
  "idle turns not idle": (cpu_backward, "block_of", idle_turns_kept, {}),
  "sums not cleared": (cpu_backward, "clear", lambda s, x, item: x, {}),
  "no delta": (cpu_backward, "load_row_sums", without_delta, {}),
  "no causal mask": (cpu_backward.Gradients, "of", unmasked, {"is_causal": True}),
  "mask one key late": (cpu_backward.Gradients, "of", one_late, {"is_causal": True}),
  "last tile counted twice": (cpu_backward.Gradients, "of", tile_counted_again, {}),
  "no scale": (HeadRules, "score_vjp", unscaled, {}),
  "keys one off": (cpu_backward, "add_product", keys_one_off, {}),
  "dq of the last tile alone": (cpu_backward, "multiply_ds_k", last_tile_alone, {}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  place, phase, mistake, options = MISTAKES[name]
  problem, tiles = Problem((2, 1, 140, 150, 16, 16), **options), Tiles(32, 64, 4, 2, 16, parts=3)
  problem.check(tiles)
  monkeypatch.setattr(place, phase, mistake)
  with pytest.raises(AssertionError, match="worst at"):
    problem.check(tiles)


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match="lanes=1: must be at least 2"):
    Tiles(16, 16, 4, 2, 1)
  with pytest.raises(ValueError, match="block_m=24: must be a multiple of lanes=16"):
    Tiles(24, 16, 4, 2, 16)
  for lanes, registers in ((4, 16), (8, 16), (8, 32), (16, 32)):
    tiles = Tiles.choose(problem_of(8, 1000, 1000, 64, 64), with_vectors(lanes, registers, 2))
    assert tiles.vectors * tiles.unroll + tiles.unroll + 1 <= registers
    assert (tiles.block_m, tiles.parts) == (64, 1)
  wide = Tiles.choose(problem_of(1, 1000, 1000, 20_000, 64, dtypes.half), with_vectors(16, 32, 2))
  assert wide.stack_bytes(20_000, 64, True) <= 4 << 20
  with pytest.raises(ValueError, match="head size 1000000: a tile needs"):
    Tiles.choose(problem_of(8, 1000, 1000, 1_000_000, 64), with_vectors(16, 32, 2))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("blocks", [1, 2, 16, 17])
@pytest.mark.parametrize("threads", [1, 2, 12])
def test_threads_have_like_shares(kv_heads: int, blocks: int, threads: int) -> None:
  parts = Tiles.choose(problem_of(kv_heads, 64 * blocks, 100, 16, 16), with_vectors(16, 32, threads)).parts
  assert parts <= min(blocks, 4 * threads)
  turns = -(-kv_heads * parts // threads) * -(-blocks // parts)
  least = -(-kv_heads * blocks // threads)
  assert turns <= 1.34 * least  # 17 blocks of one head on 12 threads are 2 turns, or 3 in fewer parts
  if kv_heads % threads == 0:
    assert parts == 1
