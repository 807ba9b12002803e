"""Each forward kernel of `conformance.SUBJECTS`: corner cases, drawn shapes and tiles, barriers, mistakes."""

import functools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from conformance import (
  CPU,
  EVERYWHERE,
  NVIDIA,
  ON_GPUS,
  ONCE,
  ONCE_EMULATED,
  ONCE_ON_GPUS,
  SUBJECTS,
  TARGETS,
  Sizes,
  Subject,
)
from helpers import drawn, on_device, placed
from hypothesis import assume, given
from hypothesis import strategies as st
from mistakes import ONE_SLOT, TERM_MISTAKES
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn import attention, flash
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.target import lds_limit
from uopattn.kernels import cpu_decode
from uopattn.proof.gate import numpy

Options = dict[str, Any]
OF_CASE = "subject", "arch", "dtype"
OF_ONE_KERNEL = [x for x in SUBJECTS.values() if len(x.kernel.SCHEDULE.kernels) == 1]  # which `flash` can be
ONE_OF_EACH_SIZE = (dtypes.half, dtypes.bfloat16, dtypes.float, dtypes.fp8e4m3)  # and the two of 16 bits


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
  return SUBJECTS[request.param]


def cases(listed: list[tuple[str, str, DType]]) -> pytest.MarkDecorator:
  """The test's kernel, machine and type; with --values those of other fragments of AMD, and of 8 bits on Hopper."""
  others = [("amd", arch, dtypes.half) for arch in SUBJECTS["amd"].arches]
  more = [case for case in others if others[0] in listed and case not in listed]
  # 8 bits on Hopper and AMD are in most as 16
  slow = [*(x for x in listed if x[0] in ("hopper8", "amd8")), *more]
  given = [*(x for x in listed if x not in slow), *(pytest.param(*x, marks=pytest.mark.slow) for x in slow)]
  names = lambda x: str(x).removeprefix("dtypes.")  # noqa: E731
  return pytest.mark.parametrize(OF_CASE, given, indirect=["subject"], ids=names)


def is_slow(name: str, shape: str) -> bool:
  """The other types of `cuda_forward` share its loops and its edges, which float16 meets in every corner.

  Those that remain of `cuda_wide_forward` have what is its own.
  """
  if name in ("wide", "hopper-wide"):
    return shape != "grouped"
  if name == "hopper8":
    return shape in ("one query", "one key")
  if name == "hopper32":
    return shape != "odd everywhere"
  if name == "amd8":
    return shape != "steps together"
  return name in ("float8", "float32", "turing") and shape not in (
    "grouped",
    "odd everywhere",
    "chunks that are half a step",
  )


SHAPES = [
  pytest.param(
    name,
    arch,
    dtype,
    shape,
    id=f"{name}-{arch}-{str(dtype).removeprefix('dtypes.')}-{shape}",
    marks=[pytest.mark.slow] if is_slow(name, shape) else [],
  )
  for name, arch, dtype in EVERYWHERE
  for shape in SUBJECTS[name].shapes
]


@pytest.mark.kinds(arch=TARGETS)
@pytest.mark.each("arch", "dtype", "is_causal")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize((*OF_CASE, "shape"), SHAPES, indirect=["subject"])
def test_matches_the_oracle(subject: Subject, arch: str, dtype: DType, shape: str, is_causal: bool) -> None:
  sizes = subject.shapes[shape]
  few = subject.kernel is cpu_decode  # whose queries are the last ones of the keys
  with subject.on(arch):
    q, k, v = subject.inputs(arch, sizes, dtype)
    subject.check(q, k, v, is_causal=is_causal, q_start=max(0, sizes[4] - sizes[3]) if few else 0)


HOPPER = {"hopper": 8, "hopper-wide": 8, "hopper8": 16, "hopper32": 1}  # what divides the head sizes
MORE_ARCHES = {"amd": ("gfx1151", "gfx1200"), "cuda": ("sm_86",)}
LARGER: dict[str, Sizes] = {
  "wide round": (1, 1, 1, 128, 128, 64, 64),
  "wide, one past the tiles": (1, 1, 1, 129, 129, 65, 65),
  "wide, one query": (2, 2, 2, 1, 150, 64, 64),
  "large odd head": (1, 1, 1, 20, 40, 150, 257),
}
ALIKE = ("gfx1151", "gfx1200", "gfx950", "sm_86", "sm_89", "sm_100", "sm_120")  # of `LOWERED_AS`
ONLY_THERE = ("float8", "amd8")  # kernels of these targets alone


def is_often_chosen(name: str, arch: str, sizes: Sizes) -> bool:
  """Whether `--values` may have a case; `test_chosen_tiles` has the tiles of choice of every target."""
  return sizes in LARGER.values() and (arch not in ALIKE or name in ONLY_THERE)


SLOW = [
  pytest.param(name, arch, dtype, sizes, marks=[] if is_often_chosen(name, arch, sizes) else [pytest.mark.slowest])
  for name, x in SUBJECTS.items()
  for arch in x.arches + MORE_ARCHES.get(name, ())
  for dtype in x.dtypes
  for sizes in [*x.shapes.values(), *LARGER.values()]
  if name not in HOPPER
  or not (sizes[5] % HOPPER[name] or sizes[6] % HOPPER[name] or max(sizes[5:]) > (128 if name == "hopper32" else 256))
]


@pytest.mark.slow
@pytest.mark.each("arch", "dtype", "q_start", "sizes", evenly=True)
@pytest.mark.parametrize("q_start", [-3, 0, 3])
@pytest.mark.parametrize((*OF_CASE, "sizes"), SLOW, indirect=["subject"], ids=str)
def test_matches_the_oracle_with_chosen_tiles(
  subject: Subject, arch: str, dtype: DType, sizes: Sizes, q_start: int
) -> None:
  with subject.on(arch, chosen=True):
    q, k, v = subject.inputs(arch, sizes, dtype)
    subject.check(q, k, v, is_causal=q_start != 0, q_start=q_start)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
@given(data=st.data())
@drawn(1, 1)
def test_any_shape(name: str, data: st.DataObject) -> None:
  subject = SUBJECTS[name]

  def draw(values: Any) -> Any:
    return data.draw(st.sampled_from(values) if isinstance(values, range | tuple) else values)

  arch, dtype, Dk, Dv = (draw(x) for x in (subject.arches, subject.dtypes, subject.head_dims, subject.head_dims))
  B, Hkv, group = (draw(st.integers(1, most)) for most in (2, 2, 3))
  M, N, q_start = (draw(st.integers(*x)) for x in ((1, subject.most_queries), (1, 150), (-100, 200)))
  is_causal, seed = draw(st.booleans()), draw(st.integers(0, 1000))
  with subject.on(arch, chosen=True):
    q, k, v = subject.inputs(arch, (B, Hkv * group, Hkv, M, N, Dk, Dv), dtype, seed)
    subject.check(q, k, v, is_causal=is_causal, q_start=q_start)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
@given(data=st.data())
@drawn(1, 1)
def test_any_tiles(name: str, data: st.DataObject) -> None:
  subject = SUBJECTS[name]
  assert subject.any_tiles is not None
  arch = data.draw(st.sampled_from(subject.arches))
  tiles, Dk = data.draw(subject.any_tiles(arch)), data.draw(st.sampled_from([x for x in subject.head_dims if x <= 40]))
  Dv = 3 * HOPPER[name] if HOPPER.get(name, 1) > 1 else 21
  if name in NVIDIA:
    assume(tiles.shared_bytes(Dk, Dv) <= lds_limit(arch))
  M, N = (data.draw(st.integers(1, most)) for most in (subject.most_queries, 150))
  is_causal = data.draw(st.booleans())
  heads = (4, 2) if arch in (CPU, "amx") else (2, 1)  # on CPUs `blocks_per_call` must divide the number of blocks
  with subject.on(arch, tiles):
    q, k, v = subject.inputs(arch, (1, *heads, M, N, Dk, Dv), subject.dtypes[0])
    if subject not in OF_ONE_KERNEL:
      subject.check(q, k, v, is_causal=is_causal)
      return
    shape = (1, heads[0], M)
    o = placed(np.full((*shape, Dv), math.nan, np.float32), q.dtype)
    lse = placed(np.full(shape, math.nan, np.float32))
    fxn = functools.partial(flash, tiles=tiles, causal=is_causal, enable_gqa=True)
    results = Tensor.custom_kernel(o, q, k, v, lse, fxn=fxn)
    Tensor.realize(results[0], results[4])
    subject.verify(q, k, v, results[0], results[4], is_causal=is_causal)


@cases(ON_GPUS)
@pytest.mark.kinds(arch=("gfx942", "gfx1201", "sm_75", "sm_80", "sm_89", "sm_90"), dtype=ONE_OF_EACH_SIZE)
@pytest.mark.each("arch", "dtype")
def test_chosen_tiles(subject: Subject, arch: str, dtype: DType) -> None:
  """They are right, without bank conflicts, and with no more products than there are; hidden tiles are skipped."""
  M, N, D = 128, 256, 64
  work = []
  with subject.on(arch, chosen=True):
    sources = subject.inputs(arch, (1, 1, 1, M, N, D, D), dtype)
    for is_causal in (False, True):
      with emulator.profile() as profile:
        subject.check(*sources, is_causal=is_causal)
      (found,) = (count for name, count in profile.kernels.items() if name.startswith("attention"))
      assert found.bank_conflicts == 0
      work.append(getattr(found, subject.work))
  full, causal = work
  assert causal < full
  if subject.flops is not None:
    assert full == subject.products(arch) * 2 * M * N * D / subject.flops


# The tiles of choice of apple9 that have bank conflicts; those of other targets have none.
CONFLICTING = {(dtypes.float16, (128, 128)), (dtypes.bfloat16, (64, 64)), (dtypes.bfloat16, (128, 128))}


def marks_of(arch: str, dtype: DType, size: tuple[int, int], chosen: bool) -> list[pytest.MarkDecorator]:
  if not chosen:
    return []
  # `test_chosen_tiles` has heads of 64 with the tiles of choice
  marks = [pytest.mark.slowest if size == (64, 64) else pytest.mark.slow]
  if arch == "apple9" and (dtype, size) in CONFLICTING:
    marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason="its tiles of choice have conflicts"))
  return marks


CONFLICTS = [
  pytest.param(
    name,
    arch,
    dtype,
    size,
    chosen,
    id=f"{name}-{arch}-{str(dtype).removeprefix('dtypes.')}-{size}-{'chosen' if chosen else 'small'}",
    marks=marks_of(arch, dtype, size, chosen),
  )
  for name, arch, dtype in ON_GPUS
  for size in SUBJECTS[name].conflict_free
  for chosen in (False, True)
]


@pytest.mark.kinds(dtype=ONE_OF_EACH_SIZE)
@pytest.mark.each("arch", "dtype", "size")
@pytest.mark.parametrize((*OF_CASE, "size", "chosen"), CONFLICTS, indirect=["subject"])
def test_no_bank_conflict(subject: Subject, arch: str, dtype: DType, size: tuple[int, int], chosen: bool) -> None:
  with subject.on(arch, chosen=chosen):
    sources = subject.inputs(arch, (1, 1, 1, 100, 130, *size), dtype)
    for is_causal in (False, True) if chosen else (True,):  # a causal kernel has the loop of a full one, and one more
      with emulator.profile() as profile:
        attention(*sources, is_causal=is_causal, backend="kernel").realize()
      assert [x.bank_conflicts for name, x in profile.kernels.items() if name.startswith("attention")] == [0]


@pytest.mark.kinds(dtype=ONE_OF_EACH_SIZE)
@pytest.mark.each("arch", "dtype", "sinks", evenly=True)
@cases(EVERYWHERE)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_that_see_no_key_are_zero(subject: Subject, arch: str, dtype: DType, sinks: bool) -> None:
  M = min(140, subject.most_queries)
  blind = M // 2
  given: Options = {"sinks": np.ones(1, np.float32)} if sinks else {}
  with subject.on(arch):
    given = {name: on_device(x) for name, x in given.items()}
    q, k, v = subject.inputs(arch, (1, 1, 1, M, 140, 16, 16), dtype)
    out, lse = attention(q, k, v, is_causal=True, q_start=-blind, return_lse=True, backend="kernel", **given)
    Tensor.realize(out, lse)
    o, l = numpy(out)[0, 0], lse.numpy()[0, 0]
  assert (o[:blind] == 0).all()
  assert (l[:blind] == (1 if sinks else -math.inf)).all()
  assert np.isfinite(l[blind:]).all()


@pytest.mark.each("scale")
@cases(ONCE)
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(subject: Subject, arch: str, dtype: DType, scale: float) -> None:
  with subject.on(arch):
    subject.check(*subject.inputs(arch, (1, 1, 1, min(40, subject.most_queries), 100, 16, 16), dtype), scale=scale)


BAD = [
  pytest.param(*case, bad, id=f"{case[0]}-{bad}", marks=[pytest.mark.slow] if case[0] == "amd8" else [])
  for case in ONCE
  for bad in (math.nan, math.inf)
  if case[2].itemsize > 1 or math.isnan(bad)  # casts to 8 bits saturate
]


@pytest.mark.each("bad", evenly=True)
@pytest.mark.parametrize((*OF_CASE, "bad"), BAD, indirect=["subject"])
def test_a_bad_key_reaches_the_rows_that_see_it_and_no_other(
  subject: Subject, arch: str, dtype: DType, bad: float
) -> None:
  M = min(130, subject.most_queries)
  with subject.on(arch):
    q, k, v = subject.inputs(arch, (1, 1, 1, M, M, 16, 16), dtype)
    keys = numpy(k).astype(np.float32)
    keys[:, :, -1] = bad
    out = numpy(attention(q, placed(keys, dtype), v, is_causal=True, backend="kernel"))[0, 0]
  assert np.isnan(out[-1]).all()
  assert np.isfinite(out[:-1]).all()


@cases(ONCE)
def test_a_bad_head_reaches_no_other(subject: Subject, arch: str, dtype: DType) -> None:
  """The rows after a head's last are the next head's: a tile that is not whole must not hold them."""
  with subject.on(arch):
    q, *kv = subject.inputs(arch, (1, 4, 2, min(70, subject.most_queries), 70, 16, 16), dtype)
    arrays = [numpy(x).astype(np.float32) for x in kv]
    for x in arrays:
      x[:, 1] = math.nan
    k, v = (placed(x, dtype) for x in arrays)
    out = numpy(attention(q, k, v, enable_gqa=True, backend="kernel"))[0]
  assert np.isfinite(out[:2]).all()
  assert np.isnan(out[2:]).all()


@pytest.mark.each("short", evenly=True)
@cases([case for case in ONCE_EMULATED if SUBJECTS[case[0]] in OF_ONE_KERNEL])
@pytest.mark.parametrize("short", ["o", "q", "k", "v"])
def test_a_shortened_buffer_is_caught(subject: Subject, arch: str, dtype: DType, short: str) -> None:
  """The kernel takes every buffer for 70 rows; one of them has 69."""
  assert subject.small is not None
  tiles = subject.small(arch)

  def body(*buffers: UOp) -> UOp:
    claimed = [UOp.placeholder((1, 70, 16), dtype, x.base.arg.slot) for x in buffers]
    return subject.kernel.forward(*claimed, rules=Rules(70, 70, scale=0.25), tiles=tiles)

  with subject.on(arch):
    tensors = [placed(np.zeros((1, 69 if x == short else 70, 16), np.float32), dtype) for x in "oqkv"]
    with pytest.raises(emulator.OutOfBounds, match=rf"argument {'oqkv'.index(short)}\b"):
      Tensor.custom_kernel(*tensors, fxn=body)[0].realize()


SYNCHRONISED = [
  pytest.param(name, arch, x.dtypes[0], x.synchronised(arch)[i], id=f"{name}-{arch}-{i}")
  for name, x in SUBJECTS.items()
  for arch in x.arches
  for i in range(len(x.synchronised(arch)))
]
RULES: dict[str, Options] = {
  "full": {},
  "causal": {"is_causal": True},
  "rules": {
    "is_causal": True,
    "q_start": np.array([0]),
    "kv_lengths": np.array([129]),
    "softcap": 3.0,
    "sinks": np.ones(1, np.float32),
    "score_mod": lambda score, b, h, i, j: score + 0.1 * (i - j),
    "attn_mask": np.linspace(-1, 1, 130, dtype=np.float32),
  },
}


@pytest.mark.kinds(arch=("gfx942", "sm_75", "sm_80", "sm_89", "sm_90", "cl", "amx"))
@pytest.mark.each("arch", "tiles", "rules", evenly=True)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize((*OF_CASE, "tiles"), SYNCHRONISED, indirect=["subject"])
def test_each_barrier_and_wait_deleted(subject: Subject, arch: str, dtype: DType, tiles: Any, rules: str) -> None:
  if subject in (SUBJECTS["hopper8"], SUBJECTS["hopper32"]) and rules == "rules":
    pytest.skip("has none of these")
  with subject.on(arch, tiles):
    # with 16 columns of Q instead of 32 each warp would copy just the rows that it reads, and need no barrier for them
    sources = subject.inputs(arch, (1, 1, 1, 130, 130, 64 if dtype.itemsize == 1 else 32, 32), dtype)
    given: Options = {name: on_device(x) for name, x in RULES[rules].items()}
    outcomes = emulator.delete_each_barrier(lambda: attention(*sources, backend="kernel", **given).realize())
  assert [str(o) for o in outcomes if o.caught is None] == []
  found = Counter(o.what for o in outcomes)
  if arch.startswith("gfx"):  # one before the loops, and two in each
    assert found == {"barrier": 3 if rules == "full" else 5}
    assert {type(o.caught) for o in outcomes} == {emulator.Race}
  elif arch.startswith("apple"):  # two for keys and two for values, in each loop; none after the last tile
    assert found == {"barrier": 7 if rules == "full" else 8}
    assert {type(o.caught) for o in outcomes} <= {emulator.Race, emulator.Unwritten}
  elif arch == "cl":  # for keys, maxima, values and the end, in each loop but after the last tile; and one for sums
    assert found == {"barrier": 8 if rules == "full" else 9}
    assert {type(o.caught) for o in outcomes} <= {emulator.Race, emulator.Unwritten}
  elif arch == "amx":
    assert found == {"tile_config": 1, "tile_release": 1}
  else:
    assert found.total() >= 3
    assert set(found) >= (
      {"mbarrier_wait", "wgmma_wait", "fence_proxy_async", "named_barrier_sync"}
      if subject is SUBJECTS["hopper32"]
      else {"mbarrier_wait", "wgmma_wait", "named_barrier_sync"}
      if subject is SUBJECTS["hopper-wide"]
      else {"mbarrier_wait" if tiles.producer else "fence_proxy_async", "wgmma_wait"}
      if subject is SUBJECTS["hopper"]
      else {"mbarrier_wait", "wgmma_wait", "fence_proxy_async"}
      if subject is SUBJECTS["hopper8"]
      else {"barrier"}
      if arch == "sm_75"
      else {"barrier", "cp_async_wait"}
    )


# A mistake in each phase, and in what kernels have alone.
BROKEN = (
  *(
    "no causal mask on the diagonal",
    "keys past the end counted",
    "no rescale of the accumulator",
    "last tile dropped",
  ),
  *("lanes of a query not joined", "halves of P exchanged", "values not transposed", "odd columns are the even ones"),
  *("rows not transposed", "old maximum forgotten", "half of the lanes", "terms 1 and 1 not multiplied"),
)
ELSEWHERE = {
  "halves of P exchanged": "gfx1100",  # an operand of gfx942 has 4 numbers, and no halves of 8
  **dict.fromkeys(TERM_MISTAKES, "gfx1201"),
}
MISTAKES = [
  pytest.param(
    name,
    ELSEWHERE.get(mistake, arch),
    dtype,
    mistake,
    id=f"{name}-{mistake}",
    marks=[pytest.mark.slow] if name == "amd8" else [],  # whose phases are those of `amd`
  )
  for name, arch, dtype in ONCE
  for mistake in SUBJECTS[name].mistakes
] + [
  pytest.param("amd", "gfx1100", dtypes.half, mistake, id=f"gfx1100-{mistake}", marks=pytest.mark.slow)
  for mistake in SUBJECTS["amd"].mistakes
  if mistake not in ELSEWHERE
]


@pytest.mark.kinds(mistake=BROKEN)
@pytest.mark.each("subject", "arch", "dtype")  # what a kernel shares with others is broken in one of them
@pytest.mark.parametrize((*OF_CASE, "mistake"), MISTAKES, indirect=["subject"])
def test_a_mistake_is_caught(subject: Subject, arch: str, dtype: DType, mistake: str) -> None:
  made = subject.mistakes[mistake]
  with subject.on(arch):
    sources = subject.inputs(arch, subject.mistaken, dtype)
    subject.check(*sources, **made.options)
    with made.made(), pytest.raises(AssertionError, match="worst at"):
      subject.check(*sources, **made.options)


@cases([case for case in ONCE_ON_GPUS if case[0] in NVIDIA])
def test_a_slot_filled_too_early_is_caught(subject: Subject, arch: str, dtype: DType) -> None:
  with subject.on(arch), ONE_SLOT.made(), pytest.raises(emulator.KernelError, match="LDS"):
    subject.check(*subject.inputs(arch, (1, 1, 1, 50, 300, 16, 16), dtype))
