"""`attention_varlen` with a page table: packed queries over keys in pages, as continuous batching has them.

The queries of each sequence are cut into blocks, and each block is a batch of an attention over the pages of its
sequence. So a call with prompts in chunks beside single queries computes little for padding, and kernels pack the heads
that share a key head, and split the keys of few blocks, as they do for decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.api.four_bit_pages import format_of, in_format
from uopattn.api.paged import attend_pages, check_lengths, check_pages, check_table
from uopattn.dsl import sizes
from uopattn.dsl.schedule import FEW, HEAD_SCALES
from uopattn.runtime.device import kind_of
from uopattn.spec.arguments import Arguments, Sizes
from uopattn.spec.shards import Devices, device_of, devices_of
from uopattn.spec.tensors import placed

ROWS = 64  # of a tile of queries: those of a block, of all heads that share a key head
FEW_ON_CPU = 8  # queries of a sequence that has a block of its own on a CPU, where each row costs its products


def attend_packed(
  q: Tensor,
  k_pages: Tensor,
  v_pages: Tensor,
  ends: Tensor,
  arguments: Arguments,
  q_start: int | Tensor | None,
  longest: int,
  backend: str,
) -> tuple[Tensor, Tensor]:
  """Return the output, (total queries, Hq, Dv), and the LSE, (Hq, total queries); see `uopattn.attention_varlen`.

  Args:
    q: (total queries, Hq, Dk).
    ends: `cu_seqlens_q`, (S + 1,) int32.
    arguments: with the page table and the number of keys of each sequence, as they were given.
    q_start: None makes the queries the last positions of their sequences.
    longest: the most queries of a sequence.
  """
  total, Hq, Hkv, S = *sizes(q)[:2], sizes(k_pages)[1], sizes(ends)[0] - 1
  ends = ends if S else ends.pad((0, 1))
  results: list[Tensor] = []
  for size, fewest, most in block_sizes(longest, max(1, Hq // max(Hkv, 1)), device_of(q)):
    blocks = QueryBlocks.of(ends, max(total, 1), size, fewest, most)
    of_blocks = attend_pages(blocks.split(q), k_pages, v_pages, blocks.arguments(arguments, q_start), backend)
    packed = [blocks.joined(x) for x in of_blocks]
    results = [blocks.chosen(x, y) for x, y in zip(packed, results, strict=True)] if results else packed
  out, lse = results
  return out[:total], lse[:total].transpose(0, 1)


def checked(
  arguments: Arguments, kv_dtype: str | None, q: Tensor, k_pages: Tensor, v_pages: Tensor, S: int
) -> Arguments:
  """Check the arguments of a call with S sequences, but for its offsets and q_start, and return them `settled`.

  Raises:
    TypeError, ValueError: one does not fit.
  """
  total, Hq, Dk = sizes(q)
  check_pages(k_pages, v_pages)
  P, Hkv, page_size, columns = sizes(k_pages)
  arguments = in_format(arguments, four := format_of(kv_dtype, k_pages), k_pages, v_pages, Dk)
  if four is None and columns != Dk:
    raise ValueError(f"k_pages has shape {k_pages.shape}, q has {q.shape}; it must be (P, Hkv, page_size, {Dk})")
  if v_pages.shape[:3] != (P, Hkv, page_size):
    accepted = f"({P}, {Hkv}, {page_size}, Dv)"
    raise ValueError(f"v_pages has shape {v_pages.shape}, k_pages has {k_pages.shape}; it must be {accepted}")
  table, mask = cast(Tensor, arguments.page_table), arguments.attn_mask
  check_table(table, S, q.device)
  check_lengths(arguments.kv_lengths, table, P, page_size)
  if arguments.block_mask is not None:
    raise TypeError("block_mask is given with a page_table, for which it has no meaning; pass its mask_mod")
  if isinstance(mask, Tensor) and mask.ndim > 3:
    accepted = f"(Hq, total queries, max_pages * page_size) = {(Hq, total, sizes(table)[1] * page_size)}"
    raise ValueError(f"attn_mask has shape {mask.shape}; it must broadcast to {accepted}")
  arguments = arguments.settled(q.device)
  arguments.check(Sizes(S, Hq, Hkv, total, sizes(table)[1] * page_size, (P, Hkv, page_size)), q.device)
  return arguments


def block_sizes(longest: int, group: int, device: Devices) -> list[tuple[int, int, int]]:
  """Return the sizes of blocks in a call, each with the fewest and the most queries of the sequences that it is for.

  Large blocks read keys and values less often, and small ones compute less for rows without a query. A GPU has one
  size, so that blocks that wait for memory overlap with those that compute. A CPU has a smaller one for sequences of
  few queries, which a kernel of their own computes.

  Args:
    longest: the most queries of a sequence.
    group: query heads per key head.
  """
  if kind_of(devices_of(device)[0]) != "CPU":
    packed = max(1, ROWS // group)
    return [(min(longest, packed if packed <= FEW else ROWS), 1, longest)]  # heads of few queries are packed
  if longest <= FEW_ON_CPU:
    return [(longest, 1, longest)]
  return [(FEW_ON_CPU, 1, FEW_ON_CPU), (min(longest, ROWS), FEW_ON_CPU + 1, longest)]


@dataclass(frozen=True, eq=False)
class QueryBlocks:
  """Packed queries, of some of the sequences, in blocks of `size` rows, each with queries of one sequence.

  The blocks of sequence s begin with number cu_seqlens_q[s] // size plus the number of such sequences before it. So
  those of the next one begin after them, wherever it ends. The last block has no query, nor have those that are
  left over.

  Attributes:
    size: rows of a block.
    numbers: (blocks, 4) int32. Of each block its sequence; the number, within that, of the query in its first row;
      the queries of the sequence, or 0 if the block has none of them; the packed query in its first row.
    rows: the row of each packed query among those of all blocks, (total,) int32; one of the last block for a query of
      none of the sequences.
  """

  size: int
  numbers: Tensor
  rows: Tensor

  @classmethod
  def of(cls, ends: Tensor, total: int, size: int, fewest: int, most: int) -> "QueryBlocks":
    """Find the rows of the sequences with at least `fewest` and at most `most` queries.

    Args:
      ends: `cu_seqlens_q`, (S + 1,) int32, of S >= 1 sequences.
      total: packed queries, at least 1.
      fewest: at least 1.
    """
    S, device, ends = sizes(ends)[0] - 1, device_of(ends), ends.clip(0, total)
    starts, counts = ends[:-1], ends[1:] - ends[:-1]
    counts = ((counts >= fewest) & (counts <= most)).where(counts, 0)
    before = (counts > 0).cast(dtypes.int)
    base = before.cumsum() - before
    last = min(S, total // fewest)
    if most > size:
      base, last = base + starts // size, last + total // size
    block, query = Tensor.arange(last + 1).cast(dtypes.int), Tensor.arange(total).cast(dtypes.int)
    of_block = _lookup(base, base + (counts + size - 1) // size, block)
    of_query = _lookup(starts, starts + counts, query)
    first = (block - of_block(base)) * size
    numbers = of_block(Tensor.arange(S)), first, of_block(counts), of_block(starts) + first
    rows = of_query(base) * size + query - of_query(starts)
    rows = _within((of_query(counts) > 0).where(rows, last * size), (last + 1) * size)
    return cls(size, *(placed(x, device).contiguous() for x in (Tensor.stack(*numbers, dim=-1), rows)))

  @property
  def sequence(self) -> Tensor:
    """The sequence of each block, (blocks,) int32."""
    return self.numbers[:, 0]

  @property
  def first(self) -> Tensor:
    """The number, within its sequence, of the query in each block's first row, (blocks,) int32."""
    return self.numbers[:, 1]

  @property
  def count(self) -> Tensor:
    """The queries of each block's sequence; 0 if the block has none of them, (blocks,) int32."""
    return self.numbers[:, 2]

  def split(self, x: Tensor) -> Tensor:
    """Return packed rows, (total, H, ...), as (blocks, H, size, ...)."""
    query = self.numbers[:, 3:] + Tensor.arange(self.size)
    return taken(x, query).transpose(1, 2).contiguous()

  def joined(self, x: Tensor) -> Tensor:
    """Return (blocks, H, size, ...) as packed rows, (total, H, ...)."""
    x = x.transpose(1, 2)
    return taken(x.reshape(-1, *sizes(x)[2:]), self.rows)

  def chosen(self, x: Tensor, y: Tensor) -> Tensor:
    """Return packed rows, (total, ...): of x for queries in the blocks, and of y for the rest."""
    is_own = self.rows < (sizes(self.numbers)[0] - 1) * self.size
    is_own = is_own.reshape(-1, *(1 for _ in sizes(x)[1:]))
    if x.dtype != dtypes.bfloat16:
      return is_own.where(x, y)
    bits = is_own.where(x.bitcast(dtypes.ushort), y.bitcast(dtypes.ushort))  # CPUs may not select bfloat16
    return bits.bitcast(x.dtype)

  def arguments(self, arguments: Arguments, q_start: int | Tensor | None) -> Arguments:
    """Return the arguments of the blocks as batches, from those of the packed sequences."""
    lengths = self._of_sequences(arguments.kv_lengths)
    start = lengths - self.count if q_start is None else self._of_sequences(q_start)
    changes: dict[str, Any] = {
      "kv_lengths": (self.count > 0).where(lengths, 0),
      "q_start": start + self.first,
      "page_table": self._of_sequences(arguments.page_table),
    }
    scales = {name: x for name in HEAD_SCALES if isinstance(x := getattr(arguments, name), Tensor) and sizes(x)[0] > 1}
    changes |= {name: self._of_sequences(x) for name, x in scales.items()}
    if arguments.attn_mask is not None:
      changes["attn_mask"] = self._mask(arguments.attn_mask)
    arguments = replace(arguments, **changes)
    if arguments.score_mod is None and arguments.mask_mod is None:
      return arguments
    return renumbered(arguments, _within_sequence, self.sequence, self.first)

  def _of_sequences(self, x: Any) -> Any:
    """Return what there is one of for each sequence, for each block; a number as it is."""
    if isinstance(x, UOp):
      return Tensor(x).cast(dtypes.int)
    return taken(x, self.sequence) if isinstance(x, Tensor) else x

  def _mask(self, mask: Tensor) -> Tensor:
    """Return an attn_mask of packed queries as (blocks or 1, Hq or 1, size or 1, max_pages * page_size or 1)."""
    mask = mask.reshape((1,) * (3 - mask.ndim) + sizes(mask))
    return mask.unsqueeze(0) if mask.shape[1] == 1 else self.split(mask.transpose(0, 1))


def taken(x: Tensor, index: Tensor) -> Tensor:
  """Return the rows of x at `index`; zeros if it has none.

  tinygrad sees from the clamp that every index is in x. It would select 0 for others, and CPUs lack that in bfloat16.
  """
  x = x if sizes(x)[0] else Tensor.zeros(1, *sizes(x)[1:], dtype=x.dtype, device=x.device)
  return x[_within(index, sizes(x)[0])].cast(x.dtype)  # tinygrad gathers ints from a bool Tensor


def _lookup(first: Tensor, end: Tensor, index: Tensor) -> Callable[[Tensor], Tensor]:
  """Return a function that gathers, for each index, a number of the range first ... end - 1 that it is in, else 0."""
  own = (first.unsqueeze(1) <= index) & (index < end.unsqueeze(1))
  return lambda x: own.where(x.unsqueeze(1), 0).sum(0).cast(dtypes.int)


def _within(x: Tensor, below: int) -> Tensor:
  """Clamp integers to 0 ... below - 1; see `uopattn.dsl.clamp`."""
  return -((-x.maximum(0)).maximum(1 - below))


def _within_sequence(b: Any, h: Any, i: Any, j: Any, sequence: Any, first: Any) -> tuple[Any, ...]:
  """Return the indices within a sequence, given those of a block."""
  return sequence[b], h, first[b] + i, j


def renumbered(arguments: Arguments, indices: Callable[..., tuple[Any, ...]], *own: Tensor) -> Arguments:
  """Return the arguments with mods that are called with other indices.

  Args:
    indices: (b, h, q_idx, kv_idx, *own) -> the indices that the mods of `arguments` take.
    own: the Tensors that `indices` reads, which are added to aux.
  """

  def changed(mod: Callable[..., Any] | None, scores: int) -> Callable[..., Any] | None:
    """Return a mod with so many arguments before its indices: 1 for a score_mod, 0 for a mask_mod."""
    if mod is None:
      return None

    def renumbered_mod(*args: Any) -> Any:
      score, at, aux = args[:scores], args[scores : scores + 4], args[scores + 4 :]
      return mod(*score, *indices(*at, *aux[-len(own) :]), *aux[: -len(own)])

    return renumbered_mod

  score_mod, mask_mod = changed(arguments.score_mod, 1), changed(arguments.mask_mod, 0)
  return replace(arguments, score_mod=score_mod, mask_mod=mask_mod, aux=(*arguments.aux, *own))
