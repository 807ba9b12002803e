"""Multithreaded runtime for our CPU kernels: the threads of a call run its work items in machine code.

tinygrad's own runtime calls a kernel's work items (`core_id`) one after another on the calling thread. Our programs get
a runtime object of their own, which is stored in tinygrad's runtime cache. All other programs in the process keep
tinygrad's runtime. No interpreter runs between two items.

A worker is a Python thread that calls the C code of threads.c, which releases the interpreter lock. It spins for a job
for about half a millisecond, since calls tend to follow each other closely; then it sleeps on a semaphore, or, if the
system provides none, sleeps briefly between checks. The caller wakes a few workers, which wake others. It runs items
together with the workers that have joined, and never waits for one that has not started. About every tenth of a second
it returns to the interpreter, which handles signals. An exception raised by a signal handler, such as
KeyboardInterrupt, cancels the items that have not started. Workers end before the interpreter does, which frees the
code that they run.

All of this is POSIX, for Linux and macOS; tinygrad loads the code as an ELF object on both. Only Linux reports the core
that a thread runs on and lets it be moved.

A kernel's arrays, up to `CPU_STACK` bytes, are on the stack of each thread that runs it. Workers have `WORKER_STACK`.
The caller's thread has what the system, or whoever started it, gave it; if that is too little, the call raises an
error.
"""

import atexit
import contextlib
import ctypes
import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tinygrad import UOp
from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import runtime_cache
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.uop.ops import Ops

from uopattn.dsl.target import CPU_ARGUMENTS, CPU_STACK
from uopattn.runtime.cpu import kernel_renderer
from uopattn.runtime.device import opened
from uopattn.runtime.machine import thread_count, usable_cores
from uopattn.runtime.program_cache import finished

# The least work of a thread, some 0.01 ms: to wake it takes that long, or to wait for it if it is awake.
LEAST_OPERATIONS, LEAST_BYTES = 2_000_000, 1 << 17

MOST_ARGUMENTS = CPU_ARGUMENTS + 2  # of every call: under both calling conventions a kernel ignores the surplus

# Bytes of a worker's stack, as many as a thread usually gets on Linux. If `ulimit -s` is unlimited, it gets 2 MiB from
# glibc, and always 128 KiB from musl.
WORKER_STACK = 2 * CPU_STACK
OTHER_STACK = 128 << 10  # bytes of a caller's stack that the interpreter may have in use, and spilled registers take

_DEFINES = f"""#define MOST_ARGUMENTS {MOST_ARGUMENTS}
#define TYPES {", ".join(["word"] * MOST_ARGUMENTS)}
#define VALUES {", ".join(f"a[{i}]" for i in range(MOST_ARGUMENTS))}
"""
_SOURCE = _DEFINES + Path(__file__).with_suffix(".c").read_text()


class _Job(ctypes.Structure):
  """`struct job` of threads.c; the words after `arguments` begin as 0."""

  _fields_ = (
    *((name, ctypes.c_uint64) for name in ("kernel", "slot", "items", "helpers")),
    ("arguments", ctypes.c_uint64 * MOST_ARGUMENTS),
    *((name, ctypes.c_uint64) for name in ("next", "state")),
  )


class _Shared(ctypes.Structure):
  """`struct team` of threads.c."""

  _fields_ = (
    ("job", _Job),
    *((name, ctypes.c_long) for name in ("inside", "taken", "workers", "asleep", "stopped")),
    *((name, ctypes.c_void_p) for name in ("sched_yield", "clock_gettime", "usleep", "sem_post", "sem_wait", "bell")),
    ("semaphore", ctypes.c_uint64 * 8),
  )


_SERVE, _RUN, _CANCEL = range(3)
_CLOSED = -1
_LIBC = ctypes.CDLL(None)
_NO_SEMAPHORE = (None, (1 << 64) - 1)  # SEM_FAILED of Linux, and of macOS


@functools.cache
def _program() -> CPUProgram:
  """Compile threads.c."""
  device = cast(CPUDevice, opened("CPU"))
  target = device.renderer.target
  code = ClangCompiler(target.arch.split(",")).compile_cached(_SOURCE)
  return CPUProgram(device, TinyELF(code, "uopattn_team", target, ()))


class Team:
  """Worker threads, and the memory through which they receive jobs.

  Args:
    workers: number of threads to start.
  """

  def __init__(self, workers: int):
    self._enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(_program().addr)
    names = ("sched_yield", "clock_gettime", "usleep", "sem_post", "sem_wait")
    libc = {name: ctypes.cast(getattr(_LIBC, name), ctypes.c_void_p) for name in names}
    self._shared = _Shared(inside=_CLOSED, workers=workers, **libc)
    self._shared.bell = _semaphore(ctypes.addressof(self._shared) + _Shared.semaphore.offset)
    self._core = -1  # the caller's core, which the workers avoid
    worker_args = (ctypes.byref(self._shared), None, _SERVE)
    self._threads: list[threading.Thread] = []
    atexit.register(self._stop)
    before = threading.stack_size(WORKER_STACK)  # of threads that are started from here on
    try:
      for i in range(workers):
        thread = threading.Thread(target=self._enter, args=worker_args, name=f"uopattn-{i}", daemon=True)
        thread.start()
        self._threads.append(thread)
    finally:
      threading.stack_size(before)

  def run(self, kernel: int, words: Sequence[int], slot: int, items: int, threads: int) -> None:
    """Call a C function once per work item, on at most `threads` threads, including the caller's.

    Args:
      kernel: the function's address; it takes pointers and integers of at most 64 bits.
      words: its arguments, at most MOST_ARGUMENTS - 1.
      slot: index of the argument that receives the item's number; MOST_ARGUMENTS - 1 if none does.
      items: number of work items.
      threads: 1 uses only the caller's thread.

    Raises:
      ValueError: there are too many arguments.
      BaseException: an exception raised by a signal handler. Some items may not have run, but none is still running.
    """
    if len(words) >= MOST_ARGUMENTS:
      raise ValueError(f"a kernel of {len(words)} arguments; at most {MOST_ARGUMENTS - 1} can be passed")
    helpers = min(threads, items) - 1
    job = ctypes.byref(_Job(kernel, slot, items, helpers, tuple(words)))
    shared = ctypes.byref(self._shared)
    if helpers and _core() != self._core:
      self._keep_off(_core())
    try:
      while self._enter(shared, job, _RUN):
        pass
    except BaseException:  # the interpreter raises no second exception until the next call has returned
      self._enter(shared, job, _CANCEL)
      raise

  def restart(self) -> None:
    """Restart the current job without workers, in the child of a caller that forked in a signal handler.

    The workers do not exist in the child, and items that they had started may be incomplete.
    """
    self._shared.job.next = self._shared.inside = 0

  def _keep_off(self, core: int) -> None:
    """Move the workers off the caller's core.

    The scheduler may otherwise keep a woken thread on the core of its waker for longer than a call lasts.
    """
    if cores := os.sched_getaffinity(0) - {core}:
      with contextlib.suppress(OSError):  # a sandbox may forbid it
        for thread in self._threads:
          os.sched_setaffinity(cast(int, thread.native_id), cores)
    self._core = core  # last, so that after an interrupt the next call repeats the move

  def _stop(self) -> None:
    """End the workers. Later calls, as other exit handlers may make, run on the caller's thread only."""
    self._shared.stopped = 1
    for _ in self._threads if self._shared.bell else ():
      _LIBC.sem_post(ctypes.c_void_p(self._shared.bell))
    for thread in self._threads:
      thread.join()
    self._threads = []


def _semaphore(memory: int) -> int:
  """Return the address of a semaphore whose value is 0, made at `memory` or by the system; 0 if it can make none."""
  if _LIBC.sem_init(ctypes.c_void_p(memory), 0, 0) == 0:
    return memory
  # macOS has only those with names, of at most 31 bytes. On arm64 it passes arguments of a variable number, which are
  # those that argtypes does not list, elsewhere than the rest.
  sem_open, name = _LIBC.sem_open, f"/uopattn-{os.getpid()}-{secrets.token_hex(4)}".encode()
  sem_open.argtypes, sem_open.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
  address = sem_open(name, os.O_CREAT | os.O_EXCL, ctypes.c_int(0o600), ctypes.c_uint(0))
  if address in _NO_SEMAPHORE:
    return 0
  _LIBC.sem_unlink(name)  # it is open already
  return cast(int, address)


class _Stack(threading.local):
  """The stack of the thread that asks.

  Attributes:
    size: its bytes; infinity if the system does not say.
  """

  def __init__(self) -> None:
    self.size, thread, size = math.inf, ctypes.c_void_p(threading.get_ident()), ctypes.c_size_t()
    if hasattr(_LIBC, "pthread_get_stacksize_np"):  # on macOS
      _LIBC.pthread_get_stacksize_np.restype = ctypes.c_size_t
      self.size = _LIBC.pthread_get_stacksize_np(thread)
    elif hasattr(_LIBC, "pthread_getattr_np"):
      attributes = ctypes.byref((ctypes.c_uint64 * 16)())  # of an opaque type, nowhere more than 64 bytes
      if _LIBC.pthread_getattr_np(thread, attributes) == 0:
        _LIBC.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        _LIBC.pthread_attr_destroy(attributes)
        self.size = size.value


_stack = _Stack()


def _core() -> int:
  """Return the core that this thread runs on; -1 if the system does not say, or does not let threads be moved."""
  known = hasattr(_LIBC, "sched_getcpu") and hasattr(os, "sched_setaffinity")
  return int(_LIBC.sched_getcpu()) if known else -1


_team: Team | None = None
_starting = threading.Lock()


def _forget() -> None:
  """Drop the team in a forked process, which has no copies of its threads."""
  global _team, _starting
  if _team:
    _team.restart()
  _team, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def team() -> Team:
  """Return the process-wide team: a worker for each usable core but the caller's, as of the first call."""
  global _team
  with _starting:
    _team = _team or Team(usable_cores() - 1)
  return _team


def useful_threads(work: Estimates) -> int:
  """Return how many threads a kernel keeps busy for long enough to pay."""
  return max(1, cast(int, work.ops) // LEAST_OPERATIONS, cast(int, work.mem) // LEAST_BYTES)


def stack_bytes(kernel: UOp) -> int:
  """Return the bytes of a kernel's arrays."""
  arrays = (u for u in kernel.toposort() if u.op is Ops.BUFFER and u.addrspace is AddrSpace.REG)
  return sum(u.max_numel() * u.dtype.itemsize for u in arrays)


class ThreadedProgram(CPUProgram):
  """A compiled kernel whose work items several threads, including the caller, take from a shared counter.

  Uneven items, such as causal rows, balance by themselves.

  Attributes:
    most: the most threads to use.
    stack: bytes of its arrays.
  """

  def __init__(self, most: int, stack: int, *args: Any):
    super().__init__(*args)
    self.most, self.stack = most, stack
    team()  # created by the thread that compiles, for which tinygrad's database is open

  def __call__(
    self,
    *bufs: Any,
    global_size: tuple[int, int, int] = (1, 1, 1),
    vals: tuple[int | None, ...] = (),
    wait: bool = False,
    **launch: Any,
  ) -> float | None:
    if self.stack + OTHER_STACK > _stack.size:
      raise RuntimeError(
        f"{self.name} has {self.stack} bytes on the stack, too many for this thread's stack of {_stack.size}; "
        f"call threading.stack_size({WORKER_STACK}) before you start the thread, or `ulimit -s` before the program"
      )
    start = time.perf_counter()
    words = [buf.va_addr for buf in bufs] + [value or 0 for value in vals]
    slot = self.runtimevars.get("core_id", MOST_ARGUMENTS - 1)
    team().run(self.addr, words, slot, global_size[0], min(thread_count(), self.most))
    return time.perf_counter() - start if wait else None


def threaded(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for a CPU device and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo, whose work items are an axis of type THREAD.
    device: "CPU", "CPU:1", ...
    estimates: the work that tinygrad reports for the kernel.
  """
  made = finished(kernel, kernel_renderer(device), estimates)
  cpu = cast(CPUDevice, opened(device))
  runtime = ThreadedProgram(useful_threads(estimates), stack_bytes(kernel), cpu, made.to_elf())
  runtime_cache.setdefault((made.key, device), runtime)
  return made
