"""Pages of keys and values in 4 bits: what a call says of them, and the checks of it."""

from dataclasses import replace

from tinygrad import Tensor, dtypes

from uopattn.dsl import sizes
from uopattn.dsl.rules.four_bits import GROUP, columns_in
from uopattn.dsl.rules.quantized import FORMATS, FourBits
from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import strided
from uopattn.spec.tensors import check_device, check_tensor, described, dtype_name, placed

WORD = 4  # bytes


def format_of(kv_dtype: object, k_pages: Tensor) -> FourBits | None:
  """Return the format that kv_dtype names. Raises TypeError or ValueError if it names none, or if pages need one."""
  accepted = ", ".join(map(repr, FORMATS))
  if kv_dtype is None:
    if k_pages.dtype == dtypes.uint8:
      raise TypeError(f"k_pages has dtype uchar; kv_dtype must name its format; accepted are {accepted}")
    return None
  if not isinstance(kv_dtype, str):
    raise TypeError(f"kv_dtype is {described(kv_dtype)}; accepted are None, {accepted}")
  if kv_dtype not in FORMATS:
    raise ValueError(f"kv_dtype is {kv_dtype!r}; accepted are None, {accepted}")
  return FORMATS[kv_dtype]


def in_format(arguments: Arguments, four: FourBits | None, k_pages: Tensor, v_pages: Tensor, Dk: int) -> Arguments:
  """Return the arguments; for pages of 4 bits, k_scale and v_scale become the scales of rows.

  Args:
    arguments: with k_scale and v_scale as they were given.
    k_pages, v_pages: of four axes, on the device of q.
    Dk: the head size of q.

  Raises:
    TypeError, ValueError: the pages or the scales do not fit the format.
  """
  if four is None:
    return arguments
  check_rows("k_pages", k_pages, four)
  check_rows("v_pages", v_pages, four)
  Dv = sizes(v_pages)[3] * 16 // 9 // GROUP * GROUP  # or less: 16 elements take 9 bytes, and padding
  _check_columns("k_pages", k_pages, four, {Dk: bytes_of("q has head size", Dk, four)})
  _check_columns("v_pages", v_pages, four, {D: columns_in(D) for D in (Dv, Dv + GROUP) if D})
  scales = row_scales(four, k_pages, arguments.k_scale, arguments.v_scale)
  return replace(arguments, four=four, scales=scales, k_scale=None, v_scale=None)


def _check_columns(name: str, x: Tensor, four: FourBits, accepted: dict[int, int]) -> None:
  """Raise ValueError unless the rows of pages have the bytes of one of the head sizes, given as a table."""
  if sizes(x)[3] not in accepted.values():
    some = " or ".join(f"{columns} for head size {D}" for D, columns in accepted.items())
    raise ValueError(f"{name} has shape {x.shape}; in {four.name} a row has {some}")


def bytes_of(what: str, D: int, four: FourBits) -> int:
  """Return the bytes of a row of D elements. Raises ValueError if these are no whole groups.

  Args:
    what: what has this size, for the message, such as "Dk is".
  """
  if D % GROUP:
    raise ValueError(f"{what} {D}; in {four.name} it must be a multiple of {GROUP}")
  return columns_in(D)


def check_rows(name: str, x: Tensor, four: FourBits) -> None:
  """Raise TypeError or ValueError unless pages hold bytes, and their rows begin with whole words."""
  if x.dtype != dtypes.uint8:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; in {four.name} it must have uchar")
  layout = strided(x)
  if layout is not None and any(n % WORD for n in (layout.offset, *layout.strides[:3])):
    raise ValueError(f"{name} is a view whose rows begin between words; they must begin at multiples of {WORD} bytes")


def row_scales(four: FourBits, k_pages: Tensor, k_scale: object, v_scale: object) -> tuple[Tensor, Tensor]:
  """Return the scales of rows. Raises TypeError or ValueError unless they fit the pages."""
  scales = []
  for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
    accepted = f"a float32 Tensor (P, Hkv, page_size) = {k_pages.shape[:3]}, the scales of rows in {four.name}"
    if scale is None:
      raise TypeError(f"{name} is missing; it must be {accepted}")
    if not isinstance(scale, Tensor):
      raise TypeError(f"{name} is {described(scale)}; it must be {accepted}")
    x: Tensor = placed(check_tensor(name, scale), k_pages.device)
    if x.dtype != dtypes.float32:
      raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be {accepted}")
    if x.shape != k_pages.shape[:3]:
      raise ValueError(f"{name} has shape {x.shape}; it must be {accepted}")
    check_device(name, x, k_pages.device, "k_pages")
    scales.append(x)
  return scales[0], scales[1]
