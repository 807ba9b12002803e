"""The CUDA kernels on the emulator against the oracle: corners, drawn shapes and tiles, barriers, mistakes.

On sm_90 `hopper_forward` serves head sizes that are multiples of 8 up to 256; `cuda_forward` serves all else.
"""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import check, check_attention, counts, drawn, inputs, on, problem_of, run_tiles
from hypothesis import assume, given
from hypothesis import strategies as st
from tinygrad import Device, Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl import instructions
from uopattn.dsl.limits import MAX_THREADS, lds_limit
from uopattn.dsl.nvidia import mma_layout, swizzled
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward, hopper_forward
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.plan.target import target_of
from uopattn.spec.spec import AttentionSpec

ARCHES = ("sm_80", "sm_89", "sm_90")
SCHEDULES = {"sm_80": cuda_forward, "sm_90": hopper_forward}  # by where the sizes below run on them
QUICK = 4  # drawn examples in the quick run: each lowers a kernel of its own
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16

SHAPES = {
  "smallest": ((1, 1, 1, 1, 1, 1, 1), HALF),
  "smallest of whole chunks": ((1, 1, 1, 1, 1, 8, 8), BFLOAT),
  "one query": ((2, 2, 2, 1, 150, 64, 64), BFLOAT),
  "one key": ((1, 2, 2, 70, 1, 16, 16), HALF),
  "round": ((1, 1, 1, 128, 128, 64, 64), HALF),
  "odd everywhere": ((1, 2, 2, 77, 131, 33, 17), BFLOAT),
  "odd lengths": ((1, 2, 2, 77, 131, 40, 24), BFLOAT),
  "one past the tiles": ((1, 1, 1, 129, 129, 72, 72), HALF),
  "grouped": ((2, 4, 2, 50, 90, 24, 40), HALF),
  "large head": ((1, 1, 1, 20, 40, 256, 256), BFLOAT),
  "large head of the weights": ((1, 1, 1, 70, 40, 64, 200), HALF),
  "larger than Hopper's products": ((1, 1, 1, 64, 20, 160, 264), HALF),
}


# one of the architectures that share a kernel, and causal or not, in turn: each lowers a kernel of its own
CASES = [(shape, arch) for i, shape in enumerate(SHAPES) for arch in (ARCHES[i % 2], "sm_90")]


@pytest.mark.parametrize(("shape", "arch"), CASES)
def test_matches_the_oracle(shape: str, arch: str) -> None:
  sizes, dtype = SHAPES[shape]
  is_causal = (list(SHAPES).index(shape) // 2 + ARCHES.index(arch) // 2) % 2 == 1
  with on(arch):
    check_attention(*inputs(*sizes, dtype), is_causal=is_causal)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "q_start"), [(HALF, 3), (BFLOAT, -3)], ids=str)
@pytest.mark.parametrize("arch", [*ARCHES, "sm_86"])
@pytest.mark.parametrize("shape", [*SHAPES, "large odd head"])
def test_matches_the_oracle_in_both_types(shape: str, arch: str, dtype, q_start: int) -> None:
  sizes = SHAPES[shape][0] if shape in SHAPES else (1, 1, 1, 20, 40, 150, 257)
  with on(arch):
    check_attention(*inputs(*sizes, dtype), is_causal=True, q_start=q_start)


@given(
  arch=st.sampled_from(ARCHES),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 2),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.sampled_from([1, 8, 15, 24, 40, 64]),
  Dv=st.sampled_from([1, 8, 15, 24, 40, 64]),
  dtype=st.sampled_from([HALF, BFLOAT]),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
@drawn(QUICK)
def test_any_shape(arch, Hkv, group, M, N, Dk, Dv, dtype, is_causal, q_start, seed) -> None:
  with on(arch):
    check_attention(*inputs(1, Hkv * group, Hkv, M, N, Dk, Dv, dtype, seed), is_causal=is_causal, q_start=q_start)


@given(
  warps=st.integers(1, 5),
  m_tiles=st.integers(1, 2),
  block=st.integers(1, 3),
  stages=st.integers(2, 4),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  D=st.sampled_from([8, 24, 32]),
  causal=st.booleans(),
)
@drawn(QUICK)
def test_any_tiles(warps, m_tiles, block, stages, M, N, D, causal) -> None:
  with on("sm_80"):
    q, k, v = inputs(1, 2, 1, M, N, D, 16)
    tiles = cuda_forward.Tiles(warps, m_tiles, block * 16, stages)
    check(q, k, v, run_tiles(q, k, v, tiles, causal), is_causal=causal)


@given(
  warpgroups=st.integers(1, 4),
  block=st.integers(1, 8),
  stages=st.integers(2, 4),
  M=st.integers(1, 300),
  N=st.integers(1, 300),
  D=st.sampled_from([8, 40, 72]),
  causal=st.booleans(),
)
@drawn(QUICK)
def test_any_tiles_of_warpgroups(warpgroups, block, stages, M, N, D, causal) -> None:
  tiles = hopper_forward.Tiles(warpgroups, block * 16, stages)
  assume(tiles.shared_bytes(D, 24) <= lds_limit("sm_90"))
  with on("sm_90"):
    q, k, v = inputs(1, 2, 1, M, N, D, 24)
    check(q, k, v, run_tiles(q, k, v, tiles, causal), is_causal=causal)


@pytest.mark.parametrize("arch", SCHEDULES)
def test_rows_that_see_no_key_are_zero(arch: str) -> None:
  with on(arch):
    out, lse = attention(
      *inputs(1, 1, 1, 140, 140, 16, 16), is_causal=True, q_start=-70, return_lse=True, backend="kernel"
    )
    Tensor.realize(out, lse)
    assert (out.numpy()[0, 0, :70] == 0).all()
    assert (lse.numpy()[0, 0, :70] == -math.inf).all()
    assert np.isfinite(lse.numpy()[0, 0, 70:]).all()


@pytest.mark.parametrize("arch", SCHEDULES)
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(scale: float, arch: str) -> None:
  with on(arch):
    check_attention(*inputs(1, 1, 1, 40, 400, 16, 16), scale=scale)


@pytest.mark.parametrize("arch", SCHEDULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_key_reaches_the_rows_that_see_it_and_no_other(bad: float, arch: str) -> None:
  with on(arch):
    q, k, v = inputs(1, 1, 1, 130, 130, 16, 16)
    row = Tensor(np.arange(130).reshape(1, 1, 130, 1) == 129, device="EMU")
    out = attention(q, row.where(bad, k).cast(HALF).realize(), v, is_causal=True, backend="kernel").numpy()[0, 0]
  assert np.isnan(out[129]).all()
  assert np.isfinite(out[:129]).all()


@pytest.mark.parametrize("arch", SCHEDULES)
def test_a_bad_head_reaches_no_other(arch: str) -> None:
  """The rows after a head's last are the next head's: a tile that is not whole must not hold them."""
  with on(arch):
    q, k, v = inputs(1, 4, 2, 70, 70, 16, 16)
    second = Tensor(np.arange(2).reshape(1, 2, 1, 1) == 1, device="EMU")
    k, v = (second.where(math.nan, x).cast(HALF).realize() for x in (k, v))
    out = attention(q, k, v, enable_gqa=True, backend="kernel").numpy()[0]
  assert np.isfinite(out[:2]).all()
  assert np.isnan(out[2:]).all()


@pytest.mark.parametrize("arch", SCHEDULES)
@pytest.mark.parametrize("D", [64, 128])
def test_no_bank_conflict_and_causal_tiles_skipped(arch: str, D: int) -> None:
  with on(arch):
    sources = inputs(1, 1, 1, 130, 260, D, D)
    full, causal = counts(*sources), counts(*sources, is_causal=True)
  assert full.bank_conflicts == causal.bank_conflicts == 0
  assert causal.matrix < full.matrix


TILES: dict[str, list[Any]] = {
  "sm_80": [cuda_forward.Tiles(4, 1, 32), cuda_forward.Tiles(2, 1, 16, 3)],
  "sm_90": [hopper_forward.Tiles(1, 32), hopper_forward.Tiles(2, 16, 3)],
}


def test_no_more_matrix_instructions_than_the_products_have() -> None:
  M, N, D, block_n = 256, 256, 64, 128
  with on("sm_80"), emulator.profile() as small:
    run_tiles(*inputs(1, 1, 1, M, N, D, D), cuda_forward.Tiles(4, 2, block_n))
  assert small.kernels["attention_1_1_256_256_64_64"].matrix == 2 * M * N * D // (16 * 8 * 16)
  with on("sm_90"), emulator.profile() as large:  # a warp's part of a product is one: 16 rows, 16 along k, all columns
    run_tiles(*inputs(1, 1, 1, M, N, D, D), hopper_forward.Tiles(2, block_n))
  assert large.kernels["attention_1_1_256_256_64_64"].matrix == M // 16 * (N // block_n) * (D // 16 + block_n // 16)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("arch", "tiles"), [(arch, tiles) for arch in TILES for tiles in TILES[arch]], ids=str)
def test_each_barrier_and_wait_deleted(arch: str, tiles: Any, causal: bool) -> None:
  with on(arch):
    # with 16 columns of Q instead of 32 each warp would copy just the rows that it reads, and need no barrier for them
    q, k, v = inputs(1, 1, 1, 130, 130, 32, 16)
    outcomes = emulator.delete_each_barrier(lambda: run_tiles(q, k, v, tiles, causal))
  assert {o.what for o in outcomes} >= (
    {"barrier", "cp_async_wait"} if arch == "sm_80" else {"fence_async", "wgmma_wait"}
  )
  assert [str(o) for o in outcomes if o.caught is None] == []


@pytest.mark.parametrize("arch", SCHEDULES)
@pytest.mark.parametrize("short", ["o", "q", "k", "v"])
def test_a_shortened_buffer_is_caught(arch: str, short: str) -> None:
  """The kernel takes every buffer for 70 rows; one of them has 69."""
  D = 16
  tiles = TILES[arch][0]

  def body(*buffers: UOp) -> UOp:
    claimed = [UOp.placeholder((1, 70, D), HALF, x.base.arg.slot) for x in buffers]
    return SCHEDULES[arch].forward(*claimed, rules=Rules(70, 70, scale=0.25), tiles=tiles)

  with on(arch):
    tensors = [Tensor.zeros(1, 69 if x == short else 70, D, dtype=HALF).contiguous().realize() for x in "oqkv"]
    with pytest.raises(emulator.OutOfBounds, match=f"argument {'oqkv'.index(short)} "):
      Tensor.custom_kernel(*tensors, fxn=body)[0].realize()


SPEC = AttentionSpec(1, 1, 1, 100, 100, 64, 64, HALF, 0.125)


@pytest.mark.parametrize(
  ("arch", "Dk", "Dv", "kernel"),
  [
    ("sm_80", 64, 64, "cuda_forward"),
    ("sm_89", 64, 64, "cuda_forward"),
    ("sm_90", 64, 64, "hopper_forward"),
    ("sm_90", 8, 256, "hopper_forward"),
    ("sm_90", 64, 60, "cuda_forward"),
    ("sm_90", 33, 64, "cuda_forward"),
    ("sm_90", 64, 264, "cuda_forward"),
    ("sm_100", 64, 64, "cuda_forward"),
  ],
)
def test_which_kernel_serves(arch: str, Dk: int, Dv: int, kernel: str) -> None:
  launch = dispatch(AttentionSpec(1, 1, 1, 100, 100, Dk, Dv, HALF, 0.125), Target("CUDA", arch))
  assert launch.schedule.name == kernel


def test_why_no_kernel_serves() -> None:
  with pytest.raises(NoKernel) as old:
    dispatch(SPEC, Target("CUDA", "sm_70"))
  reason = "cuda_forward: sm_70 has no mma.sync of this kernel's for half; sm_75 and newer have"
  assert old.value.reasons == (reason,)
  with pytest.raises(NoKernel) as large:
    dispatch(AttentionSpec(1, 1, 1, 100, 100, 64, 4000, HALF, 0.125), Target("CUDA", "sm_90"))
  assert "cuda_forward: head sizes 64 and 4000: the smallest tile needs 2024 registers a lane, of " in str(large.value)


@pytest.mark.parametrize("arch", ARCHES)
def test_target_and_float32(arch: str) -> None:
  with on(arch):
    assert target_of(Device.DEFAULT) == Target("CUDA", arch)
    q, k, v = (x.float() for x in inputs(1, 1, 1, 20, 20, 16, 16))
    with pytest.raises(ValueError, match=r"multiplies float32 in tf32 alone.*ALLOW_TF32=1, or give it half or bf"):
      attention(q, k, v, backend="kernel")


@pytest.mark.parametrize(
  ("kernel", "arguments", "message"),
  [
    (cuda_forward, (4, 1, 24), r"Tiles\.block_n=24: must be a multiple of 16"),
    (cuda_forward, (4, 1, 0), r"Tiles\.block_n=0: must be a multiple of 16"),
    (cuda_forward, (4, 0, 32), r"Tiles\.m_tiles=0: must be at least 1"),
    (cuda_forward, (33, 1, 32), r"Tiles\.warps=33: must be in 1\.\.32"),
    (cuda_forward, (4, 1, 32, 1), r"Tiles\.stages=1: must be at least 2"),
    (hopper_forward, (2, 24), r"Tiles\.block_n=24: must be a multiple of 16 in 16\.\.256"),
    (hopper_forward, (2, 272), r"Tiles\.block_n=272: must be a multiple of 16 in 16\.\.256"),
    (hopper_forward, (0, 64), r"Tiles\.warpgroups=0: must be in 1\.\.8"),
    (hopper_forward, (9, 64), r"Tiles\.warpgroups=9: must be in 1\.\.8"),
    (hopper_forward, (2, 64, 1), r"Tiles\.stages=1: must be at least 2"),
  ],
)
def test_tiles_state_their_laws(kernel: ModuleType, arguments: tuple[int, ...], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    kernel.Tiles(*arguments)


@pytest.mark.parametrize("arch", [*ARCHES, "sm_86", "sm_100", "sm_120"])
@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(arch: str, length: int) -> None:
  for D in (1, 8, 64, 80, 128, 192, 256):
    launch = dispatch(AttentionSpec(1, 1, 1, length, length, D, D, HALF, 0.125), Target("CUDA", arch))
    assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
    assert launch.tiles.threads <= MAX_THREADS
    assert launch.tiles.block_m // 2 < max(length, 64)


def test_no_tiles() -> None:
  with pytest.raises(ValueError, match=r"sm_89.*sm_90"):
    hopper_forward.Tiles.choose(SPEC, Target("CUDA", "sm_89"))
  for size in (60, 264):
    spec = AttentionSpec(1, 1, 1, 100, 100, 64, size, HALF, 0.125)
    with pytest.raises(ValueError, match=rf"head sizes 64 and {size}.* multiples of 8.*256"):
      hopper_forward.Tiles.choose(spec, Target("CUDA", "sm_90"))
  with pytest.raises(ValueError, match=r"the smallest tile needs \d+ registers .* of shared memory, of 65536"):
    cuda_forward.Tiles.choose(problem_of(1, 64, 64, 4000, 64, HALF), Target("CUDA", "sm_75"))


right_scores, right_last, right_visit = HeadRules.scores, HeadRules.last_seen, HeadRules.key_range
right_softmax, right_pack, right_tile = cuda_forward.online_softmax, instructions.pack, swizzled.SwizzledTiles.tile


def no_mask(self, products, row, first, offsets, masked):
  return right_scores(self, products, row, first, offsets, False)


def mask_one_key_late(self, row):
  return right_last(self, row) + 1


def no_rescale(*arguments):
  p, m_new, l_new, _ = right_softmax(*arguments)
  return p, m_new, l_new, UOp.const(1.0, dtypes.float)


def sum_not_rescaled(family, scores, factor, m_old, l_old, *rest):
  p, m_new, l_new, alpha = right_softmax(family, scores, factor, m_old, l_old, *rest)
  return p, m_new, l_new + l_old * (1 - alpha), alpha


def last_tile_dropped(*arguments):
  tile_range = right_visit(*arguments)
  return replace(tile_range, n_tiles=(tile_range.n_tiles - 1).maximum(1))


def own_lane_alone(operation, value):
  return value


def halves_exchanged(family, low, high, dtype):
  return right_pack(family, high, low, dtype)


BOTH = (cuda_forward, hopper_forward)
MISTAKES: dict[str, tuple[tuple[Any, ...], str, Any, dict[str, Any]]] = {
  "no causal mask on the diagonal": ((HeadRules,), "scores", no_mask, {"is_causal": True}),
  "keys past the end counted": ((HeadRules,), "scores", no_mask, {}),
  "mask one key late": ((HeadRules,), "last_seen", mask_one_key_late, {"is_causal": True}),
  "no rescale of the accumulator": (BOTH, "online_softmax", no_rescale, {}),
  "no rescale of the sum": (BOTH, "online_softmax", sum_not_rescaled, {}),
  "maximum of a lane's own keys": (BOTH, "row_reduce", own_lane_alone, {}),
  "sum of a lane's own keys": ((mma_layout,), "row_reduce", own_lane_alone, {}),
  "last tile dropped": ((HeadRules,), "key_range", last_tile_dropped, {}),
  "halves of a word exchanged": ((instructions,), "pack", halves_exchanged, {}),
}


@pytest.mark.parametrize("arch", SCHEDULES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  modules, phase, mistake, options = MISTAKES[name]
  with on(arch):
    sources = inputs(1, 1, 1, 50, 150, 16, 16)
    for module in modules:
      monkeypatch.setattr(module, phase, mistake)
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*sources, **options)
    monkeypatch.undo()
    check_attention(*sources, **options)


def test_values_not_transposed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  right = instructions.ldmatrix
  monkeypatch.setattr(instructions, "ldmatrix", lambda *arguments, trans=False: right(*arguments))
  with on("sm_80"), pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs(1, 1, 1, 50, 150, 16, 16))


def without_permutation(self: swizzled.SwizzledTiles, row: UOp, chunk: UOp) -> UOp:
  per = self.width // self.chunk
  return self.memory[self.base + (chunk // per * self.height + row) * self.width + chunk % per * self.chunk]


def test_without_its_permutation_shared_memory_has_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(swizzled.SwizzledTiles, "at", without_permutation)
  with on("sm_80"):
    sources = inputs(1, 1, 1, 64, 64, 64, 64)
    check_attention(*sources)  # ldmatrix takes any address
    assert counts(*sources).bank_conflicts > 0
  with on("sm_90"), pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs(1, 1, 1, 64, 64, 64, 64))  # wgmma permutes by itself


@pytest.mark.parametrize("arch", SCHEDULES)
def test_a_slot_filled_too_early_is_caught(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Every tile in one slot: the copy of the next overwrites what is being read."""
  monkeypatch.setattr(swizzled.SwizzledTiles, "tile", lambda self, n_tile, *after: right_tile(self, n_tile * 0, *after))
  with on(arch), pytest.raises(emulator.KernelError, match="LDS"):
    check_attention(*inputs(1, 1, 1, 50, 300, 16, 16))
