"""Adds up the float32 sums of dK, or of dV, that work items of a backward pass on a CPU leave, and stores the totals in
the final dtype.

It runs on the kernels' threads; tinygrad's own ops would run on one. Storage: a work item has `ROWS` rows.
"""

from functools import reduce

from tinygrad import UOp
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, gated, make_kernel, sizes
from uopattn.dsl.schedule import DTYPES_16_32, Buffer, Kernel, O, Schedule, in_float32

ROWS = 64


def add_splits(o: UOp, sums: UOp) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, N, D), the output, in any dtype.
    sums: (heads * splits, N, D) float32.
  """
  (heads, N, D), s = sizes(o), Scope()
  splits, blocks = sizes(sums)[0] // heads, ceildiv(N, ROWS)
  item = s.axis(heads * blocks, AxisType.THREAD)
  head, r, d = item // blocks, s.axis(min(ROWS, N)), s.axis(D)
  n = item % blocks * ROWS + r
  inside = n < N
  total = reduce(UOp.__add__, (gated(sums, inside, head * splits + i, n, d).load() for i in range(splits)))
  store = gated(o, inside, head, n, d).store(total.cast(o.dtype))
  return make_kernel(f"attention_sums_{heads}_{splits}_{N}_{D}", (r, d, item), store)


SUMS = Buffer("sums", lambda p, _, splits: (p.B, p.Hkv * splits, p.N, p.Dv), in_float32)
SCHEDULE = Schedule("sum_splits", ("CPU",), DTYPES_16_32, (Kernel(add_splits, (O.written, SUMS), params=()),))
