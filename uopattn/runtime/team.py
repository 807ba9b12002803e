"""Threads that share out the work items of a kernel call, in machine code: no interpreter between two items.

A worker is a Python thread that calls into the machine code below, and so gives up the interpreter lock. There it looks
out for a job for about half a millisecond, since calls tend to follow each other closely; then it returns and sleeps on
a Python lock. A caller does the items together with the workers that have come, and never waits for one that has not
begun. About every tenth of a second it returns to the interpreter, which sees to signals: an exception that their
handlers raise, such as KeyboardInterrupt, cancels the items that nobody has begun.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, cast

from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

MOST_ARGUMENTS = 64  # that a call passes, whatever its kernel takes: by both calling conventions a surplus is not seen

_SOURCE = """
typedef unsigned long long word;
#if defined(__x86_64__)
#define PAUSE() __asm__ volatile("pause")
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() __asm__ volatile("")
#endif
enum { SERVE, RUN, CANCEL, MOST_ARGUMENTS = COUNT, SPIN = 20000, CLOSED = -1 };
enum { NEW, LEADS, ALONE, DONE };
struct job {
  word kernel, slot, items, helpers, arguments[MOST_ARGUMENTS];
  word next;  // the first item that nobody has taken
  word state; // LEADS: the caller has the team; ALONE: another one has, or no helpers are wanted
};
struct team {
  struct job job;
  long inside; // how many workers do the job; CLOSED: it cannot be joined
  long taken;  // 1: a caller has the team
  int (*yield)(void), (*clock)(int, long *);
};

static int call(struct team *t, struct job *job, int what);
static int serve(struct team *t);
static int take(struct job *job, const struct team *clock);
static void finish(struct team *t);

int team(struct team *t, struct job *job, int what) { return what == SERVE ? serve(t) : call(t, job, what); }

// 0: the job is done or cancelled, no worker is inside any more, and none can join. 1: RUN is to be called again, once
// the interpreter has seen to signals.
static int call(struct team *t, struct job *job, int what) {
  if (job->state == DONE || (job->state == NEW && what == CANCEL)) return 0;
  if (job->state == NEW) {
    job->state = job->helpers && !__atomic_exchange_n(&t->taken, 1, __ATOMIC_ACQUIRE) ? LEADS : ALONE;
    if (job->state == LEADS) {
      t->job = *job;
      __atomic_store_n(&t->inside, 0, __ATOMIC_RELEASE);
    }
  }
  struct job *mine = job->state == LEADS ? &t->job : job;
  if (what == CANCEL) __atomic_store_n(&mine->next, mine->items, __ATOMIC_RELAXED);
  if (!take(mine, t)) return 1;
  if (job->state == LEADS) finish(t);
  job->state = DONE;
  return 0;
}

static int serve(struct team *t) {
  for (int spin = 0; spin < SPIN; spin++) {
    long inside = __atomic_load_n(&t->inside, __ATOMIC_ACQUIRE);
    if (inside != CLOSED && inside < (long)t->job.helpers &&
        __atomic_load_n(&t->job.next, __ATOMIC_RELAXED) < t->job.items &&
        __atomic_compare_exchange_n(&t->inside, &inside, inside + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
      take(&t->job, 0);
      __atomic_fetch_sub(&t->inside, 1, __ATOMIC_RELEASE);
      spin = 0;
    }
    PAUSE();
  }
  return 0;
}

static int close(struct team *t) {
  long nobody = 0;
  return __atomic_compare_exchange_n(&t->inside, &nobody, CLOSED, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void finish(struct team *t) {
  for (int spin = 0; !close(t); spin += spin < SPIN) {
    if (spin < SPIN) PAUSE();
    else t->yield(); // a worker has lost its core, perhaps to us
  }
  __atomic_store_n(&t->taken, 0, __ATOMIC_RELEASE);
}

static long tenths(const struct team *t) {
  long at[2]; // seconds, nanoseconds
  t->clock(0, at);
  return 10 * at[0] + at[1] / 100000000;
}

// 1: all items are taken. 0, only with a clock: a tenth of a second has ended.
static int take(struct job *job, const struct team *clock) {
  word a[MOST_ARGUMENTS];
  for (int i = 0; i < MOST_ARGUMENTS; i++) a[i] = job->arguments[i];
  long begun = clock ? tenths(clock) : 0;
  for (word item; (item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->items;) {
    a[job->slot] = item;
    ((void (*)(TYPES))job->kernel)(VALUES);
    if (clock && tenths(clock) != begun) return 0;
  }
  return 1;
}
"""
_SOURCE = _SOURCE.replace("COUNT", str(MOST_ARGUMENTS)).replace("TYPES", ", ".join(["word"] * MOST_ARGUMENTS))
_SOURCE = _SOURCE.replace("VALUES", ", ".join(f"a[{i}]" for i in range(MOST_ARGUMENTS)))

_SERVE, _RUN, _CANCEL = range(3)
_NEXT, _JOB = 4 + MOST_ARGUMENTS, 6 + MOST_ARGUMENTS  # words
_INSIDE, _CLOSED = _JOB, (1 << 64) - 1
_LIBC = ctypes.CDLL(None)


def _address(function: Any) -> int:
  return cast(int, ctypes.cast(function, ctypes.c_void_p).value)


@functools.cache
def _program() -> CPUProgram:
  """The machine code."""
  device = cast(CPUDevice, Device["CPU"])
  target = device.renderer.target
  code = ClangCompiler(target.arch.split(",")).compile_cached(_SOURCE)
  return CPUProgram(device, TinyELF(code, "uopattn_team", target, ()))


class Team:
  """Worker threads, and the memory by which they learn of a job.

  Args:
    workers: how many threads to start.
  """

  def __init__(self, workers: int):
    self._enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(_program().addr)
    libc = _address(_LIBC.sched_yield), _address(_LIBC.clock_gettime)
    self._shared = (ctypes.c_uint64 * (_JOB + 4))(*[0] * _JOB, _CLOSED, 0, *libc)
    self._asleep: list[threading.Lock] = []  # what sleeping workers wait for
    self._core = -1  # the caller's, which the workers keep off
    threads = [threading.Thread(target=self._serve, name=f"uopattn-{i}", daemon=True) for i in range(workers)]
    for thread in threads:
      thread.start()
    self._threads = [cast(int, thread.native_id) for thread in threads]

  def _serve(self) -> None:
    lock = threading.Lock()
    lock.acquire()
    while True:
      self._enter(self._shared, None, _SERVE)
      if self._shared[_INSIDE] != _CLOSED:
        continue  # a caller kept the interpreter lock from us until its job had begun
      self._asleep.append(lock)
      lock.acquire()
      self._asleep.remove(lock)

  def run(self, kernel: int, words: Sequence[int], slot: int, items: int, threads: int) -> None:
    """Calls a C function once for each work item, on at most `threads` threads, the caller's among them.

    Args:
      kernel: its address; it takes pointers and integers of 64 bits or fewer.
      words: its arguments, at most MOST_ARGUMENTS - 1.
      slot: which of them receives the item's number; MOST_ARGUMENTS - 1 where none does.
      items: how many there are.
      threads: 1 is the caller's alone.

    Raises:
      ValueError: too many arguments.
      BaseException: what a signal handler raised. Items may be undone then, but none is being done any more.
    """
    if len(words) >= MOST_ARGUMENTS:
      raise ValueError(f"a kernel of {len(words)} arguments; at most {MOST_ARGUMENTS - 1} can be passed")
    helpers = min(threads, items) - 1
    job = (ctypes.c_uint64 * _JOB)(kernel, slot, items, helpers, *words)
    if helpers and _core() != self._core:
      self._keep_off(_core())
    awake = len(self._threads) - len(self._asleep)
    for lock in self._asleep[: max(helpers - awake, 0)]:
      with contextlib.suppress(RuntimeError):  # another caller was faster
        lock.release()
    try:
      while self._enter(self._shared, job, _RUN):
        pass
    except BaseException:  # until the next call has returned, the interpreter raises no second one
      self._enter(self._shared, job, _CANCEL)
      raise

  def restart(self) -> None:
    """Begins a job anew without workers: for a caller that forked in a signal handler, in the new process.

    The workers are not in that process, and items that they had begun may be half done.
    """
    self._shared[_NEXT] = self._shared[_INSIDE] = 0

  def _keep_off(self, core: int) -> None:
    """Sends the workers to other cores than the caller's.

    Left to itself, a system may run a thread on the core of the one that wakes it for longer than a call lasts.
    """
    if others := os.sched_getaffinity(0) - {core}:
      with contextlib.suppress(OSError):  # a sandbox may forbid it
        for thread in self._threads:
          os.sched_setaffinity(thread, others)
    self._core = core  # last: an interrupted call leaves it to the next one


def _core() -> int:
  """The core that this thread is on; -1 where the system does not tell."""
  return int(_LIBC.sched_getcpu()) if hasattr(_LIBC, "sched_getcpu") else -1


_team: Team | None = None
_starting = threading.Lock()


def _forget() -> None:
  """In a forked process, where threads do not go on."""
  global _team, _starting
  if _team:
    _team.restart()
  _team, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def team(workers: int) -> Team:
  """The team of this process, with as many workers as the first call asks for."""
  global _team
  with _starting:
    _team = _team or Team(workers)
  return _team
