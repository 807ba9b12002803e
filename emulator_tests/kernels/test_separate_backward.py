"""Backward passes with one kernel for dK and one for dV, at head sizes where one kernel cannot hold both sums."""

from typing import Any

import numpy as np
import pytest
from conformance_backward import BFLOAT, FLOAT, HALF, Case, Machine
from tinygrad import UOp, dtypes

from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.plan.dispatch import dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.plan.tiles import amd, cuda
from uopattn.spec.spec import AttentionSpec

FEATURES: dict[str, dict[str, Any]] = {
  "causal": {"is_causal": True},
  "rules": {"kv_lengths": np.array([33]), "softcap": 2.0, "window": (20, 5), "sinks": np.array([1, 0], np.float32)},
}
CUDA, AMD = Machine("cuda separate", "sm_80", HALF), Machine("amd separate", "gfx942", HALF)
APPLE = Machine("apple separate", "apple9", HALF)


@pytest.mark.parametrize(
  ("machine", "features", "shape"),
  [
    pytest.param(CUDA, "causal", (1, 2, 1, 40, 36, 256, 256), id="cuda"),
    pytest.param(AMD, "causal", (1, 2, 1, 40, 36, 256, 256), id="amd"),
    pytest.param(APPLE, "causal", (1, 2, 1, 40, 36, 256, 256), id="apple"),
    pytest.param(CUDA, "rules", (1, 2, 2, 70, 50, 250, 203), id="cuda odd", marks=pytest.mark.slowest),
    pytest.param(AMD, "rules", (1, 2, 2, 70, 50, 250, 203), id="amd odd", marks=pytest.mark.slowest),
    *(
      pytest.param(
        Machine(f"{dialect} separate", arch, dtype), "causal", (1, 2, 1, 40, 36, D, D), marks=pytest.mark.slowest
      )
      for dialect, arch, dtype, D in (
        ("cuda", "sm_86", BFLOAT, 256),
        ("cuda", "sm_90", HALF, 232),
        ("cuda", "sm_80", FLOAT, 256),
        ("amd", "gfx950", BFLOAT, 256),
        ("amd", "gfx1100", HALF, 256),
      )
    ),
  ],
)
def test_gradients(machine: Machine, features: str, shape: tuple[int, int, int, int, int, int, int]) -> None:
  with machine.device():
    Case.of(machine, shape, FEATURES[features]).check()


def launches(device: str, arch: str, D: int, dtype: Any = HALF) -> tuple[Launch, ...]:
  spec = AttentionSpec(1, 8, 8, 4096, 4096, D, D, dtype, D**-0.5, tf32=dtype == FLOAT)
  return dispatch_backward(spec, Target(device, arch))


@pytest.mark.parametrize(
  ("device", "arch", "D", "name"),
  [
    ("CUDA", "sm_80", 128, "cuda_backward"),
    ("CUDA", "sm_80", 256, "cuda_backward_separate"),
    ("CUDA", "sm_86", 256, "cuda_backward_separate"),
    ("CUDA", "sm_90", 256, "cuda_backward_separate"),
    ("METAL", "Apple9", 128, "apple_backward"),
    ("METAL", "Apple9", 256, "apple_backward_separate"),
    ("AMD", "gfx942", 128, "amd_backward"),
    ("AMD", "gfx942", 256, "amd_backward_separate"),
    ("AMD", "gfx950", 256, "amd_backward"),
    ("AMD", "gfx950", 320, "amd_backward_separate"),
    ("AMD", "gfx1201", 128, "amd_backward"),
    ("AMD", "gfx1201", 144, "amd_backward_separate"),
    ("AMD", "gfx1100", 128, "amd_backward"),
    ("AMD", "gfx1100", 192, "amd_backward_separate"),
  ],
)
def test_which_schedule_serves(device: str, arch: str, D: int, name: str) -> None:
  found = launches(device, arch, D)
  assert [x.schedule.name for x in found] == [name] * (3 if name.endswith("separate") else 2)
  for launch in found:
    count = {
      "AMD": lambda tiles: tiles.lds_bytes(D, D),
      "METAL": lambda tiles: tiles.shared_bytes(D, D, HALF.itemsize),
      "CUDA": lambda tiles: tiles.shared_bytes(D, D),
    }[device]
    assert count(launch.tiles) <= Target(device, arch).lds


def test_no_tiles() -> None:
  problem = Problem(1, 1, 1, 64, 64, 4000, 64, HALF, 1.0)
  with pytest.raises(
    ValueError, match=r"head sizes 4000 and 64: the smallest tile needs 2016 registers a lane, of 230"
  ):
    next(cuda.backward(problem, Target("CUDA", "sm_80"), "dk"))
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    next(amd.backward(problem, Target("AMD", "gfx942"), "dv"))


def test_what_a_kernel_does_not_read_is_an_argument() -> None:
  """CUDA graphs pass every argument; the kernel of dV reads no delta."""
  (*_, launch) = launches("CUDA", "sm_80", 256)
  kernel = launch.graph()
  slots = sorted(u.arg.slot for u in kernel.toposort() if u.op.name == "PARAM" and isinstance(u, UOp))
  assert sorted(set(slots)) == list(range(len(launch.buffers())))
  slot = [x.name for x in launch.own].index("delta")
  delta = next(u for u in kernel.src if u.op.name == "PARAM" and u.arg.slot == slot)
  assert delta.dtype == dtypes.uchar
