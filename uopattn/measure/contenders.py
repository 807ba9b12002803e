"""What `uopattn.bench` times: our kernel, other libraries' attention, and a product or a read to measure by."""

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
from uopattn.measure.run import Problem, jitted, outputs, poison, wait
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.machine import installed_version
from uopattn.runtime.threads import thread_count
from uopattn.spec.spec import AttentionSpec

PRODUCT = 2048  # rows and columns of the product's matrices
GPU_PRODUCT = 8192  # the same on a GPU
GPU_READ = 1 << 31  # bytes, many times what a GPU's cache holds
LONG = 0.02  # seconds that one call is to last on a GPU of FAST floating-point operations a second
FAST = 4e14
MOST = 400  # computations in one call
SMALL = 1 << 19  # scores of the largest problem that tinygrad's own attention is timed on


@dataclass(frozen=True)
class Runner:
  """An attention on given inputs.

  Attributes:
    call: computes it `times` times, or has a device begin to.
    result: computes it once more, on outputs that hold none yet: the output, and the LSE if it gives one.
    times: how often one call computes it.
    wait: returns when all calls so far are done.
  """

  call: Callable[[], object]
  result: Callable[[], list[Array]]
  times: int = 1
  wait: Callable[[], object] = lambda: None


Contender = Callable[[Problem], Runner | None]
"""Sets a contender up for a problem; None where it sits the problem out."""


def uopattn(problem: Problem) -> Runner:
  """Our kernel, replayed by TinyJit; it writes the LSE too."""
  o, lse = outputs(problem.spec)
  times = repeats(problem)
  call = jitted(problem, o, lse, times)
  for _ in range(2):  # compile, capture
    call()

  def result() -> list[Array]:
    poison(o, lse)
    call()
    return [numpy(o), numpy(lse)]

  return Runner(call, result, times, wait)


def on_cpu() -> bool:
  """Whether tinygrad's default device is a CPU."""
  return Device.DEFAULT.split(":")[0] == "CPU"


def repeats(problem: Problem) -> int:
  """How often one call computes an attention: on a GPU enough that starting the call costs next to nothing."""
  return 1 if on_cpu() else max(1, min(MOST, int(LONG / (problem.spec.flops / FAST))))


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
      wait()
      return out

    for _ in range(2):
      call()
    return Runner(call, lambda: [numpy(call())])

  return tinygrad


def torch_types(torch: Any) -> dict[DType, Any]:
  """torch's own for the types that its attention takes."""
  return {dtypes.float32: torch.float32, dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16}


def load_torch() -> Contender:
  """torch's `scaled_dot_product_attention`, on as many threads as our kernels use."""
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
  """torch's attention by one of its backends on a GPU."""

  def load_backend() -> Contender:
    torch = importlib.import_module("torch")

    def attend(problem: Problem) -> Runner | None:
      s, types = problem.spec, torch_types(torch)
      if s.dtype == dtypes.float32:
        return None
      arrays = [numpy(x) for x in (problem.q, problem.k, problem.v)]
      with torchs_context():
        q, k, v = (torch.from_numpy(x).to("cuda", types[s.dtype]) for x in arrays)
        once, times = _flex(torch, s) if backend == "flex" else sdpa(torch, s, backend), repeats(problem)

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
  """Has the primary context of the first GPU as the current one meanwhile, as torch expects.

  tinygrad has a context of its own, and launches its graphs in whichever is current: in torch's, they would not be done
  when tinygrad says so.
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
  """What torch does on a GPU."""
  torch = importlib.import_module("torch")
  return Runner(torchs_context()(call), torchs_context()(result), times, torchs_context()(torch.cuda.synchronize))


def served(name: str, runner: Runner) -> Runner | None:
  """The runner; None, and a line that says why, where its backend has nothing for the case."""
  try:
    runner.call()
    runner.wait()
  except RuntimeError as error:
    print(f"{name} sits this out: {str(error).splitlines()[0]}")
    return None
  return runner


def sdpa(torch: Any, s: AttentionSpec, backend: str = "") -> Callable[..., Any]:
  """torch's attention of q, k and v; by its own choice of a backend, where none is named."""
  attention = importlib.import_module("torch.nn.attention")
  of_name = {"flash": attention.SDPBackend.FLASH_ATTENTION, "cudnn": attention.SDPBackend.CUDNN_ATTENTION}

  def once(q: Any, k: Any, v: Any) -> Any:
    with attention.sdpa_kernel([of_name[backend]]) if backend else nullcontext():
      return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=s.is_causal, enable_gqa=s.Hq != s.Hkv)

  return once


def _flex(torch: Any, s: AttentionSpec) -> Callable[..., Any]:
  flex = importlib.import_module("torch.nn.attention.flex_attention")
  torch.compiler.reset()  # it gives up compiling after a few shapes
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
  """The contenders by name, ours first; on a GPU, torch is its backends, each a contender.

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
  """What a machine can do at most.

  Attributes:
    name: "read", or whose product of matrices it is.
    runner: does it.
    flops: floating-point operations of a product.
    moved: bytes that are read.
  """

  name: str
  runner: Runner
  flops: int = 0
  moved: int = 0


def limit(s: AttentionSpec) -> Limit | None:
  """What bounds an attention: with few queries a large read, else a product; on a GPU None where there is no torch."""
  if s.M > FEW:
    return product()
  return Limit("read", Runner(reader(READ), list), moved=READ) if on_cpu() else _gpu_read()


def product() -> Limit | None:
  """A product of square matrices.

  On a CPU float32 of size PRODUCT: torch's, on our number of threads, or numpy's, on as many as its library takes,
  where there is no torch. On a GPU float16 of size GPU_PRODUCT: torch's, or no product where there is no torch.
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
  """torch's sum of GPU_READ bytes of float16."""
  try:
    torch = importlib.import_module("torch")
  except ImportError:
    return None
  with torchs_context():
    x = torch.ones(GPU_READ // 2, device="cuda", dtype=torch.float16)
  return Limit("read", torchs_runner(x.sum, list), moved=GPU_READ)


def product_size() -> int:
  """Rows and columns of the product's matrices."""
  return PRODUCT if on_cpu() else GPU_PRODUCT


def versions(names: list[str]) -> dict[str, str]:
  """Of the contenders and of what computes the product."""
  return {name: installed_version(name) or "unknown" for name in dict.fromkeys(name.split()[0] for name in names)}
