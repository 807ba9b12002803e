"""`KVCache`: a decoder's keys and values, written in place step by step."""

from typing import Literal, Unpack, cast, overload

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import capturing

from uopattn.api.attention import attend
from uopattn.api.paged import _at_hand
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.dsl.schedule import DTYPES_16_32
from uopattn.kernels.append import Place, Rows
from uopattn.plan.append import append_call
from uopattn.spec.arguments import Arguments, CacheOptions, check_place
from uopattn.spec.shards import Devices, joined, part_of
from uopattn.spec.tensors import batched, check_device, check_tensor, dtype_name, near, placed


class KVCache:
  """The keys and values of one layer, written in place step by step.

  Memory for all N_max positions is allocated once, filled with 0, and never copied. One kernel writes keys, values and
  scales. With a bound Variable as `start`, or a Tensor if sequences have different lengths, one compiled kernel serves
  all lengths, inside and outside `TinyJit`. An int is compiled for that position only, which suits a prompt.

  `append` and `attend` are lazy. Realize each step before the next: a Variable has only one value in everything that is
  realized together, and an output realized late may see what was written since. Return something from a `TinyJit` that
  depends on the write: `attend`'s output, or `k` and `v` themselves.

  An 8-bit cache has one scale per key and one per value, which maps the largest element to the largest number of the
  dtype; the others are rounded to nearest. Kernels read the 8 bits and multiply scores and weights by the scales. A row
  that holds NaN or infinity has the scale NaN. k and v appended to an 8-bit cache have gradients of 0, as rounding has;
  q has its usual gradient.

  Attributes:
    k: (B, Hkv, N_max, Dk), with everything appended so far; `uopattn.attention` accepts it unless it has 8 bits.
    v: (B, Hkv, N_max, Dv), as k.
    k_scale, v_scale: (B, Hkv, N_max) float32 factors for k and v of 8 bits, otherwise None.

  Example:
    >>> from tinygrad import Tensor, UOp
    >>> from uopattn import KVCache
    >>> cache = KVCache(1, 1, 100, 4, 1)  # B, Hkv, N_max, Dk, Dv
    >>> start = UOp.variable("start", 0, 99)
    >>> for position, value in enumerate([1.0, 3.0, 5.0]):
    ...   q = k = Tensor.zeros(1, 1, 1, 4)
    ...   cache.append(k, Tensor([[[[value]]]]), start.bind(position))
    ...   print(cache.attend(q, start.bind(position)).item())  # the mean of the values so far
    1.0
    2.0
    3.0
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
    device: Devices | None = None,
    axis: int | None = None,
  ):
    """Allocate the memory.

    Args:
      B: number of sequences.
      Hkv: number of key heads.
      N_max: number of positions.
      Dk: head size of keys.
      Dv: head size of values; None is Dk.
      dtype: float32, float16 or bfloat16, or with scales int8, fp8e4m3 or fp8e5m2.
      device: None is tinygrad's default. Several devices, ("CUDA", "CUDA:1"), divide the cache along `axis`.
      axis: 0 for sequences, 1 for key heads, as in `Tensor.shard`; None keeps all of the cache on every device.

    Raises:
      TypeError, ValueError: an argument does not fit.

    Example:
      >>> from tinygrad import dtypes
      >>> from uopattn import KVCache
      >>> cache = KVCache(1, 8, 1000, 64, dtype=dtypes.int8)
      >>> cache.k.shape, cache.k_scale.shape
      ((1, 8, 1000, 64), (1, 8, 1000))
    """
    Dv = Dk if Dv is None else Dv
    for name, size in (("B", B), ("Hkv", Hkv), ("N_max", N_max), ("Dk", Dk), ("Dv", Dv)):
      least = 0 if name in ("B", "N_max") else 1
      if not isinstance(size, int) or size < least:
        raise ValueError(f"{name} is {size!r}; it must be an int >= {least}")
    accepted = (*DTYPES_16_32, *QUANTIZED_DTYPES)
    if dtype not in accepted:
      raise TypeError(f"dtype is {dtype_name(dtype)}; accepted are {', '.join(map(dtype_name, accepted))}")

    if isinstance(device, tuple) and axis is not None and (axis not in (0, 1) or (B, Hkv)[axis] % len(device)):
      raise ValueError(
        f"axis is {axis} for B={B} and Hkv={Hkv} on {len(device)} devices; it must be 0, 1 or None, and the devices "
        "must divide that size"
      )

    def zeros(*shape: int, dtype: DType) -> Tensor:
      if not isinstance(device, tuple):
        return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
      part = tuple(n // len(device) if i == axis else n for i, n in enumerate(shape))
      return joined(Tensor.zeros(*part, dtype=dtype, device=device).contiguous(), axis).realize()

    self.k, self.v = (zeros(B, Hkv, N_max, D, dtype=dtype) for D in (Dk, Dv))
    self.k_scale: Tensor | None = None
    self.v_scale: Tensor | None = None
    if dtype in QUANTIZED_DTYPES:
      self.k_scale, self.v_scale = (zeros(B, Hkv, N_max, dtype=dtypes.float) for _ in range(2))

  def append(self, k: Tensor, v: Tensor, start: int | UOp | Tensor) -> None:
    """Write the keys and values of M positions, from position `start` on.

    Args:
      k: (B, Hkv, M, Dk), in the cache's dtype; for an 8-bit cache float32, float16 or bfloat16. M may be 0.
      v: (B, Hkv, M, Dv), as k.
      start: int, bound Variable, an expression of Variables, or (B,) Tensor of any integer dtype, with a position for
        each sequence. An int is compiled for that position only.

    Raises:
      TypeError: a dtype, or the type of `start`, is not accepted.
      ValueError: a shape or device does not fit, or the last position could lie at or beyond N_max. For a Variable its
        largest value counts, as a `TinyJit` checks no values when it replays. A Tensor is checked if it is realized or
        made of Python or numpy numbers, outside of a `TinyJit`; on a GPU this waits for pending work. Otherwise
        positions outside of the cache are not written.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import KVCache
      >>> cache = KVCache(1, 1, 4, 2)
      >>> cache.append(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), Tensor.ones(1, 1, 2, 2), 1)  # positions 1 and 2
      >>> cache.k.tolist()
      [[[[0.0, 0.0], [1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]]]

      Two sequences of different lengths:

      >>> cache = KVCache(2, 1, 4, 1)
      >>> cache.append(Tensor([[[[1.0]]], [[[2.0]]]]), Tensor.ones(2, 1, 1, 1), Tensor([0, 3]))
      >>> cache.k.flatten(1).tolist()
      [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]
    """
    k, v = (placed(check_tensor(name, x), self._device, self._weak) for name, x in (("k", k), ("v", v)))
    M = sizes(k)[2] if k.ndim == 4 else 0
    for name, x, held in (("k", k, self.k), ("v", v, self.v)):
      B, Hkv, _, D = sizes(held)
      if x.shape != (B, Hkv, M, D):
        raise ValueError(f"{name} has shape {x.shape}; it must be ({B}, {Hkv}, M, {D}), M the same of k and v")
      if x.dtype not in (accepted := DTYPES_16_32 if held.dtype in QUANTIZED_DTYPES else (held.dtype,)):
        given = f"{name} has dtype {dtype_name(x.dtype)}, the cache has {dtype_name(held.dtype)}"
        raise TypeError(f"{given}; accepted are {', '.join(map(dtype_name, accepted))}")
      if x.device != held.device:
        raise ValueError(f"{name} is on {x.device}, the cache is on {held.device}")
    start = self._checked(start, M)
    if 0 not in (*sizes(k), *sizes(self.k)):
      self._write(k, v, start, Rows(sizes(self.k)[2]))

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CacheOptions],
  ) -> Tensor: ...

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
  ) -> tuple[Tensor, Tensor]: ...

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: bool,
    **options: Unpack[CacheOptions],
  ) -> Tensor | tuple[Tensor, Tensor]: ...

  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[CacheOptions],
  ) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of M queries, from position `start` on, over all keys up to the last query.

    Equals `attention(q, cache.k, cache.v, is_causal=True, q_start=start, kv_lengths=start + M, enable_gqa=True)`.

    Args:
      q: (B, Hq, M, Dk), in a dtype that `append` accepts; Hq is a multiple of Hkv, or equal if enable_gqa is False.
      start: as in `append`.
      is_causal: no query sees keys after its own position.
      kv_lengths: as in `uopattn.attention`; None is start + M.
      attn_mask, dropout_p, scale, enable_gqa, window, softcap, sinks, score_mod, mask_mod, aux, block_mask, return_lse,
        backend: as in `uopattn.attention`; scores are (B, Hq, M, N_max).

    Returns:
      (B, Hq, M, Dv) in q's dtype; with return_lse a pair.

    Raises:
      TypeError, ValueError: as in `append` and `uopattn.attention`.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import KVCache
      >>> cache = KVCache(1, 2, 100, 16)
      >>> cache.append(Tensor.randn(1, 2, 5, 16), Tensor.randn(1, 2, 5, 16), 0)  # a prompt
      >>> cache.attend(Tensor.randn(1, 8, 5, 16), 0, window=(3, 0)).realize().shape
      (1, 8, 5, 16)
    """
    q = placed(check_tensor("q", q), self._device, self._weak)
    M = sizes(batched("q", q))[2]
    start = self._checked(start, M)
    backend, kv_lengths = options.pop("backend", "auto"), options.pop("kv_lengths", None)
    lengths = start + M if kv_lengths is None else kv_lengths
    scales = None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)
    own = {"q_start": start, "kv_lengths": lengths, "scales": scales, "return_lse": return_lse}
    given = {"is_causal": True, "enable_gqa": True, **options}
    arguments = Arguments.of("KVCache.attend", CacheOptions, given, **own)
    return attend(q, self.k, self.v, arguments, backend)

  @property
  def _device(self) -> Devices:
    return cast(Devices, self.k.device)

  @property
  def _weak(self) -> DType:
    """The dtype that Tensors of a weak dtype are cast to."""
    return dtypes.default_float if self.k.dtype in QUANTIZED_DTYPES else self.k.dtype

  def _checked(self, start: int | UOp | Tensor, M: int) -> int | UOp | Tensor:
    """Return `start`, a Tensor as int32 on the cache's device.

    Raises:
      TypeError: it is of a wrong type.
      ValueError: the M positions from it on do not lie within the cache, as far as that is known without computing.
    """
    B, _, N_max, _ = sizes(self.k)
    start = placed(start, self._device)
    check_place("start", start, B)
    accepted = f"for {M} of the cache's {N_max} positions it must be from 0 to {N_max - M}"
    if not isinstance(start, Tensor):
      low, high = (start.vmin, start.vmax) if isinstance(start, UOp) else (start, start)
      if low < 0 or high + M > N_max:
        given = f"start is {start}" if isinstance(start, int) else f"start is a Variable from {low} to {high}"
        raise ValueError(f"{given}; {accepted}")
      return start
    check_device("start", start, self._device, "the cache")
    for b, first in enumerate([] if capturing or (values := _at_hand(start)) is None else values.tolist()):
      if first < 0 or first + M > N_max:
        raise ValueError(f"start is {first} for sequence {b}; {accepted}")
    return cast(Tensor, near(start))

  def _write(self, k: Tensor, v: Tensor, start: int | UOp | Tensor, place: Place) -> None:
    """Write new keys and values, and their scales if the cache has 8 bits."""
    axis = self.k.uop.axis if isinstance(self.k.device, tuple) else None
    scales = [] if self.k_scale is None or self.v_scale is None else [self.k_scale, self.v_scale]
    held, new, scales = ([part_of(x, axis) for x in xs] for xs in ([self.k, self.v], [k, v], scales))
    if isinstance(start, Tensor):
      start = part_of(start, 0 if axis == 0 else None)
    call = append_call(held, new, start, place, row_scales=scales)
    parts = [x.uop.after(call) for x in (*held, *scales)]
    found = [Tensor(x if axis is None else x.unshard(axis)) for x in parts]
    self.k, self.v = found[:2]
    if scales:
      self.k_scale, self.v_scale = found[2:]
