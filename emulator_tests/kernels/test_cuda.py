"""Which of the CUDA forward kernels serves what, with which tiles, and their shared memory; see also test_forward.

On sm_90 `hopper_forward` serves head sizes that are multiples of 8 up to 256; `cuda_forward` serves all else.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from helpers import check, check_attention, counts, inputs, on, problem_of, run_tiles
from mistakes import NO_PERMUTATION
from tinygrad import Device, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import MAX_THREADS, Target, lds_limit
from uopattn.kernels import cuda_forward, hopper_forward
from uopattn.plan.dispatch import NoKernel, dispatch, dispatch_backward
from uopattn.plan.target import target_of
from uopattn.plan.tiles import cuda, hopper
from uopattn.spec.spec import AttentionSpec

ARCHES = ("sm_80", "sm_89", "sm_90")
HALF = dtypes.float16


def test_no_more_matrix_instructions_than_the_products_have() -> None:
  M, N, D, block_n = 256, 256, 64, 128
  with on("sm_80"), emulator.profile() as small:
    run_tiles(*inputs(1, 1, 1, M, N, D, D), cuda_forward.Tiles(4, 2, block_n))
  assert small.kernels["attention_1_1_256_256_64_64"].matrix == 2 * M * N * D // (16 * 8 * 16)
  with on("sm_90"), emulator.profile() as large:  # a warp's share of a product is one: 16 rows, 16 along k, all columns
    run_tiles(*inputs(1, 1, 1, M, N, D, D), hopper_forward.Tiles(2, block_n))
  assert large.kernels["attention_1_1_256_256_64_64"].matrix == M // 16 * (N // block_n) * (D // 16 + block_n // 16)


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
    ("sm_90", 64, 264, "hopper_wide_forward"),
    ("sm_90", 64, 260, "cuda_wide_forward"),
    ("sm_90", 64, 520, "cuda_wide_forward"),
    ("sm_80", 576, 512, "cuda_wide_forward"),
    ("sm_100", 64, 64, "cuda_forward"),
  ],
)
def test_which_kernel_serves(arch: str, Dk: int, Dv: int, kernel: str) -> None:
  launch = dispatch(AttentionSpec(1, 1, 1, 100, 100, Dk, Dv, HALF, 0.125), Target("CUDA", arch))
  assert launch.schedule.name == kernel


@pytest.mark.parametrize(
  ("Hkv", "N", "kernel"),
  [(1, 32768, "cuda_wide_forward"), (1, 2000, "cuda_forward"), (8, 32768, "cuda_forward")],
)
def test_which_kernel_serves_few_queries(Hkv: int, N: int, kernel: str) -> None:
  launch = dispatch(AttentionSpec(1, 8, Hkv, 1, N, 128, 128, HALF, 0.125), Target("CUDA", "sm_90"))
  assert launch.schedule.name == kernel


def test_why_no_kernel_serves() -> None:
  with pytest.raises(NoKernel) as old:
    dispatch(replace(SPEC, Dk=256, Dv=256, dtype=dtypes.bfloat16), Target("CUDA", "sm_75"))
  reason = "cuda_forward: sm_75 has no mma.sync for bfloat16 that this kernel uses; sm_80 and newer have it"
  assert old.value.reasons == (reason,)
  with pytest.raises(NoKernel) as large:
    dispatch(AttentionSpec(1, 1, 1, 100, 100, 64, 4000, HALF, 0.125), Target("CUDA", "sm_90"))
  assert "cuda_wide_forward: head sizes 64 and 4000: the smallest tile needs 10" in str(large.value)


@pytest.mark.parametrize("arch", ARCHES)
def test_target(arch: str) -> None:
  with on(arch):
    assert target_of(Device.DEFAULT) == Target("CUDA", arch)


@pytest.mark.parametrize(
  ("kernel", "arguments", "message"),
  [
    (cuda_forward, (4, 1, 24), r"Tiles\.block_n=24: must be a multiple of 16"),
    (cuda_forward, (4, 1, 0), r"Tiles\.block_n=0: must be a multiple of 16"),
    (cuda_forward, (4, 0, 32), r"Tiles\.m_tiles=0: must be at least 1"),
    (cuda_forward, (33, 1, 32), r"Tiles\.warps=33: must be in 1\.\.32"),
    (cuda_forward, (4, 1, 32, 1), r"Tiles\.stages=1: must be at least 2"),
    (cuda_forward, (4, 1, 32, 2, 8), r"Tiles\.in_registers=True: must be False for float32, but in tf32"),
    (hopper_forward, (2, 24), r"Tiles\.block_n=24: must be a multiple of 16 in 16\.\.256"),
    (hopper_forward, (2, 272), r"Tiles\.block_n=272: must be a multiple of 16 in 16\.\.256"),
    (hopper_forward, (0, 64), r"Tiles\.warpgroups=0: must be in 1\.\.8"),
    (hopper_forward, (9, 64), r"Tiles\.warpgroups=9: must be in 1\.\.8"),
    (hopper_forward, (2, 64, 1), r"Tiles\.stages=1: must be at least 2"),
    (hopper_forward, (4, 64, 2, True), r"Tiles\.warpgroups=4: must be 1 to 3 with a producer"),
    (hopper_forward, (2, 64, 2, False, True), r"Tiles\.persistent=True: needs producer=True"),
    (hopper_forward, (2, 64, 2, True, False, 2), r"Tiles\.q_stages=2: must be 1, or more if persistent"),
    (hopper_forward, (2, 64, 2, False, False, 1, 16, True), r"Tiles\.in_registers=True: needs producer=True"),
    (hopper_forward, (2, 64, 2, False, False, 1, 16, False, True), r"Tiles\.tma_store=True: needs producer=True"),
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


def sizes_of(cell: str) -> set[int]:
  """The head sizes, in multiples of 8, that a cell such as "up to 320, 344-352, 384" names."""
  found = set[int]()
  for sizes in "" if cell == "none" else cell.split(", "):
    ends = [int(x) for x in sizes.replace("up to ", "8-").split("-")]
    found |= set(range(ends[0], ends[-1] + 1, 8))
  return found


def of_cuda(spec: AttentionSpec, target: Target, of: str) -> bool:
  """Whether matrix units serve it, for gradients without P and dS in memory."""
  try:
    launches = (dispatch(spec, target),) if of == "forward" else dispatch_backward(spec, target)
  except NoKernel:
    return False
  others = "cuda_wide_backward", "generic_wide_backward", "generic_forward"
  return all(x.schedule.name not in others for x in launches)


def test_the_readme_names_the_head_sizes() -> None:
  lines = Path(__file__).parents[2].joinpath("kernels/README.md").read_text().splitlines()
  start = next(i for i, line in enumerate(lines) if line.startswith("| head sizes | sm_75"))
  header, _, *rows = ([x.strip() for x in line.strip("|").split("|")] for line in lines[start : start + 6])
  for row, *cells in rows:
    of, bits = row.split(", ")
    dtype = dtypes.float32 if bits == "float32" else HALF
    for arches, cell in zip(header[1:], cells, strict=True):
      named = sizes_of(cell)
      beside = {x for size in named for x in (size - 8, size + 8)} - named  # gaps and the end
      edges = {x for x in named if {x - 8, x + 8} - named}
      for D in {*beside, *edges, 8 * (not named)} - {0}:
        spec = AttentionSpec(1, 8, 8, 1024, 1024, D, D, dtype, 0.1)
        for arch in arches.split(", "):
          assert of_cuda(spec, Target("CUDA", arch), of) == (D in named), (row, arch, D)


T = cuda_forward.Tiles


@pytest.mark.parametrize(
  ("arch", "heads", "length", "options", "tiles"),
  [
    ("sm_80", 8, 4096, {}, T(8, 2, 64, in_registers=False)),
    ("sm_80", 8, 4095, {}, T(4, 2, 48, in_registers=False)),  # the last tile needs a mask
    ("sm_80", 8, 4096, {"masks": (Window(None, 0),)}, T(4, 2, 48, in_registers=False)),
    ("sm_80", 1, 4096, {}, T(4, 2, 48, in_registers=False)),  # too few workgroups of 8 warps for all multiprocessors
    ("sm_80", 8, 4096, {"features": ("softcap",)}, T(4, 1, 64)),
    ("sm_86", 8, 4096, {}, T(8, 2, 32, in_registers=False)),
    ("sm_86", 1, 4096, {}, T(4, 1, 32)),
    ("sm_100", 8, 512, {}, T(4, 2, 64, in_registers=False)),  # two workgroups at once
    ("sm_120", 8, 60, {}, T(4, 1, 32, 3)),
  ],
)
def test_tiles_at_head_size_128(arch: str, heads: int, length: int, options: dict, tiles: cuda_forward.Tiles) -> None:
  """As many queries per warp, and keys per tile, as registers and shared memory allow with 8 warps busy."""
  problem = problem_of(heads, length, length, 128, 128, HALF, **options)
  assert next(cuda.forward(problem, Target("CUDA", arch))) == tiles


def test_no_tiles() -> None:
  with pytest.raises(ValueError, match=r"sm_89.*sm_90"):
    next(hopper.forward(SPEC, Target("CUDA", "sm_89")))
  for size in (60, 264):
    spec = AttentionSpec(1, 1, 1, 100, 100, 64, size, HALF, 0.125)
    with pytest.raises(ValueError, match=rf"head sizes 64 and {size}.* multiples of 8.*256"):
      next(hopper.forward(spec, Target("CUDA", "sm_90")))
  with pytest.raises(ValueError, match=r"the smallest tile needs \d+ registers .* of shared memory, of 65536"):
    next(cuda.forward(problem_of(1, 64, 64, 4000, 64, HALF), Target("CUDA", "sm_75")))


def test_without_its_permutation_shared_memory_has_conflicts() -> None:
  with on("sm_80"), NO_PERMUTATION.made():
    sources = inputs(1, 1, 1, 64, 64, 64, 64)
    check_attention(*sources)  # ldmatrix takes any address
    assert counts(*sources).bank_conflicts > 0
  with on("sm_90"), NO_PERMUTATION.made():
    sources = inputs(1, 1, 1, 64, 64, 64, 64)
    out = run_tiles(*sources, hopper_forward.Tiles(1, 64))
    with pytest.raises(AssertionError, match="worst at"):
      check(*sources, out)  # wgmma permutes by itself
