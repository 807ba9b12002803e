"""Attention of queries that have each chosen their keys: by kernels or plain ops, with gradients.

Each query is a sequence of its own, whose heads are rows of a tile, and its keys are pages of one key. So the forward
pass is that of paged keys. The backward pass must also add up what queries give to a key. On a CPU a kernel adds to the
rows of chosen keys in order; for GPUs see `uopattn.plan.chosen_rows`. Where tiles of chosen keys would be mostly empty,
or queries choose most keys, kernels go through all keys instead. They read how often a query has chosen a key, one,
two or four bytes for each pair of them, as the factor of a weight.
"""

import math
from dataclasses import dataclass, replace

from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import round_up

from uopattn.dsl import sizes
from uopattn.kernels.choose import count_chosen, count_dtype, list_keys
from uopattn.plan.chosen_rows import ChosenRows
from uopattn.plan.dispatch import NoKernel, backward_on, launch_on, stores_scores
from uopattn.plan.forward import forward
from uopattn.plan.gradient import GradientCall, by_kernels, by_reference, of_inputs, refuse
from uopattn.plan.launch import Launch, empty, run_graph
from uopattn.plan.reference import reference
from uopattn.plan.residuals import Residuals, no_further
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import Layout, base_of, contiguous_strides, in_memory, layout_of
from uopattn.spec.shards import device_of
from uopattn.spec.spec import AttentionSpec, make_spec

GPU_ROWS = 64  # of a tile of queries
MOST_BYTES = 1 << 30  # of numbers for all pairs of query and key


@dataclass(frozen=True, eq=False)
class Sparse:
  """An attention on one device in which each query has chosen its keys: a `uopattn.plan.division.Division`.

  Attributes:
    spec: of the queries as sequences of their own.
    M: queries per batch.
  """

  spec: AttentionSpec
  M: int
  device: str

  @classmethod
  def of(cls, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> "Sparse":
    """Check all arguments. Raises TypeError or ValueError if one does not fit.

    Args:
      arguments: with `indices` as users give them, of all queries, and their lengths if there are any.
    """
    table = _indices(arguments)[0]
    listed = replace(arguments, indices=(table, empty(sizes(table)[:2], dtypes.int, device_of(q))))
    return cls(replace(make_spec(as_sequences(q), k, v, listed), return_lse=True), sizes(q)[2], str(q.device))

  def launch(self) -> Launch:
    """Return the launch of the forward kernels. Raises NoKernel."""
    return launch_on(self.spec, self.device)

  def forward(
    self, launch: Launch | None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
  ) -> tuple[Tensor, Tensor]:
    q = as_sequences(q)
    if launch is None:
      out, lse = reference(q, k, v, self.spec, arguments)
    else:
      out, lse = forward(launch, q, k, v, arguments=replace(arguments, indices=self._listed(arguments)))
    return self._by_batches(out), self._by_batches(lse)

  def gradients(self, call: GradientCall) -> list[Tensor | None]:
    ways = [] if call.backend == "reference" else [self._of_chosen, self._of_all_keys]
    for way in ways if self.gathers else reversed(ways):
      try:
        return way(call)
      except NoKernel as error:
        failure = error
    if ways:
      refuse(failure, call.backend)
    q, k, v = call.qkv
    of_sequences = [None if x is None else as_sequences(x) for x in call.grads]
    dq, *others = by_reference(self.spec, as_sequences(q), k, v, call.arguments, of_sequences)
    return [None if dq is None else self._by_batches(dq), *others]

  @property
  def gathers(self) -> bool:
    """Whether gradients are expected to be faster by the keys that queries have chosen than by all keys.

    A query's tile has the heads of a group only, and rows in any order take twice the time.
    """
    s, target = self.spec, target_of(self.device)
    lanes = target.vector.lanes if self._on_cpu else GPU_ROWS
    batches, heads, N = s.kept
    numbers = batches * heads * self.M * N * count_dtype(s.N).itemsize
    return numbers > MOST_BYTES or 2 * s.N * round_up(s.group, lanes) <= N * s.group

  def _of_chosen(self, call: GradientCall) -> list[Tensor | None]:
    """Compute the gradients from the keys that queries have chosen. Raises NoKernel."""
    launches = backward_on(self.spec, self.device) if self._on_cpu else ()
    self.launch()  # where kernels cannot read as many keys as there are, no others can
    (q, k, v), arguments = call.qkv, call.arguments
    out, lse = map(as_sequences, call.results)
    seq_grads = [None if x is None else as_sequences(x) for x in call.grads]
    residuals, listed = Residuals.of(self.spec, as_sequences(q), k, v, out, lse, *seq_grads), self._listed(arguments)
    if self._on_cpu:
      dq, dk, dv = by_kernels(launches, residuals, replace(arguments, indices=listed))
    else:
      dq, dk, dv = ChosenRows(residuals, listed, arguments, self.M, call.backend).gradients()
    return [self._by_batches(dq), dk, dv, *of_inputs(residuals, arguments, call.wanted)]

  def _of_all_keys(self, call: GradientCall) -> list[Tensor | None]:
    """Compute the gradients by kernels over all keys, with 0 for those that nobody has chosen. Raises NoKernel."""
    (q, k, v), arguments = call.qkv, call.arguments
    N, top_k, heads = sizes(k)[2], self.spec.N, sizes(_indices(arguments)[0])[1]
    chosen = empty((sizes(k)[0], heads, self.M, N), count_dtype(top_k), self.device)
    (chosen,) = run_graph(count_chosen, self.device, [chosen], self._listed(arguments), no_further, on_cpu=self._on_cpu)
    used = chosen.max(2).ne(0).unsqueeze(-1).contiguous()
    k, v = (used.where(x, 0).contiguous() for x in (k, v))
    own = self._over_all_keys(arguments, chosen)
    spec = replace(make_spec(q, k, v, own), return_lse=True)
    launches = backward_on(spec, self.device)
    if stores_scores(launches):
      raise NoKernel("kernels for these head sizes would store the scores of all keys")
    out, lse = call.results
    out = out if spec.layout("o") is not None else out.contiguous()
    residuals = Residuals.of(spec, q, k, v, out, lse.contiguous(), *call.grads)
    return [*by_kernels(launches, residuals, own), *of_inputs(residuals, arguments, call.wanted)]

  def _over_all_keys(self, arguments: Arguments, chosen: Tensor) -> Arguments:
    """Return the arguments of the same attention over all keys, given how often each query has chosen each of them."""
    heads, top_k = sizes(chosen)[1], self.spec.N
    group = self.spec.group if heads > 1 else self.spec.Hq
    logs = Tensor([-math.inf, *(math.log(n) for n in range(1, top_k + 1))], dtype=dtypes.float32, device=self.device)

    def weighted(score: UOp, b: UOp, h: UOp, i: UOp, j: UOp, chosen: UOp, logs: UOp) -> UOp:
      return score + logs[chosen[b, h // group, i, j]]

    return replace(arguments, indices=None, score_mod=weighted, aux=(chosen, logs), enable_gqa=True)

  def _listed(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return the `indices` that kernels take."""
    table, *lengths = map(in_memory, _indices(arguments))
    outputs = [empty(shape, dtypes.int, self.device) for shape in (sizes(table), sizes(table)[:2])]
    keys = self.spec.kept[2]
    table, counts = run_graph(
      list_keys, self.device, outputs, (table, *lengths), no_further, keys=keys, on_cpu=self._on_cpu
    )
    return table, counts

  @property
  def _on_cpu(self) -> bool:
    return target_of(self.device).device == "CPU"

  def _by_batches(self, x: Tensor) -> Tensor:
    """Return a result of sequences, (B * M, Hq, 1, ...), as (B, Hq, M, ...)."""
    queries, heads, _, *width = sizes(x)
    return x.reshape(queries // self.M, self.M, heads, *width).transpose(1, 2)


def as_sequences(x: Tensor) -> Tensor:
  """Return q, or what has its rows, (B, Hq, M, ...), as (B * M, Hq, 1, ...): each query is a sequence."""
  B, heads, M, *width = sizes(x)
  x = x.transpose(1, 2)
  sequences = x.reshape(B * M, heads, 1, *width)
  layout = layout_of(sequences.uop)
  if layout is None:
    return x.contiguous().reshape(sequences.shape)
  in_order = layout == Layout(math.prod(sizes(sequences)), 0, contiguous_strides(sizes(sequences)))
  return Tensor(base_of(sequences.uop)).reshape(sequences.shape) if in_order else sequences


def _indices(arguments: Arguments) -> tuple[Tensor, ...]:
  assert arguments.indices is not None
  return arguments.indices
