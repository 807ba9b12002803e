"""Our CPU kernels on all cores.

tinygrad's own runtime calls a kernel's work items (`core_id`) one after another on the calling thread. Here a program
of ours gets a runtime object of its own, put where tinygrad looks a program's runtime up; every other program, and
every other user of the process, keeps tinygrad's.
"""

import ctypes
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from tinygrad import Device, UOp
from tinygrad.engine.realize import runtime_cache
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram

from uopattn.machine import usable_cores
from uopattn.program import program

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
  global _pool
  _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork


def thread_count() -> int:
  """Threads that a kernel may use: tinygrad's NUM_CPU_THREADS, and no more than the cores that we may run on."""
  return max(1, min(NUM_CPU_THREADS.value, usable_cores()))


def _workers() -> ThreadPoolExecutor:
  global _pool
  if _pool is None:
    _pool = ThreadPoolExecutor(max(1, usable_cores() - 1), thread_name_prefix="uopattn")
  return _pool


class ThreadedProgram(CPUProgram):
  """A compiled kernel whose work items are taken from a common counter by several threads, the caller among them.

  So uneven items (causal rows) balance by themselves. ctypes gives up the interpreter lock during each item.
  """

  def __call__(
    self,
    *bufs: Any,
    global_size: tuple[int, int, int] = (1, 1, 1),
    vals: tuple[int | None, ...] = (),
    wait: bool = False,
    **launch: Any,
  ) -> float | None:
    items, threads = global_size[0], min(thread_count(), global_size[0])
    if threads == 1 or "core_id" not in self.runtimevars:
      return super().__call__(*bufs, global_size=global_size, vals=vals, wait=wait, **launch)
    start = time.perf_counter()
    slot = self.runtimevars["core_id"]
    words = [*(buf.va_addr for buf in bufs), *vals]
    ticket = itertools.count()  # next() is one step under the interpreter lock

    def work() -> None:
      arguments = [ctypes.c_uint64(word or 0) for word in words]
      while (item := next(ticket)) < items:
        arguments[slot] = ctypes.c_uint64(item)
        self.fxn(*arguments)

    helpers = [_workers().submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
      if not helper.cancel():  # one that has not begun has nothing left to do
        helper.result()
    return time.perf_counter() - start if wait else None


def threaded(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compiles a kernel's graph for a CPU device and returns the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo, whose work items are an axis of type THREAD.
    device: "CPU", "CPU:1", ...
    estimates: what tinygrad is to report as the kernel's work.
  """
  compiled = program(kernel, Device[device].renderer, estimates)
  runtime_cache.setdefault((compiled.key, device), ThreadedProgram(cast(CPUDevice, Device[device]), compiled.to_elf()))
  return compiled
