"""The speed of a schedule on a device, beside tinygrad's own attention and a matrix product."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad import Tensor

from uopattn.api.attention import scaled_dot_product_attention
from uopattn.dsl.rules.bias import Bias, IndexedBy
from uopattn.dsl.schedule import Schedule
from uopattn.measure.problem import normal, tensor
from uopattn.measure.timing import GRADIENT_COST, Runner, Turns, alternate, captured, is_slow, wait
from uopattn.plan.bias import with_bias
from uopattn.plan.dispatch import NoKernel, all_schedules_on, launches_of
from uopattn.plan.forward import forward
from uopattn.plan.gradient import by_kernels
from uopattn.plan.launch import Launch
from uopattn.plan.residuals import Residuals, no_further
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec
from uopattn.spec.tensors import dtype_name
from uopattn.trust.features import Sizes

# Sizes to time: the first that a schedule serves.
ON_GPU: tuple[Sizes, ...] = ((1, 16, 16, 4096, 4096, 128, 128), (1, 16, 16, 4096, 4096, 512, 512))
ON_CPU: tuple[Sizes, ...] = ((1, 8, 8, 1024, 1024, 64, 64),)
FEW_QUERIES: tuple[Sizes, ...] = ((8, 32, 8, 1, 4096, 128, 128), (8, 128, 1, 1, 4096, 576, 512))
MOST_SCORES = 1 << 29  # of tinygrad's own attention, which stores them
ROUNDS = 5
BIAS = Bias(False, True, IndexedBy.DISTANCES, (0, 0))  # as of relative positions
PRODUCT = {True: 1024, False: 4096}  # rows of the product's matrices, on slow devices and on others


def speed(kernel: str, backward: bool, device: str) -> dict[str, Any] | None:
  """Time a schedule with its first dtype on contiguous inputs without a mask; None if it serves none of the sizes.

  A schedule of biases computes the gradient of one per head and distance.

  Returns:
    "sizes", "dtype", and GFLOP/s of "uopattn", of "tinygrad" (not where its scores would take too much memory), and
    of tinygrad's matrix "product".
  """
  (schedule,) = (x for x in all_schedules_on(target_of(device), backward) if x.name == kernel)
  for sizes in _sizes(device, backward):
    q, k, v = _inputs(schedule, sizes, device)
    arguments = Arguments(enable_gqa=True, return_lse=True, **(_relative(sizes, device) if schedule.of_bias else {}))
    spec = make_spec(q, k, v, arguments)
    spec = with_bias(spec, BIAS) if schedule.of_bias else spec
    try:
      launches = launches_of(schedule, spec, target_of(device))
    except NoKernel:
      continue
    return _timed(launches, (q, k, v), arguments, backward, device) | {"sizes": sizes, "dtype": dtype_name(q.dtype)}
  return None


def _sizes(device: str, backward: bool) -> tuple[Sizes, ...]:
  large = ON_CPU if is_slow(device) else ON_GPU
  return large if backward else large + FEW_QUERIES


def _inputs(schedule: Schedule, sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
  (B, Hq, Hkv, M, N, Dk, Dv), random, dtype = sizes, np.random.default_rng(0), schedule.dtypes[0]
  shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv)
  q, k, v = (tensor(normal(shape, dtype, random, device), dtype, device) for shape in shapes)
  return q, k, (k[..., :Dv] if Dk != Dv else v)


def _relative(sizes: Sizes, device: str) -> dict[str, Any]:
  """Return the arguments of an attention with a bias per head and distance, as `BIAS` is."""
  _, Hq, _, M, N, *_ = sizes
  table = Tensor.rand(Hq, M + N - 1, device=device).realize()
  return {"score_mod": lambda score, b, h, i, j, table: score + table[h, j - i + M - 1], "aux": (table,)}


def _timed(
  launches: tuple[Launch, ...], qkv: tuple[Tensor, ...], arguments: Arguments, backward: bool, device: str
) -> dict[str, Any]:
  (q, k, v), spec = qkv, launches[0].spec
  runners: dict[str, Runner] = {}

  def add(name: str, compute: Callable[[], Any]) -> None:
    runners[name] = Runner(captured(lambda: Tensor.realize(*compute()))[0], list, wait=lambda: wait((device,)))

  if backward:
    out, lse, do = (Tensor.rand(*x, device=device) for x in (v.shape, (*q.shape[:3],), v.shape))
    residuals = Residuals.of(
      spec, q, k, v, *(x.contiguous().realize() for x in (out.cast(q.dtype), lse, do.cast(q.dtype)))
    )
    residuals = replace(residuals, delta=residuals.delta.realize())
    if spec.bias is not None:
      add("uopattn", lambda: launches[0].run(device, residuals.buffers(arguments), gradient=no_further).values())
    else:
      add("uopattn", lambda: by_kernels(launches, residuals, arguments))
  else:
    add("uopattn", lambda: forward(launches[-1], q, k, v))
    if math.prod((spec.B, spec.Hq, spec.M, spec.N)) <= MOST_SCORES:
      add("tinygrad", lambda: [scaled_dot_product_attention(q, k, v, enable_gqa=spec.group > 1)])
  n = PRODUCT[is_slow(device)]
  a, b = (Tensor.rand(n, n, device=device).cast(q.dtype).realize() for _ in range(2))
  add("product", lambda: [a @ b])
  times = alternate(runners, ROUNDS, Turns(warm=0.05, turn=0.05))
  # A bias needs two products, as many as a forward pass.
  cost = GRADIENT_COST if backward and spec.bias is None else 1
  work = dict.fromkeys(runners, spec.flops * cost) | {"product": 2 * n**3}
  return {name: work[name] / x.median / 1e9 for name, x in times.items()}
