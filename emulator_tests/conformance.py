"""The forward kernels under test: where each runs, with which tiles, its corner cases, barriers and mistakes.

`kernels/test_forward.py` and `kernels/test_forward_features.py` write each check once, for all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mistakes
import pytest
from helpers import inputs, on, qkv, served_by, take_tiles
from hypothesis import strategies as st
from mistakes import Mistake
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.schedule import DTYPES_8, DTYPES_16, DTYPES_16_32
from uopattn.kernels import (
  amd_forward,
  amx_forward,
  apple_forward,
  cpu_decode,
  cpu_forward,
  cuda_forward,
  cuda_wide_forward,
  generic_forward,
  hopper_float32_forward,
  hopper_forward,
  hopper_wide_forward,
)
from uopattn.proof.gate import verify

Options = dict[str, Any]
Sizes = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv
CPU = "CPU"

# Corner cases of the kernels on GPUs; small tiles are of 32 or 64 queries and 16 or 32 keys.
CORNERS: dict[str, Sizes] = {
  "one query": (2, 2, 2, 1, 150, 32, 32),
  "one key": (1, 2, 2, 70, 1, 16, 16),
  "round": (1, 1, 1, 128, 128, 32, 32),
  "grouped": (2, 4, 2, 50, 90, 24, 40),
}
ODD: dict[str, Sizes] = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
}
CPU_CORNERS: dict[str, Sizes] = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "one query": (2, 4, 4, 1, 300, 64, 64),
  "one key": (1, 2, 2, 70, 1, 16, 16),
  "round": (1, 2, 2, 128, 128, 64, 64),
  "odd everywhere": (2, 3, 3, 77, 131, 33, 17),
  "one past the tiles": (1, 2, 2, 65, 65, 65, 65),
  "one before the tiles": (1, 2, 2, 63, 63, 63, 63),
  "more queries than keys": (1, 2, 2, 200, 20, 32, 32),
  "grouped": (2, 6, 2, 50, 90, 24, 40),
  "one key head for all": (1, 5, 1, 33, 40, 8, 8),
  "head of 80": (1, 4, 2, 40, 100, 80, 80),
  "head of 128": (1, 2, 2, 50, 70, 128, 128),
  "large head": (1, 1, 1, 40, 70, 300, 260),
  "rows past two blocks": (1, 3, 3, 144, 144, 64, 64),
}
DECODE_CORNERS: dict[str, Sizes] = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "grouped": (1, 8, 2, 1, 300, 64, 64),
  "one key head for all": (2, 7, 1, 1, 130, 32, 32),
  "a few queries": (1, 4, 4, 3, 200, 48, 80),
  "rows of two blocks": (1, 14, 2, 3, 129, 16, 16),
  "the most queries": (1, 4, 2, 16, 130, 24, 40),
  "odd everywhere": (2, 6, 3, 3, 77, 33, 17),
  "fewer keys than lanes": (1, 2, 2, 2, 3, 16, 16),
  "fewer columns than lanes": (1, 2, 2, 2, 70, 3, 2),
  "large head": (1, 2, 1, 2, 70, 300, 260),
}


@dataclass(frozen=True, eq=False)
class Subject:
  """A forward kernel under test, with what its checks need to know.

  Attributes:
    kernel: its module.
    arches: where it runs: emulated architectures, or the CPU at hand.
    dtypes: of q, k, v and the output.
    shapes: corner cases.
    mistakes: that a check must catch.
    small: small tiles for an architecture, which take the least time to lower; None where tiles do not matter for that.
    any_tiles: draws tiles for an architecture and (Dk, Dv).
    head_dims: that drawn shapes have.
    most_queries: that drawn shapes have.
    conflict_free: (Dk, Dv) for which bank conflicts are counted.
    flops: multiply-adds of a matrix instruction, M N K; None where their number is not just that of the products.
    products: of the matrix unit's of this size that make one of the kernel's, on an architecture.
    work: the counter of the emulator by which tiles that are skipped show.
    synchronised: tiles of kernels whose barriers and waits are deleted.
    mistaken: the shape in which mistakes show.
    multiprocessors: that it takes a GPU to have where tiles are given, so that few jobs suffice for several each.
  """

  kernel: Any
  arches: tuple[str, ...]
  dtypes: tuple[DType, ...]
  shapes: Mapping[str, Sizes]
  mistakes: Mapping[str, Mistake]
  small: Callable[[str], Any] | None = None
  any_tiles: Callable[[str], st.SearchStrategy[Any]] | None = None
  head_dims: Sequence[int] = (1, 8, 15, 24, 40, 64)
  most_queries: int = 150
  conflict_free: Sequence[tuple[int, int]] = ((64, 64), (128, 128))
  flops: int | None = None
  products: Callable[[str], float] = lambda arch: 1
  work: str = "matrix"
  synchronised: Callable[[str], Sequence[Any]] = lambda arch: ()
  mistaken: Sizes = (1, 1, 1, 50, 150, 16, 16)
  multiprocessors: int | None = None

  @property
  def name(self) -> str:
    return str(self.kernel.SCHEDULE.name)

  @contextmanager
  def on(self, arch: str, tiles: Any = None, chosen: bool = False) -> Iterator[None]:
    """`attention` takes this kernel on this machine, with small tiles, or those given, or those that it chooses."""
    with ExitStack() as stack:
      enter = stack.enter_context
      if arch != CPU:
        enter(on(arch))
      enter(served_by(self.name))
      if tiles is None and self.small is not None and not chosen:
        tiles = self.small(arch)
      if tiles is not None:
        if self.multiprocessors is not None:
          tiles = replace(tiles, multiprocessors=self.multiprocessors)
        take_tiles(enter(pytest.MonkeyPatch.context()), tiles)
      yield

  def inputs(self, arch: str, sizes: Sizes, dtype: DType, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal random q, k and v on this machine."""
    return (qkv if arch == CPU else inputs)(*sizes, dtype, seed)

  def check(self, q: Tensor, k: Tensor, v: Tensor, given: Options | None = None, **options: Any) -> None:
    """Runs `attention` and fails unless output and LSE pass the gate.

    Args:
      given: the arguments in the form in which `attention` takes them; by default as the oracle does.
      options: the arguments as the oracle takes them.
    """
    passed = options if given is None else given
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **passed)
    Tensor.realize(out, lse)
    self.verify(q, k, v, out, lse, **options)

  def verify(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None, **options: Any) -> None:
    """Fails unless the output, and the LSE if given, pass the gate."""
    cut = self.kernel.SCHEDULE.cuts and q.dtype in DTYPES_8
    for report in verify(q, k, v, out, lse, cut=cut, **options):
      assert report.correct, f"worst at {report.worst}: {report}"


def amd_tiles(arch: str) -> st.SearchStrategy[amd_forward.Tiles]:
  return st.builds(
    amd_forward.Tiles,
    st.just(arch),
    waves=st.integers(1, 5),
    m_tiles=st.integers(1, 3),
    block_n=st.sampled_from((32, 64, 96)),
  )


def amd32_tiles(arch: str) -> st.SearchStrategy[amd_forward.Tiles]:
  """Tiles of few instructions: in float32 a product takes up to six of them."""
  sizes = st.integers(1, 3), st.integers(1, 2), st.sampled_from((32, 64))
  return st.builds(lambda *sizes: amd_forward.Tiles(arch, *sizes, bits=32), *sizes)


def amd8_tiles(arch: str) -> st.SearchStrategy[amd_forward.Tiles]:
  least = amd_forward.Tiles.least(Fragments.of(arch, 8))
  blocks = st.integers(1, 2).map(lambda n: n * least)
  return amd_tiles(arch).flatmap(lambda x: blocks.map(lambda n: replace(x, block_n=n, bits=8)))


def cuda_tiles(step: int = 16, turing: bool = False) -> Callable[[str], st.SearchStrategy[cuda_forward.Tiles]]:
  least = max(step, 16)
  tiles = st.builds(
    cuda_forward.Tiles,
    warps=st.integers(1, 5),
    m_tiles=st.integers(1, 2),
    block_n=st.integers(1, 3).map(lambda n: n * least),
    stages=st.integers(2, 4),
    step=st.just(step),
    turing=st.just(turing),
    in_registers=st.booleans() if step > 8 else st.just(False),
  )
  return lambda arch: tiles


def wide_tiles(arch: str) -> st.SearchStrategy[cuda_wide_forward.Tiles]:
  return st.builds(
    lambda groups, slices, m_tiles, block_n, stages: W(groups, slices, m_tiles, 16 * slices * block_n, stages),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
  )


def hopper_tiles(arch: str) -> st.SearchStrategy[hopper_forward.Tiles]:
  return st.builds(
    lambda warpgroups, block_n, stages, form: hopper_forward.Tiles(warpgroups, 16 * block_n, stages, *form),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(2, 4),
    st.sampled_from(
      (
        *((), (True,), (True, True), (True, True, 2), (True, False, 1, 16, True), (True, True, 2, 16, True)),
        *((True, False, 1, 16, False, True), (True, True, 1, 16, True, True)),  # O stored by TMA
      )
    ),
  )


def hopper8_tiles(arch: str) -> st.SearchStrategy[hopper_forward.Tiles]:
  return st.builds(
    lambda warpgroups, block_n, stages, form, tma_store: hopper_forward.Tiles(
      warpgroups, 32 * block_n, stages, True, *form, step=32, tma_store=tma_store
    ),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(2, 4),
    st.sampled_from(((), (True,), (True, 2))),
    st.booleans(),
  )


def hopper32_tiles(arch: str) -> st.SearchStrategy[hopper_float32_forward.Tiles]:
  return st.builds(
    lambda warpgroups, block_n, stages: hopper_float32_forward.Tiles(warpgroups, 16 * block_n, stages),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
  )


def hopper_wide_tiles(arch: str) -> st.SearchStrategy[hopper_wide_forward.Tiles]:
  return st.builds(
    lambda block_n, stages: hopper_wide_forward.Tiles(32 * block_n, stages), st.integers(1, 4), st.integers(1, 3)
  )


def amx_tiles(arch: str) -> st.SearchStrategy[amx_forward.Tiles]:
  blocks = st.integers(1, 3).map(lambda n: 32 * n)
  return st.builds(amx_forward.Tiles, blocks, blocks, st.just(2), st.integers(1, 2))


def cpu_tiles(arch: str) -> st.SearchStrategy[cpu_forward.Tiles]:
  return st.builds(cpu_forward.Tiles, st.integers(2, 70), st.integers(1, 140), st.integers(1, 9), st.just(2))


def decode_tiles(arch: str) -> st.SearchStrategy[cpu_decode.Tiles]:
  return st.builds(
    lambda unroll_m, strips, *rest: cpu_decode.Tiles(unroll_m * strips, rest[0], unroll_m, *rest[1:], 2),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 140),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from((4, 8, 16)),
  )


def apple_tiles(arch: str) -> st.SearchStrategy[apple_forward.Tiles]:
  return st.builds(
    apple_forward.Tiles,
    blocks=st.integers(1, 5),
    m_tiles=st.integers(1, 3),
    block_n=st.integers(1, 4).map(lambda n: n * 8),
    slices=st.integers(1, 3),
    in_registers=st.booleans(),
  )


def generic_tiles(arch: str) -> st.SearchStrategy[generic_forward.Tiles]:
  return st.builds(
    lambda rows, lines, across, block_n, in_local: generic_forward.Tiles(
      rows * lines, 8 * across * block_n, rows, across, in_local
    ),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 2),
    st.booleans(),
  )


T, W, H = cuda_forward.Tiles, cuda_wide_forward.Tiles, hopper_forward.Tiles
READING = ("sm_80", "sm_100")  # where the small tiles of mma.sync read their queries for each tile of keys
SUBJECTS: dict[str, Subject] = {
  "amd": Subject(
    amd_forward,
    ("gfx942", "gfx1201", "gfx1100", "gfx950"),  # one of each instruction, that which lowers fastest first
    DTYPES_16,
    CORNERS
    | ODD
    | {
      "one past the tiles": (1, 1, 1, 65, 65, 33, 33),
      "rows past two tiles a wave": (1, 1, 1, 144, 100, 16, 16),
      "large head": (1, 1, 1, 20, 40, 150, 260),
    },
    mistakes.AMD,
    small=lambda arch: amd_forward.Tiles(arch, 2, 1, amd_forward.Tiles.least(Fragments.of(arch))),
    any_tiles=amd_tiles,
    head_dims=(1, 8, 15, 24, 33, 40, 80),
    conflict_free=((64, 64), (33, 48)),
    synchronised=lambda arch: (amd_forward.Tiles(arch, 4, 1, 32),),
  ),
  "amd32": Subject(
    amd_forward,
    ("gfx942", "gfx1201", "gfx1100", "gfx950"),
    (dtypes.float32,),
    CORNERS | ODD | {"one past the tiles": (1, 1, 1, 65, 65, 33, 33)},
    mistakes.AMD32,
    small=lambda arch: amd_forward.Tiles(arch, 2, 1, 16, 32),
    any_tiles=amd32_tiles,
    head_dims=(1, 8, 15, 24, 33, 40),
    conflict_free=((64, 64), (33, 48)),
    flops=16 * 16 * 4,
    products=lambda arch: 1 if arch.startswith("gfx9") else 6 / 4,  # six of parts, each with four times the k
    synchronised=lambda arch: (amd_forward.Tiles(arch, 4, 1, 32, 32),),
  ),
  "amd8": Subject(
    amd_forward,
    ("gfx950", "gfx1201", "gfx942"),  # gfx942 converts what it reads
    DTYPES_8,
    CORNERS
    | ODD
    | {
      "rows of two words": (1, 1, 1, 40, 140, 72, 24),
      "steps together": (1, 1, 1, 70, 140, 128, 48),
      "large head": (1, 1, 1, 20, 40, 150, 190),
    },
    mistakes.AMD8,
    small=lambda arch: amd_forward.Tiles(arch, 2, 1, amd_forward.Tiles.least(Fragments.of(arch, 8)), 8),
    any_tiles=amd8_tiles,
    head_dims=(1, 8, 15, 24, 33, 40, 80, 128),
    conflict_free=((64, 64), (33, 48), (128, 128)),
    synchronised=lambda arch: (amd_forward.Tiles(arch, 8, 1, 64, 8),) if arch == "gfx1201" else (),
    mistaken=(1, 1, 1, 50, 150, 32, 16),
  ),
  "cuda": Subject(
    cuda_forward,
    ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
    DTYPES_16,
    CORNERS
    | ODD
    | {
      "smallest of whole chunks": (1, 1, 1, 1, 1, 8, 8),
      "one past the tiles": (1, 1, 1, 65, 65, 40, 40),
      "large head": (1, 1, 1, 20, 40, 256, 256),
      "large head of the values": (1, 1, 1, 70, 40, 64, 200),
      "larger than Hopper's products": (1, 1, 1, 64, 20, 160, 264),
    },
    mistakes.CUDA,
    small=lambda arch: T(2, 1, 16, in_registers=arch not in READING),
    any_tiles=cuda_tiles(),
    flops=16 * 8 * 16,
    synchronised=lambda arch: (T(4, 1, 32), T(2, 1, 16, 3, in_registers=False)),
  ),
  "wide": Subject(
    cuda_wide_forward,
    ("sm_80", "sm_90"),
    DTYPES_16,
    {
      "one query": (1, 1, 1, 1, 70, 272, 272),
      "grouped": (1, 4, 2, 50, 70, 24, 320),
      "odd everywhere": (1, 1, 1, 37, 67, 75, 259),
      "latent": (1, 2, 1, 3, 70, 576, 512),
    },
    mistakes.WIDE,
    small=lambda arch: W(1, 2, 1, 32, 2 if arch == "sm_80" else 1),
    any_tiles=wide_tiles,
    head_dims=(8, 40, 64, 136, 272),
    most_queries=70,
    conflict_free=((64, 128),),
    synchronised=lambda arch: (W(2, 2, 1, 32, 1 if arch == "sm_80" else 2),),
    mistaken=(1, 1, 1, 50, 150, 16, 80),
  ),
  "hopper": Subject(
    hopper_forward,
    ("sm_90",),
    DTYPES_16,
    CORNERS
    | {
      "smallest of whole chunks": (1, 1, 1, 1, 1, 8, 8),
      "odd lengths": (1, 2, 2, 77, 131, 40, 24),
      "one past the tiles": (1, 1, 1, 129, 129, 72, 72),
      "large head": (1, 1, 1, 20, 40, 256, 256),
      "large head of the values": (1, 1, 1, 70, 40, 64, 200),
    },
    mistakes.HOPPER,
    small=lambda arch: H(1, 16),
    any_tiles=hopper_tiles,
    head_dims=(8, 24, 40, 64, 72),
    most_queries=300,
    synchronised=lambda arch: (H(1, 32), H(2, 16, 3), H(2, 16, 2, True), H(2, 16, 2, True, in_registers=True)),
    multiprocessors=2,
  ),
  "hopper8": Subject(
    hopper_forward,
    ("sm_90",),
    DTYPES_8,
    {
      "one query": (2, 2, 2, 1, 150, 32, 32),
      "one key": (1, 2, 2, 70, 1, 16, 16),
      "odd lengths": (1, 2, 2, 77, 131, 48, 16),
      "grouped": (2, 4, 2, 50, 90, 16, 48),
      "head of 128": (1, 1, 1, 130, 260, 128, 128),
    },
    mistakes.HOPPER8,
    small=lambda arch: H(1, 32, producer=True, step=32),
    any_tiles=hopper8_tiles,
    head_dims=(16, 32, 48, 80),
    most_queries=300,
    synchronised=lambda arch: (H(1, 32, 2, True, step=32),),
    mistaken=(1, 1, 1, 50, 150, 32, 16),
    multiprocessors=2,
  ),
  "hopper32": Subject(
    hopper_float32_forward,
    ("sm_90",),
    (dtypes.float32,),
    {
      "smallest": (1, 1, 1, 1, 1, 1, 1),
      "one query": (2, 2, 2, 1, 150, 32, 32),
      "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
      "grouped": (2, 4, 2, 50, 90, 24, 40),
      "head of 128": (1, 1, 1, 130, 140, 128, 128),
      "large head of the values": (1, 1, 1, 70, 40, 64, 100),
    },
    mistakes.HOPPER32,
    small=lambda arch: hopper_float32_forward.Tiles(1, 16, 2),
    any_tiles=hopper32_tiles,
    head_dims=(1, 8, 15, 40),
    most_queries=200,
    synchronised=lambda arch: (hopper_float32_forward.Tiles(2, 16), hopper_float32_forward.Tiles(1, 32, 2)),
  ),
  "hopper-wide": Subject(
    hopper_wide_forward,
    ("sm_90",),
    DTYPES_16,
    {
      "one query": (1, 1, 1, 1, 70, 272, 272),
      "grouped": (1, 4, 2, 50, 70, 24, 320),
      "odd lengths": (1, 2, 2, 77, 131, 40, 264),
      "latent": (1, 2, 1, 3, 70, 576, 512),
    },
    mistakes.HOPPER_WIDE,
    small=lambda arch: hopper_wide_forward.Tiles(32, 2),
    any_tiles=hopper_wide_tiles,
    head_dims=(8, 40, 64, 136, 272),
    synchronised=lambda arch: (hopper_wide_forward.Tiles(64), hopper_wide_forward.Tiles(32, 2)),
    mistaken=(1, 1, 1, 50, 150, 16, 80),
  ),
  "float8": Subject(
    cuda_forward,
    ("sm_89", "sm_90", "sm_120"),
    DTYPES_8,
    CORNERS
    | ODD
    | {
      "smallest of whole chunks": (1, 1, 1, 1, 1, 16, 16),
      "chunks that are half a step": (1, 2, 2, 77, 131, 48, 80),
      "one past the tiles": (1, 1, 1, 65, 65, 96, 72),
      "large head": (1, 1, 1, 20, 40, 256, 256),
    },
    mistakes.FLOAT8,
    small=lambda arch: T(2, 1, 32, step=32),
    any_tiles=cuda_tiles(32),
    head_dims=(1, 8, 15, 32, 48, 64),
    conflict_free=((32, 32), (64, 64), (128, 128)),
    flops=16 * 8 * 32,
    synchronised=lambda arch: (T(4, 1, 32, step=32), T(2, 2, 32, 3, step=32)),
    mistaken=(1, 1, 1, 50, 150, 32, 16),
  ),
  "float32": Subject(
    cuda_forward,
    ("sm_80", "sm_90"),
    (dtypes.float32,),
    CORNERS | ODD | {"one past the tiles": (1, 1, 1, 65, 65, 40, 40), "large head": (1, 1, 1, 20, 40, 192, 192)},
    mistakes.FLOAT32,
    small=lambda arch: T(2, 1, 16, step=8, in_registers=False),
    any_tiles=cuda_tiles(8),
    head_dims=(1, 8, 15, 40),
    flops=16 * 8 * 8,
    products=lambda arch: 3,
    synchronised=lambda arch: (T(4, 1, 32, step=8, in_registers=False),),
  ),
  "turing": Subject(
    cuda_forward,
    ("sm_75",),
    (dtypes.float16,),
    CORNERS | ODD | {"one past the tiles": (1, 1, 1, 65, 65, 40, 40), "large head": (1, 1, 1, 20, 40, 256, 256)},
    mistakes.TURING,
    small=lambda arch: T(2, 1, 16, turing=True),
    any_tiles=cuda_tiles(turing=True),
    head_dims=(7, 8, 24, 32),
    conflict_free=((64, 64),),
    flops=16 * 8 * 8,
    synchronised=lambda arch: (T(4, 1, 32, turing=True),),
  ),
  "apple": Subject(
    apple_forward,
    ("apple9",),
    DTYPES_16,
    CORNERS
    | ODD
    | {
      "one past the tiles": (1, 1, 1, 65, 65, 33, 33),
      "rows past two tiles a simdgroup": (1, 1, 1, 144, 100, 16, 16),
      "large head": (1, 1, 1, 20, 40, 150, 260),
    },
    mistakes.APPLE,
    small=lambda arch: apple_forward.Tiles(2, 1, 16),
    any_tiles=apple_tiles,
    head_dims=(1, 8, 15, 24, 33, 40, 80),
    flops=8 * 8 * 8,
    synchronised=lambda arch: (apple_forward.Tiles(4, 1, 16), apple_forward.Tiles(1, 2, 8, 2, in_registers=False)),
  ),
  "apple32": Subject(
    apple_forward,
    ("apple9",),
    (dtypes.float32,),
    CORNERS | ODD | {"one past the tiles": (1, 1, 1, 65, 65, 33, 33)},
    mistakes.APPLE,
    small=lambda arch: apple_forward.Tiles(2, 1, 16),
    any_tiles=apple_tiles,
    head_dims=(1, 8, 15, 24, 33, 40),
    conflict_free=(),
    flops=8 * 8 * 8,
  ),
  "generic": Subject(
    generic_forward,
    ("cl",),
    DTYPES_16_32,
    CORNERS
    | ODD
    | {
      "one past the tiles": (1, 1, 1, 65, 65, 33, 33),
      "large head": (1, 1, 1, 20, 40, 60, 100),
    },
    mistakes.GENERIC,
    small=lambda arch: generic_forward.Tiles(32, 16, 2, 4),
    any_tiles=generic_tiles,
    head_dims=(1, 8, 15, 24, 33, 40, 80),
    conflict_free=(),
    work="lds_read",
    synchronised=lambda arch: (generic_forward.Tiles(32, 16, 4, 8),),
  ),
  "amx": Subject(
    amx_forward,
    ("amx",),
    (dtypes.bfloat16, dtypes.float16, dtypes.float32),
    {
      "one query": (2, 2, 2, 1, 150, 32, 32),
      "one key": (1, 2, 2, 70, 1, 16, 16),
      "grouped": (2, 4, 2, 50, 90, 24, 40),
      "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
    },
    mistakes.AMX,
    small=lambda arch: amx_forward.Tiles(64, 32),  # two units
    any_tiles=amx_tiles,
    head_dims=(1, 8, 33, 40),
    most_queries=70,
    conflict_free=(),
    synchronised=lambda arch: (amx_forward.Tiles(32, 32), amx_forward.Tiles(32, 32, groups=1)),
    mistaken=(1, 1, 1, 50, 70, 33, 16),
  ),
  "cpu": Subject(
    cpu_forward,
    (CPU,),
    DTYPES_16_32,
    CPU_CORNERS,
    mistakes.CPU,
    small=lambda arch: cpu_forward.Tiles(32, 16, 2),
    any_tiles=cpu_tiles,
    head_dims=range(1, 81),
    mistaken=(1, 1, 1, 150, 150, 16, 16),
  ),
  "decode": Subject(
    cpu_decode,
    (CPU,),
    DTYPES_16_32,
    DECODE_CORNERS,
    mistakes.DECODE,
    small=lambda arch: cpu_decode.Tiles(3, 32, 3, 2, 2, 8),
    any_tiles=decode_tiles,
    head_dims=range(1, 81),
    most_queries=16,
    mistaken=(1, 6, 2, 3, 150, 20, 16),
  ),
}
EMULATED = [name for name, x in SUBJECTS.items() if x.arches != (CPU,)]
GPU = [name for name in EMULATED if name != "amx"]
NVIDIA = [name for name in GPU if SUBJECTS[name].kernel not in (amd_forward, apple_forward, generic_forward)]
# Every machine and type: for tests of ("subject", "arch", "dtype").
EVERYWHERE = [(name, arch, dtype) for name, x in SUBJECTS.items() for arch in x.arches for dtype in x.dtypes]
ON_GPUS = [case for case in EVERYWHERE if case[0] in GPU]
TARGETS = sorted({arch for _, arch, _ in EVERYWHERE})
# The first machine and type of each: for what does not depend on them.
ONCE = [(name, x.arches[0], x.dtypes[0]) for name, x in SUBJECTS.items()]
ONCE_ON_GPUS = [case for case in ONCE if case[0] in GPU]
ONCE_EMULATED = [case for case in ONCE if case[0] in EMULATED]
