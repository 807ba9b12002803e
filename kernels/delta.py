"""delta = rowsum(O dO) - dL, which the backward pass needs (Dao, FlashAttention-2, 2023).

Storage on GPUs: `LANES` lanes share a row; each loads 16 bytes at a time. Shuffles add up their sums, or
local memory where there are no shuffles. A workgroup has `BLOCK_ROWS` rows. On CPUs a work item has `CPU_ROWS` rows,
one after another; the `CPU_LANES` partial sums of a row are in registers.

Memory limits the speed: on an H200 2.4 to 2.6 TB/s at D=64 and 3.9 at D=128 (scripts/results/KERNELS.md).
"""

from collections.abc import Callable
from functools import partial, reduce

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, gated, make_kernel, sizes, target
from uopattn.dsl.cpu.register_blocks import register_blocks
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA, GENERIC, HIP, METAL, Dialect
from uopattn.dsl.packed import words_of_all
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.schedule import DELTA, DLSE, DO, DTYPES_16_32, LSE, Kernel, O, Schedule

LANES, BLOCK_ROWS, WARP = 8, 32, 32
CHUNK_WORDS = 4  # 32-bit words in a chunk, which a lane loads at once
CPU_ROWS, CPU_LANES = 64, 16


def row_sums(dialect: Dialect, delta: UOp, o: UOp, do: UOp, lse: UOp, dlse: UOp | None = None) -> UOp:
  """Build the kernel for a dialect of GPUs (`uopattn.dsl.instructions`).

  Args:
    delta: (heads, M) float32, the output; 0 for rows that see no key, whose lse is -inf.
    o: (heads, M, Dv), the output of the forward pass, float16, bfloat16 or float32.
    do: (heads, M, Dv), the gradient of o, in o's dtype.
    lse: (heads, M) float32.
    dlse: (heads, M) float32, the gradient of lse; None is 0.
  """
  (heads, M, Dv), s = sizes(o), Scope()
  group = Workgroup(s, 1, ceildiv(heads * M, BLOCK_ROWS), BLOCK_ROWS * LANES // WARP, WARP)
  block = ceildiv(heads * M, BLOCK_ROWS) - 1 - group.block  # the rows stored last are still in the L2 cache
  row, lane = block * BLOCK_ROWS + group.thread // LANES, group.lane % LANES
  exists = row < heads * M
  left, right = (_chunks(x, row, exists) for x in (o, do))
  chunks = [lane + i * LANES for i in range(ceildiv(Dv * o.dtype.itemsize, 4 * CHUNK_WORDS * LANES))]
  terms = [a * b for c in chunks for a, b in zip(left(c), right(c), strict=True)]
  total = _joined(dialect, s, group.thread, reduce(UOp.__add__, terms))
  head, query = row // M, row % M
  value = total if dlse is None else total - gated(dlse, exists, head, query).load()
  value = gated(lse, exists, head, query).load().eq(float("-inf")).where(0.0, value)
  store = gated(delta, exists & lane.eq(0), head, query).store(value)
  return group.kernel(f"attention_delta_{heads}_{M}_{Dv}", [store])


def on_cpu(delta: UOp, o: UOp, do: UOp, lse: UOp, dlse: UOp | None = None) -> UOp:
  """Build the kernel for CPUs; see `row_sums`."""
  (heads, M, Dv), s = sizes(o), Scope()
  blocks = ceildiv(M, CPU_ROWS)
  item = s.axis(heads * blocks, AxisType.THREAD)
  head, r = item // blocks, s.axis(min(CPU_ROWS, M))
  row = item % blocks * CPU_ROWS + r
  left, right = (HeadView.of(x, head, UOp.const(M)) for x in (o, do))
  inside = row < left.length
  sums = s.assign(s.buffer(CPU_LANES), lambda w: 0.0, within=(item, r))
  for begin, chunks, width in register_blocks(Dv, CPU_LANES):
    i, w = s.axis(chunks), s.axis(width)
    a, b = (x.element(row, begin + i * width + w, inside).cast(dtypes.float) for x in (left, right))
    sums = sums.after(sums[w].store(sums.after(i)[w].load() + a * b).end(i, w))
  total = reduce(UOp.__add__, (sums[w].load() for w in range(min(CPU_LANES, Dv))))
  value = total if dlse is None else total - gated(dlse, inside, head, row).load()
  value = gated(lse, inside, head, row).load().eq(float("-inf")).where(0.0, value)
  store = gated(delta, inside, head, row).store(value)
  return make_kernel(f"attention_delta_{heads}_{M}_{Dv}", (r, item), store)


def _joined(dialect: Dialect, s: Scope, thread: UOp, total: UOp) -> UOp:
  """The sum over the lanes of a row, by shuffles, or through local memory where there are none."""
  if dialect is not GENERIC:
    for distance in (1, 2, 4):
      total = total + dialect.shuffle_xor(total, distance)
    return total
  memory = s.buffer(BLOCK_ROWS * LANES, space=AddrSpace.LOCAL)
  memory = memory.after(UOp.barrier(memory[thread].store(total)))
  return reduce(UOp.__add__, (memory[thread // LANES * LANES + i].load() for i in range(LANES)))


def _chunks(x: UOp, row: UOp, exists: UOp) -> Callable[[UOp], list[UOp]]:
  """Return a function from the number of a chunk in a row of x to its elements as float32.

  Rows are counted through all heads. Elements past the end of the row, or of a row that does not exist, are 0.
  """
  _, rows, size = sizes(x)
  if x.dtype.itemsize == 4:

    def load(d: UOp) -> UOp:
      inside = exists & (d < size)
      return inside.where(gated(x, inside, row // rows, row % rows, d).load(), 0.0)

    return lambda c: [load(c * CHUNK_WORDS + i) for i in range(CHUNK_WORDS)]

  word = words_of_all(x, exists)

  def halves(c: UOp) -> list[UOp]:
    bits = [
      (word(row, c * CHUNK_WORDS + i) >> shift).cast(dtypes.ushort) for i in range(CHUNK_WORDS) for shift in (0, 16)
    ]
    return [half.bitcast(x.dtype).cast(dtypes.float) for half in bits]

  return halves


def _schedule(device: str, build: Callable[..., UOp]) -> Schedule:
  """Return the schedule for a device, with two kernels: without a gradient of the LSE, and with one."""
  without = (DELTA.written, O, DO, LSE)
  kernels = tuple(Kernel(build, buffers, params=()) for buffers in (without, (*without, DLSE)))
  return Schedule("delta", (device,), DTYPES_16_32, kernels)


SCHEDULES = (
  _schedule("AMD", partial(row_sums, HIP)),
  _schedule("CUDA", partial(row_sums, CUDA)),
  _schedule("METAL", partial(row_sums, METAL)),
  _schedule(target.GENERIC, partial(row_sums, GENERIC)),
  _schedule("CPU", on_cpu),
)
