"""Hopper's products of a warpgroup on the emulator: right against numpy, and each mistake an error of its kind."""

import re
from typing import Any

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, reg, threads
from helpers import normal
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.gpu.terms import PAIRS
from uopattn.dsl.instructions import BY_TEXT, CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.mma_layout import row_of
from uopattn.emulator.errors import instruction_of
from uopattn.emulator.hopper import THREADS

ARCH = "sm_90"
WIDTH = 64  # columns of a panel
TYPES = {"half": dtypes.half, "bfloat16": dtypes.bfloat16}
ERROR = 1e-4  # float32 sums of up to 128 products of numbers near 1


def bits(x, kind):
  """Float32 rounded (cut off, for bfloat16) to 16 bits, as uint16."""
  return x.astype(np.float16).view(np.uint16) if kind == "half" else (x.view(np.uint32) >> 16).astype(np.uint16)


def exact(x, kind):
  """The numbers that `bits` stand for."""
  return x.view(np.float16).astype(np.float64) if kind == "half" else (
    (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
  )  # fmt: skip


def matrix(rows, columns, kind, seed=0):
  return bits(normal(rows, columns, seed=seed), kind)


def panelled(memory, source, rows, columns, thread, count):
  """Stores that bring a (rows, columns) matrix into LDS as wgmma reads it: element by element, panel by panel."""
  stores = []
  for i in range(-(-rows * columns // count)):
    index = thread + i * count
    row, column = index // columns, index % columns
    chunk = (column % WIDTH // 8) ^ (row % 8)
    to = column // WIDTH * rows * WIDTH + row * WIDTH + chunk * 8 + column % 8
    stores.append(memory[to].store(source[index].load()))
  return stores


def padded(columns):
  return -(-columns // WIDTH) * WIDTH


def store_result(o, d, thread, n):
  row = thread // 32 * 16
  return [
    o[(row + row_of(thread % 32, e % 4 // 2)) * n + e // 4 * 8 + thread % 4 * 2 + e % 2].store(d[e].load())
    for e in range(n // 2)
  ]


def from_shared(n, k, kind, *, fence=True, wait=True, offset=0, count=THREADS, spoil=None, active=None, in_lds=True):
  """D = A B with A (64, k) and B (n, k) transposed, both in LDS; the keywords each put in a mistake."""

  def body(o, a, b):
    t, d = threads(count), reg(0, n // 2)
    left, right = lds(1, 64 * padded(k) + 512, dtypes.ushort), lds(2, n * padded(k), dtypes.ushort)
    filled = UOp.group(*panelled(left, a, 64, k, t, count), *panelled(right, b, n, k, t, count))
    ready = UOp.barrier(CUDA.fence_proxy_async(filled) if fence else filled)
    at = offset(t) if callable(offset) else offset
    trip = () if active is None else (loop(active(t)),)
    after = (ready, *trip)
    operands = d[0], (left.after(*after) if in_lds else a)[at], right.after(*after)[0]
    started = wgmma.start(TYPES[kind], n, k // 16, *operands, (64 * WIDTH, n * WIDTH), *after)
    if spoil is not None:
      started = spoil(t, d, left, right, started)
    done = wgmma.wait(0, n, d[0], started) if wait else started
    done = done.end(*trip) if trip else done
    return kernel(f"shared_{n}_{k}_{kind}", store_result(o, d.after(done), t, n), t)

  return body


def run(body, n, k, kind="half"):
  """The result, and the two matrices as numbers."""
  a, b = matrix(64, k, kind), matrix(n, k, kind, seed=1)
  got = launch(body, np.zeros(64 * n, np.float32), a.ravel(), b.ravel(), arch=ARCH)
  return got.reshape(64, n), exact(a, kind), exact(b, kind)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), [(8, 16), (16, 32), (24, 64), (32, 80), (64, 128)])
def test_product_from_shared_memory(n, k, kind):
  got, a, b = run(from_shared(n, k, kind), n, k, kind)
  np.testing.assert_allclose(got, a @ b.T, rtol=1e-5, atol=ERROR)


def from_registers(n, k, kind, *, spoil=None, words=None, by_columns=False):
  """D = 1 + P V with P (64, k) in registers and V (k, n) in LDS; `by_columns` D = P V with V transposed, (n, k)."""

  def body(o, p, v):
    t, d, a = threads(THREADS), reg(0, n // 2), reg(1, k // 4, dtypes.uint)
    rows, columns = (n, k) if by_columns else (k, n)
    memory = lds(2, rows * padded(columns), dtypes.ushort)
    ready = UOp.barrier(CUDA.fence_proxy_async(UOp.group(*panelled(memory, v, rows, columns, t, THREADS))))
    row, loads = t // 32 * 16 + t % 32 // 4, []
    for i in range(k // 4 if words is None else words):
      at = (row + i % 2 * 8) * k + i // 4 * 16 + i % 4 // 2 * 8 + t % 4 * 2
      low, high = (p[at + e].load().cast(dtypes.uint) for e in range(2))
      loads.append(a[i].store(low + high * 65536))
    begun = UOp.group(*loads, *[d[e].store(1.0) for e in range(n // 2)])
    operands = d.after(begun)[0], a.after(begun)[0], memory.after(ready)[0]
    form = wgmma.Form.REGISTERS_CLEARED if by_columns else wgmma.Form.REGISTERS
    started = wgmma.start(TYPES[kind], n, k // 16, *operands, (0, rows * WIDTH), ready, begun, form=form)
    if spoil is not None:
      started = spoil(a, started)
    return kernel(f"registers_{n}_{k}_{kind}", store_result(o, d.after(wgmma.wait(0, n, d[0], started)), t, n), t)

  return body


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), [(8, 16), (16, 48), (64, 32), (80, 64), (128, 16)])
def test_product_from_registers(n, k, kind):
  p, v = matrix(64, k, kind), matrix(k, n, kind, seed=1)
  got = launch(from_registers(n, k, kind), np.zeros(64 * n, np.float32), p.ravel(), v.ravel(), arch=ARCH)
  np.testing.assert_allclose(got.reshape(64, n), 1 + exact(p, kind) @ exact(v, kind), rtol=1e-5, atol=ERROR)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), [(8, 16), (24, 80), (64, 128)])
def test_product_from_registers_with_a_transposed_matrix(n, k, kind):
  got, a, b = run(from_registers(n, k, kind, by_columns=True), n, k, kind)
  np.testing.assert_allclose(got, a @ b.T, rtol=1e-5, atol=ERROR)


@pytest.mark.parametrize(("n", "k", "clears"), [(8, 16, False), (64, 48, True)])
def test_product_of_matrices_whose_rows_are_k(n, k, clears):
  def body(o, a, b):
    t, d = threads(THREADS), reg(0, n // 2)
    d = d.after(UOp.group(*[d[e].store(1.0) for e in range(n // 2)]))
    left, right = lds(1, k * WIDTH, dtypes.ushort), lds(2, k * padded(n), dtypes.ushort)
    filled = UOp.group(*panelled(left, a, k, 64, t, THREADS), *panelled(right, b, k, n, t, THREADS))
    ready = UOp.barrier(CUDA.fence_proxy_async(filled))
    operands = d[0], left.after(ready)[0], right.after(ready)[0], (k * WIDTH, k * WIDTH)
    form = wgmma.Form.BY_ROWS if clears else wgmma.Form.BY_ROWS_ADDED
    started = wgmma.start(dtypes.half, n, k // 16, *operands, ready, form=form)
    done = wgmma.wait(0, n, d[0], started)
    return kernel(f"by_rows_{n}_{k}", store_result(o, d.after(done), t, n), t)

  a, b = matrix(k, 64, "half"), matrix(k, n, "half", seed=1)
  got = launch(body, np.zeros(64 * n, np.float32), a.ravel(), b.ravel(), arch=ARCH)
  expected = (not clears) + exact(a, "half").T @ exact(b, "half")
  np.testing.assert_allclose(got.reshape(64, n), expected, rtol=1e-5, atol=ERROR)


@pytest.mark.parametrize("waits", [False, True])
def test_products_add_up(waits):
  """A product adds to the one before it into the same registers, whether or not that one has been waited for."""
  n, k = 16, 32

  def body(o, a, b):
    t, d = threads(THREADS), reg(0, n // 2)
    left, right = lds(1, 64 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
    filled = UOp.group(*panelled(left, a, 64, k, t, THREADS), *panelled(right, b, n, k, t, THREADS))
    ready = UOp.barrier(CUDA.fence_proxy_async(filled))
    operands = dtypes.half, n, k // 16, d[0], left.after(ready)[0], right.after(ready)[0], (64 * WIDTH, n * WIDTH)
    done = wgmma.start(*operands, ready)
    for _ in range(2):
      done = wgmma.wait(0, n, d[0], done) if waits else done
      done = wgmma.start(*operands, done, form=wgmma.Form.ADDED)
    return kernel(f"added_{waits}", store_result(o, d.after(wgmma.wait(0, n, d[0], done)), t, n), t)

  got, a, b = run(body, n, k)
  np.testing.assert_allclose(got, 3 * a @ b.T, rtol=1e-5, atol=3 * ERROR)


def test_two_warpgroups_have_their_own_rows():
  """256 threads; the second warpgroup multiplies other rows of A."""
  n, k = 8, 16

  def body(o, a, b):
    t, d = threads(2 * THREADS), reg(0, n // 2)
    left, right = lds(1, 128 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
    filled = UOp.group(
      *panelled(left, a, 128, k, t, 2 * THREADS), *panelled(right, b, n, k, t.minimum(THREADS - 1), THREADS)
    )
    ready = UOp.barrier(CUDA.fence_proxy_async(filled))
    rows = left.after(ready)[t // THREADS * 64 * WIDTH]
    started = wgmma.start(dtypes.half, n, 1, d[0], rows, right.after(ready)[0], (128 * WIDTH, n * WIDTH), ready)
    return kernel("two_groups", store_result(o, d.after(wgmma.wait(0, n, d[0], started)), t, n), t)

  a, b = matrix(128, k, "half"), matrix(n, k, "half", seed=1)
  with emulator.profile() as profile:
    got = launch(body, np.zeros(128 * n, np.float32), a.ravel(), b.ravel(), arch=ARCH)
  np.testing.assert_allclose(got.reshape(128, n), exact(a, "half") @ exact(b, "half").T, rtol=1e-5, atol=ERROR)
  assert profile.kernels["two_groups"].matrix == 8  # one for each warp


def test_products_finish_in_order():
  """Two under way; waiting until one is left gives the first one's result and not the second's."""
  n, k = 8, 16

  def body(read_second):
    def fxn(o, a, b):
      t, first, second = threads(THREADS), reg(0, n // 2), reg(3, n // 2)
      left, right = lds(1, 64 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
      filled = UOp.group(*panelled(left, a, 64, k, t, THREADS), *panelled(right, b, n, k, t, THREADS))
      done = ready = UOp.barrier(CUDA.fence_proxy_async(filled))
      for d in (first, second):
        operands = d[0], left.after(ready)[0], right.after(ready)[0], (64 * WIDTH, n * WIDTH)
        done = wgmma.start(dtypes.half, n, 1, *operands, done)
      done = wgmma.wait(1, n, first[0], done)
      stores = store_result(o, (second if read_second else first).after(done), t, n)
      return kernel(f"in_order{read_second}", stores, t)

    return fxn

  got, a, b = run(body(False), n, k)
  np.testing.assert_allclose(got, a @ b.T, rtol=1e-5, atol=ERROR)
  with pytest.raises(emulator.Unwritten, match=r"registers 3 .* which nothing has written"):
    run(body(True), n, k)


def overwrite_left(t, d, left, right, started):
  return left.after(started)[t].store(UOp.const(0, dtypes.ushort))


def overwrite_right(t, d, left, right, started):
  return right.after(started)[t].store(UOp.const(0, dtypes.ushort))


def overwrite_in_order(t, d, left, right, started):
  """All waves have met before and after, and the write is fenced; but the product may still be reading."""
  store = overwrite_right(t, d, left, right, UOp.barrier(started))
  return UOp.barrier(CUDA.fence_proxy_async(store))


def read_early(t, d, left, right, started):
  return d.after(started)[0].store(d.after(started)[0].load() + 1)


def write_accumulators(t, d, left, right, started):
  return d.after(started)[3].store(7.0)


def write_between_products(t, d, left, right, started):
  stored = d.after(started)[3].store(7.0)
  operands = d.after(stored)[0], left.after(stored)[0], right.after(stored)[0]
  return wgmma.start(dtypes.half, 16, 2, *operands, (64 * WIDTH, 16 * WIDTH), stored, form=wgmma.Form.ADDED)


def read_between_products(t, d, left, right, started):
  operands = d[0], left[0], right[0], (64 * WIDTH, 16 * WIDTH)
  one_left = wgmma.wait(1, 16, d[0], wgmma.start(dtypes.half, 16, 2, *operands, started, form=wgmma.Form.ADDED))
  return d.after(one_left)[0].store(d.after(one_left)[0].load() + 1)


def wait_for_other_registers(t, d, left, right, started):
  return wgmma.wait(0, 16, reg(3, 8)[0], started)


MISTAKES: dict[str, tuple[dict[str, Any], type[emulator.KernelError], str]] = {
  "result read before the wait": ({"wait": False}, emulator.Unwritten, "registers 0 .* which nothing has written"),
  "accumulators used in flight": ({"spoil": read_early}, emulator.Unwritten, "registers 0 .* nothing has written"),
  "accumulators used between two": ({"spoil": read_between_products}, emulator.Unwritten, "nothing has written"),
  "accumulators written in flight": (
    {"spoil": write_accumulators},
    emulator.Race,
    r"registers 0 .* at index 3 was written while a product adds to it",
  ),
  "accumulators written between two": ({"spoil": write_between_products}, emulator.Race, "while a product adds to it"),
  "operand in global memory": ({"in_lds": False}, emulator.OutOfBounds, "at argument 1, which is not in LDS"),
  "left operand overwritten in flight": ({"spoil": overwrite_left}, emulator.Race, "LDS 1"),
  "right operand overwritten in flight": ({"spoil": overwrite_right}, emulator.Race, "LDS 2"),
  "overwritten between barriers": ({"spoil": overwrite_in_order}, emulator.Race, "overwritten before the wait"),
  "no fence": ({"fence": False}, emulator.Race, "written without a fence_proxy_async since"),
  "misaligned": ({"offset": 8}, emulator.Misaligned, "an LDS address that is not a multiple of 1024"),
  "misaligned by rows": ({"offset": 4 * WIDTH}, emulator.Misaligned, "an LDS address that is not a multiple of 1024"),
  "past the end": ({"offset": 64 * WIDTH}, emulator.OutOfBounds, r"which has \d+ bytes"),
  "addresses differ": ({"offset": lambda t: t // 64 * 512}, emulator.Divergence, "names different matrices"),
  "inactive lanes": ({"active": lambda t: (t < 96).where(1, 0)}, emulator.Divergence, "inactive lanes"),
  "half a warpgroup": ({"count": 64}, emulator.Divergence, "needs 128 threads; the workgroup has 64"),
  "other accumulators named": ({"spoil": wait_for_other_registers}, emulator.Unwritten, "but names registers 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name):
  keywords, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    run(from_shared(16, 32, "half", **keywords), 16, 32)


def test_workgroups_part_with_products_under_way():
  """Each of two workgroups starts and waits in a loop of its own, in which the other has no trip."""
  n, k = 8, 16

  def body(o, a, b):
    t, g, d = threads(THREADS), groups(2), reg(0, n // 2)
    left, right = lds(1, 64 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
    filled = UOp.group(*panelled(left, a, 64, k, t, THREADS), *panelled(right, b, n, k, t, THREADS))
    done = UOp.barrier(CUDA.fence_proxy_async(filled))
    for i in range(2):
      trip = loop(2 * g.eq(i).cast(dtypes.int), 100 + i)
      operands = d[0], left.after(done, trip)[0], right.after(done, trip)[0], (64 * WIDTH, n * WIDTH)
      waited = wgmma.wait(1, n, d[0], wgmma.start(dtypes.half, n, 1, *operands, done, trip))
      done = waited.end(trip)
    done = wgmma.wait(0, n, d[0], done)
    row = t // 32 * 16
    stores = [
      o[(g * 64 + row + row_of(t % 32, e % 4 // 2)) * n + e // 4 * 8 + t % 4 * 2 + e % 2].store(d.after(done)[e].load())
      for e in range(n // 2)
    ]
    return kernel("parting", stores, t, g)

  a, b = matrix(64, k, "half"), matrix(n, k, "half", seed=1)
  got = launch(body, np.zeros(2 * 64 * n, np.float32), a.ravel(), b.ravel(), arch=ARCH).reshape(2, 64, n)
  for x in got:
    np.testing.assert_allclose(x, exact(a, "half") @ exact(b, "half").T, rtol=1e-5, atol=ERROR)


def test_an_operand_changed_in_flight_is_a_race():
  def spoil(a, started):
    return a.after(started)[2].store(UOp.const(7, dtypes.uint))

  n, k = 16, 16
  p, v = matrix(64, k, "half"), matrix(k, n, "half", seed=1)
  with pytest.raises(emulator.Race, match=r"registers 1 .* at index 2 was written while a product reads it"):
    launch(from_registers(n, k, "half", spoil=spoil), np.zeros(64 * n, np.float32), p.ravel(), v.ravel(), arch=ARCH)


def test_an_operand_that_nothing_wrote_is_an_error():
  n, k = 16, 32
  p, v = matrix(64, k, "half"), matrix(k, n, "half", seed=1)
  with pytest.raises(emulator.Unwritten, match=r"registers 1 .* at index 4, which nothing has written"):
    launch(from_registers(n, k, "half", words=4), np.zeros(64 * n, np.float32), p.ravel(), v.ravel(), arch=ARCH)


def test_a_tile_that_nothing_wrote_is_an_error():
  """B of 32 columns reaches into a panel that only 16 were written of."""
  n = 16

  def body(o, a, b):
    t, d = threads(THREADS), reg(0, n // 2)
    left, right = lds(1, 64 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
    filled = UOp.group(*panelled(left, a, 64, 32, t, THREADS), *panelled(right, b, n, 16, t, THREADS))
    ready = UOp.barrier(CUDA.fence_proxy_async(filled))
    operands = d[0], left.after(ready)[0], right.after(ready)[0], (64 * WIDTH, n * WIDTH)
    done = wgmma.wait(0, n, d[0], wgmma.start(dtypes.half, n, 2, *operands, ready))
    return kernel("unwritten_tile", store_result(o, d.after(done), t, n), t)

  with pytest.raises(emulator.Unwritten, match=r"LDS 2 .* which nothing has written"):
    run(body, n, 32)


@pytest.mark.parametrize("order", ["wait, fence", "fence, wait"])
def test_a_fence_covers_the_copies_that_have_arrived(order):
  """B comes by cp.async: a fence before the wait for it is too early."""
  n, k = 16, 64

  def body(o, a, b):
    t, d = threads(THREADS), reg(0, n // 2)
    left, right = lds(1, 64 * WIDTH, dtypes.ushort), lds(2, n * WIDTH, dtypes.ushort)
    row, chunk = t // 8, t % 8
    copy = CUDA.cp_async(right[row * WIDTH + (chunk ^ (row % 8)) * 8], b[t * 8])
    done = CUDA.cp_async_commit(copy, *panelled(left, a, 64, k, t, THREADS))
    for word in order.split(", "):
      done = CUDA.cp_async_wait(0, done) if word == "wait" else CUDA.fence_proxy_async(done)
    ready = UOp.barrier(done)
    operands = d[0], left.after(ready)[0], right.after(ready)[0], (64 * WIDTH, n * WIDTH)
    done = wgmma.wait(0, n, d[0], wgmma.start(dtypes.half, n, k // 16, *operands, ready))
    return kernel(order.replace(", ", "_"), store_result(o, d.after(done), t, n), t)

  if order == "wait, fence":
    got, a, b = run(body, n, k)
    np.testing.assert_allclose(got, a @ b.T, rtol=1e-5, atol=ERROR)
  else:
    with pytest.raises(emulator.Race, match=r"LDS 2 .* written without a fence_proxy_async since"):
      run(body, n, k)


@pytest.mark.parametrize("form", wgmma.Form)
@pytest.mark.parametrize(("n", "steps"), [(8, 1), (64, 4), (256, 16)])
def test_texts_are_found_again(n, steps, form):
  """A text names its instruction, and no other text that looks alike is taken for it."""
  own = form in (wgmma.Form.REGISTERS, wgmma.Form.REGISTERS_CLEARED)
  d, a, b = reg(0, n // 2), reg(1, 4 * steps, dtypes.uint) if own else lds(1, 64, dtypes.ushort), lds(2, 64)
  for dtype, terms in [*((x, 1) for x in TYPES.values()), *([(dtypes.bfloat16, 3)] if "by_rows" not in form else [])]:
    started = wgmma.start(dtype, n, steps, d[0], a[0], b[0], (0, 0), form=form, terms=terms)
    text = started.src[1].arg
    found = instruction_of(text)
    assert found is not None
    assert (found.name, found.parameters) == (form, (n, steps, dtype, terms))
    assert instruction_of(text.replace("wgmma.fence", "wgmma.fences")) is None
    assert text not in BY_TEXT
    rendered = text.format("d", "a", "b", "0", "0")
    assert rendered.count("{") == rendered.count("}")
    assert rendered.count("(") == rendered.count(")")
    assert rendered.count("wgmma.mma_async") == steps * len(PAIRS[terms])
  waited = instruction_of(wgmma.wait(1, n, d[0]).src[1].arg)
  assert waited is not None
  assert (waited.name, waited.parameters) == ("wgmma_wait", (n,))


def test_operands_of_8_bits_have_k_along_their_rows() -> None:
  with pytest.raises(ValueError, match="wgmma_by_rows: must be of 16 bits, not e4m3"):
    wgmma.start(dtypes.fp8e4m3, 8, 1, reg(0, 4)[0], lds(1, 64)[0], lds(2, 64)[0], (0, 0), form=wgmma.Form.BY_ROWS)


@pytest.mark.parametrize("by_rows", [False, True], ids=["k along the columns", "k along the rows"])
def test_the_text_addresses_each_step_of_k(by_rows: bool) -> None:
  """The emulator does not read the text: its addresses are those of a tile in panels of 64 columns of 16 bits."""
  steps, panels = 6, (5120, 10240)  # units of 16 bits per panel
  text = wgmma._product(128, steps, "f16", wgmma.Form.BY_ROWS if by_rows else wgmma.Form.SHARED).text("cuda")
  found = re.findall(r'"l"\(\(unsigned long long\)\((.*?)\) \| 0x', text)
  lines = [eval(x.format(None, None, None, *panels), {"a": 0, "b": 0}) for x in found]  # of 16 bytes
  ks = [(16 * step, panel) for step in range(steps) for panel in panels]
  assert [16 * x for x in lines] == [2 * (64 * k if by_rows else k // 64 * panel + k % 64) for k, panel in ks]


def test_the_text_addresses_each_step_of_a_transposed_matrix_beside_registers() -> None:
  text = wgmma._product(128, 6, "bf16", wgmma.Form.REGISTERS_CLEARED).text("cuda")
  found = re.findall(r'"l"\(\(unsigned long long\)\((.*?)\) \| 0x', text)
  lines = [eval(x.format(None, None, None, 0, 10240), {"b": 0}) for x in found]  # of 16 bytes
  assert [16 * x for x in lines] == [2 * (k // 64 * 10240 + k % 64) for k in range(0, 96, 16)]
  assert re.findall(r"%\d+, (\d), 1, 1, 0;", text) == ["0", *"11111"]  # D is cleared, and B's rows are not k
