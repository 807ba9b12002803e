"""The CPU kernels on a Mac, as far as another machine can show it: none needs Linux, and all can be loaded there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cpu_target
from test_cpu_assembly import source_of
from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.runtime.support import elf
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target
from uopattn.plan.dispatch import delta_launch, dispatch, dispatch_backward, stages, sums_launch
from uopattn.runtime import threads
from uopattn.runtime.clang import find_clang
from uopattn.spec.spec import AttentionSpec

MAC = "arm64,apple-m1"
MACH_O = b"\xcf\xfa\xed\xfe"

# tinygrad has code of its own for macOS, which cannot run here: it is imported before the system changes its name.
WITHOUT_LINUX = """
import ctypes, os, sys
import numpy as np
from tinygrad import Device, Tensor
Device["CPU"]

LINUX_ALONE = {"sched_getcpu", "sched_getaffinity", "sched_setaffinity", "syscall", "prctl", "gettid", "sem_init"}
LINUX_ALONE.add("pthread_getattr_np")

def hide(event, given):
  if event == "open" and isinstance(given[0], str) and given[0].startswith(("/proc", "/sys")):
    raise FileNotFoundError(given[0])
  if event == "ctypes.dlsym" and given[1] in LINUX_ALONE:
    raise AttributeError(given[1])

for name in [name for name in dir(os) if name.startswith("sched_")]:
  delattr(os, name)
sys.platform = "darwin"
sys.addaudithook(hide)

from uopattn import attention
from uopattn import info, run
from uopattn.runtime import threads

class System(ctypes.CDLL):
  def sem_init(self, *given):  # it is there, and fails
    return -1
  pthread_get_stacksize_np = staticmethod(lambda thread: 16 << 20)

threads._LIBC = System(None)
small = ["N=100", "D=24", "H=6", "HKV=2", "CNT=1", "CAUSAL=1"]
for words in (small, [*small, "DTYPE=bfloat16"], [*small, "M=1", "N=1000", "CAUSAL=0"]):
  sys.argv[1:] = words
  assert run.main() == 0
assert len(threads._team._threads) == os.cpu_count() - 1
assert not threads._team._threads or threads._team._shared.bell

threads._stack = threads._Stack()
assert threads._stack.size == 16 << 20

x = np.random.default_rng(0).standard_normal((3, 1, 2, 70, 16)).astype(np.float32)
gradients = []
for backend in ("kernel", "reference"):
  q, k, v = (Tensor(a).is_param_() for a in x)
  attention(q, k, v, is_causal=True, backend=backend).square().mean().backward()
  gradients.append([a.grad.numpy() for a in (q, k, v)])
for ours, wanted in zip(*gradients, strict=True):
  np.testing.assert_allclose(ours, wanted, atol=1e-6)

sys.argv[1:] = []
assert info.main() == 0
"""


def test_nothing_needs_linux() -> None:
  """Neither its files nor its functions, which macOS lacks; of its semaphores macOS has those with names."""
  done = subprocess.run(
    [sys.executable, "-c", WITHOUT_LINUX], capture_output=True, text=True, env=os.environ | {"DEV": "CPU"}, timeout=300
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("flash attention is correct!") == 3
  assert "kernel     cpu_forward: serves float, half, bfloat16" in done.stdout


def sources(dtype: DType, target: Target) -> dict[str, str]:
  """The C text of all kernels of a forward pass, of one whose keys are split, and of a backward pass, by name."""
  spec = AttentionSpec(1, 8, 4, 200, 200, 64, 64, dtype, 0.125, masks=(Window(None, 0),))
  few = AttentionSpec(1, 4, 1, 1, 50_000, 64, 64, dtype, 0.125)
  launches = [*stages(dispatch(spec, target)), *stages(dispatch(few, target)), *dispatch_backward(spec, target)]
  launches += [delta_launch(spec, target, False), sums_launch(spec, 2, 64)]
  return {x.graph().arg.name: source_of(x.graph(), target.arch) for x in launches}


def loaded(code: bytes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
  """What an object takes from the system's libraries; tinygrad's loader raises an exception if it cannot place it."""
  names: set[str] = set()

  def link(name: str, libraries: object) -> int:
    names.add(name)
    return 1 << 40  # far away

  monkeypatch.setattr(elf, "link_sym", link)
  elf.jit_loader(code, base=1 << 33)
  return names


def check_code(source: str, target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """A Mac's loader can place the code, it needs nothing but the C library, and a compiler for macOS takes the text."""
  assert loaded(ClangCompiler(target.arch.split(",")).compile(source), monkeypatch) <= {"memcpy", "memset"}
  made = folder / "code.o"
  words = ("--target=arm64-apple-macosx", "-c", "-x", "c", "-O2", "-ffreestanding", "-", "-o", str(made))
  done = subprocess.run([find_clang(), *words], input=source, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert made.read_bytes().startswith(MACH_O)


@pytest.mark.kinds(dtype=(dtypes.bfloat16,))
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
def test_code_of_the_kernels(dtype: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  target = cpu_target(MAC)
  found = sources(dtype, target)
  for source in found.values():
    check_code(source, target, tmp_path, monkeypatch)


def test_code_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  check_code(threads._SOURCE, cpu_target(MAC), tmp_path, monkeypatch)
