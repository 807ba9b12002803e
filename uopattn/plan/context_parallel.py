"""Attention of sequences that are sharded over devices (context parallel).

Queries stay with their device, or go to the one that has as much work as the others. Keys and values go round the
devices in ring steps, as in Ring Attention (Liu, Zaharia and Abbeel, 2023). Each step is an attention over the keys of
one device. The steps are joined by their LSE; their gradients use the output and the LSE of the whole, so that they
only need to be added up. Nothing depends on the kernel of the step before but the joining, so the keys of the next step
can be copied meanwhile.

Under a causal mask later queries see more keys. The queries are then cut into 2n chunks for n devices, and device i
computes chunks i and 2n - 1 - i, which makes the same number of pairs for all (zigzag, as in Llama 3's training).

If only keys are sharded, every device attends all queries to its own keys, and the results are joined on all devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.dsl import sizes
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.schedule import HEAD_SCALES
from uopattn.plan.dispatch import launch_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import GradientCall, backward_launches, by_kernels, by_reference, of_inputs
from uopattn.plan.launch import Launch
from uopattn.plan.reference import merged_states, reference
from uopattn.plan.residuals import Residuals
from uopattn.plan.sharded import shard_spec
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, four_axes
from uopattn.spec.layout import folded, in_memory
from uopattn.spec.shards import (
  device_number,
  gathered,
  gradient_of,
  joined,
  per_device,
  picked,
  pieces,
  resharded,
  shard_of,
)
from uopattn.spec.spec import AttentionSpec, make_spec

SEQUENCE = 2  # the axis of queries and keys
Offset = Callable[[Any], Any]  # the number of a device, an int or a UOp -> a number of queries or keys


@dataclass(frozen=True)
class Chunk:
  """Consecutive queries, or keys, the same number on each device.

  Attributes:
    size: how many.
    first: the number of the first one on a device.
  """

  size: int
  first: Offset


@dataclass(frozen=True, eq=False)
class ContextParallel:
  """An attention whose queries or keys are divided over devices.

  Attributes:
    spec: of the whole.
    arguments: of the whole, with a seed if weights are dropped.
    q_axis: SEQUENCE if q is sharded, None if every device has all of it; the output likewise.
    chunks: the queries that a device computes: one chunk, or two under a causal mask.
    steps: the keys of each ring step.
  """

  devices: tuple[str, ...]
  spec: AttentionSpec
  arguments: Arguments
  q_axis: int | None
  chunks: tuple[Chunk, ...]
  steps: tuple[Chunk, ...]

  @classmethod
  def of(
    cls, devices: tuple[str, ...], axes: Sequence[int | None], spec: AttentionSpec, arguments: Arguments
  ) -> "ContextParallel":
    """Decide which device computes what; `axes` are those along which q, k and v are sharded: SEQUENCE or None."""
    n, (q_axis, *of_keys) = len(devices), axes
    zigzag = any(x.longest_last for x in spec.masks) and spec.M % (2 * n) == 0
    rows_divided = q_axis == SEQUENCE or (zigzag and not spec.is_decode)
    chunks: tuple[Chunk, ...] = (_all(spec.M),)
    steps: tuple[Chunk, ...] = (_all(spec.N),)
    if rows_divided:
      size = spec.M // (2 * n if zigzag else n)
      chunks = (Chunk(size, lambda i: i * size),)
      chunks += (Chunk(size, lambda i: (2 * n - 1 - i) * size),) if zigzag else ()
    if SEQUENCE in of_keys:
      keys = spec.N // n
      steps = tuple(Chunk(keys, _from_device(s, n, keys)) for s in range(n if rows_divided else 1))
    return cls(devices, spec, arguments, q_axis, chunks, steps)

  @property
  def rows_divided(self) -> bool:
    return self.chunks[0].size < self.spec.M

  @property
  def keys_divided(self) -> bool:
    return self.steps[0].size < self.spec.N

  def launch(self) -> dict[tuple[Chunk, Chunk], Launch]:
    """Return the launch of each step of each chunk. Raises NoKernel."""
    both = [(chunk, step) for chunk in self.chunks for step in self.steps]
    return {x: launch_on(self._spec(*x, self.arguments), self.devices[0]) for x in both}

  def forward(
    self, launches: dict[tuple[Chunk, Chunk], Launch] | None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
  ) -> tuple[Tensor, Tensor]:
    chunk_results = []
    for chunk, q_chunk in zip(self.chunks, self._chunks_of(q), strict=True):
      if launches is None:
        qkv, own = (q_chunk, gathered(k), gathered(v)), self._arguments(chunk, None, arguments)
        chunk_results.append(reference(*qkv, self._spec(chunk, None, arguments, qkv), own))
      else:
        chunk_results.append(self._attend(launches, chunk, q_chunk, k, v, arguments))
    outs, lses = zip(*chunk_results, strict=True)
    return self._whole(outs), self._whole(lses)

  def _attend(
    self,
    launches: dict[tuple[Chunk, Chunk], Launch],
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
  ) -> tuple[Tensor, Tensor]:
    """Compute one chunk of queries with kernels."""
    partials: list[tuple[Tensor, ...]] = []
    for step in self.steps:
      own = self._arguments(chunk, step, arguments)
      partials.append(forward(launches[chunk, step], q, *self._keys_of(step, k, v), arguments=own))
    if not self.keys_divided:
      out, lse = partials[0]
      return out, lse
    if not self.rows_divided:
      partials = [tuple(self._of_device(i, x) for x in partials[0]) for i in range(len(self.devices))]
    sinks = None if arguments.sinks is None else gathered(arguments.sinks).float()
    outs, lses = zip(*partials, strict=True)
    out, lse = merged_states(outs, lses, sinks)
    return out.contiguous(), lse.contiguous()

  def gradients(self, call: GradientCall) -> list[Tensor | None]:
    q, k, v, *others = call.operands.values()
    inputs = [[None] * len(self.chunks) if x is None else self._chunks_of(x) for x in (q, *call.results, *call.grads)]
    chunk_gradients = [self._gradients_of(call, chunk, *x) for chunk, *x in zip(self.chunks, *inputs, strict=True)]
    of_q, of_keys, of_others = zip(*chunk_gradients, strict=True)
    of_steps = list(zip(*of_keys, strict=True))
    dkv = [self._of_keys(x, [[pair[i] for pair in step] for step in of_steps]) for i, x in enumerate((k, v))]
    named = zip(list(call.operands)[3:], others, zip(*of_others, strict=True), strict=True)
    rest = (None if xs[0] is None else self._of_other(name, whole, xs) for name, whole, xs in named)
    return [self._whole(of_q), *dkv, *rest]

  def _gradients_of(
    self,
    call: GradientCall,
    chunk: Chunk,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
  ) -> tuple[Tensor, Sequence[tuple[Tensor | None, Tensor | None]], list[Tensor | None]]:
    """Return the gradients of a chunk: of q, of the keys and values of each step, and of the other operands.

    Plain ops compute those of all keys and values in one, and leave out some; see `by_reference`.
    """
    k, v, arguments = call.operands["k"], call.operands["v"], call.arguments
    qkv = q, gathered(k), gathered(v)
    spec, own = self._spec(chunk, None, arguments, qkv), self._arguments(chunk, None, arguments)
    launches = [backward_launches(self._spec(chunk, x, arguments), self.devices, call.backend) for x in self.steps]
    if None in launches:
      dq, dk, dv, *rest = by_reference(spec, *qkv, own, (do, dlse))
      return cast(Tensor, dq), [(dk, dv)], rest
    residuals, of_q, of_keys = Residuals.of(spec, *qkv, out, lse, do, dlse), [], []
    for step, of_step in zip(self.steps, cast(list[tuple[Launch, ...]], launches), strict=True):
      k_step, v_step = self._keys_of(step, k, v)
      of_this = replace(residuals, spec=of_step[0].spec, k=k_step, v=v_step)
      dq, dk, dv = by_kernels(of_step, of_this, self._arguments(chunk, step, arguments))
      of_q.append(dq)
      of_keys.append((dk, dv))
    # If each device has all queries, it has gone through its own keys.
    dq = _sum(of_q) if self.rows_divided else gradient_of(call.operands["q"], _sum(of_q), None, summed=True)
    return dq, of_keys, of_inputs(residuals, own, call.wanted)

  def _of_keys(self, x: Tensor, grads: list[list[Tensor | None]]) -> Tensor | None:
    """Return the gradient of k or v from those of each step, a list of those of each chunk; None if these are None."""
    of_steps = [[grad for grad in of_chunks if grad is not None] for of_chunks in grads]
    if not all(of_steps):
      return None
    n, steps = len(self.devices), [_sum(of_chunks) for of_chunks in of_steps]
    if sizes(steps[0])[SEQUENCE] == self.spec.N:
      return gradient_of(x, steps[0], None, summed=self.rows_divided)
    size = self.steps[0].size
    home = [
      pieces(grad, SEQUENCE, [((i - s) % n, 0, size) for i in range(n)]) if s else grad for s, grad in enumerate(steps)
    ]
    return gradient_of(x, _sum(home), SEQUENCE, summed=True)

  def _of_other(self, name: str, x: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Return the gradient of a mask, of sinks or of an aux from those of all chunks."""
    if name == "attn_mask" and sizes(x)[SEQUENCE] > 1 and self.rows_divided:
      return resharded(self._whole(grads), x.uop.axis)
    return gradient_of(x, _sum(grads), None, summed=self.rows_divided)

  def _chunks_of(self, x: Tensor, axis: int = SEQUENCE) -> list[Tensor]:
    """Return the rows of each chunk, from a Tensor of all queries."""
    n, size = len(self.devices), self.chunks[0].size
    if not self.rows_divided:
      return [in_memory(gathered(x))]
    if len(self.chunks) == 1:
      return [in_memory(shard_of(x, axis))]
    if x.uop.axis != axis:
      whole = gathered(x)
      return [pieces(whole, axis, [(i, chunk.first(i), size) for i in range(n)]) for chunk in self.chunks]
    shard, numbers = shard_of(x, axis), ([chunk.first(i) // size for i in range(n)] for chunk in self.chunks)
    return [pieces(shard, axis, [(j // 2, j % 2 * size, size) for j in of_devices]) for of_devices in numbers]

  def _whole(self, chunks: Sequence[Tensor]) -> Tensor:
    """Return a Tensor of all queries, sharded as q, from the rows of each chunk."""
    n, size = len(self.devices), self.chunks[0].size
    if not self.rows_divided:
      return chunks[0]
    if len(chunks) == 2:
      numbers = ([2 * i + half for i in range(n)] for half in range(2))
      halves = (
        picked([chunks[j >= n] for j in of_devices], SEQUENCE, [(min(j, 2 * n - 1 - j), 0, size) for j in of_devices])
        for of_devices in numbers
      )
      chunks = [Tensor.cat(*halves, dim=SEQUENCE).contiguous()]
    whole = joined(chunks[0], SEQUENCE)
    return whole if self.q_axis == SEQUENCE else gathered(whole)

  def _keys_of(self, step: Chunk, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return each device's rows of k and v for a step."""
    if not self.keys_divided:
      return in_memory(k), in_memory(v)
    n, s = len(self.devices), self.steps.index(step)
    shards = (in_memory(shard_of(x, SEQUENCE)) for x in (k, v))
    k, v = (pieces(x, SEQUENCE, [((i + s) % n, 0, step.size) for i in range(n)]) if s else x for x in shards)
    return k, v

  def _of_device(self, i: int, shard: Tensor) -> Tensor:
    """Return the shard of device i on all devices."""
    return Tensor(shard.contiguous().uop.copy_to_device(self.devices, arg=i))

  def _spec(
    self, chunk: Chunk, step: Chunk | None, arguments: Arguments, qkv: tuple[Tensor, Tensor, Tensor] | None = None
  ) -> AttentionSpec:
    """Return the spec of a step of a chunk; None is all keys.

    Args:
      qkv: q, k and v of the step, if they may be views.
    """
    s, keys = self.spec, self._keys(step)
    own = self._arguments(chunk, step, arguments)
    if qkv is None:
      shapes = ((s.B, s.Hq, chunk.size, s.Dk), s.dtype), *(((s.B, s.Hkv, keys.size, D), s.stored) for D in (s.Dk, s.Dv))
      qkv = cast(Any, tuple(Tensor.empty(*shape, dtype=dtype, device=self.devices) for shape, dtype in shapes))
    q, k, v = qkv
    made = make_spec(q, k, v, own)
    number = device_number(len(self.devices))
    made = shard_spec(made, s, (0, 0, chunk.first(number), keys.first(number)))
    mask = arguments.block_mask
    if mask is not None and not mask.fits(*self._extent(chunk), *self._extent(keys)):
      log_once(
        "no tile of the block mask is skipped: its blocks do not end where the devices' shards of the sequence do"
      )
      made = replace(made, block_heads=None)
    return made

  def _keys(self, step: Chunk | None) -> Chunk:
    return _all(self.spec.N) if step is None else step

  def _extent(self, chunk: Chunk) -> tuple[tuple[int, ...], int]:
    return tuple(chunk.first(i) for i in range(len(self.devices))), chunk.size

  def _arguments(self, chunk: Chunk, step: Chunk | None, arguments: Arguments) -> Arguments:
    """Return the arguments of a step of a chunk, whose queries and keys count from 0."""
    keys, index = self._keys(step), self.chunks.index(chunk)
    divided = keys.size < self.spec.N
    changes: dict[str, Any] = {"aux": tuple(map(gathered, arguments.aux))}
    if any(x.by_position for x in self.spec.masks):
      changes["q_start"] = self._moved(arguments.q_start, lambda i: chunk.first(i) - keys.first(i))
    if arguments.kv_lengths is not None:
      changes["kv_lengths"] = self._moved(arguments.kv_lengths, lambda i: -keys.first(i))
    if arguments.bounds is not None:
      bounds = (self._chunks_of(x, 0)[index] for x in arguments.bounds)
      changes["bounds"] = tuple(self._moved(x, lambda i: -keys.first(i)) for x in bounds)
    if arguments.attn_mask is not None:
      B, Hq, M, N = sizes(four_axes(arguments.attn_mask))
      mask = folded(four_axes(arguments.attn_mask))
      mask = self._chunks_of(mask)[index] if sizes(mask)[SEQUENCE] > 1 else gathered(mask)
      if divided and sizes(mask)[3] > 1:
        mask = pieces(mask.contiguous(), 3, [(i, first, keys.size) for i, first in enumerate(self._extent(keys)[0])])
      changes["attn_mask"] = mask.expand(B, Hq, min(M, chunk.size), min(N, keys.size))
    if arguments.sinks is not None:  # they join the sum once, when the steps are joined
      changes["sinks"] = None if divided else gathered(arguments.sinks)
    scales = ((name, getattr(arguments, name)) for name in HEAD_SCALES)
    changes |= {name: gathered(x) for name, x in scales if x is not None}
    if arguments.block_mask is not None:
      changes["block_mask"] = arguments.block_mask.within(self.devices, *self._extent(chunk), *self._extent(keys))
    return replace(arguments, **changes)

  def _moved(self, x: int | UOp | Tensor, by: Offset) -> Tensor:
    """Return a position, or one of each query, moved by as much as `by` says for each device.

    A Tensor, so that one kernel serves all chunks and all steps.
    """
    moves = [by(i) for i in range(len(self.devices))]
    if isinstance(x, int):
      return per_device([x + move for move in moves for _ in range(self.spec.B)], self.devices)
    start = gathered(x).clip(-FAR, FAR) if isinstance(x, Tensor) else Tensor(x).expand(self.spec.B).cast(dtypes.int)
    return start + per_device(moves, self.devices)


def _all(size: int) -> Chunk:
  """Return all queries, or all keys, as one chunk of every device."""
  return Chunk(size, lambda i: 0)


def _from_device(step: int, n: int, keys: int) -> Offset:
  """Return the first key of ring step `step`, in which a device has the keys of the one `step` devices after it."""
  return lambda i: (i + step) % n * keys


def _sum(terms: Sequence[Tensor]) -> Tensor:
  """Add up in float32, in the dtype of the terms."""
  return (
    terms[0] if len(terms) == 1 else reduce(Tensor.add, (x.float() for x in terms)).cast(terms[0].dtype).contiguous()
  )
