"""What `uopattn.bench` times: our kernel, other libraries' attention, and a matrix product to measure them by."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from uopattn.run import Problem, Usage, jitted, outputs, poison
from uopattn.threads import thread_count
from uopattn.verify import Gate, Report, numpy

PRODUCT = 2048  # rows and columns of the product's matrices
SMALL = 1 << 19  # scores of the largest problem that tinygrad's own attention is timed on


@dataclass(frozen=True)
class Runner:
  """An attention on given inputs.

  Attributes:
    call: computes it once, and returns when it is done.
    check: computes it once more and measures the result.
  """

  call: Callable[[], object]
  check: Callable[[Gate], list[Report]]


Contender = Callable[[Problem], Runner | None]
"""Sets a contender up for a problem; None where it sits the problem out."""


def uopattn(problem: Problem) -> Runner:
  """Our kernel, replayed by TinyJit; it writes the LSE too."""
  o, lse = outputs(problem.spec)
  call = jitted(problem, o, lse)
  for _ in range(2):  # compile, capture
    call()

  def check(gate: Gate) -> list[Report]:
    poison(o, lse)
    call()
    return [gate.output(numpy(o)), gate.lse(numpy(lse))]

  return Runner(call, check)


def load_tinygrad() -> Contender:
  """tinygrad's own attention, replayed by TinyJit; it keeps the scores in memory, so it sits large problems out."""

  def tinygrad(problem: Problem) -> Runner | None:
    s = problem.spec
    if s.B * s.Hq * s.M * s.N > SMALL:
      return None

    @TinyJit
    def attend() -> Tensor:  # on inputs that are bound when it is captured, as ours
      grouped = s.Hq != s.Hkv
      q, k, v = problem.q, problem.k, problem.v
      return q.scaled_dot_product_attention(k, v, is_causal=s.is_causal, enable_gqa=grouped).realize()

    def call() -> Tensor:
      out = attend()
      Device[Device.DEFAULT].synchronize()
      return out

    for _ in range(2):
      call()
    return Runner(call, lambda gate: [gate.output(numpy(call()))])

  return tinygrad


def load_torch() -> Contender:
  """torch's `scaled_dot_product_attention`, on as many threads as our kernels use."""
  torch = importlib.import_module("torch")
  torch.set_num_threads(thread_count())
  types: dict[DType, Any] = {
    dtypes.float32: torch.float32,
    dtypes.float16: torch.float16,
    dtypes.bfloat16: torch.bfloat16,
  }

  def attend(problem: Problem) -> Runner:
    s = problem.spec
    q, k, v = (torch.from_numpy(numpy(x).copy()).to(types[s.dtype]) for x in (problem.q, problem.k, problem.v))

    def call() -> Any:
      with torch.inference_mode():
        return torch.nn.functional.scaled_dot_product_attention(
          q, k, v, is_causal=s.is_causal, enable_gqa=s.Hq != s.Hkv
        )

    return Runner(call, lambda gate: [gate.output(call().float().numpy())])

  return attend


LOADERS: dict[str, Callable[[], Contender]] = {"torch": load_torch, "tinygrad": load_tinygrad}


def load(names: list[str]) -> dict[str, Contender]:
  """The contenders by name, ours first.

  Raises:
    Usage: a name is unknown, or its library cannot be imported.
  """
  found: dict[str, Contender] = {"uopattn": uopattn}
  for name in names:
    if name not in LOADERS:
      raise Usage(f"--against {name}: unknown; accepted are {', '.join(LOADERS)}")
    try:
      found[name] = LOADERS[name]()
    except ImportError as error:
      raise Usage(f"--against {name}: it cannot be imported: {error}") from error
  return found


def product() -> tuple[str, Callable[[], object]]:
  """A float32 product of square matrices of size PRODUCT, and whose it is: torch's, on our number of threads, or
  numpy's, on as many as its library takes, where there is no torch."""
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal((PRODUCT, PRODUCT), dtype=np.float32) for _ in range(2))
  try:
    torch = importlib.import_module("torch")
  except ImportError:
    return "numpy", lambda: a @ b
  torch.set_num_threads(thread_count())
  ta, tb = torch.from_numpy(a), torch.from_numpy(b)
  return "torch", lambda: ta @ tb


def versions(names: list[str]) -> dict[str, str]:
  """Of the contenders and of what computes the product."""
  return {name: version(name) for name in names}
