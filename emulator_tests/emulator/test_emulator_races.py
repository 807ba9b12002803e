"""LDS races: found where two waves meet without a barrier, and nowhere else."""

from types import SimpleNamespace

import numpy as np
import pytest
from emulator_kernels import groups, kernel, launch, lds, loop, on_emulator, reg, threads
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.emulator.lanes import Run, Shape, wave_bits
from uopattn.emulator.memory import LDS

T = 64  # threads: two waves of 32
X = np.random.default_rng(0).standard_normal(T).astype(np.float32)


def only(outcomes):
  """What the one deletion that there is to try was caught by."""
  (outcome,) = outcomes
  return outcome.caught


def reverse(o, x):
  """Read what the other wave wrote."""
  t, s = threads(T), lds(0, T)
  s = s.after(UOp.barrier(s[t].store(x[t].load())))
  return kernel("reverse", [o[t].store(s[T - 1 - t].load())], t)


def own(o, x):
  """Read what this lane wrote: the barrier orders nothing."""
  t, s = threads(T), lds(0, T)
  s = s.after(UOp.barrier(s[t].store(x[t].load())))
  return kernel("own", [o[t].store(s[t].load())], t)


def overwrite(o, x):
  """Two waves write one address, one after the other."""
  t, s = threads(T), lds(0, T)
  first = UOp.barrier(s[t].store(x[t].load()))
  second = UOp.barrier(s.after(first)[T - 1 - t].store(x[t].load() + 1))
  return kernel("overwrite", [o[t].store(s.after(second)[T - 1 - t].load())], t)


def reuse(o, x):
  """Write over what another wave may still read."""
  t, s = threads(T), lds(0, T)
  first = UOp.barrier(s[t].store(x[t].load()))
  keep = reg(1, 1)
  read = keep[0].store(s.after(first)[T - 1 - t].load())
  again = UOp.barrier(s.after(UOp.barrier(read))[t].store(x[t].load() * 2))
  mine = s.after(again)[t].load()
  return kernel("reuse", [o[t].store(keep.after(read)[0].load() + mine)], t)


def test_read_after_write_needs_a_barrier():
  np.testing.assert_array_equal(launch(reverse, X, X), X[::-1])
  caught = only(emulator.delete_each_barrier(on_emulator(reverse, X)))
  assert isinstance(caught, emulator.Race)
  assert "reads LDS 0" in str(caught)
  assert "another wave wrote" in str(caught)


def test_a_barrier_that_orders_nothing_is_redundant():
  outcomes = emulator.delete_each_barrier(on_emulator(own, X))
  assert only(outcomes) is None
  assert "redundant" in str(outcomes[0])


def test_within_a_wave_no_barrier_is_needed():
  def swap(o, x):
    t, s = threads(T), lds(0, T)
    s = s.after(UOp.barrier(s[t].store(x[t].load())))
    return kernel("swap", [o[t].store(s[t ^ 31].load())], t)

  assert only(emulator.delete_each_barrier(on_emulator(swap, X))) is None
  on_wide = only(emulator.delete_each_barrier(on_emulator(reverse, X, arch="gfx942")))  # one wave of 64
  assert on_wide is None


@pytest.mark.parametrize(("count", "distance"), [(64, 1), (256, 1), (256, 64), (1024, 1), (1024, 512)])
def test_in_opencl_any_two_threads_need_a_barrier(count, distance):
  def exchange(o, x):
    t, s = threads(count), lds(0, count)
    s = s.after(UOp.barrier(s[t].store(x[t].load())))
    return kernel(f"exchange{count}_{distance}", [o[t].store(s[t ^ distance].load())], t)

  x = np.arange(count, dtype=np.float32)
  outcomes = emulator.delete_each_barrier(on_emulator(exchange, x, size=count, arch="cl"))
  assert isinstance(only(outcomes), emulator.Race)


@pytest.mark.parametrize("count", [2, 32, 33, 1024])
def test_waves_are_told_apart_by_bits(count):
  bits = wave_bits(np.arange(count), count)
  assert ((bits[:, None] & ~bits != 0) == ~np.eye(count, dtype=bool)).all()


def test_of_kernels_with_one_name_each_is_tried():
  def body(other):
    def fxn(o, x):
      t, s = threads(T), lds(0, T)
      s = s.after(UOp.barrier(s[t].store(x[t].load())))
      return kernel("one_name", [o[t].store(s[T - 1 - t if other else t].load())], t)

    return fxn

  outcomes = emulator.delete_each_barrier(
    lambda: [on_emulator(body(other), X)() for other in (False, True)], "one_name"
  )
  assert [type(x.caught) for x in outcomes] == [type(None), emulator.Race]


def test_what_would_try_nothing_is_an_error(monkeypatch):
  with pytest.raises(ValueError, match="no kernel other was launched, but reverse"):
    emulator.delete_each_barrier(on_emulator(reverse, X), "other")
  with pytest.raises(ValueError, match=r"no kernel .*was launched, but nothing"):
    emulator.delete_each_barrier(lambda: None)
  monkeypatch.setenv("EMU_TEXT", "1")
  with pytest.raises(RuntimeError, match="kernels run as text"):
    emulator.delete_each_barrier(on_emulator(reverse, X))


def test_write_after_write_needs_a_barrier():
  np.testing.assert_array_equal(launch(overwrite, X, X), X + 1)
  outcomes = emulator.delete_each_barrier(on_emulator(overwrite, X))
  assert isinstance(outcomes[0].caught, emulator.Race)
  assert "writes LDS 0" in str(outcomes[0].caught)
  assert "another wave wrote" in str(outcomes[0].caught)
  assert outcomes[1].caught is None  # each lane reads what it wrote itself


def test_write_after_read_needs_a_barrier():
  np.testing.assert_allclose(launch(reuse, X, X), X[::-1] + 2 * X)
  outcomes = emulator.delete_each_barrier(on_emulator(reuse, X))
  races = [str(o.caught) for o in outcomes if isinstance(o.caught, emulator.Race)]
  assert any("writes LDS 0" in race and "another wave read" in race for race in races)


@pytest.mark.parametrize("distance", [32, 1], ids=["two waves", "one wave"])
def test_one_instruction_storing_two_values_to_one_address(distance):
  def collide(o, x):
    t, s = threads(T), lds(0, 2 * T)
    s = s.after(UOp.barrier(s[(t // (2 * distance)) * distance + t % distance].store(x[t].load())))
    return kernel(f"collide{distance}", [o[t].store(s[0].load())], t)

  with pytest.raises(emulator.Race, match="different values"):
    launch(collide, X, X)
  assert (launch(collide, X, np.ones_like(X)) == 1).all()  # the same value from every lane is no race


def test_loop_needs_a_barrier_at_its_end():
  def rotate(o, x):
    t, s, acc = threads(T), lds(0, T), reg(1, 1)
    acc = acc.after(acc[0].store(0.0))
    i = loop(4)
    loaded = UOp.barrier(s.after(i)[t].store(x[t].load() + i.cast(dtypes.float)))
    add = acc[0].store(acc.after(i)[0].load() + s.after(loaded)[T - 1 - t].load())
    return kernel("rotate", [o[t].store(acc.after(UOp.barrier(add).end(i))[0].load())], t)

  np.testing.assert_allclose(launch(rotate, X, X), X[::-1] * 4 + 6, rtol=1e-5, atol=1e-5)
  outcomes = emulator.delete_each_barrier(on_emulator(rotate, X))
  assert [type(o.caught) for o in outcomes] == [emulator.Race, emulator.Race]
  assert "another wave read" in str(outcomes[1].caught)


def brute_force(plan, values):
  """Whether a plan of LDS accesses races, decided access by access from the definition."""
  content: dict[int, float] = {}
  events: list[tuple[int, str, int]] = []  # (address, kind, wave) since the last barrier
  for kind, addresses in plan:
    if kind == "barrier":
      events = []
      continue
    accesses = [(int(address), lane // 32, values[lane]) for lane, address in enumerate(addresses)]
    for address, wave, value in accesses:
      for other, what, by in events:
        if other != address or by == wave or (what == kind == "load"):
          continue
        if what == kind == "store" and content[address] == value:
          continue
        return True
    if kind == "store":
      stored: dict[int, float] = {}
      for address, _, value in accesses:
        if stored.setdefault(address, value) != value:
          return True
      content |= stored
    events += [(address, kind, wave) for address, wave, _ in accesses]
  return False


ADDRESSES = {
  "own": np.arange(T),
  "wave": np.arange(T) ^ 31,
  "other": T - 1 - np.arange(T),
  "shared": np.arange(T) // 2,
  "one": np.zeros(T, int),
}
ACCESS = st.one_of(
  st.just(("barrier", None)),
  st.tuples(st.sampled_from(["load", "store"]), st.sampled_from(sorted(ADDRESSES))),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACCESS, max_size=7), st.booleans())
def test_races_are_found_exactly(plan, all_equal):
  """Random accesses by two waves against a brute-force reading of the definition."""
  values = np.zeros(T, np.float32) if all_equal else np.arange(T, dtype=np.float32)
  steps = [("store", "own"), ("barrier", None), *plan]
  run = Run("random", "gfx1100", Shape(1, T, 32), (T, 1, 1), True, None)
  memory, u = LDS(run, "LDS", 4 * T, 4), UOp.const(0)
  races = False
  try:
    for kind, where in steps:
      if kind == "barrier":
        memory.barrier(None)
      elif kind == "store":
        memory.store(u, ADDRESSES[where], dtypes.float, [values])
      else:
        memory.load(u, ADDRESSES[where], dtypes.float, 1)
  except emulator.Race:
    races = True
  assert races == brute_force([(kind, ADDRESSES.get(where)) for kind, where in steps], values)


def test_a_barrier_orders_its_own_workgroup_only():
  run = Run("two groups", "gfx1100", Shape(2, T, 32), (T, 1, 1), True, None)
  memory, u, lane = LDS(run, "LDS", 4 * T, 4), UOp.const(0), np.tile(np.arange(T), 2)
  memory.store(u, lane, dtypes.float, [np.zeros(2 * T, np.float32)])
  memory.barrier(np.array([False, True]))
  run.mask = run.group == 1
  memory.load(u, T - 1 - lane, dtypes.float, 1)
  run.mask = run.group == 0
  with pytest.raises(emulator.Race, match="workgroup 0"):
    memory.load(u, T - 1 - lane, dtypes.float, 1)


def test_a_write_over_a_bulk_copy_needs_a_wait_for_it():
  run = Run("copied", "sm_90", Shape(1, T, 32), (T, 1, 1), True, None)
  run.asynchronous, run.clock = True, 1
  knows = np.array([[True, True], [True, False]])  # only wave 0 knows that copy 1 has landed
  run.tracks = SimpleNamespace(seen=np.zeros((2, 2), int), copies=knows)
  memory, u, values = LDS(run, "LDS", 4 * T, 4), UOp.const(0), [np.zeros(T, np.float32)]
  memory.landed(np.arange(T), 1)
  run.mask = run.wave == 0
  memory.store(u, np.arange(T), dtypes.float, values)
  run.mask = run.wave == 1
  with pytest.raises(
    emulator.Race, match=r"writes LDS at byte \[128, .*, which a bulk copy wrote, without a wait for it"
  ):
    memory.store(u, np.arange(T), dtypes.float, values)


@pytest.mark.parametrize("distance", [31, 32])
def test_no_two_workgroups_store_to_the_same_byte(distance):
  """Each stores a row of 32 halves, two at a time, `distance` halves behind the one before."""

  def body(o):
    t, group = threads(16), groups(300)
    at = group * distance + t * 2
    return kernel("rows", [UOp.group(o[at].store(1), o[at + 1].store(2))], t, group)

  out = np.zeros(300 * 32, np.float16)
  if distance == 32:
    np.testing.assert_array_equal(launch(body, out), np.tile([1, 2], 300 * 16))
  else:
    with pytest.raises(emulator.Race, match=r"argument 0 at byte \[62, .*\], to which another workgroup stores too"):
      launch(body, out)
