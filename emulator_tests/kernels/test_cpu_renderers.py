"""CPUs for which tinygrad renders something else than C, the language of the kernels."""

import platform
from typing import Any

import numpy as np
import pytest
from helpers import qkv
from tinygrad import Context, Device, dtypes
from tinygrad.device import Compiled
from tinygrad.helpers import Target as RendererTarget
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.renderer.isa.x86 import X86Renderer
from tinygrad.renderer.llvmir import CPULLVMRenderer
from tinygrad.renderer.nir import LVPRenderer

from uopattn import KVCache, attention
from uopattn.plan.dispatch import WITH_CLANG, NoKernel, dispatch, dispatch_backward
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec

SHAPE = (1, 2, 2, 3, 20, 16, 16)


@pytest.mark.parametrize(("renderer", "name"), [(CPULLVMRenderer, "LLVM"), (X86Renderer, "X86"), (LVPRenderer, "LVP")])
def test_what_to_set(renderer: type[Renderer], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  taken = renderer.__new__(renderer)  # its compiler may be missing here
  taken.target = RendererTarget("CPU", name, "x86_64,native")
  monkeypatch.setattr("uopattn.plan.target.kernel_renderer", lambda device: taken)
  spec = make_spec(*qkv(*SHAPE), Arguments())
  for choose, what in ((dispatch, "no kernel"), (dispatch_backward, "no kernels for gradients")):
    with pytest.raises(NoKernel) as refused:
      choose(spec, target_of("CPU"))
    said = f"{what} for device CPU:{name}; kernels are C: set DEV=CPU:CLANG, which needs clang"
    assert refused.value.reasons == (said,)


def test_what_to_set_is_what_tinygrad_calls_it() -> None:
  device = Compiled.__new__(Compiled)
  device.device = "CPU"
  assert f"DEV=CPU:{device._renderer_name(ClangRenderer)}" == WITH_CLANG


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no x86-64 machine")
def test_plain_ops_compute_there() -> None:
  """The kernel that writes to a cache has tinygrad's own ops alone, and is rendered as they are."""
  q, k, v = qkv(1, 1, 1, 1, 3, 2, 2)

  def results() -> list[Any]:
    cache = KVCache(1, 1, 4, 2, dtype=dtypes.int8)
    cache.append(k, v, 0)
    return [attention(q, k, v), cache.k, cache.v, cache.k_scale, cache.v_scale]

  want = [x.numpy() for x in results()]
  with Context(DEV="CPU:X86"):
    assert type(Device["CPU"].renderer) is X86Renderer
    got = [x.numpy() for x in results()]
  for x, y in zip(want, got, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)
