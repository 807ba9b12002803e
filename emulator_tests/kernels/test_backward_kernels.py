"""The checks of every backward schedule, each written once and run for the rows of `conformance_backward.TABLE`."""

from typing import Any

import numpy as np
import pytest
from conformance_backward import (
  BFLOAT,
  FLOAT,
  HALF,
  MACHINES,
  SHAPES,
  TABLE,
  Apple,
  Case,
  Cuda,
  Hopper,
  Machine,
  Options,
  Shape,
  block_mask_on,
  check_backward,
  machine,
  no_gradient,
  on_machines,
  stored,
  turing,
)
from gradients import check_gradients
from helpers import drawn, inputs, on
from hypothesis import given
from hypothesis import strategies as st
from mistakes_backward import CPU, GPU, MISTAKES
from test_dropout import P, kept_by_seed
from test_features import BLIND, FEATURES, arguments, banded, some

import uopattn.emulator as emulator
from uopattn import BlockMask
from uopattn.runtime.prepare import compiled

SHAPE: Shape = (2, 4, 2, 67, 41, 16, 24)
REPRESENTATIVE = ("gfx942", "gfx1201", "sm_80", "sm_90", "apple9", "cl", "CPU", "amx")


def over_machines(*values: Any) -> list[Any]:
  """(schedule, machine, value) of all machines; those that are not representative are left to `--slow`."""

  def is_slowest(x: Machine) -> bool:
    return x.arch not in REPRESENTATIVE or (x.dtype == FLOAT and x.row.emulated)

  marks = {x: [pytest.mark.slowest] if is_slowest(x) else [] for x in MACHINES}
  return [pytest.param(x.schedule, x, y, id=f"{x}-{y}", marks=marks[x]) for x in MACHINES for y in values]


@pytest.mark.kinds(machine=MACHINES)
@pytest.mark.each("machine", "is_causal")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
  ("schedule", "machine", "shape"),
  [
    pytest.param(
      x.schedule,
      x,
      shape,
      id=f"{x}-{shape}",
      # the loops of `cuda_backward`, with other instructions
      marks=[pytest.mark.slow] if x.schedule == "turing" and shape not in ("grouped", "odd everywhere") else [],
    )
    for x in MACHINES
    for shape in [*SHAPES, *TABLE[x.schedule].shapes]
  ],
)
def test_matches_the_oracle(schedule: str, machine: Machine, shape: str, is_causal: bool) -> None:
  sizes = (SHAPES | machine.row.shapes)[shape]
  check_backward(machine, sizes, {"is_causal": True, "q_start": 3} if is_causal else {})


CHOSEN = (
  "gfx942 half",
  "gfx1201 bfloat16",
  "sm_80 bfloat16",
  "sm_90 half",
  "CPU half",
)


def is_often_chosen(x: Machine) -> bool:
  """Whether `--values` has its tiles of choice; those of float32 on gfx1201 are lowered for ten seconds."""
  return x.arch in REPRESENTATIVE and str(x) != "gfx1201 float"


@pytest.mark.parametrize(
  ("schedule", "machine"),
  [
    pytest.param(
      x.schedule,
      x,
      id=str(x),
      marks=[] if str(x) in CHOSEN else [pytest.mark.slow if is_often_chosen(x) else pytest.mark.slowest],
    )
    for x in MACHINES
  ],
)
def test_matches_the_oracle_with_the_tiles_of_choice(schedule: str, machine: Machine) -> None:
  shape = machine.fitted((1, 4, 2, 70, 90, 16, 24))
  with machine.device():
    Case.of(machine, shape, {"is_causal": True, "q_start": 15}).check()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TABLE)
def test_any_tiles_and_shape(schedule: str) -> None:
  row = TABLE[schedule]

  @drawn(row.examples)
  @given(data=st.data(), sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 2, 130, 130, 33, 33))))
  def check(data: st.DataObject, sizes: tuple[int, ...]) -> None:
    machine = data.draw(st.sampled_from([x for x in MACHINES if x.schedule == schedule]))
    tiles, q_start = data.draw(row.drawn(machine.arch, machine.dtype)), data.draw(st.none() | st.integers(-50, 100))
    (B, Hkv, group, *rest), seed = sizes, data.draw(st.integers(0, 1000))
    options = {} if q_start is None else {"is_causal": True, "q_start": q_start}
    check_backward(machine, (B, Hkv * group, Hkv, *rest), options, tiles=tiles, seed=seed)  # type: ignore[arg-type]

  check()


@pytest.mark.kinds(machine=("gfx942 half", "sm_80 bfloat16", "sm_90 half", "amx bfloat16", "CPU float"))
@pytest.mark.each("schedule", "machine", evenly=True)  # rules are the same code in all
@pytest.mark.parametrize(("schedule", "machine", "name"), over_machines(*FEATURES))
def test_each_feature_alone(schedule: str, machine: Machine, name: str) -> None:
  check_backward(machine, SHAPE, some(np.random.default_rng(FEATURES.index(name) % 2), SHAPE, name))


@pytest.mark.kinds(name=("gfx942 half",))  # rules are the same code in all
@pytest.mark.parametrize("name", ["gfx942 half", "sm_80 bfloat16", "sm_90 half", "apple9 half"])
def test_no_tile_is_full_under_a_mask(name: str) -> None:
  """With so many tiles of queries that the keys would have full ones without the mask."""
  found = next(x for x in MACHINES if str(x) == name)
  check_backward(
    found, (1, 1, 1, 150, 70, 16, 16), {"attn_mask": np.random.default_rng(0).random((1, 1, 150, 70)) < 0.6}
  )


@pytest.mark.slowest  # small tiles run the same code
@pytest.mark.parametrize(("schedule", "machine", "name"), over_machines(*FEATURES))
def test_each_feature_with_the_tiles_of_choice(schedule: str, machine: Machine, name: str) -> None:
  shape = machine.fitted((2, 4, 2, 100, 200, 24, 40))
  with machine.device():
    Case.of(machine, shape, some(np.random.default_rng(1), shape, name)).check()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TABLE)
def test_any_features_together(schedule: str) -> None:
  @drawn(1, 1)
  @given(
    machine=st.sampled_from([x for x in MACHINES if x.schedule == schedule]),
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 2, 60, 90, 24, 24))),
    names=st.sets(st.sampled_from(FEATURES), min_size=3),
    numbers=st.sampled_from(("int", "tensor", "variable")),
    blocks=st.none() | st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 1000),
  )
  def check(machine: Machine, sizes: Any, names: Any, numbers: str, blocks: Any, seed: int) -> None:
    B, Hkv, group, *rest = sizes
    shape: Any = (B, Hkv * group, Hkv, *rest)
    with machine.device():
      given = arguments(shape, some(np.random.default_rng(seed), shape, *sorted(names)), numbers, blocks)
      check_backward(machine, shape, *given)

  check()


# The oracle's arguments; what attention is given besides q, k and v.
THROUGH_ATTENTION: Options = {
  "is_causal": True,
  "q_start": np.array([9, 50]),
  "sinks": np.array([0.5, -1, 2, 0], np.float32),
  "attn_mask": np.random.default_rng(0).standard_normal((1, 4, 1, 75)).astype(np.float32),
}


@pytest.mark.parametrize(
  "arch", ["sm_90", *(pytest.param(x, marks=pytest.mark.slowest) for x in ("gfx942", "sm_80", "gfx1201", "amx"))]
)
def test_gradients_of_attention(arch: str) -> None:
  with on(arch):
    check_gradients(*inputs(2, 4, 2, 20, 75, 16, 24), THROUGH_ATTENTION)


@on_machines("gfx942", "sm_80", "sm_90", "apple9", "cl", "CPU", slow=("amx",), slowest=("gfx1201", "gfx950"))
def test_dropout(schedule: str, machine: Machine) -> None:
  B, Hq, _, M, N, *_ = SHAPE
  check_backward(machine, SHAPE, {"dropout_p": P, "kept": kept_by_seed((1, 2), B, Hq, M, N)})


@pytest.mark.each("heads", evenly=True)
@pytest.mark.parametrize("heads", [1, 4])
@on_machines("gfx942", "sm_80", "sm_90", "apple9", "CPU", slow=("cl", "gfx1201"))
def test_blocks_that_are_skipped(schedule: str, machine: Machine, heads: int) -> None:
  """With a mask for each head, heads of one group have lists of different lengths."""

  def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return banded(b, h, i, j) & ((h % 2 == 0) | (i > 40)) if heads > 1 else banded(b, 0, i, j)

  with machine.device() as device:
    mask = block_mask_on(BlockMask.of(mod, 1, heads, *SHAPE[3:5], (), 32, 32, device="CPU"), device)
    check_backward(machine, SHAPE, {"mask_mod": mod}, {"mask_mod": None, "block_mask": mask})


@on_machines("gfx942", "sm_80", "sm_90", "apple9", "cl", "CPU", slow=("gfx1201",))
def test_masks_that_end_within_a_tile(schedule: str, machine: Machine) -> None:
  """Whether an element exists depends on the same numbers as the trips of the loop over queries."""
  mask = np.random.default_rng(3).standard_normal((1, 2, 20, 33)).astype(np.float32)
  check_backward(machine, (1, 2, 1, 20, 33, 16, 16), {"attn_mask": mask, "is_causal": True})


@pytest.mark.kinds(name=("no keys", "window behind all keys", "added infinity", "two rules together"))
@pytest.mark.each("schedule", "machine", "name", evenly=True)
@pytest.mark.parametrize("name", BLIND)
@on_machines("gfx942", "sm_80", "sm_90", "apple9", "CPU", slow=("cl", "gfx1201"))
def test_rows_that_see_no_key_have_no_gradient(schedule: str, machine: Machine, name: str) -> None:
  assert no_gradient(check_backward(machine, (2, 4, 2, 37, 150, 16, 16), BLIND[name]))


@on_machines("gfx942", "sm_80", "sm_90", "apple9", "CPU", slow=("cl", "gfx1201"))
@pytest.mark.parametrize("slope", [False, True], ids=["added", "factor"])
@pytest.mark.each("schedule", "machine", "slope", evenly=True)
def test_a_score_mod_that_is_infinite_past_the_last_query(schedule: str, machine: Machine, slope: bool) -> None:
  def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (1.0 + 1.0 / (50 - i)) if slope else s + 1.0 / (50 - i)

  check_backward(machine, (1, 2, 1, 50, 40, 16, 16), {"score_mod": mod})


@on_machines("gfx942", "sm_80", "sm_90", "apple9", "CPU", slow=("cl", "gfx1100"))
def test_queries_before_all_keys_have_no_gradient(schedule: str, machine: Machine) -> None:
  """Nor have keys behind all queries, among others that have one."""
  got = check_backward(machine, (1, 1, 1, 70, 70, 16, 16), {"is_causal": True, "q_start": -5})
  assert (got["dq"][:, :, :5] == 0).all()
  assert (got["dk"][:, :, 65:] == 0).all()
  assert (got["dv"][:, :, 65:] == 0).all()


@pytest.mark.each("lengths")
@pytest.mark.parametrize("lengths", [(0, 35), (1, 41), (32, 33)], ids=str)
@on_machines("gfx942", "sm_80", "sm_90", "apple9", "CPU", slow=("cl", "gfx1100"), slowest=("gfx1201", "gfx950"))
def test_keys_that_do_not_exist_are_not_read(schedule: str, machine: Machine, lengths: tuple[int, int]) -> None:
  with machine.device() as device:
    case = Case.of(machine, SHAPE, {"kv_lengths": np.array(lengths)})
    clean = case.check(machine.small())
    rng, spoilt = np.random.default_rng(0), {}
    for name in "kv":
      x = case.operands[name].to("CPU").float().numpy().copy()
      for b, length in enumerate(lengths):
        x[b, :, length:] = rng.choice([np.nan, np.inf, -np.inf], x[b, :, length:].shape)
      spoilt[name] = stored(x, machine.dtype, device)
    again = case.run(machine.small(), **spoilt)
  for name, x in clean.items():
    np.testing.assert_array_equal(again[name], x)
  for b, length in enumerate(lengths):
    assert (clean["dk"][b, :, length:] == 0).all()
    assert (clean["dv"][b, :, length:] == 0).all()


def counted(machine: Machine, case: Case, tiles: Any) -> dict[str, emulator.Counters]:
  """What the kernels cost: of dQ "q", of dK and dV "kv"."""
  with emulator.profile() as profile:
    case.run(tiles)
  found = {name.split("_")[2]: x for name, x in profile.kernels.items() if name.startswith("attention_backward")}
  assert list(found) == ["q", "kv"]
  return found


@pytest.mark.each("D")
@pytest.mark.parametrize("D", [64, 128])
@on_machines("sm_80", "sm_90", "apple9", slow=("sm_75",))
def test_no_bank_conflict_and_no_more_products_than_there_are(schedule: str, machine: Machine, D: int) -> None:
  M, N = 64, 128
  tiles = {
    "cuda": (Cuda(2, 1, 32), Cuda(2, 2, 16)),
    "turing": (turing(2, 1, 32), turing(2, 2, 16)),
    "hopper": (Hopper(1, 64), Hopper(2, 64)),
    "apple": (Apple(2, 1, 32), Apple(2, 2, 16)),
  }[schedule]
  with machine.device():
    counts = counted(machine, Case.of(machine, (1, 1, 1, M, N, D, D)), tiles)
  for kernel, rows, others, sums in (("q", M, N, 1), ("kv", N, M, 2)):
    assert counts[kernel].bank_conflicts == 0
    if schedule != "hopper":
      flops = {"cuda": 16 * 8 * 16, "turing": 16 * 8 * 8, "apple": 8 * 8 * 8}[schedule]  # of an instruction
      assert counts[kernel].matrix == (2 + sums) * M * N * D // flops
    else:  # a warp's share of a product is one: 16 rows, 16 along k, all columns
      assert counts[kernel].matrix == rows // 16 * (others // 64) * (2 * D // 16 + sums * 64 // 16)


@pytest.mark.kinds(arch=("gfx942", "gfx1100"))
@pytest.mark.parametrize(
  ("arch", "Dk", "Dv", "chosen"),
  [
    pytest.param(*case, chosen, marks=mark, id="-".join(map(str, case)) + ("-chosen" if chosen else "-small"))
    for case, small_tiles, tiles_of_choice in (
      (("gfx1201", 33, 48), pytest.mark.slowest, pytest.mark.slowest),
      (("gfx1100", 16, 32), (), pytest.mark.slowest),
      (("gfx942", 64, 64), (), pytest.mark.slow),
      (("gfx1100", 64, 64), pytest.mark.slowest, pytest.mark.slow),
    )
    for chosen, mark in ((False, small_tiles), (True, tiles_of_choice))
  ],
)
def test_no_bank_conflict(arch: str, Dk: int, Dv: int, chosen: bool) -> None:
  amd = machine(arch)
  with amd.device():
    for count in counted(amd, Case.of(amd, (1, 1, 1, 70, 70, Dk, Dv)), None if chosen else amd.small()).values():
      assert count.bank_conflicts == 0


@on_machines("gfx942", "sm_80", "sm_90", "apple9")
def test_causal_tiles_are_skipped(schedule: str, machine: Machine) -> None:
  tiles, shape = machine.small(), (1, 1, 1, 128, 128, 16, 16)
  with machine.device():
    full, causal = (counted(machine, Case.of(machine, shape, {"is_causal": x}), tiles) for x in (False, True))
  for own, name in zip(tiles, full, strict=True):
    blocks = 128 // own.rows  # the first sees one block of keys, the next two, and so on
    assert causal[name].matrix * 2 * blocks == full[name].matrix * (blocks + 1)


@pytest.mark.kinds(machine=("gfx942 half", "sm_80 half", "sm_90 half", "apple9 half", "cl half"))
@pytest.mark.each("machine", "is_causal", "group", evenly=True)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@on_machines("gfx1100", "gfx1201", "gfx942", "gfx950", "sm_80", "sm_90", "apple9", "cl", slow=("sm_75",))
def test_each_barrier_and_wait_deleted(schedule: str, machine: Machine, is_causal: bool, group: int) -> None:
  row, tiles = machine.row, machine.row.pipelined(machine.arch)  # type: ignore[misc]
  with machine.device():
    case = Case.of(machine, (1, group, 1, 96, 96, 32, 16), {"is_causal": is_causal, "q_start": 15 * is_causal})
    outcomes = emulator.delete_each_barrier(lambda: case.run(tiles))
  assert {x.what for x in outcomes} == row.barriers
  for kernel in ("q", "kv"):
    own = [x for x in outcomes if x.kernel.startswith(f"attention_backward_{kernel}_")]
    if schedule in ("amd", "apple", "generic"):
      in_each = 2 if schedule != "generic" else 3 if kernel == "q" else 4  # one for each operand too
      in_loops = in_each * 2 if is_causal else in_each
      barriers = in_loops + (schedule == "amd")  # one before
      assert [type(x.caught) for x in own[:barriers]] == [emulator.Race] * barriers
      # Behind the tiles of each query head tinygrad has a barrier of its own, which is redundant.
      assert [x.caught for x in own[barriers:]] == [None] * (kernel == "kv" and group > 1)
    else:
      assert own
      # Copies that are complete at once are into slots that nobody has read since the last barrier.
      redundant = 1 if schedule == "turing" and kernel == "kv" and group > 1 and not is_causal else 0
      assert [x.what for x in own if x.caught is None] == ["barrier"] * redundant, list(map(str, own))


@pytest.mark.each("schedule", "machine", "short", evenly=True)
@pytest.mark.parametrize("short", ["q", "k", "v", "do", "lse", "delta"])
@on_machines("gfx942", "sm_80", "sm_90", "apple9", "cl")
def test_a_shortened_buffer_is_caught(schedule: str, machine: Machine, short: str) -> None:
  """The kernels take every buffer for 70 rows; one of them has 69."""
  with machine.device() as device:
    case, tiles = Case.of(machine, (1, 1, 1, 70, 70, 16, 16)), machine.small()
    whole = case.operands[short]
    cut = stored(np.zeros((*whole.shape[:2], 69, *whole.shape[3:]), np.float32), whole.dtype, device)
    for i, launch in enumerate(case.launches):
      slot = [x.name for x in launch.own].index(short)
      with pytest.raises(emulator.OutOfBounds, match=f"argument {slot} "):
        case.launched(i, tiles, **{short: cut})


# A mistake in each phase.
BROKEN = (
  *(
    "no causal mask",
    "keys past the end counted",
    "last tile of queries dropped",
    "no scale",
    "scores not pulled back",
  ),
  *(
    "no delta",
    "the LSE not subtracted",
    "a matrix not transposed",
    "sums begun anew with each tile",
    "steps left out",
  ),
  *("a group's first head for all", "halves of P and dS exchanged"),
)


def caught(name: str) -> list[Any]:
  arches: dict[str, tuple[str, ...]] = {
    "cpu": ("CPU",),
    "hopper": ("sm_90",),
    "cuda": ("sm_80",),
    "turing": ("sm_75",),
    "amx": ("amx",),
    "amd": ("gfx942", "gfx1100"),
    "apple": ("apple9",),
    "generic": ("cl",),
  }
  return [
    (name, schedule, arch) for schedule in arches for arch in arches[schedule] if schedule in MISTAKES[name].owners
  ]


@pytest.mark.kinds(arch=("CPU", "sm_90", "sm_80", "sm_75", "amx", "gfx942", "apple9", "cl"), name=BROKEN)
@pytest.mark.each("arch", "schedule")
@pytest.mark.parametrize(("name", "schedule", "arch"), [x for name in MISTAKES for x in caught(name)])
def test_a_mistake_is_caught(name: str, schedule: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  mistake, target = MISTAKES[name], machine(arch, {"CPU": FLOAT, "amx": BFLOAT}.get(arch, HALF))
  owner, phase = mistake.owners[schedule]
  shape = mistake.shape or (CPU if arch == "CPU" else GPU)
  with target.device():
    case, tiles = Case.of(target, shape, mistake.options), target.small()
    case.check(tiles)
    monkeypatch.setattr(owner, phase, mistake.wrong(getattr(owner, phase)))
    compiled.cache_clear()
    expected: Any = (AssertionError, "worst at") if mistake.noticed_by == "gate" else (emulator.KernelError, "LDS")
    with pytest.raises(expected[0], match=expected[1]):
      case.check(tiles)
    compiled.cache_clear()
