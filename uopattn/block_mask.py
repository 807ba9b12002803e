"""Which blocks of keys each block of queries may see."""

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.helpers import ceildiv


@dataclass(frozen=True, eq=False)
class BlockMask:
  """Hides whole blocks of keys from whole blocks of queries.

  Attributes:
    blocks: bool, (B or 1, Hq or 1, ceil(M / block_m), ceil(N / block_n)); False hides the block.
    block_m: queries a block.
    block_n: keys a block.
  """

  blocks: Tensor
  block_m: int
  block_n: int

  def __post_init__(self) -> None:
    if not isinstance(self.blocks, Tensor) or self.blocks.dtype != dtypes.bool or self.blocks.ndim != 4:
      raise TypeError("BlockMask.blocks must be a bool Tensor of four dimensions, (B, Hq, query blocks, key blocks)")
    for name in ("block_m", "block_n"):
      if (size := getattr(self, name)) < 1:
        raise ValueError(f"BlockMask.{name} is {size}; it must be at least 1")

  def check(self, B: int, Hq: int, M: int, N: int) -> None:
    """Raises ValueError if this mask is not one for scores of (B, Hq, M, N)."""
    want = (B, Hq, ceildiv(M, self.block_m), ceildiv(N, self.block_n))
    have = self.blocks.shape
    if have[0] not in (1, B) or have[1] not in (1, Hq) or have[2:] != want[2:]:
      raise ValueError(
        f"block_mask has blocks of shape {have}; for scores of ({B}, {Hq}, {M}, {N}) it must be {want}, "
        "with 1 allowed for the first two"
      )

  def dense(self, M: int, N: int) -> Tensor:
    """The same as a bool mask, (B or 1, Hq or 1, M, N)."""
    rows = Tensor.arange(M) // self.block_m
    keys = Tensor.arange(N) // self.block_n
    return self.blocks[:, :, rows][:, :, :, keys]
