"""Thread pool that runs the work items of a kernel call, in machine code, so no interpreter runs between two items.

A worker is a Python thread that calls the C code below, which releases the interpreter lock. It spins for a job for
about half a millisecond, since calls tend to follow each other closely; then it sleeps on a semaphore, or, where there
is none to be had, naps between looks. The caller wakes a few workers, which wake others. It runs items together with
the workers that have joined, and never waits for one that has not started. About every tenth of a second it returns to
the interpreter, which handles signals. An exception raised by a signal handler, such as KeyboardInterrupt, cancels the
items that have not started. Workers end before the interpreter does, which frees the code that they run.

All of this is POSIX, for Linux and macOS; tinygrad loads the code as an ELF object on both. Only Linux tells on which
core a thread runs and moves threads to other ones.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any, cast

from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from uopattn.dsl.limits import CPU_ARGUMENTS

MOST_ARGUMENTS = CPU_ARGUMENTS + 2  # of every call: under both calling conventions a kernel ignores the surplus

_SOURCE = """
typedef unsigned long long word;
#if defined(__x86_64__)
#define PAUSE() __asm__ volatile("pause")
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() __asm__ volatile("")
#endif
enum { SERVE, RUN, CANCEL, MOST_ARGUMENTS = COUNT, SPIN = 20000, WAKES = 4, NAP = 200, CLOSED = -1 };
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
  long workers, asleep;
  long stopped; // 1: workers are to end
  int (*yield)(void), (*clock)(int, long *), (*nap)(unsigned), (*post)(void *);
  int (*wait)(void *);
  void *bell;        // the semaphore on which workers sleep; 0: there is none
  word semaphore[8]; // where it may be
};

static int call(struct team *t, struct job *job, int what);
static int serve(struct team *t);
static int take(struct job *job, const struct team *clock);
static void finish(struct team *t);
static void wake(struct team *t);

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
      wake(t);
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
  while (!__atomic_load_n(&t->stopped, __ATOMIC_RELAXED)) {
    for (int spin = 0; spin < SPIN; spin++) {
      long inside = __atomic_load_n(&t->inside, __ATOMIC_ACQUIRE);
      if (inside != CLOSED && inside < (long)t->job.helpers &&
          __atomic_load_n(&t->job.next, __ATOMIC_RELAXED) < t->job.items &&
          __atomic_compare_exchange_n(&t->inside, &inside, inside + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        // Only now can the job not become another one, with fewer helpers than were counted above.
        if (inside < (long)t->job.helpers) take(&t->job, 0);
        __atomic_fetch_sub(&t->inside, 1, __ATOMIC_RELEASE);
        spin = 0;
      }
      PAUSE();
    }
    if (!t->bell) {
      t->nap(NAP); // microseconds
      continue;
    }
    __atomic_fetch_add(&t->asleep, 1, __ATOMIC_RELAXED);
    while (t->wait(t->bell)) PAUSE(); // a signal ends it too
    wake(t);
  }
  return 0;
}

// Wakes some of the workers that the job lacks; these wake others.
static void wake(struct team *t) {
  for (int i = 0; i < WAKES; i++) {
    long asleep = __atomic_load_n(&t->asleep, __ATOMIC_RELAXED);
    if (asleep <= 0 || t->workers - asleep >= (long)t->job.helpers ||
        __atomic_load_n(&t->job.next, __ATOMIC_RELAXED) >= t->job.items)
      return;
    if (__atomic_compare_exchange_n(&t->asleep, &asleep, asleep - 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      t->post(t->bell);
  }
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
_INSIDE, _ASLEEP, _STOPPED, _BELL, _SEMAPHORE, _CLOSED = _JOB, _JOB + 3, _JOB + 4, _JOB + 10, _JOB + 11, (1 << 64) - 1
_LIBC = ctypes.CDLL(None)
_NO_SEMAPHORE = (None, (1 << 64) - 1)  # SEM_FAILED of Linux, and of macOS


def _address(function: Any) -> int:
  return cast(int, ctypes.cast(function, ctypes.c_void_p).value)


@functools.cache
def _program() -> CPUProgram:
  """Compile the C code above."""
  device = cast(CPUDevice, Device["CPU"])
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
    libc = (_address(getattr(_LIBC, name)) for name in names)
    self._shared = (ctypes.c_uint64 * (_SEMAPHORE + 8))(*[0] * _JOB, _CLOSED, 0, workers, 0, 0, *libc)
    self._shared[_BELL] = _semaphore(ctypes.addressof(self._shared) + 8 * _SEMAPHORE)
    self._core = -1  # the caller's core, which the workers avoid
    given = (self._shared, None, _SERVE)
    self._threads: list[threading.Thread] = []
    atexit.register(self._stop)
    for i in range(workers):
      thread = threading.Thread(target=self._enter, args=given, name=f"uopattn-{i}", daemon=True)
      thread.start()
      self._threads.append(thread)

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
    job = (ctypes.c_uint64 * _JOB)(kernel, slot, items, helpers, *words)
    if helpers and _core() != self._core:
      self._keep_off(_core())
    try:
      while self._enter(self._shared, job, _RUN):
        pass
    except BaseException:  # the interpreter raises no second exception until the next call has returned
      self._enter(self._shared, job, _CANCEL)
      raise

  def restart(self) -> None:
    """Restart the current job without workers, in the child of a caller that forked in a signal handler.

    The workers do not exist in the child, and items that they had started may be incomplete.
    """
    self._shared[_NEXT] = self._shared[_INSIDE] = 0

  def _keep_off(self, core: int) -> None:
    """Move the workers off the caller's core.

    The scheduler may otherwise keep a woken thread on the core of its waker for longer than a call lasts.
    """
    if others := os.sched_getaffinity(0) - {core}:
      with contextlib.suppress(OSError):  # a sandbox may forbid it
        for thread in self._threads:
          os.sched_setaffinity(cast(int, thread.native_id), others)
    self._core = core  # last, so that after an interrupt the next call repeats the move

  def _stop(self) -> None:
    """End the workers. Later calls, as other exit handlers may make, run on the caller's thread only."""
    self._shared[_STOPPED] = 1
    for _ in self._threads if self._shared[_BELL] else ():
      _LIBC.sem_post(ctypes.c_void_p(self._shared[_BELL]))
    for thread in self._threads:
      thread.join()
    self._threads = []


def _semaphore(place: int) -> int:
  """Return the address of a semaphore whose value is 0, made at `place` or by the system; 0 if it can make none."""
  if _LIBC.sem_init(ctypes.c_void_p(place), 0, 0) == 0:
    return place
  # macOS has only those with names, of at most 31 bytes. On arm64 it passes arguments of a variable number, which are
  # those that argtypes does not list, in other places than the rest.
  sem_open, name = _LIBC.sem_open, f"/uopattn-{os.getpid()}-{secrets.token_hex(4)}".encode()
  sem_open.argtypes, sem_open.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
  found = sem_open(name, os.O_CREAT | os.O_EXCL, ctypes.c_int(0o600), ctypes.c_uint(0))
  if found in _NO_SEMAPHORE:
    return 0
  _LIBC.sem_unlink(name)  # it is open already
  return cast(int, found)


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


def team(workers: int) -> Team:
  """Return the process-wide team; the first call sets its number of workers."""
  global _team
  with _starting:
    _team = _team or Team(workers)
  return _team
