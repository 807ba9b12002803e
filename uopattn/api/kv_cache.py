"""`KVCache`: a decoder's keys and values, written in place step by step."""

from typing import Literal, Unpack, overload

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.api.attention import attend
from uopattn.api.cache_memory import CacheMemory
from uopattn.api.norm_rope import NewQueries, NormRopeOptions
from uopattn.dsl import sizes
from uopattn.kernels.append import Rows
from uopattn.spec.arguments import Arguments, CacheOptions
from uopattn.spec.shards import Devices
from uopattn.spec.tensors import check_size, placed


class KVCache(CacheMemory):
  """The keys and values of one layer, written in place step by step.

  Memory for all N_max positions is allocated once, filled with 0, and never copied. One kernel writes keys, values and
  scales. With a bound Variable as `start`, or a Tensor if sequences have different lengths, one compiled kernel serves
  all lengths, inside and outside `TinyJit`. An int is compiled for that position only, which suits a prompt.

  `append` and `attend` are lazy. Realize each step before the next: a Variable has only one value in everything that is
  realized together, and an output realized late may see what was written since. Return something from a `TinyJit` that
  depends on the write: `attend`'s output, or `k` and `v` themselves. In a `tinygrad.function`, which must have
  `allow_implicit=True`, both belong in one function, and the call of the function writes.

  An 8-bit cache has one scale per key and one per value, which maps the largest element to the largest number of the
  dtype; the others are rounded to nearest. Kernels read the 8 bits and multiply scores and weights by the scales. A row
  that holds NaN or infinity has the scale NaN. k and v appended to an 8-bit cache have gradients of 0, as rounding has;
  q has its usual gradient.

  A cache of "int4" or "nvfp4" has 4 bits per element, 16 of which share a scale of 8 bits, besides the scale of the
  row; Dk and Dv are multiples of 16. Numbers are -7 to 7, or 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. This saves
  memory, and on NVIDIA's GPUs time. On a CPU with AVX-512, decoding one query per key head over long texts takes 0.7 to
  0.8 of the time that it takes with 8 bits; with more queries, or without AVX-512, no less. Errors, as a share of the
  root mean square, at Dk = Dv = 128:

      rows of k and v                        error of      int8   int4   nvfp4
      normal random                          rows          0.007  0.086  0.095
                                             the output    0.009  0.12   0.14
      one channel in 32 ten times as large   rows          0.018  0.14   0.091
                                             the output    0.030  0.22   0.15

  Attributes:
    k: (B, Hkv, N_max, Dk), with everything appended so far; `uopattn.attention` accepts it unless it has 8 or 4 bits.
      In 4 bits it holds bytes: those of the elements, then the scales of groups; see `uopattn.dsl.rules.four_bits`.
    v: (B, Hkv, N_max, Dv), as k.
    k_scale, v_scale: (B, Hkv, N_max) float32 factors for k and v of 8 or 4 bits, otherwise None.

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
    dtype: DType | str = dtypes.float32,
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
      dtype: float32, float16 or bfloat16, or with scales int8, fp8e4m3 or fp8e5m2, or "int4" or "nvfp4".
      device: None is tinygrad's default. Several devices, ("CUDA", "CUDA:1"), divide the cache along `axis`.
      axis: of several devices: 0 for sequences, 1 for key heads, as in `Tensor.shard`; None keeps all of the cache on
        every device.

    Raises:
      TypeError, ValueError: an argument does not fit.

    Example:
      >>> from tinygrad import dtypes
      >>> from uopattn import KVCache
      >>> cache = KVCache(1, 8, 1000, 64, dtype=dtypes.int8)
      >>> cache.k.shape, cache.k_scale.shape
      ((1, 8, 1000, 64), (1, 8, 1000))
    """
    super().__init__(B, Hkv, check_size("N_max", N_max, 0), Dk, Dv, dtype, device, axis)

  @overload
  def append(
    self, k: Tensor, v: Tensor, start: int | UOp | Tensor, *, q: None = None, **options: Unpack[NormRopeOptions]
  ) -> None: ...

  @overload
  def append(
    self, k: Tensor, v: Tensor, start: int | UOp | Tensor, *, q: Tensor, **options: Unpack[NormRopeOptions]
  ) -> Tensor: ...

  def append(
    self,
    k: Tensor,
    v: Tensor,
    start: int | UOp | Tensor,
    *,
    q: Tensor | None = None,
    **options: Unpack[NormRopeOptions],
  ) -> Tensor | None:
    """Write the keys and values of M positions, from position `start` on.

    Prompts of different lengths may be padded: `attend` from a sequence's own length on sees no padding, and later keys
    are written over it.

    The same kernel can apply rotary positions and RMS norms, as models do before attention: to k before it is written,
    and to q, which is returned for `attend`. A row x becomes x / sqrt(mean(x^2) + norm_eps) * weight. Then pair (a, b)
    of the first rotary_dim elements of the row at position p becomes (a cos - b sin, b cos + a sin), with the cosine
    and sine of row p and of the pair's column. All of this is in float32, and rounded once, to the dtype of q or of the
    cache.

    Args:
      k: (B, Hkv, M, Dk), in the cache's dtype; for a cache of 8 or 4 bits float32, float16 or bfloat16. M may be 0.
      v: (B, Hkv, M, Dv), as k.
      start: int, bound Variable, an expression of Variables, or (B,) Tensor of any integer dtype, with a position for
        each sequence. An int is compiled for that position only.
      q: (B, Hq, M, Dk), the queries of the same positions, float32, float16 or bfloat16; Hq is a multiple of Hkv.
      rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32, float16 or bfloat16, for pairs of the first
        rotary_dim elements; the others stay as they are. Realize them once for all steps and layers. What is made of
        `Tensor.arange` alone has no device, so that it cannot be realized and is computed anew in every call: begin
        with Tensors of numbers instead, `Tensor(np.arange(N, dtype=np.float32))`.
      rotary_interleaved: whether pairs are elements 2 i and 2 i + 1, as in GPT-J and GGUF files of Llama, not i and
        i + rotary_dim / 2, as in GPT-NeoX and Hugging Face's Llama. To be given with rotary_cos.
      q_norm_weight, k_norm_weight: (Dk,), likewise float; Gemma's, which it adds 1 to, plus 1.
      norm_eps: of both norms; None is 1e-6.

    Returns:
      q rotated and normalized, (B, Hq, M, Dk) in q's dtype; None without q. It has no gradient, nor has k.

    Raises:
      TypeError: a dtype, or the type of `start`, is not accepted.
      ValueError: a shape or device does not fit, or the last position could lie at or beyond N_max. For a Variable its
        largest value counts, as a `TinyJit` checks no values when it replays. A Tensor is checked if it is realized or
        made of Python or numpy numbers, outside of a `TinyJit`; on a GPU this waits for pending work. Otherwise
        positions outside of the cache are not written. The same holds for positions that rotary_cos lacks, whose q
        becomes NaN. Or `KVCache.k` or another of its Tensors was replaced by one that is not realized.

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

      Queries and keys rotated by 90 degrees more at each position:

      >>> cos, sin = Tensor([[1.0], [0.0], [-1.0], [0.0]]), Tensor([[0.0], [1.0], [0.0], [-1.0]])
      >>> cache = KVCache(1, 1, 4, 2)
      >>> k = q = Tensor([[[[1.0, 2.0]]]])
      >>> rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True}
      >>> cache.append(k, k, 1, q=q, **rotary).tolist()
      [[[[-2.0, 1.0]]]]
      >>> cache.k.tolist()
      [[[[0.0, 0.0], [-2.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]]
    """
    k, v = self._rows(k, v)
    N_max, new = sizes(self.k)[2], NewQueries.of("KVCache.append", q, k, "the cache", options)
    start = self._start(start, sizes(k)[2], *new.limit(N_max, "in a cache"))
    return self._write(k, v, start, Rows(N_max), new)

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
      q: (B, Hq, M, Dk), in the cache's dtype or float32, for a cache of 8 or 4 bits also float16 or bfloat16; Hq is a
        multiple of Hkv, or equal if enable_gqa is False.
      start: as in `append`. In a Tensor that could not be checked, positions may lie outside the cache: a query behind
        it sees all keys, and one before it sees none and gives 0.
      is_causal: no query sees keys after its own position.
      kv_lengths: the number of keys of each sequence, from 0 to N_max, in the forms of `start`; None is start + M. A
        Tensor is not read back: fewer keys than 0 are none, and more than N_max are N_max.
      attn_mask, dropout_p, scale, enable_gqa, window, softcap, sinks, score_mod, mask_mod, aux, block_mask, return_lse,
        backend: as in `uopattn.attention`; scores are (B, Hq, M, N_max), and score_mod and mask_mod count the queries
        of the call from 0, so that they need `start` in aux to know positions, see `uopattn.mods`.

    Returns:
      (B, Hq, M, Dv) in q's dtype; with return_lse a pair.

    Raises:
      TypeError: an argument is of a wrong type, or a dtype is not accepted.
      ValueError: an argument does not fit, such as `start` in `append`, or kv_lengths could lie outside of 0 to N_max.
        All values of its Variables count, as a `TinyJit` checks no values when it replays.

    Example:
      >>> from tinygrad import Tensor
      >>> from uopattn import KVCache
      >>> cache = KVCache(1, 2, 100, 16)
      >>> cache.append(Tensor.randn(1, 2, 5, 16), Tensor.randn(1, 2, 5, 16), 0)  # a prompt
      >>> cache.attend(Tensor.randn(1, 8, 5, 16), 0, window=(3, 0)).realize().shape
      (1, 8, 5, 16)
    """
    q, N_max = self._queries(q), sizes(self.k)[2]
    M = sizes(q)[2]
    start = self._start(start, M, N_max)
    backend, lengths = options.pop("backend", "auto"), placed(options.pop("kv_lengths", None), self._device)
    lengths = start + M if lengths is None else lengths
    self._check_sint("kv_lengths", lengths, N_max, f"it must be from 0 to {N_max}, the positions of the cache")
    own = {
      "q_start": start,
      "kv_lengths": lengths,
      "scales": self._scales,
      "four": self._four,
      "return_lse": return_lse,
    }
    with_defaults = {"is_causal": True, "enable_gqa": True, **options}
    arguments = Arguments.of("KVCache.attend", CacheOptions, with_defaults, **own)
    return attend(q, self.k, self.v, arguments, backend)
