"""The memory of a cache of keys and values, and the checks of what is written to it."""

from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, cast, overload

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.api.four_bit_pages import bytes_of
from uopattn.api.norm_rope import NewQueries
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import FORMATS, QUANTIZED_DTYPES
from uopattn.dsl.schedule import DTYPES_16_32
from uopattn.kernels.append import RowMap
from uopattn.plan.append import append_call, is_memory
from uopattn.runtime.function import traces
from uopattn.spec.arguments import check_sint
from uopattn.spec.shards import Devices, device_of, joined, shard_of
from uopattn.spec.tensors import (
  at_hand,
  check_device,
  check_dtype,
  check_int,
  check_size,
  check_tensor,
  clamped,
  dtype_name,
  placed,
)

T = TypeVar("T")


@dataclass(slots=True)
class Written:
  """What a cache holds while a `tinygrad.function` that writes to it is traced.

  After the trace, the call of the function does the writing. tinygrad takes Tensors for inputs of a function, or of a
  TinyJit, that it finds in `__dict__`. These must not be: so they are in slots, and what a cache held before is in its
  own `__dict__`.

  Attributes:
    traces: the functions being traced; () if there is nothing.
    tensors: the cache's by name.
  """

  traces: tuple[float, ...] = ()
  tensors: dict[str, Any] = field(default_factory=dict)

  def settled(self) -> dict[str, Any]:
    """Return the tensors of the current trace.

    Raises:
      RuntimeError: they are of a function that the one being traced has called.
    """
    current = traces()
    if current[: len(self.traces)] != self.traces:
      if current and current == self.traces[: len(current)]:
        raise RuntimeError(
          "the cache was written in a tinygrad.function that the one being traced has called; append and attend must "
          "be in one function"
        )
      self.traces, self.tensors = (), {}
    return self.tensors


class Held(Generic[T]):
  """An attribute of a cache whose value in the trace of a function is forgotten after it; see `Written`."""

  def __set_name__(self, owner: type, name: str) -> None:
    self._name = name

  @overload
  def __get__(self, cache: None, owner: type) -> Self: ...

  @overload
  def __get__(self, cache: "CacheMemory", owner: type) -> T: ...

  def __get__(self, cache: "CacheMemory | None", owner: type) -> Self | T:
    if cache is None:
      return self
    held: T = cache._written.settled().get(self._name, cache.__dict__[self._name])
    return held

  def __set__(self, cache: "CacheMemory", value: T) -> None:
    tensors = cache._written.settled()
    if current := traces():
      cache._written.traces, tensors[self._name] = current, value
    else:
      cache.__dict__[self._name] = value


class CacheMemory:
  """Keys and values of one layer, with scales if they have 8 or 4 bits.

  Attributes:
    k: (B, Hkv, rows, Dk).
    v: (B, Hkv, rows, Dv).
    k_scale, v_scale: (B, Hkv, rows) float32, or None.
  """

  k, v = Held[Tensor](), Held[Tensor]()
  k_scale, v_scale = Held[Tensor | None](), Held[Tensor | None]()

  def __init__(
    self,
    B: int,
    Hkv: int,
    rows: int,
    Dk: int,
    Dv: int | None,
    dtype: DType | str,
    device: Devices | None,
    axis: int | None,
  ):
    """Allocate the memory, filled with 0; see `KVCache`. Raises TypeError or ValueError if an argument does not fit."""
    named = {"B": B, "Hkv": Hkv, "Dk": Dk, "Dv": Dk if Dv is None else Dv}
    B, Hkv, Dk, Dv = (check_size(name, size, 0 if name == "B" else 1) for name, size in named.items())
    accepted = (*DTYPES_16_32, *QUANTIZED_DTYPES)
    self._four = FORMATS.get(dtype) if isinstance(dtype, str) else None
    if self._four is None and dtype not in accepted:
      names = [*map(dtype_name, accepted), *map(repr, FORMATS)]
      raise TypeError(
        f"dtype is {repr(dtype) if isinstance(dtype, str) else dtype_name(dtype)}; accepted are {', '.join(names)}"
      )
    self._sizes = (Dk, Dv)
    columns = (Dk, Dv) if self._four is None else (bytes_of("Dk is", Dk, self._four), bytes_of("Dv is", Dv, self._four))
    stored = dtypes.uint8 if isinstance(dtype, str) else dtype
    device = tuple(device) if isinstance(device, list) else device
    if axis is not None:
      _check_axis(check_int("axis", axis), device, B, Hkv)

    def zeros(*shape: int, dtype: DType) -> Tensor:
      if not isinstance(device, tuple):
        return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
      own = tuple(n // len(device) if i == axis else n for i, n in enumerate(shape))
      return joined(Tensor.zeros(*own, dtype=dtype, device=device).contiguous(), axis).realize()

    self._written = Written()
    self.k, self.v = (zeros(B, Hkv, rows, D, dtype=stored) for D in columns)
    self.k_scale = self.v_scale = None
    if self._quantized:
      self.k_scale, self.v_scale = (zeros(B, Hkv, rows, dtype=dtypes.float) for _ in range(2))

  def _rows(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return new keys and values on the memory's device. Raises TypeError or ValueError if they do not fit it."""
    k, v = (placed(check_tensor(name, x), self._device, self._weak) for name, x in (("k", k), ("v", v)))
    M = sizes(k)[2] if k.ndim == 4 else 0
    for name, x, held, D in (("k", k, self.k, self._sizes[0]), ("v", v, self.v, self._sizes[1])):
      B, Hkv, *_ = sizes(held)
      if x.shape != (B, Hkv, M, D):
        raise ValueError(f"{name} has shape {x.shape}; it must be ({B}, {Hkv}, M, {D}), M the same of k and v")
      self._check_dtype(name, x, (held.dtype,))
      if x.device != held.device:
        raise ValueError(f"{name} is on {x.device}, the cache is on {held.device}")
    return k, v

  def _queries(self, q: Tensor) -> Tensor:
    """Return queries on the memory's device. Raises TypeError or ValueError if they do not fit it."""
    q = placed(check_tensor("q", q), self._device, self._weak)
    (B, Hkv, *_), Dk = sizes(self.k), self._sizes[0]
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (B, Dk) or sizes(q)[1] % Hkv:
      raise ValueError(f"q has shape {q.shape}; it must be ({B}, Hq, M, {Dk}), Hq a multiple of {Hkv}")
    self._check_dtype("q", q, tuple(dict.fromkeys((self.k.dtype, dtypes.float32))))
    return q

  def _check_dtype(self, name: str, x: Tensor, accepted: tuple[DType, ...]) -> None:
    """Raise TypeError unless x has a dtype for a cache of 8 or 4 bits, or one that is accepted for any other."""
    stored = dtype_name(self._four or self.k.dtype)
    check_dtype(name, x.dtype, DTYPES_16_32 if self._quantized else accepted, f", the cache has {stored}")

  @property
  def _device(self) -> Devices:
    return device_of(self.k)

  @property
  def _weak(self) -> DType:
    """The dtype that Tensors of a weak dtype are cast to."""
    return dtypes.default_float if self._quantized else self.k.dtype

  @property
  def _quantized(self) -> bool:
    """Whether rows are rounded to fewer bits, with scales."""
    return self._four is not None or self.k.dtype in QUANTIZED_DTYPES

  @property
  def _scales(self) -> tuple[Tensor, Tensor] | None:
    return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

  def _start(self, start: int | UOp | Tensor, M: int, N_max: int, of: str = "in a cache") -> int | UOp | Tensor:
    """Return `start`, a Tensor as int32 on the cache's device.

    Args:
      of: what has N_max positions, for messages.

    Raises:
      TypeError: it is of a wrong type.
      ValueError: the M positions from it on are not below N_max, as far as that is known without computing.
    """
    start = placed(start, self._device)
    if N_max < M:
      raise ValueError(f"there are {M} rows; {of} of {N_max} positions there must be at most {N_max}")
    accepted = f"for {M} rows {of} of {N_max} positions it must be from 0 to {N_max - M}"
    self._check_sint("start", start, N_max - M, accepted)
    if not isinstance(start, Tensor):
      return start
    check_device("start", start, self._device, "the cache")
    for b, first in enumerate([] if (values := at_hand(start)) is None else values.tolist()):
      if first < 0 or first + M > N_max:
        raise ValueError(f"start is {first} for sequence {b}; {accepted}")
    return cast(Tensor, clamped(start))

  def _check_sint(self, name: str, x: object, most: int, accepted: str) -> None:
    """Check a position or a number of keys, of a Tensor its type alone.

    Args:
      most: the largest that is accepted; the least is 0. All values of Variables count, whatever they are bound to.
      accepted: what is accepted, for the message.

    Raises:
      TypeError: it is of a wrong type.
      ValueError: it is out of range.
    """
    check_sint(name, x, sizes(self.k)[0])
    if not isinstance(x, (int, UOp)):
      return
    low, high = (x.vmin, x.vmax) if isinstance(x, UOp) else (x, x)
    if low < 0 or high > most:
      out_of_range = f"{name} is {x}" if isinstance(x, int) else f"{name} is a Variable from {low} to {high}"
      raise ValueError(f"{out_of_range}; {accepted}")

  def _write(
    self,
    k: Tensor,
    v: Tensor,
    start: int | UOp | Tensor,
    row_map: RowMap,
    new: NewQueries,
    lengths: Tensor | None = None,
  ) -> Tensor | None:
    """Write new keys and values, if there are any, and their scales if the cache has 8 or 4 bits; return the queries.

    Args:
      lengths: (B,) int32, the number of new keys of each sequence; None is all.
    """
    if 0 in (*sizes(k), *sizes(self.k)):
      return new.q
    axis = self.k.uop.axis if isinstance(self.k.device, tuple) else None
    of_sequence = 0 if axis == 0 else None
    held, rows, scales = ([shard_of(x, axis) for x in xs] for xs in ((self.k, self.v), (k, v), self._scales or ()))
    for name, x in zip(("k", "v", "k_scale", "v_scale"), (*held, *scales), strict=False):
      if not is_memory(x):
        raise ValueError(
          f"the cache's {name} is not a buffer that can be written to; assign x.contiguous().realize() instead of x"
        )
    start = shard_of(start, of_sequence) if isinstance(start, Tensor) else start
    lengths = None if lengths is None else shard_of(lengths, of_sequence)
    q = None if new.q is None else shard_of(new.q, axis)
    call, q = append_call(
      held, rows, start, row_map, row_scales=scales, lengths=lengths, four=self._four, q=q, norm_rope=new.change
    )
    shards = [x.uop.after(call) for x in (*held, *scales)]
    written = [Tensor(x if axis is None else x.unshard(axis)) for x in shards]
    self.k, self.v = written[:2]
    if scales:
      self.k_scale, self.v_scale = written[2:]
    return None if q is None else joined(q, axis)


def _check_axis(axis: int, device: Devices | None, B: int, Hkv: int) -> None:
  """Raise ValueError unless several devices can divide a cache along the axis."""
  if not isinstance(device, tuple):
    raise ValueError(f"axis is {axis} and device {device!r}; axis is for a tuple of devices, which divide the cache")
  if axis not in (0, 1) or (B, Hkv)[axis] % len(device):
    of = f"for B={B} and Hkv={Hkv} on {len(device)} device{'s' * (len(device) > 1)}"
    raise ValueError(f"axis is {axis} {of}; it must be 0, 1 or None, and the devices must divide that size")
