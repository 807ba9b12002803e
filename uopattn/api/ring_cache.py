"""`RingCache`: a decoder's last keys and values, for attention in a sliding window."""

from dataclasses import replace
from typing import Literal, Unpack, cast, overload

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.api.attention import attend
from uopattn.api.cache_memory import CacheMemory
from uopattn.api.merge import merge_states
from uopattn.api.norm_rope import NewQueries, NormRopeOptions
from uopattn.dsl import least, sizes
from uopattn.dsl.rules.masks import FAR
from uopattn.kernels.append import Ring
from uopattn.spec.arguments import Arguments, RingOptions
from uopattn.spec.shards import Devices
from uopattn.spec.tensors import check_device, check_ints, check_size, clamped, placed

TEXT = "in a text"  # what has so many positions, for messages


class RingCache(CacheMemory):
  """The last keys and values of one layer, in memory of the size of a sliding window, not of the text.

  Position p is seen by its own query and the `window` - 1 that follow. The first `sink_tokens` positions are kept and
  seen by all queries, as the attention sinks of StreamingLLM (Xiao et al., 2023). Each of them has a row of its own.
  The others share window + M_max - 1 rows, in turn: a ring, or Mistral's rolling buffer. Keys are not moved or rotated,
  and positions may grow up to 2**30.

  Read a text of any length with `prefill`, which attends to the text itself and keeps the end of it. Then `append` and
  `attend` up to M_max positions at a time. With M_max of 1 the ring is the window, so that a step needs no mask; a
  larger one is for chunks of a prompt and for speculative decoding. A draft of at most M_max positions may be rolled
  back: append at an earlier `start`.

  `append`, `attend` and `prefill` are lazy, and write scales if the cache has 8 or 4 bits, as in `KVCache`.

  Attributes:
    k: (B, Hkv, sink_tokens + window + M_max - 1, Dk), rows in the order of the ring.
    v: (B, Hkv, sink_tokens + window + M_max - 1, Dv), as k.
    k_scale, v_scale: float32 factors for the rows of k and v of 8 or 4 bits, otherwise None.

  Example:
    >>> from tinygrad import Tensor, UOp
    >>> from uopattn import RingCache
    >>> cache = RingCache(1, 1, 2, 4, 1)  # B, Hkv, window, Dk, Dv
    >>> start = UOp.variable("start", 0, 1000)
    >>> for position, value in enumerate([1.0, 3.0, 5.0, 7.0]):
    ...   q = k = Tensor.zeros(1, 1, 1, 4)
    ...   cache.append(k, Tensor([[[[value]]]]), start.bind(position))
    ...   print(cache.attend(q, start.bind(position)).item())  # the mean of the last two values
    1.0
    2.0
    4.0
    6.0
  """

  def __init__(
    self,
    B: int,
    Hkv: int,
    window: int,
    Dk: int,
    Dv: int | None = None,
    *,
    sink_tokens: int = 0,
    M_max: int = 1,
    dtype: DType | str = dtypes.float32,
    device: Devices | None = None,
    axis: int | None = None,
  ):
    """Allocate the memory.

    Args:
      B: number of sequences.
      Hkv: number of key heads.
      window: number of positions that a query sees, its own included: `window=(window - 1, 0)` of `attention`.
      Dk: head size of keys.
      Dv: head size of values; None is Dk.
      sink_tokens: number of first positions that all queries see.
      M_max: the most queries of `attend`.
      dtype, device, axis: as in `KVCache`.

    Raises:
      TypeError, ValueError: an argument does not fit.

    Example:
      >>> from uopattn import RingCache
      >>> RingCache(1, 8, 1024, 64, sink_tokens=4).k.shape
      (1, 8, 1028, 64)
    """
    window, M_max = check_size("window", window, 1), check_size("M_max", M_max, 1)
    sink_tokens = check_size("sink_tokens", sink_tokens, 0)
    self._window, self._sink_tokens, self._M_max = window, sink_tokens, M_max
    self._row_map = Ring(sink_tokens, window + M_max - 1)
    super().__init__(B, Hkv, sink_tokens + window + M_max - 1, Dk, Dv, dtype, device, axis)

  @overload
  def append(
    self,
    k: Tensor,
    v: Tensor,
    start: int | UOp | Tensor,
    *,
    lengths: Tensor | None = None,
    q: None = None,
    **options: Unpack[NormRopeOptions],
  ) -> None: ...

  @overload
  def append(
    self,
    k: Tensor,
    v: Tensor,
    start: int | UOp | Tensor,
    *,
    lengths: Tensor | None = None,
    q: Tensor,
    **options: Unpack[NormRopeOptions],
  ) -> Tensor: ...

  def append(
    self,
    k: Tensor,
    v: Tensor,
    start: int | UOp | Tensor,
    *,
    lengths: Tensor | None = None,
    q: Tensor | None = None,
    **options: Unpack[NormRopeOptions],
  ) -> Tensor | None:
    """Write the keys and values of M positions, from position `start` on, over the oldest ones.

    Of more positions than the ring has rows, the last are kept, and the sink tokens.

    Args:
      k: (B, Hkv, M, Dk), in the cache's dtype; for one of 8 or 4 bits float32, float16 or bfloat16. M may be 0.
      v: (B, Hkv, M, Dv), as k.
      start: int, bound Variable, an expression of Variables, or (B,) Tensor of any integer dtype, with a position for
        each sequence. An int is compiled for that position only.
      lengths: (B,) integer Tensor, the number of new keys of each sequence: only the first lengths[b] of k and v are
        written, as for prompts of different lengths. Others than 0 to M are clamped. None is M.
      q, rotary_cos, rotary_sin, rotary_interleaved, q_norm_weight, k_norm_weight, norm_eps: as in `KVCache.append`.
        Positions are those of the text, so cos and sin have as many rows as the text may have positions.

    Returns:
      q rotated and normalized, as in `KVCache.append`; None without q.

    Raises:
      TypeError, ValueError: an argument does not fit, as in `KVCache.append`.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import RingCache
      >>> cache = RingCache(1, 1, 3, 1, sink_tokens=1)
      >>> k = Tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape(1, 1, 6, 1)
      >>> cache.append(k, k, 0)
      >>> cache.k.flatten().tolist()
      [1.0, 5.0, 6.0, 4.0]
    """
    k, v = self._rows(k, v)
    if (lengths := placed(lengths, self._device)) is not None:
      check_ints("lengths", lengths, (sizes(self.k)[0],))
      check_device("lengths", lengths, self._device, "the cache")
    new = NewQueries.of("RingCache.append", q, k, "the cache", options)
    start = self._start(start, sizes(k)[2], *new.limit(FAR, TEXT))
    return self._write(k, v, start, self._row_map, new, clamped(lengths))

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
  ) -> Tensor: ...

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
  ) -> tuple[Tensor, Tensor]: ...

  @overload
  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: bool,
    **options: Unpack[RingOptions],
  ) -> Tensor | tuple[Tensor, Tensor]: ...

  def attend(
    self,
    q: Tensor,
    start: int | UOp | Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[RingOptions],
  ) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of M queries, from position `start` on, which are the last that were appended.

    Args:
      q: (B, Hq, M, Dk), as in `KVCache.attend`, M at most M_max.
      start: as in `append`.
      scale, enable_gqa, softcap, sinks, return_lse, backend: as in `uopattn.attention`; sinks are logits.

    Returns:
      (B, Hq, M, Dv) in q's dtype; with return_lse a pair.

    Raises:
      TypeError, ValueError: as in `append` and `uopattn.attention`.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import RingCache
      >>> cache = RingCache(1, 2, 100, 16, M_max=4)
      >>> cache.append(Tensor.randn(1, 2, 3, 16), Tensor.randn(1, 2, 3, 16), 0)
      >>> cache.attend(Tensor.randn(1, 8, 3, 16), 0).realize().shape
      (1, 8, 3, 16)
    """
    q = self._queries(q)
    M = sizes(q)[2]
    if self._M_max < M:
      raise ValueError(f"q has {M} queries; attend of a RingCache takes M_max={self._M_max} at most, prefill any")
    start = self._start(start, M, FAR, TEXT)
    own = {"kv_lengths": self._filled(start, M), "scales": self._scales, "four": self._four, "return_lse": return_lse}
    if self._M_max > 1:
      own["attn_mask"] = self._mask(start, M)
    backend, with_defaults = options.pop("backend", "auto"), {"enable_gqa": True, **options}
    return attend(q, self.k, self.v, Arguments.of("RingCache.attend", RingOptions, with_defaults, **own), backend)

  @overload
  def prefill(
    self,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
  ) -> Tensor: ...

  @overload
  def prefill(
    self,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
  ) -> tuple[Tensor, Tensor]: ...

  @overload
  def prefill(
    self,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    return_lse: bool,
    **options: Unpack[RingOptions],
  ) -> Tensor | tuple[Tensor, Tensor]: ...

  def prefill(
    self,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[RingOptions],
  ) -> Tensor | tuple[Tensor, Tensor]:
    """Append the first M positions of a text, of any length, and compute the attention of their queries.

    Attention is over k and v themselves, not rounded to 8 or 4 bits. Sink tokens and the window are two calls of
    `uopattn.attention`, which `merge_states` merges, so that tiles outside of the window are skipped.

    Args:
      q: (B, Hq, M, Dk), as in `attend`, any M.
      k, v, lengths: as in `append`, of the same M positions. Rows of the output at or beyond lengths[b] are of no use.
      scale, enable_gqa, softcap, sinks, return_lse, backend: as in `attend`.

    Returns:
      (B, Hq, M, Dv) in q's dtype; with return_lse a pair. Realize it with `k` and `v` of the cache, or before the next
      step.

    Raises:
      TypeError, ValueError: as in `append` and `uopattn.attention`.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import RingCache
      >>> cache = RingCache(1, 1, 2, 4, 1, sink_tokens=1)
      >>> values = Tensor([1.0, 3.0, 5.0, 7.0, 9.0]).reshape(1, 1, 5, 1)
      >>> out = cache.prefill(Tensor.zeros(1, 1, 5, 4), Tensor.zeros(1, 1, 5, 4), values)
      >>> [round(x, 4) for x in out.flatten().tolist()]  # the last two, and the first
      [1.0, 2.0, 3.0, 4.3333, 5.6667]
    """
    backend, with_defaults = options.pop("backend", "auto"), {"enable_gqa": True, **options}
    causal = Arguments.of("RingCache.prefill", RingOptions, with_defaults, is_causal=True, return_lse=return_lse)
    q, (k, v) = self._queries(q), self._rows(k, v)
    if (M := sizes(q)[2]) != sizes(k)[2]:
      raise ValueError(f"k has shape {k.shape}, q has {q.shape}; both must be of the same M positions")
    first = min(self._sink_tokens, M)
    of_window = replace(causal, window=(self._window - 1, 0), q_start=-first)
    if first == 0:
      result = attend(q, k, v, of_window, backend)
    else:
      states = [attend(q, k[:, :, :first], v[:, :, :first], replace(causal, return_lse=True), backend)]
      if first < M:
        of_ring = replace(of_window, return_lse=True, sinks=None)
        states.append(attend(q, k[:, :, first:], v[:, :, first:], of_ring, backend))
      out, lse = merge_states(*zip(*states, strict=True))
      result = (out, lse) if return_lse else out
    self.append(k, v, 0, lengths=lengths)
    return cast(Tensor | tuple[Tensor, Tensor], result)

  def _filled(self, start: int | UOp | Tensor, M: int) -> int | UOp | Tensor:
    """Return the number of rows that hold a position."""
    rows = sizes(self.k)[2]
    if isinstance(start, Tensor):
      return (start + M).minimum(rows)
    return min(start + M, rows) if isinstance(start, int) else least([start + M, UOp.const(rows)])

  def _mask(self, start: int | UOp | Tensor, M: int) -> Tensor:
    """Return whether each query sees each row that is filled, (B or 1, 1, M, rows) bool.

    Of the positions behind the sink tokens, counted from there, row r of the ring has the last that is r modulo its
    rows.
    """
    S, rows = self._sink_tokens, sizes(self.k)[2]
    ring = rows - S
    first = (start if isinstance(start, Tensor) else Tensor(start)).cast(dtypes.int).reshape(-1, 1, 1, 1)
    query, row = first + Tensor.arange(M).reshape(1, 1, M, 1), Tensor.arange(rows).reshape(1, 1, 1, rows)
    newest = first + (M - 1 - S)
    age = (newest - (row - S) + ring * (S // ring + 2)) % ring  # of what is never negative
    position = (row < S).where(row, S + newest - age)
    return (position <= query) & ((row < S) | (position > query - self._window))
