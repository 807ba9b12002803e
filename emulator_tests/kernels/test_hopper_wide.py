"""What only `hopper_wide_forward` has: lengths in tensor maps, and when it is chosen; see also test_forward."""

import numpy as np
import pytest
from conformance import SUBJECTS
from helpers import inputs, on_device, spoiled_behind
from tinygrad import Tensor, dtypes

from uopattn import attention
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.hopper_wide_forward import SCHEDULE, Tiles
from uopattn.plan.dispatch import dispatch
from uopattn.plan.tiles import hopper
from uopattn.spec.spec import AttentionSpec

SUBJECT, HALF, TARGET = SUBJECTS["hopper-wide"], dtypes.float16, Target("CUDA", "sm_90")


def wide(D: int, **options) -> AttentionSpec:
  return AttentionSpec(1, 8, 8, 4096, 4096, D, D, HALF, D**-0.5, **options)


@pytest.mark.slow
def test_nothing_behind_the_lengths_is_read() -> None:
  """Also where a sequence has no key, and where a split has none."""
  lengths = np.array([0, 65, 600])
  with SUBJECT.on("sm_90", chosen=True):
    q, k, v = inputs(3, 40, 1, 1, 600, 80, 72)
    keys, values = (spoiled_behind(lengths, x) for x in (k, v))
    given = on_device(lengths)
    out, lse = attention(q, keys, values, kv_lengths=given, enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    SUBJECT.verify(q, k, v, out, lse, kv_lengths=lengths)


@pytest.mark.parametrize(
  ("given", "served"),
  [
    (wide(512), True),
    (wide(512, masks=(Window(100, 0),)), True),
    (wide(512, features=("softcap",), softcap=3.0), False),
    (wide(256), False),
    (wide(260), False),  # rows from multiples of 8 bytes on
    (wide(576), False),
  ],
)
def test_when_it_is_chosen(given: AttentionSpec, served: bool) -> None:
  assert (dispatch(given, TARGET).schedule is SCHEDULE) is served


def test_tiles() -> None:
  """The shared memory that they need, with barriers and tensor maps, is there."""
  assert next(hopper.wide_forward(wide(512), TARGET)) == Tiles(64, 1)
  for given in (wide(512), wide(320)):
    for x in hopper.wide_forward(given, TARGET):
      assert x.shared_bytes(given.Dk, given.Dv) <= lds_limit("sm_90") - 1024
  for arguments, match in (
    ((48,), r"block_n=48: must be a multiple of 32 in 32\.\.256"),
    ((64, 0), r"stages=0: must be at least 1"),
  ):
    with pytest.raises(ValueError, match=match):
      Tiles(*arguments)
