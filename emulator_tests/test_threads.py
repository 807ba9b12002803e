"""Kernels on several threads: every work item once, whatever the number of threads, and nobody else affected."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers import check, qkv
from tinygrad import Context, Device, Tensor
from tinygrad.engine.realize import runtime_cache
from tinygrad.runtime.ops_cpu import CPUProgram

from uopattn import attention, threads
from uopattn.threads import ThreadedProgram, thread_count


class Recorder(ThreadedProgram):
  """A program whose work item is to note itself, and the thread it is on."""

  def __init__(self, slow_item: int | None = None):
    self.runtimevars, self.slow_item = {"core_id": 1}, slow_item
    self.done: list[tuple[int, threading.Thread]] = []
    setattr(self, "fxn", self.note)  # noqa: B010  (declared as a C function)

  def note(self, buffer, item) -> None:
    time.sleep(0.2 if item.value == self.slow_item else 0.002)
    self.done.append((item.value, threading.current_thread()))

  def run(self, items: int) -> list[int]:
    self(SimpleNamespace(va_addr=5), global_size=(items, 1, 1), vals=(None,), wait=True)
    return sorted(item for item, _ in self.done)


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("items", [1, 2, 7, 130])
def test_every_item_once(cores: int, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(threads, "thread_count", lambda: cores)
  monkeypatch.setattr(threads, "usable_cores", lambda: cores)
  monkeypatch.setattr(threads, "_pool", None)
  recorder = Recorder()
  if min(cores, items) > 1:
    assert recorder.run(items) == list(range(items))
    assert 1 < len({thread for _, thread in recorder.done}) <= min(cores, items)


def test_a_long_item_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(threads, "thread_count", lambda: 2)
  recorder = Recorder(slow_item=0)
  assert recorder.run(20) == list(range(20))
  assert recorder.done[-1][0] == 0
  assert len({thread for item, thread in recorder.done if item}) == 1


def test_number_of_threads_follows_tinygrad_and_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(threads, "usable_cores", lambda: 6)
  with Context(NUM_CPU_THREADS=4):
    assert thread_count() == 4
  with Context(NUM_CPU_THREADS=8):
    assert thread_count() == 6
  with Context(NUM_CPU_THREADS=0):
    assert thread_count() == 1


def test_only_our_programs_are_threaded() -> None:
  check(*(x := qkv(1, 9, 9, 70, 70, 16, 16)), attention(*x, backend="kernel"))
  (Tensor([1, 2, 3]) + 4).realize()
  ours = [program for program in runtime_cache.values() if isinstance(program, ThreadedProgram)]
  assert ours
  assert all(program.name.startswith("attention") for program in ours)
  others = [program for program in runtime_cache.values() if type(program) is CPUProgram]
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


def test_after_a_fork() -> None:
  code = """
import os
from tinygrad import Tensor
from uopattn import attention, threads
threads.usable_cores = lambda: 2
threads.thread_count = lambda: 2
q, k, v = (Tensor.randn(1, 32, 256, 64).realize() for _ in range(3))
before = attention(q, k, v, backend="kernel").numpy()
assert threads._pool is not None
child = os.fork()
if child == 0:
  after = attention(q, k, v, backend="kernel").numpy()
  os._exit(0 if (after == before).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ)
  assert done.returncode == 0, done.stderr
