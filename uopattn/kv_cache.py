"""Keys and values kept from step to step of a decoder, written in place."""

from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.attention import attention
from uopattn.dsl import sizes
from uopattn.spec import DTYPES, dtype_name, is_place


class KVCache:
  """The keys and values of one layer.

  Memory for all N_max positions is taken at once, filled with 0, and never copied. With a bound Variable as `start` one
  compiled kernel serves all lengths, in and out of `TinyJit`:

    start = UOp.variable("start", 0, N_max - 1)
    for position in range(...):
      cache.append(k, v, start.bind(position))  # one position each
      out = cache.attend(q, start.bind(position))

  Both are lazy. Realize each step before the next: a Variable has one value in all that is realized together, and an
  output realized late may see what was written since. Return from a `TinyJit` what depends on what was written:
  `attend`'s output, or `k` and `v` themselves.

  Attributes:
    k: (B, Hkv, N_max, Dk), with all that was appended so far; what `uopattn.attention` takes.
    v: (B, Hkv, N_max, Dv), likewise.
  """

  def __init__(
    self,
    B: int,
    Hkv: int,
    N_max: int,
    Dk: int,
    Dv: int | None = None,
    *,
    dtype: DType = dtypes.float32,
    device: str | None = None,
  ):
    """Takes the memory.

    Args:
      B: sequences.
      Hkv: key heads.
      N_max: positions.
      Dk: head size of keys.
      Dv: head size of values; None is Dk.
      dtype: float32, float16 or bfloat16.
      device: None is tinygrad's default.

    Raises:
      TypeError, ValueError: an argument does not fit.
    """
    Dv = Dk if Dv is None else Dv
    for name, size in (("B", B), ("Hkv", Hkv), ("N_max", N_max), ("Dk", Dk), ("Dv", Dv)):
      if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} is {size!r}; it must be an int >= 1")
    if dtype not in DTYPES:
      raise TypeError(f"dtype is {dtype_name(dtype)}; accepted are {', '.join(map(dtype_name, DTYPES))}")
    self.k, self.v = (
      Tensor.zeros(B, Hkv, N_max, D, dtype=dtype, device=device).contiguous().realize() for D in (Dk, Dv)
    )

  def append(self, k: Tensor, v: Tensor, start: int | UOp) -> None:
    """Writes the keys and values of M positions, from `start` on.

    Args:
      k: (B, Hkv, M, Dk), of the cache's dtype.
      v: (B, Hkv, M, Dv), likewise.
      start: int, bound Variable, or an expression of such. An int is compiled for that position alone.

    Raises:
      TypeError: the dtype is not the cache's, or `start` is none of these.
      ValueError: a shape or device does not fit, or it could end past N_max: of a Variable its largest value counts, as
        a `TinyJit` checks no values when it replays.
    """
    M = sizes(k)[2] if k.ndim == 4 else 0
    for name, x, held in (("k", k, self.k), ("v", v, self.v)):
      B, Hkv, _, D = sizes(held)
      if x.shape != (B, Hkv, M, D) or not isinstance(M, int) or M < 1:
        raise ValueError(f"{name} has shape {x.shape}; it must be ({B}, {Hkv}, M, {D}), M >= 1 and the same of k and v")
      if x.dtype != held.dtype:
        raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}, the cache has {dtype_name(held.dtype)}")
      if x.device != held.device:
        raise ValueError(f"{name} is on {x.device}, the cache is on {held.device}")
    self._check(start, M)
    self.k, self.v = _written(self.k, k, start), _written(self.v, v, start)

  def attend(self, q: Tensor, start: int | UOp, *, is_causal: bool = True, **options: Any) -> Any:
    """`uopattn.attention` of M queries, from position `start` on, over all keys up to the last query's.

    Args:
      q: (B, Hq, M, Dk), of the cache's dtype; Hq a multiple of Hkv.
      start: as for `append`.
      is_causal: no query sees the keys behind it.
      options: further ones of `uopattn.attention`.

    Returns:
      (B, Hq, M, Dv); with return_lse a pair.

    Raises:
      TypeError, ValueError: as `append` and `uopattn.attention`.
    """
    M = sizes(q)[-2]
    self._check(start, M)
    options = {"kv_lengths": start + M, "enable_gqa": True} | options
    return attention(q, self.k, self.v, is_causal=is_causal, q_start=start, **options)

  def _check(self, start: int | UOp, M: int) -> None:
    """Raises an error unless M positions from `start` on are within the cache."""
    if not is_place(start):
      raise TypeError(f"start is {start!r}; accepted are an int and a bound Variable, or an expression of such")
    low, high = (start.vmin, start.vmax) if isinstance(start, UOp) else (start, start)
    N_max = sizes(self.k)[2]
    if low < 0 or high + M > N_max:
      given = f"start is {start}" if isinstance(start, int) else f"start is a Variable from {low} to {high}"
      raise ValueError(f"{given}; for {M} of the cache's {N_max} positions it must be from 0 to {N_max - M}")


def _written(held: Tensor, x: Tensor, start: int | UOp) -> Tensor:
  """The same memory, once x stands in it from `start` on.

  Not `Tensor.assign`, which would also show the new content to tensors made before and not realized yet.
  """
  place = held[:, :, start : start + sizes(x)[2]]
  return Tensor(held.uop.after(place.uop.store(x.uop)))
