"""The kernels for gradients of biases on GPUs, each kind of bias on each schedule, against the oracle's dS."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from conformance_backward import BFLOAT, FLOAT, HALF, stored
from gradients import check_gradients
from helpers import inputs, normal, on, on_device
from test_dropout import P, kept_by_seed
from tinygrad import Device, Tensor
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn.dsl.gpu import bias_mainloop
from uopattn.dsl.rules.bias import Bias, BiasWork, IndexedBy
from uopattn.kernels import amd_backward, apple_backward, cuda_backward, generic_backward, hopper_backward
from uopattn.plan import gradient
from uopattn.plan.dispatch import bias_launch
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.proof.bias import BiasGate
from uopattn.proof.gate import GradientGate
from uopattn.proof.oracle import PRECISIONS, Array, oracle
from uopattn.runtime.prepare import compiled
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec

Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv


@dataclass(frozen=True)
class Kind:
  """A bias.

  Attributes:
    bias: which gradients are added up.
    shape: of the attention.
    options: what the oracle and the attention take.
    slope: (b, h, i, j) -> the derivative of a score with respect to the element that it reads.
    first: the first query whose gradients are wanted.
    splits: of the small tiles.
  """

  bias: Bias
  shape: Shape
  options: dict[str, Any] = field(default_factory=dict)
  slope: Any = None
  first: int = 0
  splits: int = 1


def sloped(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any) -> Any:
  return s + a[h] * (j - i) * 0.1


def by_distance(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any) -> Any:
  return s + a[j - i + 60]


def by_head_and_distance(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any) -> Any:
  return s + a[h, j - i + 80]


def looked_up(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, c: Any) -> Any:
  return s + a[c[i, j]]


KINDS = {
  "pairs": Kind(
    Bias(False, True, IndexedBy.PAIRS), (2, 4, 2, 37, 48, 16, 24), {"attn_mask": normal(1, 4, 37, 48), "softcap": 3.0}
  ),
  "pairs in 16 bits, causal": Kind(
    Bias(False, True, IndexedBy.PAIRS),
    (3, 2, 1, 70, 136, 16, 16),
    {"attn_mask": normal(1, 2, 70, 136).astype(np.float16), "is_causal": True},
  ),
  "pairs of some queries": Kind(
    Bias(False, False, IndexedBy.PAIRS, (0, 0), count=128),
    (1, 2, 2, 270, 20, 16, 16),
    {"score_mod": looked_up, "aux": (normal(8), np.random.default_rng(3).integers(0, 8, (270, 20)).astype(np.int32))},
    first=128,
  ),
  "queries": Kind(
    Bias(False, True, IndexedBy.QUERIES),
    (2, 2, 1, 40, 90, 16, 16),
    {"attn_mask": normal(1, 2, 40, 1), "window": (20, 10)},
  ),
  "keys": Kind(
    Bias(True, False, IndexedBy.KEYS),
    (2, 2, 1, 70, 45, 16, 16),
    {"attn_mask": normal(2, 1, 1, 45), "kv_lengths": np.array([0, 33]), "is_causal": True},
    splits=2,
  ),
  "slopes": Kind(
    Bias(False, True, IndexedBy.ALL, (0, 0)),
    (2, 2, 1, 70, 90, 32, 16),
    {"score_mod": sloped, "aux": (normal(2),), "is_causal": True, "q_start": np.array([20, 5])},
    lambda b, h, i, j: (j - i) * 0.1,
    splits=2,
  ),
  "distances": Kind(
    Bias(False, False, IndexedBy.DISTANCES, (0, 0)),
    (1, 2, 2, 50, 70, 16, 16),
    {"score_mod": by_distance, "aux": (normal(130),), "dropout_p": P, "kept": kept_by_seed((1, 2), 1, 2, 50, 70)},
    splits=3,
  ),
  "distances in a window": Kind(
    Bias(False, True, IndexedBy.DISTANCES, (0, 0)),
    (3, 2, 2, 70, 100, 16, 16),
    {"score_mod": by_head_and_distance, "aux": (normal(2, 200),), "window": (30, 5)},
    splits=2,
  ),
}
EACH = ("sm_80", "apple9", "gfx942", "cl")
ARCHES = [
  pytest.param(arch, dtype, id=f"{arch} {dtype.name}", marks=marks)
  for arch, dtype, marks in (
    ("sm_80", HALF, ()),
    ("apple9", HALF, ()),
    ("gfx942", HALF, ()),
    ("gfx1100", BFLOAT, ()),
    ("cl", HALF, ()),
    ("sm_75", HALF, pytest.mark.slow),
    ("sm_90", BFLOAT, pytest.mark.slow),
    ("sm_86", FLOAT, pytest.mark.slow),
    ("apple7", FLOAT, pytest.mark.slow),
    ("gfx1201", FLOAT, pytest.mark.slow),
    ("gfx950", FLOAT, pytest.mark.slow),
  )
]


def small_cuda(arch: str, dtype: DType) -> cuda_backward.Tiles:
  return cuda_backward.Tiles(2, 1, 32, in_registers=dtype != FLOAT, step=32 // dtype.itemsize, turing=arch == "sm_75")


def small_apple(arch: str, dtype: DType) -> apple_backward.Tiles:
  return apple_backward.Tiles(2, 1, 16)


def small_amd(arch: str, dtype: DType) -> amd_backward.Tiles:
  return amd_backward.Tiles(arch, "bias", 2, 1, 32, 8 * dtype.itemsize)


def small_generic(arch: str, dtype: DType) -> generic_backward.Tiles:
  return generic_backward.Tiles(16, 16, 2, 8)


def small_hopper(arch: str, dtype: DType) -> hopper_backward.Tiles:
  return hopper_backward.Tiles(1, 64, 2)


SMALL: dict[str, Callable[[str, DType], Any]] = {
  "hopper_bias_backward": small_hopper,
  "cuda_bias_backward": small_cuda,
  "apple_bias_backward": small_apple,
  "amd_bias_backward": small_amd,
  "generic_bias_backward": small_generic,
}


@dataclass(frozen=True)
class Case:
  """A kernel on normal random inputs, inside a device's context.

  Attributes:
    kind: the bias.
    launch: the kernel.
    given: its operands.
    arguments: the arguments of the attention.
    gate: what is expected of the sums.
  """

  kind: Kind
  launch: Launch
  given: dict[str, Any]
  arguments: Arguments
  gate: BiasGate

  @classmethod
  def of(cls, kind: Kind, dtype: DType) -> "Case":
    (B, Hq, Hkv, M, N, Dk, Dv), device, rng = kind.shape, Device.DEFAULT, np.random.default_rng(0)
    shapes = {"q": (B, Hq, M, Dk), "k": (B, Hkv, N, Dk), "v": (B, Hkv, N, Dv), "do": (B, Hq, M, Dv)}
    keep = PRECISIONS[dtype].keep
    arrays = {name: keep(rng.standard_normal(x).astype(np.float32)).astype(np.float32) for name, x in shapes.items()}
    given: dict[str, Any] = {name: [stored(x, dtype, device)] for name, x in arrays.items()}
    passed = {name: on_device(x) for name, x in kind.options.items() if name != "kept"}
    seed = Tensor(np.array([1, 2], np.uint32), device).realize() if "dropout_p" in passed else None
    arguments = replace(Arguments(enable_gqa=True, **passed).settled(device), seed=seed)
    spec = make_spec(given["q"][0], given["k"][0], given["v"][0], arguments)
    launch = bias_launch(replace(spec, bias=kind.bias), target_of(device))

    q, k, v, do = (x.astype(np.float64) for x in arrays.values())
    dlse = rng.standard_normal((B, Hq, M)).astype(np.float32)
    out, lse = oracle(q, k, v, **kind.options)
    delta = np.where(np.isinf(lse), 0, (out * do).sum(-1) - dlse)
    given |= {name: [stored(x, FLOAT, device)] for name, x in (("lse", lse), ("delta", delta))}
    given |= {"first": [Tensor([kind.first], device=device).realize()]} if kind.bias.count else {}
    mask = np.broadcast_to(kind.options.get("attn_mask", np.float32(0)), (B, Hq, M, N))
    gate = GradientGate.of_arrays(q, k, v, do, dtype, dlse, **kind.options | {"attn_mask": mask})
    slope = None if kind.slope is None else kind.slope(*np.ogrid[:B, :Hq, :M, :N])
    of_sums = BiasGate.of(gate, kind.bias, slope, kind.first)
    of_sums = replace(of_sums, unit=max(gate.unit, PRECISIONS[launch.spec.bias_dtype].unit))
    return cls(kind, launch, given | arguments.buffers(), arguments, of_sums)

  @property
  def small(self) -> Any:
    """Tiles for several trips, blocks and tiles of few queries and keys."""
    loop = SMALL[self.launch.schedule.name](target_of(Device.DEFAULT).arch, self.launch.spec.dtype)
    return type(self.launch.tiles)(loop, self.kind.splits)

  def run(self, tiles: Any = None) -> Array:
    """The sums of the kernel, which writes them to an output full of NaN; with the tiles of choice unless given."""
    launch = replace(self.launch, tiles=tiles or self.launch.tiles)
    (output,) = (x for x in launch.buffers() if x.name == "dbias")
    given = self.given | {"dbias": [stored(np.full(output.shape, np.nan, np.float32), output.dtype, Device.DEFAULT)]}
    found = launch.run(Device.DEFAULT, given, self.arguments.variables())["dbias"].realize()
    return collected(found.float().numpy(), BiasWork.of(launch.spec, launch.tiles))

  def check(self, tiles: Any = None) -> None:
    report = self.gate.report(self.run(tiles))
    assert report.correct, f"worst at {report.worst}: {report}"


def collected(x: Array, work: BiasWork) -> Array:
  """What a kernel leaves, in the shape of `uopattn.proof.bias.sums`."""
  bias, x = work.bias, x.astype(np.float64)
  heads = work.B if bias.batches else 1, work.H if bias.heads else 1
  if bias.indexed_by is IndexedBy.PAIRS:
    return x.reshape(*heads, work.M, work.N)
  x = x.sum(1).reshape(*heads, *x.shape[2:])
  if bias.indexed_by is IndexedBy.QUERIES:
    return x.sum(-1).reshape(*heads, -1, 1)[:, :, : work.M]
  if bias.indexed_by is IndexedBy.KEYS:
    return x.sum(-2).reshape(*heads, 1, -1)[..., : work.N]
  if bias.indexed_by is IndexedBy.ALL:
    return x.sum((2, 3, 4)).reshape(*heads, 1, 1)
  size, found = work.block_m, np.zeros((*heads, 1, work.M + work.N - 1))
  for group, m, n in np.ndindex(x.shape[2:]):
    distance = (group - work.blocks + 1) * size + n - m
    if -work.M < distance < work.N:
      found[:, :, 0, distance + work.M - 1] += x[:, :, group, m, n]
  return found


@pytest.mark.each("name", "arch", evenly=True)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("arch", "dtype"), ARCHES)
def test_matches_the_oracle(arch: str, dtype: DType, name: str) -> None:
  with on(arch):
    case = Case.of(KINDS[name], dtype)
    case.check(case.small)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("arch", "dtype"), ARCHES)
def test_matches_the_oracle_with_the_tiles_of_choice(arch: str, dtype: DType, name: str) -> None:
  with on(arch):
    Case.of(KINDS[name], dtype).check()


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_75", marks=pytest.mark.slow)])
def test_fewer_keys_in_a_tile_than_columns_stored_at_once(arch: str) -> None:
  with on(arch):
    case = Case.of(KINDS["pairs in 16 bits, causal"], HALF)
    case.check(replace(case.small, loop=replace(case.small.loop, block=16)))


@pytest.mark.parametrize("arch", ["sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in EACH[1:])])
def test_gradient_of_a_mask_through_attention(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  def plain_ops(*_: Any) -> Tensor:
    raise AssertionError("plain ops")

  monkeypatch.setattr(gradient, "of_scores", plain_ops)
  with on(arch):
    check_gradients(*inputs(1, 2, 1, 20, 33, 16, 16), {"attn_mask": normal(1, 2, 20, 33)})


@pytest.mark.parametrize("arch", EACH)
def test_two_scores_added_to_one_sum(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """A mistake that the gate must notice."""
  with on(arch):
    case = Case.of(KINDS["queries"], HALF)
    right = bias_mainloop.numbers
    monkeypatch.setattr(bias_mainloop, "numbers", lambda rows: {at: n // 2 for at, n in right(rows).items()})
    compiled.cache_clear()
    with pytest.raises(AssertionError, match="worst at"):
      case.check(case.small)
    compiled.cache_clear()


@pytest.mark.parametrize(("arch", "name"), [*((x, "slopes") for x in EACH), ("sm_80", "distances in a window")])
def test_each_barrier_and_wait_deleted(arch: str, name: str) -> None:
  with on(arch):
    case = Case.of(KINDS[name], HALF)
    outcomes = emulator.delete_each_barrier(lambda: case.run(case.small))
  # Behind the tiles of each trip tinygrad has a barrier of its own, which is redundant.
  redundant = 0 if arch == "sm_80" else 1
  assert len(outcomes) > redundant
  assert [x.what for x in outcomes if x.caught is None] == ["barrier"] * redundant, list(map(str, outcomes))
