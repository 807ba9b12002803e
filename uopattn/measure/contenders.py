"""Contenders of `uopattn.bench`: our kernels and other libraries' attention, and the gradients of both.

Gradients are computed from outputs computed beforehand.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn.measure.problem import Problem, outputs_of
from uopattn.measure.program import Usage
from uopattn.measure.timing import Runner, captured, on_cpu, on_nvidia, poison, repeats, wait
from uopattn.plan.dispatch import NoKernel, backward_on
from uopattn.plan.gradient import GradientCall, by_kernels
from uopattn.plan.residuals import Residuals
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.device import kind_of
from uopattn.runtime.machine import installed_version, thread_count
from uopattn.spec.arguments import NO_ARGUMENTS, Arguments
from uopattn.spec.spec import AttentionSpec

MOST, MOST_DIVIDED = 400, 20  # computations per call, at most, and if several devices divide it: captured one by one
SMALL = 1 << 19  # scores of the largest problem on which tinygrad's own attention is timed

Contender = Callable[[Problem], Runner | None]
"""A function that sets up a contender for a problem; it returns None to skip the problem."""


def uopattn(problem: Problem) -> Runner:
  """Set up our kernel, replayed by TinyJit; it also writes the LSE."""
  times = repeats(problem.spec, MOST if problem.division is None else MOST_DIVIDED)
  call, outputs = captured(problem.computation(times))

  def result() -> list[Array]:
    poison(outputs)
    wait(problem.devices)  # tinygrad orders a replay after the work of one device, not of all
    return [numpy(x) for x in call()]

  return Runner(call, result, times, lambda: wait(problem.devices))


def uopattn_backward(problem: Problem) -> Runner:
  """Set up our backward pass, replayed by TinyJit: all kernels, and the tinygrad operations around them.

  Raises:
    Usage: no kernel supports the problem.
  """
  out, lse = problem.attend()
  Tensor.realize(out, lse)
  gradients = _of_one_device if problem.division is None else _of_several_devices
  compute, written = gradients(problem, out, lse, problem.output_gradient())

  def run() -> list[Tensor]:
    grads = compute()
    Tensor.realize(*grads)
    return grads

  call, outputs = captured(run)

  def result() -> list[Array]:
    poison([*written, *outputs])
    wait(problem.devices)  # tinygrad orders a replay after the work of one device, not of all
    return [numpy(x) for x in call()]

  return Runner(call, result, wait=lambda: wait(problem.devices))


def _of_one_device(p: Problem, out: Tensor, lse: Tensor, do: Tensor) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
  """Return a function that computes the gradients of q, k and v, and the buffers that kernels write.

  These may hold partial sums, from which the gradients are then computed.
  """
  try:
    launches = backward_on(p.spec, Device.DEFAULT)
  except NoKernel as error:
    raise Usage(str(error)) from error
  buffers = {name: [Tensor.empty(*x.shape, dtype=x.dtype)] for name, x in outputs_of(launches).items()}

  def compute() -> list[Tensor]:
    return by_kernels(launches, Residuals.of(p.spec, p.q, p.k, p.v, out, lse, do), NO_ARGUMENTS, buffers)

  return compute, [x for (x,) in buffers.values()]


def _of_several_devices(
  p: Problem, out: Tensor, lse: Tensor, do: Tensor
) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
  """Return a function that computes the gradients of q, k and v, which several devices divide, and no buffers."""
  division = p.division
  assert division is not None
  arguments = Arguments(is_causal=p.spec.is_causal, enable_gqa=True, return_lse=True)
  do = do.shard(p.devices, p.q.uop.axis).realize()

  def compute() -> list[Tensor]:
    operands = {"q": p.q, "k": p.k, "v": p.v}
    grads = division.gradients(GradientCall([out, lse], operands, [do, None], arguments, "kernel", operands))
    return [x for x in grads if x is not None]

  return compute, []


def tinygrad(problem: Problem) -> Runner | None:
  """Set up tinygrad's own attention, replayed by TinyJit; it skips large problems because it stores all scores."""
  s = problem.spec
  if s.B * s.Hq * s.M * s.N > SMALL:
    return None

  def attend() -> Tensor:
    grouped = s.Hq != s.Hkv
    q, k, v = problem.q, problem.k, problem.v
    return q.scaled_dot_product_attention(k, v, is_causal=s.is_causal, enable_gqa=grouped).realize()

  call, _ = captured(attend)
  return Runner(call, lambda: [numpy(call())], wait=wait)


def import_torch() -> Any:
  """Return torch, which our dependencies do not include. Raises ImportError."""
  return importlib.import_module("torch")


def load_torch(backend: str = "", backward: bool = False) -> Contender:
  """Return torch's attention, or its gradients.

  It skips dtypes that its attention does not take.

  Args:
    backend: on a GPU "flash", "cudnn" or, without gradients, "flex"; "" is `scaled_dot_product_attention` on a CPU, on
      as many threads as our kernels use.
  """
  torch = import_torch()
  if not backend:
    torch.set_num_threads(thread_count())

  def attend_of(s: AttentionSpec) -> Callable[..., Any]:
    return _flex(torch, s) if backend == "flex" else _sdpa(torch, s, backend)

  name = f"torch {backend}" if backend else ""
  return _on_torch(name, attend_of, backward, () if backend else (dtypes.float32,))


class FlashAttention(NamedTuple):
  """A generation of FlashAttention for Hopper as a Python package, which installs without compiling.

  Attributes:
    package: its name on PyPI.
    module: has `flash_attn_func`.
    passes: the passes in which it takes part.
    options: further arguments.
  """

  package: str
  module: str
  passes: tuple[str, ...]
  options: dict[str, Any]


FLASH_ATTENTION = {
  "fa3": FlashAttention("fa3-fwd", "fa3_fwd_interface", ("forward",), {"num_splits": 0}),  # as many as it finds best
  "fa4": FlashAttention("flash-attn-4", "flash_attn.cute", ("forward", "backward"), {}),
  "fa4-deterministic": FlashAttention("flash-attn-4", "flash_attn.cute", ("backward",), {"deterministic": True}),
}


def load_flash_attention(name: str, backward: bool) -> Contender:
  """Return one of `FLASH_ATTENTION`, or its gradients, on tensors of its own layout (batch, length, heads, head size).

  Raises:
    ImportError: it, or torch, is not installed.
    Usage: it has no such pass, or the device is not NVIDIA's.
  """
  library, wanted = FLASH_ATTENTION[name], "backward" if backward else "forward"
  if wanted not in library.passes:
    raise Usage(f"--against {name}: has no {wanted} pass")
  if kind_of(Device.DEFAULT) != "CUDA":
    raise Usage(f"--against {name}: runs on CUDA only, not on {Device.DEFAULT}")
  import_torch()
  function = importlib.import_module(library.module).flash_attn_func

  def attend_of(s: AttentionSpec) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any) -> Any:
      out = function(q, k, v, causal=s.is_causal, **library.options)
      return out[0] if isinstance(out, tuple) else out  # of some versions with the LSE

    return attend

  return _on_torch(name, attend_of, backward, heads_last=True)


def _on_torch(
  name: str,
  attend_of: Callable[[AttentionSpec], Callable[..., Any]],
  backward: bool,
  more_dtypes: tuple[DType, ...] = (),
  heads_last: bool = False,
) -> Contender:
  """Return an attention on torch's tensors, or its gradients, as a contender.

  Args:
    name: its name on a GPU; "" is on the CPU.
    attend_of: returns it for a problem, as a function of q, k and v.
    more_dtypes: dtypes that it takes beside those of 16 bits.
    heads_last: whether its tensors have the layout (batch, length, heads, head size).
  """
  torch = import_torch()
  types: dict[DType, Any] = {dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16}
  types |= dict.fromkeys(more_dtypes, torch.float32)

  def swapped(x: Any) -> Any:
    return x.transpose(1, 2) if heads_last else x

  def set_up(problem: Problem) -> Runner | None:
    s = problem.spec
    if s.dtype not in types:
      return None
    inputs = [problem.q, problem.k, problem.v, *([problem.output_gradient()] if backward else [])]
    arrays = [numpy(x).copy() for x in inputs]
    with torchs_context() if name else nullcontext():
      tensors = [torch.from_numpy(x).to("cuda" if name else "cpu", types[s.dtype]) for x in arrays]
      q, k, v, *do = [swapped(x).contiguous() for x in tensors]
      attend = attend_of(s)
    times = 1 if backward else repeats(s, MOST)

    def forward() -> list[Any]:
      with torch.inference_mode():
        for _ in range(times):
          out = attend(q, k, v)
      return [out]

    @functools.cache
    def differentiable() -> Any:
      return attend(*(x.requires_grad_() for x in (q, k, v)))

    def gradients() -> Any:
      return torch.autograd.grad(differentiable(), (q, k, v), do, retain_graph=True)

    call = gradients if backward else forward
    runner = call, lambda: [swapped(x).float().cpu().numpy() for x in call()], times
    return _served(name, torchs_runner(*runner)) if name else Runner(*runner)

  return set_up


def _sdpa(torch: Any, s: AttentionSpec, backend: str) -> Callable[..., Any]:
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


def _served(name: str, runner: Runner) -> Runner | None:
  """Return the runner; if its backend does not support the case, print why and return None."""
  try:
    runner.call()
    runner.wait()
  except (RuntimeError, AssertionError, ValueError) as error:
    print(f"{name} sits this out: {(str(error) or type(error).__name__).splitlines()[0]}")
    return None
  return runner


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
  within = torchs_context()
  return Runner(within(call), within(result), times, within(import_torch().cuda.synchronize))


BACKENDS = ("flash", "cudnn", "flex")  # of torch, on a GPU; flex without gradients


def backends_of_torch(backward: bool) -> dict[str, Contender]:
  """Return torch's attention by name: on a CPU the one that it chooses, on a GPU each backend.

  Raises:
    ImportError: torch is not installed.
    Usage: the device is neither a CPU nor a GPU of NVIDIA.
  """
  if on_cpu():
    return {"torch": load_torch("", backward)}
  if not on_nvidia():
    raise Usage(f"--against torch: runs on CPUs and on NVIDIA's GPUs only, not on {Device.DEFAULT}")
  return {f"torch {x}": load_torch(x, backward) for x in BACKENDS if not (backward and x == "flex")}


def _backend_of_torch(backend: str) -> Callable[[bool], dict[str, Contender]]:
  name = f"torch {backend}"

  def loader(backward: bool) -> dict[str, Contender]:
    if name not in (backends := backends_of_torch(backward)):
      raise Usage(f"--against torch-{backend}: is not available here; --against torch is {', '.join(backends)}")
    return {name: backends[name]}

  return loader


def _flash_attention(name: str) -> Callable[[bool], dict[str, Contender]]:
  return lambda backward: {name: load_flash_attention(name, backward)}


LOADERS: dict[str, Callable[[bool], dict[str, Contender]]] = {
  "torch": backends_of_torch,
  **{f"torch-{name}": _backend_of_torch(name) for name in BACKENDS},
  "tinygrad": lambda backward: {"tinygrad": tinygrad},
  **{name: _flash_attention(name) for name in FLASH_ATTENTION},
}


def load(names: list[str], backward: bool = False) -> dict[str, Contender]:
  """Return the contenders by name, ours first.

  Raises:
    Usage: a name is unknown, its library cannot be imported, or it does not take part.
  """
  contenders: dict[str, Contender] = {"uopattn": uopattn_backward if backward else uopattn}
  for name in names:
    if name not in LOADERS:
      raise Usage(f"--against {name}: unknown; accepted are {', '.join(LOADERS)}")
    if backward and name == "tinygrad":
      raise Usage(f"--against {name}: has no backward pass")
    try:
      contenders |= LOADERS[name](backward)
    except ImportError as error:
      raise Usage(f"--against {name}: it cannot be imported: {error}") from error
  return contenders


def versions(names: list[str]) -> dict[str, str]:
  """Return the versions of the packages of `names`, which are contenders and limits."""
  packages = (FLASH_ATTENTION[name].package if name in FLASH_ATTENTION else name.split()[0] for name in names)
  return {package: installed_version(package) or "unknown" for package in dict.fromkeys(packages)}
