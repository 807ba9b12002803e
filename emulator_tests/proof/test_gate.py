"""The gate must let right outputs through, and no wrong one."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated import Case, Kernel, of_type
from tinygrad import Tensor, dtypes

import uopattn.proof.gate as verify_module
from uopattn.dsl.schedule import DTYPES_8
from uopattn.proof.gate import Gate, GradientGate, Report, compare, numpy, verify
from uopattn.proof.oracle import EXACT, PRECISIONS, Array, Precision, oracle

N, D, TILE = 192, 64, 64
INPUTS = tuple(np.random.default_rng(3).normal(size=(1, 2, N, D)).astype(np.float32) for _ in range(3))


def attend(q: Array, k: Array, v: Array) -> Array:
  return oracle(q, k, v)[0]


def online(q: Array, k: Array, v: Array, rescale: bool) -> Array:
  """FlashAttention in numpy, tile by tile, with or without the rescale of the accumulator."""
  scores = q @ k.swapaxes(-1, -2) / np.sqrt(D)
  m, l, acc = np.full(q.shape[:3], -np.inf)[..., None], 0.0, np.zeros_like(q)
  for start in range(0, N, TILE):
    tile = scores[..., start : start + TILE]
    m_new = np.maximum(m, tile.max(-1, keepdims=True))
    p, alpha = np.exp(tile - m_new), np.exp(m - m_new)
    l = l * alpha + p.sum(-1, keepdims=True)
    acc = acc * (alpha if rescale else 1.0) + p @ v[:, :, start : start + TILE]
    m = m_new
  return acc / l


WRONG: dict[str, Callable[[Array, Array, Array], Array]] = {
  "V transposed": lambda q, k, v: attend(
    q, k, np.concatenate([v[:, :, i : i + D].swapaxes(-1, -2) for i in range(0, N, D)], 2)),
  "no rescale of the accumulator": lambda q, k, v: online(q, k, v, rescale=False),
  "last key tile dropped": lambda q, k, v: attend(q, k[:, :, :-TILE], v[:, :, :-TILE]),
  "last key dropped": lambda q, k, v: attend(q, k[:, :, :-1], v[:, :, :-1]),
  "keys shuffled": lambda q, k, v: attend(q, k[:, :, ::-1], v),
  "scale missing": lambda q, k, v: oracle(q, k, v, scale=1.0)[0],
  "causal by mistake": lambda q, k, v: oracle(q, k, v, is_causal=True)[0],
  "mean of V": lambda q, k, v: np.broadcast_to(v.mean(2, keepdims=True), v.shape),
  "zeros": lambda q, k, v: np.zeros_like(v),
  "heads swapped": lambda q, k, v: attend(q, k[:, ::-1], v[:, ::-1]),
  "NaN in one element": lambda q, k, v: np.where(np.arange(v.size).reshape(v.shape) == 77, np.nan, attend(q, k, v)),
  "one element off": lambda q, k, v: attend(q, k, v) + (np.arange(v.size).reshape(v.shape) == 77) * 0.5,
  "one element far off": lambda q, k, v: attend(q, k, v) + (np.arange(v.size).reshape(v.shape) == 77) * 3.0,
  "inf in one element": lambda q, k, v: np.where(np.arange(v.size).reshape(v.shape) == 77, np.inf, attend(q, k, v)),
}  # fmt: skip


# An output in 8 bits does not show these, as it might be as far off by its roundings.
TOO_FINE = ("last key dropped", "scale missing", "causal by mistake", "one element off")


@functools.cache
def gate_of(dtype) -> Gate:
  return Gate.of(*(Tensor(x).cast(dtype) for x in INPUTS))


def judged(out: Array, dtype) -> bool:
  """What the gate says of an output, given to it in `dtype` together with inputs in `dtype`."""
  return gate_of(dtype).output(numpy(Tensor(np.ascontiguousarray(out, np.float32)).cast(dtype))).correct


REJECTED = [(name, dtype) for name in WRONG for dtype in PRECISIONS if dtype not in DTYPES_8 or name not in TOO_FINE]


@pytest.mark.parametrize(("name", "dtype"), REJECTED)
def test_rejects(name: str, dtype) -> None:
  assert not judged(WRONG[name](*INPUTS), dtype)


@pytest.mark.parametrize("dtype", DTYPES_8)
@pytest.mark.parametrize("options", [{"scale": 1.0}, {"is_causal": True}, {}], ids=str)
def test_the_log_sum_exp_shows_what_8_bits_hide(options: dict[str, Any], dtype) -> None:
  q, k, v = (numpy(Tensor(x).cast(dtype)) for x in INPUTS)
  keys = slice(None) if options else slice(-1)  # or the last key dropped
  wrong = oracle(q, k[:, :, keys], v[:, :, keys], **options)[1].astype(np.float32)
  gate = Gate.of_arrays(q, k, v, dtype)
  assert gate.lse(oracle(q, k, v)[1].astype(np.float32)).correct
  assert not gate.lse(wrong).correct


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_accepts_the_truth(dtype) -> None:
  q, k, v = (numpy(Tensor(x).cast(dtype)).astype(np.float32) for x in INPUTS)
  assert judged(attend(q, k, v), dtype)
  assert judged(online(q, k, v, rescale=True), dtype)


def test_infinities_must_be_where_the_oracle_has_them() -> None:
  exact = np.array([1.0, -np.inf, 2.0])
  assert compare("lse", exact, exact, exact, 2.0**-24).correct
  for got in ([1.0, np.inf, 2.0], [1.0, 0.0, 2.0], [-np.inf, -np.inf, 2.0], [1.0, np.nan, 2.0]):
    report = compare("lse", np.array(got), exact, exact, 2.0**-24)
    assert not report.correct
    assert report.wrong == 1


def test_nan_never_passes_even_where_the_oracle_has_it() -> None:
  exact = np.array([np.nan, 1.0])
  assert not compare("output", exact, exact, exact, 2.0**-24).correct


def test_zeros_must_be_zeros_where_no_row_sees_a_key() -> None:
  zeros = np.zeros((1, 1, 4, 4))
  assert compare("output", zeros, zeros, zeros, 2.0**-11).correct
  assert not compare("output", zeros + 1e-7, zeros, zeros, 2.0**-11).correct


def test_names_the_worst_element() -> None:
  exact = np.ones((2, 3))
  got = exact.copy()
  got[1, 2] = 1.5
  report = compare("output", got, exact, exact, 2.0**-11)
  assert (report.worst, report.largest) == ((1, 2), 0.5)


def test_shapes_must_agree() -> None:
  with pytest.raises(ValueError, match=r"output has shape \(2,\)"):
    compare("output", np.ones(2), np.ones(3), np.ones(3), 2.0**-24)


def test_lse_is_judged_as_float32_whatever_q_is() -> None:
  q, k, v = (Tensor(x).cast(dtypes.half).realize() for x in INPUTS)
  exact, lse = oracle(*(x.float().numpy() for x in (q, k, v)))
  out = Tensor(exact.astype(np.float32)).cast(dtypes.half)
  assert all(r.correct for r in verify(q, k, v, out, Tensor(lse.astype(np.float32))))
  assert not all(r.correct for r in verify(q, k, v, out, Tensor((lse + 1e-4).astype(np.float32))))


@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.float])
def test_a_score_whose_terms_cancel_has_their_error(dtype) -> None:
  """Of one key: the naive computation may be right by chance. Off by much more is still off."""
  seeds = []
  for seed in range(2000):
    q, k = (of_type(np.random.default_rng((seed, i)).normal(size=(1, 1, 1, 33)), dtype) for i in range(2))
    if abs((q * k).sum()) < 0.02:
      seeds.append(seed)
      gate = Gate.of_arrays(q, k, k, dtype)
      terms = (q * k).astype(np.float32)[0, 0, 0] * np.float32(33**-0.5)
      for order in (range(33), range(32, -1, -1)):
        lse = functools.reduce(lambda total, i: np.float32(total + terms[i]), order, np.float32(0)).reshape(1, 1, 1)
        assert gate.lse(lse).correct
        assert not gate.lse(lse + np.float32(1e-5)).correct
  assert len(seeds) > 2


def test_a_useless_naive_computation_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
  def broken(*arrays: Array, precision: Precision = EXACT, **options: Any) -> tuple[Array, Array]:
    out, lse = oracle(*arrays, precision=precision, **options)
    return (out if precision is EXACT else out + 1), lse

  monkeypatch.setattr(verify_module, "oracle", broken)
  with pytest.raises(ArithmeticError, match="naive computation in float is off by"):
    Gate.of(*(Tensor(x) for x in INPUTS))


HEADS, KEYS, HEAD_SIZE = 4, 1024, 32
FAINT_INPUTS = tuple(
  np.random.default_rng(4).normal(size=(1, HEADS, rows, HEAD_SIZE)).astype(np.float32) for rows in (64, KEYS, KEYS)
)


def faint(dtype, mistake: Callable[[Array], Array], inputs: tuple[Array, ...] = FAINT_INPUTS) -> Report:
  """What the gate says of a right kernel's output that `mistake` changes, in `dtype`."""
  q, k, v = (of_type(x, dtype) for x in inputs)
  out, _ = Kernel().forward(q, k, v, dtype)
  return Gate.of_arrays(q, k, v, dtype).output(of_type(mistake(out), dtype))


def kinds(report: Report) -> set[str]:
  return {fault.kind for fault in report.faults}


@pytest.mark.parametrize(
  ("dtype", "factor"), [(dtypes.float32, 1.00001), (dtypes.float16, 1.001), (dtypes.bfloat16, 1.01)], ids=str
)
def test_a_factor_below_the_rounding_noise_is_seen(dtype, factor: float) -> None:
  assert faint(dtype, lambda out: out).correct
  report = faint(dtype, lambda out: out * factor)
  assert not report.correct
  assert "head" in kinds(report)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
def test_a_factor_of_one_head_is_seen_and_named(dtype) -> None:
  report = faint(dtype, lambda out: out * np.where(np.arange(HEADS) == 2, 1.003, 1)[:, None, None])
  (fault,) = (fault for fault in report.faults if fault.kind == "head")
  assert fault.index == (0, 2)
  assert fault.size == pytest.approx(0.003, rel=0.2)
  assert f"head (0, 2) is too large, as a share of itself, by {fault.size:.3g} (bound " in str(report)
  assert report.record()["faults"]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("place", [(0, 1, 5, 7), (0, 3, 63, 0)], ids=str)
def test_an_element_off_by_a_third_of_the_deviation_is_seen(place: tuple[int, ...], dtype) -> None:
  def mistake(out: Array) -> Array:
    out[place] += 0.3 * out.std()
    return out

  (fault,) = (fault for fault in faint(dtype, mistake).faults if fault.kind == "element")
  assert fault.index == place


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("M", [1, 8])
def test_one_key_of_many_left_out_of_the_product_is_seen(M: int, dtype) -> None:
  random, left_out = np.random.default_rng(5), 1234
  q, k, v = (of_type(random.normal(size=(1, 2, rows, 64)), dtype) for rows in (M, 4097, 4097))
  weight = np.exp((q @ k[:, :, left_out, :, None])[..., 0] / 8 - oracle(q, k, v)[1])

  def mistake(out: Array) -> Array:
    out[0, 1] -= weight[0, 1, :, None] * v[0, 1, left_out]
    return out

  assert faint(dtype, lambda out: out, (q, k, v)).correct
  (fault,) = (fault for fault in faint(dtype, mistake, (q, k, v)).faults if fault.kind == "key")
  assert fault.index == (0, 1, left_out)
  assert fault.size == pytest.approx(-1, abs=0.2)


@pytest.mark.parametrize(("dtype", "factor"), [(dtypes.float16, 1.002), (dtypes.bfloat16, 1.015)], ids=str)
def test_a_tile_of_keys_that_counts_too_much_is_seen(dtype, factor: float) -> None:
  """As where the accumulator is rescaled wrongly, for one tile."""
  q, k, v = (of_type(x, dtype) for x in FAINT_INPUTS)
  tile = slice(3 * 64, 4 * 64)
  weights = np.exp(q @ k[:, :, tile].swapaxes(-1, -2) * HEAD_SIZE**-0.5 - oracle(q, k, v)[1][..., None])
  report = faint(dtype, lambda out: out + (factor - 1) * weights @ v[:, :, tile])
  assert kinds(report) == {"tile"}
  assert report.faults[0].index[2] == 3


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_the_rounding_of_a_weight_that_is_most_of_its_tile_is_no_fault(dtype) -> None:
  """It is the same in all columns. The largest weight, which is 1, is rounded where scales of values multiply it."""
  k, v = (of_type(x, dtype) for x in np.random.default_rng(9).normal(size=(2, 1, 1, 77, 320)))
  gate = Gate.of_arrays(k[:, :, 70:71], k, v, dtype)
  rounding = gate.unit * v[0, 0, 70]
  assert gate.output(of_type(gate.exact + 0.9 * rounding, dtype)).correct
  assert "tile" in kinds(gate.output(of_type(gate.exact + 6 * rounding, dtype)))


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_roundings_that_rows_share_are_no_fault(dtype) -> None:
  """Rows that are alike have the same roundings, so their mean is no smaller: by itself it looks like a bias."""
  random = np.random.default_rng(6)
  q, k, v = (of_type(random.normal(size=(1, 1, rows, 16)), dtype) for rows in (1, 40, 40))
  q = q.repeat(400, 2)
  gate = Gate.of_arrays(q, k, v, dtype)
  assert gate.output(Kernel(tile=7).forward(q, k, v, dtype)[0]).correct
  assert not gate.output(of_type(1.01 * gate.exact, dtype)).correct


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [0, 8, 51])
def test_roundings_that_most_rows_share_are_no_fault(seed: int, dtype) -> None:
  """Of queries that are 0, causal, with a bias: from the last key on they are alike, but most of O is before."""
  random = np.random.default_rng(seed)
  k, v = (of_type(random.normal(size=(1, 1, 128, 16)), dtype) for _ in range(2))
  q = np.zeros((1, 1, 400, 16), np.float32)
  rules: dict[str, Any] = {"is_causal": True, "attn_mask": random.normal(size=(1, 1, 1, 128)).astype(np.float32)}
  gate = Gate.of_arrays(q, k, v, dtype, **rules)
  out, _ = Kernel().forward(q, k, v, dtype, **rules)
  assert gate.output(out).correct
  assert not gate.output(of_type(1.02 * out, dtype)).correct


def test_sums_that_tensor_cores_cut_off_are_no_fault_on_their_devices() -> None:
  """Over 8192 keys with values of one sign the output is 5e-5 too small; 4e-4 too small is a fault anywhere."""
  random = np.random.default_rng(7)
  q, k, v = (of_type(random.normal(size=(1, 1, rows, 32)), dtypes.float16) for rows in (160, 8192, 8192))
  v = np.abs(v)
  out, _ = Kernel(cut=True).forward(q, k, v, dtypes.float16)
  elsewhere, there = (Gate.of_arrays(q, k, v, dtypes.float16, device=x) for x in ("CPU", "CUDA:1"))
  assert "head" in kinds(elsewhere.output(out))
  assert there.output(out).correct
  assert "head" in kinds(there.output((1 - 4e-4) * out))


def check_case(seed: int, any_magnitude: bool) -> bool:
  """Fails if a right result does not pass; false where the naive computation is no measure."""
  case = Case.drawn(seed, tuple(PRECISIONS))
  case = case.of_any_magnitude(seed) if any_magnitude else case
  with np.errstate(all="ignore"):
    try:
      gate = Gate.of_arrays(*case.inputs, case.dtype, tf32=case.kernel.tf32, **case.rules)
    except ArithmeticError:
      return False
    out, lse = case.kernel.forward(*case.inputs, case.dtype, **case.rules)
  reports = [gate.output(out)]
  if not (case.kernel.sums_rounded or case.kernel.scales_first):  # which the LSE, as it is float32, does not forgive
    reports.append(gate.lse(lse))
  for report in reports:
    assert report.correct, f"{case.kernel}, {case.rules}: {report}"
  if reports[0].relative_bound < 0.5 and np.square(gate.exact).mean() > 0.01:  # else zeros are as good as anything
    assert not gate.output(0 * out).correct
  assert not gate.output(np.where(np.arange(out.size).reshape(out.shape) == out.size // 2, np.nan, out)).correct
  return True


@pytest.mark.parametrize("any_magnitude", [False, True], ids=["", "any magnitude"])
@pytest.mark.parametrize("seed", range(0, 80, 10))
def test_right_results_pass(seed: int, any_magnitude: bool) -> None:
  assert sum(check_case(each, any_magnitude) for each in range(seed, seed + 10)) > 6


@pytest.mark.slow
@pytest.mark.each("any_magnitude", "seed", evenly=True)
@pytest.mark.parametrize("any_magnitude", [False, True], ids=["", "any magnitude"])
@pytest.mark.parametrize(
  "seed", [pytest.param(x, marks=pytest.mark.slowest if x % 200 else ()) for x in range(1000, 3000, 100)]
)
def test_many_right_results_pass(seed: int, any_magnitude: bool) -> None:
  assert sum(check_case(each, any_magnitude) for each in range(seed, seed + 100)) > 85


def test_equal_keys_of_large_scores_share_their_weight() -> None:
  """Float32 does not hold an LSE of 1e16 closely enough to tell a weight of a third from none."""
  random = np.random.default_rng(8)
  q, k, v = (random.standard_normal((1, 1, rows, 2)).astype(np.float32) for rows in (100, 11, 33))
  q, k = q * np.float32(1e-2), (k * np.float32(1e18)).repeat(3, 2)
  out, lse = Kernel().forward(q, k, v, dtypes.float32)
  gate = Gate.of_arrays(q, k, v, dtypes.float32)
  assert gate.output(out).correct
  assert gate.lse(lse).correct


def test_bounds_follow_what_float32_leaves_of_large_scores() -> None:
  """The naive computation sums products in one order of many, in which its error may be small by chance."""
  random = np.random.default_rng(0)
  q, k, v = (random.standard_normal((2, *shape), np.float32) for shape in ((4, 3, 24), (2, 150, 24), (2, 150, 40)))
  q *= np.float32(1e4)
  gate = Gate.of_arrays(q, k, v, dtypes.float32, softcap=20.0)
  largest = 0.0
  for _ in range(60):
    order = random.permutation(24)
    out, _ = Kernel().forward(q[..., order], k[..., order], v, dtypes.float32, softcap=20.0)
    report = gate.output(out)
    assert report.correct, report
    largest = max(largest, report.largest)
  assert largest > compare("output", gate.naive, gate.exact, gate.naive, gate.unit).largest_bound
  assert not gate.output((gate.exact * (1 + 1e-4)).astype(np.float32)).correct


SIZES = {
  "no keys": (2, 4, 2, 3, 0),
  "no queries": (2, 4, 2, 0, 5),
  "no batches": (0, 4, 2, 3, 5),
  "nothing": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "sinks": True}], ids=["", "sinks"])
@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_0(case: str, options: dict[str, Any]) -> None:
  B, Hq, Hkv, M, N = SIZES[case]
  q, k, v = (np.ones(shape, np.float32) for shape in ((B, Hq, M, 8), (B, Hkv, N, 8), (B, Hkv, N, 6)))
  options = options | ({"sinks": np.arange(Hq, dtype=np.float32)} if "sinks" in options else {})
  gate = Gate.of_arrays(q, k, v, dtypes.float32, **options)
  out, lse = np.zeros((B, Hq, M, 6), np.float32), np.full((B, Hq, M), -np.inf, np.float32)
  if "sinks" in options:
    lse[:] = options["sinks"][:, None]
  assert gate.output(out).correct
  assert gate.lse(lse).correct
  assert gate.output(out + 1).correct == (out.size == 0)
  assert gate.lse(np.ones_like(lse)).correct == (out.size == 0)
  do = np.ones(out.shape, np.float32)
  gradients = GradientGate.of_arrays(q, k, v, do, dtypes.float32, **options)
  for x, name in zip((q, k, v), "qkv", strict=True):
    assert gradients.reports(**{name: x * 0})[0].correct
    assert gradients.reports(**{name: x})[0].correct == (x.size == 0)
