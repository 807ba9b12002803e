"""Upper bounds of attention's speed on this machine: a product of matrices, or with few queries a large read."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, make_kernel, sizes
from uopattn.dsl.cpu.register_blocks import accumulate, zeros
from uopattn.dsl.schedule import FEW
from uopattn.measure.contenders import import_torch, torchs_context, torchs_runner
from uopattn.measure.timing import SPIN, Runner, captured, on_cpu, on_nvidia
from uopattn.proof.oracle import Array
from uopattn.runtime.machine import thread_count
from uopattn.runtime.threads import threaded
from uopattn.spec.spec import AttentionSpec

PRODUCT = 2048  # rows and columns of the product's matrices on a CPU
GPU_PRODUCT = 8192  # rows and columns of the product's matrices on a GPU
READ = 1 << 28  # bytes: several times the largest caches of two cores
GPU_READ = 1 << 31  # bytes, many times the size of a GPU's cache
ITEMS = 64  # work items, distributed over the threads
VECTORS, LANES = 16, 16  # independent running sums


@dataclass(frozen=True)
class Limit:
  """An upper bound of the speed on this machine.

  Attributes:
    name: "read", or the library of the matrix product.
    runner: computes the read or the product.
    flops: floating-point operations of a product.
    moved: bytes of a read.
  """

  name: str
  runner: Runner
  flops: int = 0
  moved: int = 0


def limit(s: AttentionSpec) -> Limit | None:
  """Return the limit of an attention: a large read with few queries, else a product of square matrices.

  On a CPU the matrices are float32 of size PRODUCT; torch multiplies them on our number of threads, or without torch
  numpy, on as many threads as its library uses. On a GPU of NVIDIA torch multiplies float16 matrices of size
  GPU_PRODUCT, or sums GPU_READ bytes of float16. On other GPUs, and on these without torch, the result is None.
  """
  few = s.M <= FEW
  if on_cpu() and few:
    return Limit("read", Runner(reader(READ), list), moved=READ)
  if not (on_cpu() or on_nvidia()):
    return None
  try:
    torch = import_torch()
  except ImportError:
    return _product("numpy", lambda x: x, SPIN) if on_cpu() else None
  if on_cpu():
    torch.set_num_threads(thread_count())
    return _product("torch", torch.from_numpy)
  with torchs_context():
    if few:
      x = torch.ones(GPU_READ // 2, device="cuda", dtype=torch.float16)
      return Limit("read", torchs_runner(x.sum, list), moved=GPU_READ)
    a, b = (torch.randn(GPU_PRODUCT, GPU_PRODUCT, device="cuda", dtype=torch.float16) for _ in range(2))
    return Limit("torch", torchs_runner(lambda: a @ b, list), 2 * GPU_PRODUCT**3)


def _product(name: str, matrix: Callable[[Array], Any], spins: float = 0.0) -> Limit:
  """Return a library's product on a CPU; `matrix` makes one of the library's from numpy's."""
  rng = np.random.default_rng(0)
  a, b = (matrix(rng.standard_normal((PRODUCT, PRODUCT), dtype=np.float32)) for _ in range(2))
  return Limit(name, Runner(lambda: a @ b, list, spins=spins), 2 * PRODUCT**3)


def product_size() -> int:
  """Return the number of rows and columns of the product's matrices."""
  return PRODUCT if on_cpu() else GPU_PRODUCT


@functools.cache
def reader(size: int) -> Callable[[], Tensor]:
  """Return a function that sums `size` bytes of float32 on all threads, replayed by TinyJit; it returns ITEMS sums.

  torch's sum is as fast; numpy's, on one thread, is half as fast (`scripts/results/NOTES.md`).
  """
  x = Tensor(np.ones(size // 4, np.float32)).realize()
  sums = Tensor(np.zeros(ITEMS, np.float32)).realize()
  buffers = UOp.placeholder((ITEMS,), dtypes.float, 0), UOp.placeholder((size // 4,), dtypes.float, 1)
  kernel = threaded(add_up(*buffers), str(x.device), Estimates(ops=size // 4, lds=size, mem=size))

  def read() -> Tensor:
    return Tensor(sums.uop.after(kernel.call(sums.uop, x.uop))).realize()

  return captured(read)[0]


def add_up(sums: UOp, x: UOp) -> UOp:
  """Build the kernel: sums[i] is the sum of chunk i of x, whose size is a multiple of ITEMS * VECTORS * LANES."""
  s = Scope()
  item = s.axis(sizes(sums)[0], AxisType.THREAD)
  x = x.reshape(sizes(sums)[0], -1, VECTORS, LANES)
  acc = zeros(s, VECTORS, LANES, (item,))
  acc = accumulate(s, acc, sizes(x)[1], LANES, lambda r, i, w: x[item, i, r, w].load())
  total = s.assign(s.buffer(1), lambda i: 0.0, within=(item,))
  r, w = s.axis(VECTORS), s.axis(LANES)
  total = total.after(total[0].store(total.after(r, w)[0] + acc[r, w]).end(r, w))
  return make_kernel(f"read_{sizes(x)[1]}", (item,), sums[item].store(total[0]))
