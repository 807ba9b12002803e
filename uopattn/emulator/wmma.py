"""Matrix instructions: their fragment layouts and the product itself.

An instruction computes D = A @ B + C for one wave, with A (M, K), B (K, N), C and D (M, N). A fragment holds the
elements e of one lane l. Sources of the layouts: AMD, "RDNA3", "RDNA4" and "CDNA3" instruction set architecture
documents and the AMD matrix instruction calculator; NVIDIA, PTX ISA, "Matrix Fragments for mma.m16n8k8 / k16 / k32".

Products of 8- and 16-bit floats are exact in float32. They are summed in float32, in an order that the hardware does
not specify, and the accumulator is added last; a 16-bit accumulator is rounded once. AMD's products of float32 are
those of float32. NVIDIA's, tf32, ignore the low 13 bits of their inputs, and sums, the accumulator included, are
rounded towards zero, as tensor cores do (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021); in 16 bits
that does not matter. Integers are exact. On CDNA3 8-bit floats are FNUZ ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from . import alu
from .errors import Divergence, LaneMismatch, UnknownInstruction
from .lanes import Run

HALVES, FLOAT8 = (dtypes.half, dtypes.bfloat16), tuple(alu.FLOAT8)
Layout = Callable[[Any, Any], tuple[Any, Any]]  # (lane, element) -> (row, column) of the matrix


@dataclass(frozen=True)
class Fragments:
  """The layouts of one matrix instruction: A as (row, k), B as (k, column), C and D as (row, column)."""

  lanes: int
  elements: tuple[int, int, int]
  a: Layout
  b: Layout
  c: Layout
  repeated: bool = False  # lanes 16-31 must hold A and B as lanes 0-15 do


def _same(lanes: int, elements: tuple[int, int, int], a: Layout, c: Layout, repeated: bool = False) -> Fragments:
  """Return fragments whose layout of B is that of A transposed."""
  return Fragments(lanes, elements, a, lambda l, e: a(l, e)[::-1], c, repeated)


def _cdna(k: int) -> Fragments:
  n = k // 4
  return _same(64, (n, n, 4), lambda l, e: (l % 16, n * (l // 16) + e), lambda l, e: (4 * (l // 16) + e, l % 16))


RDNA3 = _same(32, (16, 16, 8), lambda l, e: (l % 16, e), lambda l, e: (2 * e + l // 16, l % 16), repeated=True)
RDNA4 = _same(
  32, (8, 8, 8), lambda l, e: (l % 16, (e & 3) + 8 * (e >> 2) + 4 * (l // 16)), lambda l, e: (8 * (l // 16) + e, l % 16)
)


def _nvidia(k: int, bits: int) -> Fragments:
  n = 32 // bits  # elements per 32-bit register, neighbours along k
  registers = k // (4 * n)  # 32-bit registers along k

  def a(l: Any, e: Any) -> tuple[Any, Any]:
    register = e // n
    return l // 4 + 8 * (register % 2), e % n + n * (l % 4) + 4 * n * (register // 2)

  def b(l: Any, e: Any) -> tuple[Any, Any]:
    return e % n + n * (l % 4) + 4 * n * (e // n), l // 4

  def c(l: Any, e: Any) -> tuple[Any, Any]:
    return l // 4 + 8 * (e // 2), 2 * (l % 4) + e % 2

  return Fragments(32, (2 * n * registers, n * registers, 4), a, b, c)


def _apple(l: Any, e: Any) -> tuple[Any, Any]:
  return l // 16 * 4 + l // 2 % 4, l // 8 % 2 * 4 + l % 2 * 2 + e


APPLE = Fragments(32, (2, 2, 2), _apple, _apple, _apple)


def _instructions(arch: str) -> Iterator[tuple[tuple[DType, ...], tuple[int, int, int], Fragments]]:
  """Yield the types of inputs, the sizes (N, M, K) and the layouts of an architecture's instructions."""
  if arch.startswith("gfx11"):
    yield (*HALVES, dtypes.char), (16, 16, 16), RDNA3
  elif arch in ("gfx1200", "gfx1201"):
    yield (*HALVES, *FLOAT8), (16, 16, 16), RDNA4
  elif arch in ("gfx942", "gfx950"):
    yield HALVES, (16, 16, 16), _cdna(16)
    yield FLOAT8, (16, 16, 32), _cdna(32)
    yield (dtypes.float,), (16, 16, 4), _cdna(4)
    if arch == "gfx950":
      yield HALVES, (16, 16, 32), _cdna(32)
      yield FLOAT8, (16, 16, 128), _cdna(128)
  elif arch.startswith("sm_"):
    since = int(arch.removeprefix("sm_"))
    yield (dtypes.half,), (8, 16, 8), _nvidia(8, 16)
    if since >= 80:
      yield HALVES, (8, 16, 16), _nvidia(16, 16)
      yield (dtypes.float,), (8, 16, 8), _nvidia(8, 32)
    if since >= 89:
      yield FLOAT8, (8, 16, 32), _nvidia(32, 8)
  elif arch.startswith("Apple"):
    yield (*HALVES, dtypes.float), (8, 8, 8), APPLE


@cache
def fragments(arch: str, dims: tuple[int, int, int], dtype: DType) -> Fragments:
  """Return the layouts of the instruction with `dims` (N, M, K) and inputs of `dtype`.

  Raises KeyError if the architecture has none.
  """
  for types, sizes, frags in _instructions(arch):
    if dtype in types and dims == sizes:
      return frags
  raise KeyError(f"{arch} {dims} {dtype}")


@cache
def _matrix_index(layout: Layout, lanes: int, elements: int, shape: tuple[int, int]) -> np.ndarray:
  """Return where a wave holds each matrix element: element * lanes + lane, for the lowest such lane."""
  e, lane = np.divmod(np.arange(elements * lanes)[::-1], lanes)
  row, column = layout(lane, e)
  index = np.full(shape, -1)
  index[row, column] = e * lanes + lane
  if (index < 0).any():
    raise ValueError(f"the fragments do not cover the {shape} matrix")
  return index


def _wave_values(run: Run, value: Any, elements: int, lanes: int, dtype: DType) -> np.ndarray:
  """Return every lane's vector as stored values of `dtype`: (elements, waves, lanes)."""
  vector = value if isinstance(value, list) else [value]
  to = alu.storage(dtype)
  if vector[0].dtype.itemsize != to.itemsize:  # packed as the compiler requires, e.g. eight fp8 in a uint64
    packed = np.ascontiguousarray(np.stack([run.spread(x) for x in vector], axis=-1)).view(to)
    return np.ascontiguousarray(packed.T).reshape(elements, -1, lanes)
  block = np.empty((elements, run.shape.lanes), to)
  for row, element in zip(block, vector, strict=True):
    row[:] = element if element.dtype == to else element.view(to)
  return block.reshape(elements, -1, lanes)


def _elements(u: UOp, value: Any, dtype: DType) -> int:
  """Return how many elements of `dtype` each lane's vector has, which may be packed."""
  return (len(value) if isinstance(value, list) else 1) * u.dtype.itemsize // dtype.itemsize


def _numbers(block: np.ndarray, dtype: DType, tf32: bool) -> np.ndarray:
  """Convert stored inputs to the numbers that the instruction multiplies."""
  if tf32:
    return (block.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)  # tf32
  if dtype in dtypes.ints:
    return block.astype(np.float64)  # exact: sums stay below 2**53
  return alu.decode(block, dtype).astype(np.float32)


def _operand(run: Run, u: UOp, value: Any, frags: Fragments, which: int, shape: tuple[int, int]) -> np.ndarray:
  dtype = u.arg[1]
  block = _wave_values(run, value, frags.elements[which], frags.lanes, dtype)
  bits = block.view(f"u{block.dtype.itemsize}")  # so that NaN compares equal to itself
  if frags.repeated and run.check and (bits[..., :16] != bits[..., 16:]).any():
    _, wave, lane = np.nonzero(bits[..., :16] != bits[..., 16:])
    lanes = wave * frags.lanes + lane + 16
    raise run.fail(LaneMismatch, u, f"lanes 16-31 must repeat lanes 0-15 of {'AB'[which]} and do not", lanes)
  flat = np.ascontiguousarray(block.transpose(1, 0, 2)).reshape(block.shape[1], -1)
  layout = frags.a if which == 0 else frags.b
  return _numbers(
    flat.take(_matrix_index(layout, frags.lanes, frags.elements[which], shape), axis=1),
    alu.float8_of(run.arch, dtype),
    _is_tf32(u),
  )


def check_whole_waves(run: Run, u: UOp, lanes: int, what: str) -> None:
  """Raise Divergence unless each wave is fully active or fully inactive."""
  if run.shape.threads % lanes or run.shape.wave != lanes:
    raise run.fail(Divergence, u, f"{what} needs waves of {lanes} lanes; the workgroup has {run.shape.threads} threads")
  if (missing := run.missing(lanes)).size:
    raise run.fail(Divergence, u, f"{what} with inactive lanes in its wave", missing)


def multiply(run: Run, u: UOp, a: Any, b: Any, c: list[Any]) -> list[Any]:
  """Execute the Ops.WMMA `u`; a, b, c and the result are vectors of lanes' values.

  Raises UnknownInstruction, Divergence, and LaneMismatch if both halves of a wave must agree (RDNA3) and do not.
  """
  dims, dtype, _, threads, _ = u.arg
  n, m, k = dims
  try:
    frags = fragments(run.arch, dims, dtype)
  except KeyError as error:
    raise run.fail(UnknownInstruction, u, f"the target has no matrix instruction {error}") from None
  given = _elements(u.src[0], a, dtype), _elements(u.src[1], b, dtype), len(c)
  if (threads, given) != (frags.lanes, frags.elements):
    taken = f"{frags.elements} elements of A, B and C in each of {frags.lanes} lanes, not {given} in each of {threads}"
    raise run.fail(UnknownInstruction, u, f"the matrix instruction {run.arch} {dims} {dtype} takes {taken}")
  check_whole_waves(run, u, frags.lanes, "a matrix instruction")
  if run.counters is not None:
    run.counters.matrix += run.active_waves()
  product = _operand(run, u, a, frags, 0, (m, k)) @ _operand(run, u, b, frags, 1, (k, n))  # (waves, M, N)
  lane = np.arange(frags.lanes)
  product = product.reshape(len(product), m * n)
  result = []
  for e, old in enumerate(c):
    row, column = frags.c(lane, e)
    added = product.take(row * n + column, axis=1).reshape(-1)
    total = alu.decode(old, u.dtype) + added
    result.append(_toward_zero(total) if _is_tf32(u) else alu.encode(total, u.dtype))
  return result


def _is_tf32(u: UOp) -> bool:
  """Return whether an instruction multiplies float32 in tf32, as NVIDIA's do; AMD's multiply float32 itself."""
  return bool(u.arg[1] == dtypes.float and u.arg[2] == "CUDA")


def _toward_zero(x: np.ndarray) -> np.ndarray:
  """Round float64 to float32, towards zero."""
  nearest = x.astype(np.float32)
  return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
