"""What the gradients of `attention_sparse` on a GPU need around kernels of a backward pass.

Those get some queries at a time, read the keys that each has chosen, and leave a row of dK and of dV for each of
these. What belongs to one key is then added up in the order of the queries:
    `find_chosen`, `list_choosers`: for each key the rows that are its own
    `add_rows`: dK, or dV, += these rows
    `put_queries`: dQ of the queries into the whole
A key has a fixed order of summands, and one thread for each column adds them, so results are deterministic.

Storage: for `list_choosers` each thread has a key; for `add_rows` a workgroup has a key, and for `put_queries` a query
of one head, each with the columns over its threads.
"""

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, clamp, make_kernel, sizes
from uopattn.dsl.rules.tile_range import blurred
from uopattn.kernels.choose import THREADS, ZERO, all_of, count_chosen

WAVE = 32


def find_chosen(chosen: UOp, slots: UOp, table: UOp, counts: UOp) -> UOp:
  """Build `count_chosen` with `slots`."""
  return count_chosen(chosen, table, counts, slots, on_cpu=False)


def list_choosers(rows: UOp, times: UOp, totals: UOp, chosen: UOp, slots: UOp, *, top_k: int) -> UOp:
  """Build the kernel that lists the queries that have chosen each key.

  Args:
    rows: (B, heads, M, keys) int32, an output: for each key the numbers query * top_k + slot of those that have chosen
      it, in order; the key is the last axis.
    times: (B, heads, M, keys), an output: how often each of them has chosen it, in the type of `chosen`.
    totals: (B, heads, keys) int32, an output: how many they are.
    chosen, slots: (B, heads, M, keys), see `count_chosen`.
    top_k: entries of the list of a query.
  """
  (B, heads, M, keys), s = sizes(chosen), Scope()
  item, thread = s.axis(B * heads * ceildiv(keys, THREADS), AxisType.GLOBAL), s.axis(THREADS, AxisType.LOCAL)
  key, head = item % ceildiv(keys, THREADS) * THREADS + thread, item // ceildiv(keys, THREADS)
  listed = s.buffer(1, dtype=dtypes.int)
  listed = listed.after(listed.after(thread, item)[0].store(ZERO))
  m = s.axis(M)
  begin = head * M * keys + key
  exists = key < keys
  count = chosen.base[(begin + m * keys).valid(exists)].load()
  is_chosen = all_of(exists, count.cast(dtypes.int) > 0)
  at = listed.after(m)[0].load()
  to = (begin + clamp(at.cast(dtypes.weakint), 0, M - 1) * keys).valid(is_chosen.ne(0))
  row = (m * top_k).cast(dtypes.int) + slots.base[(begin + m * keys).valid(is_chosen.ne(0))].load()
  stores = rows.base[to].store(row), times.base[to].store(count)
  listed = listed.after(listed.after(*stores)[0].store(at + is_chosen).end(m))
  total = totals.base[(head * keys + key).valid(exists)].store(listed[0].load())
  return make_kernel(f"list_choosers_{B}_{heads}_{M}_{keys}_{top_k}", (thread, item), total)


def add_rows(sums: UOp, source: UOp, rows: UOp, times: UOp, totals: UOp) -> UOp:
  """Build the kernel that adds rows of a gradient to the keys that they belong to.

  Args:
    sums: (B, kv_heads, keys, D) float32, to which it adds.
    source: (B * M * kv_heads, top_k, D): for each query and key head the rows of the keys that it has chosen.
    rows, times, totals: see `list_choosers`; for all key heads, or one for all of them.
  """
  (B, kv_heads, keys, D), (_, heads, M, _), top_k, s = sizes(sums), sizes(rows), sizes(source)[1], Scope()
  threads = min(THREADS, round_up(D, WAVE))
  item, thread = s.axis(B * kv_heads * keys, AxisType.GLOBAL), s.axis(threads, AxisType.LOCAL)
  key, b, h = item % keys, item // keys // kv_heads, item // keys % kv_heads
  head = b * heads + (h if heads > 1 else 0)
  columns = [thread + i * threads for i in range(ceildiv(D, threads))]
  acc = s.filled(0.0, len(columns), after=(thread, item))
  total = clamp(totals.base[head * keys + key].load().cast(dtypes.weakint), 0, M)
  e = s.axis(blurred(total), AxisType.REDUCE)
  index = (head * M + clamp(e, 0, M - 1)) * keys + key
  row = clamp(rows.base[index].load().cast(dtypes.weakint), 0, M * top_k - 1)
  start = (((b * M + row // top_k) * kv_heads + h) * top_k + row % top_k) * D
  factor = times.base[index].load().cast(dtypes.float)
  stores = []
  for i, d in enumerate(columns):
    x = source.base[(start + d).valid(d < D) if d.vmax >= D else start + d].load().cast(dtypes.float)
    stores.append(acc[i].store(acc.after(e)[i].load() + x * factor))
  acc = acc.after(UOp.group(*stores).end(e))
  stores = []
  for i, d in enumerate(columns):
    at = sums.base[(item * D + d).valid(d < D) if d.vmax >= D else item * D + d]
    stores.append(at.store(at.load() + acc[i].load()))
  return make_kernel(f"add_rows_{B}_{kv_heads}_{heads}_{M}_{keys}_{top_k}_{D}", (thread, item), *stores)


def put_queries(to: UOp, source: UOp, first: UOp) -> UOp:
  """Build the kernel that stores the rows of some queries of each batch.

  Args:
    to: (B, M, width), the output.
    source: (B, count, width), in any dtype: those of queries from `first` on. Those from M on are left out.
    first: (1,) int32.
  """
  (B, M, width), count, s = sizes(to), sizes(source)[1], Scope()
  blocks = ceildiv(width, THREADS)
  item, thread = s.axis(B * count * blocks, AxisType.GLOBAL), s.axis(THREADS, AxisType.LOCAL)
  row, d = item // blocks, item % blocks * THREADS + thread
  query = first.base[0].load().cast(dtypes.weakint) + row % count
  inside = all_of(query < M, d < width).ne(0)
  index = ((row // count * M + clamp(query, 0, M - 1)) * width + d).valid(inside)
  value = source.base[(row * width + d).valid(d < width)].load().cast(to.dtype)
  return make_kernel(f"put_queries_{B}_{M}_{count}_{width}", (thread, item), to.base[index].store(value))
