"""Each word of uopattn.dsl.instructions: its meaning on the emulator, its operands' limits, its texts."""

import numpy as np
import pytest
from emulator_kernels import kernel, launch, lds, reg, threads
from tinygrad import Context, UOp, dtypes
from tinygrad.codegen import to_program_cache
from tinygrad.device import Device
from tinygrad.renderer.cstyle import CUDARenderer, HIPRenderer

import uopattn.emulator as emulator
from uopattn.dsl import instructions as ins
from uopattn.emulator.instructions import MEANINGS

RNG = np.random.default_rng(0)
X = RNG.standard_normal(128).astype(np.float32)
LANES = np.arange(128)
FAMILIES = {"hip": "gfx1100", "cuda": "sm_80"}


def lanewise(name, word, dtype=np.float32, count=128):
  """A kernel whose result in each lane is `word` of the lane's input and its thread index."""

  def body(o, x):
    t = threads(count)
    return kernel(name, [o[t].store(word(x[t].load(), t.cast(dtypes.int)))], t)

  return body


def source_of(permutation, unit):
  """The lane that each lane reads when `permutation` acts within blocks of `unit` lanes."""
  return LANES // unit * unit + permutation(LANES % unit)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16, 31])
def test_shuffle_xor(family, offset):
  got = launch(lanewise(f"xor{offset}", lambda x, _: ins.shuffle_xor(family, x, offset)), X, X, arch=FAMILIES[family])
  np.testing.assert_array_equal(got, X[LANES ^ offset])


@pytest.mark.parametrize(
  ("family", "arch", "wave"), [("hip", "gfx1100", 32), ("hip", "gfx942", 64), ("cuda", "sm_80", 32)]
)
def test_shuffle(family, arch, wave):
  got = launch(lanewise("reversed", lambda x, t: ins.shuffle(family, x, wave - 1 - t % wave)), X, X, arch=arch)
  np.testing.assert_array_equal(got, X[source_of(lambda l: wave - 1 - l, wave)])
  got = launch(lanewise("broadcast", lambda x, _: ins.shuffle(family, x, 5)), X, X, arch=arch)
  np.testing.assert_array_equal(got, X[LANES // wave * wave + 5])


def test_shuffle_moves_integers_too():
  x = RNG.integers(-99, 99, 128).astype(np.int32)
  got = launch(lanewise("integers", lambda v, _: ins.shuffle_xor("hip", v, 3)), x, x)
  np.testing.assert_array_equal(got, x[LANES ^ 3])


@pytest.mark.parametrize("n", [1, 2, 5, 8, 15])
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_rows(n, arch):
  got = launch(lanewise(f"ror{n}", lambda x, _: ins.row_ror("hip", x, n)), X, X, arch=arch)
  np.testing.assert_array_equal(got, X[source_of(lambda l: (l - n) % 16, 16)])
  got = launch(lanewise(f"xmask{n}", lambda x, _: ins.row_xmask("hip", x, n)), X, X)
  np.testing.assert_array_equal(got, X[LANES ^ n])


@pytest.mark.parametrize("family", FAMILIES)
def test_arithmetic(family):
  arch, x = FAMILIES[family], X.copy()
  x[:4] = [np.inf, -np.inf, 0, np.nan]
  zero = UOp.const(0.0, dtypes.float)
  with np.errstate(divide="ignore"):
    logarithm, inverse = np.log2(x * x), 1 / x
  cases = {
    "fmax": (lambda v, _: ins.fmax(family, v, zero), np.fmax(x, np.float32(0))),
    "fmin": (lambda v, _: ins.fmin(family, v, zero), np.fmin(x, np.float32(0))),
    "exp2": (lambda v, _: ins.exp2(family, v), np.exp2(x)),
    "log2": (lambda v, _: ins.log2(family, v * v), logarithm),
    "reciprocal": (lambda v, _: ins.reciprocal(family, v), inverse),
  }
  for name, (word, want) in cases.items():
    np.testing.assert_allclose(launch(lanewise(name, word), x, x, arch=arch), want, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_of_two_words(family):
  x = RNG.integers(0, 1 << 32, 128, dtype=np.uint32)
  y = x ^ np.uint32(0x12345678)
  want = {"low_halves": (x & 0xFFFF) | (y << 16), "high_halves": (x >> 16) | (y & 0xFFFF0000)}
  for name, expected in want.items():
    body = lanewise(name, lambda v, _: getattr(ins, name)(family, v, v ^ 0x12345678))
    np.testing.assert_array_equal(launch(body, x, x, arch=FAMILIES[family]), expected)


def test_a_wave_reads_what_its_lanes_stored():
  """No barrier: four waves of 32 lanes, each in words of its own."""

  def body(o, x):
    t, s = threads(128), lds(0, 128)
    fence = ins.wave_fence("hip", s[t].store(x[t].load()))
    return kernel("fence", [o[t].store(s[(t ^ 5) + fence].load())], t)

  with emulator.profile() as profile:
    np.testing.assert_array_equal(launch(body, X, X), X[LANES ^ 5])
  assert profile.kernels["fence"].barriers == 0


def test_exp2_flushes_denormals_and_is_counted():
  x = np.array([-126.0, -127.0, -140.0, 1.0] * 32, np.float32)
  with emulator.profile() as profile:
    got = launch(lanewise("flush", lambda v, _: ins.exp2("hip", v)), x, x)
  np.testing.assert_array_equal(got[:4], np.array([2.0**-126, 0, 0, 2], np.float32))
  assert profile.kernels["flush"].exp2s == 128


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans):
  """Four 8x8 matrices side by side in LDS; lane l holds elements 2*(l%4), +1 of row (or column) l // 4 of each."""

  def body(o, x):
    t, s, frag = threads(32), lds(0, 256, dtypes.half), reg(1, 8, dtypes.half)
    s = s.after(UOp.barrier(UOp.group(*[s[8 * t + i].store(x[8 * t + i].load()) for i in range(8)])))
    frag = frag.after(ins.ldmatrix("cuda", frag[0], s[8 * t], trans=trans))
    return kernel(f"ldmatrix{trans}", [o[8 * t + i].store(frag[i].load()) for i in range(8)], t)

  x = RNG.standard_normal(256).astype(np.float16)
  matrices = x.reshape(4, 8, 8)
  want = np.empty((32, 4, 2), np.float16)
  for lane in range(32):
    for i in range(2):
      place = (lane // 4, 2 * (lane % 4) + i)
      want[lane, :, i] = matrices[(slice(None), *(reversed(place) if trans else place))]
  np.testing.assert_array_equal(launch(body, x, x, arch="sm_80"), want.ravel())


def test_groups_of_copies_complete_in_order():
  """Two groups in flight; waiting until one is left makes the first one readable."""

  def body(read_second):
    def fxn(o, x):
      t, s = threads(32), lds(0, 256)
      first = ins.cp_async_commit("cuda", ins.cp_async("cuda", s[4 * t], x[4 * t]))
      second = ins.cp_async_commit("cuda", ins.cp_async("cuda", s[128 + 4 * t], x[128 + 4 * t], first))
      ready = s.after(UOp.barrier(ins.cp_async_wait("cuda", 1, second)))
      stores = [o[4 * t + i].store(ready[(128 if read_second else 0) + 4 * t + i].load()) for i in range(4)]
      return kernel(f"groups{read_second}", stores, t)

    return fxn

  x = RNG.standard_normal(256).astype(np.float32)
  np.testing.assert_array_equal(launch(body(False), x[:128], x, arch="sm_80"), x[:128])
  with pytest.raises(emulator.Unwritten, match="in flight"):
    launch(body(True), x[:128], x, arch="sm_80")


def test_operands_out_of_range():
  x = UOp.const(1.0, dtypes.float)
  for call in (
    lambda: ins.shuffle_xor("hip", x, 32),
    lambda: ins.shuffle_xor("hip", x.cast(dtypes.half), 1),
    lambda: ins.row_xmask("hip", x, 16),
    lambda: ins.row_ror("hip", x, 0),
    lambda: ins.row_ror("cuda", x, 1),
    lambda: ins.cp_async_commit("hip"),
  ):
    with pytest.raises(ValueError, match=r"32-bit|within|rows of 16|has no|not"):
      call()


def test_every_instruction_has_a_meaning_and_texts_of_its_own():
  assert set(MEANINGS) == set(ins.INSTRUCTIONS)
  assert len(ins.BY_TEXT) == sum(len(i.texts) for i in ins.INSTRUCTIONS.values())
  for instruction in ins.INSTRUCTIONS.values():
    for text in instruction.texts.values():
      rendered = text.format("first", "second")  # braces are balanced, no operand is left over
      assert rendered.count("(") == rendered.count(")")
      assert rendered.count("{") == rendered.count("}")


@pytest.mark.parametrize(("family", "renderer", "marks"), [
  ("hip", HIPRenderer, ["__builtin_amdgcn_ds_swizzle(", "((1) << 10) | 31", "__builtin_fmaxf("]),
  ("cuda", CUDARenderer, ["__shfl_xor_sync(0xffffffff,", "ex2.approx.ftz.f32 %0, %1;", "fmaxf("]),
])  # fmt: skip
def test_the_targets_renderer_writes_the_text(family, renderer, marks):
  """What the emulator gets, rendered by the target's own renderer."""

  def body(o, x):
    t = threads(64)
    v = ins.exp2(family, ins.fmax(family, x[t].load(), ins.shuffle_xor(family, x[t].load(), 1)))
    return kernel(f"texts_{family}", [o[t].store(v)], t)

  launch(body, X[:64], X[:64], arch=FAMILIES[family])
  program = next(p for p in to_program_cache.values() if p.src[0].arg.name == f"texts_{family}")
  with Context(DEV=f"EMU::{FAMILIES[family]}"):
    text = renderer.render(Device["EMU"].renderer, list(program.src[1].src))
  for mark in marks:
    assert mark in text
