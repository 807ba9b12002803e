"""What may stand between q.k and the softmax, in each kernel for GPUs, on the emulator against the oracle."""

import math
from dataclasses import replace
from typing import Any

import mistakes
import numpy as np
import pytest
from conformance import ONCE_ON_GPUS, SUBJECTS, Subject
from helpers import check, drawn, lower, on_device, same_segment, spoiled_behind
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.rules.rules import Rules

Options = dict[str, Any]

# Kernels with machines: rules are the same code on all machines of a kernel.
KERNELS = ("amd", "cuda", "hopper", "apple", "generic", "amx")
MACHINES = [(name, arch) for name in KERNELS for arch in SUBJECTS[name].arches if name != "cuda" or arch == "sm_80"]
ONE_OF_EACH = ("gfx942", "sm_80", "sm_90", "apple9", "cl", "amx")
ONE_EACH = [
  ("amd", "gfx942"),
  ("cuda", "sm_80"),
  ("hopper", "sm_90"),
  ("apple", "apple9"),
  pytest.param("generic", "cl", marks=pytest.mark.slow),
  pytest.param("amx", "amx", marks=pytest.mark.slow),
]
SHAPE = B, HEADS, KV_HEADS, M, N, DK, DV = 2, 4, 2, 77, 110, 24, 40
RANDOM = np.random.default_rng(5)
NORMAL = RANDOM.standard_normal((1, HEADS, M, N)).astype(np.float32)
SLOPES, SEGMENTS = np.array([0.1, 0.2, 0.3, 0.4], np.float32), (np.arange(N) // 40).astype(np.int32)


AUX: Options = {"aux": (SLOPES, SEGMENTS)}
FEATURES: dict[str, Options] = {
  "window": {"window": (20, 5)},
  "window behind": {"window": (20, None), "q_start": 60},
  "window ahead": {"window": (0, 30), "q_start": 3},
  "window behind, causal": {"window": (17, None), "is_causal": True, "q_start": -9},
  "softcap": {"softcap": 2.0},
  "lengths": {"kv_lengths": np.array([0, 95])},
  "starts": {"q_start": np.array([3, 100]), "is_causal": True},
  "no key in the last queries' window": {"window": (3, None), "q_start": 98},
  "sinks": {"sinks": np.array([0, 1, -math.inf, 2], np.float32)},
  "added mask": {"attn_mask": np.where(NORMAL > 1.5, -math.inf, NORMAL)},
  "added mask of 16 bits": {"attn_mask": NORMAL[0, 0].astype(np.float16)},
  "mask of keys": {"attn_mask": RANDOM.random((B, 1, 1, N)) < 0.5},
  "mask": {"attn_mask": NORMAL > 0.3},
  "mask, causal": {"attn_mask": NORMAL > 0.3, "is_causal": True, "q_start": N - M},
  "score_mod": {"score_mod": lower, **AUX},
  "mask_mod": {"mask_mod": same_segment, **AUX},
}
ALIKE = ("window behind", "window ahead", "no key in the last queries' window", "mask", "added mask of 16 bits")
ALONE = [name for name in FEATURES if name not in ALIKE]
TOGETHER: dict[str, Options] = {
  "of positions": FEATURES["window"] | FEATURES["lengths"] | FEATURES["starts"] | FEATURES["sinks"] | {"scale": -0.3},
  "of scores": FEATURES["softcap"] | FEATURES["score_mod"] | FEATURES["added mask"] | {"is_causal": True},
  "of keys": FEATURES["mask"] | FEATURES["mask_mod"] | FEATURES["window behind"] | FEATURES["softcap"],
  "lengths, causal, sinks": {
    "is_causal": True,
    "q_start": np.array([-9, 60]),
    "kv_lengths": np.array([100, 63]),  # the second ends one key before a tile does
    "sinks": np.array([0.5, 2.0, -3.0, 1.0], np.float32),
  },
}


def plain(name: str, x: Any) -> Any:
  """What the oracle takes for a Variable or an int."""
  x = x.unbind()[1] if isinstance(x, UOp) else x
  return np.full(B, x) if name == "kv_lengths" and isinstance(x, int) else x


def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
  """Output and LSE."""
  given = {name: on_device(x) for name, x in options.items()}
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  return out, lse


def check_run(subject: Subject, arch: str, dtype: DType = dtypes.half, seed: int = 0, **options: Any) -> None:
  q, k, v = subject.inputs(arch, SHAPE, dtype, seed)
  out, lse = run(q, k, v, **options)
  subject.verify(q, k, v, out, lse, **{name: plain(name, x) for name, x in options.items()})


of_machines = pytest.mark.parametrize(("name", "arch"), MACHINES)
of_kernels = pytest.mark.parametrize(("name", "arch"), ONE_EACH)


@pytest.mark.kinds(arch=ONE_OF_EACH, feature=ALONE)
@pytest.mark.each("name", "arch", evenly=True)  # each kernel has all of them in `test_together`
@of_machines
@pytest.mark.parametrize("feature", FEATURES)
def test_each_alone(feature: str, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch):
    check_run(SUBJECTS[name], arch, **FEATURES[feature])


@pytest.mark.each("arch", "features", evenly=True)  # rules are the same code in all
@of_machines
@pytest.mark.parametrize("features", TOGETHER)
def test_together(features: str, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch):
    check_run(SUBJECTS[name], arch, dtypes.bfloat16, **TOGETHER[features])


@pytest.mark.slow
@pytest.mark.each("arch", "dtype", "features", evenly=True)
@of_machines
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("features", FEATURES | TOGETHER)
def test_with_chosen_tiles(features: str, dtype: DType, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch, chosen=True):
    check_run(SUBJECTS[name], arch, dtype, **(FEATURES | TOGETHER)[features])


@pytest.mark.slow
@given(
  machine=st.sampled_from(MACHINES), names=st.sets(st.sampled_from([*FEATURES]), max_size=5), seed=st.integers(0, 99)
)
@drawn(4, 8)
def test_any_together(machine: tuple[str, str], names: set[str], seed: int) -> None:
  options: Options = {}
  for feature in sorted(names):
    options |= FEATURES[feature]
  name, arch = machine
  with SUBJECTS[name].on(arch):
    check_run(SUBJECTS[name], arch, seed=seed, **options)


@pytest.mark.kinds(name=("amd", "cuda", "hopper"))
@pytest.mark.parametrize(
  ("name", "dtype"), [(name, dtype) for name, _, dtype in ONCE_ON_GPUS if name not in ("hopper8", "hopper32")], ids=str
)
def test_chosen_tiles(name: str, dtype: DType) -> None:
  arch = SUBJECTS[name].arches[0]
  with SUBJECTS[name].on(arch, chosen=True):
    check_run(SUBJECTS[name], arch, dtype, **FEATURES["window"], **FEATURES["sinks"], **FEATURES["lengths"])


@pytest.mark.parametrize(("name", "arch"), [("hopper", "sm_90"), pytest.param("amd", "gfx942", marks=pytest.mark.slow)])
def test_variables(name: str, arch: str) -> None:
  """Also where no keys exist, and where no query sees any of the later ones."""
  with SUBJECTS[name].on(arch):
    for start, length in ((50, 66), (50, 0), (-9, 107)):
      numbers = UOp.variable("start", -100, 200).bind(start), UOp.variable("length", 0, N).bind(length)
      check_run(SUBJECTS[name], arch, q_start=numbers[0], kv_lengths=numbers[1], window=(30, 0))
    for length in (0, 64, 77):
      check_run(SUBJECTS[name], arch, kv_lengths=length)


@of_kernels
@pytest.mark.each("kind", evenly=True)
@pytest.mark.parametrize("kind", ["tensor", "int", "variable"])
def test_what_lies_behind_the_lengths_does_not_matter(kind: str, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch):
    check_what_is_behind(SUBJECTS[name], arch, kind)


def check_what_is_behind(subject: Subject, arch: str, kind: str) -> None:
  given: Any = {"tensor": np.array([70, 33]), "int": 70, "variable": UOp.variable("length", 0, N).bind(70)}[kind]
  lengths = plain("kv_lengths", given)
  q, k, v = subject.inputs(arch, SHAPE, dtypes.half)
  out, lse = run(q, spoiled_behind(lengths, k), spoiled_behind(lengths, v), kv_lengths=given)
  subject.verify(q, k, v, out, lse, kv_lengths=lengths)


def test_reading_behind_the_length_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  right_load = RegisterPipeline.load

  def length_ignored(self: RegisterPipeline, first: UOp, *after: UOp) -> UOp:
    self.length = UOp.const(N)
    return right_load(self, first, *after)

  monkeypatch.setattr(RegisterPipeline, "load", length_ignored)
  with SUBJECTS["amd"].on("gfx942"), pytest.raises(AssertionError, match="worst at"):
    check_what_is_behind(SUBJECTS["amd"], "gfx942", "tensor")


BLIND: dict[str, Options] = {
  "no keys": {"kv_lengths": np.array([0, 0])},
  "window before all keys": {"window": (3, 2), "q_start": np.array([-100, -120])},
  "window behind all keys": {"window": (3, None), "q_start": 160},
  "bool mask": {"attn_mask": np.zeros((1, 1, 1, N), bool)},
  "added infinity": {"attn_mask": np.full((2, 1, 1, 1), -np.inf, np.float32)},
}


@pytest.mark.each("name", "arch")
@of_kernels
@pytest.mark.parametrize("blind", BLIND)
def test_rows_that_see_no_key_are_zero_with_sinks_too(blind: str, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch):
    out, lse = run(*SUBJECTS[name].inputs(arch, SHAPE, dtypes.half), sinks=np.ones(HEADS, np.float32), **BLIND[blind])
  assert (out.numpy() == 0).all()
  assert (lse.numpy() == 1).all()  # the sink


@of_kernels
def test_some_rows_that_see_no_key_are_zero_with_sinks_too(name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch):
    out, lse = run(
      *SUBJECTS[name].inputs(arch, SHAPE, dtypes.half),
      kv_lengths=np.array([0, 20]),
      window=(30, 0),
      sinks=np.ones(HEADS, np.float32),
    )
  o, l = out.numpy(), lse.numpy()
  assert (o[0] == 0).all()
  assert (l[0] == 1).all()  # the sink
  assert (o[1, :, 50:] == 0).all()
  assert (l[1, :, 50:] == 1).all()
  assert np.isfinite(l[1, :, :50]).all()


@pytest.mark.each("feature", evenly=True)
@of_kernels
@pytest.mark.parametrize("feature", ["window", "lengths"])
def test_tiles_that_nobody_sees_are_skipped(feature: str, name: str, arch: str) -> None:
  def work(**options: Any) -> int:
    with emulator.profile() as profile:
      run(*SUBJECTS[name].inputs(arch, SHAPE, dtypes.half), **options)
    (found,) = [
      getattr(count, SUBJECTS[name].work) for kernel, count in profile.kernels.items() if kernel.startswith("attention")
    ]
    return int(found)

  with SUBJECTS[name].on(arch):
    assert work(**FEATURES[feature]) < 0.7 * work()


def check_rules(
  name: str, arch: str, field: str, tables: list[np.ndarray[Any, Any]], seen: np.ndarray[Any, Any]
) -> None:
  """The kernel with rules that have buffers as a field, which `attention` does not make of its own arguments."""
  subject = SUBJECTS[name]
  assert subject.small is not None
  tiles = subject.small(arch)

  def body(o: UOp, q: UOp, k: UOp, v: UOp, *buffers: UOp) -> UOp:
    given: Options = {field: buffers}
    rules = Rules(M, N, heads=HEADS, group=HEADS // KV_HEADS, scale=DK**-0.5, **given)
    graph = subject.kernel.forward(o, q, k, v, rules=rules, tiles=tiles)
    return graph.replace(arg=replace(graph.arg, estimates=Estimates()))  # tinygrad's own fail

  with subject.on(arch):
    sources = subject.inputs(arch, SHAPE, dtypes.half)
    flat = (x.reshape(-1, *x.shape[2:]).contiguous().realize() for x in sources)
    out = Tensor.empty(B * HEADS, M, DV, dtype=dtypes.half, device="EMU")
    found = Tensor.custom_kernel(out, *flat, *map(on_device, tables), fxn=body)[0].realize()
    check(*sources, found.reshape(B, HEADS, M, DV), attn_mask=seen)


@pytest.mark.kinds(arch=ONE_OF_EACH)
@of_machines
def test_a_list_of_tiles(name: str, arch: str) -> None:
  """Whole ones and ones whose last keys may be none, in any order."""
  small = SUBJECTS[name].small
  assert small is not None
  block_m, block_n = small(arch).block_m, small(arch).block_n
  blocks, tiles = math.ceil(M / block_m), math.ceil(N / block_n)
  order, number = np.zeros((1, 1, blocks, tiles), np.int32), np.full((1, 1, blocks, 2), (0, 1), np.int32)
  order[0, 0, 0, :4], number[0, 0, 0] = (1, 0, 2, tiles - 1), (2, 4)
  order[0, 0, 1, :2], number[0, 0, 1] = (2, 3), (1, 2)
  seen = np.zeros((M, N), bool)
  for block in range(blocks):
    for tile in order[0, 0, block, : number[0, 0, block, 1]]:
      seen[block * block_m :, tile * block_n :][:block_m, :block_n] = True
  check_rules(name, arch, "tile_lists", [order, number], seen)


@pytest.mark.kinds(arch=ONE_OF_EACH)
@of_machines
def test_bounds_of_each_query(name: str, arch: str) -> None:
  firsts, lasts = (np.array(x, np.int32)[np.arange(M) // 20] for x in ((0, 50, 60, 90), (40, 40, 100, 105)))
  keys = np.arange(N)
  check_rules(name, arch, "bounds", [firsts, lasts], (keys >= firsts[:, None]) & (keys <= lasts[:, None]))


@pytest.mark.each("name", "arch", evenly=True)
@of_kernels
@pytest.mark.parametrize("feature", mistakes.FEATURES)
def test_a_mistake_is_caught(feature: str, name: str, arch: str) -> None:
  with SUBJECTS[name].on(arch), mistakes.FEATURES[feature].made(), pytest.raises(AssertionError, match="worst at"):
    check_run(SUBJECTS[name], arch, **FEATURES[feature])
