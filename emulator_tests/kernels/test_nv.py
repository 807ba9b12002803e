"""The CUDA kernels on tinygrad's NV device, without a GPU: tinygrad's own loader gives each launch its shared memory.

The card is a stub. The compiler, the ELF loader and `NVProgram` are those that run on a real one.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from tinygrad import Context, Device, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiled, Compiler
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache
from tinygrad.helpers import Target as renderer_target
from tinygrad.helpers import round_up
from tinygrad.renderer.cstyle import CUDARenderer, NVCCRenderer
from tinygrad.renderer.nir import NAKRenderer
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.runtime import ops_nv
from tinygrad.runtime.ops_nv import NVProgram, nv_gpu
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.uop.ops import Ops

from uopattn import info
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.append import Rows
from uopattn.plan.append import Append, StridedRows
from uopattn.plan.dispatch import WITH_NVRTC_AND_NVCC, NoKernel, delta_launch, dispatch, dispatch_backward, stages
from uopattn.plan.launch import Launch
from uopattn.plan.target import shown, target_of
from uopattn.runtime import cuda
from uopattn.runtime.prepare import prepared
from uopattn.spec.spec import AttentionSpec

HALF, BFLOAT, FLOAT, FP8 = dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.fp8e4m3
RENDERERS = {
  "CUDA": [CUDARenderer, PTXRenderer, NVCCRenderer],
  "NV": [CUDARenderer, PTXRenderer, NVCCRenderer, NAKRenderer],
}
RESERVED = 1024  # bytes of shared memory per workgroup that the system takes
# Cards by the names of their devices: architecture, class of compute commands, GPCs, TPCs per GPC.
CARDS = {
  "NV:1": ("sm_86", nv_gpu.AMPERE_COMPUTE_B, 7, 6),
  "NV:2": ("sm_89", nv_gpu.ADA_COMPUTE_A, 11, 6),
  "NV:3": ("sm_120", nv_gpu.BLACKWELL_COMPUTE_B, 12, 8),
}


class NVDevice(Compiled):
  """A card with what `NVProgram` reads of one; its memory keeps nothing."""

  def __init__(self, device: str):
    arch, compute, self.num_gpcs, self.num_tpc_per_gpc = CARDS[device]
    allocator = SimpleNamespace(
      alloc=lambda size, options: SimpleNamespace(va_addr=0x7F00000000, size=size),
      free=lambda buffer, size, options: None,
      _copyin=lambda buffer, source: None,
    )
    super().__init__(device, allocator, RENDERERS["NV"], NVProgram, arch=arch)  # type: ignore[arg-type]
    self.num_sm_per_tpc, self.sass_version, self.slm_per_thread = 2, 0x89, 0
    self.shared_mem_window, self.local_mem_window = 0x729400000000, 0x729300000000
    self.iface, self.prof_prg_counter = SimpleNamespace(compute_class=compute, count=len(CARDS)), itertools.count()

  def _ensure_has_local_memory(self, required: int) -> None:
    self.slm_per_thread = max(self.slm_per_thread, round_up(required, 32))


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  monkeypatch.setattr(ops_nv, "NVDevice", NVDevice)
  with Context(DEV=WITH_NVRTC_AND_NVCC["NV"][1].removeprefix("DEV=")):
    yield


has_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


def spec(dtype: DType = HALF, M: int = 4096, Dk: int = 64, Dv: int = 64) -> AttentionSpec:
  return AttentionSpec(1, 4, 4, M, 4096, Dk, Dv, dtype, Dk**-0.5, return_lse=True, tf32=True)


Run = Callable[[AttentionSpec, Target], tuple[Launch, ...]]


def forward(given: AttentionSpec, target: Target) -> tuple[Launch, ...]:
  return stages(dispatch(given, target))


def backward(given: AttentionSpec, target: Target) -> tuple[Launch, ...]:
  delta = delta_launch(given, target, has_dlse=True)
  assert delta is not None
  return delta, *dispatch_backward(given, target)


LARGEST = spec(M=50, Dk=136, Dv=68)  # whose tiles take all shared memory
CASES: dict[str, tuple[Run, AttentionSpec]] = {
  "forward": (forward, spec()),
  "all shared memory": (forward, LARGEST),
  "decode in splits": (forward, spec(M=1)),
  "fp8": (forward, spec(FP8)),
  "backward": (backward, spec()),
}


def shared_memory(launch: Launch) -> int:
  """Bytes of dynamic shared memory that a kernel uses."""
  return cuda.shared_offsets(tuple(launch.graph().toposort()))[1]


def start_of_shared_memory(program: NVProgram, cubin: bytes) -> int:
  """The address behind which the compiler places dynamic shared memory: where that of the system ends, or 0."""
  name = f".nv.shared.{program.name}"
  return next((int(x.header.sh_size) for x in elf_loader(cubin)[1] if x.name == name), 0)


def in_launch(program: NVProgram) -> int:
  """Bytes of shared memory of a workgroup, as the command to the GPU says."""
  if program.qmd.ver == 5:
    return int(program.qmd.read("shared_memory_size_shifted7")) << 7
  return int(program.qmd.read("shared_memory_size"))


def check(made: UOp, program: object, needed: int, arch: str) -> None:
  """Fail unless a launch has the shared memory and threads that its kernel needs, and no more than the card has.

  Args:
    made: the PROGRAM, whose cubin is as the compiler left it.
    program: as tinygrad will call it.
    needed: bytes of dynamic shared memory.
  """
  assert isinstance(program, NVProgram)
  first = start_of_shared_memory(program, made.to_elf().lib)
  assert first in (0, RESERVED)
  assert first + needed <= in_launch(program), "too little shared memory"
  assert in_launch(program) <= lds_limit(arch) + RESERVED
  assert program.max_threads >= math.prod(made.arg.local_size)


def check_launch(launch: Launch, device: str) -> None:
  made = launch.build(device)
  check(made, runtime_cache[made.key, device], shared_memory(launch), CARDS[device][0])


def has_type(dtype: DType, device: str) -> bool:
  return dtype != FP8 or CARDS[device][0] != "sm_86"


QUICK = [(name, device) for name, (_, given) in CASES.items() for device in CARDS if has_type(given.dtype, device)]


@pytest.mark.kinds(name=("decode in splits",))
@has_nvcc
@pytest.mark.each("name", "device")
@pytest.mark.parametrize(("name", "device"), QUICK)
def test_a_launch_has_what_its_kernel_needs(name: str, device: str) -> None:
  run, given = CASES[name]
  for launch in run(given, target_of(device)):
    check_launch(launch, device)


OF_A_PASS = [
  # bfloat16 has the tiles of float16
  pytest.param(device, run, dtype, marks=pytest.mark.slowest if run is backward or dtype == BFLOAT else ())
  for device in CARDS
  for run, types in ((forward, (HALF, BFLOAT, FLOAT, FP8)), (backward, (HALF, BFLOAT, FLOAT)))
  for dtype in types
  if has_type(dtype, device)
]
SIZES = ((64, 64), (256, 256))
MORE_SIZES = ((8, 8), (40, 24), (96, 96), (128, 128), (136, 68), (192, 128))


@has_nvcc
@pytest.mark.slow
@pytest.mark.each("device", "run", "dtype", evenly=True)
@pytest.mark.parametrize(("device", "run", "dtype"), OF_A_PASS)
@pytest.mark.parametrize("sizes", [SIZES, pytest.param(MORE_SIZES, marks=pytest.mark.slowest)], ids=["", "more"])
def test_launches_with_all_tiles_have_what_their_kernels_need(
  sizes: tuple[tuple[int, int], ...], device: str, run: Run, dtype: DType
) -> None:
  """Of the tiles that dispatch chooses for some sizes, each with the first of them."""
  target, seen = target_of(device), set()
  for (Dk, Dv), M in itertools.product(sizes, (1, 17, 50, 4096)):
    with suppress(NoKernel):
      for launch in run(spec(dtype, M, Dk, Dv), target):
        if (kind := (launch.schedule.name, launch.kernel.outputs, launch.tiles)) not in seen:
          seen.add(kind)
          check_launch(launch, device)
  assert len(seen) > 2


@has_nvcc
@pytest.mark.parametrize("device", ["NV:1", "NV:3"])
def test_a_cubin_as_the_compiler_leaves_it_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
  launch, _ = forward(LARGEST, target_of(device))  # of the splits of its keys
  made, needed = launch.build(device), shared_memory(launch)
  monkeypatch.setattr(cuda, "with_shared_memory", lambda cubin, name, size: cubin)
  program = cuda.loaded(made.to_elf(), Device[device], needed)
  with pytest.raises(AssertionError, match="too little shared memory"):
    check(made, program, needed, CARDS[device][0])


@pytest.mark.parametrize(("device", "units"), [("NV:1", 84), ("NV:2", 132), ("NV:3", 192)])
def test_target(device: str, units: int) -> None:
  target = target_of(device)
  assert target == Target("CUDA", CARDS[device][0], units=units)
  assert shown(target, device) == f"NV {target.arch}"


@pytest.mark.parametrize(("kind", "renderer"), [("NV", PTXRenderer), ("NV", NAKRenderer), ("CUDA", PTXRenderer)])
def test_what_to_set_where_tinygrad_renders_something_else(
  kind: str, renderer: type[PTXRenderer | NAKRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
  taken = renderer.__new__(renderer)  # its compiler may be missing here
  taken.target = renderer_target(kind, kind, "sm_89")
  monkeypatch.setattr("uopattn.plan.target.kernel_renderer", lambda device: taken)
  with pytest.raises(NoKernel) as refused:
    dispatch(spec(), target_of(kind))
  nvrtc, nvcc = WITH_NVRTC_AND_NVCC[kind]
  name = renderer.__name__.removesuffix("Renderer")
  assert refused.value.reasons == (
    f"no kernel for device {kind}:{name}; kernels are CUDA C++: set {nvrtc}, which needs NVRTC, or {nvcc}, which needs "
    "nvcc",
  )


@pytest.mark.parametrize(("kind", "renderer"), [("NV", NAKRenderer), ("CUDA", PTXRenderer)])
def test_caches_are_written_where_tinygrad_renders_something_else(
  kind: str, renderer: type[PTXRenderer | NAKRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
  """The kernel has tinygrad's own ops alone, so its renderer gets it as it is."""
  opened = SimpleNamespace(renderer=renderer.__new__(renderer))
  monkeypatch.setattr("uopattn.runtime.prepare.opened", lambda device: opened)
  rows, new = (StridedRows((2, 2, n, 16), HALF, None) for n in (9, 3))
  call = Append((rows, rows), None, (new, new), Rows(9), (), None, False, None)
  kernel = prepared(lambda call: (call.graph(False), call.estimates()), kind, call)
  assert kernel.op is Ops.SINK
  ptx = PTXRenderer(renderer_target("CUDA", "PTX", "sm_89"))
  ptx.compiler = Compiler()  # nobody assembles it
  assert any(x.op is Ops.SOURCE and "st.global" in x.arg for x in to_program(kernel, ptx).src)


@pytest.mark.parametrize("kind", RENDERERS)
def test_what_to_set_is_what_tinygrad_calls_it(kind: str) -> None:
  device = Compiled.__new__(Compiled)
  device.device = kind
  names = tuple(f"DEV={kind}:{device._renderer_name(x)}" for x in (CUDARenderer, NVCCRenderer))
  assert names == WITH_NVRTC_AND_NVCC[kind]


@pytest.mark.parametrize(
  ("target", "lines"),
  [
    (
      Target("CUDA", "sm_89"),
      ("device     NV sm_89\n", "kernel     cuda_forward: serves float, half, bfloat16"),
    ),
    (Target("NV:NAK", "sm_89"), ("device     NV:NAK sm_89\n", "kernel     none: no kernel for device NV:NAK; kernels")),
  ],
)
def test_info(
  target: Target, lines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setattr(info, "default_target", lambda: target)
  assert info.report() == 0
  said = capsys.readouterr().out
  for x in lines:
    assert x in said
