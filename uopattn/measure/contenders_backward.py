"""Contenders of `uopattn.bench --backward`: our gradients and torch's, from outputs computed beforehand."""

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit

from uopattn.measure.command_line import Usage
from uopattn.measure.contenders import (
  Contender,
  Runner,
  on_cpu,
  sdpa,
  served,
  torch_types,
  torchs_context,
  torchs_runner,
)
from uopattn.measure.run import Problem, wait
from uopattn.measure.run import over_devices as forward_over_devices
from uopattn.plan.context_parallel import ContextParallel
from uopattn.plan.dispatch import NoKernel, backward_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import Residuals, by_kernels
from uopattn.plan.sharded import Sharded
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.machine import thread_count
from uopattn.spec.arguments import NO_ARGUMENTS, Arguments


def output_gradient(problem: Problem) -> Tensor:
  """Return a normal random gradient of the output, (B, Hq, M, Dv), the same in each call."""
  s = problem.spec
  array = np.random.default_rng(1).standard_normal((s.B, s.Hq, s.M, s.Dv), np.float32)
  return Tensor(array).cast(s.dtype).realize()


def uopattn(problem: Problem) -> Runner:
  """Set up our backward pass, replayed by TinyJit: all kernels, and the tinygrad operations around them.

  Raises:
    Usage: no kernel supports the problem.
  """
  p = problem
  if p.divided is not None:
    return over_devices(p, p.divided)
  try:
    launches = backward_on(p.spec, Device.DEFAULT)
  except NoKernel as error:
    raise Usage(str(error)) from error
  out, lse = forward(p.launch, p.q, p.k, p.v)
  Tensor.realize(out, lse)
  do = output_gradient(p)

  @TinyJit
  def run() -> list[Tensor]:
    grads = by_kernels(launches, Residuals.of(p.spec, p.q, p.k, p.v, out, lse, do), NO_ARGUMENTS)
    Tensor.realize(*grads)
    return grads

  for _ in range(2):  # compile, capture
    run()
  return Runner(run, lambda: [numpy(x) for x in run()], wait=wait)


def over_devices(p: Problem, divided: Sharded | ContextParallel) -> Runner:
  """Set up the backward pass of several devices."""
  out, lse = forward_over_devices(p)
  Tensor.realize(out, lse)
  do = output_gradient(p).shard(p.devices, p.q.uop.axis).realize()
  given = Arguments(is_causal=p.spec.is_causal, enable_gqa=True, return_lse=True)

  @TinyJit
  def run() -> list[Tensor]:
    grads = divided.gradients([out, lse], {"q": p.q, "k": p.k, "v": p.v}, [do, None], given, "kernel")
    found = [x for x in grads if x is not None]
    Tensor.realize(*found)
    return found

  for _ in range(2):  # compile, capture
    run()
  return Runner(run, lambda: [numpy(x) for x in run()], wait=lambda: wait(p.devices))


def loader(backend: str) -> Callable[[], Contender]:
  """Return the loader of torch's `scaled_dot_product_attention`: on a CPU if `backend` is "", else on a GPU by it."""

  def load_backend() -> Contender:
    torch = importlib.import_module("torch")
    if not backend:
      torch.set_num_threads(thread_count())

    def set_up(problem: Problem) -> Runner | None:
      s, device = problem.spec, "cuda" if backend else "cpu"
      if s.dtype not in (types := torch_types(torch)) or (backend and s.dtype.itemsize == 4):
        return None
      arrays = [numpy(x).copy() for x in (problem.q, problem.k, problem.v, output_gradient(problem))]
      with torchs_context() if backend else nullcontext():
        q, k, v, do = (torch.from_numpy(x).to(device, types[s.dtype]) for x in arrays)
      for x in (q, k, v):
        x.requires_grad_()

      @functools.cache
      def out() -> Any:
        return sdpa(torch, s, backend)(q, k, v)

      def call() -> Any:
        return torch.autograd.grad(out(), (q, k, v), do, retain_graph=True)

      def result() -> list[Array]:
        return [x.float().cpu().numpy() for x in call()]

      return served(f"torch {backend}", torchs_runner(call, result)) if backend else Runner(call, result)

    return set_up

  return load_backend


def load(names: list[str]) -> dict[str, Contender]:
  """Return the contenders by name, ours first; on a GPU, two backends of torch are contenders.

  Raises:
    Usage: a name is unknown, or its library cannot be imported.
  """
  found: dict[str, Contender] = {"uopattn": uopattn}
  for name in names:
    if name != "torch":
      raise Usage(f"--against {name}: with --backward the only contender is torch")
    try:
      backends = {"torch": ""} if on_cpu() else {"torch flash": "flash", "torch cudnn": "cudnn"}
      found |= {shown: loader(backend)() for shown, backend in backends.items()}
    except ImportError as error:
      raise Usage(f"--against {name}: it cannot be imported: {error}") from error
  return found
