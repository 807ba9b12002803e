"""What `uopattn.runtime.webgpu` makes of a kernel's graph. test_generic_cl runs it, where there is a WebGPU."""

from dataclasses import replace
from typing import Any

import pytest
from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from uopattn.dsl.target import Target
from uopattn.plan.dispatch import NoKernel, dispatch, dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.runtime.prepare import _for_tinygrad
from uopattn.runtime.webgpu import UNIFORM_LOAD, with_each_buffer_once, with_uniform_loops
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, Input, make_spec

TARGET = Target("WEBGPU", "shader-f16", buffers=10)


def reads_memory(u: UOp) -> bool:
  nodes = u.toposort(gate=lambda x: x.op is not Ops.CUSTOM)
  return any(x.op is Ops.LOAD and x.src[0].op is Ops.INDEX and x.src[0].src[0].base.op is Ops.PARAM for x in nodes)


def lengths(kernel: UOp) -> list[UOp]:
  return [u.src[0] for u in kernel.toposort() if u.op is Ops.RANGE and u.src[0].vmin < u.src[0].vmax]


def slots(kernel: UOp) -> set[int]:
  """Of local memory and registers."""
  return {u.arg.slot for u in kernel.toposort() if u.op is Ops.BUFFER}


def launches(name: str) -> list[Launch]:
  """Of a forward and a backward pass with a mask whose tiles depend on numbers in memory."""
  q, k = Tensor.empty(2, 2, 90, 16), Tensor.empty(2, 2, 100, 16)
  numbers = Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"kv_lengths": numbers} if name == "lengths" else {"q_start": numbers, "is_causal": True}
  spec = replace(make_spec(q, k, k, Arguments(**options)), return_lse=True)
  return [dispatch(spec, TARGET), *dispatch_backward(spec, TARGET)]


@pytest.mark.parametrize("name", ["lengths", "start"])
def test_lengths_of_loops_pass_through_workgroup_memory(name: str) -> None:
  changed = 0
  for launch in launches(name):
    before = launch.graph()
    after = with_uniform_loops(before)
    assert not any(map(reads_memory, lengths(after)))
    from_memory = sum(map(reads_memory, lengths(before)))
    loads = [u for u in after.toposort() if u.op is Ops.CUSTOM and u.arg == UNIFORM_LOAD]
    assert len(loads) == from_memory
    assert len(slots(after)) - len(slots(before)) == len(loads)
    changed += from_memory
  assert changed


def test_other_loops_stay() -> None:
  kernel = dispatch(AttentionSpec(1, 2, 2, 90, 100, 16, 16, dtypes.float, 0.25), TARGET).graph()
  assert with_uniform_loops(kernel) is kernel


def test_each_buffer_is_one_argument() -> None:
  launch = dispatch(AttentionSpec(1, 2, 2, 64, 64, 16, 16, dtypes.float, 0.25), TARGET)
  out, x = (UOp.new_buffer("CPU", 2 * 64 * 16, dtypes.float) for _ in range(2))
  kernel, slots = with_each_buffer_once(launch.graph(), [out, x, x.reshape(1, 2, 64, 16), x])
  assert slots == [0, 1]
  assert {u.arg.slot for u in kernel.toposort() if u.op is Ops.PARAM} == {0, 1}
  half = x.shrink(((0, 64 * 16),))
  assert with_each_buffer_once(launch.graph(), [out, x, half])[1] == [0, 1, 2]


def test_variables_are_numbered_after_the_buffers() -> None:
  """Where OpenCL's and Metal's runtimes look for them."""
  q, start = Tensor.empty(1, 2, 3, 16), UOp.variable("start", 0, 60).bind(7)
  k = Tensor.empty(1, 2, 100, 16)
  launch = dispatch(make_spec(q, k, k, Arguments(is_causal=True, q_start=start)), TARGET)
  kernel = _for_tinygrad("CL", launch.graph(), launch.estimates())
  slots = {u.arg.slot for u in kernel.toposort() if u.op is Ops.PARAM}
  assert slots == set(range(len(launch.buffers()) + 1))


def test_keys_are_split_if_the_buffers_are_enough() -> None:
  """To combine splits takes two more than one kernel."""
  aux = tuple(Input("aux", (4,), dtypes.float) for _ in range(4))
  spec = AttentionSpec(1, 1, 1, 40, 4096, 16, 16, dtypes.float, 0.25, inputs=aux)
  assert dispatch(spec, replace(TARGET, buffers=10)).splits > 1
  assert dispatch(spec, replace(TARGET, buffers=9)).splits == 1


def test_more_buffers_than_a_kernel_may_take() -> None:
  aux = tuple(Input("aux", (4,), dtypes.float) for _ in range(7))
  spec = AttentionSpec(1, 2, 2, 64, 64, 16, 16, dtypes.float, 0.25)
  assert len(dispatch(spec, replace(TARGET, buffers=4)).buffers()) == 4
  with pytest.raises(NoKernel, match="takes at most 10 Tensors, results included, but would get 11"):
    dispatch(replace(spec, inputs=aux), TARGET)
