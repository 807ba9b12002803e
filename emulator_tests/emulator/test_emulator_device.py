"""The device itself: registration, targets, workgroups, counts and the model of LDS banks."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from emulator_kernels import ARCHES, groups, kernel, launch, lds, threads
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.codegen import full_rewrite_to_sink
from tinygrad.device import Device
from tinygrad.renderer.cstyle import CUDARenderer, HIPRenderer
from tinygrad.uop.ops import AxisType

import uopattn.emulator as emulator
from uopattn.emulator.launch import BATCH_LANES
from uopattn.emulator.memory import Banks

X = np.random.default_rng(0).standard_normal(64).astype(np.float32)


def python(code, **environment):
  """Runs code in a Python of its own and returns what it prints."""
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
  )
  assert result.returncode == 0, result.stderr
  return result.stdout.strip()


def test_registration_is_cheap():
  code = (
    "import uopattn.emulator, sys; from tinygrad import Device; print('numpy' in sys.modules, Device._opened_devices)"
  )
  assert python(code) == "False set()"


@pytest.mark.parametrize("arch", ["gfx1201", "sm_89"])
def test_device_from_the_environment(arch):
  code = (
    "import uopattn.emulator; from tinygrad import Tensor, Device;"
    "print(Device.DEFAULT, (Tensor([1., 2.]) + 1).tolist(), Device['EMU'].renderer.target)"
  )
  dialect = "AMD:HIPCC" if arch.startswith("gfx") else "CUDA:NVCC"
  assert python(code, DEV=f"EMU::{arch}") == f"EMU [2.0, 3.0] {dialect}:{arch}"


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "sm_89", "amx"])
def test_a_renderer_is_copied(arch):
  """To the processes in which tinygrad compiles many kernels at once."""
  with Context(DEV=f"EMU::{arch}"):
    renderer = Device["EMU"].renderer
  copied = pickle.loads(pickle.dumps(renderer))
  assert (type(copied), copied.target) == (type(renderer), renderer.target)


@pytest.mark.parametrize("arch", ARCHES)
def test_lowers_as_the_target(arch):
  with Context(DEV=f"EMU::{arch}"):
    renderer = Device["EMU"].renderer
  real = HIPRenderer if arch.startswith("gfx") else CUDARenderer
  assert isinstance(renderer, real)
  assert renderer.target.arch == arch
  own = {name for name in vars(type(renderer)) if not name.startswith("_")}
  assert own <= {"render", "compiler"}
  plain = real(renderer.target, True)

  def body(o, x):
    t, s = threads(64), lds(0, 64)
    s = s.after(UOp.barrier(s[t].store((x[t].load() * 3).exp2().maximum(0.5))))
    return kernel("same", [o[t.valid(t < 60)].store(s[63 - t].load().cast(dtypes.bfloat16).cast(dtypes.float))], t)

  sink = body(*(UOp.placeholder((64,), dtypes.float, slot) for slot in range(2)))
  assert full_rewrite_to_sink(sink, renderer) is full_rewrite_to_sink(sink, plain)


def test_unknown_target():
  with Context(DEV="EMU::gfx906"), pytest.raises(ExceptionGroup, match="No renderer for EMU"):
    (Tensor([1.0], device="EMU") + 1).realize()


def test_many_workgroups_run_in_batches():
  count = 3 * BATCH_LANES // 64 + 5

  def number(o, x):
    t, g = threads(64), groups(count)
    s = lds(0, 64)
    s = s.after(UOp.barrier(s[t].store(x[t].load() + g.cast(dtypes.float))))
    return kernel("number", [o[g * 64 + t].store(s[63 - t].load())], t, g)

  got = launch(number, np.zeros(count * 64, np.float32), X).reshape(count, 64)
  np.testing.assert_array_equal(got, X[::-1] + np.arange(count, dtype=np.float32)[:, None])


def test_grid_of_three_axes():
  sizes, local = (3, 4, 5), (2, 3, 4)

  def index(o):
    g = [UOp.range(n, i, AxisType.GLOBAL) for i, n in enumerate(sizes)]
    l = [UOp.range(n, 3 + i, AxisType.LOCAL) for i, n in enumerate(local)]
    at = UOp.const(0)
    for r, n in zip(g + l, sizes + local, strict=True):
      at = at * n + r
    return kernel("index", [o[at].store(at.cast(dtypes.int))], *l, *g)

  total = int(np.prod(sizes + local))
  np.testing.assert_array_equal(launch(index, np.zeros(total, np.int32)), np.arange(total))


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_counts_of_a_small_kernel(arch):
  def turn(o, x):
    t, s = threads(64), lds(0, 128)
    s = s.after(UOp.barrier(s[2 * t].store(x[t].load())))
    return kernel("turn", [o[t].store(s[126 - 2 * t].load().exp2())], t)

  with emulator.profile() as profile:
    launch(turn, X, X, arch=arch)
  c = profile.kernels["turn"]
  assert (c.launches, c.barriers, c.exp2s, c.matrix, c.shuffles) == (1, 1, 64, 0, 0)
  assert (c.global_read, c.global_written, c.lds_read, c.lds_written) == (256, 256, 256, 256)
  assert c.bank_conflicts == 4  # two accesses of 64 lanes, 32 at a time, two words in each bank they use


@pytest.mark.parametrize(
  ("stride", "width", "cycles"),
  [
    (4, 4, 0),  # consecutive words
    (2, 2, 0),  # two lanes share a word
    (0, 4, 0),  # all lanes read one word
    (8, 4, 1),  # every second bank, twice
    (128, 4, 31),  # one bank
    (132, 4, 0),  # padded by a word
    (8, 8, 0),  # consecutive 8 bytes: 2 phases of 16 lanes
    (64, 8, 14),  # rows of 64 bytes: in each phase 8 lanes each want the same 2 banks
    (16, 16, 0),  # consecutive 16 bytes: 4 phases of 8 lanes
    (128, 16, 28),  # rows of 128 bytes: in each phase 8 lanes want the same 4 banks
    (144, 16, 0),  # padded by 16 bytes
  ],
)
def test_bank_model(stride, width, cycles):
  lane = np.arange(32)
  for read in (False, True):
    assert Banks.of("gfx1100").extra_cycles(lane * stride, width, np.zeros(32, int), lane, read) == cycles


def test_banks_of_cdna():
  """A wave of 64 reads 16 bytes from each of 16 rows of 128 bytes, four neighbouring chunks of a row going to lanes l,
  l + 16, l + 32 and l + 48, as matrix fragments do; chunks are XORed with the row."""
  lane, wave = np.arange(64), np.zeros(64, int)
  row, chunk = lane % 16, lane // 16
  swizzled = row * 128 + (chunk ^ (row % 8)) * 16
  plain = row * 128 + chunk * 16
  mi300, mi355 = Banks.of("gfx942"), Banks.of("gfx950")
  assert (mi300.count, mi355.count) == (32, 64)
  for banks, phases in ((mi300, 8), (mi355, 4)):
    for read in (False, True):
      assert len(np.unique(banks.phase(lane, 16, read))) == phases
  groups = [set(np.flatnonzero(mi300.phase(lane, 16, True) == i).tolist()) for i in range(4)]
  assert groups[0] == {0, 1, 2, 3, 20, 21, 22, 23}
  assert groups[3] == {12, 13, 14, 15, 24, 25, 26, 27}
  assert mi300.extra_cycles(plain, 16, wave, lane, True) > mi300.extra_cycles(swizzled, 16, wave, lane, True)
  assert mi300.extra_cycles(lane * 16, 16, wave, lane, False) == 0
  assert mi355.extra_cycles(lane * 256, 4, wave, lane, True) == 63  # one of 64 banks


def test_profiles_nest_and_end():
  def copy(o, x):
    t = threads(64)
    return kernel("copy64", [o[t].store(x[t].load())], t)

  with emulator.profile() as outer:
    with emulator.profile():  # as empty as the outer one
      pass
    launch(copy, X, X)
    with emulator.profile() as inner:
      launch(copy, X, X)
  launch(copy, X, X)
  assert outer.kernels["copy64"].launches == 1
  assert inner.kernels["copy64"].launches == 1
