"""Two small flash-attention kernels, for RDNA3 and NVIDIA, that use all that the emulator must cover."""

import itertools
import math

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import instructions as ins

LOG2E = math.log2(math.e)
LOWEST = -1e30


def local(slot, shape, dtype=dtypes.half):
  return UOp.placeholder(shape, dtype, slot=slot, addrspace=AddrSpace.LOCAL)


def register(slot, shape, dtype=dtypes.float):
  return UOp.placeholder(shape, dtype, slot=slot, addrspace=AddrSpace.REG)


def filled(buffer, value):
  return buffer.after(buffer.store(buffer.const_like(value)))


def zeros(count):
  return UOp.const((0.0,) * count, dtypes.float)


def flash_rdna3(o, q, k, v):
  """o, q, k, v (heads, n, d) float16; n a multiple of 64. Four waves of 16 query rows; K, V^T and P go through LDS.

  Lane l holds row l % 16 of an A fragment, and rows 2e + l // 16, column l % 16 of an accumulator.
  """
  heads, n, d = q.shape
  block, waves, pad = 64, 4, 8
  head, tile = UOp.range(heads, 0, AxisType.GLOBAL), UOp.range(n // block, 1, AxisType.GLOBAL)
  wave, lane = UOp.range(waves, 2, AxisType.LOCAL), UOp.range(32, -1, AxisType.WARP)
  thread, half, column = wave * 32 + lane, lane // 16, lane % 16
  shape = ((16, 16, 16), "AMD", 32)
  k_lds, v_lds = local(0, (block, d + pad)), local(1, (d, block + pad))
  p_lds = local(2, (waves, 16, block + pad))
  q_row = q[head, tile * block + wave * 16 + column]
  q_frag = [UOp.stack(*[q_row[16 * i + e].load() for e in range(16)]) for i in range(d // 16)]
  acc, m, l = filled(register(3, (d // 16, 8)), 0), filled(register(4, (8,)), LOWEST), filled(register(5, (8,)), 0)
  step = UOp.range(n // block, 100, AxisType.REDUCE)
  stores = []
  for i in range(block * d // 128):  # one element a thread and pass: K as it is, V transposed
    at = thread + 128 * i
    row, col = at // d, at % d
    stores.append(k_lds.after(step)[row, col].store(k[head, step * block + row, col].load()))
    stores.append(v_lds.after(step)[col, row].store(v[head, step * block + row, col].load()))
  loaded = UOp.barrier(UOp.group(*stores))
  k_in, v_in = k_lds.after(loaded), v_lds.after(loaded)
  s = []
  for nt in range(block // 16):
    tile_s = zeros(8)
    for i in range(d // 16):
      k_frag = UOp.stack(*[k_in[nt * 16 + column, 16 * i + e].load() for e in range(16)])
      tile_s = UOp.wmma(q_frag[i], k_frag, tile_s, *shape)
    s.append(tile_s)
  scale, alphas, p_stores, updates = LOG2E / math.sqrt(d), [], [], []
  for e in range(8):
    row = [tile_s[e] * scale for tile_s in s]
    top = row[0]
    for x in row[1:]:
      top = ins.fmax("hip", top, x)
    for mask in (1, 2, 4, 8):
      top = ins.fmax("hip", top, ins.row_xmask("hip", top, mask))
    m_old = m.after(step)[e].load()
    m_new = ins.fmax("hip", m_old, top)
    alphas.append(alpha := ins.exp2("hip", m_old - m_new))
    p = [ins.exp2("hip", x - m_new) for x in row]
    total = sum(p[1:], p[0])
    for n_ror in (1, 2, 4, 8):
      total = total + ins.row_ror("hip", total, n_ror)
    updates += [m[e].store(m_new), l[e].store(l.after(step)[e].load() * alpha + total)]
    p_stores += [p_lds[wave, 2 * e + half, nt * 16 + column].store(x.cast(dtypes.half)) for nt, x in enumerate(p)]
  p_in = p_lds.after(UOp.barrier(UOp.group(*p_stores)))
  p_frag = [UOp.stack(*[p_in[wave, column, 16 * i + e].load() for e in range(16)]) for i in range(block // 16)]
  for dt in range(d // 16):
    out = UOp.stack(*[acc.after(step)[dt, e].load() * alphas[e] for e in range(8)])
    for i in range(block // 16):
      v_frag = UOp.stack(*[v_in[dt * 16 + column, 16 * i + e].load() for e in range(16)])
      out = UOp.wmma(p_frag[i], v_frag, out, *shape)
    updates.append(acc[dt].store(out))
  done = UOp.barrier(UOp.group(*updates)).end(step)
  acc, l = acc.after(done), l.after(done)
  results = [
    o[head, tile * block + wave * 16 + 2 * e + half, dt * 16 + column].store(
      (acc[dt, e].load() / l[e].load()).cast(o.dtype)
    )
    for dt in range(d // 16)
    for e in range(8)
  ]
  ends = UOp.group(*results).end(wave, lane).end(tile, head)
  return ends.sink(arg=KernelInfo(name=f"flash_rdna3_{heads}_{n}_{d}", opts_to_apply=()))


def flash_nvidia(o, q, k, v):
  """o, q, k, v (heads, n, d) float16; n a multiple of 64. Four warps of 16 query rows; K and V tiles are copied with
  cp.async into two buffers of swizzled 16-byte chunks and read with ldmatrix; P stays in registers."""
  heads, n, d = q.shape
  block, warps, chunks = 64, 4, d // 8
  head, tile = UOp.range(heads, 0, AxisType.GLOBAL), UOp.range(n // block, 1, AxisType.GLOBAL)
  warp, lane = UOp.range(warps, 2, AxisType.LOCAL), UOp.range(32, -1, AxisType.WARP)
  thread, slots, tiles = warp * 32 + lane, itertools.count(10), n // block
  shape = ((8, 16, 16), "CUDA", 32)
  k_lds, v_lds = local(0, (2 * block * d,)), local(1, (2 * block * d,))
  k_flat, v_flat = k.reshape(heads * n * d), v.reshape(heads * n * d)

  def swizzled(buffer, row, chunk):
    return buffer * (block * d) + row * d + (chunk ^ (row & (min(chunks, 8) - 1))) * 8

  def issue(which, buffer, *after):
    copies = []
    for i in range(block * chunks // (warps * 32)):
      at = thread + i * warps * 32
      row, chunk = at // chunks, at % chunks
      to, source = swizzled(buffer, row, chunk), ((head * n) + which * block + row) * d + chunk * 8
      copies += [ins.cp_async("cuda", lds[to], x[source], *after) for lds, x in ((k_lds, k_flat), (v_lds, v_flat))]
    return ins.cp_async_commit("cuda", *copies)

  def fragment(lds, row, chunk, buffer, trans):
    pair = register(next(slots), (2, 4), dtypes.half)
    return pair.after(ins.ldmatrix("cuda", pair[0, 0], lds[swizzled(buffer, row, chunk)], trans=trans))

  q_rows = [q[head, tile * block + warp * 16 + lane // 4 + 8 * r] for r in range(2)]
  q_frag = [
    UOp.stack(*[q_rows[e // 2 % 2][16 * i + e % 2 + 2 * (lane % 4) + 8 * (e // 4)].load() for e in range(8)])
    for i in range(d // 16)
  ]
  acc, m, l = filled(register(3, (d // 8, 4)), 0), filled(register(4, (2,)), LOWEST), filled(register(5, (2,)), 0)
  first = issue(UOp.const(0), UOp.const(0))
  step = UOp.range(tiles, 100, AxisType.REDUCE)
  ready = UOp.barrier(ins.cp_async_wait("cuda", 0, step, first))
  following = issue((step + 1).minimum(tiles - 1), (step + 1) % 2, ready)
  k_in, v_in, buffer = k_lds.after(ready, following), v_lds.after(ready, following), step % 2
  s = [zeros(4) for _ in range(block // 8)]
  for i in range(d // 16):
    for pair in range(block // 16):
      row, chunk = (pair * 2 + lane // 16) * 8 + lane % 8, i * 2 + lane // 8 % 2
      frag = fragment(k_in, row, chunk, buffer, trans=False)
      for h in range(2):
        s[2 * pair + h] = UOp.wmma(q_frag[i], frag[h], s[2 * pair + h], *shape)
  scale, alphas, updates = LOG2E / math.sqrt(d), [], []
  p = [[UOp.const(0.0)] * 4 for _ in s]
  for r in range(2):
    row = [x[2 * r + e] * scale for x in s for e in range(2)]
    top = row[0]
    for x in row[1:]:
      top = ins.fmax("cuda", top, x)
    for offset in (1, 2):
      top = ins.fmax("cuda", top, ins.shuffle_xor("cuda", top, offset))
    m_old = m.after(step)[r].load()
    m_new = ins.fmax("cuda", m_old, top)
    alphas.append(alpha := ins.exp2("cuda", m_old - m_new))
    values = [ins.exp2("cuda", x - m_new) for x in row]
    for nt in range(len(s)):
      p[nt][2 * r], p[nt][2 * r + 1] = values[2 * nt], values[2 * nt + 1]
    updates += [m[r].store(m_new), l[r].store(l.after(step)[r].load() * alpha + sum(values[1:], values[0]))]
  out = [UOp.stack(*[acc.after(step)[dt, e].load() * alphas[e // 2] for e in range(4)]) for dt in range(d // 8)]
  for i in range(block // 16):
    p_frag = UOp.stack(*[p[2 * i + h][e].cast(dtypes.half) for h in range(2) for e in range(4)])
    for pair in range(d // 16):
      row, chunk = i * 16 + lane // 8 % 2 * 8 + lane % 8, pair * 2 + lane // 16
      frag = fragment(v_in, row, chunk, buffer, trans=True)
      for h in range(2):
        out[2 * pair + h] = UOp.wmma(p_frag, frag[h], out[2 * pair + h], *shape)
  done = UOp.group(*updates, *[acc[dt].store(x) for dt, x in enumerate(out)]).end(step)
  acc, l, results = acc.after(done), l.after(done), []
  for r in range(2):
    total = l[r].load()
    for offset in (1, 2):
      total = total + ins.shuffle_xor("cuda", total, offset)
    o_row = o[head, tile * block + warp * 16 + lane // 4 + 8 * r]
    results += [
      o_row[dt * 8 + 2 * (lane % 4) + e].store((acc[dt, 2 * r + e].load() / total).cast(o.dtype))
      for dt in range(d // 8)
      for e in range(2)
    ]
  ends = UOp.group(*results).end(warp, lane).end(tile, head)
  return ends.sink(arg=KernelInfo(name=f"flash_nvidia_{heads}_{n}_{d}", opts_to_apply=()))
