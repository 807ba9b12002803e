"""The gate: checks that an output is attention, as exactly as its dtype allows."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes, fp8_to_float

from uopattn.dsl.schedule import DTYPES_8
from uopattn.proof.errors import of_gradients, of_lse, of_output
from uopattn.proof.oracle import (
  CUT,
  EXACT,
  LOST,
  PRECISIONS,
  TF32,
  Array,
  Gradients,
  Precision,
  Rules,
  gradients,
  oracle,
  scaled,
)
from uopattn.proof.roundings import Fault, Roundings
from uopattn.runtime.device import kind_of
from uopattn.spec.shards import devices_of
from uopattn.spec.tensors import dtype_name

# Allowed for any output, however exact the naive computation happens to be: some unit roundoffs of its own type, and
# of float32, in which a kernel takes the long sums in any order. An 8-bit type gets two units, for P and the output,
# which are all that a kernel rounds; four would let many faults pass.
FLOOR, FLOOR_OF_EIGHT_BITS, FLOOR_OF_SUMS = 4, 2, 16 * PRECISIONS[dtypes.float32].unit

EIGHT_BIT_UNIT = 2.0**-4  # the smallest unit roundoff of an 8-bit type

WORST = 2.0  # times the largest `Gate.lse_error`, any error of the LSE may be

USELESS = 0.5  # relative error above which the naive computation gives no bound


@dataclass(frozen=True)
class Report:
  """The error of an output against the oracle, with its bounds.

  Attributes:
    name: the array that was measured: "output", "lse" or "gradient of q", ....
    mse: mean squared error.
    relative: root mean square error over the root mean square of the oracle; at most `relative_bound` is allowed.
    largest: largest absolute error; at most `largest_bound` is allowed.
    wrong: number of elements that are NaN, or infinite where the oracle is not (or the reverse).
    worst: index of the element with the largest error, or of the first wrong one; () if there are no elements.
    faults: the worst error of each kind that independent roundings cannot explain, if measured.
  """

  name: str
  mse: float
  relative: float
  relative_bound: float
  largest: float
  largest_bound: float
  wrong: int
  worst: tuple[int, ...]
  faults: tuple[Fault, ...] = ()

  @property
  def correct(self) -> bool:
    within = self.relative <= self.relative_bound and self.largest <= self.largest_bound
    return self.wrong == 0 and within and not self.faults

  def __str__(self) -> str:
    text = (
      f"{self.name}: mean squared error {self.mse:.3g}, relative error {self.relative:.3g} "
      f"(bound {self.relative_bound:.3g}), largest error {self.largest:.3g} (bound {self.largest_bound:.3g})"
    )
    text += f", {self.wrong} elements NaN or infinite" if self.wrong else ""
    return "; ".join([text, *map(str, self.faults)])

  def record(self) -> dict[str, Any]:
    """Return the report as a dict for JSON."""
    return asdict(self) | {"correct": self.correct}


def compare(
  name: str, got: Array, exact: Array, naive: Array, unit: float, deviation: Array | None = None, limit: float = 0.0
) -> Report:
  """Measure `got` against the oracle's `exact`.

  The bounds are twice the error of the naive computation in the same dtype, or that of independent roundings if this is
  larger, plus a floor. NaN never passes, and infinities must be where the oracle has them.

  Args:
    got, exact, naive: arrays of one shape and any float type.
    unit: unit roundoff of the dtype of `got`.
    deviation: standard deviation of each element under independent roundings.
    limit: bound of the largest error, in units of the largest deviation.

  Raises:
    ValueError: the shapes differ.
  """
  if not got.shape == exact.shape == naive.shape:
    raise ValueError(f"{name} has shape {got.shape}, the oracle {exact.shape}, the naive computation {naive.shape}")
  got, naive = got.astype(np.float64), naive.astype(np.float64)
  floor = (FLOOR if unit < EIGHT_BIT_UNIT else FLOOR_OF_EIGHT_BITS) * unit + FLOOR_OF_SUMS
  same_infinity = np.isinf(exact) & (got == exact)
  wrong = ~np.isfinite(got) & ~same_infinity | np.isinf(exact) & ~same_infinity
  measured = np.isfinite(exact) & ~wrong
  error = np.zeros(exact.shape)
  np.subtract(got, exact, out=error, where=measured)
  naive_error = np.zeros(exact.shape)
  np.subtract(naive, exact, out=naive_error, where=measured & np.isfinite(naive))
  values = np.where(measured, exact, 0.0)
  rms = _rms(values) or 1.0  # absolute errors if the oracle is all 0
  relative, largest = _rms(error) / rms, float(np.abs(error).max(initial=0))
  expected = np.zeros(1) if deviation is None else deviation
  largest_bound = 2 * float(np.abs(naive_error).max(initial=0)) + floor * float(np.abs(values).max(initial=0))
  worst = np.unravel_index(np.argmax(wrong if wrong.any() else np.abs(error)), exact.shape) if exact.size else ()
  return Report(
    name,
    mse=_rms(error) ** 2,
    relative=relative,
    relative_bound=2 * max(_rms(naive_error), _rms(expected)) / rms + floor,
    largest=largest,
    largest_bound=max(largest_bound, limit * float(expected.max(initial=0))),
    wrong=int(wrong.sum()),
    worst=tuple(map(int, worst)),
  )


def _precision(dtype: DType, tf32: bool, device: str) -> Precision:
  """The rounding of `dtype` in products on a device."""
  if dtype == dtypes.float32 and not tf32:  # which kernels sum by themselves
    return PRECISIONS[dtype]
  precision = TF32 if dtype == dtypes.float32 else PRECISIONS[dtype]
  return replace(precision, lost=LOST) if kind_of(device) in ("CUDA", "NV") else precision


def _relative(got: Array, exact: Array) -> float:
  """Return the root mean square error over the root mean square, of elements that are finite in both."""
  finite = np.isfinite(got) & np.isfinite(exact)
  return _rms(np.where(finite, got - exact, 0.0)) / (_rms(np.where(finite, exact, 0.0)) or 1.0)


def _rms(x: Array) -> float:
  return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


@dataclass(frozen=True, eq=False)
class Gate:
  """The oracle's results for some inputs, against which any number of outputs can be measured.

  Attributes:
    exact, exact_lse: the oracle's output and LSE.
    naive, naive_lse: output and LSE of the naive computation, in the inputs' dtype and in float32.
    unit: unit roundoff of the inputs' dtype.
    roundings: bounds of the output's error under independent roundings.
    lse_error: returns how far the LSE may be off because of the scores, see `uopattn.proof.errors.of_lse`.
  """

  exact: Array
  exact_lse: Array
  naive: Array
  naive_lse: Array
  unit: float
  roundings: Roundings
  lse_error: Callable[[], Array]

  @classmethod
  def of(cls, q: Tensor, k: Tensor, v: Tensor, *, progress: bool = False, **options: Any) -> "Gate":
    """Compute the oracle and the naive versions; takes the arguments of `verify`."""
    kwargs = {"device": devices_of(q.device)[0], "progress": progress, **options}
    return cls.of_arrays(numpy(q), numpy(k), numpy(v), q.dtype, **kwargs)

  @classmethod
  def of_arrays(
    cls,
    q: Array,
    k: Array,
    v: Array,
    dtype: DType,
    *,
    tf32: bool = False,
    cut: bool = False,
    device: str = "CPU",
    progress: bool = False,
    q_scale: float | Array = 1.0,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    **options: Any,
  ) -> "Gate":
    """Compute the oracle and the naive versions for arrays that hold values of `dtype`.

    Args:
      q, k, v, tf32, cut, progress, q_scale, k_scale, v_scale, options: as for `verify`.
      dtype: of q, k and v.
      device: where the products are computed; those of NVIDIA cut off sums, see `Precision.lost`.

    Raises:
      ArithmeticError: the naive computation is too inaccurate to give a bound.
    """
    heads = k.shape[1]
    q, k, v = (scaled(x, scale, heads) for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale)))
    arrays, precision = (q, k, v), _precision(dtype, tf32, device)
    exact, exact_lse = oracle(*arrays, progress=progress, **options)
    naive, naive_lse = oracle(*arrays, precision=precision, progress=progress, **options)
    guide = naive
    if dtype != dtypes.float32:  # the LSE and its arithmetic are float32 for every dtype of q
      guide, naive_lse = oracle(*arrays, precision=precision.fused(), progress=progress, **options)
    if (off := _relative(naive, exact)) > USELESS:
      raise ArithmeticError(
        f"the naive computation in {dtype_name(dtype)} is off by {off:.2g} of the output, which leaves no bound to "
        "hold others to: smaller scores are needed, or a machine whose numpy is right"
      )
    roundings = of_output(*arrays, exact, guide, precision, Rules(**options))
    of_cut = replace(precision, cut=CUT if cut else 0.0)
    lse_error = functools.cache(lambda: of_lse(q, k, exact_lse, of_cut, Rules(**options)))
    return cls(exact, exact_lse, naive, naive_lse, precision.unit, roundings, lse_error)

  def output(self, got: Array) -> Report:
    """Return the report on an output."""
    report = compare("output", got, self.exact, self.naive, self.unit, *self.roundings.spread("output"))
    return replace(report, faults=self.roundings.faults(output=got)["output"])

  def lse(self, got: Array) -> Report:
    """Return the report on a float32 LSE."""
    measured = "lse", got, self.exact_lse, self.naive_lse, PRECISIONS[dtypes.float32].unit
    report = compare(*measured)
    # Beside a single score whose terms cancel the naive computation may be right by chance.
    return report if report.correct else compare(*measured, self.lse_error(), WORST)


def verify(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  out: Tensor,
  lse: Tensor | None = None,
  *,
  tf32: bool = False,
  cut: bool = False,
  progress: bool = False,
  **options: Any,
) -> list[Report]:
  """Check an output, and its LSE if given; return a report on each.

  Args:
    q, k, v, out: inputs and output of `uopattn.attention`, with four dimensions.
    lse: (B, Hq, M) float32.
    tf32: whether float32 products were computed in tf32.
    cut: whether terms of 8-bit products were cut off, as Hopper's wgmma does; see `Precision.cut`.
    progress: show a progress bar.
    options: q_scale, k_scale and v_scale, numbers or arrays that broadcast to (B, Hkv); and keyword arguments of
      `uopattn.proof.oracle.oracle`.
  """
  gate = Gate.of(q, k, v, tf32=tf32, cut=cut, progress=progress, **options)
  return [gate.output(numpy(out)), *([] if lse is None else [gate.lse(numpy(lse))])]


@dataclass(frozen=True, eq=False)
class GradientGate:
  """The oracle's gradients for some inputs, against which other gradients can be measured.

  Attributes:
    exact: the oracle's gradients.
    naive: the gradients of the naive computation.
    unit: unit roundoff of the inputs' dtype.
    roundings: bounds of the errors of dQ, dK and dV under independent roundings.
  """

  exact: Gradients
  naive: Gradients
  unit: float
  roundings: Roundings

  @classmethod
  def of_arrays(
    cls,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    dtype: DType,
    dlse: Array | None = None,
    *,
    tf32: bool = False,
    device: str = "CPU",
    **options: Any,
  ) -> "GradientGate":
    """Compute the gradients by the oracle and naively, for arrays that hold values of `dtype`.

    Args:
      q, k, v, do, dlse, tf32, options: as for `verify_gradients`.
      dtype: of q, k, v and do.
      device: see `Gate.of_arrays`.
    """
    precision = _precision(dtype, tf32, device)
    inputs = q, k, v, do, dlse
    exact, naive = (gradients(*inputs, precision=x, **options) for x in (EXACT, precision))
    guide = naive if dtype == dtypes.float32 else gradients(*inputs, precision=precision.fused(), **options)
    out, lse = oracle(q, k, v, **options)
    named = exact.named(), guide.named()
    roundings = of_gradients(*inputs, out, lse, *named, precision, Rules(**options))
    return cls(exact, naive, precision.unit, roundings)

  def reports(self, **got: Array) -> list[Report]:
    """Return a report on each gradient; the names are the fields of `uopattn.proof.oracle.Gradients`."""
    exact, naive, spread = self.exact.named(), self.naive.named(), self.roundings.spread
    reports = {
      name: compare(f"gradient of {name}", x, exact[name], naive[name], self.unit, *spread(name))
      for name, x in got.items()
    }
    faults = self.roundings.faults(**{name: x for name, x in got.items() if name in self.roundings.products})
    return [replace(report, faults=faults.get(name, ())) for name, report in reports.items()]


def verify_gradients(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  do: Tensor,
  got: dict[str, Tensor],
  dlse: Tensor | None = None,
  *,
  tf32: bool = False,
  **options: Any,
) -> list[Report]:
  """Check the gradients of sum(do * out) + sum(dlse * lse); return a report on each.

  Args:
    q, k, v: inputs of `uopattn.attention`, with four dimensions.
    do: (B, Hq, M, Dv), of q's dtype.
    got: the gradients by name: q, k, v, sinks, attn_mask.
    dlse: (B, Hq, M) float32; None stands for 0.
    tf32: whether float32 products were computed in tf32.
    options: keyword arguments of `uopattn.proof.oracle.oracle`.
  """
  kwargs = {"tf32": tf32, "device": devices_of(q.device)[0], **options}
  inputs = numpy(q), numpy(k), numpy(v), numpy(do)
  gate = GradientGate.of_arrays(*inputs, q.dtype, None if dlse is None else numpy(dlse), **kwargs)
  return gate.reports(**{name: numpy(x) for name, x in got.items()})


def numpy(x: Tensor) -> Array:
  """Return the values as a numpy array; bfloat16 and 8-bit floats, which numpy lacks, become float32."""
  x = x.realize()  # a lazy cast would be fused with the one to float32, and its rounding lost
  if isinstance(x.device, tuple):  # tinygrad would join the shards on the CPU, which may lack a compiler
    x = x.to(x.device[0]).realize()
  if x.dtype == dtypes.bfloat16 and x.uop.has_buffer_identity():
    # The upper half of a float32; tinygrad would compile a kernel for every shape.
    return (x.bitcast(dtypes.ushort).numpy().astype(np.uint32) << 16).view(np.float32)
  if x.dtype in FLOAT8 and x.uop.has_buffer_identity():  # tinygrad's own cast makes small numbers 0 on some targets
    return FLOAT8[x.dtype][x.bitcast(dtypes.uchar).numpy()]
  return x.numpy() if x.dtype in _NUMPY_FLOATS else x.float().numpy()


FLOAT8: dict[DType, Array] = {d: np.array([fp8_to_float(x, d) for x in range(256)], np.float32) for d in DTYPES_8}
_NUMPY_FLOATS: tuple[DType, ...] = tuple(d for d in PRECISIONS if d.fmt in ("e", "f", "d"))
