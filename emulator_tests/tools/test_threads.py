"""Kernels on several threads: every work item once, whatever the number of threads, and nobody else affected."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
from helpers import check, qkv
from tinygrad import Context, Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.engine.realize import runtime_cache
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.runtime.support.elf import elf_loader

from uopattn import attention
from uopattn.dsl import Scope, make_kernel
from uopattn.runtime import machine, threads
from uopattn.runtime.machine import thread_count
from uopattn.runtime.threads import _SOURCE, MOST_ARGUMENTS, Team, ThreadedProgram, useful_threads


class Recorder:
  """A kernel whose work item is to note itself, what else it was given, and the thread it is on.

  The first item lasts until other threads have done `waits_for` items: a busy machine may wake them late.
  """

  def __init__(self, slow_item: int | None = None, waits_for: int = 0):
    self.slow_item, self.waits_for = slow_item, waits_for
    self.enough = threading.Event()
    self.done: list[tuple[int, int, threading.Thread]] = []
    self.function = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)(self.note)

  def note(self, given: int, item: int) -> None:
    time.sleep(0.2 if item == self.slow_item else 0.002)
    if item == 0 and self.waits_for:
      self.enough.wait(timeout=20)
    self.done.append((item, given, threading.current_thread()))
    if len(self.done) >= self.waits_for:
      self.enough.set()

  def run(self, team: Team, items: int, threads: int) -> list[int]:
    address = ctypes.cast(self.function, ctypes.c_void_p).value
    assert address is not None
    team.run(address, (5, 0), 1, items, threads)
    assert {given for _, given, _ in self.done} == {5}
    return sorted(item for item, _, _ in self.done)


@pytest.fixture(scope="module")
def three() -> Team:
  return Team(3)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("items", [1, 2, 7, 130])
def test_every_item_once(three: Team, threads: int, items: int) -> None:
  for pause in (0, 0.1):  # workers that are awake, workers that sleep
    time.sleep(pause)
    recorder = Recorder(waits_for=int(min(items, threads) > 1))
    assert recorder.run(three, items, threads) == list(range(items))
    assert min(threads, items, 2) <= len({thread for _, _, thread in recorder.done}) <= min(threads, items, 4)


def test_a_long_item_does_not_hold_up_the_others(three: Team) -> None:
  recorder = Recorder(waits_for=19)
  assert recorder.run(three, 20, 2) == list(range(20))
  assert recorder.done[-1][0] == 0
  assert len({thread for item, _, thread in recorder.done if item}) == 1


def test_a_worker_that_lacks_the_interpreter_lock_when_a_job_comes_does_not_miss_it(three: Team) -> None:
  """As in an eager call: Python for longer than a worker looks out for jobs, then a job."""
  for _ in range(5):
    Recorder().run(three, 8, 4)
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
      pass
    recorder = Recorder(waits_for=1)
    assert recorder.run(three, 30, 2) == list(range(30))
    assert len({thread for _, _, thread in recorder.done}) == 2


def test_callers_at_once_do_not_wait_for_each_other(three: Team) -> None:
  recorders = [Recorder(slow_item=3) for _ in range(4)]
  with ThreadPoolExecutor(4) as pool:
    for items in pool.map(lambda recorder: recorder.run(three, 10, 4), recorders):
      assert items == list(range(10))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not move threads")
def test_workers_keep_off_the_callers_core(three: Team) -> None:
  allowed = os.sched_getaffinity(0)
  if len(allowed) < 2:
    pytest.skip("there is one core")
  try:
    for core in (*allowed, min(allowed)):
      os.sched_setaffinity(0, {core})  # the workers have nowhere else to go, and stay where they are
      assert Recorder().run(three, 30, 4) == list(range(30))
      os.sched_setaffinity(0, allowed)
      three._core = -1
      assert Recorder().run(three, 30, 4) == list(range(30))
      assert three._core in allowed
      assert all(os.sched_getaffinity(thread.native_id or 0) == allowed - {three._core} for thread in three._threads)
  finally:
    os.sched_setaffinity(0, allowed)


def test_workers_stay_where_the_system_does_not_move_threads(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("sched_getaffinity", "sched_setaffinity"):
    monkeypatch.delattr(os, name, raising=False)
  two = Team(1)
  assert Recorder(waits_for=1).run(two, 5, 2) == list(range(5))
  assert two._core == -1


@contextmanager
def small_stacks() -> Iterator[None]:
  """Threads that are started have a stack of 1 MiB."""
  before = threading.stack_size(1 << 20)
  try:
    yield
    assert threading.stack_size() == 1 << 20
  finally:
    threading.stack_size(before)


def test_workers_have_the_stack_that_kernels_need() -> None:
  """Whatever other threads get."""
  sizes = {}

  class Noting(Recorder):
    def note(self, given: int, item: int) -> None:
      sizes[threading.current_thread().name] = threads._stack.size
      super().note(given, item)

  with small_stacks():
    one = Team(1)
  Noting(waits_for=1).run(one, 5, 2)
  assert sizes["uopattn-0"] >= threads.WORKER_STACK


def test_a_caller_with_too_small_a_stack() -> None:
  s = Scope()
  array = s.assign(s.buffer(1 << 19), lambda i: i.cast(dtypes.float))
  kernel = make_kernel("large_array", (), UOp.placeholder((1,), dtypes.float, 0)[0].store(array[5].load()))
  made = threads.threaded(kernel, "CPU", Estimates())
  program, out = runtime_cache[(made.key, "CPU")], Tensor.empty(1).contiguous().realize()
  buffer = cast(Buffer, out.uop.buffer).get_buf("CPU")
  program(buffer)
  assert out.item() == 5
  with small_stacks(), ThreadPoolExecutor(1) as pool:
    called = pool.submit(program, buffer)
    with pytest.raises(RuntimeError, match=r"large_array has 2097152 bytes on the stack, too many for this thread's"):
      called.result()


def test_too_many_arguments(three: Team) -> None:
  with pytest.raises(ValueError, match=f"a kernel of {MOST_ARGUMENTS} arguments; at most {MOST_ARGUMENTS - 1} can be"):
    three.run(0, [0] * MOST_ARGUMENTS, 1, 1, 1)


def test_number_of_threads_follows_tinygrad_and_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(machine, "usable_cores", lambda: 6)
  with Context(NUM_CPU_THREADS=4):
    assert thread_count() == 4
  with Context(NUM_CPU_THREADS=8):
    assert thread_count() == 6
  with Context(NUM_CPU_THREADS=0):
    assert thread_count() == 1


def test_small_kernels_take_few_threads() -> None:
  for ops, mem, most in ((1000, 1000, 1), (7_000_000, 1000, 3), (1000, 1 << 20, 8)):
    assert useful_threads(Estimates(ops=ops, mem=mem)) == most
  x = qkv(1, 3, 3, 20, 21, 16, 16)
  attention(*x, backend="kernel").realize()
  (program,) = [x for x in runtime_cache.values() if isinstance(x, ThreadedProgram) and "_3_3_20_21_" in x.name]
  assert program.most == 1


def test_only_our_programs_are_threaded() -> None:
  before = set(runtime_cache)
  check(*(x := qkv(1, 9, 9, 71, 70, 16, 16)), attention(*x, backend="kernel"))
  (Tensor([1, 2, 3, 5, 8, 13, 21]) * 34 + 55).realize()
  added = [program for key, program in runtime_cache.items() if key not in before]
  ours = [program for program in added if isinstance(program, ThreadedProgram)]
  assert ours
  assert all(program.name.startswith("attention") for program in ours)
  others = [program for program in added if type(program) is CPUProgram]
  assert others
  assert not any(program.name.startswith("attention") for program in others)
  assert Device["CPU"].runtime_t is CPUProgram


def test_one_thread_gives_the_same_bits() -> None:
  inputs = qkv(1, 8, 8, 200, 200, 64, 64)
  many = attention(*inputs, is_causal=True, backend="kernel").numpy()
  with Context(NUM_CPU_THREADS=1):
    assert (attention(*inputs, is_causal=True, backend="kernel").numpy() == many).all()


def test_many_python_threads_at_once() -> None:
  inputs = [qkv(1, 12, 12, 150, 150, 64, 64, seed=seed) for seed in range(6)]
  outs = [attention(*x, backend="kernel") for x in inputs]
  program = next(p for p in runtime_cache.values() if isinstance(p, ThreadedProgram))
  assert program.addr
  for out in outs:
    out.realize()
  wanted = [out.numpy() for out in outs]
  results = [Tensor.empty(*out.shape) for out in outs]

  def run(index: int) -> None:
    q, k, v = inputs[index]
    results[index] = attention(q, k, v, backend="kernel").realize()

  with ThreadPoolExecutor(6) as pool:
    for _ in range(3):
      list(pool.map(run, range(6)))
  for want, result in zip(wanted, results, strict=True):
    assert (result.numpy() == want).all()


SIGNALLED = """
import ctypes, os, random, signal, sys, threading, time
from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from uopattn.runtime import threads

SOURCE = '''
void kernel(long *counts, int (*usleep)(unsigned), long nap, long company, long item) {
  long begun = __atomic_add_fetch(&counts[0], 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 10000 && begun < company; i++) {
    usleep(1000);
    begun = __atomic_load_n(&counts[0], __ATOMIC_SEQ_CST);
  }
  if (nap) usleep(nap); else for (volatile int i = 0; i < 20000; i++) {}
  __atomic_fetch_add(&counts[2 + item], 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(&counts[1], begun >= company, __ATOMIC_SEQ_CST);
}
'''
target = Device["CPU"].renderer.target
code = ClangCompiler(target.arch.split(",")).compile(SOURCE)
program = CPUProgram(Device["CPU"], TinyELF(code, "kernel", target, ()))
usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
threads.usable_cores = lambda: 4
ITEMS, four = 40, threads.team()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it

class Counts:
  def __init__(self):
    self.words = (ctypes.c_long * (2 + ITEMS))()
  def run(self, nap, company=0, items=ITEMS):
    threads.team().run(program.addr, (ctypes.addressof(self.words), usleep, nap, company, 0), 4, items, 4)
  def done(self):
    return self.words[2:] == [1] * ITEMS
"""


def signalled(code: str) -> None:
  """Runs Python code after SIGNALLED in a process of its own, as signals may not disturb the tests' own."""
  command = [sys.executable, "-c", SIGNALLED + code]
  done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_exceptions_of_signal_handlers_leave_the_team_free() -> None:
  """At any moment of a call, one after another; and then all threads do the items of a call."""
  signalled("""
def running(frame):
  while frame is not None and frame.f_code is not threads.Team.run.__code__:
    frame = frame.f_back
  return frame is not None

raised = halfway = 0
looking = False  # the next signal can come sooner than the handler ends
def handler(_, frame):
  global raised, looking
  if looking:
    return
  looking = True
  hit = running(frame)
  looking = False
  if hit:
    raised += 1
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, handler)
random.seed(1)
for nap, rounds, longest, again in ((0, 400, 0.0005, 0.00005), (20000, 12, 0.15, 0.03)):
  for _ in range(rounds):
    time.sleep(random.choice((0, 0.003)))  # workers that are awake, workers that sleep
    counts = Counts()
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest), again)
    try:
      counts.run(nap)
    except KeyboardInterrupt:
      halfway += 0 < sum(counts.words[2:]) < ITEMS
    else:
      assert counts.done()
    begun, ended = counts.words[0], counts.words[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert begun == ended and max(counts.words[2:]) <= 1
    assert four._shared.inside == threads._CLOSED and not four._shared.taken
assert raised > 100 and halfway > 3, (raised, halfway)
time.sleep(0.1)
assert four._shared.asleep == 3
counts = Counts()
counts.run(0, company=4, items=4)
assert counts.words[1] == 4
""")


def test_each_kind_of_sleep_and_all_workers_end_before_their_code_is_freed() -> None:
  """On semaphores without a name, on those with one, which alone macOS has, and in naps where there is neither.

  Other exit handlers' calls come later, and run without workers; whoever still slept would crash in `Last`.
  """
  signalled("""
import atexit, glob

class Last:
  def __del__(self, sleep=time.sleep):
    sleep(0.05)

sys.last = Last()  # the last module to be cleared

def handler():
  ended = not any(thread.name.startswith("uopattn") for thread in set(threading.enumerate()) - before)
  counts = Counts()
  counts.run(0)
  if not ended or not counts.done():
    os._exit(1)  # no exception of a handler does so

before = set(threading.enumerate())
atexit.register(handler)

class Named(ctypes.CDLL):
  def sem_init(self, *given):
    return -1

class Neither(Named):
  sem_open = staticmethod(lambda *given: None)

class NeitherAsOnMacOS(Named):
  sem_open = staticmethod(lambda *given: (1 << 64) - 1)

teams = [four]
for system in (Named, Neither, NeitherAsOnMacOS):
  threads._LIBC = system(None)
  threads._team = threads.Team(3)
  teams.append(threads._team)
  for pause in (0, 0.1):
    time.sleep(pause)
    counts = Counts()
    counts.run(0, company=2)
    assert counts.done() and counts.words[1]
time.sleep(0.1)
assert [bool(x._shared.bell) for x in teams] == [True, True, False, False]
assert [x._shared.asleep for x in teams] == [3, 3, 0, 0]
assert not glob.glob(f"/dev/shm/*uopattn-{os.getpid()}-*")  # where Linux keeps semaphores that have a name
""")


def test_ctrl_c_ends_a_long_call() -> None:
  signalled("""
counts = Counts()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
  counts.run(300000)
except KeyboardInterrupt:
  raise SystemExit(sum(counts.words[2:]) > ITEMS // 2)
raise SystemExit("not interrupted")
""")


@pytest.mark.slow
def test_forks_while_the_team_is_taken() -> None:
  """In a signal handler of its caller, who goes on in both processes, and in another thread."""
  signalled("""
child = None
def fork(*_):
  global child
  child = os.fork()

signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.05)
counts = Counts()
counts.run(20000)
if child == 0:
  os._exit(0 if min(counts.words[2:]) == 1 else 1)
assert counts.done()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

thread = threading.Thread(target=Counts().run, args=(20000,))
thread.start()
while not four._shared.taken:
  pass
child = os.fork()
if child == 0:
  counts = Counts()
  counts.run(0, company=4, items=4)
  os._exit(0 if counts.words[1] == 4 and threads._team is not four else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
""")


def test_after_a_fork() -> None:
  code = """
import os
import numpy as np
from tinygrad import Tensor
from uopattn import attention
from uopattn.runtime import threads
threads.usable_cores = lambda: 2
threads.thread_count = lambda: 2
q, k, v = (Tensor(np.random.randn(1, 32, 512, 16).astype(np.float32)) for _ in range(3))
before = attention(q, k, v, backend="kernel").numpy()
parent = threads._team
assert parent is not None
child = os.fork()
if child == 0:
  after = attention(q, k, v, backend="kernel").numpy()
  assert threads._team is not parent
  os._exit(0 if (after == before).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4", "sapphirerapids"])
def test_the_code_calls_no_library(cpu: str) -> None:
  elf_loader(ClangCompiler(["x86_64", cpu]).compile(_SOURCE))  # raises if it does
