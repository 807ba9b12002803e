"""Attention of sequences that are sharded over devices (context parallel).

Queries stay with their device, or go to the one that has as much work as the others; keys and values come in turns from
one device after another, as in Ring Attention (Liu, Zaharia and Abbeel, 2023). Each turn is an attention over the keys
of one device. The turns are joined by their LSE; their gradients use the output and the LSE of the whole, so that they
only need to be added up. Nothing depends on the kernel of the turn before but the joining, so the keys of the next turn
can be copied meanwhile.

Under a causal mask later queries see more keys. The queries are then cut into 2n chunks for n devices, and device i
computes chunks i and 2n - 1 - i, which makes the same number of pairs for all (zigzag, as in Llama 3's training).

If only keys are sharded, every device attends all queries to its own keys, and the results are joined on all devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.dsl import sizes
from uopattn.dsl.schedule import HEAD_SCALES
from uopattn.plan.dispatch import launch_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import Residuals, backward_launches, by_kernels, by_reference, laid_out, of_inputs
from uopattn.plan.launch import Launch
from uopattn.plan.reference import merged, reference
from uopattn.plan.sharded import Sharded, axes_of, differentiable_of, part_spec
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, four_axes
from uopattn.spec.expanded import folded
from uopattn.spec.layout import in_memory
from uopattn.spec.shards import (
  device_number,
  gathered,
  gradient_of,
  joined,
  part_of,
  per_device,
  picked,
  pieces,
  resharded,
  with_gradients,
)
from uopattn.spec.spec import AttentionSpec, make_spec

ROWS = 2  # the axis of queries and keys
Place = Callable[[Any], Any]  # the number of a device, an int or a UOp -> a number of a query or a key


@dataclass(frozen=True)
class Run:
  """Consecutive queries, or keys, of which each device has as many.

  Attributes:
    size: how many.
    first: the number of the first one on a device.
  """

  size: int
  first: Place


@dataclass(frozen=True, eq=False)
class ContextParallel:
  """An attention whose queries or keys are divided over devices.

  Attributes:
    spec: of the whole.
    arguments: of the whole, with a seed if weights are dropped.
    q_axis: ROWS if q is sharded, None if every device has all of it; the output likewise.
    runs: the queries that a device computes: one run, or two under a causal mask.
    turns: the keys of each turn.
  """

  devices: tuple[str, ...]
  spec: AttentionSpec
  arguments: Arguments
  q_axis: int | None
  runs: tuple[Run, ...]
  turns: tuple[Run, ...]

  @classmethod
  def of(
    cls, devices: tuple[str, ...], axes: Sequence[int | None], spec: AttentionSpec, arguments: Arguments
  ) -> "ContextParallel":
    """Decide which device computes what; `axes` are those along which q, k and v are sharded: ROWS or None."""
    n, (q_axis, *of_keys) = len(devices), axes
    causal = any(x.longest_last for x in spec.masks)
    rows_divided = q_axis == ROWS or (causal and not spec.is_decode and spec.M % (2 * n) == 0)
    runs: tuple[Run, ...] = (Run(spec.M, lambda i: 0),)
    if rows_divided and causal and spec.M % (2 * n) == 0:
      chunk = spec.M // (2 * n)
      runs = Run(chunk, lambda i: i * chunk), Run(chunk, lambda i: (2 * n - 1 - i) * chunk)
    elif rows_divided:
      size = spec.M // n
      runs = (Run(size, lambda i: i * size),)
    turns: tuple[Run, ...] = (Run(spec.N, lambda i: 0),)
    if ROWS in of_keys:
      keys = spec.N // n
      turns = tuple(Run(keys, _from_device(s, n, keys)) for s in range(n if rows_divided else 1))
    return cls(devices, spec, arguments, q_axis, runs, turns)

  @property
  def rows_divided(self) -> bool:
    return self.runs[0].size < self.spec.M

  @property
  def keys_divided(self) -> bool:
    return self.turns[0].size < self.spec.N

  def launch(self) -> dict[tuple[Run, Run], Launch]:
    """Return the launch of each turn of each run. Raises NoKernel."""
    device = self.devices[0]
    return {
      (run, turn): launch_on(self._spec(run, turn, self.arguments), device) for run in self.runs for turn in self.turns
    }

  def run(
    self,
    launches: dict[tuple[Run, Run], Launch] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    backend: str,
  ) -> Any:
    """Return the output and the LSE, sharded as q; see `Sharded.run`."""
    operands = {"q": q, "k": k, "v": v} | differentiable_of(arguments)
    outs, lses = [], []
    for run, q_run in zip(self.runs, self._runs_of(q), strict=True):
      if launches is None:
        given = q_run, gathered(k), gathered(v)
        out, lse = reference(*given, self._spec(run, None, arguments, given), self._arguments(run, None, arguments))
      else:
        out, lse = self._attend(launches, run, q_run, k, v, arguments)
      outs.append(out)
      lses.append(lse)
    backend = "reference" if launches is None else backend
    gradients = partial(self.gradients, arguments=arguments, backend=backend)
    return with_gradients([self._whole(x) for x in (outs, lses)], operands, gradients)

  def _attend(
    self, launches: dict[tuple[Run, Run], Launch], run: Run, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
  ) -> tuple[Tensor, Tensor]:
    """Compute one run of queries with kernels."""
    found: list[tuple[Tensor, ...]] = []
    for turn in self.turns:
      own = self._arguments(run, turn, arguments)
      found.append(forward(launches[run, turn], q, *self._keys_of(turn, k, v), arguments=own))
    if not self.keys_divided:
      out, lse = found[0]
      return out, lse
    if not self.rows_divided:
      found = [tuple(self._of_device(i, x) for x in found[0]) for i in range(len(self.devices))]
    sinks = None if arguments.sinks is None else gathered(arguments.sinks).float()
    outs, lses = zip(*found, strict=True)
    out, lse = merged(outs, lses, sinks)
    return out.contiguous(), lse.contiguous()

  def gradients(
    self,
    results: Sequence[Tensor],
    operands: dict[str, Tensor],
    grads: Sequence[Tensor | None],
    arguments: Arguments,
    backend: str,
  ) -> list[Tensor | None]:
    """Return the gradients of the operands; see `Sharded.gradients`."""
    (q, k, v, *others), names = operands.values(), list(operands)
    do = results[0].zeros_like() if grads[0] is None else grads[0].cast(results[0].dtype)
    nothing = [None] * len(self.runs)
    of_runs: list[Any] = [self._runs_of(x) for x in (q, *results, do)]
    of_runs.append(nothing if grads[1] is None else self._runs_of(grads[1].float()))
    dq: list[Tensor] = []
    dkv: dict[Run, list[tuple[Tensor, Tensor]]] = {turn: [] for turn in self.turns}
    more: list[list[Tensor | None]] = []
    for run, q_run, out, lse, do_run, dlse in zip(self.runs, *of_runs, strict=True):
      keys = gathered(k), gathered(v)
      spec, own = self._spec(run, None, arguments, (q_run, *keys)), self._arguments(run, None, arguments)
      residuals = Residuals(
        spec, q_run, *keys, out, lse, laid_out(do_run, spec), None if dlse is None else dlse.contiguous()
      )
      with_mask = self._with_whole_mask(own, run)
      if backend == "reference" or (specs := self._backward(run, arguments, backend)) is None:
        of_q, of_k, of_v, *rest = by_reference(residuals, with_mask)
        dq.append(cast(Tensor, of_q))
        dkv[self.turns[0]].append((cast(Tensor, of_k), cast(Tensor, of_v)))
        more.append(rest)
        continue
      parts = []
      for turn, launches in specs.items():
        spec = launches[0].spec
        k_turn, v_turn = self._keys_of(turn, k, v)
        part = replace(residuals, spec=spec, k=k_turn, v=v_turn, whole=residuals)
        of_q, of_k, of_v = by_kernels(launches, part, self._arguments(run, turn, arguments))
        parts.append(of_q)
        dkv[turn].append((of_k, of_v))
      dq.append(_sum(parts))
      more.append(of_inputs(residuals, with_mask))
    by_ops = backend == "reference" or specs is None
    found: list[Tensor | None] = [self._of_queries(q, dq)]
    found += [
      self._of_keys(x, [[pair[i] for pair in pairs] for pairs in dkv.values()], by_ops) for i, x in enumerate((k, v))
    ]
    for name, x, parts_ in zip(names[3:], others, zip(*more, strict=True), strict=True):
      found.append(None if parts_[0] is None else self._of_other(name, x, cast(list[Tensor], parts_)))
    return found

  def _backward(self, run: Run, arguments: Arguments, backend: str) -> dict[Run, tuple[Launch, ...]] | None:
    """Return the launches of the gradient of a run, by turns; None for plain ops."""
    found = {turn: backward_launches(self._spec(run, turn, arguments), self.devices, backend) for turn in self.turns}
    return None if None in found.values() else cast(dict[Run, tuple[Launch, ...]], found)

  def _of_queries(self, q: Tensor, parts: list[Tensor]) -> Tensor:
    if self.rows_divided:
      return self._whole(parts)
    return gradient_of(q, parts[0], None, summed=True)

  def _of_keys(self, x: Tensor, parts: list[list[Tensor]], by_ops: bool) -> Tensor:
    """Return the gradient of k or v from those of all turns and runs."""
    n, turns = len(self.devices), [_sum(x) for x in parts if x]
    if by_ops or not self.keys_divided:
      return gradient_of(x, turns[0], None, summed=self.rows_divided)
    size = self.turns[0].size
    home = [
      pieces(part, ROWS, [((i - s) % n, 0, size) for i in range(n)]) if s else part for s, part in enumerate(turns)
    ]
    return gradient_of(x, _sum(home), ROWS, summed=True)

  def _of_other(self, name: str, x: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the gradient of a mask, of sinks or of an aux from those of all runs."""
    if name.startswith("attn_mask") and sizes(x)[ROWS] > 1 and self.rows_divided:
      return resharded(self._whole(parts), x.uop.axis)
    return gradient_of(x, _sum(parts), None, summed=self.rows_divided)

  def _runs_of(self, x: Tensor, axis: int = ROWS) -> list[Tensor]:
    """Return the part of each run of a Tensor of all queries."""
    n, size = len(self.devices), self.runs[0].size
    if not self.rows_divided:
      return [in_memory(gathered(x))]
    if len(self.runs) == 1:
      return [in_memory(part_of(x, axis))]
    if x.uop.axis != axis:
      whole = gathered(x)
      return [pieces(whole, axis, [(i, run.first(i), size) for i in range(n)]) for run in self.runs]
    chunks = ([run.first(i) // size for i in range(n)] for run in self.runs)
    part = part_of(x, axis)
    return [pieces(part, axis, [(j // 2, j % 2 * size, size) for j in chunk]) for chunk in chunks]

  def _whole(self, parts: list[Tensor], axis: int = ROWS) -> Tensor:
    """Return a Tensor of all queries, sharded as q, from the part of each run."""
    n, size = len(self.devices), self.runs[0].size
    if not self.rows_divided:
      return parts[0]
    if len(parts) == 2:
      chunks = ([2 * i + half for i in range(n)] for half in range(2))
      halves = (
        picked([parts[j >= n] for j in chunk], axis, [(min(j, 2 * n - 1 - j), 0, size) for j in chunk])
        for chunk in chunks
      )
      parts = [Tensor.cat(*halves, dim=axis).contiguous()]
    found = joined(parts[0], axis)
    return found if self.q_axis == ROWS else gathered(found)

  def _keys_of(self, turn: Run, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of k and v for a turn."""
    if not self.keys_divided:
      return in_memory(k), in_memory(v)
    n, s = len(self.devices), self.turns.index(turn)
    parts = (in_memory(part_of(x, ROWS)) for x in (k, v))
    k, v = (pieces(x, ROWS, [((i + s) % n, 0, turn.size) for i in range(n)]) if s else x for x in parts)
    return k, v

  def _of_device(self, i: int, part: Tensor) -> Tensor:
    """Return the part of device i on all devices."""
    return Tensor(part.contiguous().uop.copy_to_device(self.devices, arg=i))

  def _spec(
    self, run: Run, turn: Run | None, arguments: Arguments, given: tuple[Tensor, Tensor, Tensor] | None = None
  ) -> AttentionSpec:
    """Return the spec of a turn of a run; None is all keys.

    Args:
      given: q, k and v of the turn, if they may be views.
    """
    s, keys = self.spec, self._keys(turn)
    own = self._arguments(run, turn, arguments)
    if given is None:
      shapes = ((s.B, s.Hq, run.size, s.Dk), s.dtype), *(((s.B, s.Hkv, keys.size, D), s.stored) for D in (s.Dk, s.Dv))
      given = cast(Any, tuple(Tensor.empty(*shape, dtype=dtype, device=self.devices) for shape, dtype in shapes))
    q, k, v = given
    made = make_spec(q, k, v, own)
    number = device_number(len(self.devices))
    made = part_spec(made, s, (0, 0, run.first(number), keys.first(number)))
    mask = arguments.block_mask
    if mask is not None and not mask.fits(*self._extent(run), *self._extent(keys)):
      log_once(
        "no tile of the block mask is skipped: its blocks do not end where the devices' parts of the sequence do"
      )
      made = replace(made, block_heads=None)
    return made

  def _keys(self, turn: Run | None) -> Run:
    return Run(self.spec.N, lambda i: 0) if turn is None else turn

  def _extent(self, run: Run) -> tuple[tuple[int, ...], int]:
    return tuple(run.first(i) for i in range(len(self.devices))), run.size

  def _arguments(self, run: Run, turn: Run | None, arguments: Arguments) -> Arguments:
    """Return the arguments of a turn of a run, whose queries and keys count from 0."""
    keys, index = self._keys(turn), self.runs.index(run)
    divided = keys.size < self.spec.N
    found: dict[str, Any] = {"aux": tuple(map(gathered, arguments.aux))}
    if any(x.by_position for x in self.spec.masks):
      found["q_start"] = self._moved(arguments.q_start, lambda i: run.first(i) - keys.first(i))
    if arguments.kv_lengths is not None:
      found["kv_lengths"] = self._moved(arguments.kv_lengths, lambda i: -keys.first(i))
    if arguments.bounds is not None:
      bounds = (self._runs_of(x, 0)[index] for x in arguments.bounds)
      found["bounds"] = tuple(self._moved(x, lambda i: -keys.first(i)) for x in bounds)
    if arguments.attn_mask is not None:
      mask = folded(four_axes(arguments.attn_mask))
      mask = self._runs_of(mask)[index] if sizes(mask)[ROWS] > 1 else gathered(mask)
      if divided and sizes(mask)[3] > 1:
        mask = pieces(mask.contiguous(), 3, [(i, first, keys.size) for i, first in enumerate(self._extent(keys)[0])])
      found["attn_mask"] = mask
    if arguments.sinks is not None:  # they join the sum once, when the turns are joined
      found["sinks"] = None if divided else gathered(arguments.sinks)
    scales = ((name, getattr(arguments, name)) for name in HEAD_SCALES)
    found |= {name: gathered(x) for name, x in scales if x is not None}
    if arguments.block_mask is not None:
      found["block_mask"] = arguments.block_mask.within(self.devices, *self._extent(run), *self._extent(keys))
    return replace(arguments, **found)

  def _moved(self, x: int | UOp | Tensor, by: Place) -> Tensor:
    """Return a position, or one of each query, moved by as much as `by` says for each device.

    A Tensor, so that one kernel serves all runs and all turns.
    """
    moves = [by(i) for i in range(len(self.devices))]
    if isinstance(x, int):
      return per_device([x + move for move in moves for _ in range(self.spec.B)], self.devices)
    start = gathered(x) if isinstance(x, Tensor) else Tensor(x).expand(self.spec.B).cast(dtypes.int)
    return start + per_device(moves, self.devices)

  def _with_whole_mask(self, own: Arguments, run: Run) -> Arguments:
    """Return the arguments of a run for the gradient of its mask, in the shape that the user gave it."""
    mask = self.arguments.attn_mask
    if mask is None or own.attn_mask is None:
      return own
    shape = sizes(four_axes(mask))
    shape = (*shape[:2], run.size if shape[ROWS] > 1 else 1, shape[3])
    return replace(own, attn_mask=own.attn_mask.expand(shape).detach())


def _from_device(turn: int, n: int, keys: int) -> Place:
  """Return the first key of a turn, which is one of the keys of the device that is `turn` further on."""
  return lambda i: (i + turn) % n * keys


def divided(
  q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, arguments: Arguments
) -> Sharded | ContextParallel | None:
  """Return how several devices divide an attention; None for one device. Raises ValueError if they cannot."""
  if not isinstance(q.device, tuple):
    return None
  axes = axes_of(q, k, v, spec)
  if ROWS in axes:
    return ContextParallel.of(q.device, axes, spec, arguments)
  return Sharded.of(q, k, v, next((x for x in axes if x is not None), None), spec, arguments)


def _sum(parts: Sequence[Tensor]) -> Tensor:
  """Add up in float32, in the dtype of the parts."""
  return (
    parts[0] if len(parts) == 1 else reduce(Tensor.add, (x.float() for x in parts)).cast(parts[0].dtype).contiguous()
  )
