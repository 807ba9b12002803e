"""What NVIDIA's compiler makes of the CUDA kernels: no spills, and asynchronous products stay asynchronous."""

import functools
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import sass
from helpers import dispatch_among
from report_cuda import ARCHES, HALVES, TYPES, Compiled, by_nvcc, compiled, figure, measure, rendered, resident, source
from tinygrad import UOp

from uopattn.dsl.gpu.terms import PAIRS
from uopattn.dsl.instructions import Cuda
from uopattn.dsl.rules.bias import Bias, IndexedBy
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_backward, cuda_forward, hopper_backward, hopper_float32_forward, hopper_forward
from uopattn.plan.dispatch import bias_launch, dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.plan.tiles import cuda, hopper
from uopattn.spec.spec import AttentionSpec

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

HEADS, LENGTH = 8, 4096  # several blocks of queries per multiprocessor of an H200
measured = functools.cache(measure)
QUICK = [
  ("sm_80", 64, True, "float16"),
  ("sm_89", 128, False, "bfloat16"),
  ("sm_80", 128, False, "float16"),
  ("sm_80", 256, True, "float16"),
  ("sm_90", 64, True, "bfloat16"),
  ("sm_90", 128, True, "float16"),
  ("sm_90", 256, False, "float16"),
  ("sm_89", 64, True, "fp8e4m3"),
  ("sm_89", 128, False, "fp8e5m2"),
  ("sm_90", 64, True, "fp8e5m2"),
  ("sm_90", 128, True, "fp8e4m3"),
  ("sm_75", 64, True, "float16"),
  ("sm_80", 64, True, "float32"),
  ("sm_89", 128, False, "float32"),
  ("sm_90", 128, True, "float32"),
]
EVERY = [(arch, D, dtype) for arch in ARCHES for D in (64, 128, 256) for dtype in HALVES]
EVERY += [(arch, D, dtype) for arch in ("sm_89", "sm_90") for D in (64, 128) for dtype in ("fp8e4m3", "fp8e5m2")]
EVERY += [("sm_75", D, "float16") for D in (64, 128)]
EVERY += [(arch, D, "float32") for arch in ARCHES for D in (64, 128)]
REST = [
  (arch, D, causal, dtype)
  for arch, D, dtype in EVERY
  for causal in (False, True)
  if (arch, D, causal, dtype) not in QUICK
]


def matrix_instructions(launch: Launch, D: int) -> int:
  """Of one tile of keys, for a warp or a warpgroup."""
  tiles = launch.tiles
  if isinstance(tiles, hopper_forward.Tiles):
    return D // tiles.step + tiles.block_n // tiles.step
  if isinstance(tiles, hopper_float32_forward.Tiles):
    return len(PAIRS[hopper_float32_forward.TERMS]) * (D // 16 + tiles.block_n // 16)
  assert isinstance(tiles, cuda_forward.Tiles)
  each = {(1, False): 1, (1, True): 2, (2, False): 3}[tiles.terms, tiles.turing]  # instructions for a step
  return 2 * tiles.m_tiles * (tiles.block_n // 8) * (D // tiles.step) * each


def check_compiled(arch: str, D: int, causal: bool, dtype: str) -> Compiled:
  c = measured(arch, dtype, HEADS, LENGTH, LENGTH, D, causal)
  on_hopper = "hopper_float32_forward" if dtype == "float32" else "hopper_forward"
  assert c.launch.schedule.name == (on_hopper if arch == "sm_90" else "cuda_forward")
  once = 24 if (arch, D, dtype.startswith("fp8")) == ("sm_90", 64, True) else 0  # per job, not per tile
  if (arch, D, causal) == ("sm_80", 128, False) and dtype in HALVES:
    once = 8  # one word, which is stored before the loop and loaded once per tile
  assert c.spills <= once
  assert c.stack <= once
  assert c.registers <= 255
  assert c.shared >= c.launch.tiles.shared_bytes(D, D)
  assert c.resident >= 1
  assert "serializ" not in c.said  # "Potential Performance Loss: wgmma.mma_async instructions are serialized"
  return c


@pytest.mark.kinds(dtype=("float16", "fp8e4m3"), arch=("sm_75", "sm_80", "sm_89"), D=(64,))
@pytest.mark.each("arch", "D", "causal", "dtype", evenly=True)
@pytest.mark.parametrize(
  ("arch", "D", "causal", "dtype"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_no_spills(arch: str, D: int, causal: bool, dtype: str) -> None:
  check_compiled(arch, D, causal, dtype)


@pytest.mark.kinds(D=(64,))
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_last_tile_that_is_not_full_spills_nothing(D: int) -> None:
  c = measure("sm_90", "float16", 512, 1000, 1000, D, causal=False)
  assert c.launch.schedule.name == "hopper_forward"
  assert c.launch.tiles.persistent
  assert (c.stack, c.spills) == (0, 0)


@pytest.mark.each("arch", "D", "causal", "dtype")
@pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
@pytest.mark.parametrize(("arch", "D", "causal", "dtype"), QUICK)
def test_main_loop_is_a_tile_of_keys(arch: str, D: int, causal: bool, dtype: str) -> None:
  c = check_compiled(arch, D, causal, dtype)
  assert c.loop is not None
  assert c.loop["matrix"] == matrix_instructions(c.launch, D)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "dtype"), [(64, "fp8e5m2"), (128, "fp8e4m3")])
def test_eight_bits_on_hopper_by_mma(D: int, dtype: str) -> None:
  """Hopper has no mma.sync of 8 bits: ptxas widens the operands and takes two of 16 bits."""
  problem = AttentionSpec(1, HEADS, HEADS, LENGTH, LENGTH, D, D, TYPES[dtype], D**-0.5, masks=(Window(None, 0),))
  tiles = next(cuda.forward(problem, Target("CUDA", "sm_90")))
  c = measure("sm_90", dtype, HEADS, LENGTH, LENGTH, D, True, tiles)
  assert c.launch.schedule.name == "cuda_forward"
  assert (c.stack, c.spills) == (0, 0)
  if sass.disassembler() is None:
    pytest.skip("no nvdisasm")
  assert c.loop is not None
  assert c.loop["matrix"] == 2 * matrix_instructions(c.launch, D)


@pytest.mark.slow
def test_untied_sums_would_spill(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of P, which the compiler then adds up only after P V."""
  monkeypatch.setattr(Cuda, "tied", lambda dialect, value, other: value)
  assert measure("sm_80", "float16", HEADS, LENGTH, LENGTH, 128, causal=False).spills > 0


@pytest.mark.parametrize(
  ("D", "causal", "tiles", "at_once"),
  [
    pytest.param(D, causal, x.tiles, x.resident, marks=pytest.mark.slow if x is candidates[0] else pytest.mark.slowest)
    for (D, causal), candidates in hopper.MEASURED.items()
    for x in candidates
  ],
)
def test_as_many_workgroups_at_once_as_the_choice_of_tiles_takes_for_granted(
  D: int, causal: bool, tiles: hopper_forward.Tiles, at_once: int
) -> None:
  c = measure("sm_90", "float16", HEADS, LENGTH, LENGTH, D, causal, tiles)
  assert resident("sm_90", c.registers, c.shared, tiles.threads) == at_once


SPILLED = {("backward_kv", "sm_80", False, "float16", 64): 20}  # bytes; see `cuda_backward`


BACKWARD = [
  ("sm_80", False, "float16"),
  ("sm_90", True, "float16"),
  ("sm_90", False, "float16"),
  ("sm_75", False, "float16"),
  ("sm_80", False, "float32"),
  ("sm_90", False, "float32"),
]


def of_backward(arch: str, causal: bool, dtype: str, D: int) -> Any:
  """A case; `--slow` has those of D=64, which need fewer registers, but for two, and sm_80's kernel on sm_90."""
  slowest = (arch, causal, dtype) not in (BACKWARD[:2] if D == 64 else BACKWARD[:5])
  slow = D == 64 or "float32" in dtype or arch == "sm_75"
  return pytest.param(
    arch, causal, dtype, D, marks=pytest.mark.slowest if slowest else pytest.mark.slow if slow else ()
  )


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize(("arch", "causal", "dtype", "D"), [of_backward(*x, D) for D in (64, 128) for x in BACKWARD])
def test_backward_does_not_spill(arch: str, causal: bool, dtype: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Of the passes in two kernels: `test_hopper_backward` has that in one."""
  dispatch_among(monkeypatch, [hopper_backward.SCHEDULE, cuda_backward.SCHEDULE], backward=True)
  masks = Window.of(None, 0 if causal else None)
  rules = Rules(LENGTH, LENGTH, HEADS, scale=D**-0.5, masks=masks)
  for launch in dispatch_backward(replace(spec(D), masks=masks, dtype=TYPES[dtype]), Target("CUDA", arch)):
    buffers = {x.name: UOp.placeholder(x.shape[1:], x.dtype, slot) for slot, x in enumerate(launch.buffers())}
    said = by_nvcc(rendered(launch.kernel.graph(buffers, rules=rules, tiles=launch.tiles), arch), arch)[1]
    assert figure(said, "bytes spill stores") == SPILLED.get((launch.kernel.build.__name__, arch, causal, dtype, D), 0)
    assert "serializ" not in said


@pytest.mark.parametrize(
  ("arch", "causal"),
  [
    pytest.param("sm_80", True, marks=pytest.mark.slow),
    ("sm_80", False),
    pytest.param("sm_90", True, marks=pytest.mark.slowest),  # the kernel of sm_80
    pytest.param("sm_86", False, marks=pytest.mark.slowest),
    pytest.param("sm_120", True, marks=pytest.mark.slowest),
  ],
)
def test_separate_backward_does_not_spill(arch: str, causal: bool) -> None:
  launches = dispatch_backward(replace(spec(256), masks=Window.of(None, 0 if causal else None)), Target("CUDA", arch))
  for launch in launches if causal else launches[1:2]:  # dK needs the most registers
    said = by_nvcc(rendered(launch.graph(), arch), arch)[1]
    assert figure(said, "bytes stack frame") == figure(said, "bytes spill stores") == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_wide_backward_does_not_spill(arch: str, dtype: str) -> None:
  """Head sizes of multi-head latent attention; float32 on sm_75 is for multiply-adds."""
  latent = replace(spec(576), Dv=512, dtype=TYPES[dtype])
  for launch in dispatch_backward(latent, Target("CUDA", arch)):
    said = by_nvcc(rendered(launch.graph(), arch), arch)[1]
    once = 12 if (arch, dtype, launch.kernel.gradients) == ("sm_75", "float16", "dq") else 0
    assert figure(said, "bytes spill stores") == once


@pytest.mark.parametrize(
  ("arch", "places", "dtype", "D"),
  [
    pytest.param(arch, places, dtype, D, marks=() if (arch, D) == ("sm_80", 128) else pytest.mark.slow)
    for arch, dtypes in (("sm_75", ("float16",)), ("sm_80", ("float16", "float32")), ("sm_90", ("float16", "float32")))
    for places in (IndexedBy.PAIRS, IndexedBy.DISTANCES, IndexedBy.ALL)
    for dtype in dtypes
    for D in (64, 128)
  ],
)
@pytest.mark.each("places", "dtype", evenly=True)
def test_gradients_of_biases_do_not_spill(arch: str, places: IndexedBy, dtype: str, D: int) -> None:
  masks = Window.of(None, 0 if places is IndexedBy.ALL else None)
  of_bias = replace(spec(D), masks=masks, dtype=TYPES[dtype], bias=Bias(True, True, places))
  said = by_nvcc(rendered(bias_launch(of_bias, Target("CUDA", arch)).graph(), arch), arch)[1]
  once = 8 if (places, dtype, D) == (IndexedBy.ALL, "float32", 128) else 0
  assert figure(said, "bytes stack frame") == figure(said, "bytes spill stores") <= once


LARGE = (1, HEADS, HEADS, LENGTH, LENGTH, 512, 512)
LATENT = (1, 16, 1, 1, 8192, 576, 512)  # the decode step of MLA


@pytest.mark.parametrize(
  ("arch", "sizes", "causal"),
  [
    ("sm_90", LARGE, True),
    pytest.param("sm_90", LARGE, False, marks=pytest.mark.slow),
    ("sm_80", LATENT, False),
    *(
      pytest.param(arch, LARGE, causal, marks=pytest.mark.slow if arch == "sm_80" else pytest.mark.slowest)
      for arch in ("sm_80", "sm_86", "sm_120")
      for causal in (True, False)
    ),
    *(
      pytest.param(
        arch, (1, heads, *LATENT[2:]), False, marks=pytest.mark.slow if arch == "sm_90" else pytest.mark.slowest
      )
      for arch in ("sm_80", "sm_86", "sm_90", "sm_120")
      for heads in (16, 128)
    ),
  ],
)
def test_large_heads_do_not_spill(arch: str, sizes: tuple[int, ...], causal: bool) -> None:
  masks = Window.of(None, 0 if causal else None)
  B, Hq, Hkv, M, N, Dk, Dv = sizes
  latent = AttentionSpec(
    B, Hq, Hkv, M, N, Dk, Dv, TYPES["float16"], Dk**-0.5, return_lse=True, masks=masks, values_in_keys=Hkv < Hq
  )
  text, launch, shared = source(latent, arch)
  c = compiled(text, arch, launch, shared)
  on_hopper = arch == "sm_90" and M * Hq // Hkv >= 64
  hopper = "hopper_latent_forward" if latent.values_in_keys else "hopper_wide_forward"
  assert launch.schedule.name == (hopper if on_hopper else "cuda_wide_forward")
  assert "serializ" not in c.said
  assert (c.stack, c.spills) == (0, 0)
  assert c.shared >= launch.tiles.shared_bytes(Dk, Dv)
  assert c.resident >= 1


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* p) {
  float x[96];
  for (int i = 0; i < 96; i++) x[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 96; j++) for (int i = 0; i < 96; i++) x[i] = x[i] * x[(i * 7 + j) % 96] + 1;
  for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = x[i];
}"""


def spec(D: int) -> AttentionSpec:
  return AttentionSpec(1, HEADS, HEADS, LENGTH, LENGTH, D, D, TYPES["float16"], D**-0.5, return_lse=True)


def test_a_spill_is_seen() -> None:
  assert figure(by_nvcc(SPILLS, "sm_80")[1], "bytes stack frame") > 0


def test_a_serialized_product_is_seen() -> None:
  """Without the wait for it, registers are used while a product has them."""
  text, launch, shared = source(spec(64), "sm_90")
  waits = list(re.finditer(r"wgmma\.wait_group\.sync\.aligned %\d+;", text))
  without = (text[: wait.start()] + text[wait.end() :] for wait in waits)
  assert any("serializ" in compiled(broken, "sm_90", launch, shared).said for broken in without)


def test_what_nvcc_says_is_told() -> None:
  with pytest.raises(RuntimeError, match="error"):
    by_nvcc("no CUDA", "sm_80")
