"""`cuda_wide_forward` where V is the first columns of K, its tiles, and what it does not serve."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers import check, inputs, on, problem_of
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn import attention, attention_paged
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.cuda_wide_forward import Tiles
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.plan.launch import Launch
from uopattn.plan.tiles import cuda
from uopattn.spec.layout import starts_as
from uopattn.spec.spec import AttentionSpec

HALF = dtypes.float16


def latent(heads: int, M: int = 1, N: int = 8192, Dk: int = 576, Dv: int = 512, dtype: DType = HALF) -> AttentionSpec:
  return AttentionSpec(1, heads, 1, M, N, Dk, Dv, dtype, Dk**-0.5, values_in_keys=True, tf32=True)


@pytest.mark.parametrize(
  ("arch", "sizes", "dtype"),
  [
    ("sm_90", (1, 4, 1, 2, 150, 96, 72), HALF),
    pytest.param("sm_90", (1, 16, 1, 1, 600, 576, 512), HALF, marks=pytest.mark.slowest),  # as sm_86
    pytest.param("sm_86", (2, 20, 1, 2, 100, 576, 512), dtypes.bfloat16, marks=pytest.mark.slow),
    pytest.param("sm_89", (1, 4, 1, 2, 150, 96, 64), dtypes.fp8e4m3, marks=pytest.mark.slow),
  ],
)
def test_values_in_keys_are_read_once(arch: str, sizes: tuple[int, ...], dtype: DType) -> None:
  B, Hq, Hkv, M, N, Dk, Dv = sizes
  with on(arch):
    q, k, _ = inputs(B, Hq, Hkv, M, N, Dk, 1, dtype)
    loads = []
    for v in (k[..., :Dv], k[..., :Dv].contiguous().realize()):
      with emulator.profile() as profile:
        out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel")
        Tensor.realize(out, lse)
      check(q, k, v.contiguous(), out, lse)
      loads.append(sum(x.global_read for name, x in profile.kernels.items() if "combine" not in name))
  assert loads[1] - loads[0] >= B * N * Dv * dtype.itemsize


def test_paged_values_in_keys() -> None:
  with on("sm_90"):
    q, k, _ = inputs(2, 4, 1, 1, 64, 80, 1)
    pages = k.reshape(8, 1, 16, 80)
    table = Tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=dtypes.int).realize()
    lengths = Tensor([40, 64], dtype=dtypes.int).realize()
    out = attention_paged(q, pages, pages[..., :64], table, lengths, enable_gqa=True, backend="kernel").realize()
    check(q, k, k[..., :64].contiguous(), out, kv_lengths=lengths.numpy())


VIEWS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], bool]] = {
  "first columns": (lambda x: (x, x[..., :8]), True),
  "all columns": (lambda x: (x, x), True),
  "of a part": (lambda x: (x[:, :, 2:], x[:, :, 2:, :8]), True),
  "transposed": (lambda x: (x.transpose(1, 2), x.transpose(1, 2)[..., :8]), True),
  "last columns": (lambda x: (x, x[..., 8:]), False),
  "other rows": (lambda x: (x[:, :, :3], x[:, :, 1:, :8]), False),
  "a copy": (lambda x: (x, x[..., :8].contiguous()), False),
  "more columns": (lambda x: (x[..., :8], x), False),
  "one column, repeated": (lambda x: (x, x[..., :1].expand(*x.shape[:3], 8)), False),
  "every second column": (lambda x: (x, x.reshape(1, 2, 4, 8, 2)[..., 0]), False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_which_views_are_values_in_keys(view: str) -> None:
  of, expected = VIEWS[view]
  assert starts_as(*of(Tensor.empty(1, 2, 4, 16))) is expected


def test_values_elsewhere_are_refused() -> None:
  spec = AttentionSpec(1, 1, 1, 16, 64, 576, 512, HALF, 1.0)
  launch = dispatch(spec, Target("CUDA", "sm_90"))
  tiles = Tiles(1, 4, 1, 64, 2, values_in_keys=True)
  with pytest.raises(ValueError, match=r"Tiles\.values_in_keys=True: v must be the first columns of k"):
    Launch(launch.schedule, launch.kernel, spec, tiles).graph()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((1, 1, 1, 16), r"Tiles\.slices=1: must be at least 2"),
    ((1, 2, 1, 48), r"Tiles\.block_n=48: must be a multiple of 32 with 2 slices"),
    ((1, 2, 0, 32), r"Tiles\.m_tiles=0: must be at least 1"),
    ((9, 4, 1, 64), r"Tiles\.groups=9: must be in 1\.\.8 with 4 slices"),
    ((1, 2, 1, 32, 0), r"Tiles\.stages=0: must be at least 1"),
    ((1, 2, 1, 32, 1, 16, False, True), r"Tiles\.stages=1: must be at least 2"),
    ((1, 2, 1, 32, 1, 12), r"Tiles\.step=12: must be one of 8, 16, 32"),
  ],
)
def test_tiles_state_their_laws(arguments: tuple[int, ...], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    Tiles(*arguments)


@pytest.mark.parametrize(
  ("arch", "spec", "tiles"),
  [
    ("sm_90", latent(16), Tiles(1, 4, 1, 64, 2, values_in_keys=True)),
    ("sm_90", latent(128), Tiles(2, 4, 2, 64, 2, values_in_keys=True)),
    ("sm_80", latent(16), Tiles(1, 2, 1, 32, 3, values_in_keys=True)),
    ("sm_86", latent(16), Tiles(1, 2, 1, 32, 2, values_in_keys=True)),
    ("sm_90", problem_of(32, 4096, 4096, 512, 512, HALF), Tiles(2, 4, 2, 64)),
    ("sm_80", problem_of(32, 4096, 4096, 512, 512, HALF), Tiles(4, 2, 1, 32)),
    ("sm_86", problem_of(32, 4096, 4096, 512, 512, HALF), Tiles(2, 2, 1, 32)),
    ("sm_75", problem_of(32, 4096, 4096, 320, 320, HALF), Tiles(1, 2, 1, 32, turing=True)),
    ("sm_90", problem_of(32, 4096, 4096, 576, 512, dtypes.fp8e4m3), Tiles(2, 4, 2, 128, step=32)),
    ("sm_80", replace(problem_of(32, 4096, 4096, 512, 512, dtypes.float32), tf32=True), Tiles(1, 2, 1, 32, step=8)),
  ],
)
def test_chosen_tiles(arch: str, spec: Problem, tiles: Tiles) -> None:
  seen = spec.packed(spec.group) if spec.is_decode else spec
  found = list(cuda.wide_forward(seen, Target("CUDA", arch)))
  assert found[0] == tiles
  assert all(x.shared_bytes(spec.Dk, spec.Dv) <= lds_limit(arch) for x in found)


def test_too_large() -> None:
  with pytest.raises(NoKernel, match=r"head sizes 576 and 576: .* needs \d+ registers.* bytes of shared"):
    dispatch(AttentionSpec(1, 1, 1, 100, 100, 576, 576, HALF, 0.125), Target("CUDA", "sm_75"))


def test_float32_is_multiplied_in_tf32_alone() -> None:
  with pytest.raises(ValueError, match="float32 with head sizes 512 and 512: supported in tf32 only; set ALLOW_TF32=1"):
    next(cuda.wide_forward(problem_of(32, 4096, 4096, 512, 512, dtypes.float32), Target("CUDA", "sm_80")))
