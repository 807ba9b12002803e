"""Kernels of sizes and arguments drawn at random, for all targets: lowered, but not run.

Every value must be computed before its uses, in loops that enclose these, and clang must accept the text.
"""

import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from report_amd import clang, for_clang
from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.dtype import DType
from tinygrad.helpers import Context
from tinygrad.helpers import Target as Named
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import OpenCLRenderer
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.uop.ops import Ops

from uopattn.dsl.schedule import DTYPES_16, DTYPES_16_32
from uopattn.dsl.target import Target, VectorUnit
from uopattn.plan.dispatch import NoKernel, delta_launch, dispatch, dispatch_backward, stages, sums_launches
from uopattn.plan.launch import Launch
from uopattn.runtime.amd import ExtendedHIP
from uopattn.runtime.clang import find_clang
from uopattn.runtime.cpu import AlignedRenderer
from uopattn.runtime.cuda import SharedRenderer
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

CPUS = {
  "amx": Target("CPU", "x86_64,sapphirerapids,prefer-vector-width=512", VectorUnit(16, 32, tiles=True)),
  "avx512": Target("CPU", "x86_64,znver4", VectorUnit(16, 32, bfloat16=True)),
  "avx2": Target("CPU", "x86_64,haswell", VectorUnit(8, 16)),
  "neon": Target("CPU", "arm64,cortex-a72,-sve", VectorUnit(4, 32)),
}
GENERIC = {"gfx1030": Target("AMD", "gfx1030"), "cl": Target("CL", "cl_khr_fp16")}
GPUS = {
  x: Target("AMD" if x.startswith("gfx") else "CUDA", x)
  for x in ("gfx942", "gfx1100", "gfx1201", "sm_75", "sm_80", "sm_90")
} | GENERIC
MOST = 300  # of a size; head sizes on GPUs are smaller: there it takes ten times as long to lower a kernel
MOST_ON_GPU = 64


class Draw:
  """Numbers drawn from a seed."""

  def __init__(self, seed: int):
    self.random = np.random.default_rng(seed)
    self.sizes: list[int] = []

  def one_of(self, *values: Any) -> Any:
    return values[self.random.integers(len(values))]

  def perhaps(self, chance: float) -> bool:
    return bool(self.random.random() < chance)

  def size(self, most: int) -> int:
    """1 to `most`; often one that was drawn before, or near the sizes of tiles: then expressions of them coincide."""
    near = [1, *(x for x in (1, 2, 8, 16, 17, 31, 32, 48, 64, 65, 96, 100, 128, 129, 192, 256, 300) if x <= most)]
    drawn = [x for x in self.sizes if x <= most]
    found = self.one_of(self.random.integers(1, most + 1), self.one_of(*near), self.one_of(*near, *drawn))
    self.sizes.append(int(found))
    return int(found)

  def tensor(self, *shape: int, dtype: DType) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device="CPU")

  def spec(self, types: tuple[DType, ...], most: int) -> AttentionSpec:
    """A problem with any sizes, and a few arguments."""
    B, Hkv, group = self.one_of(1, 1, 2), self.one_of(1, 2, 3), self.one_of(1, 1, 2, 4)
    M, N, Dk, Dv = (self.size(x) for x in (MOST, MOST, most, most))
    Hq, dtype = Hkv * group, self.one_of(*types)
    shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv)
    q, k, v = (
      self.tensor(*(shape[i] for i in (0, 2, 1, 3)), dtype=dtype).transpose(1, 2)
      if self.perhaps(0.2)
      else self.tensor(*shape, dtype=dtype)
      for shape in shapes
    )
    every: dict[str, Any] = {
      "window": (self.one_of(None, 0, 20), self.one_of(None, 0, 20)),
      "q_start": self.one_of(N - M, -5, self.tensor(B, dtype=dtypes.int)),
      "kv_lengths": self.one_of(N // 2 + 1, self.tensor(B, dtype=dtypes.int)),
      "softcap": 5.0,
      "sinks": self.tensor(Hq, dtype=dtypes.float),
      "attn_mask": self.tensor(1, 1, M, N, dtype=self.one_of(dtypes.bool, dtypes.float)),
      "score_mod": lambda s, b, h, i, j: s - 0.5 * (i - j),
    }
    given = {name: x for name, x in every.items() if self.perhaps(0.12)}
    return make_spec(q, k, v, Arguments(is_causal=self.perhaps(0.5), enable_gqa=True, return_lse=True, **given))


def launches(spec: AttentionSpec, target: Target) -> list[Launch]:
  """Those of both passes that have kernels."""
  found: list[Launch] = []
  try:
    found += stages(dispatch(spec, target))
    last = dispatch_backward(spec, target)
  except NoKernel:
    return found
  return [*found, delta_launch(spec, target, False), *last, *sums_launches(last)]


def renderer(target: Target) -> Renderer:
  found: Renderer
  if target.device == "CPU":
    found = AlignedRenderer(Named("CPU", "CLANG", target.arch))
  elif target.device == "AMD":
    found = ExtendedHIP(Named("AMD", "HIPCC", target.arch), use_hipcc=True)
  elif target.device == "CL":
    found = OpenCLRenderer(Named("CL", "CL", target.arch))
  else:
    found = SharedRenderer(target.arch, use_nvcc=True)
  found.compiler = Compiler()  # leaves the source as it is
  return found


def check(graph: UOp, target: Target) -> None:
  """Lower a kernel, which checks its graph and its scopes, and have clang take it, if it is for a CPU or for AMD."""
  with Context(SPEC=1):  # as users have it
    source = next(u.arg for u in to_program(graph, renderer(target)).src if u.op is Ops.SOURCE)
  if target.device == "AMD":
    clang(find_clang(), for_clang(source), target.arch, "-fsyntax-only")
  elif target.device == "CPU":
    compiler = ClangCompiler(words := target.arch.split(","))
    if words[0] == "x86_64":
      elf_loader(compiler.compile(source))  # raises for a call of a library, which may be further away than calls reach
      return
    command = [find_clang(), "-x", "c", "-fsyntax-only", "-ffreestanding", f"--target={words[0]}-none-unknown-elf"]
    done = subprocess.run([*command, *compiler.args, "-"], input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def mark(name: str, seed: int) -> Any:
  """Those of the first seed on CPUs are quick, and on GPUs slow; of generic kernels one is."""
  if seed > 1 or (name in GENERIC and (name, seed) != ("cl", 0)) or (name in GPUS and seed > 0):
    return pytest.mark.slowest
  return () if name in CPUS and seed == 0 else pytest.mark.slow


@pytest.mark.parametrize(
  ("name", "seed"),
  [pytest.param(name, seed, marks=mark(name, seed)) for name in (*CPUS, *GPUS) for seed in range(22)],
)
def test_drawn(name: str, seed: int) -> None:
  on_cpu = name in CPUS
  types = (dtypes.float16,) if name == "sm_75" else (*DTYPES_16, *DTYPES_16, dtypes.float32)[: None if on_cpu else 2]
  draw = Draw(100 * [*CPUS, *GPUS].index(name) + seed)
  target = replace(CPUS[name], threads=draw.one_of(1, 2, 16)) if on_cpu else GPUS[name]
  spec = draw.spec(types, MOST if on_cpu else MOST_ON_GPU)
  found = launches(spec, target)
  assert found, spec
  for launch in found:
    check(launch.graph(), target)


@pytest.mark.kinds(dtype=(dtypes.bfloat16,))
@pytest.mark.parametrize("dtype", DTYPES_16_32, ids=str)
def test_outputs_of_one_column(dtype: DType) -> None:
  """They are then indexed as the LSE is: the two loops share the index, which nothing uses before them."""
  spec = AttentionSpec(1, 2, 2, 32, 100, 129, 1, dtype, 0.125, return_lse=True)
  (launch,) = stages(dispatch(spec, CPUS["amx"]))
  check(launch.graph(), CPUS["amx"])
