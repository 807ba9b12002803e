"""Attention of queries that have each chosen their keys: by kernels or plain ops, with gradients.

Each query is a sequence of its own, whose heads are rows of a tile, and its keys are pages of one key. So the forward
pass is that of paged keys. The backward pass goes through all keys, for it must add up what queries give to a key: its
kernels read how often a query has chosen a key, one or two bytes for each pair of them, as the factor of a weight.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

from uopattn.dsl import sizes
from uopattn.dsl.instruction import typed
from uopattn.kernels.choose import count_chosen, count_dtype, list_keys
from uopattn.plan.dispatch import NoKernel, backward_on, launch_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import backward_launches, by_kernels, by_reference, of_inputs
from uopattn.plan.launch import Launch
from uopattn.plan.reference import reference
from uopattn.plan.residuals import Residuals, no_further
from uopattn.plan.target import target_of
from uopattn.runtime.function import in_function
from uopattn.runtime.prepare import prepared
from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import in_memory, layout_of
from uopattn.spec.spec import AttentionSpec, make_spec


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
    assert arguments.indices is not None
    table = arguments.indices[0]
    listed = replace(arguments, indices=(table, _new(sizes(table)[:2], str(q.device))))
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

  def gradients(
    self,
    results: Sequence[Tensor],
    operands: dict[str, Tensor],
    grads: Sequence[Tensor | None],
    arguments: Arguments,
    backend: str,
    wanted: Collection[str],
  ) -> list[Tensor | None]:
    q, k, v = (operands[name] for name in "qkv")
    try:
      launches = backward_on(self.spec, self.device)
    except NoKernel:
      pass
    else:
      own, of_sequences = replace(arguments, indices=self._listed(arguments)), [None if x is None else as_sequences(x) for x in (*results, *grads)]
      residuals = Residuals.of(self.spec, as_sequences(q), k, v, *of_sequences)
      dq, dk, dv = by_kernels(launches, residuals, own)
      return [self._by_batches(dq), dk, dv, *of_inputs(residuals, arguments, wanted)]
    N, top_k, heads = sizes(k)[2], self.spec.N, sizes(self._indices(arguments))[1]
    chosen = _new((sizes(k)[0], heads, self.M, N), self.device, count_dtype(top_k))
    spec = replace(make_spec(q, k, v, self._over_all_keys(arguments, chosen)), return_lse=True)
    launches = backward_launches(spec, self.device, backend)
    if launches is None:
      of_sequences = [None if x is None else as_sequences(x) for x in grads]
      dq, *others = by_reference(self.spec, as_sequences(q), k, v, arguments, of_sequences)
      return [None if dq is None else self._by_batches(dq), *others]
    given = chosen, *self._listed(arguments)
    kernel = prepared(_counting, self.device, sizes(chosen), top_k, target_of(self.device).device == "CPU")
    call = kernel.call(*(x.uop for x in given), grad_fxn=no_further)
    own = self._over_all_keys(arguments, Tensor(chosen.uop.after(call)))
    out, lse = results
    out = out if spec.layout("o") is not None else out.contiguous()
    residuals = Residuals.of(spec, q, k, v, out, lse.contiguous(), *grads)
    return [*by_kernels(launches, residuals, own), *of_inputs(residuals, arguments, wanted)]

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
    assert arguments.indices is not None
    table = self._indices(arguments)
    shape, keys, on_cpu = (
      sizes(table),
      cast(tuple[int, int], self.spec.pages)[1],
      target_of(self.device).device == "CPU",
    )
    outputs = _new(shape, self.device), _new(shape[:2], self.device)
    kernel = prepared(_listing, self.device, shape, len(arguments.indices) > 1, keys, on_cpu)
    call = kernel.call(*(x.uop for x in (*outputs, *map(in_memory, arguments.indices))), grad_fxn=no_further)
    table, counts = (Tensor(x.uop.after(call)) for x in outputs)
    return table, counts

  def _indices(self, arguments: Arguments) -> Tensor:
    assert arguments.indices is not None
    return arguments.indices[0]

  def _by_batches(self, x: Tensor) -> Tensor:
    """Return a result of sequences, (B * M, Hq, 1, ...), as (B, Hq, M, ...)."""
    queries, heads, _, *width = sizes(x)
    return x.reshape(queries // self.M, self.M, heads, *width).transpose(1, 2)


def as_sequences(x: Tensor) -> Tensor:
  """Return q, or what has its rows, (B, Hq, M, ...), as (B * M, Hq, 1, ...): each query is a sequence."""
  B, heads, M, *width = sizes(x)
  x = x.transpose(1, 2)
  found = x.reshape(B * M, heads, 1, *width)
  return found if layout_of(found.uop) is not None else x.contiguous().reshape(found.shape)


def _new(shape: Sequence[int], device: str, dtype: DType = dtypes.int) -> Tensor:
  return (
    Tensor.invalids(*shape, device=device, dtype=dtype)
    if in_function()
    else Tensor.empty(*shape, device=device, dtype=dtype)
  )


def _listing(shape: tuple[int, int, int], has_lengths: bool, keys: int, on_cpu: bool) -> tuple[UOp, Estimates]:
  shapes = [shape, shape[:2], shape] + [shape[:1]] * has_lengths
  table, counts, *given = (UOp.placeholder(x, dtypes.int, slot) for slot, x in enumerate(shapes))
  lengths = given[1] if has_lengths else None
  count = math.prod(shape)
  return typed(list_keys(table, counts, given[0], lengths, keys=keys, on_cpu=on_cpu)), Estimates(
    count, 8 * count, 8 * count
  )


def _counting(shape: tuple[int, int, int, int], top_k: int, on_cpu: bool) -> tuple[UOp, Estimates]:
  B, heads, M, _ = shape
  given = [(shape, count_dtype(top_k)), ((B * M, heads, top_k), dtypes.int), ((B * M, heads), dtypes.int)]
  chosen, table, counts = (UOp.placeholder(*x, slot) for slot, x in enumerate(given))
  moved = sum(math.prod(x) * dtype.itemsize for x, dtype in given)
  return typed(count_chosen(chosen, table, counts, on_cpu=on_cpu)), Estimates(B * M * heads * top_k, moved, moved)
