"""`attention_paged`: attention over a paged KV cache."""

from dataclasses import replace
from typing import Any, Literal, Unpack, cast, overload

from tinygrad import Tensor, UOp, dtypes

from uopattn.api.attention import attend
from uopattn.api.four_bit_pages import format_of, in_format
from uopattn.dsl import sizes
from uopattn.spec.arguments import Arguments, PagedOptions, check_sint
from uopattn.spec.tensors import at_hand, check_device, check_ints, numbers_at_hand, operands, placed


@overload
def attention_paged(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  kv_lengths: int | UOp | Tensor,
  *,
  return_lse: Literal[False] = False,
  **options: Unpack[PagedOptions],
) -> Tensor: ...


@overload
def attention_paged(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  kv_lengths: int | UOp | Tensor,
  *,
  return_lse: Literal[True],
  **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_paged(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  kv_lengths: int | UOp | Tensor,
  *,
  return_lse: bool,
  **options: Unpack[PagedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_paged(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  kv_lengths: int | UOp | Tensor,
  *,
  return_lse: bool = False,
  **options: Unpack[PagedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
  """Compute attention over keys and values in pages (PagedAttention, Kwon et al., 2023), which are read in place.

  Key j of sequence b is row j % page_size of page page_table[b, j // page_size]. Sequences may share pages. A sequence
  of n keys uses only the first ceil(n / page_size) entries of its table row. The other entries may hold anything, and
  so may the rows of the last page after the last key.

  Page ids must be in 0..P-1. An invalid id raises an error if the table and the lengths are realized or made of Python
  or numpy numbers; on a GPU this check waits for pending work. While a `TinyJit` captures or replays there is no check:
  the output and the LSE of each row that sees a key of an invalid page are NaN, and nothing outside the pages is read.

  Args:
    q: (B, Hq, M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2. Any number of queries.
    k_pages: (P, Hkv, page_size, Dk), in q's dtype, or float16 or bfloat16 if that is float32; any page_size >= 1. Views
      are read in place as by `attention`: one layer of a pool of several, or (P, page_size, Hkv, Dk) transposed. In 4
      bits rows are of uint8, as `KVCache` stores them, and kv_dtype names their format.
    v_pages: (P, Hkv, page_size, Dv), in k_pages' dtype.
    page_table: (B, max_pages), of an integer dtype; dtypes other than int32 are converted at each call. max_pages and P
      may be 0.
    kv_lengths: the number of keys of each sequence, from 0 to max_pages * page_size: int, bound Variable, an expression
      of Variables, or (B,) integer Tensor. Keys beyond the end of the table do not exist.
    q_start: as in `attention`; kv_lengths - M makes the queries the last positions of their sequences.
    attn_mask: as in `attention`; broadcasts to (B, Hq, M, max_pages * page_size). Key j of a sequence has column j, and
      columns beyond kv_lengths may hold anything.
    block_mask: as in `attention`, of M queries and max_pages * page_size keys.
    dropout_p, is_causal, scale, enable_gqa, window, softcap, sinks, q_scale, return_lse, backend: as in `attention`.
    k_scale, v_scale: as in `attention`; of pages of 4 bits the scales of rows, (P, Hkv, page_size) float32 Tensors.
    kv_dtype: "int4" or "nvfp4", the format of pages of 4 bits; Dk and Dv are multiples of 16, and q has float32,
      float16 or bfloat16. None is that of the Tensors.
    score_mod, mask_mod, aux: as in `attention`; kv_idx is j, the position of the key in its sequence.

  Returns:
    (B, Hq, M, Dv) in q's dtype; with return_lse a pair.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention_paged
    >>> q = Tensor.zeros(2, 1, 1, 4)
    >>> k_pages, v_pages = Tensor.zeros(3, 1, 2, 4), Tensor([[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]).reshape(3, 1, 2, 1)
    >>> table = Tensor([[2, 0], [2, 1]])  # both sequences begin with page 2
    >>> lengths = Tensor([3, 4])  # values 9, 11, 1 and 9, 11, 5, 7
    >>> attention_paged(q, k_pages, v_pages, table, lengths).flatten().tolist()
    [7.0, 8.0]
  """
  q, k_pages, v_pages = operands(q=q, k_pages=k_pages, v_pages=v_pages)
  page_table, kv_lengths = (placed(x, q.device) for x in (page_table, kv_lengths))
  if q.ndim != 4:
    raise ValueError(f"q has shape {q.shape}; it must be (B, Hq, M, Dk)")
  check_pages(k_pages, v_pages)
  four = format_of(options.pop("kv_dtype", None), k_pages)
  check_table(page_table, sizes(q)[0], q.device)
  P, _, page_size, _ = sizes(k_pages)
  check_lengths(kv_lengths, page_table, P, page_size)
  backend, own = options.pop("backend", "auto"), {"kv_lengths": kv_lengths, "page_table": page_table}
  arguments = Arguments.of("attention_paged", PagedOptions, options, return_lse=return_lse, **own)
  arguments = in_format(arguments, four, k_pages, v_pages, sizes(q)[3])
  return attend_pages(q, k_pages, v_pages, arguments, backend)


def attend_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, arguments: Arguments, backend: str) -> Any:
  """Check all arguments but the table, the pages and the lengths, and run the backend.

  Args:
    arguments: with the page table and the lengths as they were given.
  """
  P, table = sizes(k_pages)[0], cast(Tensor, arguments.page_table)
  if P == 0:  # a page that no id names stands in for the memory that a kernel needs
    k_pages, v_pages = (x.pad(((0, 1), None, None, None)) for x in (k_pages, v_pages))
    if arguments.scales is not None:
      keys, values = (x.pad(((0, 1), None, None)) for x in arguments.scales)
      arguments = replace(arguments, scales=(keys, values))
    table, P = table.full_like(1), 1
  return attend(q, k_pages, v_pages, replace(arguments, page_table=table_of_ints(table, P)), backend)


def check_pages(k_pages: Tensor, v_pages: Tensor) -> None:
  """Raise ValueError unless pages have four axes, the last two not empty."""
  for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
    if x.ndim != 4 or not all(sizes(x)[2:]):
      accepted = "it must have four dimensions, (P, Hkv, page_size, D), the last two at least 1"
      raise ValueError(f"{name} has shape {x.shape}; {accepted}")


def check_table(table: object, sequences: int, device: object) -> None:
  """Raise TypeError or ValueError unless the page table is a Tensor of integers with a row for each sequence."""
  table = check_ints("page_table", table)
  if table.ndim != 2 or table.shape[0] != sequences:
    raise ValueError(f"page_table has shape {table.shape}; it must be ({sequences}, max_pages)")
  check_device("page_table", table, device)


def table_of_ints(table: Tensor, P: int) -> Tensor:
  """Cast the page table to int32. Ids that may not fit become P, which is not a page."""
  if dtypes.int32.max < table.dtype.max:
    table = ((table >= 0) & (table < P)).where(table, P)
  return table.cast(dtypes.int)


def check_lengths(kv_lengths: int | UOp | Tensor | None, table: Tensor, P: int, page_size: int) -> None:
  """Check the lengths, and the entries of the table that they use, as far as their values are known without computing.

  Raises:
    TypeError: the lengths are missing or of a wrong type.
    ValueError: a length or a page id is out of range.
  """
  B, pages = sizes(table)
  check_sint("kv_lengths", kv_lengths, B)
  if kv_lengths is None or (lengths := numbers_at_hand(kv_lengths, B)) is None:
    return
  for b, length in enumerate(lengths):
    if not 0 <= length <= pages * page_size:
      raise ValueError(
        f"kv_lengths is {length} for sequence {b}; it must be from 0 to {pages * page_size}, which are {pages} pages "
        f"of {page_size} keys"
      )
  check_ids(table, [range(n) for n in lengths], P, page_size, "has")


def check_ids(table: Tensor, keys: list[range], P: int, page_size: int, verb: str) -> None:
  """Raise ValueError unless the ids of the pages in use are those of pages, if the table's values are `at_hand`.

  Args:
    keys: of each sequence, those that are read or written; within the table.
    verb: what a sequence does with them, for messages: "has" or "gets".
  """
  if (entries := at_hand(table)) is None:
    return
  import numpy as np

  first, end = (np.array([(x.start, x.stop) for x in keys], np.int64).reshape(-1, 2, 1)[:, i] for i in range(2))
  page = np.arange(sizes(table)[1])
  used = (first < end) & (page >= first // page_size) & (page * page_size < end)
  for b, j in np.argwhere(used & ((entries < 0) | (entries >= P)))[:1].tolist():
    because = f"k_pages has {P} pages; sequence {b} {verb} keys {keys[b][0]} to {keys[b][-1]}, in pages of {page_size}"
    if P == 0:
      raise ValueError(because)
    raise ValueError(f"page_table[{b}, {j}] is {entries[b, j]}; it must be from 0 to {P - 1}, because {because}")
