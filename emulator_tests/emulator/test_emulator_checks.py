"""Every check fires on a kernel with one mistake, and is quiet on the right one."""

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, on_emulator, reg, threads
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA, HIP
from uopattn.emulator.program import Program

T = 64  # threads: two waves of 32
X = np.random.default_rng(0).standard_normal(T).astype(np.float32)


# ** bounds **


def indexed(space):
  def body(o, x, at):
    t = threads(T)
    if space == "argument":
      return kernel("indexed_argument", [o[t].store(x[at[t].load()].load())], t)
    if space == "output":
      return kernel("indexed_output", [o[at[t].load()].store(x[t].load())], t)
    memory = lds(0, T) if space == "LDS" else reg(0, 4)
    if space == "LDS":
      done = UOp.barrier(memory[at[t].load()].store(x[t].load()))
      return kernel("indexed_lds", [o[t].store(memory.after(done)[at[t].load()].load())], t)
    filled = memory.after(UOp.group(*[memory[i].store(x[t].load() + i) for i in range(4)]))
    return kernel("indexed_registers", [o[t].store(filled[at[t].load()].load())], t)

  return body


@pytest.mark.parametrize("space", ["argument", "output", "LDS", "registers"])
@pytest.mark.parametrize("wrong", [-1, T, 1 << 20])
def test_out_of_bounds(space, wrong):
  at = np.arange(T, dtype=np.int32) % (4 if space == "registers" else T)
  right = launch(indexed(space), X, X, at)
  np.testing.assert_allclose(right, X + at if space == "registers" else X)
  at[33] = wrong
  with pytest.raises(emulator.OutOfBounds, match=r"local \(33, 0, 0\)|registers"):
    launch(indexed(space), X, X, at)


@pytest.mark.parametrize("size", [T - 1, T, T + 1])
def test_shortened_buffer(size):
  def copy(o, x):
    t = threads(T)
    return kernel("copy", [o[t].store(x[t].load())], t)

  if size >= T:
    np.testing.assert_array_equal(launch(copy, X, np.resize(X, size)), X)
  else:
    with pytest.raises(emulator.OutOfBounds, match=r"reads argument 1 at index \[63\]"):
      launch(copy, X, X[:size])


def test_gated_accesses_are_not_checked_where_the_gate_is_false():
  def tail(o, x):
    t, n = threads(T), 40
    value = (t < n).where(x[t.valid(t < n)], 7.0)
    return kernel("tail", [o[t].store(value)], t)

  np.testing.assert_array_equal(launch(tail, X, X[:40]), np.where(np.arange(T) < 40, X, 7))

  def gated_store(o, x):
    t = threads(T)
    return kernel("gated_store", [o[t.valid(t < 40)].store(x[t].load())], t)

  np.testing.assert_array_equal(launch(gated_store, X[:40], X), X[:40])


# ** reads of what nothing wrote **


def test_unwritten_lds():
  def half_filled(o, x):
    t, s = threads(T), lds(0, T)
    s = s.after(UOp.barrier(s[(t // 2) * 2].store(x[(t // 2) * 2].load())))
    return kernel("half_filled", [o[t].store(s[t].load())], t)

  with pytest.raises(emulator.Unwritten, match=r"reads LDS 0 .* which nothing has written"):
    launch(half_filled, X, X)


def test_unwritten_register():
  def accumulate(initialise):
    def body(o, x):
      t, acc, i = threads(T), reg(0, 1), loop(4)
      start = acc.after(acc[0].store(0.0)) if initialise else acc
      end = acc[0].store(start.after(i)[0].load() + x[t].load()).end(i)
      return kernel(f"accumulate{initialise}", [o[t].store(acc.after(end)[0].load())], t)

    return body

  np.testing.assert_allclose(launch(accumulate(True), X, X), 4 * X, rtol=1e-6)
  with pytest.raises(emulator.Unwritten, match=r"reads registers 0 .* at index 0, which nothing has written"):
    launch(accumulate(False), X, X)


def test_register_written_in_some_lanes_only():
  def partly(missing):
    def body(o, x):
      t, acc = threads(T), reg(0, 1)
      i = loop(t.ne(missing).where(1, 0))
      end = acc.after(i)[0].store(x[t].load()).end(i)
      return kernel(f"partly{missing}", [o[t].store(acc.after(end)[0].load())], t)

    return body

  np.testing.assert_array_equal(launch(partly(T), X, X), X)
  with pytest.raises(emulator.Unwritten, match=r"local \(5, 0, 0\)"):
    launch(partly(5), X, X)


# ** divergence: loops whose length differs between lanes **


def shuffled_in_loop(unit):
  """Each block of `unit` lanes runs the loop one time more than the block before."""

  def body(o, x):
    t, acc = threads(T), reg(0, 1)
    acc = acc.after(acc[0].store(0.0))
    i = loop(t // unit + 1)
    other = HIP.shuffle_xor(x[t].load() + i.cast(dtypes.float), 1)
    end = acc[0].store(acc.after(i)[0].load() + other).end(i)
    return kernel(f"shuffled_in_loop{unit}", [o[t].store(acc.after(end)[0].load())], t)

  return body


@pytest.mark.parametrize("unit", [32, 2])
def test_shuffle_between_active_lanes(unit):
  n = np.arange(T) // unit + 1
  want = X.reshape(-1, 2)[:, ::-1].ravel() * n + n * (n - 1) / 2
  np.testing.assert_allclose(launch(shuffled_in_loop(unit), X, X), want, rtol=1e-5, atol=1e-4)


def test_divergent_shuffle():
  with pytest.raises(emulator.Divergence, match=r"shuffles from a lane that is not active.* local \(1, 0, 0\)"):
    launch(shuffled_in_loop(1), X, X)


def barrier_in_loop(per_thread):
  def body(o, x):
    t, g, s, acc = threads(T), groups(2), lds(0, T), reg(1, 1)
    acc = acc.after(acc[0].store(0.0))
    i = loop(g + 1 + (t // 63 if per_thread else 0))
    loaded = UOp.barrier(s.after(i)[t].store(x[t].load()))
    add = acc[0].store(acc.after(i)[0].load() + s.after(loaded)[T - 1 - t].load())
    stores = [o[g * T + t].store(acc.after(UOp.barrier(add).end(i))[0].load())]
    return kernel(f"barrier_in_loop{per_thread}", stores, t, g)

  return body


def test_divergent_barrier():
  out = np.zeros(2 * T, np.float32)
  want = np.concatenate([X[::-1], 2 * X[::-1]])  # workgroups may differ
  np.testing.assert_allclose(launch(barrier_in_loop(False), out, X), want, rtol=1e-6)
  with pytest.raises(emulator.Divergence, match=r"barrier that not every thread.* workgroup 0 local \(0, 0, 0\)"):
    launch(barrier_in_loop(True), out, X)


def matrix_in_loop(unit):
  def body(o, a):
    t, acc = threads(T), reg(0, 8)
    acc = acc.after(acc.store(acc.const_like(0)))
    i = loop(t // unit + 1)
    frag = UOp.stack(*[a[t % 16, e].load() for e in range(16)])
    old = UOp.stack(*[acc.after(i)[e].load() for e in range(8)])
    end = acc.store(UOp.wmma(frag, frag, old, (16, 16, 16), "AMD", 32)).end(i)
    stores = [o[t // 32, 2 * e + t // 16 % 2, t % 16].store(acc.after(end)[e].load()) for e in range(8)]
    return kernel(f"matrix_in_loop{unit}", stores, t)

  return body


def test_divergent_matrix_instruction():
  a = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float16)
  out, product = np.zeros((2, 16, 16), np.float32), a.astype(np.float64) @ a.astype(np.float64).T
  np.testing.assert_allclose(launch(matrix_in_loop(32), out, a), [product, 2 * product], rtol=1e-4, atol=1e-4)
  with pytest.raises(emulator.Divergence, match=r"matrix instruction with inactive lanes.* local \(0, 0, 0\)"):
    launch(matrix_in_loop(20), out, a)


def test_lanes_that_rdna3_repeats():
  def product(repeat):
    def body(o, a):
      t = threads(32)
      row = a[t % 16 if repeat else t]
      frag = UOp.stack(*[row[e].load() for e in range(16)])
      acc = UOp.wmma(frag, frag, UOp.const((0.0,) * 8, dtypes.float), (16, 16, 16), "AMD", 32)
      return kernel(f"product{repeat}", [o[2 * e + t // 16, t % 16].store(acc[e]) for e in range(8)], t)

    return body

  a = np.random.default_rng(1).standard_normal((32, 16)).astype(np.float16)
  out = np.zeros((16, 16), np.float32)
  top = a[:16].astype(np.float64)
  np.testing.assert_allclose(launch(product(True), out, a), top @ top.T, rtol=1e-5, atol=1e-5)
  with pytest.raises(emulator.LaneMismatch, match="lanes 16-31 must repeat lanes 0-15 of A"):
    launch(product(False), out, a)


# ** instructions **


def test_unknown_text():
  def twice(o, x):
    t = threads(T)
    return kernel("twice", [o[t].store(UOp(Ops.CUSTOM, dtypes.float, (x[t].load(),), "twice({0})"))], t)

  with pytest.raises(emulator.UnknownInstruction, match=r"'twice\(\{0\}\)'"):
    launch(twice, X, X)


def test_inlined_shuffle():
  def inlined(o, x):
    t = threads(T)
    shuffle = HIP.shuffle_xor(x[t].load(), 1)
    return kernel("inlined", [o[t].store(shuffle.replace(op=Ops.CUSTOMI))], t)

  with pytest.raises(emulator.UnknownInstruction, match=r"shuffle_xor must be Ops\.CUSTOM"):
    launch(inlined, X, X)


def copied(wait, commit=True, pending=0):
  """Copies 256 floats with cp.async, 16 bytes a thread, then reads them in reverse."""

  def body(o, x):
    t, s = threads(T), lds(0, 4 * T)
    done = CUDA.cp_async(s[4 * t], x[4 * t])
    if commit:
      done = CUDA.cp_async_commit(done)
    if wait:
      done = CUDA.cp_async_wait(pending, done)
    s = s.after(UOp.barrier(done))
    return kernel(
      f"copied{wait}{commit}{pending}", [o[4 * t + i].store(s[4 * T - 1 - 4 * t - i].load()) for i in range(4)], t
    )

  return body


def test_asynchronous_copy_is_there_after_its_wait_only():
  x = np.random.default_rng(0).standard_normal(4 * T).astype(np.float32)
  np.testing.assert_array_equal(launch(copied(True), x, x, arch="sm_80"), x[::-1])
  for broken in (copied(False), copied(True, commit=False), copied(True, pending=1)):
    with pytest.raises(emulator.Unwritten, match="in flight"):
      launch(broken, x, x, arch="sm_80")
  outcomes = emulator.delete_each_barrier(on_emulator(copied(True), x, size=4 * T, arch="sm_80"))
  assert {o.what: type(o.caught) for o in outcomes} == {"cp_async_wait": emulator.Unwritten, "barrier": emulator.Race}


def waited(copy):
  return CUDA.cp_async_wait(0, CUDA.cp_async_commit(copy))


def words(x):
  return [x.load().cast(dtypes.uint)] * 4


# A statement by the thread, LDS, registers and an argument, all of float32, before what the kernel does.
STATEMENTS = {
  "copy to registers": (
    lambda t, s, r, x: CUDA.cp_async(r[0], x[4 * t]),
    emulator.OutOfBounds,
    r"copies 16 bytes to registers 1 .*, which is not in LDS",
  ),
  "copy from LDS": (
    lambda t, s, r, x: CUDA.cp_async(s[4 * t], s[4 * t]),
    emulator.OutOfBounds,
    r"copies 16 bytes from LDS 0 .*, which is not in global memory",
  ),
  "copy to a bad address": (
    lambda t, s, r, x: CUDA.cp_async(s[5 * t], x[4 * t]),
    emulator.Misaligned,
    "copies 16 bytes to an LDS address that is not a multiple of 16",
  ),
  "copy from a bad address": (
    lambda t, s, r, x: CUDA.cp_async(s[4 * t], x[5 * t]),
    emulator.Misaligned,
    "copies 16 bytes from a global address that is not a multiple of 16",
  ),
  "small copy from a bad address": (
    lambda t, s, r, x: CUDA.cp_async(s[2 * t], x[3 * t], size=8),
    emulator.Misaligned,
    "copies 8 bytes from a global address that is not a multiple of 8",
  ),
  "copies to one address": (
    lambda t, s, r, x: CUDA.cp_async(s[t // 2 * 4], x[4 * t]),
    emulator.Race,
    r"copies to LDS 0 .* from different lanes at once",
  ),
  "write under a copy": (
    lambda t, s, r, x: waited(s.after(CUDA.cp_async(s[4 * t], x[4 * t]))[4 * t].store(1.0)),
    emulator.Race,
    r"writes LDS 0 .* while an asynchronous copy to it is in flight",
  ),
  "copy not waited for": (
    lambda t, s, r, x: CUDA.cp_async_commit(CUDA.cp_async(s[4 * t], x[4 * t])),
    emulator.Race,
    "ends while a copy to LDS is under way",
  ),
  "matrix at a bad address": (
    lambda t, s, r, x: CUDA.ldmatrix(r[0], s[4 * t + 1]),
    emulator.Misaligned,
    "reads a row at an LDS address that is not a multiple of 16",
  ),
  "matrix of global memory": (
    lambda t, s, r, x: CUDA.ldmatrix(r[0], x[4 * t]),
    emulator.OutOfBounds,
    "reads a row at argument 1, which is not in LDS",
  ),
  "matrix stored to global memory": (
    lambda t, s, r, x: CUDA.stmatrix(x[4 * t], *words(x[t])),
    emulator.OutOfBounds,
    "writes a row at argument 1, which is not in LDS",
  ),
  "chunk at a bad address": (
    lambda t, s, r, x: CUDA.store_chunk(s[4 * t + 1], *words(x[t])),
    emulator.Misaligned,
    "stores 16 bytes at an LDS address that is not a multiple of 16",
  ),
  "chunk before the start": (
    lambda t, s, r, x: CUDA.store_chunk(s[4 * t - 4], *words(x[t])),
    emulator.OutOfBounds,
    r"stores 16 bytes at LDS 0 .* at byte \[-16\] \(and the 15 after it\), which has 1280 bytes",
  ),
  "word in global memory": (
    lambda t, s, r, x: CUDA.store_word(x[t], words(x[t])[0]),
    emulator.OutOfBounds,
    "stores 4 bytes at argument 1, which is not in LDS",
  ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_mistake_in_a_statement(name):
  make, error, message = STATEMENTS[name]

  def body(o, x):
    t = threads(T)
    done = make(t, lds(0, 5 * T), reg(1, 4), x)
    return kernel("statement", [o[t].store(x.after(done)[t].load())], t)

  with pytest.raises(error, match=message):
    launch(body, X, np.resize(X, 5 * T), arch="sm_80")


INDEX = UOp(Ops.SPECIAL, dtypes.int, (UOp.const(4, dtypes.int),), "lidx0")
NUMBER = UOp.placeholder((4,), dtypes.float, 0).index(INDEX).load()
FIRST, ONE = (UOp(Ops.CAST, dtype, (UOp.const(x),)) for x, dtype in ((0, dtypes.int), (1.0, dtypes.float)))
PAIR = UOp(Ops.CUSTOM, dtypes.float, (UOp.stack(ONE, ONE),), HIP.fabs(NUMBER).arg)
REFUSED = {
  "is neither a workgroup nor a local index": INDEX.replace(arg="idx0"),
  "the emulator cannot execute this": UOp(Ops.REDUCE, dtypes.float, (NUMBER,), (Ops.ADD, ())),
  "an element of a vector value must be chosen by a constant": UOp.stack(NUMBER, NUMBER).index(INDEX),
  "indexes a vector of one element, which C renders as a scalar": NUMBER.index(FIRST),
  "indexes a vector that comes straight from Ops.CUSTOM, which renderers would treat as an address": PAIR.index(FIRST),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_may_contain(message):
  with pytest.raises(emulator.UnknownInstruction, match=message):
    Program("refused", "gfx1100", list(REFUSED[message].toposort()), [])


# ** reports **


def test_error_names_kernel_lanes_line_and_python_line():
  with (
    Context(DEV="EMU::gfx1100"),
    emulator.located(),
  ):
    inputs = [Tensor(x, device="EMU").realize() for x in (X, np.full(T, T, np.int32))]
    out = Tensor.custom_kernel(Tensor.empty(T, device="EMU"), *inputs, fxn=indexed("argument"))[0]
  with Context(DEV="EMU::gfx1100"), pytest.raises(emulator.OutOfBounds) as caught:
    out.realize()
  text = str(caught.value)
  assert "kernel indexed_argument: reads argument 1" in text
  assert "workgroup 0 local (0, 0, 0) wave 0" in text
  assert "LOAD argument1[argument2[lidx0]]" in text
  assert "test_emulator_checks.py:" in text


def test_checks_can_be_switched_off(monkeypatch):
  def unwritten(o, x):
    t, s = threads(T), lds(0, T)
    return kernel("unwritten", [o[t].store(s[t].load() + x[t].load())], t)

  with pytest.raises(emulator.Unwritten):
    launch(unwritten, X, X)
  monkeypatch.setenv("EMU_CHECK", "0")
  np.testing.assert_array_equal(launch(unwritten, X, X), X)
  with pytest.raises(RuntimeError, match="checks are off"):
    emulator.delete_each_barrier(on_emulator(unwritten, X))


def test_too_much_lds_and_too_many_threads():
  def big(size):
    def body(o, x):
      t, s = threads(T), lds(0, size)
      s = s.after(UOp.barrier(s[t].store(x[t].load())))
      return kernel(f"big{size}", [o[t].store(s[t].load())], t)

    return body

  np.testing.assert_array_equal(launch(big(16 << 10), X, X), X)
  with pytest.raises(emulator.LaunchError, match="a workgroup uses 65552 bytes of LDS, but gfx1100 has 65536"):
    launch(big((16 << 10) + 1), X, X)
  np.testing.assert_array_equal(launch(big((16 << 10) + 1), X, X, arch="gfx950"), X)

  def wide(o, x):
    t = threads(2048)
    return kernel("wide", [o[t].store(x[t].load())], t)

  many = np.zeros(2048, np.float32)
  with pytest.raises(emulator.LaunchError, match="a workgroup has 2048 threads, but gfx1100 allows 1024"):
    launch(wide, many, many)
