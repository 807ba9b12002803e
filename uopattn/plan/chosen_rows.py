"""The backward pass of `attention_sparse` by chunks of queries, each with copies of the keys that it has chosen.

In a chunk, each query of each key head is an attention of its own: its query heads are the queries, and the keys that
it has chosen are the keys. Any kernels for gradients serve that, and plain ops where there are none. They leave a row
of dK and of dV for each pair of query and chosen key, which `uopattn.kernels.chosen_gradients` adds up by keys. So a
chunk takes memory for its pairs, not for all, and time O(M top_k D); only the inverse lists of a chunk go by all pairs
of query and key, one number each.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv

from uopattn.dsl import sizes
from uopattn.kernels.choose import count_dtype
from uopattn.kernels.chosen_gradients import add_rows, find_chosen, list_choosers, put_queries
from uopattn.plan.gradient import backward_launches, by_kernels, of_scores, weights_of
from uopattn.plan.launch import Launch, empty, run_graph, zero_after
from uopattn.plan.reference import chosen_rows, scores_of
from uopattn.plan.residuals import Residuals, no_further
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import Input, make_spec

CHUNK_BYTES = 1 << 30  # of copies and results of a chunk


@dataclass(frozen=True, eq=False)
class ChosenRows:
  """A backward pass by chunks of queries.

  Attributes:
    whole: what it reads; each query is a sequence, (B * M, Hq, 1, ...), and k and v are (B, Hkv, N, ...).
    listed: the valid keys of each query, and their number, as `list_keys` leaves them.
    arguments: of the whole.
    M: queries per batch.
  """

  whole: Residuals
  listed: tuple[Tensor, Tensor]
  arguments: Arguments
  M: int

  @property
  def device(self) -> str:
    return str(self.whole.q.device)

  @property
  def B(self) -> int:
    return self.whole.spec.kept[0]

  @functools.cached_property
  def count(self) -> int:
    """Queries per chunk and batch."""
    s, heads = self.whole.spec, sizes(self.listed[0])[1]
    rows = 2 * s.Hkv * s.N * (s.Dk + s.Dv) * s.dtype.itemsize
    numbers = 2 * heads * s.kept[2] * (dtypes.int32.itemsize + count_dtype(s.N).itemsize)
    chunks = ceildiv(self.M, max(1, CHUNK_BYTES // (self.B * (rows + numbers))))
    return ceildiv(self.M, chunks)

  def gradients(self, backend: str) -> list[Tensor]:
    """Return dQ as sequences, dK and dV. Raises ValueError if no kernels serve a chunk and the backend is "kernel"."""
    s = self.whole
    dq = self._new(self.B, self.M, s.spec.Hq * s.spec.Dk, dtype=s.q.dtype)
    sums = [Tensor.zeros(*sizes(x), dtype=dtypes.float32, device=self.device).contiguous() for x in (s.k, s.v)]
    first = Tensor.zeros(1, dtype=dtypes.int32, device=self.device).contiguous()
    launches: tuple[Launch, ...] = ()
    results: dict[str, list[Tensor]] = {}  # chunks share their memory
    for begin in range(0, self.M, self.count):
      if begin:
        first = (first + zero_after(dq, *sums) + self.count).contiguous()
      part, table, counts, arguments = self._chunk(first)
      launches = launches or backward_launches(part.spec, self.device, backend) or ()
      found = by_kernels(launches, part, arguments, results) if launches else by_ops(part, arguments)
      results = {name: [x] for name, x in zip(("dq", "dk", "dv"), found, strict=True)} if launches else {}
      given = found[0].reshape(self.B, self.count, -1).contiguous(), first
      (dq,) = run_graph(put_queries, self.device, [dq], given, no_further)
      sums = self._added(sums, found[1:], table, counts)
    of_keys = (x.cast(y.dtype) for x, y in zip(sums, (s.k, s.v), strict=True))
    return [dq.reshape(*sizes(s.q)), *of_keys]

  def _chunk(self, first: Tensor) -> tuple[Residuals, Tensor, Tensor, Arguments]:
    """Return the chunk of queries from `first` on, its lists with their lengths, and its arguments.

    Queries past the last one have no keys.
    """
    s, Hkv = self.whole, self.whole.spec.Hkv
    query = first + Tensor.arange(self.count, dtype=dtypes.int32)
    batch = Tensor.arange(self.B, dtype=dtypes.int32).reshape(-1, 1)
    sequence = (batch * self.M + query.minimum(self.M - 1)).reshape(-1)
    exists = (query < self.M).expand(self.B, self.count).reshape(-1, 1)

    def take(x: Tensor) -> Tensor:
      heads, _, *width = sizes(x)[1:]
      return x.reshape(sizes(x)[0], -1)[sequence].reshape(-1, 1, heads // Hkv, *width).contiguous()

    table = self.listed[0][sequence].contiguous()
    counts = exists.where(self.listed[1][sequence], 0).contiguous()
    q, do, lse, delta = map(take, (s.q, s.do, s.lse, s.delta))
    k, v = (chosen_rows(x, table).reshape(-1, 1, s.spec.N, sizes(x)[3]).cast(q.dtype).contiguous() for x in (s.k, s.v))
    lengths = counts.expand(sizes(counts)[0], Hkv).reshape(-1).contiguous()
    arguments = Arguments(scale=s.spec.scale, softcap=self.arguments.softcap, kv_lengths=lengths, return_lse=True)
    return Residuals(make_spec(q, k, v, arguments), q, k, v, lse, do, delta), table, counts, arguments

  def _added(self, sums: list[Tensor], parts: Sequence[Tensor], table: Tensor, counts: Tensor) -> list[Tensor]:
    """Add a chunk's rows of dK and dV to the sums of their keys."""
    N, (_, heads, top_k) = self.whole.spec.kept[2], sizes(table)
    pairs, number = (self.B, heads, self.count, N), count_dtype(top_k)
    chosen, slots = self._new(*pairs, dtype=number), self._new(*pairs)
    chosen, slots = run_graph(find_chosen, self.device, [chosen, slots], [table, counts], no_further)
    outputs = self._new(*pairs), self._new(*pairs, dtype=number), self._new(self.B, heads, N)
    lists = run_graph(list_choosers, self.device, outputs, [chosen, slots], no_further, top_k=top_k)
    return [
      run_graph(add_rows, self.device, [x], [part.squeeze(1).contiguous(), *lists], no_further)[0]
      for x, part in zip(sums, parts, strict=True)
    ]

  def _new(self, *shape: int, dtype: DType = dtypes.int32) -> Tensor:
    return empty(Input("", shape, dtype), self.device)


def by_ops(part: Residuals, arguments: Arguments) -> list[Tensor]:
  """Return dQ, dK and dV of a chunk in plain ops, which hold its scores."""
  q, k = part.q.detach(), part.k.detach()
  scores = scores_of(q, k, part.spec, arguments)
  weights = weights_of(part, scores.detach())
  total = (scores * of_scores(part, scores.detach(), arguments).detach()).sum()
  return [*total.gradient(q, k), weights.transpose(-1, -2) @ part.do.float()]
