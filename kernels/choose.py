"""What `attention_sparse` makes of the keys that each query has chosen, before the kernels of attention.

`list_keys` moves the valid ones to the front of their list and counts them: pages of one key, in a sequence of that
length. Kernels then read no memory for entries that name no key, and skip tiles without one. `count_chosen` gives a
backward pass through all keys how often each query has chosen each of them.

Storage: on GPUs a workgroup of `THREADS` threads has one list. For `list_keys` each thread has entries next to each
other, and the numbers of valid ones meet in local memory. For `count_chosen` each thread has every `THREADS`-th key and
goes through the whole list, so that no two of them write to one element and no order of theirs matters. On CPUs a work
item has one list.
"""

from functools import reduce

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, clamp, make_kernel, sizes

THREADS = 128
ZERO = UOp.const(0, dtypes.int)


def count_dtype(top_k: int) -> DType:
  """The type of the output of `count_chosen`, which holds numbers up to the length of a list."""
  return dtypes.uchar if top_k < 256 else dtypes.ushort if top_k < 65536 else dtypes.uint


def list_keys(table: UOp, counts: UOp, indices: UOp, lengths: UOp | None = None, *, keys: int, on_cpu: bool) -> UOp:
  """Build the kernel that lists the valid entries.

  Args:
    table: (sequences, heads, top_k) int32, the output: of each list the valid entries, in order, then 0.
    counts: (sequences, heads) int32, the output: the number of valid entries.
    indices: (sequences, heads, top_k) int32. Entries outside of 0..keys - 1 are not valid.
    lengths: (sequences,) int32: only so many entries of a list count; None is all.
    keys: the number of keys.
    on_cpu: whether it is for a CPU.
  """
  (sequences, heads, top_k), s = sizes(indices), Scope()
  item, thread, axes = _work(s, sequences * heads, on_cpu)
  own = top_k if on_cpu else ceildiv(top_k, THREADS)
  length = UOp.const(top_k)
  if lengths is not None:
    length = clamp(lengths.base[item // heads].load().cast(dtypes.weakint), 0, top_k)

  def entry(e: UOp) -> tuple[UOp, UOp]:
    """An entry of this thread's, and 1 if it is valid, else 0."""
    j = thread * own + e
    inside = j < top_k
    key = inside.where(indices.base[(item * top_k + j).valid(inside)].load(), UOp.const(-1, dtypes.int))
    return key, all_of(j < length, key >= 0, key < keys)

  count = s.buffer(1, dtype=dtypes.int)  # of this thread's next valid entry
  count = count.after(count.after(*axes)[0].store(ZERO))
  total = None
  if not on_cpu:
    e = s.axis(own)
    count = count.after(count[0].store(count.after(e)[0].load() + entry(e)[1]).end(e))
    count, total = _before(s, count, thread)
  e = s.axis(own)
  at, (key, valid) = count.after(e)[0].load(), entry(e)
  to = item * top_k + clamp(at.cast(dtypes.weakint), 0, top_k - 1)
  stored = table.base[to.valid(valid.ne(0))].store(key)
  count = count.after(count.after(stored)[0].store(at + valid).end(e))
  total = count[0].load() if total is None else total
  e = s.axis(own)
  j = thread * own + e
  rest = table.base[(item * top_k + clamp(j, 0, top_k - 1)).valid(all_of(j < top_k, j >= total).ne(0))]
  once = counts.base[item if on_cpu else item.valid(thread.eq(0))].store(total)
  return make_kernel(f"list_keys_{sequences}_{heads}_{top_k}", axes, rest.after(count).store(ZERO).end(e), once)


def _before(s: Scope, count: UOp, thread: UOp) -> tuple[UOp, UOp]:
  """Return registers with the sum of `count` over all threads before this one, and the sum over all threads."""
  memory = s.buffer(THREADS, dtype=dtypes.int, space=AddrSpace.LOCAL)
  memory = memory.after(UOp.barrier(memory[thread].store(count[0].load())))
  u, (before, total) = s.axis(THREADS), (s.buffer(1, dtype=dtypes.int) for _ in range(2))
  before, total = (x.after(x.after(memory)[0].store(ZERO)) for x in (before, total))
  of_u = memory[u].load()
  more = before[0].store(before.after(u)[0].load() + (u < thread).where(of_u, ZERO))
  all_of_them = total[0].store(total.after(u)[0].load() + of_u)
  done = UOp.group(more, all_of_them).end(u)
  return before.after(done), total.after(done)[0].load()


def count_chosen(chosen: UOp, table: UOp, counts: UOp, slots: UOp | None = None, *, on_cpu: bool) -> UOp:
  """Build the kernel that counts how often each query has chosen each key.

  Args:
    chosen: (B, heads, M, keys) of `count_dtype`, the output.
    slots: (B, heads, M, keys) int32, an output if it is given: where a key is in the list of a query that has chosen
      it, for the last time if it is there several times. Nothing is stored where it is not.
    table, counts: those of `list_keys`; sequence b * M + m is query m of batch b.
    on_cpu: whether it is for a CPU.
  """
  (B, heads, M, keys), (sequences, _, top_k), s = sizes(chosen), sizes(table), Scope()
  item, thread, axes = _work(s, sequences * heads, on_cpu)
  threads = 1 if on_cpu else THREADS
  query, h = item // heads, item % heads
  begin = ((query // M * heads + h) * M + query % M) * keys
  n = s.axis(ceildiv(keys, threads))
  key = n * threads + thread
  zeros = chosen.base[(begin + key).valid(key < keys)].store(UOp.const(0, chosen.dtype)).end(n)
  memory, j = chosen.base.after(zeros), s.axis(top_k)
  key = clamp(table.base[item * top_k + j].load().cast(dtypes.weakint), 0, keys - 1)
  mine = all_of(j < counts.base[item].load(), (key % threads).eq(thread)).ne(0)
  memory = memory.after(j)
  more = memory[(begin + key).valid(mine)].load() + UOp.const(1, chosen.dtype)
  stores = [memory[(begin + key).valid(mine)].store(more)]
  if slots is not None:
    stores.append(slots.base.after(j)[(begin + key).valid(mine)].store(j.cast(dtypes.int)))
  return make_kernel(f"count_chosen_{B}_{heads}_{M}_{keys}_{top_k}", axes, UOp.group(*stores).end(j))


def all_of(*conditions: UOp) -> UOp:
  """Return 1 where all conditions hold, else 0.

  By the conditions of a gate tinygrad simplifies all that its index is computed from, and so may make two stores of one
  that another thread reads. It does not look into a product.
  """
  return reduce(UOp.__mul__, (x.cast(dtypes.int) for x in conditions))


def _work(s: Scope, lists: int, on_cpu: bool) -> tuple[UOp, UOp, tuple[UOp, ...]]:
  """Return the number of this work item's list, that of the thread in it, and the axes of both."""
  if on_cpu:
    item = s.axis(lists, AxisType.THREAD)
    return item, UOp.const(0), (item,)
  item, thread = s.axis(lists, AxisType.GLOBAL), s.axis(THREADS, AxisType.LOCAL)
  return item, thread, (thread, item)
