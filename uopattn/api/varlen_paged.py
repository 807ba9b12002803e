"""`attention_varlen` with a page table: packed queries over keys in pages, as continuous batching has them.

The queries of each sequence are cut into blocks, and each block is a batch of an attention over the pages of its
sequence. So a call with prompts in chunks beside single queries computes little for padding, and kernels pack the heads
that share a key head, and split the keys of few blocks, as they do for decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.api.paged import attend_pages, check_lengths, check_pages, check_table
from uopattn.dsl import sizes
from uopattn.dsl.schedule import FEW, HEAD_SCALES
from uopattn.spec.arguments import Arguments, Sizes
from uopattn.spec.shards import Devices, devices_of
from uopattn.spec.tensors import placed

ROWS = 64  # of a tile of queries: those of a block, of all heads that share a key head
ROWS_ON_CPU = 8  # where a row costs its products, used or not


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
  size = min(longest, queries_per_block(total // max(S, 1), max(1, Hq // max(Hkv, 1)), cast(Devices, q.device)))
  blocks = QueryBlocks.of(ends if S else ends.pad((0, 1)), max(total, 1), size, longest)
  out, lse = attend_pages(blocks.split(q), k_pages, v_pages, blocks.arguments(arguments, q_start), backend)
  return blocks.joined(out)[:total], blocks.joined(lse)[:total].transpose(0, 1)


def checked(arguments: Arguments, q: Tensor, k_pages: Tensor, v_pages: Tensor, S: int) -> Arguments:
  """Check the arguments of a call with S sequences, but for its offsets and q_start, and return them `settled`.

  Raises:
    TypeError, ValueError: one does not fit.
  """
  total, Hq, Dk = sizes(q)
  check_pages(k_pages, v_pages)
  P, Hkv, page_size, _ = sizes(k_pages)
  if k_pages.shape[3] != Dk:
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
  arguments.check(Sizes(S, Hq, Hkv, total, sizes(table)[1] * page_size), q.device)
  return arguments


def queries_per_block(average: int, group: int, device: Devices) -> int:
  """Return the queries of a block.

  Large blocks read keys and values less often; small ones compute less for places without a query.

  Args:
    average: queries per sequence.
    group: query heads per key head.
  """
  if devices_of(device)[0].split(":")[0] == "CPU":
    return ROWS if average >= ROWS else ROWS_ON_CPU
  packed = max(1, ROWS // group)
  return packed if packed <= FEW else ROWS  # kernels pack the heads of few queries alone


@dataclass(frozen=True, eq=False)
class QueryBlocks:
  """Packed queries in blocks of `size` places, each with queries of one sequence.

  Sequence s, whose first query is cu_seqlens_q[s], has the blocks from cu_seqlens_q[s] // size + s on. Those of the
  next sequence begin after them, wherever it ends. The last block has no query, nor have others that are left over.

  Attributes:
    size: places of a block.
    numbers: (blocks, 4) int32. Of each block its sequence; the number, within that, of the query in its first place;
      the queries of the sequence, or 0 if the block has none of them; the packed query in its first place.
    place: the place of each packed query among all blocks', (total,) int32; one of the last block for a query of no
      sequence.
  """

  size: int
  numbers: Tensor
  place: Tensor

  @classmethod
  def of(cls, ends: Tensor, total: int, size: int, longest: int) -> "QueryBlocks":
    """Find the places.

    Args:
      ends: `cu_seqlens_q`, (S + 1,) int32, of S >= 1 sequences.
      total: packed queries, at least 1.
      longest: the most queries of a sequence.
    """
    S, device, ends = sizes(ends)[0] - 1, cast(Devices, ends.device), ends.clip(0, total)
    starts, ends, number = ends[:-1], ends[1:], Tensor.arange(S).cast(dtypes.int)
    last = S if longest <= size else S + total // size
    base = number if longest <= size else number + starts // size  # the first block of each sequence
    block, query = Tensor.arange(last + 1).cast(dtypes.int), Tensor.arange(total).cast(dtypes.int)
    after = base[1:].pad((0, 1), value=last + 1)
    of_block, of_query = _lookup(base, after, block), _lookup(starts, ends, query)
    first = (block - of_block(base)) * size
    used = (first < of_block(ends - starts)) & (block < last)
    numbers = of_block(number), first, used.where(of_block(ends - starts), 0), of_block(starts) + first
    place = of_query(base) * size + (query - of_query(starts)).minimum(longest - 1)
    place = _within((of_query(ends) > query).where(place, last * size), (last + 1) * size)
    return cls(size, *(placed(x, device).contiguous() for x in (Tensor.stack(*numbers, dim=-1), place)))

  @property
  def sequence(self) -> Tensor:
    """The sequence of each block, (blocks,) int32."""
    return self.numbers[:, 0]

  @property
  def first(self) -> Tensor:
    """The number, within its sequence, of the query in each block's first place, (blocks,) int32."""
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
    return taken(x.reshape(-1, *sizes(x)[2:]), self.place)

  def arguments(self, given: Arguments, q_start: int | Tensor | None) -> Arguments:
    """Return the arguments of the blocks as batches, from those of the packed sequences."""
    lengths = self._of_sequences(given.kv_lengths)
    start = lengths - self.count if q_start is None else self._of_sequences(q_start)
    found: dict[str, Any] = {
      "kv_lengths": (self.count > 0).where(lengths, 0),
      "q_start": start + self.first,
      "page_table": self._of_sequences(given.page_table),
    }
    scales = {name: x for name in HEAD_SCALES if isinstance(x := getattr(given, name), Tensor) and sizes(x)[0] > 1}
    found |= {name: self._of_sequences(x) for name, x in scales.items()}
    if given.attn_mask is not None:
      found["attn_mask"] = self._mask(given.attn_mask)
    if given.score_mod is not None or given.mask_mod is not None:
      found |= {"score_mod": _of_blocks(given.score_mod, 1), "mask_mod": _of_blocks(given.mask_mod, 0)}
      found["aux"] = (*given.aux, self.sequence, self.first)
    return replace(given, **found)

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


def _of_blocks(mod: Callable[..., Any] | None, scores: int) -> Callable[..., Any] | None:
  """Turn a mod of indices within a sequence into one of blocks. Its last two aux Tensors are `sequence` and `first`.

  Args:
    scores: arguments before the indices: 1 for a score_mod, 0 for a mask_mod.
  """
  if mod is None:
    return None

  def of_block(*given: Any) -> Any:
    score, (b, h, i, j), (*aux, sequence, first) = given[:scores], given[scores : scores + 4], given[scores + 4 :]
    return mod(*score, sequence[b], h, first[b] + i, j, *aux)

  return of_block
