"""Contenders of `uopattn.bench`: our kernel, other libraries' attention, and a matrix product or a read as a limit."""

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.schedule import FEW
from uopattn.measure.bandwidth import READ, reader
from uopattn.measure.command_line import Usage
from uopattn.measure.run import Problem, poison, replayed, wait
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.machine import installed_version, thread_count
from uopattn.spec.spec import AttentionSpec

PRODUCT = 2048  # rows and columns of the product's matrices on a CPU
GPU_PRODUCT = 8192  # rows and columns of the product's matrices on a GPU
GPU_READ = 1 << 31  # bytes, many times the size of a GPU's cache
LONG = 0.02  # target seconds of one call on a GPU that does FAST floating-point operations per second
FAST = 4e14
MOST, MOST_DIVIDED = 400, 20  # computations per call, at most, and if several devices divide it: captured one by one
SMALL = 1 << 19  # scores of the largest problem on which tinygrad's own attention is timed


@dataclass(frozen=True)
class Runner:
  """An attention on given inputs.

  Attributes:
    call: computes it `times` times, or launches that on a device.
    result: computes it once more, into cleared outputs; returns the output, and the LSE if there is one.
    times: computations per call.
    wait: returns when all calls so far are done.
  """

  call: Callable[[], object]
  result: Callable[[], list[Array]]
  times: int = 1
  wait: Callable[[], object] = lambda: None


Contender = Callable[[Problem], Runner | None]
"""A function that sets up a contender for a problem; it returns None to skip the problem."""


def uopattn(problem: Problem) -> Runner:
  """Set up our kernel, replayed by TinyJit; it also writes the LSE."""
  times = repeats(problem.spec, most=MOST if problem.divided is None else MOST_DIVIDED)
  call = replayed(problem, times)
  call()  # compiles
  o, lse = call()  # captures: from here on the outputs are these

  def result() -> list[Array]:
    poison(o, lse)
    wait(problem.devices)  # tinygrad orders a replay after the work of one device, not of all
    return [numpy(x) for x in call()]

  return Runner(call, result, times, lambda: wait(problem.devices))


def on_cpu() -> bool:
  """Return whether tinygrad's default device is a CPU."""
  return Device.DEFAULT.split(":")[0] == "CPU"


def repeats(spec: AttentionSpec, device: str | None = None, most: int = MOST) -> int:
  """Return the computations per call: 1 on a CPU, on a GPU enough to make the cost of starting a call negligible."""
  kind = (device or Device.DEFAULT).split(":")[0]
  return 1 if kind == "CPU" else max(1, min(most, int(LONG / (spec.flops / FAST))))


def load_tinygrad() -> Contender:
  """Return tinygrad's own attention, replayed by TinyJit; it skips large problems because it stores all scores."""

  def tinygrad(problem: Problem) -> Runner | None:
    s = problem.spec
    if s.B * s.Hq * s.M * s.N > SMALL:
      return None

    @TinyJit
    def attend() -> Tensor:  # its inputs are bound when it is captured, as ours are
      grouped = s.Hq != s.Hkv
      q, k, v = problem.q, problem.k, problem.v
      return q.scaled_dot_product_attention(k, v, is_causal=s.is_causal, enable_gqa=grouped).realize()

    def call() -> Tensor:
      out = attend()
      wait()
      return out

    for _ in range(2):
      call()
    return Runner(call, lambda: [numpy(call())])

  return tinygrad


def torch_types(torch: Any) -> dict[DType, Any]:
  """Return torch's dtype for each dtype that its attention takes."""
  return {dtypes.float32: torch.float32, dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16}


def load_torch() -> Contender:
  """Return torch's `scaled_dot_product_attention`, on as many threads as our kernels use."""
  torch = importlib.import_module("torch")
  torch.set_num_threads(thread_count())

  def attend(problem: Problem) -> Runner:
    s, types = problem.spec, torch_types(torch)
    q, k, v = (torch.from_numpy(numpy(x).copy()).to(types[s.dtype]) for x in (problem.q, problem.k, problem.v))
    once = sdpa(torch, s)

    def call() -> Any:
      with torch.inference_mode():
        return once(q, k, v)

    return Runner(call, lambda: [call().float().numpy()])

  return attend


def gpu_loader(backend: str) -> Callable[[], Contender]:
  """Return the loader of torch's attention by one of its GPU backends: "flash", "cudnn" or "flex"."""

  def load_backend() -> Contender:
    torch = importlib.import_module("torch")

    def attend(problem: Problem) -> Runner | None:
      s, types = problem.spec, torch_types(torch)
      if s.dtype == dtypes.float32:
        return None
      arrays = [numpy(x) for x in (problem.q, problem.k, problem.v)]
      with torchs_context():
        q, k, v = (torch.from_numpy(x).to("cuda", types[s.dtype]) for x in arrays)
        once, times = _flex(torch, s) if backend == "flex" else sdpa(torch, s, backend), repeats(problem.spec)

      def call() -> Any:
        with torch.inference_mode():
          for _ in range(times):
            out = once(q, k, v)
        return out

      return served(f"torch {backend}", torchs_runner(call, lambda: [call().float().cpu().numpy()], times))

    return attend

  return load_backend


@contextmanager
def torchs_context() -> Iterator[None]:
  """Make the primary context of the first GPU current inside the `with` block, as torch expects.

  tinygrad has a context of its own and launches its graphs in the current one. Launched in torch's context, they would
  not be finished when tinygrad's synchronize returns.
  """
  from tinygrad.runtime.ops_cuda import check, cuda

  context = cuda.CUcontext()
  check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
  check(cuda.cuCtxPushCurrent_v2(context))
  try:
    yield
  finally:
    check(cuda.cuCtxPopCurrent_v2(ctypes.byref(context)))


def torchs_runner(call: Callable[[], Any], result: Callable[[], list[Array]], times: int = 1) -> Runner:
  """Return a runner whose functions execute in torch's context on a GPU."""
  torch = importlib.import_module("torch")
  return Runner(torchs_context()(call), torchs_context()(result), times, torchs_context()(torch.cuda.synchronize))


def served(name: str, runner: Runner) -> Runner | None:
  """Return the runner; if its backend does not support the case, print why and return None."""
  try:
    runner.call()
    runner.wait()
  except RuntimeError as error:
    print(f"{name} sits this out: {str(error).splitlines()[0]}")
    return None
  return runner


def sdpa(torch: Any, s: AttentionSpec, backend: str = "") -> Callable[..., Any]:
  """Return torch's attention as a function of q, k and v; without a backend torch chooses one."""
  attention = importlib.import_module("torch.nn.attention")
  of_name = {"flash": attention.SDPBackend.FLASH_ATTENTION, "cudnn": attention.SDPBackend.CUDNN_ATTENTION}

  def once(q: Any, k: Any, v: Any) -> Any:
    with attention.sdpa_kernel([of_name[backend]]) if backend else nullcontext():
      return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=s.is_causal, enable_gqa=s.Hq != s.Hkv)

  return once


def _flex(torch: Any, s: AttentionSpec) -> Callable[..., Any]:
  flex = importlib.import_module("torch.nn.attention.flex_attention")
  torch.compiler.reset()  # without a reset, torch.compile gives up after a few shapes
  compiled = torch.compile(flex.flex_attention, dynamic=False)
  mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, s.M, s.N) if s.is_causal else None
  return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=s.Hq != s.Hkv)


LOADERS: dict[str, Callable[[], Contender]] = {"torch": load_torch, "tinygrad": load_tinygrad}
GPU_LOADERS: dict[str, Callable[[], Contender]] = {
  "torch flash": gpu_loader("flash"),
  "torch cudnn": gpu_loader("cudnn"),
  "torch flex": gpu_loader("flex"),
}


def load(names: list[str]) -> dict[str, Contender]:
  """Return the contenders by name, ours first; on a GPU, each backend of torch is a contender.

  Raises:
    Usage: a name is unknown, or its library cannot be imported.
  """
  found: dict[str, Contender] = {"uopattn": uopattn}
  for name in names:
    if name not in LOADERS:
      raise Usage(f"--against {name}: unknown; accepted are {', '.join(LOADERS)}")
    try:
      if name == "torch" and not on_cpu():
        found |= {backend: loader() for backend, loader in GPU_LOADERS.items()}
      else:
        found[name] = LOADERS[name]()
    except ImportError as error:
      raise Usage(f"--against {name}: it cannot be imported: {error}") from error
  return found


@dataclass(frozen=True)
class Limit:
  """An upper bound of the speed on this machine.

  Attributes:
    name: "read", or the library of the matrix product.
    runner: computes the read or the product.
    flops: floating-point operations of a product.
    moved: bytes of a read.
  """

  name: str
  runner: Runner
  flops: int = 0
  moved: int = 0


def limit(s: AttentionSpec) -> Limit | None:
  """Return the limit of an attention: a large read with few queries, else a product; None on a GPU without torch."""
  if s.M > FEW:
    return product()
  return Limit("read", Runner(reader(READ), list), moved=READ) if on_cpu() else _gpu_read()


def product() -> Limit | None:
  """Return a product of square matrices as a limit.

  On a CPU the matrices are float32 of size PRODUCT; torch multiplies them on our number of threads, or without torch
  numpy, on as many threads as its library uses. On a GPU they are float16 of size GPU_PRODUCT; torch multiplies them,
  and without torch the result is None.
  """
  if not on_cpu():
    return _gpu_product()
  flops = 2 * PRODUCT**3
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal((PRODUCT, PRODUCT), dtype=np.float32) for _ in range(2))
  try:
    torch = importlib.import_module("torch")
  except ImportError:
    return Limit("numpy", Runner(lambda: a @ b, list), flops)
  torch.set_num_threads(thread_count())
  ta, tb = torch.from_numpy(a), torch.from_numpy(b)
  return Limit("torch", Runner(lambda: ta @ tb, list), flops)


def _gpu_product() -> Limit | None:
  try:
    torch = importlib.import_module("torch")
  except ImportError:
    return None
  with torchs_context():
    a, b = (torch.randn(GPU_PRODUCT, GPU_PRODUCT, device="cuda", dtype=torch.float16) for _ in range(2))
  return Limit("torch", torchs_runner(lambda: a @ b, list), 2 * GPU_PRODUCT**3)


def _gpu_read() -> Limit | None:
  """Return torch's sum of GPU_READ bytes of float16 as a limit."""
  try:
    torch = importlib.import_module("torch")
  except ImportError:
    return None
  with torchs_context():
    x = torch.ones(GPU_READ // 2, device="cuda", dtype=torch.float16)
  return Limit("read", torchs_runner(x.sum, list), moved=GPU_READ)


def product_size() -> int:
  """Return the number of rows and columns of the product's matrices."""
  return PRODUCT if on_cpu() else GPU_PRODUCT


def versions(names: list[str]) -> dict[str, str]:
  """Return the versions of the libraries in `names`, which are contenders and limits."""
  return {name: installed_version(name) or "unknown" for name in dict.fromkeys(name.split()[0] for name in names)}
