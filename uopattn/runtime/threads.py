"""Multithreaded runtime for our CPU kernels.

tinygrad's own runtime calls a kernel's work items (`core_id`) one after another on the calling thread. Our programs get
a runtime object of their own, which is stored in tinygrad's runtime cache. All other programs in the process keep
tinygrad's runtime.
"""

import time
from typing import Any, cast

from tinygrad import Device, UOp
from tinygrad.engine.realize import runtime_cache
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram

from uopattn.runtime.cpu import kernel_renderer
from uopattn.runtime.machine import thread_count, usable_cores
from uopattn.runtime.program_cache import finished
from uopattn.runtime.team import MOST_ARGUMENTS, team

# The least work of a thread, some 0.01 ms: to wake it takes that long, or to wait for it if it is awake.
LEAST_OPERATIONS, LEAST_BYTES = 2_000_000, 1 << 17


def useful_threads(work: Estimates) -> int:
  """Return how many threads a kernel keeps busy for long enough to pay."""
  return max(1, cast(int, work.ops) // LEAST_OPERATIONS, cast(int, work.mem) // LEAST_BYTES)


class ThreadedProgram(CPUProgram):
  """A compiled kernel whose work items several threads, including the caller, take from a shared counter.

  Uneven items, such as causal rows, balance by themselves.

  Attributes:
    most: the most threads to use.
  """

  def __init__(self, most: int, *given: Any):
    super().__init__(*given)
    self.most = most
    team(usable_cores() - 1)  # created by the thread that compiles, for which tinygrad's database is open

  def __call__(
    self,
    *bufs: Any,
    global_size: tuple[int, int, int] = (1, 1, 1),
    vals: tuple[int | None, ...] = (),
    wait: bool = False,
    **launch: Any,
  ) -> float | None:
    start = time.perf_counter()
    words = [buf.va_addr for buf in bufs] + [value or 0 for value in vals]
    slot = self.runtimevars.get("core_id", MOST_ARGUMENTS - 1)
    team(usable_cores() - 1).run(self.addr, words, slot, global_size[0], min(thread_count(), self.most))
    return time.perf_counter() - start if wait else None


def threaded(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for a CPU device and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo, whose work items are an axis of type THREAD.
    device: "CPU", "CPU:1", ...
    estimates: the work that tinygrad reports for the kernel.
  """
  made = finished(kernel, kernel_renderer(device), estimates)
  runtime = ThreadedProgram(useful_threads(estimates), cast(CPUDevice, Device[device]), made.to_elf())
  runtime_cache.setdefault((made.key, device), runtime)
  return made
