"""Tracing of `score_mod` and `mask_mod` functions, which become part of a kernel.

A mod is called with UOps, and what it computes from them is compiled into the kernel. One call with symbols gives its
trace. Two functions with the same trace are the same mod, whatever their names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rules.masks import Table
from uopattn.dsl.rules.rules import vjp
from uopattn.spec.tensors import described, dtype_name

INDICES = ("b", "h", "q_idx", "kv_idx")


class AuxError(ValueError):
  """Raised by a mod of `uopattn.mods` if aux does not hold the Tensor that it reads, or one of another shape."""


class AuxTypeError(TypeError):
  """Raised by a mod of `uopattn.mods` if the Tensor of aux that it reads has another dtype."""


@dataclass(frozen=True)
class Mod:
  """A traced function; equal to another one if both compute the same.

  Attributes:
    trace: the result for symbolic arguments.
    function: (*arguments, *tables) -> a number or bool.
    dtype: dtype of the result.
  """

  trace: UOp
  function: Callable[..., Any] = field(compare=False)
  dtype: DType

  def __call__(self, tables: tuple[Table, ...]) -> Callable[..., UOp]:
    """Return the function of UOps that a kernel calls; it reads `tables`."""
    return lambda *args: _result(self.function(*map(Symbol, args), *map(Symbol, tables)), self.dtype)

  def of_tensors(self, *args: Any) -> Tensor:
    """Call the function with Tensors, wrapped as symbols so that it may use the same operators as in a kernel.

    The result may have another dtype than `dtype`, axes of size 1, and no device.

    Args:
      args: arguments, and tables such as `uopattn.plan.reference.Lookup`.
    """
    result = _bare(self.function(*map(Symbol, args)))
    return result if isinstance(result, Tensor) else Tensor(result, dtype=self.dtype)

  def slope(self, tables: tuple[Table, ...], read: tuple[int, int]) -> Callable[..., UOp]:
    """Return (score, b, h, q_idx, kv_idx, grad) -> grad times the derivative with respect to a number that is read.

    Args:
      read: the number of its table, and of the read among those of this table.
    """
    of_table, number = read

    def slope(*args: UOp) -> UOp:
      *at, grad = args
      logs = tuple(RecordedTable(x.buffer) for x in tables)
      self(logs)(*at)

      def with_number(x: UOp) -> UOp:
        replaced = (RecordedTable(y.buffer, number if i == of_table else None, x) for i, y in enumerate(tables))
        return self(tuple(replaced))(*at)

      return vjp(with_number, logs[of_table].values[number].cast(dtypes.float), grad)

    return slope

  def reads(
    self, lengths: tuple[int, int, int, int], aux: tuple[Tensor, ...]
  ) -> tuple[list[UOp], UOp, list[list[tuple[UOp, ...]]]]:
    """Return b, h, q_idx and kv_idx as symbols, that of the score, and for each aux Tensor the indices of its reads.

    Args:
      lengths: B, Hq, M and N.
    """
    indices, score = _symbols(lengths)
    tables = tuple(RecordedTable(x) for x in _placeholders(aux))
    self(tables)(score, *indices)
    return indices, score, [x.indices for x in tables]


class RecordedTable(Table):
  """A table that keeps a list of what is read.

  Attributes:
    indices, values: of each read.
    number, by: the read whose value is replaced, and by what; None if none is.
  """

  def __init__(self, buffer: UOp, number: int | None = None, by: UOp | None = None):
    super().__init__(buffer)
    self.indices: list[tuple[UOp, ...]] = []
    self.values: list[UOp] = []
    self.number, self.by = number, by

  def __getitem__(self, index: int | UOp | tuple[int | UOp, ...]) -> UOp:
    element, indices = super().__getitem__(index), index if isinstance(index, tuple) else (index,)
    self.indices.append(tuple(x if isinstance(x, UOp) else UOp.const(x) for x in indices))
    self.values.append(element)
    return element if self.by is None or len(self.values) - 1 != self.number else self.by.cast(self.dtype)


class Symbol:
  """A wrapper of a UOp, a table of UOps, or a Tensor, on which Python operators do the right thing or raise an error.

  == and != compare elements. On UOps they compare graphs, so a condition written with them would silently be False.
  abs() works. An operation that needs a concrete number raises TypeError, and says what to write instead.
  """

  def __init__(self, value: Any):
    self.value = value

  def __getattr__(self, name: str) -> Any:
    attr = getattr(self.value, name)
    return _unwrapping(attr) if callable(attr) else attr

  def __eq__(self, other: object) -> "Symbol":  # type: ignore[override]
    return Symbol(self.value.eq(_bare(other)))

  def __ne__(self, other: object) -> "Symbol":  # type: ignore[override]
    return Symbol(self.value.ne(_bare(other)))

  def __abs__(self) -> "Symbol":
    return Symbol(self.value.abs())

  def __bool__(self) -> bool:
    raise TypeError(
      "a condition on symbols is neither true nor false: for `if` write condition.where(a, b); for max(a, b) and "
      "min(a, b) a.maximum(b) and a.minimum(b); for `and`, `or`, `not` &, |, ~"
    )

  def __float__(self) -> float:
    raise TypeError(
      "a symbol is no float: for math.exp(x) write x.exp() or x.exp2(), and likewise for other functions of math"
    )

  def __int__(self) -> int:
    raise TypeError("a symbol is no int: for int(x) write x.cast(dtypes.int)")

  __index__ = __int__

  def __iter__(self) -> NoReturn:
    raise TypeError("a symbol cannot be iterated over: index a Tensor of aux, one integer for each axis: x[0] + x[1]")


def _unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
  """Return the function of symbols that one of UOps or Tensors is."""
  return lambda *args, **named: _wrapped(
    function(*map(_bare, args), **{name: _bare(value) for name, value in named.items()})
  )


def _operator(name: str) -> Callable[..., Any]:
  return lambda self, *args: _unwrapping(getattr(self.value, name))(*args)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in (*_BINARY, *(f"r{x}" for x in _BINARY), "lt", "le", "gt", "ge", "neg", "invert", "getitem"):
  setattr(Symbol, f"__{_name}__", _operator(f"__{_name}__"))


def _bare(x: Any) -> Any:
  return x.value if isinstance(x, Symbol) else tuple(map(_bare, x)) if isinstance(x, tuple) else x


def _wrapped(x: Any) -> Any:
  return Symbol(x) if isinstance(x, (UOp, Tensor)) else x


def trace_mod(
  name: str, function: Callable[..., Any], lengths: tuple[int, int, int, int], aux: tuple[Tensor, ...]
) -> Mod:
  """Trace a function.

  Args:
    name: "score_mod" or "mask_mod".
    function: score_mod(score, b, h, q_idx, kv_idx, *aux) -> score, or mask_mod(b, h, q_idx, kv_idx, *aux) -> bool.
    lengths: B, Hq, M and N.
    aux: the Tensors that the function indexes.

  Raises:
    TypeError: the function cannot be traced; the message says what to write instead.
    AuxError, AuxTypeError: the function is a mod of `uopattn.mods`, and aux does not fit it.
  """
  indices, of_score = _symbols(lengths)
  score = [of_score] if name == "score_mod" else []
  tables = [Table(x) for x in _placeholders(aux)]
  dtype = dtypes.float if name == "score_mod" else dtypes.bool
  signature = f"{name}({', '.join([*(['score'] if score else []), *INDICES, '*aux'])})"
  try:
    result = _bare(function(*map(Symbol, (*score, *indices, *tables))))
  except (AuxError, AuxTypeError):
    raise
  except Exception as error:
    raise TypeError(
      f"{name} cannot be traced: {type(error).__name__}: {error}. It is called once as {signature} with symbols in the "
      "place of numbers; pass Tensors through aux and index them there, one index for each axis"
    ) from error
  if isinstance(result, Tensor):
    raise TypeError(f"{name} returns a Tensor, so it reads one that is not in aux; pass it there, {signature}")
  if not isinstance(result, (UOp, bool, int, float)):
    raise TypeError(f"{name} returns {described(result)}; it must return what it computes from its arguments")
  if dtype == dtypes.bool and (result.dtype != dtypes.bool if isinstance(result, UOp) else type(result) is not bool):
    returned = dtype_name(result.dtype) if isinstance(result, UOp) else described(result)
    raise TypeError(f"mask_mod returns {returned}; it must return a bool, as a comparison gives")
  return Mod(_result(result, dtype), function, dtype)


def _symbols(lengths: tuple[int, int, int, int]) -> tuple[list[UOp], UOp]:
  """Return symbols for b, h, q_idx and kv_idx, and for the score."""
  indices = [UOp.variable(x, 0, max(n - 1, 0), dtypes.int, param=True) for x, n in zip(INDICES, lengths, strict=True)]
  return indices, UOp.variable("score", -float("inf"), float("inf"), dtypes.float, param=True)


def _placeholders(aux: tuple[Tensor, ...]) -> list[UOp]:
  return [UOp.placeholder(tuple(map(int, x.shape)), x.dtype, i) for i, x in enumerate(aux)]


def _result(x: Any, dtype: DType) -> UOp:
  x = _bare(x)
  return x.cast(dtype) if isinstance(x, UOp) else UOp.const(x, dtype)
