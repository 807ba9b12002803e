"""`attention_varlen`: attention within packed sequences of different lengths."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Unpack, overload

from tinygrad import Tensor, dtypes

from uopattn.api.attention import attend
from uopattn.api.varlen_paged import attend_packed, checked, renumbered
from uopattn.dsl import sizes
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.rules.ranges import Positions, Range
from uopattn.spec.arguments import Arguments, VarlenOptions
from uopattn.spec.shards import Devices, device_of
from uopattn.spec.spec import make_spec
from uopattn.spec.tensors import (
  as_int,
  check_device,
  check_ints,
  check_size,
  clamped,
  described,
  operands,
  placed,
  plain,
  promoted,
)

Offsets = Tensor | list[int] | tuple[int, ...]


@overload
def attention_varlen(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  cu_seqlens_q: Offsets,
  cu_seqlens_k: Offsets | None,
  *,
  max_seqlen_q: int | None = None,
  return_lse: Literal[False] = False,
  **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def attention_varlen(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  cu_seqlens_q: Offsets,
  cu_seqlens_k: Offsets | None,
  *,
  max_seqlen_q: int | None = None,
  return_lse: Literal[True],
  **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  cu_seqlens_q: Offsets,
  cu_seqlens_k: Offsets | None,
  *,
  max_seqlen_q: int | None = None,
  return_lse: bool,
  **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_varlen(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  cu_seqlens_q: Offsets,
  cu_seqlens_k: Offsets | None,
  *,
  max_seqlen_q: int | None = None,
  return_lse: bool = False,
  **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]:
  """Compute attention within each of S sequences whose queries are packed one after another, without padding.

  Sequence s has the queries from cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1. Without a page table it likewise has keys
  from cu_seqlens_k. Kernels skip tiles of other sequences, as they skip tiles that a causal mask or a window hides.
  q, k and v are copied once, heads first.

  With a page table the keys lie in pages, as in `attention_paged`, and cu_seqlens_k is None. By default the queries of
  a sequence are the last of its kv_lengths positions. So chunks of prompts and single queries of sequences that are
  being decoded share a call (continuous batching), and under `TinyJit` the same kernels serve all lengths.

  The queries of each sequence are cut into blocks, S + total queries / block of them. A block costs as much with one
  query as with many, and a tile if it has none. On a GPU it has 64 rows, of all query heads that share a key head, or
  64 queries of one head if fewer than 4 heads share it. On a CPU sequences of at most 8 queries have one block each,
  in a call of their own, and the others blocks of 64. q and the output are copied once per call, and a mask too.

  Args:
    q: (total queries, Hq, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2. Dtypes that differ are promoted, as in
      `attention`, except with a page table, where k and v have dtypes as in `attention_paged`.
    k: (total keys, Hkv, Dk); with a page table (P, Hkv, page_size, Dk), or rows of uint8 with a kv_dtype.
    v: (total keys, Hkv, Dv); with a page table (P, Hkv, page_size, Dv), likewise.
    cu_seqlens_q, cu_seqlens_k: (S + 1,) offsets: 0, then the end of each sequence. Ints are checked. A Tensor, of any
      integer dtype, is not read back: if it decreases or exceeds the total, the output is wrong, but nothing is read
      out of bounds. A sequence may have no queries or no keys, and there may be no sequences; a query after the last
      end sees no key.
    page_table: (S, max_pages), as in `attention_paged`, which says what invalid page ids do.
    kv_lengths: the number of keys of each sequence, as in `attention_paged`; with a page table alone.
    max_seqlen_q: the most queries of a sequence; None is the total. With a page table it saves memory and empty blocks,
      especially if it is 1. If a sequence has more, ints raise an error, and with a Tensor its queries see no key.
    is_causal, window: as in `attention`, with positions within the sequence.
    scale, enable_gqa, softcap, sinks, backend: as in `attention`.
    q_start: position of the first query among the keys of its sequence, an int or (S,) integer Tensor. 0 aligns causal
      masks upper left; each sequence's number of keys minus its number of queries aligns them lower right. None is the
      latter with a page table, else 0.
    score_mod, mask_mod, aux: as in `attention`, with indices within the sequence: b is the number of the sequence, from
      0 to S - 1; q_idx and kv_idx count its queries and its keys from 0.
    attn_mask: as in `attention`, of packed queries and keys: broadcasts to (Hq, total queries, total keys); with a page
      table to (Hq, total queries, max_pages * page_size), where columns are the keys of the query's own sequence.
    block_mask: as in `attention`, of packed queries and keys, whose numbers its mask_mod is called with. None with a
      page table.
    dropout_p: as in `attention`. Which weights a seed drops depends on the packed numbers of query and key; with a page
      table on the row of the query in the blocks, and on the number of the key in its sequence.
    q_scale, k_scale, v_scale: as in `attention`, with one batch: numbers, or (Hkv,) for all sequences. With a page
      table they broadcast to (S, Hkv), or in 4 bits k_scale and v_scale are those of rows, as in `attention_paged`.
    kv_dtype: the format of pages of 4 bits, as in `attention_paged`.
    return_lse: also return the log-sum-exp (natural logarithm) of each row, (Hq, total queries) float32. Realize both
      together.

  Returns:
    (total queries, Hq, Dv) in the dtype of q and v; with return_lse a pair. A query that sees no key gets 0, and an LSE
    of -inf, or of its sink.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention_varlen
    >>> q = k = Tensor.zeros(5, 1, 4)  # two sequences, of 2 and 3 positions
    >>> v = Tensor([1.0, 3.0, 10.0, 20.0, 30.0]).reshape(5, 1, 1)
    >>> attention_varlen(q, k, v, [0, 2, 5], [0, 2, 5], is_causal=True).flatten().tolist()
    [1.0, 2.0, 10.0, 15.0, 20.0]

    The first sequence is decoded, with 3 keys in pages 1 and 0; of the second, two queries at the start are computed:

    >>> k_pages, v_pages = Tensor.zeros(3, 1, 2, 4), Tensor([[1.0, 3.0], [5.0, 9.0], [2.0, 6.0]]).reshape(3, 1, 2, 1)
    >>> table, lengths = Tensor([[1, 0], [2, 0]]), Tensor([3, 2])
    >>> pages = {"page_table": table, "kv_lengths": lengths, "is_causal": True}
    >>> attention_varlen(q[:3], k_pages, v_pages, [0, 1, 3], None, **pages).flatten().tolist()
    [5.0, 2.0, 4.0]
  """
  backend, q_start = options.pop("backend", "auto"), options.pop("q_start", None)
  kv_dtype = options.pop("kv_dtype", None)
  sequences = Sequences(cu_seqlens_q, cu_seqlens_k, q_start, max_seqlen_q)
  arguments = Arguments.of("attention_varlen", VarlenOptions, options, return_lse=return_lse)
  if arguments.page_table is not None:
    out, lse = _over_pages(q, k, v, sequences, arguments, kv_dtype, backend)
  elif kv_dtype is not None:
    raise TypeError("kv_dtype is given without a page_table; it names the format of pages")
  else:
    out, lse = _over_packed_keys(q, k, v, sequences, arguments, backend)
  return (out, lse) if return_lse else out


@dataclass(frozen=True, eq=False)
class Sequences:
  """How sequences are packed, as a call of `attention_varlen` was given it."""

  cu_seqlens_q: Offsets
  cu_seqlens_k: Offsets | None
  q_start: int | Tensor | None
  max_seqlen_q: int | None

  def longest(self, total: int) -> int:
    """Return the most queries of a sequence, at least 1. Raises TypeError or ValueError if it is none."""
    if self.max_seqlen_q is None:
      return max(total, 1)
    longest = check_size("max_seqlen_q", self.max_seqlen_q, 0)
    counts = [] if isinstance(self.cu_seqlens_q, Tensor) else [b - a for a, b in pairwise(self.cu_seqlens_q)]
    if counts and max(counts) > longest:
      s = counts.index(max(counts))
      raise ValueError(f"max_seqlen_q is {longest}, but sequence {s} has {counts[s]} queries")
    return max(1, min(longest, total))


def _over_packed_keys(
  q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, arguments: Arguments, backend: str
) -> tuple[Tensor, Tensor]:
  """Return the output, (total queries, Hq, Dv), and the LSE, (Hq, total queries)."""
  q, k, v = operands(q=q, k=k, v=v)
  _check_packed(q, k, v)
  if arguments.kv_lengths is not None:
    raise TypeError("kv_lengths is given without a page_table; the keys of each sequence are those of cu_seqlens_k")
  q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
  M, N, device = sizes(q)[1], sizes(k)[1], device_of(q)
  arguments = arguments.settled(device)
  # Checks everything but the offsets: checking those relies on q, k and v.
  one_q, one_k, one_v = (x.unsqueeze(0) for x in promoted(q, k, v)[:3])
  is_empty = make_spec(one_q, one_k, one_v, arguments).is_empty
  ends_q = _offsets("cu_seqlens_q", sequences.cu_seqlens_q, M, device)
  ends_k = _offsets("cu_seqlens_k", sequences.cu_seqlens_k, N, device)
  if ends_q.shape != ends_k.shape:
    raise ValueError(f"cu_seqlens_k has shape {ends_k.shape}, cu_seqlens_q {ends_q.shape}; they must be the same")
  sequences.longest(M)  # checks it
  starts = _starts(0 if sequences.q_start is None else sequences.q_start, sizes(ends_q)[0] - 1, device)
  arguments = replace(arguments, return_lse=True)
  if not is_empty:
    bounds = key_bounds(ends_q, ends_k, M, N, arguments.masks(), starts)
    arguments = replace(arguments.without_masks(), bounds=bounds)
  if not is_empty and (arguments.score_mod is not None or arguments.mask_mod is not None):
    arguments = renumbered(arguments, _within_sequences, *_sequences(ends_q, ends_k, M, N))
  out, lse = attend(q, k, v, arguments, backend)
  return out.transpose(0, 1), lse


def _over_pages(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  sequences: Sequences,
  arguments: Arguments,
  kv_dtype: str | None,
  backend: str,
) -> tuple[Tensor, Tensor]:
  """Return the output, (total queries, Hq, Dv), and the LSE, (Hq, total queries)."""
  q, k_pages, v_pages = operands(q=q, k_pages=k_pages, v_pages=v_pages)
  if q.ndim != 3 or not sizes(q)[-1]:
    raise ValueError(f"q has shape {q.shape}; it must have three dimensions, (total, H, head size >= 1)")
  if sequences.cu_seqlens_k is not None:
    raise TypeError("cu_seqlens_k is given with a page_table; it must be None, kv_lengths has the numbers of keys")
  total, device = sizes(q)[0], device_of(q)
  ends = _offsets("cu_seqlens_q", sequences.cu_seqlens_q, total, device)
  S, longest = sizes(ends)[0] - 1, sequences.longest(total)
  starts = None if sequences.q_start is None else _starts(sequences.q_start, S, device)
  table, lengths = (placed(x, device) for x in (arguments.page_table, arguments.kv_lengths))
  arguments = replace(arguments, page_table=table, kv_lengths=lengths, return_lse=True)
  arguments = checked(arguments, kv_dtype, q, k_pages, v_pages, S)
  return attend_packed(q, k_pages, v_pages, ends, arguments, starts, longest, backend)


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
  """Raise ValueError unless q, k and v have the shapes that they must have, given one another's."""
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.ndim != 3 or not sizes(x)[-1]:
      raise ValueError(f"{name} has shape {x.shape}; it must have three dimensions, (total, H, head size >= 1)")
  (*_, Dk), (N, Hkv, _) = sizes(q), sizes(k)
  if k.shape[2] != Dk:
    raise ValueError(f"k has shape {k.shape}, q has {q.shape}; k must be (total keys, Hkv, {Dk})")
  if v.shape[:2] != (N, Hkv):
    raise ValueError(f"v has shape {v.shape}, k has {k.shape}; v must be ({N}, {Hkv}, Dv)")


def key_bounds(
  ends_q: Tensor, ends_k: Tensor, M: int, N: int, masks: tuple[Range, ...], q_start: int | Tensor
) -> tuple[Tensor, Tensor]:
  """Return the first and the last key that each query sees, (M,) int32 both; neither decreases with the query.

  If a query sees no key, its last key comes before its first.

  Args:
    ends_q, ends_k: (S + 1,) int32, `cu_seqlens_q` and `cu_seqlens_k`.
    M, N: queries and keys.
    masks: of each sequence.
    q_start: an int or (S,) int32.
  """
  row, ends_q, ends_k, of_own = _queries(ends_q, ends_k, M, N)
  start, end = of_own(ends_k[:-1]), of_own(ends_k[1:])
  shift = of_own(q_start.clip(-FAR, FAR).pad((0, 1))) if isinstance(q_start, Tensor) else clamped(q_start)
  query, at = row - of_own(ends_q[:-1]), Positions(shift, end - start)
  first, last = start, end - 1
  for x in masks:
    own_first, own_last = x.first(at, query), x.last(at, query)
    first = first if own_first is None else first.maximum(start + own_first)
    last = last if own_last is None else last.minimum(start + own_last)
  first, last = first.minimum(end), last.maximum(start - 1)
  return first.cast(dtypes.int).contiguous(), last.cast(dtypes.int).contiguous()


def _queries(
  ends_q: Tensor, ends_k: Tensor, M: int, N: int
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
  """Map queries to their sequences.

  An extra sequence without keys holds the queries after the last end.

  Returns:
    The query indices, (M,) int32; `ends_q` and `ends_k` clamped to their ranges, (S + 2,) each; and a function that
    gathers a number per sequence, (S + 1,), into a number per query, (M,).
  """
  row = Tensor.arange(M).cast(dtypes.int)
  ends_q, ends_k = (x.clip(0, n).pad((0, 1), value=n) for x, n in ((ends_q, M), (ends_k, N)))
  ends_k = ends_k.minimum(ends_k[-2])
  own = (ends_q[:-1].unsqueeze(1) <= row) & (row < ends_q[1:].unsqueeze(1))  # (S + 1, M)
  return row, ends_q, ends_k, lambda x: own.where(x.unsqueeze(1), 0).sum(0)


def _sequences(ends_q: Tensor, ends_k: Tensor, M: int, N: int) -> tuple[Tensor, ...]:
  """Return the sequence number, the first query and the first key of each query's sequence, (M,) int32 each."""
  _, ends_q, ends_k, of_own = _queries(ends_q, ends_k, M, N)
  per_sequence = Tensor.arange(sizes(ends_q)[0] - 1), ends_q[:-1], ends_k[:-1]
  return tuple(of_own(x).cast(dtypes.int).contiguous() for x in per_sequence)


def _within_sequences(b: Any, h: Any, i: Any, j: Any, *sequences: Any) -> tuple[Any, ...]:
  """Return the indices within a sequence, given packed ones and `_sequences`."""
  sequence, first_query, first_key = (x[i] for x in sequences)
  return sequence, h, i - first_query, j - first_key


def _offsets(name: str, x: Offsets | None, total: int, device: Devices) -> Tensor:
  """Check `cu_seqlens` and return it as an int32 Tensor (S + 1,)."""
  x = placed(x, device)
  if isinstance(x, Tensor):
    check_ints(name, x)
    if x.ndim != 1 or sizes(x)[0] < 1:
      raise ValueError(f"{name} has shape {x.shape}; it must be (S + 1,) for S sequences")
    check_device(name, x, device)
    return as_int(x)
  ends = [plain(end) for end in x] if isinstance(x, (list, tuple)) else None
  if ends is None or not all(type(end) is int for end in ends):
    raise TypeError(f"{name} is {described(x)}; it must be a Tensor of an integer dtype, or a list of ints")
  if len(ends) < 1 or ends[0] != 0 or ends[-1] != total or any(a > b for a, b in pairwise(ends)):
    raise ValueError(f"{name} is {ends}; it must rise from 0 to {total}, the length of all sequences")
  return Tensor(ends, dtype=dtypes.int, device=device)


def _starts(x: int | Tensor, sequences: int, device: Devices) -> int | Tensor:
  x = placed(x, device)
  if isinstance(x, Tensor):
    check_ints("q_start", x, (sequences,))
    check_device("q_start", x, device)
    return as_int(x)
  if isinstance(x, bool) or not isinstance(x, int):
    raise TypeError(f"q_start is {described(x)}; accepted are an int and a ({sequences},) integer Tensor")
  return x
