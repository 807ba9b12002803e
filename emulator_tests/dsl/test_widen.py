"""Elements of 8 and 4 bits are widened on NVIDIA's GPUs to what `widened` and `bits_of` make of them, bit by bit."""

import numpy as np
import pytest
from emulator_kernels import kernel, launch, threads
from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.nvidia.widen import crossed, pairs_of
from uopattn.dsl.rules.four_bits import bits_of
from uopattn.dsl.rules.quantized import INT4, NVFP4, QUANTIZED_DTYPES, FourBits, widened_bits
from uopattn.proof.oracle import Array

SCALES = np.arange(8, 127, dtype=np.uint32)  # every scale of a group: 2**-6 to 448
ANY = {dtypes.fp8e4m3: (0x7F, 0xFF)}  # bytes of no number


def words_of(stored: DType) -> tuple[Array, Array]:
  """Words with each element of 8 bits at each offset, or of 4 bits with most scales; and a scale for each word."""
  words = np.random.default_rng(0).integers(0, 1 << 32, 1024, dtype=np.uint32)
  if not isinstance(stored, FourBits):
    words[:256] = np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    bytes_of = words.view(np.uint8)
    bytes_of[np.isin(bytes_of, ANY.get(stored, ()))] = 0
  return words, np.resize(SCALES, len(words))


def run(name: str, count: int, words: Array, scales: Array, word, arch: str) -> Array:
  """`count` words that a lane makes of its word, and of the one before it, and of their scales."""

  def body(o: UOp, x: UOp, s: UOp) -> UOp:
    t = threads(len(words))
    before = (t + len(words) - 1) % len(words)
    found = word(*(of[i].load() for of in (x, s) for i in (t, before)))
    return kernel(name, [o[i * len(words) + t].store(x) for i, x in enumerate(found)], t)

  return launch(body, np.zeros(count * len(words), np.uint32), words, scales, arch=arch).reshape(count, -1)


def expected(word: UOp, scale: UOp, stored: DType, to: DType) -> list[UOp]:
  """The widened elements of a word, in order."""
  if isinstance(stored, FourBits):
    return bits_of(word, scale.cast(dtypes.int), 8, stored, to)
  return [widened_bits(((word >> 8 * i) & 0xFF).cast(dtypes.uchar), stored, to) for i in range(4)]


@pytest.mark.parametrize("to", [dtypes.half, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [*QUANTIZED_DTYPES, INT4, NVFP4], ids=str)
def test_every_element(stored: DType, to: DType) -> None:
  (words, scales), name = words_of(stored), f"{stored}_{to}".replace("dtypes.", "")
  per = 32 // stored.bitsize

  def separate(word: UOp, _before: UOp, scale: UOp, _scale: UOp) -> list[UOp]:
    bits = [x.cast(dtypes.uint) for x in expected(word, scale, stored, to)]
    return [a | b << 16 for a, b in zip(bits[::2], bits[1::2], strict=True)]

  def together(word: UOp, _before: UOp, scale: UOp, _scale: UOp) -> list[UOp]:
    return pairs_of(word, stored, to, scale | scale << 16)

  def two(word: UOp, before: UOp, scale: UOp, of_before: UOp) -> list[UOp]:
    return crossed(word, before, stored, to, scale | of_before << 16)

  def two_expected(word: UOp, before: UOp, scale: UOp, of_before: UOp) -> list[UOp]:
    a, b = ([x.cast(dtypes.uint) for x in expected(*of, stored, to)] for of in ((word, scale), (before, of_before)))
    return [low | high << 16 for low, high in zip(a, b, strict=True)]

  for count, found, right in ((per // 2, together, separate), (per, two, two_expected)):
    got, want = (run(f"{f.__name__}_{name}", count, words, scales, f, "sm_80") for f in (found, right))
    # What is 0 may have either sign.
    bits = [np.where(x == 0x8000, 0, x) for x in (got.view(np.uint16), want.view(np.uint16))]
    np.testing.assert_array_equal(bits[0], bits[1])
