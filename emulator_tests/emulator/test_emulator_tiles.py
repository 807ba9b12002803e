"""Instructions on matrix tiles (AMX) on the emulator: what each does, and the mistakes that its checks find."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_kernels import kernel, launch, loop, reg
from helpers import normal
from tinygrad import Context, Tensor, UOp
from tinygrad.uop.ops import AxisType

import uopattn.emulator as emulator
from uopattn.dsl.instructions import AMX, CPU

ITEMS = 3


def item() -> UOp:
  return UOp.range(ITEMS, 0, AxisType.THREAD)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
  """Numbers that bfloat16 has, as float32."""
  return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def product(
  configured: bool = True, zeroed: bool = True, released: bool = True, stride: int = 64, far: int = 0
) -> Callable[..., UOp]:
  """The kernel C = A B on (ITEMS, 16, 32), (ITEMS, 16, 32), which is B in pairs, and (ITEMS, 16, 16)."""

  def body(c: UOp, a: UOp, b: UOp) -> UOp:
    w = item()
    done: tuple[UOp, ...] = (w,)
    if configured:
      done = (AMX.tile_config(*done),)
    if zeroed:
      done = (AMX.tile_zero(0, *done),)
    done = (AMX.tile_load(1, a[w * 512], stride, *done),)
    done = (AMX.tile_load(2, b[w * 512], 64, *done),)
    done = (AMX.tile_product(0, 1, 2, AMX.tile_product(0, 1, 2, *done)),)
    end = AMX.tile_store(0, c[w * 256 + far], 64, *done)
    return kernel(
      f"tiles_{configured}{zeroed}{released}{stride}_{far}", [AMX.tile_release(end) if released else end], w
    )

  return body


def run_product(**changed: Any) -> tuple[np.ndarray, np.ndarray]:
  """What the kernel computes, and what it should."""
  a, b = (as_bfloat16(normal(*shape)) for shape in ((ITEMS, 16, 32), (ITEMS, 32, 16)))
  a[0, 0, 0] = 2.0**-130  # denormal: counts as 0
  pairs = b.reshape(ITEMS, 16, 2, 16).swapaxes(2, 3)
  bits = [(np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16).ravel() for x in (a, pairs)]
  got = launch(product(**changed), np.zeros(ITEMS * 256, np.float32), *bits, arch="amx")
  return got.reshape(ITEMS, 16, 16), 2 * (np.where(np.abs(a) < 2.0**-126, 0, a) @ b)


def test_a_product() -> None:
  got, want = run_product()
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("changed", "kind", "says"),
  [
    ({"configured": False}, emulator.Unwritten, "without tile_config"),
    ({"zeroed": False}, emulator.Unwritten, "reads tile 0, which nothing has written"),
    ({"released": False}, emulator.LaunchError, "without tile_release"),
    ({"stride": 128}, emulator.OutOfBounds, "reads argument 1"),
    ({"stride": 63}, emulator.Misaligned, "inside an element"),
    ({"far": 16}, emulator.OutOfBounds, "writes argument 0"),
  ],
  ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_mistake_is_caught(changed: dict[str, Any], kind: type[Exception], says: str) -> None:
  with pytest.raises(kind, match=says):
    run_product(**changed)


def test_operands_out_of_range() -> None:
  for call in (
    lambda: AMX.tile_zero(8),
    lambda: AMX.tile_product(0, 1, 9),
    lambda: AMX.tile_product(0, 1, 1),
    lambda: AMX.tile_load(-1, reg(0, 16)[0], 64),
  ):
    with pytest.raises(ValueError, match="tile"):
      call()


def test_rows_are_transposed_and_scaled() -> None:
  """Words of 16 rows, with strides of their own; unwritten ones are found."""

  def body(rows: int) -> Callable[..., UOp]:
    def fxn(o: UOp, x: UOp, y: UOp) -> UOp:
      w, i, s = item(), loop(rows * 32), reg(0, 16 * 32)
      filled = s.after(s.after(w)[i].store(x[w * 512 + i].load()).end(i))
      done = AMX.transpose(o[w * 512], filled[16], 128, 128, filled)
      return kernel(f"transpose{rows}", [AMX.scale_rows(o[w * 512], y[0], 1, done)], w)

    return fxn

  x, y = normal(ITEMS, 16, 32), np.arange(16, dtype=np.float32)
  got = launch(body(16), np.zeros(x.size, np.float32), x.ravel(), y, arch="amx").reshape(ITEMS, 16, 32)
  want = np.zeros_like(x)
  want[..., :16] = x[..., 16:].swapaxes(1, 2)[:, :16]
  want[:, 0, :16] *= y
  np.testing.assert_array_equal(got, want)
  with pytest.raises(emulator.Unwritten, match="nothing has written"):
    launch(body(15), np.zeros(x.size, np.float32), x.ravel(), y, arch="amx")


@pytest.mark.parametrize(
  ("terms", "degree", "error"), [(1, 3, 2.0**-8), (1, 5, 2.0**-8), (2, 5, 2.0**-15), (3, 5, 2.0**-22)]
)
@pytest.mark.parametrize("subtracts", [False, True])
def test_weights(terms: int, degree: int, error: float, subtracts: bool) -> None:
  """Pairs of bfloat16 numbers whose sums are the weights, exactly 1 at 0 and 0 at -inf; and the sums of the weights."""
  rows = 8

  def body(o: UOp, l: UOp, x: UOp, shift: UOp, factor: UOp) -> UOp:
    w = item()
    done = AMX.weigh(
      o[w * terms * rows * 8],
      x[w * rows * 16],
      shift[0],
      l[w * 16],
      factor[0],
      rows,
      rows // 2 * 64,
      terms,
      degree,
      subtracts,
      w,
    )
    return kernel(f"weigh_{terms}_{degree}_{subtracts}", [done], w)

  x = -np.abs(normal(ITEMS, rows, 16) * 40)
  x[0, 0, :3] = 0, -np.inf, -1e9
  shift, factor = np.full(16, -2, np.float32), np.full(16, 0.25, np.float32)
  x += -8 if not subtracts else -2  # the largest exponent is 0

  with Context(DEV="EMU::amx"):
    out, l, *ins = (
      Tensor(y, device="EMU").realize()
      for y in (
        np.zeros(ITEMS * terms * rows * 8, np.uint32),
        np.ones(ITEMS * 16, np.float32),
        x.ravel(),
        shift,
        factor,
      )
    )
    found = Tensor.custom_kernel(out, l, *ins, fxn=body)
    Tensor.realize(*found[:2])
    words, sums = found[0].numpy().reshape(ITEMS, terms, rows // 2, 16), found[1].numpy().reshape(ITEMS, 16)
  low, high = ((y & np.uint32(0xFFFF0000)).view(np.float32).sum(1, dtype=np.float64) for y in (words << 16, words))
  weights = np.stack([low, high], axis=2).reshape(ITEMS, rows, 16)
  exact = np.exp2((x.astype(np.float64) + 2) / 4 if subtracts else x.astype(np.float64) / 4 + 2)
  np.testing.assert_allclose(weights, exact, rtol=error, atol=1e-37)
  assert (weights[0, 0, :3] == (1, 0, 0)).all()
  np.testing.assert_allclose(sums, 1 + exact.sum(1), rtol=1e-4 if degree == 3 else 3e-7)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_rows_packed(terms: int, in_pairs: bool) -> None:
  """Two rows of 16 float32 become 32 bfloat16, one after the other or alternating: rounded, or several terms."""

  def body(o: UOp, x: UOp) -> UOp:
    w = item()
    target, a, b = o[w * terms * 64], x[w * 128], x[w * 128 + 64]
    return kernel(f"pack{terms}{in_pairs}", [AMX.pack(target, a, b, 64, 4, 128 * 2, terms, in_pairs, w)], w)

  x = normal(ITEMS, 2, 4, 16)
  out = launch(body, np.zeros(ITEMS * terms * 64, np.uint32), x.ravel(), arch="amx")
  found = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(ITEMS, terms, 4, 32).sum(1)
  wanted = x.transpose(0, 2, 3, 1) if in_pairs else x.transpose(0, 2, 1, 3)
  np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=2.0 ** {1: -8, 2: -15, 3: -23}[terms])


def test_a_trip_is_skipped() -> None:
  """By some work items or by all; the next trip has all of them again, and so has what follows the loop."""

  def body(o: UOp, x: UOp) -> UOp:
    w, i = item(), loop(5)
    skipped = CPU.skip_trip((i < w) | i.eq(3), w, i)
    element = o.after(w, i, skipped)[w]
    end = element.store(element.load() + x[i].load()).end(i)
    return kernel("skip_trip", [o.after(end)[ITEMS + w].store(1.0)], w)

  got = launch(body, np.zeros(2 * ITEMS, np.float32), 10.0 ** np.arange(5, dtype=np.float32), arch="amx")
  np.testing.assert_array_equal(got, [10111, 10110, 10100, 1, 1, 1])


def test_a_loop_is_left() -> None:
  """By one work item after another, or by all; a trip of the loop around it, and what follows, has all of them again.

  Who has skipped a trip has not left the loop.
  """

  def body(o: UOp, x: UOp) -> UOp:
    w, again, i = item(), loop(2, 100), loop(5, 101)
    begun = CPU.skip_trip(w.eq(0) & i.eq(1), w, again, i)
    element = o.after(w, again, i, begun)[w]
    stored = element.store(element.load() + x[i].load())
    end = CPU.leave_loop((i.eq(1) & w.eq(1)) | i.eq(3), stored).end(i)
    element = o.after(end)[w]
    end = element.store(element.load() + 1e5).end(again)
    return kernel("leave_loop", [o.after(end)[ITEMS + w].store(1.0)], w)

  got = launch(body, np.zeros(2 * ITEMS, np.float32), 10.0 ** np.arange(5, dtype=np.float32), arch="amx")
  np.testing.assert_array_equal(got, [202202, 200022, 202222, 1, 1, 1])


def test_a_do_while_loop_with_what_leaves_a_plain_one_is_refused() -> None:
  """A `continue` in it would not come to its condition."""

  def body(o: UOp, x: UOp) -> UOp:
    w, again = item(), UOp.loop(100)
    element = o.after(w, again, CPU.leave_loop(x[0].load() > 3, w, again))[w]
    stored = element.store(element.load() + 1.0)
    return kernel("do_while", [stored.end(again, o.after(stored)[w].load() < 5)], w)

  with pytest.raises(emulator.UnknownInstruction, match="leave_loop and skip_trip work only in counted loops"):
    launch(body, np.zeros(ITEMS, np.float32), np.zeros(1, np.float32), arch="amx")
