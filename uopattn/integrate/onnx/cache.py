"""The caches of GroupQueryAttention: keys and values as integers with scales, and caches of a window."""

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn.dsl import sizes
from uopattn.integrate.onnx.shared import written
from uopattn.spec.tensors import dtype_name

OPERATOR = "GroupQueryAttention"
NONE, PER_TENSOR, PER_CHANNEL = QUANT_TYPES = ("NONE", "PER_TENSOR", "PER_CHANNEL")


@dataclass(frozen=True, eq=False)
class Stored:
  """How a cache stores keys or values: as integers, the quotient by a scale to the nearest, ties to even.

  Attributes:
    bits: 8, int8; or 4, two to a byte of uint8: the even channel in the low half, both plus 8.
    scale: (1, 1 or Hkv, 1, 1 or D) float32. Where it is 0, as before a calibration, integers are made with 1.
  """

  bits: int
  scale: Tensor

  @property
  def dtype(self) -> DType:
    return dtypes.int8 if self.bits == 8 else dtypes.uint8

  def stored(self, x: Tensor) -> Tensor:
    """(B, Hkv, M, D) of a float dtype -> int8, or uint8 with half as many channels, rounded up."""
    half = 1 << (self.bits - 1)
    inverse = self.scale.eq(0).where(1, self.scale).reciprocal()
    number = (x.float() * inverse).clip(-half, half - 1).round().cast(dtypes.int8)
    if self.bits == 8:
      return number
    number = (number.pad_to(None, None, None, sizes(x)[3] + sizes(x)[3] % 2) + half).cast(dtypes.uint8)
    return number[..., ::2] + number[..., 1::2] * 16

  def numbers(self, x: Tensor, D: int) -> Tensor:
    """What `stored` returned -> (B, Hkv, N, D) int8, without scales."""
    if self.bits == 8:
      return x
    return ((x % 16).stack(x // 16, dim=-1).flatten(-2)[..., :D].cast(dtypes.int8)) - 8

  def rows(self, x: Tensor) -> Tensor:
    """Return the scale of each row of `numbers`, (B, Hkv, N): the largest of its channels, or 1 if all are 0."""
    return self._largest().squeeze(-1).expand(sizes(x)[:3])

  def folded(self, x: Tensor) -> Tensor:
    """Multiply queries or outputs, (B, Hq, M, D), by each channel's scale as a part of that in `rows`.

    As sum_d q[d] * (k[d] * s[d]) = sum_d (q[d] * s[d]) * k[d], and as sums of values have their scales too, keys and
    values stay as they are stored. A part is at most 1, so that no query and no output overflows in float16.
    """
    if self.scale.shape[-1] == 1:
      return x
    part = (self.scale / self._largest()).repeat_interleave(sizes(x)[1] // sizes(self.scale)[1], 1)
    return (x.float() * part).cast(x.dtype)

  def _largest(self) -> Tensor:
    if self.scale.shape[-1] == 1:
      return self.scale
    largest = self.scale.abs().max(-1, keepdim=True)
    return largest.eq(0).where(1, largest)


def storage(name: str, kind: str, bits: int, scale: Tensor | None, past: Tensor | None, x: Tensor) -> Stored | None:
  """Return how a cache stores x, (B, Hkv, M, D), or None if it is as it is.

  Args:
    name: k or v, for messages.
    kind: k_quant_type or v_quant_type.
    bits: kv_cache_bit_width.
    scale: k_scale or v_scale: one element, or Hkv * D of them.

  Raises:
    ValueError, TypeError: these do not fit.
  """
  if kind not in QUANT_TYPES:
    raise ValueError(f"{OPERATOR}: {name}_quant_type is {kind!r}; accepted are {', '.join(QUANT_TYPES)}")
  if kind == NONE:
    if scale is not None or bits:
      conflict = f"{name}_scale is given" if scale is not None else f"kv_cache_bit_width is {bits}"
      raise ValueError(f"{OPERATOR}: {conflict}, but {name}_quant_type is NONE")
    return None
  if bits not in (4, 8):
    raise ValueError(f"{OPERATOR}: kv_cache_bit_width is {bits}; with {name}_quant_type={kind!r} it must be 4 or 8")
  _, Hkv, _, D = sizes(x)
  shape = (1, Hkv, 1, D) if kind == PER_CHANNEL else (1, 1, 1, 1)
  if scale is None:
    raise ValueError(f"{OPERATOR}: {name}_scale is missing; {name}_quant_type={kind!r} needs it")
  if scale.dtype != dtypes.float32 or scale.numel() != shape[1] * shape[3]:
    wrong_scale = f"{name}_scale has shape {scale.shape} and dtype {dtype_name(scale.dtype)}"
    raise ValueError(f"{OPERATOR}: {wrong_scale}; with {name}_quant_type={kind!r} it must be {shape} float32")
  stored = Stored(bits, scale.reshape(shape))
  channels = D if bits == 8 else (D + 1) // 2
  if past is not None and (past.dtype != stored.dtype or past.shape[-1] != channels):
    wrong_past = f"past_{'key' if name == 'k' else 'value'} has shape {past.shape} and dtype {dtype_name(past.dtype)}"
    accepted = f"{channels} channels of {dtype_name(stored.dtype)}"
    error = TypeError if past.dtype != stored.dtype else ValueError
    raise error(f"{OPERATOR}: {wrong_past}; with kv_cache_bit_width={bits} it must have {accepted}")
  return stored


def resident(length: Tensor, capacity: int, window: int) -> Tensor:
  """Return how many keys a cache of a window holds after the first `length` ones, (B,): the last ones among them.

  It is onnxruntime's rule for `sliding_window_cache`: a cache is filled, then keeps its window, again and again.
  """
  evicted = capacity - window + 1
  beyond = (length - capacity + evicted - 1).maximum(0) // evicted
  return length - evicted * beyond


def in_window(past: Tensor, new: Tensor, before: Tensor, after: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
  """Add rows to a cache of a window, of `sliding_window_cache`.

  Args:
    past: (B, Hkv, C, D), the capacity C at least `window`.
    new: (B, Hkv, M, D).
    before, after: the numbers of keys so far, (B,), without and with the new ones that count.

  Returns:
    All rows that queries may see, (B, Hkv, C + M, D), the position of the first, (B,), and the new cache.
  """
  (B, H, C, D), M = sizes(past), sizes(new)[2]
  held = resident(before, C, window)
  rows, first = written(past, new, held, C + M), before - held
  dropped = after - resident(after, C, window) - first
  row = Tensor.arange(C).reshape(1, 1, C, 1) + dropped.reshape(B, 1, 1, 1)
  return rows, first, rows.gather(2, row.clip(0, C + M - 1).expand(B, H, C, D))
