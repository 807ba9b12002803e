"""Backward passes with P and dS in memory, which serve head sizes at which the other kernels have no tiles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conformance_backward import (
  BFLOAT,
  FLOAT,
  HALF,
  SHAPES,
  WIDE,
  Case,
  Machine,
  Shape,
  check_backward,
  no_gradient,
  stored,
)
from helpers import drawn, problem_of
from hypothesis import given
from hypothesis import strategies as st
from test_features import FEATURES, arguments, some
from tinygrad import UOp
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops

import uopattn.emulator as emulator
from uopattn.dsl.gpu import wide_backward
from uopattn.dsl.gpu.backward_mainloop import QueryHeads, RowStats
from uopattn.dsl.nvidia import mma
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_wide_backward, generic_wide_backward
from uopattn.plan.dispatch import NoKernel, candidates_backward, dispatch, dispatch_backward, stores_scores
from uopattn.plan.tiles import cuda, generic
from uopattn.runtime.prepare import compiled
from uopattn.spec.spec import AttentionSpec

CUDA, TURING = Machine("cuda wide", "sm_80", HALF), Machine("turing wide", "sm_75", HALF)
CL, AMD, APPLE = (Machine("generic wide", arch, HALF) for arch in ("cl", "gfx942", "apple9"))
RULES: dict[str, Any] = {
  "kv_lengths": np.array([33]),
  "softcap": 2.0,
  "window": (20, 5),
  "sinks": np.array([1, 0], np.float32),
}
FEATURED: Shape = (2, 4, 2, 45, 70, 16, 24)
MACHINES = (CUDA, TURING, CL, AMD, APPLE)
KINDS = [x.gradients for x in wide_backward.KERNELS]


@pytest.mark.parametrize(
  ("machine", "options", "shape"),
  [
    pytest.param(CUDA, {"is_causal": True}, (1, 2, 1, 40, 36, 576, 512), id="cuda"),
    pytest.param(CL, {"is_causal": True}, (1, 2, 1, 40, 36, 576, 512), id="cl"),
    pytest.param(TURING, {"is_causal": True}, (1, 2, 1, 40, 36, 576, 512), id="turing", marks=pytest.mark.slow),
    pytest.param(AMD, {"is_causal": True}, (1, 2, 1, 40, 36, 576, 512), id="amd", marks=pytest.mark.slow),
    pytest.param(APPLE, {"is_causal": True}, (1, 2, 1, 40, 36, 576, 512), id="apple", marks=pytest.mark.slow),
    pytest.param(CUDA, RULES, (1, 2, 2, 150, 70, 501, 433), id="cuda odd", marks=pytest.mark.slow),
    pytest.param(CL, RULES, (1, 2, 2, 150, 70, 501, 433), id="cl odd", marks=pytest.mark.slow),
    pytest.param(CUDA._replace(dtype=FLOAT), RULES, (1, 2, 2, 50, 70, 501, 433), id="float", marks=pytest.mark.slow),
    pytest.param(AMD._replace(dtype=BFLOAT), RULES, (1, 2, 2, 70, 50, 501, 433), id="bfloat", marks=pytest.mark.slow),
  ],
)
def test_with_the_tiles_of_choice(machine: Machine, options: dict[str, Any], shape: Any) -> None:
  with machine.device():
    Case.of(machine, shape, options).check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.each("machine", "shape", evenly=True)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_with_small_tiles(machine: Machine, shape: str) -> None:
  check_backward(machine, SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WIDE)
def test_any_tiles_shape_and_features(schedule: str) -> None:
  row = WIDE[schedule]

  @drawn(1, 3)
  @given(
    data=st.data(),
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 2, 100, 100, 90, 90))),
    names=st.sets(st.sampled_from(FEATURES)),
    blocks=st.none() | st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 1000),
  )
  def check(data: st.DataObject, sizes: Any, names: Any, blocks: Any, seed: int) -> None:
    machine = Machine(schedule, data.draw(st.sampled_from(row.arches)), data.draw(st.sampled_from(row.dtypes)))
    tiles = data.draw(row.drawn(machine.arch, machine.dtype))
    B, Hkv, group, *rest = sizes
    shape: Any = (B, Hkv * group, Hkv, *rest)
    with machine.device():
      options = arguments(shape, some(np.random.default_rng(seed), shape, *sorted(names)), "int", blocks)
      check_backward(machine, shape, *options, tiles=tiles, seed=seed)

  check()


@pytest.mark.slow
@pytest.mark.each("machine", "name", evenly=True)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("machine", [CUDA, CL], ids=str)
def test_each_feature_alone(machine: Machine, name: str) -> None:
  check_backward(machine, FEATURED, some(np.random.default_rng(FEATURES.index(name) % 2), FEATURED, name))


@pytest.mark.parametrize("machine", [CUDA, CL], ids=str)
def test_queries_before_all_keys_have_no_gradient(machine: Machine) -> None:
  assert no_gradient(check_backward(machine, (1, 1, 1, 30, 40, 16, 16), {"is_causal": True, "q_start": -50}))


@pytest.mark.parametrize("machine", [CUDA, TURING, CL], ids=str)
def test_each_barrier_and_wait_deleted(machine: Machine) -> None:
  """Behind the tiles of each query head tinygrad has a barrier of its own, which is redundant."""
  tiles = machine.row.pipelined(machine.arch)  # type: ignore[misc]
  with machine.device():
    case = Case.of(machine, (1, 2, 1, 128, 96, 200, 136))
    outcomes = emulator.delete_each_barrier(lambda: case.run(tiles))
  assert {x.what for x in outcomes} == machine.row.barriers
  redundant = [x.kernel.split("_")[2] for x in outcomes if x.caught is None]
  assert redundant == (["k", "v"] if machine is CL else [])


@pytest.mark.slow
@pytest.mark.each("machine", "short", evenly=True)
@pytest.mark.parametrize("short", ["q", "k", "v", "do", "lse", "delta", "p", "ds"])
@pytest.mark.parametrize("machine", [CUDA, CL], ids=str)
def test_a_shortened_buffer_is_caught(machine: Machine, short: str) -> None:
  """The kernels take every buffer for 70 rows; one of them has 69."""
  with machine.device() as device:
    case, tiles, results = Case.of(machine, (1, 1, 1, 70, 70, 16, 16)), machine.small(), dict[str, Any]()
    for i, launch in enumerate(case.launches):
      names = [x.name for x in launch.own if x.mode == "read"]
      if short in names:
        whole = (case.operands | results)[short]
        cut_shape = tuple(69 if n == 70 else n for n in whole.shape)
        cut = stored(np.zeros(cut_shape, np.float32), whole.dtype, device)
        slot = [x.name for x in launch.own].index(short)
        with pytest.raises(emulator.OutOfBounds, match=f"argument {slot} "):
          case.launched(i, tiles, **(results | {short: cut}))
      results |= case.launched(i, tiles, **results)


def of_first_head(right: Any) -> Any:
  def of(*arguments: Any) -> Any:
    heads = right(*arguments)
    return replace(heads, head=heads.head - heads.member)

  return of


MISTAKES: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
  "a chunk of other columns": (HeadView, "columns", lambda right: lambda self, first: right(self, first // 32 * 16)),
  "no delta": (RowStats, "of", lambda right: lambda *x: (right(*x)[0], right(*x)[1] * 0.0)),
  "no causal mask": (
    HeadRules,
    "scores",
    lambda right: lambda self, products, row, first, offsets, masked: right(self, products, row, first, offsets, False),
  ),
  "scores not pulled back": (wide_backward, "score_vjp", lambda right: lambda rules, rows, p, *rest: p),
  "a group's first head for all": (QueryHeads, "of", of_first_head),
  "tiles of scores not transposed": (
    mma.Mma,
    "load_for_ab",
    lambda right: lambda self, rows, step, lane, transposed: right(self, rows, step, lane),
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.each("machine", "name", evenly=True)
@pytest.mark.parametrize("machine", [CUDA, CL], ids=str)
def test_a_mistake_is_caught(machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  owner, phase, wrong = MISTAKES[name]
  machine = CUDA if owner is mma.Mma else machine
  with machine.device():
    case, tiles = Case.of(machine, (1, 2, 1, 50, 90, 160, 136), {"is_causal": True}), machine.small()
    monkeypatch.setattr(owner, phase, wrong(getattr(owner, phase)))
    compiled.cache_clear()
    with pytest.raises(AssertionError, match="worst at"):
      case.check(tiles)
    compiled.cache_clear()


def spec(D: int, dtype: Any = HALF, **more: Any) -> AttentionSpec:
  return AttentionSpec(1, 8, 8, 4096, 4096, D, D, dtype, D**-0.5, **more)


@pytest.mark.parametrize(
  ("device", "arch", "dtype", "D", "name"),
  [
    ("CUDA", "sm_80", HALF, 416, "cuda_backward_separate"),
    ("CUDA", "sm_80", HALF, 448, "cuda_wide_backward"),
    ("CUDA", "sm_90", BFLOAT, 4096, "cuda_wide_backward"),
    ("CUDA", "sm_75", HALF, 320, "cuda_wide_backward"),
    ("CUDA", "sm_75", BFLOAT, 64, "generic_wide_backward"),
    ("CUDA", "sm_86", FLOAT, 256, "cuda_wide_backward"),
    ("AMD", "gfx942", HALF, 576, "generic_wide_backward"),
    ("AMD", "gfx950", HALF, 576, "amd_backward_separate"),
    ("METAL", "Apple9", HALF, 512, "generic_wide_backward"),
    ("CL", "", HALF, 512, "generic_wide_backward"),
  ],
)
def test_which_schedule_serves(device: str, arch: str, dtype: Any, D: int, name: str) -> None:
  found = dispatch_backward(spec(D, dtype), Target(device, arch))
  assert {x.schedule.name for x in found} == {name}
  assert [x.kernel.gradients for x in found if "wide" in name] in ([], KINDS)


@pytest.mark.parametrize(
  ("device", "arch", "dtype", "D"), [("CUDA", "sm_75", FLOAT, 192), ("CUDA", "sm_75", BFLOAT, 64)]
)
def test_forward_kernels_without_matrix_units_serve_what_others_do_not(
  device: str, arch: str, dtype: Any, D: int
) -> None:
  assert dispatch(spec(D, dtype), Target(device, arch)).schedule.name == "generic_forward"


def test_plain_ops_are_faster_at_large_head_sizes_without_matrix_units() -> None:
  with pytest.raises(NoKernel):
    dispatch(spec(512, FLOAT), Target("CUDA", "sm_80"))
  with pytest.raises(ValueError, match="head size 576: above 192 plain ops are faster on AMD"):
    next(generic.forward(spec(576), Target("AMD", "gfx942")))
  assert dispatch(spec(320), Target("CL", "")).schedule.name == "generic_forward"


def test_tuning_stores_scores_only_where_nothing_else_serves() -> None:
  for D, stores in ((256, False), (576, True)):
    found = candidates_backward(spec(D), Target("CUDA", "sm_80"))
    assert len(found) > 1
    assert {stores_scores(x) for x in found} == {stores}


def test_operations_are_counted_once() -> None:
  """Five products."""
  latent = replace(spec(576), Dv=512)
  found = dispatch_backward(latent, Target("CUDA", "sm_90"))
  assert sum(x.estimates().ops for x in found) == pytest.approx(latent.flops * (3 * 576 + 2 * 512) / (576 + 512))


@pytest.mark.parametrize("gradients", KINDS)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90"])
def test_tiles_fit(arch: str, dtype: Any, gradients: str) -> None:
  target, problem = Target("CUDA", arch), problem_of(8, 128, 2048, 576, 512, HALF if arch == "sm_75" else dtype)
  found = list(cuda.wide_backward(problem, target, gradients))
  assert found
  for x in found:
    assert x.bytes_of(gradients) <= target.lds


@pytest.mark.parametrize("rows", [8, 2048])
def test_tiles_fit_without_matrix_units(rows: int) -> None:
  """In the 16 KiB of local memory that all GPUs have."""
  for launch in dispatch_backward(replace(spec(576), M=rows, N=rows), Target("WEBGPU", "")):
    buffers = (u for u in launch.graph().toposort() if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL)
    assert launch.schedule.name == "generic_wide_backward"
    assert 0 < sum(u.max_numel() * u.dtype.itemsize for u in buffers) <= 16 << 10


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"block": 48}, r"Tiles\.block=48: must be a multiple of 32"),
    ({"width": 0}, r"Tiles\.width=0: must be a multiple of 32"),
    ({"in_registers": True}, r"Tiles\.in_registers=True: must be False"),
    ({"stages": 1}, r"Tiles\.stages=1: must be at least 2"),
  ],
)
def test_tiles_state_their_laws(options: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    cuda_wide_backward.Tiles(**({"warps": 4, "row_tiles": 1, "block": 64, "in_registers": False} | options))


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ((10, 16, 4, 4), r"Tiles\.rows=10: must be a positive multiple of own=4"),
    ((16, 12, 4, 4), r"Tiles\.block=12: must be a positive multiple of 8, and of across=4"),
    ((16, 16, 4, 4, False, 20), r"Tiles\.width=20: must be a positive multiple of 8, and of across=4"),
    ((16, 16, 4, 4, False, 64, 12), r"Tiles\.chunk=12: must be a positive multiple of 8"),
    ((16, 16, 4, 4, True), r"Tiles\.in_local=True: must be False"),
    ((64, 16, 1, 8), "Tiles: 512 threads per workgroup; must be at most 256, which every GPU supports"),
  ],
)
def test_generic_tiles_state_their_laws(sizes: tuple[int, ...], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    generic_wide_backward.Tiles(*sizes)


def test_tiles_are_for_one_type() -> None:
  tiles, x = cuda_wide_backward.Tiles(4, 1, 64, in_registers=False), UOp.placeholder((1, 64, 64), FLOAT, 0)
  with pytest.raises(ValueError, match=r"Tiles\.step=16: must be 8"):
    wide_backward.backward_v(x, x, x, rules=Rules(64, 64, 1), tiles=tiles)
