"""Read bandwidth of all CPU cores together, which bounds attention with few queries."""

import functools
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import Scope, sizes
from uopattn.dsl.cpu.register_blocks import accumulate, zeros
from uopattn.runtime.threads import threaded

READ = 1 << 28  # bytes: several times the largest caches of two cores
ITEMS = 64  # work items, distributed over the threads
VECTORS, LANES = 16, 16  # independent running sums


@functools.cache
def reader(size: int) -> Callable[[], Tensor]:
  """Return a function that sums `size` bytes of float32 on all threads, replayed by TinyJit; it returns ITEMS sums.

  torch's sum is as fast; numpy's, on one thread, is half as fast (`scripts/results/NOTES.md`).
  """
  x = Tensor(np.ones(size // 4, np.float32)).realize()
  sums = Tensor(np.zeros(ITEMS, np.float32)).realize()
  buffers = UOp.placeholder((ITEMS,), dtypes.float, 0), UOp.placeholder((size // 4,), dtypes.float, 1)
  kernel = threaded(add_up(*buffers), str(x.device), Estimates(ops=size // 4, lds=size, mem=size))

  @TinyJit
  def read() -> Tensor:
    return Tensor(sums.uop.after(kernel.call(sums.uop, x.uop))).realize()

  for _ in range(2):  # compile, capture
    read()
  return read


def add_up(sums: UOp, x: UOp) -> UOp:
  """Build the kernel: sums[i] is the sum of the i-th part of x, whose size is a multiple of ITEMS * VECTORS * LANES."""
  s = Scope()
  item = s.axis(sizes(sums)[0], AxisType.THREAD)
  x = x.reshape(sizes(sums)[0], -1, VECTORS, LANES)
  acc = zeros(s, VECTORS, LANES, (item,))
  acc = accumulate(s, acc, sizes(x)[1], LANES, lambda r, i, w: x[item, i, r, w].load())
  total = s.assign(s.buffer(1), lambda i: 0.0, within=(item,))
  r, w = s.axis(VECTORS), s.axis(LANES)
  total = total.after(total[0].store(total.after(r, w)[0] + acc[r, w]).end(r, w))
  kernel = sums[item].store(total[0]).end(item)
  return kernel.sink(arg=KernelInfo(name=f"read_{sizes(x)[1]}", opts_to_apply=()), tag=1)
