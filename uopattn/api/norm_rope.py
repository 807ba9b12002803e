"""RMS norm and rotary positions of new queries and keys: the options of the functions that append to a cache."""

from dataclasses import dataclass
from typing import Any, TypedDict

from tinygrad import Tensor

from uopattn.dsl import sizes
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.schedule import DTYPES_16_32
from uopattn.plan.norm_rope import NormRopeTensors
from uopattn.spec.arguments import number
from uopattn.spec.tensors import (
  check_device,
  check_dtype,
  check_keywords,
  check_tensor,
  described,
  dtype_name,
  placed,
)

TENSORS = ("rotary_cos", "rotary_sin", "q_norm_weight", "k_norm_weight")


class NormRopeOptions(TypedDict, total=False):
  """Keyword arguments of `KVCache.append`, `RingCache.append` and `append_paged`."""

  rotary_cos: Tensor | None
  rotary_sin: Tensor | None
  rotary_interleaved: bool | None
  q_norm_weight: Tensor | None
  k_norm_weight: Tensor | None
  norm_eps: float | None


@dataclass(frozen=True, eq=False)
class NewQueries:
  """The queries that come with new keys, and what becomes of both; see `KVCache.append`.

  Attributes:
    q: (B, Hq, M, Dk), or None.
    change: what becomes of queries and keys; None if nothing does.
  """

  q: Tensor | None
  change: NormRopeTensors | None

  @classmethod
  def of(cls, function: str, q: Tensor | None, k: Tensor, of: str, options: Any) -> "NewQueries":
    """Check the arguments of a call.

    Args:
      function: its name.
      k: the new keys, (B, Hkv, M, Dk), on the device of the memory.
      of: what has that device.
      options: of `NormRopeOptions`.

    Raises:
      TypeError, ValueError: an argument does not fit.
    """
    check_keywords(function, options, NormRopeOptions)
    kwargs = {name: x for name, x in options.items() if x is not None}
    for name in TENSORS:
      if name in kwargs:
        kwargs[name] = _float_tensor(name, kwargs[name], k, of)
    rotary, interleaved = _rotary(kwargs, k)
    weights = kwargs.get("q_norm_weight"), kwargs.get("k_norm_weight")
    eps = _eps(kwargs, k)
    if "q_norm_weight" in kwargs and q is None:
      raise ValueError("q_norm_weight is given without q")
    if q is not None:
      q = _queries(q, k, of)
      if not rotary and weights[0] is None:
        raise ValueError("q is given without rotary_cos or q_norm_weight; pass it to attend as it is")
    if not rotary and weights[0] is None and weights[1] is None:
      return cls(None, None)
    if k.dtype not in DTYPES_16_32:
      accepted = ", ".join(map(dtype_name, DTYPES_16_32))
      raise TypeError(f"k has dtype {dtype_name(k.dtype)}; to be rotated or normalized it must have one of {accepted}")
    return cls(q, NormRopeTensors(rotary, interleaved, weights, eps))

  @property
  def positions(self) -> int:
    """The number of positions that cos and sin have; `FAR` if nothing is rotated."""
    return FAR if self.change is None or not self.change.rotary else sizes(self.change.rotary[0])[0]

  def limit(self, positions: int, of: str) -> tuple[int, str]:
    """Return the number of positions that new keys may have, and what limits it: `of`, or cos and sin."""
    return (self.positions, "with rotary_cos") if self.positions < positions else (positions, of)


def _float_tensor(name: str, option: object, k: Tensor, of: str) -> Tensor:
  x: Tensor = placed(check_tensor(name, option), k.device)
  check_dtype(name, x.dtype, DTYPES_16_32)
  check_device(name, x, k.device, of)
  return x


def _rotary(kwargs: dict[str, Any], k: Tensor) -> tuple[tuple[Tensor, ...], bool]:
  """Return cos and sin, () if they are not given, and whether pairs are neighbours."""
  cos, sin, interleaved = (kwargs.get(f"rotary_{name}") for name in ("cos", "sin", "interleaved"))
  if cos is None and sin is None and interleaved is None:
    return (), False
  if cos is None or sin is None or interleaved is None:
    missing = [name for name in ("rotary_cos", "rotary_sin", "rotary_interleaved") if name not in kwargs]
    are = "is" if len(missing) == 1 else "are"
    raise ValueError(
      f"{' and '.join(missing)} {are} missing; rotary_cos, rotary_sin and rotary_interleaved belong together: True for "
      "pairs of elements 2 i and 2 i + 1, False for i and i + rotary_dim / 2, as in Hugging Face's Llama"
    )
  if not isinstance(interleaved, bool):
    raise TypeError(f"rotary_interleaved is {described(interleaved)}; it must be a bool")
  most = sizes(k)[3] // 2
  if most == 0:
    raise ValueError("k has head size 1; with rotary_cos it must be at least 2, for pairs of elements")
  if cos.ndim != 2 or 0 in cos.shape or sizes(cos)[1] > most:
    raise ValueError(
      f"rotary_cos has shape {cos.shape}; it must be (positions, rotary_dim / 2), the latter from 1 to {most} for the "
      "head size of k: one angle for each pair, not repeated for both elements"
    )
  if sin.shape != cos.shape:
    raise ValueError(f"rotary_sin has shape {sin.shape}; it must be that of rotary_cos, {cos.shape}")
  if sin.dtype != cos.dtype:
    raise TypeError(
      f"rotary_sin has dtype {dtype_name(sin.dtype)}; it must be that of rotary_cos, {dtype_name(cos.dtype)}"
    )
  return (cos, sin), interleaved


def _eps(kwargs: dict[str, Any], k: Tensor) -> float:
  """Return norm_eps, once the weights of the norms are checked too."""
  names = [name for name in ("q_norm_weight", "k_norm_weight") if name in kwargs]
  for name in names:
    if kwargs[name].shape != (sizes(k)[3],):
      raise ValueError(f"{name} has shape {kwargs[name].shape}; it must be ({sizes(k)[3]},), the head size of k")
  eps = number("norm_eps", kwargs.get("norm_eps", 1e-6))
  if eps < 0:
    raise ValueError(f"norm_eps is {eps}; it must not be negative")
  if "norm_eps" in kwargs and not names:
    raise ValueError("norm_eps is given without q_norm_weight or k_norm_weight")
  return eps


def _queries(queries: object, k: Tensor, of: str) -> Tensor:
  q: Tensor = placed(check_tensor("q", queries), k.device, k.dtype)
  B, Hkv, M, Dk = sizes(k)
  if q.ndim != 4 or (q.shape[0], *q.shape[2:]) != (B, M, Dk) or sizes(q)[1] % Hkv or not sizes(q)[1]:
    raise ValueError(f"q has shape {q.shape}; for k {k.shape} it must be ({B}, Hq, {M}, {Dk}), Hq a multiple of {Hkv}")
  check_dtype("q", q.dtype, DTYPES_16_32)
  check_device("q", q, k.device, of)
  return q
