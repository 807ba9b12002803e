"""What the tests share: inputs, the one way to check an output, and machines other than this one."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from tinygrad import Context, Device, Tensor, dtypes
from tinygrad.dtype import DType, _to_np_dtype

import uopattn.emulator as emulator
from uopattn import attention, flash
from uopattn.dsl.schedule import Problem, Schedule
from uopattn.dsl.target import Target, VectorUnit
from uopattn.plan import dispatch
from uopattn.plan.target import target_of
from uopattn.proof.gate import verify
from uopattn.proof.oracle import Array, round_to_bfloat16
from uopattn.runtime.clang import NoCompiler

DTYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


def qkv(
  B: int, Hq: int, Hkv: int, M: int, N: int, Dk: int, Dv: int, dtype: DType = dtypes.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
  """Normal random q, k and v of four dimensions."""
  return _random((B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv), dtype=dtype, seed=seed)


def _random(*shapes: tuple[int, ...], dtype: DType, seed: int, device: str | None = None) -> Any:
  random = np.random.default_rng(seed)
  return tuple(placed(random.standard_normal(shape, np.float32), dtype, device) for shape in shapes)


def normal(*shape: int, seed: int = 0) -> Array:
  """Normal random numbers, float32; those of another shape or seed are others."""
  return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def placed(x: Array, dtype: DType | None = None, device: str | None = None) -> Tensor:
  """An array on a device, by default the default one, in its own type or another one.

  Cast in numpy where that knows the type: tinygrad would compile a kernel for every shape.
  """
  if dtype == dtypes.bfloat16:
    bits = round_to_bfloat16(np.ascontiguousarray(x, np.float32)).astype(np.float32).view(np.uint32) >> 16
    return Tensor(bits.astype(np.uint16).tobytes(), dtype=dtype, device=device).reshape(x.shape).realize()
  kind = None if dtype is None or dtype in dtypes.fp8s else _to_np_dtype(dtype)
  return Tensor(x if kind is None else x.astype(kind), dtype=dtype, device=device).realize()


def on_device(x: Any) -> Any:
  """Arrays, and those in a tuple, as Tensors on the default device."""
  if isinstance(x, tuple) and x and isinstance(x[0], np.ndarray):
    return tuple(map(on_device, x))
  return placed(x) if isinstance(x, np.ndarray) else x


def on(arch: str) -> Context:
  """The emulator in place of a GPU; it runs what tinygrad has optimized sooner."""
  return Context(DEV=f"EMU::{arch}", NOOPT=0)


def inputs(
  B: int, Hq: int, Hkv: int, M: int, N: int, Dk: int, Dv: int, dtype: DType = dtypes.float16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
  """Normal random q, k and v on the emulator."""
  return _random((B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv), dtype=dtype, seed=seed, device="EMU")


def drawn(quick: int, values: int = 2, slow: int = 200) -> settings:
  """Hypothesis' settings where each example lowers a kernel of its own: how many are drawn, with --values, with --slow.

  The first drawn is the simplest: with `quick` of 0 only the explicit examples run, which can be better ones.
  """
  most = {settings.get_profile(name).max_examples: n for name, n in (("values", max(quick, values)), ("slow", slow))}
  if number := most.get(settings().max_examples, quick):
    return settings(max_examples=number)
  return settings(phases=(Phase.explicit,))


def spoiled_behind(lengths: Any, x: Tensor) -> Tensor:
  """x, keys or values, with NaN and infinities from each batch's length on."""
  array = x.float().numpy()
  for b, length in enumerate(lengths):
    array[b, :, length:] = np.resize([math.nan, math.inf, -math.inf], array[b, :, length:].shape)
  return placed(array, x.dtype)


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None, **options: Any) -> None:
  """Fails unless the output, and the LSE if given, pass the gate."""
  for report in verify(q, k, v, out, lse, **options):
    assert report.correct, f"worst at {report.worst}: {report}"


def check_attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "kernel", **options: Any) -> None:
  """Runs `attention` and fails unless its output and LSE pass the gate."""
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **options)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **options)


def poisoned(q: Tensor, v: Tensor) -> Tensor:
  """An output for `flash` on the emulator, full of NaN."""
  return Tensor.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device="EMU").contiguous().realize()


def run_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Any, causal: bool = False) -> Tensor:
  """Attention on the emulator with the given tiles."""
  fxn = functools.partial(flash, tiles=tiles, causal=causal, enable_gqa=True)
  return Tensor.custom_kernel(poisoned(q, v), q, k, v, fxn=fxn)[0].realize()


def counts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> emulator.Counters:
  """What the kernel of `attention` costs."""
  with emulator.profile() as profile:
    attention(q, k, v, backend="kernel", **options).realize()
  (found,) = [count for name, count in profile.kernels.items() if name.startswith("attention")]
  return found


def lower(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, segments: Any) -> Any:
  """A score_mod that reads one of two aux."""
  return score - slopes[h] * (i - j)


def same_segment(b: Any, h: Any, i: Any, j: Any, slopes: Any, segments: Any) -> Any:
  """A mask_mod that reads the other one."""
  return (segments[i] == segments[j]) | ((i + 2 * j + b) % 5 == h)


@contextmanager
def served_by(kernel: str) -> Iterator[None]:
  """`attention` takes this kernel, whichever it would take on the machine at hand."""
  wanted = [x for x in dispatch.every_schedule() if x.name == kernel]
  with pytest.MonkeyPatch.context() as patch:
    dispatch_among(patch, wanted)
    yield


def dispatch_among(patch: pytest.MonkeyPatch, schedules: Sequence[Schedule], backward: bool = False) -> None:
  """Let dispatch know only these schedules, for forward passes or, if `backward`, for gradients."""
  right, replaced = dispatch.schedules, "backward" if backward else "forward"

  def found(device: str, kind: dispatch.Kind = "forward") -> tuple[Schedule, ...]:
    if kind != replaced:
      return right(device, kind)
    return tuple(x for x in schedules if device in x.devices)

  patch.setattr(dispatch, "schedules", found)


def take_tiles(patch: pytest.MonkeyPatch, tiles: Any) -> None:
  """Wherever dispatch takes a kernel that has such tiles, it takes these."""
  right = dispatch.tiles_for

  def found(schedule: Schedule, *given: Any) -> Iterator[Any]:
    return iter([tiles]) if schedule.tiles is type(tiles) else right(schedule, *given)

  patch.setattr(dispatch, "tiles_for", found)


def problem_of(
  heads: int, M: int, N: int, Dk: int, Dv: int, dtype: DType = dtypes.float32, kv_heads: int | None = None, **more: Any
) -> Problem:
  """What tiles are chosen for."""
  return Problem(1, heads, kv_heads or heads, M, N, Dk, Dv, dtype, Dk**-0.5, **more)


def with_vectors(lanes: int, registers: int, threads: int = 1) -> Target:
  """A CPU with so many vector registers of so many float32."""
  return Target("CPU", "x86_64,native", VectorUnit(lanes, registers), threads)


def cpu_target(arch: str) -> Target:
  """A CPU in tinygrad's spelling, "arm64,cortex-a72", without AMX; skips the test if there is no compiler for it."""
  Device["CPU"]  # compiles programs of its own when it is first asked for: they are for this machine
  try:
    with Context(DEV=f"CPU::{arch}"):
      target = target_of("CPU")
      return replace(target, vector=replace(target.vector, tiles=False))
  except NoCompiler as error:
    pytest.skip(str(error))
