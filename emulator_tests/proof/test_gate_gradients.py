"""The gate must let right gradients through, and no wrong one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES
from simulated import LARGEST, Case, Kernel, of_type
from tinygrad import Tensor, dtypes

from uopattn.proof.gate import GradientGate, Report, numpy, verify_gradients
from uopattn.proof.oracle import Array, Rules, gradients, oracle, slope, unbroadcast

HEADS, KEY_HEADS, M, N, D, TILE = 4, 2, 96, 192, 32, 64
random = np.random.default_rng(3)
Q, K, V, DO = (
  random.normal(size=(1, heads, rows, D)).astype(np.float32)
  for heads, rows in ((HEADS, M), (KEY_HEADS, N), (KEY_HEADS, N), (HEADS, M))
)
Named = dict[str, Array]


def by_formulae(
  q: Array, k: Array, v: Array, do: Array, scale: float = D**-0.5, of_delta: float = 1.0, heads: Any = slice(None)
) -> Named:
  """The gradients in float64; in dK and dV those of some heads of each group alone."""
  group = HEADS // KEY_HEADS
  out, lse = oracle(q, k, v)
  k_all, v_all = (x.repeat(group, 1) for x in (k, v))
  p = np.exp(q @ k_all.swapaxes(-1, -2) * D**-0.5 - lse[..., None])
  dp = do @ v_all.swapaxes(-1, -2)
  dqk = p * (dp - of_delta * (out * do).sum(-1, keepdims=True)) * scale
  dk, dv = dqk.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
  shape = (1, KEY_HEADS, group, N, D)
  return {"q": dqk @ k_all, "k": dk.reshape(shape)[:, :, heads].sum(2), "v": dv.reshape(shape)[:, :, heads].sum(2)}


def without_last_tile(q: Array, k: Array, v: Array, do: Array, *names: str) -> Named:
  """The gradient of the last tile of keys dropped."""
  found = by_formulae(q, k, v, do)
  for name in names:
    found[name][:, :, -TILE:] = 0
  return found


def of_fewer_keys(q: Array, k: Array, v: Array, do: Array) -> Named:
  """dQ without the last tile of keys."""
  found = by_formulae(q, k, v, do)
  last = gradients(q, k[:, :, :-TILE], v[:, :, :-TILE], do)
  return found | {"q": last.q}


WRONG: dict[str, Callable[[Array, Array, Array, Array], Named]] = {
  "delta missing": lambda q, k, v, do: by_formulae(q, k, v, do, of_delta=0.0),
  "delta of the wrong sign": lambda q, k, v, do: by_formulae(q, k, v, do, of_delta=-1.0),
  "scale missing": lambda q, k, v, do: by_formulae(q, k, v, do, scale=1.0),
  "gradients of K and V swapped": lambda *x: {a: by_formulae(*x)[b] for a, b in (("q", "q"), ("k", "v"), ("v", "k"))},
  "a head of the group left out": lambda q, k, v, do: by_formulae(q, k, v, do, heads=slice(0, 1)),
  "last tile of keys dropped in dK": lambda *x: without_last_tile(*x, "k"),
  "last tile of keys dropped in dV": lambda *x: without_last_tile(*x, "v"),
  "last tile of keys dropped in dQ": of_fewer_keys,
  "causal by mistake": lambda *x: gradients(*x, is_causal=True).named(),
  "zeros": lambda *x: {name: 0 * g for name, g in by_formulae(*x).items()},
  "NaN in one element": lambda *x: {
    name: np.where(np.arange(g.size).reshape(g.shape) == 77, np.nan, g) for name, g in by_formulae(*x).items()
  },
}


def judged(made: Callable[..., Named], dtype: Any) -> dict[str, bool]:
  """What the gate says of gradients, given to it in `dtype` together with inputs in `dtype`."""
  q, k, v, do = (Tensor(x).cast(dtype).realize() for x in (Q, K, V, DO))
  got = made(*(numpy(x).astype(np.float64) for x in (q, k, v, do)))
  tensors = {name: Tensor(np.ascontiguousarray(x, np.float32)).cast(dtype) for name, x in got.items()}
  reports = verify_gradients(q, k, v, do, tensors)
  return {name: report.correct for name, report in zip(tensors, reports, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_rejects(name: str, dtype: Any) -> None:
  assert not all(judged(WRONG[name], dtype).values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_what_is_right(dtype: Any) -> None:
  assert judged(by_formulae, dtype) == {"q": True, "k": True, "v": True}


def test_each_gradient_is_judged_alone() -> None:
  assert judged(WRONG["last tile of keys dropped in dK"], dtypes.half) == {"q": True, "k": False, "v": True}
  assert judged(of_fewer_keys, dtypes.half) == {"q": False, "k": True, "v": True}
  assert judged(WRONG["a head of the group left out"], dtypes.half) == {"q": True, "k": False, "v": False}


def test_gradients_of_sinks_and_masks_are_judged() -> None:
  q, k, v, do = map(Tensor, (Q, K, V, DO))
  options: dict[str, Any] = {
    "sinks": random.normal(size=HEADS).astype(np.float32),
    "attn_mask": random.normal(size=(M, N)).astype(np.float32),
  }
  right = {name: Tensor(x.astype(np.float32)) for name, x in gradients(Q, K, V, DO, **options).named().items()}
  assert all(report.correct for report in verify_gradients(q, k, v, do, right, **options))
  for name in options:
    for wrong in (right[name] * 1.001, -right[name], right[name] * 0):
      (report,) = verify_gradients(q, k, v, do, {name: wrong}, **options)
      assert not report.correct


def test_slope_and_broadcast() -> None:
  x = np.linspace(-3, 3, 12).reshape(3, 4)
  i, j = np.arange(3)[:, None], np.arange(4)
  rules = Rules(softcap=2.0, score_mod=lambda s, b, h, i, j: s * s + j)
  want = 2 * (2 * np.tanh(x / 2)) * (1 - np.tanh(x / 2) ** 2)
  np.testing.assert_allclose(slope(rules, x, 0, 0, i, j), want, atol=1e-8)
  np.testing.assert_array_equal(slope(Rules(), x, 0, 0, i, j), np.ones((3, 4)))
  grad = np.arange(24.0).reshape(2, 3, 4)
  np.testing.assert_array_equal(unbroadcast(grad, (4,)), grad.sum((0, 1)))
  np.testing.assert_array_equal(unbroadcast(grad, (3, 1)), grad.sum((0, 2))[:, None])
  np.testing.assert_array_equal(unbroadcast(grad, (2, 1, 4)), grad.sum(1, keepdims=True))


TYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


def faint(dtype: Any, mistake: Callable[[Array], Array]) -> list[Report]:
  """What the gate says of a right kernel's gradients that `mistake` changes, in `dtype`."""
  q, k, v, do = (of_type(x, dtype) for x in (Q, K, V, DO))
  found = Kernel().backward(q, k, v, do, dtype)
  return GradientGate.of_arrays(q, k, v, do, dtype).reports(**{n: of_type(mistake(x), dtype) for n, x in found.items()})


def of_one_head(x: Array) -> Array:
  x[:, 1] *= 1.003
  return x


def of_one_element(x: Array) -> Array:
  x[0, 1, 5, 7] += 0.3 * x.std()
  return x


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_faint_mistakes_are_seen(dtype: Any) -> None:
  factor = {dtypes.float32: 1.00003, dtypes.float16: 1.001, dtypes.bfloat16: 1.01}[dtype]
  assert all(report.correct for report in faint(dtype, lambda x: x))
  for mistake, kind, place in (
    (lambda x: x * factor, "head", None),
    (of_one_head, "head", (0, 1)),
    (of_one_element, "element", (0, 1, 5, 7)),
  ):
    for report in faint(dtype, mistake):
      found = {fault.kind: fault.index for fault in report.faults}
      assert kind in found, report
      assert place is None or found[kind] == place


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_of_many_terms_left_out_is_seen(dtype: Any) -> None:
  """A query left out of dK and dV, a key left out of dQ."""
  q, k, v, do = (of_type(x, dtype) for x in (Q, K, V, DO))
  gate, left_out, h = GradientGate.of_arrays(q, k, v, do, dtype), 33, 3
  found = Kernel().backward(q, k, v, do, dtype)
  q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
  out, lse = oracle(q, k, v)
  p = np.exp(q[0, h] @ k[0, 1].T * D**-0.5 - lse[0, h, :, None])
  ds = p * (do[0, h] @ v[0, 1].T - (out[0, h] * do[0, h]).sum(-1, keepdims=True)) * D**-0.5
  found["q"][0, h] -= np.outer(ds[:, left_out], k[0, 1, left_out])
  found["k"][0, 1] -= np.outer(ds[left_out], q[0, h, left_out])
  found["v"][0, 1] -= np.outer(p[left_out], do[0, h, left_out])
  for report in gate.reports(**{n: of_type(x, dtype) for n, x in found.items()}):
    (fault,) = (fault for fault in report.faults if fault.kind in ("key", "query"))
    assert fault.index == (0, h, left_out), report
    assert fault.size == pytest.approx(-1, abs=0.3)


def check_case(seed: int, any_magnitude: bool) -> None:
  """Fails if right gradients do not pass.

  Without tf32 if q has any magnitude: where dP - delta is 0, what its rounding leaves is multiplied by q.
  """
  case = Case.drawn(seed, TYPES)
  if any_magnitude:
    case = case.of_any_magnitude(seed, masked=False)
    case = replace(case, kernel=replace(case.kernel, tf32=False))
  with np.errstate(all="ignore"):
    inputs = *case.inputs, case.do, case.dtype, case.dlse
    gate = GradientGate.of_arrays(*inputs, tf32=case.kernel.tf32, **case.rules)
    found = case.kernel.backward(*inputs, **case.rules)
  most = LARGEST.get(case.dtype, np.inf)  # what is larger is infinite in the type
  held = {name: x for name, x in found.items() if np.abs(gate.exact.named()[name]).max(initial=0) < most}
  for report in gate.reports(**held):
    assert report.correct, f"{case.kernel}, {case.rules}: {report}"


@pytest.mark.parametrize("any_magnitude", [False, True], ids=["", "any magnitude"])
@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_right_gradients_pass(seed: int, any_magnitude: bool) -> None:
  for each in range(seed, seed + 10):
    check_case(each, any_magnitude)


@pytest.mark.slow
@pytest.mark.each("any_magnitude", "seed", evenly=True)
@pytest.mark.parametrize("any_magnitude", [False, True], ids=["", "any magnitude"])
@pytest.mark.parametrize(
  "seed", [pytest.param(x, marks=pytest.mark.slowest if x % 200 else ()) for x in range(1000, 2000, 100)]
)
def test_many_right_gradients_pass(seed: int, any_magnitude: bool) -> None:
  for each in range(seed, seed + 100):
    check_case(each, any_magnitude)


@pytest.mark.slow
def test_sums_that_tensor_cores_cut_off_are_no_fault_on_their_devices() -> None:
  """The gradient of v sums over all queries: of 16384 terms of one sign, 1e-4 of the sum is lost."""
  random = np.random.default_rng(7)
  q, k, v, do = (of_type(random.normal(size=(1, 1, rows, 32)), dtypes.float16) for rows in (16384, 64, 64, 16384))
  do = np.abs(do)
  got = Kernel(cut=True).backward(q, k, v, do, dtypes.float16)
  elsewhere, there = (GradientGate.of_arrays(q, k, v, do, dtypes.float16, device=x) for x in ("CPU", "NV"))
  assert [report.name for report in elsewhere.reports(**got) if not report.correct] == ["gradient of v"]
  assert all(report.correct for report in there.reports(**got))
  assert not any(report.correct for report in there.reports(**{name: (1 - 1e-3) * x for name, x in got.items()}))
