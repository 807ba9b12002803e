"""What only `hopper_float32_forward` has: three terms per number, and the kernel before it; see also test_forward."""

from dataclasses import replace

import numpy as np
import pytest
from conformance import SUBJECTS, Options
from gradients import check_gradients
from helpers import inputs, on_device, placed
from tinygrad import Tensor, TinyJit, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.gpu.terms import PAIRS
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target, lds_limit
from uopattn.emulator import warpgroup
from uopattn.kernels import hopper_float32_forward
from uopattn.kernels.hopper_float32_forward import SCHEDULE, Tiles, forward, split
from uopattn.plan.dispatch import NoKernel, candidates, dispatch, stages
from uopattn.plan.tiles import hopper
from uopattn.proof.gate import Gate
from uopattn.spec.spec import AttentionSpec

SUBJECT, F32, TARGET = SUBJECTS["hopper32"], dtypes.float32, Target("CUDA", "sm_90")
SINKS = np.array([0.5, -1.0], np.float32)
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)


def spec(D: int = 64, **options) -> AttentionSpec:
  return AttentionSpec(1, 1, 1, 500, 500, D, D, F32, D**-0.5, **options)


def terms_of(x: np.ndarray) -> np.ndarray:
  """The terms that the kernel makes of (rows, D), (3, rows, D) float32."""
  rows, D = x.shape
  with SUBJECT.on("sm_90"):
    sources = [placed(x[None]) for _ in "kv"]
    to = [Tensor.full((1, rows, 3 * 64), np.nan, dtype=dtypes.bfloat16, device="EMU").contiguous() for _ in "kv"]
    found = Tensor.custom_kernel(*to, *sources, fxn=split)[1].realize()
    bits = found.bitcast(dtypes.ushort).numpy().astype(np.uint32) << 16
  terms = bits.view(np.float32).reshape(rows, 3, 64).swapaxes(0, 1)
  assert (terms[:, :, D:] == 0).all()
  return terms[:, :, :D]


def test_terms_add_up_to_any_finite_number() -> None:
  """Exactly, but for what is below bfloat16's smallest number."""
  x = np.random.default_rng(0).standard_normal((7, 5)) * 10.0 ** np.arange(-30, 40, 10)[:, None]
  x = x.astype(np.float32).clip(-LARGEST, LARGEST)
  x[0], x[1, 0] = (LARGEST, -LARGEST, 0, 1 + 2.0**-23, 2.0**-100), -0.0
  np.testing.assert_array_equal(terms_of(x).astype(np.float64).sum(0), x)
  tiny = np.array([[SMALLEST, 3 * 2.0**-130, 1.1754944e-38, -1e-40]], np.float32)
  assert np.abs(terms_of(tiny).astype(np.float64).sum(0) - tiny).max() <= 2.0**-134


@pytest.mark.slow
@pytest.mark.parametrize("left_out", range(len(PAIRS[3])))
def test_each_product_of_terms_is_needed(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
  with SUBJECT.on("sm_90"):
    sources = inputs(1, 1, 1, 50, 150, 16, 16, F32)
    SUBJECT.check(*sources)
    pairs = [x for i, x in enumerate(PAIRS[3]) if i != left_out]
    monkeypatch.setattr(warpgroup, "PAIRS", PAIRS | {3: pairs})
    with pytest.raises(AssertionError, match="worst at"):
      SUBJECT.check(*sources)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1e25, 1e-25, 1e37), (1e-32, 1e32, 1e-32), (1e-30, 1e-10, 1.0)], ids=str)
def test_all_exponents(factors: tuple[float, float, float]) -> None:
  q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 40, 16), np.float32)
  q, k, v = (x * np.float32(factor) for x, factor in zip((q, k, v), factors, strict=True))
  with SUBJECT.on("sm_90"):
    out, lse = attention(placed(q), placed(k), placed(v), return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  gate = Gate.of_arrays(q, k, v, F32)
  assert gate.output(out.numpy()).correct
  assert gate.lse(lse.numpy()).correct


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": (20, 5)}, {"sinks": SINKS}, {"is_causal": True, "q_start": 9}], ids=str)
def test_masks_of_places_and_sinks(options: Options) -> None:
  with SUBJECT.on("sm_90", chosen=True):
    passed = {name: on_device(x) for name, x in options.items()}
    SUBJECT.check(*inputs(1, 2, 1, 140, 150, 40, 72, F32), passed, **options)


@pytest.mark.slow
def test_a_warpgroup_leaves_out_no_more_tiles_than_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
  """With tiles of 16 keys the first of two warpgroups sees four tiles fewer; the producer waits for all but one."""
  right = hopper_float32_forward.of_warpgroup
  with SUBJECT.on("sm_90", Tiles(2, 16)):
    sources = inputs(1, 1, 1, 128, 128, 16, 16, F32)
    SUBJECT.check(*sources, is_causal=True)
    monkeypatch.setattr(
      hopper_float32_forward,
      "of_warpgroup",
      lambda job, rules, tiles, warp: right(job, rules, replace(tiles, stages=4), warp),
    )
    with pytest.raises(emulator.KernelError):
      SUBJECT.check(*sources, is_causal=True)


@pytest.mark.slow
def test_gradients_and_views_and_replays() -> None:
  """Both kernels are in a call's graph: of transposed q, with a Variable, captured, and under a gradient."""
  with SUBJECT.on("sm_90"):
    check_gradients(*inputs(1, 2, 1, 40, 50, 24, 16, F32), {"is_causal": True, "q_start": 10})
    q, k, v = inputs(1, 40, 40, 2, 50, 24, 16, F32)[0], *inputs(1, 2, 2, 40, 50, 24, 16, F32)[1:]
    start = UOp.variable("start", 0, 50)
    step = TinyJit(lambda q, start: attention(q.transpose(1, 2), k, v, q_start=start, is_causal=True).realize())
    for i in (3, 10, 7, 20):
      out = step(q, start.bind(i))
      SUBJECT.verify(q.transpose(1, 2), k, v, out, is_causal=True, q_start=i)


@pytest.mark.slow
@pytest.mark.parametrize("short", range(4))
def test_a_shortened_buffer_is_caught(short: int) -> None:
  """The kernel takes every buffer for 70 rows; one of them has 69."""
  claimed = [UOp.placeholder((1, 70, 192 if i < 2 else 16), dtypes.bfloat16 if i < 2 else F32, i) for i in range(4)]
  with SUBJECT.on("sm_90"):
    rows = [69 if i == short else 70 for i in range(4)]
    tensors = [placed(np.zeros((1, n, 192), np.float32), dtypes.bfloat16) for n in rows[:2]]
    tensors += [placed(np.zeros((1, n, 16), np.float32)) for n in rows[2:]]
    with pytest.raises(emulator.OutOfBounds, match=rf"argument {short}\b"):
      Tensor.custom_kernel(*tensors, fxn=lambda *_: split(*claimed))[0].realize()


@pytest.mark.parametrize("D", [1, 33, 64, 80, 128])
def test_it_is_measured_beside_the_other_kernel(D: int) -> None:
  found = [x for x in candidates(spec(D), TARGET) if x.schedule is SCHEDULE]
  assert dispatch(spec(D), TARGET).schedule.name == "cuda_forward"  # as there is too little to do
  assert len(found) == 1
  assert [x.kernel.build for x in stages(found[0])] == [split, forward]
  tiles = list(hopper.float32_forward(spec(D), TARGET))
  assert tiles[0] == found[0].tiles
  assert max(x.shared_bytes(D, D) for x in tiles) < lds_limit("sm_90") - 2048  # barriers and tensor maps


@pytest.mark.parametrize(
  ("change", "name"),
  [
    ({}, SCHEDULE.name),
    ({"masks": (Window(None, 0),), "features": ("sinks",), "Hkv": 2}, SCHEDULE.name),
    ({"Dk": 72, "Dv": 72}, "cuda_forward"),  # a panel of 128 columns would have 56 of zeros
    ({"M": 1000}, "cuda_forward"),
    ({"Hq": 4, "Hkv": 4}, "cuda_forward"),  # too few jobs
    ({"masks": (Window(100, 0),)}, "cuda_forward"),
    ({"tf32": True}, "cuda_forward"),
  ],
  ids=str,
)
def test_dispatch_takes_it_where_it_is_known_to_be_faster(change: Options, name: str) -> None:
  large = AttentionSpec(2, 16, 16, 1024, 1024, 64, 64, F32, 0.125)
  assert dispatch(replace(large, **change), TARGET).schedule.name == name


@pytest.mark.parametrize(
  "given",
  [spec(136), replace(spec(), features=("softcap",)), replace(spec(), kv_dtype=dtypes.half)],
  ids=["large head", "softcap", "keys of 16 bits"],
)
def test_what_it_does_not_serve(given: AttentionSpec) -> None:
  assert {x.schedule.name for x in candidates(given, TARGET)} == {"cuda_forward"}


def test_bad_tiles() -> None:
  for given, match in (
    ((4, 64), r"warpgroups=4: must be in \(1, 2, 3\)"),
    ((1, 24), "block_n=24"),
    ((1, 32, 0), "stages=0"),
  ):
    with pytest.raises(ValueError, match=match):
      Tiles(*given)
  with pytest.raises(NoKernel, match="which no kernel for CUDA takes by itself"):
    dispatch(spec(), TARGET, Tiles(1, 16), single_kernel=True)


def test_lengths_are_refused_with_tiles_of_ones_own() -> None:
  with SUBJECT.on("sm_90"), pytest.raises(ValueError, match="of a length known in advance"):
    attention(*inputs(1, 1, 1, 20, 20, 16, 16, F32), kv_lengths=on_device(np.array([9])), backend="kernel")
