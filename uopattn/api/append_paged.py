"""`append_paged`: new keys and values, written into the pages of a KV cache."""

from typing import Any, Unpack, overload

from tinygrad import Tensor, UOp, dtypes

from uopattn.api.four_bit_pages import bytes_of, check_rows, format_of, row_scales
from uopattn.api.norm_rope import NewQueries, NormRopeOptions
from uopattn.api.paged import check_ids, check_table, table_of_ints
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.schedule import DTYPES, DTYPES_8, DTYPES_16_32
from uopattn.kernels.append import PagedRows
from uopattn.plan.append import append_call, is_memory, is_same_memory
from uopattn.plan.launch import empty
from uopattn.spec.arguments import Sizes, as_scale, check_scale, check_sint, of_heads
from uopattn.spec.layout import base_of
from uopattn.spec.shards import device_of, joined, shard_of, sharded_axis
from uopattn.spec.tensors import (
  check_device,
  check_dtype,
  check_ints,
  check_tensor,
  clamped,
  numbers_at_hand,
  placed,
)


@overload
def append_paged(
  k: Tensor,
  v: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  start: int | UOp | Tensor,
  *,
  lengths: Tensor | None = None,
  k_scale: float | Tensor | None = None,
  v_scale: float | Tensor | None = None,
  kv_dtype: str | None = None,
  q: None = None,
  **options: Unpack[NormRopeOptions],
) -> None: ...


@overload
def append_paged(
  k: Tensor,
  v: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  start: int | UOp | Tensor,
  *,
  lengths: Tensor | None = None,
  k_scale: float | Tensor | None = None,
  v_scale: float | Tensor | None = None,
  kv_dtype: str | None = None,
  q: Tensor,
  **options: Unpack[NormRopeOptions],
) -> Tensor: ...


def append_paged(
  k: Tensor,
  v: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  start: int | UOp | Tensor,
  *,
  lengths: Tensor | None = None,
  k_scale: float | Tensor | None = None,
  v_scale: float | Tensor | None = None,
  kv_dtype: str | None = None,
  q: Tensor | None = None,
  **options: Unpack[NormRopeOptions],
) -> Tensor | None:
  """Write new keys and values into pages, in place, with one kernel.

  Key i of sequence b is written to row (start[b] + i) % page_size of page page_table[b, (start[b] + i) // page_size]:
  where `attention_paged` reads key start[b] + i. Nothing else is written. If two sequences write the same row of a page
  that they share, either may win. Packed tokens, as `attention_varlen` takes them, are sequences of one key each:
  `k.unsqueeze(2)`, with the position of each token, and the row that its sequence has in the page table.

  The write is lazy. `k_pages` and `v_pages` become Tensors that depend on it, so pass them to `attention_paged`, or
  realize them. Views that were taken from the same memory earlier see it only if they are realized after it. Realize
  each step before the next, and return something from a `TinyJit` that depends on the write, as with `KVCache`.

  Positions and page ids raise an error, and nothing is written, if they do not fit and are known without computing: if
  page_table, start and lengths are realized or made of Python or numpy numbers. On a GPU this check waits for pending
  work. While a `TinyJit` captures or replays there is no check. Keys at positions below 0 or beyond the page table, and
  those of an invalid page, are then not written.

  Args:
    k: (B, Hkv, M, Dk), in k_pages' dtype; for pages of 8 or 4 bits float32, float16 or bfloat16, for 8 also as they
      are stored. Views are read in place. M may be 0.
    v: (B, Hkv, M, Dv), in k's dtype.
    k_pages: (P, Hkv, page_size, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2. A realized Tensor, or a strided
      view of one: one layer of a pool of several, or (P, page_size, Hkv, Dk) transposed. In 4 bits k, v,
      k_scale and v_scale of `KVCache(P, Hkv, page_size, Dk, Dv, dtype="int4")` are such memory: rows of uint8, D / 2
      bytes of elements, and D / 16 of scales, padded to a multiple of 4.
    v_pages: (P, Hkv, page_size, Dv), in k_pages' dtype.
    page_table: (B, max_pages), of an integer dtype; dtypes other than int32 are converted at each call. Entries of
      pages that get no key may hold anything.
    start: the position of the first new key of each sequence: int, bound Variable, an expression of Variables, or (B,)
      Tensor of any integer dtype.
    lengths: (B,) integer Tensor, the number of new keys of each sequence, from 0 to M: only the first lengths[b] of k
      and v are written, as for prompts of different lengths. None is M.
    k_scale, v_scale: divisors of k and v before they are rounded to 8 bits, to nearest: the k_scale and v_scale of
      `attention_paged`. Each is a number or a float Tensor that broadcasts to (B, Hkv); None is 1. Numbers out of the
      range become the largest of the dtype. For pages of 4 bits both are (P, Hkv, page_size) float32 Tensors, realized
      and no views, which receive the scales of rows, and become Tensors that depend on the write.
    kv_dtype: "int4" or "nvfp4", the format of pages of 4 bits; Dk and Dv are multiples of 16.
    q, rotary_cos, rotary_sin, rotary_interleaved, q_norm_weight, k_norm_weight, norm_eps: as in `KVCache.append`, with
      the positions in the sequence, not in the pages.

  Returns:
    q rotated and normalized, as in `KVCache.append`; None without q.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import append_paged
    >>> k_pages, v_pages = (Tensor.zeros(3, 1, 2, 1).contiguous().realize() for _ in range(2))
    >>> table, start = Tensor([[2, 0], [1, 1]]), Tensor([1, 0])
    >>> k = Tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 1, 2, 1)
    >>> append_paged(k, -k, k_pages, v_pages, table, start)
    >>> k_pages.flatten(1).tolist()  # the first sequence crosses from page 2 to page 0
    [[2.0, 0.0], [3.0, 4.0], [0.0, 1.0]]

    In 4 bits, where the memory of a cache is that of the pages:

    >>> from uopattn import KVCache, attention_paged
    >>> pool = KVCache(3, 1, 2, 16, dtype="int4")  # pages, Hkv, page_size, D
    >>> pages, scales = (pool.k, pool.v), {"k_scale": pool.k_scale, "v_scale": pool.v_scale, "kv_dtype": "int4"}
    >>> append_paged(k.expand(2, 1, 2, 16), -k.expand(2, 1, 2, 16), *pages, table, start, **scales)
    >>> out = attention_paged(Tensor.zeros(2, 1, 1, 16), *pages, table, start + 2, **scales)
    >>> [round(x, 2) for x in out[:, 0, 0, 0].tolist()]  # the means of 0, -1 and -2, and of -3 and -4
    [-1.0, -3.5]
  """
  four = format_of(kv_dtype, check_tensor("k_pages", k_pages))
  k, v, table, start, lengths = _placed(k, v, k_pages, v_pages, page_table, start, lengths, four)
  scales, held = _head_scales(k_scale, v_scale, k, k_pages) if four is None else [], [k_pages, v_pages]
  held += () if four is None else row_scales(four, k_pages, k_scale, v_scale)
  (B, _, M, _), (P, _, page_size, _) = sizes(k), sizes(k_pages)
  pages = PagedRows(P, page_size, sizes(table)[1])
  new = NewQueries.of("append_paged", q, k, "k_pages", options)
  _check_values(table, start, lengths, M, pages, new.positions)
  has_pages = 0 not in (pages.count, pages.entries)
  if 0 in sizes(k) or (new.q is None and not has_pages):
    return new.q
  axis = sharded_axis("k_pages", k_pages) if isinstance(k_pages.device, tuple) else None
  memory, rows = ([shard_of(x, axis) for x in xs] for xs in (held, (k, v)))
  if has_pages:
    _check_memory(memory, axis)
  else:  # a page that no id names stands in for the memory that a kernel needs, to change the queries
    memory = [empty((1, *sizes(x)[1:]), x.dtype, device_of(x)) for x in memory]
    pages, table = PagedRows(1, page_size, 1), Tensor.ones(B, 1, dtype=dtypes.int, device=k.device)
  call, q = append_call(
    memory[:2],
    rows,
    _whole(clamped(start)),
    pages,
    row_scales=memory[2:],
    tables=[_whole(table_of_ints(table, pages.count))],
    lengths=_whole(clamped(lengths)),
    head_scales=[shard_of(x, axis if sizes(x)[1] > 1 else None) for x in scales],
    four=four,
    q=None if new.q is None else shard_of(new.q, axis),
    norm_rope=new.change,
  )
  for x, shard in zip(held, memory, strict=True) if has_pages else ():
    base = base_of(shard.uop)
    written = shard.uop.substitute({base: base.after(call)}, walk=True)
    x.replace(Tensor(written if axis is None else written.unshard(axis)))
  return None if q is None else joined(q, axis)


def _check_memory(shards: list[Tensor], axis: int | None) -> None:
  """Raise ValueError unless a kernel can write to the pages, and to the scales of their rows if there are any."""
  names = "k_pages", "v_pages", "k_scale", "v_scale"
  for i, (name, x) in enumerate(zip(names, shards, strict=False)):
    if not is_memory(x) or axis not in (1, None) or (i >= 2 and base_of(x.uop) is not x.uop):
      accepted = "a realized Tensor or a strided view of one" if i < 2 else "a realized Tensor, and no view"
      accepted += "; on several devices, whole or sharded by heads"
      raise ValueError(f"{name} cannot be written to; it must be {accepted}")
  for i, (name, x) in enumerate(zip(names, shards, strict=False)):
    for other, y in zip(names, shards[:i], strict=False):
      if is_same_memory(x, y):
        raise ValueError(f"{name} is the same memory as {other}; keys and values must each have their own")


def _whole(x: Any) -> Any:
  """Return a Tensor whole on every device, and anything else as it is."""
  return shard_of(x, None) if isinstance(x, Tensor) else x


def _placed(
  k: Tensor,
  v: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  page_table: Tensor,
  start: int | UOp | Tensor,
  lengths: Tensor | None,
  four: FourBits | None,
) -> tuple[Tensor, Tensor, Tensor, int | UOp | Tensor, Tensor | None]:
  """Return k, v, page_table, start and lengths on the pages' device, once all shapes and dtypes are checked."""
  for name, x in (("k", k), ("v", v), ("k_pages", k_pages), ("v_pages", v_pages)):
    if check_tensor(name, x).ndim != 4:
      axes = "(P, Hkv, page_size, D)" if name.endswith("pages") else "(B, Hkv, M, D)"
      raise ValueError(f"{name} has shape {x.shape}; it must have four dimensions, {axes}")
  (B, Hkv, M, Dk), (P, _, page_size, _), Dv = sizes(k), sizes(k_pages), sizes(v)[3]
  columns = [D if four is None else bytes_of(f"{name} has head size", D, four) for name, D in (("k", Dk), ("v", Dv))]
  if page_size == 0 or k_pages.shape != (P, Hkv, page_size, columns[0]):
    accepted = f"(P, {Hkv}, page_size, {columns[0]})"
    raise ValueError(f"k_pages has shape {k_pages.shape}; for k {k.shape} it must be {accepted}")
  for name, x, shape in (("v", v, (B, Hkv, M, Dv)), ("v_pages", v_pages, (P, Hkv, page_size, columns[1]))):
    if sizes(x) != shape:
      raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
  for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
    if four is not None:
      check_rows(name, x, four)
    else:
      check_dtype(name, x.dtype, DTYPES if name == "k_pages" else (k_pages.dtype,))
  rounded = four is not None or k_pages.dtype in DTYPES_8
  k, v = (placed(x, k_pages.device, dtypes.default_float if rounded else k_pages.dtype) for x in (k, v))
  check_dtype("k", k.dtype, (*((k_pages.dtype,) if four is None else ()), *(DTYPES_16_32 if rounded else ())))
  check_dtype("v", v.dtype, (k.dtype,))
  page_table, start, lengths = placed((page_table, start, lengths), k_pages.device)
  for name, value in {"k": k, "v": v, "v_pages": v_pages, "start": start, "lengths": lengths}.items():
    if isinstance(value, Tensor):
      check_device(name, value, k_pages.device, "k_pages")
  check_table(page_table, B, k.device)
  check_sint("start", start, B)
  if lengths is not None:
    check_ints("lengths", lengths, (B,))
  return k, v, page_table, start, lengths


def _head_scales(k_scale: Any, v_scale: Any, k: Tensor, k_pages: Tensor) -> list[Tensor]:
  """Return the scales of heads as kernels take them; none if none is given."""
  scales = {"k_scale": k_scale, "v_scale": v_scale}
  return [] if k_scale is v_scale is None else [_scale(name, x, k, k_pages) for name, x in scales.items()]


def _scale(name: str, scale: float | Tensor | None, k: Tensor, k_pages: Tensor) -> Tensor:
  """Return a scale as kernels take it, (B or 1, Hkv or 1) float32."""
  B, Hkv, M, _ = sizes(k)
  if k.dtype == k_pages.dtype and scale is not None:
    raise ValueError(f"{name} is given, but k is stored as it is; it must be None, or pages of 8 bits and k of more")
  head_scale = placed(as_scale(1.0 if scale is None else scale), k_pages.device)
  if isinstance(head_scale, Tensor) and not isinstance(scale, Tensor):
    head_scale = head_scale.to(k_pages.device)
  check_scale(name, head_scale, Sizes(B, Hkv, Hkv, M, M))
  check_device(name, head_scale, k_pages.device, "k_pages")
  return of_heads(head_scale)[0]


def _check_values(
  table: Tensor, start: int | UOp | Tensor, lengths: Tensor | None, M: int, pages: PagedRows, known: int
) -> None:
  """Check positions and page ids, as far as they are known without computing; `known` positions can be rotated.

  Raises:
    ValueError: a number is out of its range.
  """
  B, most = sizes(table)[0], pages.entries * pages.size
  starts, counts = numbers_at_hand(start, B), [M] * B if lengths is None else numbers_at_hand(lengths, B)
  if starts is None or counts is None:
    return
  for b, (first, count) in enumerate(zip(starts, counts, strict=True)):
    if not 0 <= count <= M:
      raise ValueError(f"lengths is {count} for sequence {b}; it must be from 0 to {M}, the number of keys in k")
    for limit, room in (
      (most, f"page_table has {pages.entries} pages of {pages.size} keys"),
      (known, f"rotary_cos has {known} positions"),
    ):
      if count > limit:
        raise ValueError(f"k has {count} new keys for sequence {b}; it must have at most {limit}, as {room}")
      if first < 0 or first + count > limit:
        raise ValueError(
          f"start is {first} for sequence {b}; for {count} new keys it must be from 0 to {limit - count}, as {room}"
        )
  keys = [range(first, first + count) for first, count in zip(starts, counts, strict=True)]
  check_ids(table, keys, pages.count, pages.size, "gets")
