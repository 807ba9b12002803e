"""Runs NVIDIA's compute-sanitizer over a few of the CUDA kernels, on a machine with a GPU.

Its four tools look for accesses out of bounds (memcheck), races in shared memory (racecheck), invalid barriers
(synccheck) and reads of memory that was never written (initcheck). Each also runs on a kernel with the fault that it
looks for, and must report it. The exit status is 1 if a tool reports anything about our kernels or misses that fault,
2 on any other error.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes

from uopattn import attention, flash
from uopattn.kernels import cuda_forward, hopper_forward, hopper_fused_backward
from uopattn.measure.program import Usage, default_target, exit_status, take_device
from uopattn.plan.dispatch import launches_of
from uopattn.plan.gradient import by_kernels
from uopattn.plan.residuals import Residuals
from uopattn.runtime.device import kind_of
from uopattn.spec.arguments import NO_ARGUMENTS, Arguments
from uopattn.spec.spec import make_spec

REPORTED = 9  # exit status of compute-sanitizer if its tool reports anything
LIMIT = 600  # seconds per case
SANITIZER = "/usr/local/cuda/bin"  # where the CUDA toolkit puts it, which is not always on PATH
# For each tool a kernel that it must report: x has 64 ints, and 64 threads run.
FAULTS = {
  "memcheck": "x[1 << 24] = 1;",
  "racecheck": "__shared__ int s[64]; s[threadIdx.x] = x[threadIdx.x]; x[threadIdx.x] = s[63 - threadIdx.x];",
  "synccheck": "__shared__ int s[64]; s[threadIdx.x] = x[threadIdx.x]; if (threadIdx.x % 2) __syncthreads();"
  " x[threadIdx.x] = s[63 - threadIdx.x]; __syncwarp(threadIdx.x % 2 ? 0x55555555 : 0xaaaaaaaa);",
  "initcheck": "x[threadIdx.x] += 1;",
}
FAULT = "a fault"  # the case that runs them


def inputs(Hq: int, Hkv: int, M: int, N: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
  """Return random float16 q, k and v, which the host writes, so that no kernel of tinygrad's runs."""
  rng = np.random.default_rng(0)

  def made(heads: int, rows: int) -> Tensor:
    return Tensor(rng.standard_normal((1, heads, rows, D)).astype(np.float16)).realize()

  return made(Hq, M), made(Hkv, N), made(Hkv, N)


def forward(tiles: object, D: int = 64) -> None:
  """Run a forward kernel with and without a causal mask, with partial blocks of queries and of keys."""
  q, k, v = inputs(4, 2, 300, 333, D)
  for causal in (False, True):
    o, lse = Tensor.empty(*q.shape, dtype=dtypes.float16), Tensor.empty(*q.shape[:3])
    fxn = partial(flash, causal=causal, enable_gqa=True, tiles=tiles)
    o, *_, lse = Tensor.custom_kernel(o, q, k, v, lse, fxn=fxn)
    Tensor.realize(o, lse)


def decode() -> None:
  """Run a forward kernel on splits of the keys, and combine them."""
  attention(*inputs(8, 2, 1, 3000, 128), enable_gqa=True, backend="kernel").realize()


def backward(D: int) -> None:
  """Run the kernels of a backward pass."""
  q, k, v = (x.is_param_() for x in inputs(4, 2, 200, 333, D))
  attention(q, k, v, is_causal=True, enable_gqa=True, backend="kernel").sum().backward()
  Tensor.realize(*(x.grad for x in (q, k, v) if x.grad is not None))


def backward_in_one_pass(D: int, tiles: hopper_fused_backward.Tiles | None = None, causal: bool = False) -> None:
  """Run the kernels of Hopper's pass for long inputs, whose blocks of keys workgroups share with the default tiles."""
  (q, k, v), (do, *_) = inputs(4, 2, 200, 333, D), inputs(4, 2, 200, 333, D)
  out, lse = attention(q, k, v, is_causal=causal, enable_gqa=True, return_lse=True, backend="kernel")
  spec = make_spec(q, k, v, Arguments(is_causal=causal, enable_gqa=True, return_lse=True))
  launches = launches_of(hopper_fused_backward.SCHEDULE, spec, default_target(), tiles)
  Tensor.realize(*by_kernels(launches, Residuals.of(spec, q, k, v, out, lse, do), NO_ARGUMENTS))


CASES: dict[str, Callable[[], None]] = {
  "forward, mma.sync": partial(forward, cuda_forward.Tiles(4, 2, 64)),
  "forward, mma.sync, queries read anew": partial(forward, cuda_forward.Tiles(4, 2, 32, in_registers=False), 128),
  "decode": decode,
  "backward, mma.sync": partial(backward, 33),  # on sm_90, wgmma serves head sizes that are multiples of 8
  "backward, P and dS in memory": partial(backward, 520),
}
PERSISTENT = hopper_forward.Tiles(2, 64, 2, producer=True, persistent=True, q_stages=2)
STORING = replace(PERSISTENT, tma_store=True, multiprocessors=2)  # two workgroups have six blocks each
TAKING = hopper_fused_backward.Tiles(persistent=True, multiprocessors=2)  # two workgroups take six blocks
HOPPER: dict[str, Callable[[], None]] = {
  "forward, wgmma": partial(forward, hopper_forward.Tiles(1, 64, 2)),
  "forward, wgmma and TMA": partial(forward, hopper_forward.Tiles(2, 64, 2, producer=True)),
  "forward, wgmma and TMA, persistent": partial(forward, PERSISTENT),
  "forward, wgmma and TMA, output by TMA": partial(forward, STORING),
  "backward, wgmma": partial(backward, 64),
  "backward, one pass": partial(backward_in_one_pass, 64),
  "backward, one pass, head size 128": partial(backward_in_one_pass, 128),
  "backward, one pass, persistent": partial(backward_in_one_pass, 128, TAKING),
  "backward, one pass, last keys first": partial(backward_in_one_pass, 128, replace(TAKING, descending=1), True),
}
# What a tool reports though it is right (H200, 2026-11-29 and 30). Bulk copies write the sums of dQ, which initcheck
# does not see; tests fill them with NaN before. At head size 64 a warpgroup overwrites dQ in shared memory that another
# one has read; their order goes through a named barrier, a third warp and an mbarrier, which racecheck does not follow,
# but the emulator does. Of persistent workgroups it reports the LSE and delta, which bulk copies bring, though it
# reports nothing with the same slots and barriers where workgroups have one block each. Where the last keys come first
# it reports reads of what one instruction writes, which are taken for the same.
UNSEEN = {
  ("initcheck", "backward, one pass"),
  ("initcheck", "backward, one pass, head size 128"),
  ("initcheck", "backward, one pass, persistent"),
  ("initcheck", "backward, one pass, last keys first"),
  ("racecheck", "backward, one pass"),
  ("racecheck", "backward, one pass, persistent"),
  ("racecheck", "backward, one pass, last keys first"),
}


def fault(tool: str) -> None:
  """Run the kernel that a tool must report."""
  from tinygrad.device import TinyELF
  from tinygrad.runtime.ops_cuda import CUDAProgram

  gpu: Any = Device[Device.DEFAULT]
  unwritten = Tensor.empty(64, dtype=dtypes.int)
  x = unwritten if tool == "initcheck" else Tensor(np.zeros(64, np.int32)).realize()
  source = f'extern "C" __global__ void fault(int* x) {{ {FAULTS[tool]} }}'
  elf = TinyELF(gpu.renderer.compiler.compile(source), "fault", gpu.renderer.target, ((None, 0, dtypes.int, ()),))
  buffer: Any = x.uop.buffer
  CUDAProgram(gpu, elf)(buffer.ensure_allocated()._buf, local_size=(64, 1, 1))
  with suppress(RuntimeError):  # an access out of bounds ends the context
    gpu.synchronize()


def run_case(name: str, tool: str) -> int:
  """Run one case in this process, under the sanitizer."""
  if name == FAULT:
    fault(tool)
  else:
    (CASES | HOPPER)[name]()
    Device[Device.DEFAULT].synchronize()
  return 0


def under(sanitizer: str, tool: str, name: str) -> tuple[int, str]:
  """Run a case under a tool; return the exit status, `REPORTED` if the tool reports anything, and what was printed."""
  command = [sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED), "--print-limit", "3"]
  command += [sys.executable, __file__, "--case", name, tool]
  done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
  return done.returncode, done.stdout


def run(tools: Sequence[str], jobs: int) -> int:
  """Run every case under every tool; return 1 if a tool reports a kernel of ours, or misses its fault."""
  take_device("sanitize")
  target = default_target()
  if kind_of(Device.DEFAULT) != "CUDA":
    raise Usage(f"compute-sanitizer needs a GPU through CUDA's driver, and the device is {target}; set DEV=CUDA")
  sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{SANITIZER}")
  if sanitizer is None:
    raise Usage("there is no compute-sanitizer: it is part of the CUDA toolkit")
  cases = [FAULT, *CASES, *(HOPPER if target.arch == "sm_90" else ())]
  pairs = [x for x in product(tools, cases) if x not in UNSEEN]
  all_right = True
  with ThreadPoolExecutor(jobs) as pool:
    for (tool, name), (status, said) in zip(pairs, pool.map(lambda x: under(sanitizer, *x), pairs), strict=True):
      right = status == (REPORTED if name == FAULT else 0)
      all_right = all_right and right
      outcome = {0: "nothing", REPORTED: "reported"}.get(status, f"exit status {status}")
      print(f"{tool:10} {name:40} {outcome}{'' if right else ': wrong'}", flush=True)
      if not right:
        print(said, flush=True)
  return 0 if all_right else 1


def main(words: Sequence[str] | None = None) -> int:
  """Check the kernels; return the exit status."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("tool", nargs="*", default=list(FAULTS), help=f"tools; default: {' '.join(FAULTS)}")
  parser.add_argument("--jobs", type=int, default=2, help="processes at once (default 2)")
  parser.add_argument("--case", default="", help=argparse.SUPPRESS)
  args = parser.parse_args(words)
  if unknown := [tool for tool in args.tool if tool not in FAULTS]:
    parser.error(f"{unknown[0]!r} is no tool of compute-sanitizer; accepted are {', '.join(FAULTS)}")
  if args.case:
    return run_case(args.case, args.tool[0])
  return exit_status("sanitize", lambda: run(args.tool, args.jobs))


if __name__ == "__main__":
  sys.exit(main())
