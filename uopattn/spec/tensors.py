"""Checks of Tensors and numbers that users pass, and their conversion: of constants, and of what does not fit int32."""

from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType, least_upper_dtype
from tinygrad.engine.realize import capturing
from tinygrad.helpers import all_same
from tinygrad.uop.ops import Ops, sym_infer

from uopattn.dsl import clamp
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.schedule import DTYPES, DTYPES_16

if TYPE_CHECKING:  # numpy takes a while to import
  import numpy as np

OPERANDS = (*DTYPES, dtypes.float64)  # dtypes of q, k and v; the last by plain ops alone
WIDEST = FAR // 2  # largest side of a window


def described(x: object) -> str:
  """Describe an argument of a wrong type in a few words: 1.5, None, a list, a numpy.ndarray."""
  if x is None or isinstance(x, (int, float, str)):
    return repr(x)
  kind = type(x)
  name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"
  return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_tensor(name: str, x: object, symbolic: tuple[int, ...] = ()) -> Tensor:
  """Return x if it is a Tensor whose sizes are ints; those of the axes `symbolic` may be made of Variables.

  Raises:
    TypeError: x is not a Tensor.
    ValueError: one of its sizes is made of Variables.
  """
  if not isinstance(x, Tensor):
    raise TypeError(f"{name} is {described(x)}; it must be a tinygrad Tensor")
  axes = {axis % x.ndim for axis in symbolic if -x.ndim <= axis < x.ndim}
  if not all(isinstance(size, int) or axis in axes for axis, size in enumerate(x.shape)):
    raise ValueError(f"{name} has shape {shown_shape(x)}; every size must be an int")
  return x


def shown_shape(x: Tensor) -> str:
  """Return the shape of a Tensor as text, in which sizes may be made of Variables."""
  return f"({', '.join(size.render() if isinstance(size, UOp) else str(size) for size in x.shape)})"


def check_ints(name: str, x: object, shape: tuple[int, ...] | None = None) -> Tensor:
  """Return x if it is a Tensor of integers that `check_tensor` accepts, and has the shape if one is given.

  Raises:
    TypeError, ValueError: it is not.
  """
  x = check_tensor(name, x)
  if x.dtype not in dtypes.ints:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be a Tensor of an integer dtype")
  if shape is not None and x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
  return x


def check_dtype(name: str, dtype: DType, accepted: Collection[DType], beside: str = "") -> None:
  """Raise TypeError unless a dtype, that of the Tensor `name`, is accepted.

  Args:
    beside: what follows the dtype in the message.
  """
  if dtype not in accepted:
    names = ", ".join(map(dtype_name, accepted))
    raise TypeError(f"{name} has dtype {dtype_name(dtype)}{beside}; accepted are {names}")


def check_keywords(function: str, given: Iterable[str], accepted: type) -> None:
  """Raise TypeError if a keyword argument of the call of a function is not in `accepted`, a TypedDict."""
  if unknown := [name for name in given if name not in accepted.__annotations__]:
    names = ", ".join(sorted(accepted.__annotations__))
    raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}; accepted are {names}")


def check_tensors(name: str, xs: object) -> None:
  """Raise TypeError or ValueError unless xs is a tuple of Tensors that `check_tensor` accepts."""
  if not isinstance(xs, tuple):
    raise TypeError(f"{name} is {described(xs)}; it must be a tuple of Tensors")
  for i, x in enumerate(xs):
    check_tensor(f"{name}[{i}]", x)


def check_device(name: str, x: Tensor, device: object, of: str = "q") -> None:
  """Raise ValueError unless x is on the device of the argument `of`."""
  if x.device != device:
    raise ValueError(f"{name} is on {x.device}, {of} is on {device}; all must be on one device")


def operands(symbolic: tuple[int, ...] = (), **named: object) -> tuple[Tensor, ...]:
  """Give Tensors a common device and strong dtypes, as tinygrad's own ops do.

  A Tensor without a device is put on that of the first one that has one, or on tinygrad's default device. A Tensor of a
  weak dtype takes the first strong dtype among them, or tinygrad's default dtype if there is none.

  Args:
    symbolic: axes whose sizes may be made of Variables.

  Raises:
    TypeError, ValueError: see `check_tensor`.
  """
  tensors = [check_tensor(name, x, symbolic) for name, x in named.items()]
  device = next((x.device for x in tensors if x.device is not None), Device.DEFAULT)
  strong = [x.dtype for x in tensors if x.dtype not in dtypes.weaks]
  weak_float = any(x.dtype == dtypes.weakfloat for x in tensors)
  dtype = strong[0] if strong else dtypes.default_float if weak_float else dtypes.default_int
  return tuple(placed(x, device, dtype) for x in tensors)


def promoted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, DType]:
  """Give q, k and v compatible dtypes, and return the result's dtype, by tinygrad's promotion.

  k and v of one 16-bit dtype stay as they are if the computation is in float32: kernels widen them as they read them.
  """
  operand_dtypes = q.dtype, k.dtype, v.dtype
  if all_same(operand_dtypes) or not all(x in OPERANDS for x in operand_dtypes):
    return q, k, v, q.dtype
  common, result = least_upper_dtype(*operand_dtypes), least_upper_dtype(q.dtype, v.dtype)
  if k.dtype != v.dtype or k.dtype not in DTYPES_16 or common != dtypes.float32:
    k, v = k.cast(common), v.cast(common)
  return q.cast(common), k, v, result


def placed(x: Any, device: str | tuple[str, ...] | None, weak: DType | None = None) -> Any:
  """Put a Tensor on a device and give it a strong dtype; return anything else as `plain` does.

  Args:
    device: for a Tensor without one, such as `Tensor.arange(n)`; None is tinygrad's default.
    weak: the dtype for a Tensor of a weak dtype; None is float32 or tinygrad's default int dtype.
  """
  if isinstance(x, tuple):
    return tuple(placed(y, device, weak) for y in x)
  if not isinstance(x, Tensor):
    return plain(x)
  if x.dtype in dtypes.weaks:
    x = x.cast(weak or (dtypes.float32 if x.dtype == dtypes.weakfloat else dtypes.default_int))
  return x.clone(device=device) if x.device is None else x


def plain(x: Any) -> Any:
  """Return a number of another library, such as numpy.int64, as Python's int or float; anything else as it is."""
  if isinstance(x, (int, float)) or not isinstance(x, Real):
    return x
  return int(x) if isinstance(x, Integral) else float(x)


def check_int(name: str, x: object) -> int:
  """Return x as an int. Raises TypeError if it is no integer; True and False are none."""
  if isinstance(x, bool) or not isinstance(x, Integral):
    raise TypeError(f"{name} is {described(x)}; it must be an int")
  return int(x)


def check_size(name: str, size: object, least: int) -> int:
  """Return a size as an int. Raises TypeError if it is no integer, and ValueError if it is less than `least`."""
  size = check_int(name, size)
  if size < least:
    raise ValueError(f"{name} is {size}; it must be at least {least}")
  return size


def with_axis(xs: Any) -> Any:
  """Give each Tensor of a tuple that has no axis one of size 1, as kernels see it; return anything else as it is."""
  if not isinstance(xs, tuple):
    return xs
  return tuple(x.reshape(1) if isinstance(x, Tensor) and x.ndim == 0 else x for x in xs)


def as_int(x: Tensor) -> Tensor:
  """Cast integers to int32, first clamped to [-FAR, FAR] if their dtype holds larger ones."""
  if dtypes.int32.max < x.dtype.max:
    x = x.minimum(FAR) if x.dtype in dtypes.uints else x.clip(-FAR, FAR)
  return x.cast(dtypes.int)


def clamped(x: Any) -> Any:
  """Clamp a position or a number of keys to [-FAR, FAR], and cast a Tensor to int32; return anything else as it is.

  A Tensor whose dtype holds nothing beyond int32 is not clamped, which would take a kernel: what reads it must do so.
  """
  if isinstance(x, Tensor):
    return as_int(x) if x.dtype in dtypes.ints else x
  if isinstance(x, UOp):
    return clamp(x, -FAR, FAR) if x.vmin < -FAR or x.vmax > FAR else x
  return max(-FAR, min(FAR, x)) if type(x) is int else x


def at_hand(x: Tensor) -> "np.ndarray[Any, Any] | None":
  """Return the values of a Tensor that is realized, or made of Python or numpy numbers; None for any other.

  While a `TinyJit` captures there are none: those of its replays may be others.
  """
  if capturing:
    return None
  held = x.uop.src[0] if x.uop.op is Ops.COPY else x.uop  # a Tensor made of Python or numpy numbers is a COPY
  return Tensor(held).numpy() if held.has_buffer_identity() and held.is_realized else None


def numbers_at_hand(x: int | UOp | Tensor, B: int) -> list[int] | None:
  """Return the position, or the number of keys, of each of B sequences; None if its values are not `at_hand`."""
  if isinstance(x, Tensor):
    return None if (values := at_hand(x)) is None else values.tolist()
  if capturing:
    return None
  if isinstance(x, UOp):
    expression, bound = x.unbind_all()
    x = sym_infer(expression, {variable.expr: value for variable, value in bound.items()})
  return [x] * B


def batched(name: str, x: Any) -> Any:
  """Return a Tensor or UOp of three or four dimensions with four. Raises ValueError, with its name, for any other."""
  if x.ndim not in (3, 4):
    raise ValueError(f"{name} has shape {x.shape}; it must have three or four dimensions, (B, H, rows, head size)")
  return x if x.ndim == 4 else x.reshape(1, *x.shape)


def check_dimensions(**named: Any) -> None:
  """Raise ValueError if some Tensors or UOps have three dimensions and others have four with more than one batch."""
  shapes = [x.shape for x in named.values()]
  if len(set(map(len, shapes))) > 1 and any(len(shape) == 4 and shape[0] != 1 for shape in shapes):
    named_shapes = ", ".join(f"{name} has shape {x.shape}" for name, x in named.items())
    raise ValueError(f"{named_shapes}; all must have four dimensions, or all three")


def dtype_name(dtype: DType) -> str:
  """Return the name of a dtype without "dtypes.", such as half."""
  return str(dtype).removeprefix("dtypes.")
