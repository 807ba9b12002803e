"""A cache of 4 bits: kernels are as exact as if it held the numbers that it stands for, which are the nearest ones."""

import math
from dataclasses import replace
from typing import Any

import four_bits
import numpy as np
import pytest
from helpers import on, placed, take_tiles
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import KVCache, RingCache, append_paged, attention, attention_paged
from uopattn.dsl import sizes
from uopattn.dsl.cpu import nibbles
from uopattn.dsl.instructions import Cpu
from uopattn.dsl.nvidia import narrow
from uopattn.dsl.rules import head_view
from uopattn.dsl.rules.quantized import FORMATS, INT4, NVFP4, FourBits
from uopattn.dsl.target import Target, VectorUnit
from uopattn.kernels import cuda_forward
from uopattn.kernels.cpu_decode import Tiles
from uopattn.plan.dispatch import dispatch
from uopattn.proof.gate import Gate, GradientGate, numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.prepare import compiled
from uopattn.spec.spec import AttentionSpec

B, HQ, HKV, N, DK, DV, LENGTH = 2, 4, 2, 90, 32, 48, 77


def realize(cache: KVCache | RingCache) -> None:
  assert cache.k_scale is not None
  assert cache.v_scale is not None
  Tensor.realize(cache.k, cache.v, cache.k_scale, cache.v_scale)


def filled(kind: str, rows: tuple[Array, Array], device: str = "CPU") -> KVCache:
  cache = KVCache(B, HKV, N, *(x.shape[-1] for x in rows), dtype=kind, device=device)
  k, v = (Tensor(x, device=device) for x in rows)
  cache.append(k, v, 0)
  realize(cache)
  return cache


def drawn(seed: int = 0, head_sizes: tuple[int, int] = (DK, DV)) -> tuple[Array, Array]:
  rng = np.random.default_rng(seed)
  factors = np.exp2(np.arange(LENGTH) % 5 - 2).reshape(1, 1, -1, 1)
  k, v = ((rng.standard_normal((B, HKV, LENGTH, D)) * factors).astype(np.float32) for D in head_sizes)
  return k, v


def stood_for(packed: Tensor, row_scale: Tensor | None, kind: str, D: int) -> Array:
  """What rows stand for, in float64."""
  assert row_scale is not None
  rows, scales = (x.numpy()[:, :, :LENGTH] for x in (packed, row_scale))
  return four_bits.stood_for(rows, scales, FORMATS[kind], D)


def check_attend(
  cache: KVCache,
  kind: str,
  q_dtype: DType,
  M: int,
  device: str = "CPU",
  backend: str = "kernel",
  head_sizes: tuple[int, int] = (DK, DV),
) -> None:
  """Check the last M queries of the text on a device; what is behind it there is no number."""
  Dk, Dv = head_sizes
  keys, values = stood_for(cache.k, cache.k_scale, kind, Dk), stood_for(cache.v, cache.v_scale, kind, Dv)
  for name in ("k", "v", "k_scale", "v_scale"):
    array = getattr(cache, name).numpy()
    array[:, :, LENGTH:] = 255 if array.dtype == np.uint8 else math.nan
    setattr(cache, name, placed(array, device=device))
  q = placed(np.random.default_rng(1).standard_normal((B, HQ, M, Dk), np.float32), q_dtype, device)
  out, lse = cache.attend(q, LENGTH - M, return_lse=True, backend=backend)
  Tensor.realize(out, lse)
  gate = Gate.of_arrays(numpy(q), keys, values, q.dtype, is_causal=True, q_start=LENGTH - M)
  for report in (gate.output(numpy(out)), gate.lse(numpy(lse))):
    assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("kind", FORMATS)
def test_elements_are_rounded_to_nearest(kind: str) -> None:
  """Each is within half a step, of numbers between which it lies, or clipped by at most the rounding of the scale."""
  rows = drawn()
  cache = filled(kind, rows)
  for x, packed, scale, D in ((rows[0], cache.k, cache.k_scale, DK), (rows[1], cache.v, cache.v_scale, DV)):
    got = stood_for(packed, scale, kind, D)
    groups = np.abs(x).reshape(*x.shape[:-1], D // 16, 16).max(-1).repeat(16, -1)
    step = groups / (7 if kind == "int4" else 3)  # at most 2 of 6 between numbers of nvfp4
    assert (np.abs(got - x) <= step * 0.54).all()
    error = np.sqrt(np.square(got - x).mean() / np.square(x).mean())
    assert 0.07 < error < 0.11


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("M", "q_dtype"), [(1, dtypes.float32), (3, dtypes.half), (40, dtypes.bfloat16)], ids=str)
def test_on_the_cpu(kind: str, M: int, q_dtype: DType) -> None:
  check_attend(filled(kind, drawn()), kind, q_dtype, M)


@pytest.mark.kinds(kind=("int4",), head_sizes=((128, 64),))
@pytest.mark.parametrize("head_sizes", [(128, 64), (96, 256), (16, 128)])
@pytest.mark.parametrize("kind", FORMATS)
def test_lanes_of_words_and_of_halves(kind: str, head_sizes: tuple[int, int]) -> None:
  check_attend(filled(kind, drawn(0, head_sizes)), kind, dtypes.float32, 1, head_sizes=head_sizes)


@pytest.mark.kinds(kind=("nvfp4",))
@pytest.mark.parametrize(("lanes", "head_sizes"), [(16, (128, 64)), (16, (48, 144)), (8, (64, 96)), (4, (32, 80))])
@pytest.mark.parametrize("kind", FORMATS)
def test_decode_on_any_cpu(kind: str, lanes: int, head_sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
  """The kernel for vectors of so many lanes, on the emulator."""
  take_tiles(monkeypatch, Tiles(2, 16, 2, 3, 3, lanes))
  with on("amx"):
    check_attend(filled(kind, drawn(0, head_sizes)), kind, dtypes.float32, 1, "EMU", head_sizes=head_sizes)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_agrees(kind: str) -> None:
  check_attend(filled(kind, drawn()), kind, dtypes.float32, 3, backend="reference")


CASES = {
  "int4 for half": ("int4", dtypes.half, 1),
  "nvfp4 for half": ("nvfp4", dtypes.half, 40),
  "int4 for bfloat16": ("int4", dtypes.bfloat16, 3),
  "nvfp4 for float": ("nvfp4", dtypes.float32, 1),
}
ARCHES = ("sm_75", "sm_80", "sm_90", "gfx1100", "gfx1201", "gfx942", "gfx950", "apple7", "cl")


@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize(
  ("arch", "name"),
  [
    pytest.param(arch, name, marks=() if (arch, name) == ("sm_80", "int4 for half") else pytest.mark.slow)
    for arch in ARCHES
    for name, (_, q_dtype, _) in CASES.items()
    if arch != "sm_75" or q_dtype == dtypes.half
  ],
)
def test_on_gpus(arch: str, name: str) -> None:
  kind, q_dtype, M = CASES[name]
  with on(arch):
    check_attend(filled(kind, drawn()), kind, q_dtype, M, "EMU")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0**-6, 2.0**9])
@pytest.mark.parametrize("kind", FORMATS)
def test_small_and_large_values_in_float16(kind: str, size: float) -> None:
  """Where scales and weights, multiplied in float16, could leave its range though the values do not."""
  k, v = drawn()
  with on("sm_80"):
    check_attend(filled(kind, (k, v * np.float32(size))), kind, dtypes.half, 1, "EMU")


@pytest.mark.parametrize(
  ("target", "name"),
  [
    (Target("CUDA", "sm_90"), "cuda_forward"),
    (Target("CPU", "x86_64,native", VectorUnit(16, 32, True, tiles=True)), "cpu_forward"),
  ],
  ids=["wgmma", "amx"],
)
def test_another_kernel_serves(target: Target, name: str) -> None:
  """Where the kernel that usually serves copies keys without looking at them."""
  given: dict[str, Any] = {"features": ("scales",), "kv_dtype": INT4}
  usual = AttentionSpec(1, 8, 2, 100, 300, 64, 64, dtypes.bfloat16, 0.125)
  assert dispatch(usual, target).schedule.name != name
  assert dispatch(replace(usual, **given), target).schedule.name == name


bits_of, number_at, numbers_of, crossed = head_view.bits_of, nibbles.number_at, nibbles.numbers_of, narrow.crossed
group_scales, look_up = Cpu.group_scales, Cpu.look_up


def of_the_next_group(word: UOp, scale: UOp, count: int, stored: FourBits, to: DType) -> list[UOp]:
  return bits_of(word, scale + 8, count, stored, to)


def of_the_other_format(word: UOp, scale: UOp, count: int, stored: FourBits, to: DType) -> list[UOp]:
  return bits_of(word, scale, count, NVFP4 if stored == INT4 else INT4, to)


def in_the_order_of_memory(word: UOp, column: UOp) -> UOp:
  return word >> (column % 8 * 4).cast(dtypes.uint)


def numbers_of_the_other_format(word: UOp, shift: int, stored: FourBits) -> UOp:
  return number_at(word, shift, NVFP4 if stored == INT4 else INT4)


def entries_of_the_other_format(stored: FourBits) -> tuple[float, ...]:
  return numbers_of(NVFP4 if stored == INT4 else INT4)


def planes_in_the_order_of_memory(planes: nibbles.Planes, plane: UOp, lane: UOp) -> UOp:
  return lane * planes.count + plane


def scales_of_the_next_group(cpu: Cpu, lanes: int, each: int, to: UOp, words: UOp, offset: UOp, *rest: Any) -> UOp:
  return group_scales(cpu, lanes, each, to, words, offset ^ 1, *rest)


def low_halves_of_words(cpu: Cpu, lanes: int, per_word: int, *rest: Any) -> UOp:
  return look_up(cpu, lanes, 1, *rest)


def rounded_down(cpu: Cpu, lanes: int, per_word: int, to: UOp, words: UOp, shift: int, table: Any, *rest: Any) -> UOp:
  return look_up(cpu, lanes, per_word, to, words, shift, (*table[:7], table[6], *table[8:]), *rest)


def scale_of_the_other_row(a: UOp, b: UOp, stored: DType, to: DType, scales: UOp) -> list[UOp]:
  return crossed(a, b, stored, to, (scales << 16) | (scales >> 16))


LANES = (  # mistakes of CPU decode: how many lanes, where, what stands there
  (16, nibbles, "numbers_of", entries_of_the_other_format),
  (8, nibbles, "number_at", numbers_of_the_other_format),
  *((lanes, nibbles.Planes, "element", planes_in_the_order_of_memory) for lanes in (16, 8)),
  *((lanes, Cpu, "group_scales", scales_of_the_next_group) for lanes in (16, 8)),
  (16, Cpu, "look_up", low_halves_of_words),
  (16, Cpu, "look_up", rounded_down),
)


@pytest.mark.kinds(kind=("int4",))
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("lanes", "module", "name", "mistake"), LANES, ids=[f"{x[0]}-{x[3].__name__}" for x in LANES])
def test_a_mistake_in_decode_on_a_cpu_is_caught(
  lanes: int, module: Any, name: str, mistake: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  cache = filled(kind, drawn(0, (64, 64)))
  compiled.cache_clear()
  take_tiles(monkeypatch, Tiles(2, 16, 2, 3, 8, lanes))
  monkeypatch.setattr(module, name, mistake)
  with on("amx"), pytest.raises(AssertionError, match="worst at"):
    check_attend(cache, kind, dtypes.float32, 1, "EMU", head_sizes=(64, 64))
  compiled.cache_clear()


MISTAKES = (  # where, what stands there, and on which device, for how many queries
  (head_view, "bits_of", of_the_next_group, "CPU", 40),
  (head_view, "bits_of", of_the_other_format, "CPU", 40),
  (head_view, "of_word", in_the_order_of_memory, "CPU", 40),
  (narrow, "crossed", scale_of_the_other_row, "EMU", 1),
)


@pytest.mark.kinds(kind=("int4",))
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
  ("module", "name", "mistake", "device", "M"), MISTAKES, ids=[mistake.__name__ for _, _, mistake, _, _ in MISTAKES]
)
def test_a_mistake_is_caught(
  module: Any, name: str, mistake: Any, device: str, M: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  cache = filled(kind, drawn())
  compiled.cache_clear()
  monkeypatch.setattr(module, name, mistake)
  with on("sm_80"), pytest.raises(AssertionError, match="worst at"):
    check_attend(cache, kind, dtypes.float32 if device == "CPU" else dtypes.half, M, device)
  compiled.cache_clear()


@pytest.mark.kinds(kind=("int4",))
@pytest.mark.parametrize("M_max", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_ring(kind: str, M_max: int) -> None:
  """As a `KVCache` that holds the whole text."""
  (k, v), first = drawn(), UOp.variable("start", 0, LENGTH - 2)
  ring, whole = RingCache(B, HKV, 20, DK, DV, M_max=M_max, dtype=kind, device="CPU"), filled(kind, (k, v))
  for position in range(0, 30, M_max):
    new_k, new_v = (placed(x[:, :, position : position + M_max], device="CPU") for x in (k, v))
    ring.append(new_k, new_v, first.bind(position))
    realize(ring)
  q = placed(np.random.default_rng(1).standard_normal((B, HQ, M_max, DK), np.float32), device="CPU")
  got = ring.attend(q, first.bind(30 - M_max), backend="kernel").numpy()
  expected = whole.attend(q, first.bind(30 - M_max), window=(19, 0), backend="kernel").numpy()
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1])
def test_on_several_devices(axis: int) -> None:
  devices, k, v = ("CPU", "CPU:1"), *(placed(x, device="CPU") for x in drawn())
  q, found = placed(np.random.default_rng(1).standard_normal((B, HQ, 1, DK), np.float32), device="CPU"), []
  for where in (None, devices):
    cache = KVCache(B, HKV, N, DK, DV, dtype="int4", device=where or "CPU", axis=None if where is None else axis)
    rows = (k, v, q) if where is None else (x.shard(where, axis) for x in (k, v, q))
    k_rows, v_rows, queries = rows
    cache.append(k_rows, v_rows, 0)
    found.append(cache.attend(queries, LENGTH - 1, backend="kernel").numpy())
  np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_a_row_that_is_no_number_shows() -> None:
  rows = drawn()
  rows[1][:, :, 5, 3] = math.inf
  out = filled("int4", rows).attend(placed(np.ones((B, HQ, 1, DK), np.float32)), LENGTH - 1, backend="kernel")
  assert np.isnan(out.numpy()).all()


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"dtype": "int3"}, TypeError, "dtype is 'int3'; accepted are .*'int4', 'nvfp4'"),
    ({"dtype": "int4", "Dk": 33}, ValueError, "Dk is 33; in int4 it must be a multiple of 16"),
  ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
  given = {"Dk": DK, **options}
  with pytest.raises(error, match=message):
    KVCache(B, HKV, N, **given)


def test_what_a_cache_does_not_take() -> None:
  cache = KVCache(B, HKV, N, DK, DV, dtype="int4")
  assert sizes(cache.k)[-1] == 20
  q, k, v = (Tensor.zeros(B, *x) for x in ((HQ, 3, DK), (HKV, 3, DK), (HKV, 3, DV)))
  with pytest.raises(TypeError, match="k has dtype uchar, the cache has int4; accepted are float, half, bfloat16"):
    cache.append(k.cast(dtypes.uchar), v, 0)
  with pytest.raises(ValueError, match=r"q has shape \(2, 4, 3, 48\); it must be \(2, Hq, M, 32\)"):
    cache.attend(Tensor.zeros(B, HQ, 3, 48), 0)
  with pytest.raises(TypeError, match="k has dtype uchar"):
    attention(q, cache.k, cache.v, enable_gqa=True, backend="kernel")
  table = Tensor.zeros(B, 1, dtype=dtypes.int)
  with pytest.raises(TypeError, match="k_pages has dtype uchar"):
    attention_paged(q, cache.k, cache.v, table, table[:, 0], enable_gqa=True)
  with pytest.raises(TypeError, match="k_pages has dtype uchar; kv_dtype must name its format"):
    append_paged(k, v, cache.k, cache.v, table, table[:, 0])


@pytest.mark.kinds(kind=("int4",))
@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_are_of_q_alone(kind: str) -> None:
  """Rows are rounded, so that k and v have gradients of 0."""
  rng = np.random.default_rng(1)
  for_q, do = (rng.standard_normal((B, HQ, 2, D), np.float32) for D in (DK, DV))
  for backend in ("auto", "reference"):
    k, v = (placed(x, device="CPU").is_param_() for x in drawn())
    q = placed(for_q, device="CPU").is_param_()
    cache = KVCache(B, HKV, N, DK, DV, dtype=kind, device="CPU")
    cache.append(k, v, 0)
    (cache.attend(q, LENGTH - 2, backend=backend) * placed(do, device="CPU")).sum().backward()
    of_q, of_k, of_v = (x.grad.numpy() for x in (q, k, v) if x.grad is not None)
    assert not of_k.any()
    assert not of_v.any()
    keys, values = stood_for(cache.k, cache.k_scale, kind, DK), stood_for(cache.v, cache.v_scale, kind, DV)
    gate = GradientGate.of_arrays(for_q, keys, values, do, dtypes.float32, is_causal=True, q_start=LENGTH - 2)
    for report in gate.reports(q=of_q):
      assert report.correct, f"{backend}, worst at {report.worst}: {report}"


@pytest.mark.parametrize(("kind", "Dk"), [("int4", 48), ("nvfp4", 80), (dtypes.int8, 24)], ids=str)
def test_narrow_tiles_by_hand_refuse_rows_that_are_no_whole_blocks(
  kind: DType | str, Dk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Elements of K behind its last block of four words would be left out of the product."""
  bits = 4 if isinstance(kind, str) else 8
  take_tiles(monkeypatch, cuda_forward.Tiles(1, 1, 32, narrow=bits))
  with on("sm_80"):
    cache = KVCache(1, 1, 40, Dk, 32, dtype=kind, device="EMU")
    q = placed(np.ones((1, 1, 1, Dk)), dtypes.half, "EMU")
    said = (
      f"Tiles.narrow={bits}: must be 0 for head sizes {Dk} and 32, .* multiples of {128 // bits} for K and 16 for V"
    )
    with pytest.raises(ValueError, match=said):
      cache.attend(q, 39, backend="kernel").realize()


@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_numbers_near_the_largest(kind: str, backend: str) -> None:
  """One key, whose value is then the output: no product on the way to it is infinite."""
  cache, v = KVCache(1, 1, 4, 16, dtype=kind), np.full((1, 1, 1, 16), 3e38, np.float32)
  v[..., ::3] = -1e38
  cache.append(Tensor.zeros(1, 1, 1, 16), Tensor(v), 0)
  out = cache.attend(Tensor.zeros(1, 1, 1, 16), 0, backend=backend)
  np.testing.assert_allclose(out.numpy(), v, rtol=0.3)
