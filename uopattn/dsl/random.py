"""Counter-based random bits: a function of a seed and a position, without state, that any kernel can recompute."""

from typing import Any

from tinygrad import Tensor, dtypes

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
  """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

  Args:
    key, counter: two words each, as UOps, Tensors or numpy arrays of uint32, whose sums wrap.

  Returns:
    Two words of 32 random bits each.
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
  """Whether dropout with probability p keeps a weight.

  Args:
    seed: two words; see `draw_seed`.
    row: (b * Hq + h) * M + i for query i of head h of batch b, uint32.
    key: index of the key, uint32.
    p: probability that a weight is dropped.
  """
  return threefry2x32(seed, (row, key))[0] >= min(round(p * 2**32), 2**32 - 1)


def draw_seed(device: str | tuple[str, ...] | None) -> Tensor:
  """Draw a dropout seed, (2,) uint32, from tinygrad's generator; `Tensor.manual_seed` determines it.

  The seed is realized here, so that everything computed from it, now or later, uses the same one. In a `TinyJit` each
  replay draws a new seed.
  """
  lead = device[0] if isinstance(device, tuple) else device
  halves = (Tensor.rand(2, 2, device=lead, dtype=dtypes.float32) * 65536).cast(dtypes.uint32)
  return (halves[0] * 65536 + halves[1]).realize().to(device)
