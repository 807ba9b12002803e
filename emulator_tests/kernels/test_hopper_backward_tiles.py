"""Which cases `hopper_fused_backward` gets, with which tiles, and what these need: no case runs."""

import itertools
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
from report_cuda import by_nvcc, figure, rendered
from tinygrad import dtypes

from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target
from uopattn.kernels.hopper_fused_backward import Tiles, section
from uopattn.plan.dispatch import dispatch_backward
from uopattn.plan.tiles import hopper
from uopattn.runtime.cuda import shared_offsets
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec

CAUSAL = (Window(None, 0),)
SPEC = AttentionSpec(4, 32, 32, 4096, 4096, 64, 64, dtypes.float16, 0.125)


@pytest.mark.parametrize(
  ("kv_heads", "group", "M", "masked", "expected"),
  [
    (512, 1, 1024, False, 16),
    (128, 1, 4096, False, 4),
    (128, 1, 4096, True, 8),
    (32, 1, 16384, False, 1),
    (32, 1, 65536, False, 1),  # not even one head fits the cache
    (32, 4, 4096, False, 4),  # of the query heads that share keys one counts
    (32, 4, 4096, True, 8),
    (8, 4, 8192, True, 4),
    (64, 1, 4096, False, 8),  # so short a pass that the first workgroups' wait counts
    (10, 4, 4096, True, 10),  # 8 would leave 2
    (28, 1, 4096, True, 7),
    (37, 1, 4096, True, 8),  # a prime number
    (2, 1, 512, False, 2),
  ],
)
def test_heads_that_start_together(kv_heads: int, group: int, M: int, masked: bool, expected: int) -> None:
  assert section(kv_heads, group, M, 128, 128, masked) == expected


@pytest.mark.parametrize(("M", "expected"), [(1024, 16), (4096, 4), (8192, 2), (16384, 1), (65536, 1)])
def test_heads_that_start_together_where_none_waits(M: int, expected: int) -> None:
  assert section(128, 1, M, 128, 128, True, waits=False) == expected


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"masks": CAUSAL}, [(4, 124), (8, 0), (4, 124)]),
    ({"masks": CAUSAL, "B": 1, "Hq": 9, "Hkv": 9}, [(3, 6), (9, 0), (3, 6)]),
    ({"masks": CAUSAL, "Hkv": 8}, [(8, 0), (8, 0)]),
    ({"masks": CAUSAL, "Dk": 64, "Dv": 64}, [(8, 0), (8, 120), (8, 0)]),
    ({"masks": CAUSAL, "Dk": 64, "Dv": 64, "B": 1}, [(8, 24), (8, 0), (8, 24)]),
    ({"masks": CAUSAL, "Dk": 64, "Dv": 64, "B": 2}, [(8, 0), (8, 56), (8, 0)]),
    ({}, [(4, 0), (4, 0)]),
    ({"masks": CAUSAL, "B": 1, "Hq": 5, "Hkv": 5}, [(5, 0), (5, 0)]),  # one section
    ({"masks": CAUSAL, "B": 1, "Hq": 4, "Hkv": 4}, [(4, 0), (4, 0)]),  # one round of workgroups
    ({"masks": CAUSAL, "B": 1, "Hq": 2, "Hkv": 2}, [(2, 0), (2, 0)]),  # all blocks are shared
  ],
)
def test_heads_with_the_last_keys_first(options: dict[str, Any], expected: list[tuple[int, int]]) -> None:
  """The tiles that are chosen, and those that tuning tries."""
  spec = replace(SPEC, **{"Dk": 128, "Dv": 128} | options)
  tried = hopper.fused_backward(spec, Target("CUDA", "sm_90"))
  assert [(x.section, x.descending) for x in tried] == expected


@pytest.mark.parametrize(
  ("options", "rest", "parts", "together"),
  [
    ({}, 4, 32, 4),  # 31 rounds of 132 workgroups, and 4 more
    ({"M": 4032}, 4, 32, 4),  # of 63 tiles of queries: no fewer than 2 each
    ({"M": 640}, 4, 10, 64),
    ({"B": 1, "Hq": 40, "Hkv": 10, "M": 2048, "N": 2048}, 28, 4, 10),
    ({"B": 1, "Hq": 37, "Hkv": 37, "N": 1024}, 32, 4, 8),
    ({"Hkv": 8}, 0, 1, 4),  # 100 of 132 are busy in the last round
    ({"B": 33}, 0, 1, 4),  # all are
    ({"M": 64}, 0, 1, 128),  # a tile of queries
    ({"masks": CAUSAL}, 0, 1, 4),
    ({"B": 1, "Hq": 28, "Hkv": 4, "M": 2048, "N": 2048, "masks": CAUSAL}, 64, 2, 4),  # all start at once
  ],
)
def test_blocks_of_keys_that_workgroups_share(options: dict[str, Any], rest: int, parts: int, together: int) -> None:
  tiles = next(hopper.fused_backward(replace(SPEC, Dk=128, Dv=128, **options), Target("CUDA", "sm_90")))
  assert (tiles.rest, tiles.parts, tiles.section) == (rest, parts, together)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"M": 8192}, True),
    ({"M": 8192, "Hkv": 8}, True),
    ({"masks": CAUSAL}, True),
    ({"masks": CAUSAL, "Hkv": 8}, False),  # the warp that adds to dQ sets the pace
    ({"Dk": 64, "Dv": 64}, True),
    ({"masks": CAUSAL, "Dk": 64, "Dv": 64}, True),
    ({"masks": CAUSAL, "Dk": 64, "Dv": 64, "Hkv": 8}, True),
    ({"M": 1024, "B": 1, "Hkv": 4, "N": 4096}, False),  # a block for each multiprocessor
  ],
)
def test_which_workgroups_are_persistent(options: dict[str, Any], expected: bool) -> None:
  tiles = next(
    hopper.fused_backward(replace(SPEC, **{"Dk": 128, "Dv": 128} | options), Target("CUDA", "sm_90", units=128))
  )
  assert (tiles.persistent, tiles.multiprocessors) == (expected, 128)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, "hopper_fused_backward"),
    ({"Hkv": 8}, "hopper_fused_backward"),
    ({"M": 500, "N": 500}, "hopper_backward"),  # too short
    ({"B": 1, "Hq": 1, "Hkv": 1}, "hopper_backward"),  # most of the time would be spent waiting
    ({"masks": (Window(None, 0),), "features": ("sinks", "q_start")}, "hopper_fused_backward"),
    ({"masks": (Window(100, 0),)}, "hopper_backward"),
    ({"features": ("softcap", "attn_mask", "score_mod", "mask_mod", "dropout_p")}, "hopper_fused_backward"),
    ({"features": ("kv_lengths",)}, "hopper_backward"),
    ({"layouts": (("q", Layout(128 * 4096 * 68, 0, (32 * 4096 * 68, 4096 * 68, 68, 1))),)}, "hopper_backward"),
    ({"layouts": (("q", Layout(128 * 4096 * 72, 8, (32 * 4096 * 72, 4096 * 72, 72, 1))),)}, "hopper_fused_backward"),
    ({"Dk": 136, "Dv": 64}, "hopper_backward"),
    ({"Dv": 128}, "hopper_fused_backward"),
    ({"Dv": 192}, "hopper_fused_backward"),
    ({"Dv": 208}, "cuda_backward"),  # the sums take more registers than there are
  ],
)
def test_what_it_is_used_for(options: dict[str, Any], expected: str) -> None:
  launches = dispatch_backward(replace(SPEC, **options), Target("CUDA", "sm_90"))
  assert {x.schedule.name for x in launches} == {expected}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
@pytest.mark.parametrize(
  ("D", "causal", "spilled"),
  [
    (128, True, [36, 36]),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ((128, False, [0]), (64, False, [0]), (64, True, [0, 8]))),
  ],
)
def test_spills(D: int, causal: bool, spilled: list[int]) -> None:
  """Persistent workgroups spill under a causal mask, most of it in warps that multiply nothing."""
  spec, target = replace(SPEC, Dk=D, Dv=D, masks=Window.of(None, 0 if causal else None)), Target("CUDA", "sm_90")
  first_ones = itertools.islice(hopper.fused_backward(spec, target), len(spilled))
  for tiles, most in zip(first_ones, spilled, strict=True):
    for launch in dispatch_backward(spec, target):
      said = by_nvcc(rendered(replace(launch, tiles=tiles).graph(), "sm_90"), "sm_90")[1]
      assert figure(said, "bytes spill stores") <= most
      assert "serializ" not in said


def test_tiles_state_their_laws() -> None:
  least = {"stages": 1, "row_tiles": 1, "section": 1, "rest": 0, "parts": 1, "descending": 0, "multiprocessors": 1}
  for name, number in least.items():
    with pytest.raises(ValueError, match=rf"Tiles\.{name}={number - 1}: must be at least {number}"):
      Tiles(**{name: number - 1})
  for fields in ({"rest": 1, "parts": 2, "persistent": True}, {}):
    with pytest.raises(ValueError, match=r"Tiles\.descending=1, rest=\d, persistent=.*: descending must be 0, or no"):
      Tiles(descending=1, **fields)


@pytest.mark.parametrize(
  ("Dk", "Dv", "stages", "persistent"),
  [(128, 128, 2, True), (128, 128, 2, False), (64, 64, 2, True), (64, 128, 3, True), (64, 64, 1, False)],
)
def test_shared_memory_is_counted(Dk: int, Dv: int, stages: int, persistent: bool) -> None:
  target = Target("CUDA", "sm_90")
  launch = dispatch_backward(replace(SPEC, Dk=Dk, Dv=Dv), target)[1]
  tiles = replace(launch.tiles, stages=stages, persistent=persistent)
  used = shared_offsets(tuple(replace(launch, tiles=tiles).graph().toposort()))[1]
  assert tiles.shared_bytes(Dk, Dv) == used <= target.lds
  assert replace(tiles, persistent=launch.tiles.persistent) in hopper.fused_backward(launch.spec, target)


@pytest.mark.parametrize("causal", [False, True])
def test_dq_is_not_in_the_half_of_shared_memory_that_scores_are_multiplied_from(causal: bool) -> None:
  """At D=128 K, V, Q and dO fill the first half, but for a kilobyte that CUDA keeps; then come dS and dQ."""
  spec = replace(SPEC, Dk=128, Dv=128, masks=CAUSAL if causal else ())
  text = rendered(dispatch_backward(spec, Target("CUDA", "sm_90"))[1].graph(), "sm_90")
  placed = re.findall(r"(\w+)\* buf\d+ = .*uopattn_shared \+ (\d+)\)", text)
  half = 128 << 10
  assert [(kind, int(at)) for kind, at in placed][:6] == [
    *(("short", x) for x in range(0, half, half // 4)),
    ("short", half),
    ("uint", half + half // 4),
  ]


@pytest.mark.parametrize(("Dk", "Dv", "stages"), [(64, 64, {1, 2}), (64, 128, {1, 2, 3}), (128, 128, {1, 2})])
def test_how_many_stages_fit(Dk: int, Dv: int, stages: set[int]) -> None:
  tried = hopper.fused_backward(replace(SPEC, Dk=Dk, Dv=Dv), Target("CUDA", "sm_90"))
  assert {x.stages for x in tried} == stages
