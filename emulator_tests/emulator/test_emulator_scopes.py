"""The check that values are computed before their uses, in loops and conditions that enclose these."""

from collections.abc import Callable

import numpy as np
import pytest
from emulator_kernels import kernel, launch, loop, reg
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import KernelInfo, Ops

from uopattn import emulator
from uopattn.emulator.scopes import check_scopes
from uopattn.runtime.amd import ExtendedHIP, InstructionRenderer
from uopattn.runtime.cpu import AlignedRenderer
from uopattn.runtime.cuda import SharedRenderer

MISPLACED = r"kernel shared: \(range100\*7\) is computed in loop 102, in loop 100, and used in loop 103, in loop 100"


def shared(o: UOp, x: UOp) -> UOp:
  """A do-while loop inside an axis, and two loops that share a value of that axis, which tinygrad puts into the first.

  The end of the do-while loop depends on the axis, and so closes it too.
  """
  i, n, again = loop(8, 100), reg(0, 1, dtypes.int), UOp.loop(101)
  n = n.after(n.after(i)[0].store(x[i].load()))
  left = n.after(again)[0].load() - 1
  done = n[0].store(left).end(again, left > 0)
  for axis in 102, 103:
    j = loop(3, axis)
    done = o.after(done)[i * 7 + j].store(1.0).end(j)
  return kernel("shared", [done], i)


def test_a_value_that_two_loops_share_is_not_in_the_first() -> None:
  with pytest.raises(emulator.OutOfScope, match=MISPLACED):
    launch(shared, np.zeros(64, np.float32), np.full(8, 3, np.int32))


RENDERERS: dict[str, Callable[[], Renderer]] = {  # of our own kernels
  "CPU": lambda: AlignedRenderer(Target("CPU", "CLANG", "x86_64,x86-64-v3")),
  "CUDA": lambda: SharedRenderer("sm_90", use_nvcc=True),
  "AMD by LLVM": lambda: InstructionRenderer(Target("AMD", "LLVM", "gfx1100")),
  "AMD by HIP": lambda: ExtendedHIP(Target("AMD", "HIPCC", "gfx1100"), use_hipcc=True),
}


@pytest.mark.parametrize("name", RENDERERS)
def test_every_renderer_checks(name: str) -> None:
  """Before the compiler does, whose message would name neither the value nor the loops."""
  o, x = UOp.placeholder((64,), dtypes.float, slot=0), UOp.placeholder((8,), dtypes.int, slot=1)
  with pytest.raises(emulator.OutOfScope, match=MISPLACED):
    to_program(shared(o, x), RENDERERS[name]())


ORDERS = {
  "none": ("load twice gate if store endif again sink", None),
  "before": ("load gate if store twice endif again sink", r"\(argument1\[0\]\+argument1\[0\]\) is used before it is"),
  "in a condition": (
    "load gate if twice store endif again sink",
    r"is computed in the condition \(0<argument1\[0\]\), and used outside of all loops, where it is not known",
  ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_misplaced(name: str) -> None:
  """Orders of the lines of a kernel: what the store in the condition stores, the one after it stores too."""
  order, error = ORDERS[name]
  o, x, zero = UOp.placeholder((2,), dtypes.int, 0), UOp.placeholder((1,), dtypes.int, 1), UOp.const(0, dtypes.int)
  elements = [o.index(UOp.const(i, dtypes.int)) for i in range(2)]
  source = x.index(zero)
  load = source.load()
  twice, gate = load + load, zero < load
  condition = UOp(Ops.IF, src=(gate, elements[0]))
  store, again = (element.store(twice) for element in elements)
  named = {"load": load, "twice": twice, "gate": gate, "if": condition, "store": store, "again": again}
  named["endif"] = UOp(Ops.ENDIF, src=(condition,))
  named["sink"] = UOp.sink(store, again, arg=KernelInfo("misplaced"))
  uops = [o, x, source, *elements, *(named[x] for x in order.split())]
  if error is None:
    check_scopes(uops)
  else:
    with pytest.raises(emulator.OutOfScope, match=error):
      check_scopes(uops)


def test_what_only_comes_before_may_be_in_any_loop() -> None:
  """As what is loaded in a loop comes before a barrier after it, though nothing is left of its value."""
  x, i = UOp.placeholder((4,), dtypes.int, 0), UOp.range(UOp.const(4, dtypes.int), 0, dtype=dtypes.int)
  element = x.index(i)
  load = element.load()
  stored = element.store(load)
  end = stored.end(i)
  barrier, sum_ = UOp(Ops.BARRIER, src=(end, load)), load + load
  begun = [x, i, element, load, stored, end]
  check_scopes([*begun, barrier, UOp.sink(barrier, arg=KernelInfo("after"))])
  with pytest.raises(emulator.OutOfScope, match=r"argument0\[range0\] is computed in loop 0, and used outside"):
    check_scopes([*begun, sum_, UOp.sink(sum_, arg=KernelInfo("after"))])
