"""The backward pass of `attention_sparse` on a GPU, by chunks of queries.

In a chunk, each query of each key head is an attention of its own: its query heads are the queries, and the keys that
it has chosen are the keys. Kernels read these where they are; plain ops, where no kernels serve the device or the type,
copy them. Both leave a row of dK and of dV for each pair of query and chosen key, which
`uopattn.kernels.chosen_gradients` adds up by keys. So a chunk takes memory for its pairs, not for all, and time
O(M top_k D); only the inverse lists of a chunk go by all pairs of query and key, one number each.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl import sizes
from uopattn.dsl.cpu.register_blocks import even
from uopattn.dsl.schedule import GRADIENTS
from uopattn.kernels.choose import count_dtype
from uopattn.kernels.chosen_gradients import add_rows, find_chosen, list_choosers, put_queries
from uopattn.plan.gradient import backward_launches, of_scores, weights_of, written
from uopattn.plan.launch import Launch, empty, run_graph, zero_after
from uopattn.plan.reference import chosen_rows, scores_of
from uopattn.plan.residuals import Residuals, no_further
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec

CHUNK_BYTES = 1 << 30  # of results and lists of a chunk


def chunk_size(M: int, each: int) -> int:
  """Return how many of the M queries, of `each` bytes, go into one chunk.

  At least one, and about as many in every chunk.
  """
  return even(M, max(1, CHUNK_BYTES // each))


@dataclass(frozen=True, eq=False)
class ChosenRows:
  """A backward pass by chunks of queries.

  Attributes:
    whole: what it reads; each query is a sequence, (B * M, Hq, 1, ...), and k and v are (B, Hkv, N, ...).
    listed: the valid keys of each query, and their number, as `list_keys` leaves them.
    arguments: of the whole.
    M: queries per batch.
    backend: if there are no kernels, "kernel" raises ValueError and "auto" uses plain ops.
  """

  whole: Residuals
  listed: tuple[Tensor, Tensor]
  arguments: Arguments
  M: int
  backend: str

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
    rows = s.Hkv * s.N * (s.Dk + s.Dv) * s.dtype.itemsize
    rows += sum(launch.scratch_bytes for launch in self.launches) // (self.B * self.M)
    numbers = 2 * heads * s.kept[2] * (dtypes.int32.itemsize + count_dtype(s.N).itemsize)
    return chunk_size(self.M, self.B * (rows + numbers))

  @functools.cached_property
  def launches(self) -> tuple[Launch, ...]:
    """Those of a backward pass of all queries at once; () if no kernels serve it."""
    return backward_launches(replace(self.whole.spec, kv_dtype=None), self.device, self.backend) or ()

  @functools.cached_property
  def keys(self) -> tuple[Tensor, Tensor]:
    """Keys and values in q's type, in which kernels of gradients read them."""
    s = self.whole
    k, v = (x if x.dtype == s.q.dtype else x.cast(s.q.dtype).contiguous() for x in (s.k, s.v))
    return k, v

  def gradients(self) -> list[Tensor]:
    """Return dQ as sequences, dK and dV. Raises ValueError if no kernels serve it and the backend is "kernel"."""
    s, memory = self.whole, Scratch(self.device)
    dq = memory.new("whole", (self.B, self.M, s.spec.Hq * s.spec.Dk), s.q.dtype)
    sums = [Tensor.zeros(*sizes(x), dtype=dtypes.float32, device=self.device).contiguous() for x in (s.k, s.v)]
    first = Tensor.zeros(1, dtype=dtypes.int32, device=self.device).contiguous()
    for begin in range(0, self.M, self.count):
      if begin:
        first = (first + zero_after(dq, *sums) + self.count).contiguous()
      chunk, listed, arguments = self._chunk(first, memory)
      grads = self._by_kernels(chunk, arguments, memory) if self.launches else by_ops(chunk, arguments)
      grads = [memory.keep(name, x) for name, x in zip(GRADIENTS, grads, strict=True)]
      rows = grads[0].reshape(self.B, self.count, -1)
      (dq,) = run_graph(put_queries, self.device, [dq], [rows, first], no_further)
      sums = self._added(sums, grads[1:], listed, memory)
    of_keys = (x.cast(y.dtype) for x, y in zip(sums, (s.k, s.v), strict=True))
    return [dq.reshape(*sizes(s.q)), *of_keys]

  def _chunk(self, first: Tensor, memory: "Scratch") -> tuple[Residuals, list[Tensor], Arguments]:
    """Return the chunk of queries from `first` on, its lists with their lengths, and its arguments.

    Queries past the last one have no keys.
    """
    s = self.whole
    query = first + Tensor.arange(self.count, dtype=dtypes.int32)
    batch = Tensor.arange(self.B, dtype=dtypes.int32).reshape(-1, 1)
    sequence = (batch * self.M + query.minimum(self.M - 1)).reshape(-1)
    exists = (query < self.M).expand(self.B, self.count).reshape(-1, 1)
    table = memory.store("table", self.listed[0][sequence])
    counts = memory.store("counts", exists.where(self.listed[1][sequence], 0))
    has_keys = counts.max(1, keepdim=True) > 0

    def take(name: str, x: Tensor) -> Tensor:
      """The rows of the chunk, 0 for a query without keys: 0 times NaN is NaN."""
      count, *rest = sizes(x)
      return memory.store(name, has_keys.where(x.reshape(count, -1)[sequence], 0).reshape(-1, *rest))

    q, do, lse, delta = (take(name, getattr(s, name)) for name in ("q", "do", "lse", "delta"))
    k, v = self.keys
    arguments = Arguments(
      scale=s.spec.scale, softcap=self.arguments.softcap, indices=(table, counts), enable_gqa=True, return_lse=True
    )
    return Residuals(make_spec(q, k, v, arguments), q, k, v, lse, do, delta), [table, counts], arguments

  def _by_kernels(self, chunk: Residuals, arguments: Arguments, memory: "Scratch") -> list[Tensor]:
    """Return dQ of a chunk, and a row of dK and of dV for each pair."""
    launches = tuple(replace(x, spec=chunk.spec) for x in self.launches)
    names = {name for x in launches for name in x.kernel.outputs}
    buffers = chunk.buffers(arguments) | {name: [memory[name]] for name in names if name in memory}
    results = {name: memory.keep(name, x) for name, x in written(launches, self.device, buffers).items()}
    return [results[name] for name in GRADIENTS]

  def _added(
    self, sums: list[Tensor], grads: Sequence[Tensor], listed: Sequence[Tensor], memory: "Scratch"
  ) -> list[Tensor]:
    """Add a chunk's rows of dK and dV to the sums of their keys."""
    N, (_, heads, top_k) = self.whole.spec.kept[2], sizes(listed[0])
    pairs, number = (self.B, heads, self.count, N), count_dtype(top_k)

    def run(build: Callable[..., UOp], inputs: Sequence[Tensor], names: str, **options: int) -> list[Tensor]:
      buffers = [memory.new(name, *outputs[name]) for name in names.split()]
      written = run_graph(build, self.device, buffers, inputs, no_further, **options)
      return [memory.keep(name, x) for name, x in zip(names.split(), written, strict=True)]

    outputs = dict.fromkeys(("slots", "rows"), (pairs, dtypes.int)) | {"totals": ((self.B, heads, N), dtypes.int)}
    outputs |= dict.fromkeys(("chosen", "times"), (pairs, number))
    lists = run(list_choosers, run(find_chosen, listed, "chosen slots"), "rows times totals", top_k=top_k)
    return [
      run_graph(add_rows, self.device, [x], [grad.reshape(-1, top_k, sizes(x)[3]), *lists], no_further)[0]
      for x, grad in zip(sums, grads, strict=True)
    ]


class Scratch(dict[str, Tensor]):
  """The buffers that chunks use one after another, by name. In a large schedule tinygrad would allocate new ones."""

  def __init__(self, device: str):
    super().__init__()
    self.device = device

  def new(self, name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """Return the buffer to write to."""
    return self[name] if name in self else self.keep(name, empty(shape, dtype, self.device))

  def keep(self, name: str, x: Tensor) -> Tensor:
    """Return the buffer as it was written."""
    self[name] = x
    return x

  def store(self, name: str, x: Tensor) -> Tensor:
    """Store a Tensor to its buffer, and return that."""
    buffer = self.new(name, sizes(x), x.dtype).uop
    return self.keep(name, Tensor(buffer.after(buffer.store(x.uop))))


def by_ops(chunk: Residuals, arguments: Arguments) -> list[Tensor]:
  """Return dQ of a chunk, and a row of dK and of dV for each pair, in plain ops on copies of the keys."""
  s = chunk.spec
  assert arguments.indices is not None
  table, counts = arguments.indices

  def of_key_heads(x: Tensor) -> Tensor:
    """Rows of queries, those of each key head as a batch."""
    return x.reshape(-1, 1, s.group, *sizes(x)[3:])

  q, do, lse, delta = map(of_key_heads, (chunk.q, chunk.do, chunk.lse, chunk.delta))
  k, v = (chosen_rows(x, table).reshape(-1, 1, s.N, sizes(x)[3]).contiguous() for x in (chunk.k, chunk.v))
  lengths = counts.expand(s.B, s.Hkv).reshape(-1).contiguous()
  arguments = replace(arguments, indices=None, kv_lengths=lengths)
  residuals = Residuals(make_spec(q, k, v, arguments), q, k, v, lse, do, delta)
  q, k = q.detach(), k.detach()
  scores = scores_of(q, k, residuals.spec, arguments)
  weights = weights_of(residuals, scores.detach())
  total = (scores * of_scores(residuals, scores.detach(), arguments).detach()).sum()
  return [*total.gradient(q, k), weights.transpose(-1, -2) @ do.float()]
