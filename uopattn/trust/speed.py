"""The speed of a schedule on a device, beside tinygrad's own attention and a matrix product."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad import Tensor

from uopattn.api.attention import scaled_dot_product_attention
from uopattn.dsl.schedule import Schedule
from uopattn.measure.problem import normal, tensor
from uopattn.measure.timing import Runner, Turns, alternate, captured, is_slow, wait
from uopattn.plan.dispatch import NoKernel, launches_of, schedules_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import Residuals, by_kernels
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.spec.arguments import NO_ARGUMENTS, Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import dtype_name
from uopattn.trust.features import Sizes
from uopattn.tuning.trial import COST

# Sizes to time: the first that a schedule serves.
ON_GPU: tuple[Sizes, ...] = ((1, 16, 16, 4096, 4096, 128, 128), (1, 16, 16, 4096, 4096, 512, 512))
ON_CPU: tuple[Sizes, ...] = ((1, 8, 8, 1024, 1024, 64, 64),)
FEW_QUERIES: tuple[Sizes, ...] = ((8, 32, 8, 1, 4096, 128, 128), (8, 128, 1, 1, 4096, 576, 512))
MOST_SCORES = 1 << 29  # of tinygrad's own attention, which stores them
ROUNDS = 5
PRODUCT = {True: 1024, False: 4096}  # rows of the product's matrices, on slow devices and on others


def speed(kernel: str, backward: bool, device: str) -> dict[str, Any] | None:
  """Time a schedule with its first dtype on contiguous inputs without a mask; None if it serves none of the sizes.

  Returns:
    "sizes", "dtype", and GFLOP/s of "uopattn", of "tinygrad" (not where its scores would take too much memory), and
    of tinygrad's matrix "product".
  """
  (schedule,) = (x for x in schedules_on(target_of(device), backward) if x.name == kernel)
  for sizes in _sizes(device, backward):
    q, k, v = _inputs(schedule, sizes, device)
    spec = make_spec(q, k, v, Arguments(enable_gqa=True, return_lse=True))
    try:
      launches = launches_of(schedule, spec, target_of(device))
    except NoKernel:
      continue
    return _timed(spec, launches, (q, k, v), backward, device) | {"sizes": sizes, "dtype": dtype_name(q.dtype)}
  return None


def _sizes(device: str, backward: bool) -> tuple[Sizes, ...]:
  large = ON_CPU if is_slow(device) else ON_GPU
  return large if backward else large + FEW_QUERIES


def _inputs(schedule: Schedule, sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
  (B, Hq, Hkv, M, N, Dk, Dv), random, dtype = sizes, np.random.default_rng(0), schedule.dtypes[0]
  shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv)
  q, k, v = (tensor(normal(shape, dtype, random, device), dtype, device) for shape in shapes)
  return q, k, (k[..., :Dv] if Dk != Dv else v)


def _timed(
  spec: AttentionSpec, launches: tuple[Launch, ...], qkv: tuple[Tensor, ...], backward: bool, device: str
) -> dict[str, Any]:
  q, k, v = qkv
  runners: dict[str, Runner] = {}

  def add(name: str, compute: Callable[[], Any]) -> None:
    runners[name] = Runner(captured(lambda: Tensor.realize(*compute()))[0], list, wait=lambda: wait((device,)))

  if backward:
    out, lse, do = (Tensor.rand(*x, device=device) for x in (v.shape, (*q.shape[:3],), v.shape))
    residuals = Residuals.of(
      spec, q, k, v, *(x.contiguous().realize() for x in (out.cast(q.dtype), lse, do.cast(q.dtype)))
    )
    residuals = replace(residuals, delta=residuals.delta.realize())
    add("uopattn", lambda: by_kernels(launches, residuals, NO_ARGUMENTS))
  else:
    add("uopattn", lambda: forward(launches[-1], q, k, v))
    if math.prod((spec.B, spec.Hq, spec.M, spec.N)) <= MOST_SCORES:
      add("tinygrad", lambda: [scaled_dot_product_attention(q, k, v, enable_gqa=spec.group > 1)])
  n = PRODUCT[is_slow(device)]
  a, b = (Tensor.rand(n, n, device=device).cast(q.dtype).realize() for _ in range(2))
  add("product", lambda: [a @ b])
  times = alternate(runners, ROUNDS, Turns(warm=0.05, turn=0.05))
  work = dict.fromkeys(runners, spec.flops * (COST if backward else 1)) | {"product": 2 * n**3}
  return {name: work[name] / x.median / 1e9 for name, x in times.items()}
