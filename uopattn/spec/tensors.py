"""What public functions take for a Tensor, and what becomes of constants and of integers that int32 does not hold."""

from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl import clamp
from uopattn.dsl.rules.masks import FAR

WIDEST = FAR // 2  # side of a window


def described(x: object) -> str:
  """What an argument of a wrong type is, in a few words: 1.5, None, a list, a numpy.ndarray."""
  if x is None or isinstance(x, (int, float, str)):
    return repr(x)
  kind = type(x)
  name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"
  return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_tensor(name: str, x: object) -> Tensor:
  """x, which is to be a Tensor whose sizes are known.

  Raises:
    TypeError: it is no Tensor.
    ValueError: one of its sizes is made of Variables.
  """
  if not isinstance(x, Tensor):
    raise TypeError(f"{name} is {described(x)}; it must be a tinygrad Tensor")
  if not all(isinstance(size, int) for size in x.shape):
    sizes = ", ".join(size.render() if isinstance(size, UOp) else str(size) for size in x.shape)
    raise ValueError(f"{name} has shape ({sizes}); every size must be a known int, and lengths that vary kv_lengths")
  return x


def check_tensors(name: str, xs: object) -> None:
  """Raises TypeError or ValueError unless xs is a tuple of what `check_tensor` accepts."""
  if not isinstance(xs, tuple):
    raise TypeError(f"{name} is {described(xs)}; it must be a tuple of Tensors")
  for i, x in enumerate(xs):
    check_tensor(f"{name}[{i}]", x)


def operands(**named: object) -> tuple[Tensor, ...]:
  """Tensors that are computed with one another, constants among them as tinygrad's own ops take these.

  Those without a device are put on that of the first one that has one, or on tinygrad's default device. Those of a weak
  dtype are of that of the first one that has none, or if none has, of tinygrad's default dtypes.

  Raises:
    TypeError, ValueError: see `check_tensor`.
  """
  given = [check_tensor(name, x) for name, x in named.items()]
  device = next((x.device for x in given if x.device is not None), Device.DEFAULT)
  strong = [x.dtype for x in given if x.dtype not in dtypes.weaks]
  weak_float = any(x.dtype == dtypes.weakfloat for x in given)
  dtype = strong[0] if strong else dtypes.default_float if weak_float else dtypes.default_int
  return tuple(placed(x, device, dtype) for x in given)


def placed(x: Any, device: str | tuple[str, ...] | None, weak: DType | None = None) -> Any:
  """A Tensor on a device and of a dtype that is not weak; anything else as it is.

  Args:
    device: for a Tensor that has none, as `Tensor.arange` makes them; None is tinygrad's default.
    weak: the dtype for one of a weak dtype; None is float32 or tinygrad's default dtype of ints.
  """
  if isinstance(x, tuple):
    return tuple(placed(y, device, weak) for y in x)
  if not isinstance(x, Tensor):
    return x
  if x.dtype in dtypes.weaks:
    x = x.cast(weak or (dtypes.float32 if x.dtype == dtypes.weakfloat else dtypes.default_int))
  return x.clone(device=device) if x.device is None else x


def as_int(x: Tensor) -> Tensor:
  """Integers in int32, those that it may not hold held within FAR of 0."""
  if dtypes.int32.max < x.dtype.max:
    x = x.minimum(FAR) if x.dtype in dtypes.uints else x.clip(-FAR, FAR)
  return x.cast(dtypes.int)


def near(x: Any) -> Any:
  """A number of keys or a position, held within FAR of 0 where it is no int32; what is none as it is."""
  if isinstance(x, Tensor):
    return as_int(x) if x.dtype in dtypes.ints else x
  if isinstance(x, UOp):
    return clamp(x, -FAR, FAR) if x.vmin < -FAR or x.vmax > FAR else x
  return max(-FAR, min(FAR, x)) if type(x) is int else x


def batched(name: str, x: Any) -> Any:
  """A Tensor or UOp of three or four dimensions with four; ValueError, with its name, for any other."""
  if x.ndim not in (3, 4):
    raise ValueError(f"{name} has shape {x.shape}; it must have three or four dimensions, (B, H, rows, head size)")
  return x if x.ndim == 4 else x.reshape(1, *x.shape)


def check_dimensions(**named: Any) -> None:
  """Raises ValueError if Tensors, or UOps, of three dimensions are to go with one of four and a batch."""
  shapes = [x.shape for x in named.values()]
  if len(set(map(len, shapes))) > 1 and any(len(shape) == 4 and shape[0] != 1 for shape in shapes):
    given = ", ".join(f"{name} has shape {x.shape}" for name, x in named.items())
    raise ValueError(f"{given}; all must have four dimensions, or all three")


def dtype_name(dtype: DType) -> str:
  """ "half" for dtypes.half."""
  return str(dtype).removeprefix("dtypes.")
