"""Each instruction of uopattn.dsl.instructions: its meaning on the emulator, its operands' limits, its texts."""

import functools
import string
from collections.abc import Callable

import numpy as np
import pytest
from emulator_kernels import kernel, launch, lds, reg, threads
from helpers import normal
from tinygrad import Context, UOp, dtypes
from tinygrad.codegen import to_program_cache
from tinygrad.device import Device
from tinygrad.dtype import float_to_fp8
from tinygrad.renderer.cstyle import CUDARenderer, HIPRenderer

import uopattn.emulator as emulator
from uopattn.dsl.instruction import typed
from uopattn.dsl.instructions import BY_TEXT, CPU, CUDA, HIP, INSTRUCTIONS, TURING
from uopattn.dsl.nvidia import wgmma
from uopattn.emulator import alu
from uopattn.emulator.errors import instruction_of
from uopattn.emulator.instructions import MEANINGS

X = normal(128)
LANES = np.arange(128)
DIALECTS = {HIP: "gfx1100", CUDA: "sm_80"}


def words(*shape):
  """Random words."""
  return np.random.default_rng(0).integers(0, 1 << 32, shape, dtype=np.uint32)


def lanewise(name, word):
  """A kernel whose result in each lane is `word` of the lane's input and its thread index."""

  def body(o, x):
    t = threads(128)
    return kernel(name, [o[t].store(word(x[t].load(), t.cast(dtypes.int)))], t)

  return body


def source_of(permutation, unit):
  """The lane that each lane reads when `permutation` acts within blocks of `unit` lanes."""
  return LANES // unit * unit + permutation(LANES % unit)


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16, 31])
def test_shuffle_xor(dialect, offset):
  got = launch(lanewise(f"xor{offset}", lambda x, _: dialect.shuffle_xor(x, offset)), X, X, arch=DIALECTS[dialect])
  np.testing.assert_array_equal(got, X[LANES ^ offset])


@pytest.mark.parametrize(("dialect", "arch", "wave"), [(HIP, "gfx1100", 32), (HIP, "gfx942", 64), (CUDA, "sm_80", 32)])
def test_shuffle(dialect, arch, wave):
  got = launch(lanewise("reversed", lambda x, t: dialect.shuffle(x, wave - 1 - t % wave)), X, X, arch=arch)
  np.testing.assert_array_equal(got, X[source_of(lambda l: wave - 1 - l, wave)])
  got = launch(lanewise("broadcast", lambda x, _: dialect.shuffle(x, 5)), X, X, arch=arch)
  np.testing.assert_array_equal(got, X[LANES // wave * wave + 5])


def test_shuffle_moves_integers_too():
  x = np.random.default_rng(0).integers(-99, 99, 128).astype(np.int32)
  got = launch(lanewise("integers", lambda v, _: HIP.shuffle_xor(v, 3)), x, x)
  np.testing.assert_array_equal(got, x[LANES ^ 3])


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_arithmetic(dialect):
  arch, x = DIALECTS[dialect], X.copy()
  x[:4] = [np.inf, -np.inf, 0, np.nan]
  zero = UOp.const(0.0, dtypes.float)
  cases = {
    "fmax": (lambda v, _: dialect.fmax(v, zero), np.fmax(x, np.float32(0))),
    "fmin": (lambda v, _: dialect.fmin(v, zero), np.fmin(x, np.float32(0))),
    "exp2": (lambda v, _: dialect.exp2(v), np.exp2(x)),
    "reciprocal": (lambda v, _: dialect.reciprocal(v), np.divide(1, x, where=x != 0, out=np.full_like(x, np.inf))),
  }
  for name, (word, want) in cases.items():
    np.testing.assert_allclose(launch(lanewise(name, word), x, x, arch=arch), want, rtol=1e-6)


def test_pin_changes_nothing():
  np.testing.assert_array_equal(launch(lanewise("pinned", lambda v, _: HIP.pin(v)), X, X), X)


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_halves_of_two_words(dialect):
  x = words(128)
  y = x ^ np.uint32(0x12345678)
  want = {"low_halves": (x & 0xFFFF) | (y << 16), "high_halves": (x >> 16) | (y & 0xFFFF0000)}
  for name, expected in want.items():
    body = lanewise(name, lambda v, _: getattr(dialect, name)(v, v ^ 0x12345678))
    np.testing.assert_array_equal(launch(body, x, x, arch=DIALECTS[dialect]), expected)


def test_a_wave_reads_what_its_lanes_stored():
  """No barrier: four waves of 32 lanes, each in words of its own."""

  def body(o, x):
    t, s = threads(128), lds(0, 128)
    fence = HIP.wave_fence(s[t].store(x[t].load()))
    return kernel("fence", [o[t].store(s.after(fence)[t ^ 5].load())], t)

  with emulator.profile() as profile:
    np.testing.assert_array_equal(launch(body, X, X), X[LANES ^ 5])
  assert profile.kernels["fence"].barriers == 0


def test_exp2_flushes_denormals_and_is_counted():
  x = np.array([-126.0, -127.0, -140.0, 1.0] * 32, np.float32)
  with emulator.profile() as profile:
    got = launch(lanewise("flush", lambda v, _: HIP.exp2(v)), x, x)
  np.testing.assert_array_equal(got[:4], np.array([2.0**-126, 0, 0, 2], np.float32))
  assert profile.kernels["flush"].exp2s == 128


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans):
  """Four 8x8 matrices side by side in LDS; lane l holds elements 2*(l%4), +1 of row (or column) l // 4 of each."""

  def body(o, x):
    t, s, frag = threads(32), lds(0, 256, dtypes.half), reg(1, 8, dtypes.half)
    s = s.after(UOp.barrier(UOp.group(*[s[8 * t + i].store(x[8 * t + i].load()) for i in range(8)])))
    frag = frag.after(CUDA.ldmatrix(frag[0], s[8 * t], trans=trans))
    return kernel(f"ldmatrix{trans}", [o[8 * t + i].store(frag[i].load()) for i in range(8)], t)

  x = normal(256).astype(np.float16)
  matrices = x.reshape(4, 8, 8)
  want = np.empty((32, 4, 2), np.float16)
  for lane in range(32):
    for i in range(2):
      row, column = lane // 4, 2 * (lane % 4) + i
      want[lane, :, i] = matrices[:, column, row] if trans else matrices[:, row, column]
  np.testing.assert_array_equal(launch(body, x, x, arch="sm_80"), want.ravel())


@pytest.mark.parametrize("dtype", [dtypes.uint, dtypes.half, dtypes.uchar], ids=str)
def test_ldmatrix_of_what_nothing_wrote_is_caught_in_memory_of_any_type(dtype):
  """The last of 32 rows of 16 bytes is missing, or not."""
  count = 16 // dtype.itemsize

  def body(rows):
    def fxn(o, x):
      t, s, frag = threads(32), lds(0, 32 * count, dtype), reg(1, 4, dtypes.uint)
      stores = [s[(count * t + i).valid(t < rows)].store(x[count * t + i].load()) for i in range(count)]
      frag = frag.after(CUDA.ldmatrix(frag[0], s.after(UOp.barrier(UOp.group(*stores)))[count * t]))
      return kernel(f"missing_{rows}_{dtype}", [o[4 * t + i].store(frag[i].load()) for i in range(4)], t)

    return fxn

  x = words(128)
  numbers = x.view(np.float16 if dtype == dtypes.half else f"u{dtype.itemsize}")
  got = launch(body(32), np.zeros(128, np.uint32), numbers, arch="sm_80")
  np.testing.assert_array_equal(got, x.reshape(4, 32).T.ravel())  # lane l has word l % 4 of row l // 4 of each matrix
  with pytest.raises(emulator.Unwritten, match="which nothing has written"):
    launch(body(31), np.zeros(128, np.uint32), numbers, arch="sm_80")


def test_groups_of_copies_complete_in_order():
  """Two groups in flight; waiting until one is left makes the first one readable."""

  def body(read_second):
    def fxn(o, x):
      t, s = threads(32), lds(0, 256)
      first = CUDA.cp_async_commit(CUDA.cp_async(s[4 * t], x[4 * t]))
      second = CUDA.cp_async_commit(CUDA.cp_async(s[128 + 4 * t], x[128 + 4 * t], first))
      ready = s.after(UOp.barrier(CUDA.cp_async_wait(1, second)))
      stores = [o[4 * t + i].store(ready[(128 if read_second else 0) + 4 * t + i].load()) for i in range(4)]
      # no copy may be under way when the kernel ends
      return kernel(f"groups{read_second}", [CUDA.cp_async_wait(0, *stores)], t)

    return fxn

  x = normal(256)
  np.testing.assert_array_equal(launch(body(False), x[:128], x, arch="sm_80"), x[:128])
  with pytest.raises(emulator.Unwritten, match="in flight"):
    launch(body(True), x[:128], x, arch="sm_80")


@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16], ids=str)
def test_pack_rounds_to_nearest_even(dtype):
  """The first number is the low half."""
  lost = 2.0**-11 if dtype == dtypes.half else 2.0**-8  # half of the last place of 1
  numbers = [1 + lost, 1 + 3 * lost, 1 + lost * 1.01, -1 - lost, 0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-7, 0.1]
  x = np.resize(np.array(numbers, np.float32), 128)

  def body(o, x):
    t = threads(64)
    return kernel(f"pack_{dtype}", [o[t].store(CUDA.pack(x[2 * t].load(), x[2 * t + 1].load(), dtype))], t)

  halves = launch(body, np.zeros(64, np.uint32), x, arch="sm_80").view(np.uint16)
  if dtype == dtypes.half:
    with np.errstate(over="ignore"):
      np.testing.assert_array_equal(halves.view(np.float16), x.astype(np.float16))
  else:
    got = (halves.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got[:4], np.array([1, 1 + 4 * lost, 1 + 2 * lost, -1], np.float32))
    np.testing.assert_allclose(got, x, rtol=lost)


@pytest.mark.parametrize("dtype", [dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
def test_pack4_rounds_to_nearest_even_and_saturates(dtype):
  """The first number is the lowest byte."""
  numbers = [1.0625, 1.125, -1.1875, 0.0, -0.0, 449.0, 464.1, 1e5, -1e30, 2.0**-9, 2.0**-10, 1e-5, 3e-5, 0.3, np.nan]
  x = np.resize(np.array(numbers, np.float32), 128)

  def body(o, x):
    t = threads(32)
    return kernel(f"pack4_{dtype}", [o[t].store(CUDA.pack4([x[4 * t + i].load() for i in range(4)], dtype))], t)

  got = launch(body, np.zeros(32, np.uint32), x, arch="sm_89").view(np.uint8)
  np.testing.assert_array_equal(got, [float_to_fp8(float(number), dtype) for number in x])
  infinities = np.resize(np.array([np.inf, -np.inf], np.float32), 128)
  largest = 0x7E if dtype == dtypes.fp8e4m3 else 0x7B
  got = launch(body, np.zeros(32, np.uint32), infinities, arch="sm_89").view(np.uint8)
  np.testing.assert_array_equal(got[:2], [largest, 0x80 | largest])


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("dtype", [dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
def test_convert_pair_rounds_to_nearest_even_and_overflows(dtype, arch):
  """The first number is the lowest byte of the half; CDNA3 has other formats, and others' largest numbers."""
  of = {dtypes.fp8e4m3: dtypes.fp8e4m3fnuz, dtypes.fp8e5m2: dtypes.fp8e5m2fnuz}[dtype] if arch == "gfx942" else dtype
  largest = alu.decode(np.uint8(0x7F if arch == "gfx942" else 0x7E if dtype == dtypes.fp8e4m3 else 0x7B), of)
  numbers = [1.0625, 1.125, -1.1875, 0.0, -0.0, 2.0**-9, 2.0**-11, 1e-5, 3e-5, 0.3, np.nan, largest, -largest]
  over = [largest * 1.2, -largest * 4, np.inf, -np.inf]
  x = np.resize(np.array([*numbers, largest * 1.01, *over], np.float32), 128)

  def body(o, x):
    t = threads(64)
    pair = x[2 * t].load(), x[2 * t + 1].load()
    low = HIP.convert_pair(*pair, UOp.const(0xABCDEF01, dtypes.uint), False, dtype)
    high = HIP.convert_pair(*pair, UOp.const(0xABCDEF01, dtypes.uint), True, dtype)
    return kernel(f"convert_{dtype}", [o[2 * t].store(low), o[2 * t + 1].store(high)], t)

  got = launch(body, np.zeros(128, np.uint32), x, arch=arch)
  assert (got[::2] >> 16 == 0xABCD).all()
  assert (got[1::2] & 0xFFFF == 0xEF01).all()
  codes = (got[::2] & 0xFFFF).astype(np.uint16)
  np.testing.assert_array_equal(got[1::2] >> 16, codes)
  want = np.array([float_to_fp8(float(number), of) for number in x])
  gone = np.isinf(x) | (np.abs(x) > largest * 1.1)
  want[gone] = [float_to_fp8(float(np.copysign(np.inf, number)), of) for number in x[gone]]
  np.testing.assert_array_equal(codes.view(np.uint8), want)


@pytest.mark.parametrize(("dialect", "arch"), [(CUDA, "sm_80"), (HIP, "gfx942")])
def test_bytes_of_two_words(dialect, arch):
  x = words(128)
  two = np.stack([x, x ^ np.uint32(0x12345678)], axis=1).view(np.uint8)
  for first, word in enumerate((dialect.even_bytes, dialect.odd_bytes)):
    body = lanewise(f"bytes_{first}", lambda v, _, word=word: word(v, v ^ 0x12345678))
    want = np.ascontiguousarray(two[:, first::2]).view(np.uint32).ravel()
    np.testing.assert_array_equal(launch(body, x, x, arch=arch), want)


@pytest.mark.parametrize("dtype", [dtypes.uint, dtypes.half, dtypes.fp8e4m3], ids=str)
def test_words_become_registers_of_any_type(dtype):
  count, numbers = 16 // dtype.itemsize, np.dtype(f"u{dtype.itemsize}")

  def body(o, x):
    t, frag = threads(32), reg(1, count, dtype)
    frag = frag.after(CUDA.set_words(frag[0], *[x[4 * t + i].load() for i in range(4)]))
    to = {1: dtypes.uchar, 2: dtypes.ushort, 4: dtypes.uint}[dtype.itemsize]
    return kernel(f"words_{dtype}", [o[count * t + i].store(frag[i].load().bitcast(to)) for i in range(count)], t)

  x = words(128)
  np.testing.assert_array_equal(launch(body, np.zeros(32 * count, numbers), x, arch="sm_89"), x.view(numbers))


def test_a_copy_of_zeros_reads_nothing():
  """The lanes past the end name addresses that are not there."""
  length = 40

  def body(inside):
    def fxn(o, x):
      t, s = threads(32), lds(0, 128)
      copy = CUDA.cp_async(s[4 * t], x[4 * t], inside=4 * t < length if inside else UOp.const(True))
      ready = s.after(UOp.barrier(CUDA.cp_async_wait(0, CUDA.cp_async_commit(copy))))
      return kernel(f"zeros{inside}", [o[4 * t + i].store(ready[4 * t + i].load()) for i in range(4)], t)

    return fxn

  got = launch(body(True), X, X[:length], arch="sm_80")
  np.testing.assert_array_equal(got, np.where(np.arange(128) < length, X, 0))
  with pytest.raises(emulator.OutOfBounds, match=r"copies 16 bytes from argument 1 at byte \[160"):
    launch(body(False), X, X[:length], arch="sm_80")


def test_operands_out_of_range():
  x = UOp.const(1.0, dtypes.float)
  for call in (
    lambda: HIP.shuffle_xor(x, 32),
    lambda: HIP.shuffle_xor(x.cast(dtypes.half), 1),
    lambda: TURING.exp2(x),
    lambda: HIP.leave_loop(x > 0),
  ):
    with pytest.raises(ValueError, match=r"32-bit|within|has no|not"):
      call()


def texts_of_products():
  """A text of each kind of instruction in uopattn.dsl.nvidia.wgmma."""
  d, a, b = reg(0, 8), reg(1, 4, dtypes.uint), lds(2, 64)
  starts = [wgmma.start(dtypes.half, 16, 1, d[0], a[0], b[0], (0, 0), form=form) for form in wgmma.Form]
  of_bytes = wgmma.Form.SHARED, wgmma.Form.REGISTERS
  starts += [wgmma.start(dtypes.fp8e4m3, 16, 1, d[0], a[0], b[0], (0, 0), form=form) for form in of_bytes]
  return [store.src[1].arg for store in (*starts, wgmma.wait(0, 16, d[0]))]


def test_every_instruction_has_a_meaning_and_texts_of_its_own():
  assert len(BY_TEXT) == sum(len({*i.texts.values()}) for i in INSTRUCTIONS.values())
  texts = [*BY_TEXT, *texts_of_products()]
  found = [instruction_of(text) for text in texts]
  assert {instruction.name for instruction in found if instruction is not None} == set(MEANINGS)
  assert None not in found
  for text in texts:
    rendered = text.format(*string.ascii_letters)  # braces are balanced
    assert rendered.count("(") == rendered.count(")")
    assert rendered.count("{") == rendered.count("}")


@pytest.mark.parametrize(("dialect", "renderer", "marks"), [
  (HIP, HIPRenderer, ["__builtin_amdgcn_ds_swizzle(", "((1) << 10) | 31", "__builtin_fmaxf("]),
  (CUDA, CUDARenderer, ["__shfl_xor_sync(0xffffffff,", "ex2.approx.ftz.f32 %0, %1;", "fmaxf("]),
])  # fmt: skip
def test_the_targets_renderer_writes_the_text(dialect, renderer, marks):
  """What the emulator gets, rendered by the target's own renderer."""

  def body(o, x):
    t = threads(64)
    v = dialect.exp2(dialect.fmax(x[t].load(), dialect.shuffle_xor(x[t].load(), 1)))
    return kernel(f"texts_{dialect.name}", [o[t].store(v)], t)

  launch(body, X[:64], X[:64], arch=DIALECTS[dialect])
  program = next(p for p in to_program_cache.values() if p.src[0].arg.name == f"texts_{dialect.name}")
  with Context(DEV=f"EMU::{DIALECTS[dialect]}"):
    text = renderer.render(Device["EMU"].renderer, list(program.src[1].src))
  for mark in marks:
    assert mark in text


def joined(add: Callable[..., UOp], lanes: int) -> tuple[np.ndarray, np.ndarray]:
  """Two vectors a thread, (32, 2 lanes), and what `add` makes of them."""

  def body(o, x):
    t, a, b, y = threads(32), reg(0, lanes), reg(1, lanes), reg(2, lanes)
    filled = UOp.group(
      *[r[i].store(x[t * 2 * lanes + at + i].load()) for at, r in ((0, a), (lanes, b)) for i in range(lanes)]
    )
    done = add(lanes, y[0], a.after(filled)[0], b.after(filled)[0], filled)
    return kernel("joined", [o[t * lanes + i].store(y.after(done)[i].load()) for i in range(lanes)], t)

  x = normal(32, 2 * lanes)
  return x, launch(body, np.zeros(32 * lanes, np.float32), x.ravel(), arch="gfx1100").reshape(32, lanes)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_add_pairs(lanes):
  """A word of CPUs alone, which the emulator knows too."""
  x, got = joined(CPU.add_pairs, lanes)
  x = x.reshape(32, 2, lanes // 4, 4)
  np.testing.assert_array_equal(got.reshape(32, -1, 2, 2), np.moveaxis(x[..., ::2] + x[..., 1::2], 1, 2))


@pytest.mark.parametrize("lanes", [8, 16])
def test_add_quads(lanes):
  x, got = joined(CPU.add_quads, lanes)
  x = x.reshape(32, lanes // 4, 2, 4)
  np.testing.assert_array_equal(got.reshape(32, -1, 4), x[:, :, 0] + x[:, :, 1])


def of_words(instruction, lanes, *more, count=17):
  """Random words, (32, count), and `lanes` numbers that a CPU's instruction makes of each row."""

  def body(o, x):
    t, words, y = threads(32), reg(0, count, dtype=dtypes.uint), reg(1, lanes)
    filled = UOp.group(*[words[i].store(x[t * count + i].load()) for i in range(count)])
    done = instruction(y[0], words.after(filled)[0], *more, filled)
    return kernel("of_words", [o[t * lanes + i].store(y.after(done)[i].load()) for i in range(lanes)], t)

  x = words(32, count)
  return x, launch(body, np.zeros(32 * lanes, np.float32), x.ravel(), arch="gfx1100").reshape(32, lanes)


@pytest.mark.parametrize(("lanes", "each", "offset"), [(16, 2, 0), (16, 4, 4), (8, 4, 2), (4, 2, 6), (2, 2, 3)])
def test_group_scales(lanes, each, offset):
  x, got = of_words(functools.partial(CPU.group_scales, lanes, each), lanes, offset, 120 << 23)
  numbers = x.view(np.uint8).reshape(32, -1)[:, offset : offset + lanes // each].astype(np.uint32) & 0x7F
  expected = ((numbers << 20) + (120 << 23)).astype(np.uint32).view(np.float32)
  np.testing.assert_array_equal(got, expected.repeat(each, 1))


@pytest.mark.parametrize(("lanes", "per_word", "shift"), [(16, 1, 28), (16, 2, 12), (8, 1, 0), (4, 2, 4)])
def test_look_up(lanes, per_word, shift):
  table = tuple(float(i * i - 40) / 4 for i in range(16))
  x, got = of_words(functools.partial(CPU.look_up, lanes, per_word), lanes, shift, table)
  numbers = x.view({1: np.uint32, 2: np.uint16}[per_word]).reshape(32, -1)[:, :lanes] >> shift & 15
  np.testing.assert_array_equal(got, np.array(table, np.float32)[numbers])
  with pytest.raises(emulator.OutOfBounds, match="reads registers 0"):
    of_words(functools.partial(CPU.look_up, lanes, per_word), lanes, shift, table, count=lanes // per_word)


def test_products_of_pairs():
  """Of numbers that bfloat16 has, all of whose sums are exact; and of one that is denormal there, which counts as 0."""
  lanes, n = 16, 32

  def body(o, x):
    t, y = threads(32), reg(0, n)
    a, b = (reg(slot, n, dtype=dtypes.bfloat16) for slot in (1, 2))
    copies = [r[i].store(x[(t * 2 + at) * n + i].load().cast(r.dtype)) for at, r in ((0, a), (1, b)) for i in range(n)]
    filled = UOp.group(*copies, *[y[i].store(1.0) for i in range(n)])
    a, b, z = (r.after(filled) for r in (a, b, y))
    dot = CPU.dot_pairs(z[0], a[0], b[0], filled)
    weighted = CPU.weighted_pair(z[lanes], a[2], b[0], b[lanes], dot)
    return kernel("pairs", [o[t * n + i].store(y.after(weighted)[i].load()) for i in range(n)], t)

  x = (np.random.default_rng(0).integers(-128, 128, (32, 2, n)) / 8).astype(np.float32)
  x[:, 0, 1], x[:, 1, 1] = 2.0**-130, 2.0**127
  got = launch(body, np.zeros(32 * n, np.float32), x.ravel(), arch="gfx1100").reshape(32, 2, lanes)
  a, b = np.where(x == 2.0**-130, 0, x).swapaxes(0, 1)
  np.testing.assert_array_equal(got[:, 0], 1 + (a * b).reshape(32, lanes, 2).sum(-1))
  others = np.delete(np.arange(lanes), 1)  # than that of 2**127
  weighted = 1 + a[:, 2:3] * b[:, others] + a[:, 3:4] * b[:, lanes + others]
  np.testing.assert_array_equal(got[:, 1, others], weighted)


def test_a_constant_keeps_its_type() -> None:
  """What is left of 0 + 0x8000, a number without a type, would become an int, which is another number if shifted."""

  def body(o: UOp, x: UOp) -> UOp:
    t = threads(64)
    bits = (x[t].load() & 0) + 0x80008000
    return kernel("constant", [o[t].store(HIP.high_halves(bits, bits))], t)

  x = np.zeros(64, np.uint32)
  with pytest.raises(emulator.UnknownInstruction, match=r"high_halves takes dtypes\.uint here, not dtypes\.long"):
    launch(body, x, x)
  np.testing.assert_array_equal(launch(lambda o, x: typed(body(o, x)), x, x), np.full(64, 0x80008000, np.uint32))


def test_constants_next_to_ints_have_no_type_of_their_own() -> None:
  """They are the same as before: with types tinygrad simplifies an index in another way."""
  i = UOp.range(8, 0)
  x = UOp.placeholder((8,), dtypes.int, slot=0)[i].load()
  index, number = i * 3 + 1, x + 2
  assert typed(index) is index
  assert typed(number) is number
