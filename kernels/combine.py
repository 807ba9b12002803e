"""Combines the splits of split-KV attention: the second kernel of Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).

A few queries do not keep a machine busy, so the keys are split. Each work item of a forward kernel stores the
normalized output O_s of its split, its largest logit m_s, and the sum l_s of its exponentials relative to m_s. Then
    m = max m_s,  w_s = exp(m_s - m) l_s,  O = sum w_s O_s / sum w_s,  lse = m + log sum w_s
A sink must count only once, so it joins the sum here. A split in which a row sees no key has an l_s of 0.

Storage: a work item has one row. On a GPU its lanes hold the columns, and each lane computes all weights; on a CPU the
weights and the row are on the stack. It reads `splits` rows of float32, usually from a cache.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import LOG2E, Scope, exp2, gated, make_kernel, sizes, target
from uopattn.dsl.instructions import CUDA, GENERIC, HIP, METAL, Dialect
from uopattn.dsl.rules.quantized import LARGEST, rounded_bits
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import normalize
from uopattn.dsl.schedule import DTYPES, LSE, PARTIAL_LSE, PARTIAL_O, K, Kernel, O, Q, Schedule, V
from uopattn.dsl.scope import as_type, row_start

WARP, MOST_THREADS = 32, 256
AT_ONCE = 8  # splits that a GPU thread loads before it uses any


def on_cpu(o: UOp, partial_o: UOp, partial_lse: UOp, lse: UOp | None = None, *, rules: Rules) -> UOp:
  """Build the kernel for CPUs.

  Args:
    o: (heads, rows, Dv), the output, float32, float16, bfloat16 or an 8-bit float.
    lse: (heads, rows) float32, or None.
    partial_o: (heads * splits, rows, Dv) float32.
    partial_lse: (heads * splits, rows, 2) float32, the largest logit and the sum of exponentials of each row.
    rules: only the sinks are used.
  """
  (heads, rows, Dv), s = sizes(o), Scope()
  splits = sizes(partial_o)[0] // heads
  head = s.axis(heads, AxisType.THREAD)
  row = s.axis(rows)
  first, within = head * splits, (head, row)
  highest = s.assign(s.buffer(1), lambda i: -inf, within=within)
  t = s.axis(splits)
  highest = highest.after(highest[0].store(highest.after(t)[0].maximum(partial_lse[first + t, row, 0])).end(t))

  def weight(t: UOp) -> UOp:
    logit, l_i = (partial_lse[first + t, row, i].load() for i in range(2))
    return _weight(logit, l_i, highest[0], exp2)

  weights = s.assign(s.buffer(splits), weight, within=within)
  total = s.assign(s.buffer(1), lambda i: 0.0, within=within)
  t = s.axis(splits)
  total = total.after(total[0].store(total.after(t)[0] + weights[t]).end(t))
  acc = s.assign(s.buffer(Dv), lambda d: 0.0, within=within)
  t, d = s.axis(splits), s.axis(Dv)
  acc = acc.after(acc[d].store(acc.after(t)[d] + weights[t] * partial_o[first + t, row, d]).end(t, d))
  finished = normalize(highest[0].load(), total[0].load(), rules.at(head).sink(row), exp2)
  d = s.axis(Dv)
  stores = [o[head, row, d].store((acc[d] * finished.factor).cast(o.dtype)).end(d)]
  stores += [] if lse is None else [lse[head, row].store(finished.lse)]
  return make_kernel(f"attention_combine_{heads}_{splits}_{rows}_{Dv}", (row, head), *stores)


def on_gpu(dialect: Dialect, o: UOp, partial_o: UOp, partial_lse: UOp, lse: UOp | None = None, *, rules: Rules) -> UOp:
  """Build the kernel for a dialect of GPUs (`uopattn.dsl.instructions`); other arguments as for `on_cpu`."""
  (heads, rows, Dv), s, power = sizes(o), Scope(), dialect.exp2
  splits, threads = sizes(partial_o)[0] // heads, min(MOST_THREADS, round_up(Dv, WARP))
  item, lane = s.axis(heads * rows, AxisType.GLOBAL), s.axis(threads, AxisType.LOCAL)
  head, row = item // rows, item % rows
  columns, steps = [lane + i * threads for i in range(ceildiv(Dv, threads))], ceildiv(splits, AT_ONCE)

  def some(step: UOp) -> list[UOp]:
    """The splits of a step."""
    return [step * AT_ONCE + i for i in range(min(AT_ONCE, splits))]

  def number(t: UOp, i: int, default: float) -> UOp:
    inside = t < splits
    return inside.where(gated(partial_lse, inside, head * splits + t, row, UOp.const(i)).load(), default)

  step, highest = s.axis(steps, AxisType.REDUCE), s.filled(-inf, 1, after=(item,))
  m_new = reduce(UOp.maximum, (number(t, 0, -inf) for t in some(step)), highest.after(step)[0].load())
  highest = highest.after(highest[0].store(m_new).end(step))
  step, total, acc = s.axis(steps, AxisType.REDUCE), *(s.filled(0.0, n, after=(item,)) for n in (1, len(columns)))
  weights = [_weight(number(t, 0, -inf), number(t, 1, 0.0), highest[0].load(), power) for t in some(step)]
  stores = [total[0].store(reduce(UOp.__add__, weights, total.after(step)[0].load()))]
  for i, d in enumerate(columns):
    elements = [((t < splits) & (d < Dv), head * splits + t, row, d) for t in some(step)]
    terms = [weight * gated(partial_o, *element).load() for weight, element in zip(weights, elements, strict=True)]
    stores.append(acc[i].store(reduce(UOp.__add__, terms, acc.after(step)[i].load())))
  end = UOp.group(*stores).end(step)
  finished = normalize(highest[0].load(), total.after(end)[0].load(), rules.at(head).sink(row), power)
  stores = []
  for i, d in enumerate(columns):
    value = acc.after(end)[i].load() * finished.factor
    if dialect is HIP and o.dtype in LARGEST:
      index = row_start(o, head, row) + d
      stores.append(as_type(o, dtypes.uchar)[index.valid(d < Dv)].store(rounded_bits(value, o.dtype)))
    else:
      stores.append(gated(o, d < Dv, head, row, d).store(value.cast(o.dtype)))
  stores += [] if lse is None else [gated(lse, lane.eq(0), head, row).store(finished.lse)]
  end = UOp.group(*stores).end(lane)
  return make_kernel(f"attention_combine_{heads}_{splits}_{rows}_{Dv}", (item,), end)


def _weight(logit: UOp, l_i: UOp, highest: UOp, power: Callable[[UOp], UOp]) -> UOp:
  """exp(logit - highest) l_i; 0 where both logits are -inf."""
  return power((logit - highest.eq(-inf).where(0.0, highest)) * LOG2E) * l_i


def _schedule(device: str, build: Callable[..., UOp]) -> Schedule:
  buffers = (O.written, Q.unread, K.unread, V.unread, LSE.written, PARTIAL_O, PARTIAL_LSE)
  return Schedule("combine", (device,), DTYPES, (Kernel(build, buffers, params=("rules",)),))


SCHEDULES = tuple(
  _schedule(device, build)
  for device, build in (
    ("CPU", on_cpu),
    ("AMD", partial(on_gpu, HIP)),
    ("CUDA", partial(on_gpu, CUDA)),
    ("METAL", partial(on_gpu, METAL)),
    (target.GENERIC, partial(on_gpu, GENERIC)),
  )
)
