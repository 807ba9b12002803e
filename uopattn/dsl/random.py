"""Random bits that any kernel can work out where it needs them: a function of a seed and a place, without a state."""

from typing import Any

from tinygrad import Tensor, dtypes

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
  """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

  Args:
    key, counter: two 32-bit words each; UOps, Tensors or numpy arrays, of uint32, whose sums wrap.

  Returns:
    Two words, each 32 random bits.
  """
  keys = (*key, key[0] ^ key[1] ^ _PARITY)
  x, y = counter[0] + keys[0], counter[1] + keys[1]
  for i in range(5):
    for r in _ROTATIONS[i % 2]:
      x = x + y
      y = ((y << r) | (y >> (32 - r))) ^ x
    x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + (i + 1)
  return x, y


def kept(seed: tuple[Any, Any], row: Any, key: Any, p: float) -> Any:
  """Whether dropout of probability p keeps a weight.

  Args:
    seed: two words; see `draw_seed`.
    row: (b * Hq + h) * M + i, of query i of head h of batch b, in uint32 as key.
    key: of the weight.
  """
  return threefry2x32(seed, (row, key))[0] >= min(round(p * 2**32), 2**32 - 1)


def draw_seed(device: str | tuple[str, ...] | None) -> Tensor:
  """Two words from tinygrad's generator, (2,) uint32: `Tensor.manual_seed` determines them.

  They are there when this returns, so that all that is computed from them, now or later, has the same. Of what a
  `TinyJit` captures each replay draws new ones.
  """
  lead = device[0] if isinstance(device, tuple) else device
  halves = (Tensor.rand(2, 2, device=lead, dtype=dtypes.float32) * 65536).cast(dtypes.uint32)
  return (halves[0] * 65536 + halves[1]).realize().to(device)
