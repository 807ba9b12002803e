"""The gradients of attention through the kernels of this machine's CPU: against the oracle and finite differences."""

import math
from typing import Any, cast

import numpy as np
import pytest
from gradients import Options, check_gradients, check_gradients_of_sequences, cotangents, gradients_of, numeric_gradient
from helpers import DTYPES, dispatch_among, drawn, normal, on_device, qkv
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import P, kept_weights
from test_features import BLIND, FEATURES, Shape, arguments, some
from tinygrad import Context, GlobalCounters, Tensor, TinyJit, UOp, dtypes

from uopattn import attention
from uopattn.proof.gate import verify_gradients
from uopattn.proof.oracle import Array, gradients, oracle
from uopattn.runtime.log import log_once
from uopattn.runtime.prepare import compiled

SHAPE: Shape = (2, 4, 2, 37, 150, 24, 40)
FEW: Shape = (2, 4, 2, 3, 400, 24, 40)  # queries: the keys of the forward pass are split


@pytest.mark.kinds(shape=(SHAPE, FEW, (1, 1, 1, 1, 1, 1, 1), (2, 3, 1, 65, 129, 33, 17)))
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
  "shape",
  [
    SHAPE,
    FEW,
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 2, 130, 70, 64, 64),
    (2, 3, 1, 65, 129, 33, 17),
    (1, 2, 1, 16, 200, 80, 128),
  ],
  ids=str,
)
def test_any_shape_and_type(shape: Shape, dtype: Any) -> None:
  check_gradients(*qkv(*shape, dtype))
  check_gradients(*qkv(*shape, dtype), {"is_causal": True, "q_start": 20}, of_lse=False)


@pytest.mark.each("shape")
@pytest.mark.parametrize("shape", [FEW, SHAPE], ids=["few", "many"])
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone(name: str, shape: Shape) -> None:
  seed = int(shape == FEW) + 2
  check_gradients(*qkv(*shape, DTYPES[seed - 2]), some(np.random.default_rng(seed), shape, name))


@pytest.mark.slow
@drawn(5)
@given(
  B=st.integers(1, 3),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 3),
  M=st.integers(1, 9) | st.integers(10, 140),
  N=st.integers(1, 200),
  Dk=st.integers(1, 40),
  Dv=st.integers(1, 40),
  dtype=st.sampled_from(DTYPES),
  names=st.sets(st.sampled_from(FEATURES), min_size=1),
  numbers=st.sampled_from(("int", "tensor", "variable")),
  blocks=st.none() | st.tuples(st.integers(1, 70), st.integers(1, 70)),
  seed=st.integers(0, 1000),
)
def test_any_features_together(B, Hkv, group, M, N, Dk, Dv, dtype, names, numbers, blocks, seed) -> None:
  shape = (B, Hkv * group, Hkv, M, N, Dk, Dv)
  options = some(np.random.default_rng(seed), shape, *sorted(names))
  check_gradients(*qkv(*shape, dtype), *arguments(shape, options, numbers, blocks))


@pytest.mark.kinds(dtype=(dtypes.float, dtypes.half))
@pytest.mark.each("dtype", "shape")
@pytest.mark.parametrize("shape", [FEW, SHAPE], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype: Any, shape: Shape) -> None:
  B, Hq, _, M, N, *_ = shape
  kept = kept_weights(B, Hq, M, N)
  with Context(TRAINING=1):
    check_gradients(*qkv(*shape, dtype), {"dropout_p": P, "kept": kept})


@pytest.mark.kinds(name=("no keys", "window behind all keys", "added infinity", "two rules together"))
@pytest.mark.each("shape", evenly=True)
@pytest.mark.parametrize("shape", [FEW[:4] + SHAPE[4:], SHAPE], ids=["few", "many"])
@pytest.mark.parametrize("name", BLIND)
def test_rows_that_see_no_key_have_no_gradient(name: str, shape: Shape) -> None:
  """But of the sinks through the LSE, which of such a row is the sink."""
  for argument, x in check_gradients(*qkv(*shape, dtypes.float16), BLIND[name]).items():
    assert argument == "sinks" or (x.float().numpy() == 0).all()


def test_starts_at_the_ends_of_int32() -> None:
  options = {"q_start": np.array([2**31 - 1, -(2**31)], np.int32), "window": (40, 3)}
  for x in check_gradients(*qkv(*SHAPE, dtypes.float16), options).values():
    assert (x.float().numpy() == 0).all()
  check_gradients(*qkv(*SHAPE), options | {"window": (None, 3)})


@pytest.mark.each("lengths", "dtype")
@pytest.mark.parametrize("lengths", [(0, 77), (150, 1), (64, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_keys_that_do_not_exist_may_hold_anything(lengths: tuple[int, int], dtype: Any) -> None:
  q, k, v = qkv(*SHAPE, dtype)
  do = cotangents(q, v)[0]
  exists = Tensor(np.arange(150)[:, None] < np.array(lengths)[:, None, None, None])
  bad = [exists.where(x, value).cast(dtype).realize() for x, value in ((k, math.nan), (v, math.inf))]
  clean, spoilt = (gradients_of(q, a, b, do, kv_lengths=Tensor(lengths)) for a, b in ((k, v), bad))
  for name, x in clean.items():
    np.testing.assert_array_equal(spoilt[name].float().numpy(), x.float().numpy())
  for b, length in enumerate(lengths):
    assert (clean["k"][b, :, length:].float().numpy() == 0).all()
    assert (clean["v"][b, :, length:].float().numpy() == 0).all()


@pytest.mark.kinds(dtype=(dtypes.half,))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_give_the_same_bits(dtype: Any) -> None:
  q, k, v = qkv(1, 4, 1, 200, 300, 32, 32, dtype)
  do, dlse = cotangents(q, v)
  first, second = (gradients_of(q, k, v, do, dlse, is_causal=True) for _ in range(2))
  for name, x in first.items():
    np.testing.assert_array_equal(second[name].float().numpy(), x.float().numpy())


def test_inside_a_jit() -> None:
  start = UOp.variable("start", 0, 100)

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, do: Tensor, start: UOp) -> list[Tensor]:
    out = attention(q, k, v, is_causal=True, q_start=start, enable_gqa=True, backend="kernel")
    return [x.realize() for x in [(out * do).sum(), *(out * do).sum().gradient(q, k, v)]]

  before = compiled.cache_info().misses
  for seed, first in enumerate((3, 60, 0, 99)):
    q, k, v = qkv(1, 4, 2, 40, 130, 16, 24, seed=seed)
    do, _ = cotangents(q, v, seed)
    loss, *grads = step(q, k, v, do, start.bind(first))
    arrays = [x.numpy() for x in (q, k, v)]
    want = gradients(arrays[0], arrays[1], arrays[2], do.numpy(), is_causal=True, q_start=first)
    for got, exact in zip(grads, (want.q, want.k, want.v), strict=True):
      np.testing.assert_allclose(got.numpy(), exact, atol=2e-5)
    exact_loss = (oracle(arrays[0], arrays[1], arrays[2], is_causal=True, q_start=first)[0] * do.numpy()).sum()
    assert loss.item() == pytest.approx(exact_loss, abs=1e-3)
  assert compiled.cache_info().misses - before in (3, 5)  # forward, delta, backward; on many cores sums of dk and of dv


def kernels_of(*tensors: Tensor) -> int:
  """How many kernels it takes to realize them."""
  before = GlobalCounters.kernel_count
  Tensor.realize(*tensors)
  return GlobalCounters.kernel_count - before


def test_a_training_step_runs_each_kernel_once() -> None:
  q, k, v = qkv(1, 2, 2, 64, 64, 16, 16)
  do, _ = cotangents(q, v)
  out = attention(q, k, v, backend="kernel")
  assert kernels_of(out) == 1
  out = attention(q, k, v, backend="kernel")
  assert kernels_of(out, *(out * do).sum().gradient(q, k, v)) == 4  # one for the gradient of out, one for delta
  loss = (attention(q, k, v, backend="kernel") * do).sum()
  loss.backward()
  assert kernels_of(*(x.grad for x in (q, k, v) if x.grad is not None)) == 4


def test_no_array_of_queries_and_keys_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
  from tinygrad.device import Buffer

  allocate, most = Buffer.allocate, [0]

  def recorded(self: Buffer, *given: Any, **named: Any) -> Any:
    most[0] = max(most[0], self.nbytes)
    return allocate(self, *given, **named)

  monkeypatch.setattr(Buffer, "allocate", recorded)
  monkeypatch.setattr("uopattn.plan.target.thread_count", lambda: 2)  # each has sums of its own
  q, k, v = qkv(1, 1, 1, 2048, 2048, 8, 8)
  do, dlse = cotangents(q, v)
  gradients_of(q, k, v, do, dlse, is_causal=True)
  assert 2048 * 8 * 4 <= most[0] < 2048 * 2048 / 8


def test_operands_that_are_one_another() -> None:
  x = qkv(1, 2, 2, 30, 30, 8, 8)[0]
  do, _ = cotangents(x, x)
  array = x.numpy()
  want, made = gradients(array, array, array, do.numpy()), gradients(array, array * 2, array + 1, do.numpy())
  for backend in ("kernel", "reference"):
    (got,) = (attention(x, x, x, backend=backend) * do).sum().gradient(x)
    np.testing.assert_allclose(got.numpy(), want.q + want.k + want.v, atol=2e-5)
    y = x.contiguous().realize()
    (got,) = (attention(y, y * 2, y + 1, backend=backend) * do).sum().gradient(y)
    np.testing.assert_allclose(got.numpy(), made.q + 2 * made.k + made.v, atol=2e-5)


def scaled(score: Any, b: Any, h: Any, i: Any, j: Any, factors: Any, bias: Any) -> Any:
  return score * factors[h] + bias[j - i + 6] * score * score * 0.1


# Arguments for (2, 2, 1, 4, 7, 4, 3); what is float32 in them is differentiated too.
R = np.random.default_rng(11)
FLOATS: dict[str, Options] = {
  "added mask": {"attn_mask": R.normal(size=(2, 1, 4, 7)).astype(np.float32)},
  "added mask of keys": {"attn_mask": R.normal(size=7).astype(np.float32)},
  "added mask, -inf": {"attn_mask": np.where(R.random((2, 4, 7)) < 0.3, -np.inf, 0.5).astype(np.float32)},
  "sinks": {"sinks": R.normal(size=2).astype(np.float32)},
  "score_mod": {
    "score_mod": scaled,
    "aux": (R.normal(size=2).astype(np.float32), R.normal(size=13).astype(np.float32)),
  },
}
ALONE: dict[str, Options] = {name: some(np.random.default_rng(4), (2, 2, 1, 4, 7, 4, 3), name) for name in FEATURES}
TOGETHER = {
  "all": {name: x for one in FLOATS.values() for name, x in one.items()}
  | {"softcap": 3.0, "is_causal": True, "q_start": np.array([2, 4])}
}


# By the oracle, `test_each_feature_alone` checks the kernels too.
BY_KERNELS = [name for name in ALONE | FLOATS if name != "added mask of keys"]
DIFFERENCES = [
  pytest.param(
    name, dtype, id=f"{name}-{kind}", marks=pytest.mark.slow if kind == "kernel" and name in BY_KERNELS else []
  )
  for name in ALONE | FLOATS | TOGETHER | {"nothing": {}}
  for kind, dtype in {"oracle": dtypes.float64, "kernel": dtypes.float32}.items()
]


@pytest.mark.parametrize(("name", "dtype"), DIFFERENCES)
def test_finite_differences(name: str, dtype: Any) -> None:
  """Of the oracle's output and LSE, in float64: for the kernels' gradients, and for the oracle's own."""
  options: Options = (ALONE | FLOATS | TOGETHER | {"nothing": {}})[name]
  options = {key: x.astype(np.float64) if is_float(x) else x for key, x in options.items()}
  options |= {"aux": tuple(x.astype(np.float64) if is_float(x) else x for x in options.get("aux", ()))}
  q, k, v = (x.numpy().astype(np.float64) for x in qkv(2, 2, 1, 4, 7, 4, 3))
  do, dlse = (x.numpy().astype(np.float64) for x in cotangents(Tensor(q), Tensor(v)))

  def loss() -> float:
    out, lse = oracle(q, k, v, **options)
    return float((out * do).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

  differentiated = {"q": q, "k": k, "v": v}
  differentiated |= {key: x for key, x in options.items() if key in ("attn_mask", "sinks") and is_float(x)}
  if dtype == dtypes.float64:
    got = gradients(q, k, v, do, dlse, **options).named()
  else:
    got = of_kernels([q, k, v, do, dlse], options)
    differentiated |= {f"aux{i}": x for i, x in enumerate(options["aux"]) if is_float(x) and "score_mod" in options}
  assert got.keys() == differentiated.keys()
  for key, x in differentiated.items():
    tolerance = 1e-7 if dtype == dtypes.float64 else 3e-4
    np.testing.assert_allclose(got[key], numeric_gradient(loss, x), atol=tolerance, err_msg=key)


HIDDEN_ROW = np.where(np.arange(4)[:, None] == 1, -np.inf, R.normal(size=(2, 1, 4, 7))).astype(np.float32)
BLIND_IN_PART: dict[str, Options] = {
  "added infinity": {"attn_mask": HIDDEN_ROW},
  "added infinity and causal": {"attn_mask": HIDDEN_ROW, "is_causal": True, "q_start": np.array([0, -3])},
  "window": {"window": (2, 1), "q_start": np.array([-4, 7])},
  "kv_lengths": {"kv_lengths": np.array([0, 5])},
  "bool mask": {"attn_mask": np.isfinite(HIDDEN_ROW)},
  "sinks": {"is_causal": True, "q_start": np.array([-2, 0]), "sinks": np.array([1, 500], np.float32)},
}


@pytest.mark.kinds(name=("added infinity and causal", "kv_lengths", "sinks"))
@pytest.mark.parametrize("name", BLIND_IN_PART)
def test_rows_that_see_no_key_have_no_gradient_through_plain_ops(name: str) -> None:
  """Neither do they spoil those of other rows; whatever the loss makes of their LSE: -inf, or the sink."""
  q, k, v = qkv(2, 2, 1, 4, 7, 4, 3)
  do, dlse = cotangents(q, v)
  options, bias = BLIND_IN_PART[name], np.linspace(-1, 1, 7, dtype=np.float32)
  row, passed = Tensor(bias), {key: on_device(x) for key, x in options.items()}
  named = {"q": q, "k": k, "v": v} | {key: passed[key] for key in ("attn_mask", "sinks") if is_float(options.get(key))}
  mod: Options = {"score_mod": lambda score, b, h, i, j, t: score + t[j], "aux": (row,)}
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="reference", **passed, **mod)
  *got, of_row = ((out * do).sum() + (lse * dlse).sum()).gradient(*named.values(), row)
  Tensor.realize(out, lse, *got, of_row)
  added = options.get("attn_mask", np.zeros((2, 1, 4, 7), np.float32))
  added = (np.where(added, 0, -np.inf) if added.dtype == bool else added) + bias
  arrays = [x.numpy().astype(np.float64) for x in (q, k, v, do, dlse)]
  want = gradients(*arrays, **(options | {"attn_mask": added}))
  for key, x in zip(named, got, strict=True):
    np.testing.assert_allclose(x.numpy(), want.named()[key], atol=1e-5, err_msg=key)
  np.testing.assert_allclose(of_row.numpy(), cast(Array, want.attn_mask).sum((0, 1, 2)), atol=1e-5)
  alone = -np.inf if "sinks" not in options else options["sinks"][None, :, None]
  blind = (out.numpy() == 0).all(-1)
  assert (lse.numpy()[blind] == np.broadcast_to(alone, blind.shape)[blind]).all()
  assert blind.any()
  assert not blind.all()
  assert (got[0].numpy()[blind] == 0).all()


def is_float(x: Any) -> bool:
  return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def of_kernels(arrays: list[Array], options: Options) -> dict[str, Array]:
  """The same gradients in float32, and those by what a score_mod reads, as aux0, aux1, ..."""
  narrow = {key: on_device(x.astype(np.float32) if is_float(x) else x) for key, x in options.items()}
  aux = tuple(on_device(x.astype(np.float32) if is_float(x) else x) for x in options["aux"])
  narrow["aux"] = aux
  q, k, v, of_out, of_lse = (Tensor(x.astype(np.float32)) for x in arrays)
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **narrow)
  loss = (out * of_out).sum() + (lse.isfinite().where(lse, 0) * of_lse).sum()
  named = {"q": q, "k": k, "v": v} | {key: narrow[key] for key in ("attn_mask", "sinks") if key in narrow}
  named |= {f"aux{i}": x for i, x in enumerate(aux) if "score_mod" in options}
  named = {key: x for key, x in named.items() if x.is_floating_point()}
  found = loss.gradient(*named.values())
  Tensor.realize(*found)
  return {key: x.numpy() for key, x in zip(named, found, strict=True)}


@pytest.mark.kinds(few=(False,))
@pytest.mark.parametrize("few", [False, True])
def test_inputs_that_are_not_whole_arrays(few: bool) -> None:
  """Broadcast, permuted and computed: gradients go on to what they are made of."""
  B, H, M, N, D = 1, 2, 3 if few else 20, 400 if few else 50, 8
  q, k, v = qkv(B, H, H, M, N, D, D)
  do, _ = cotangents(q, v)
  row, sinks = Tensor(normal(N)), Tensor(normal(H)).half()
  found = {}
  for backend in ("kernel", "reference"):
    mask = (row * 2).reshape(1, 1, 1, N).expand(B, H, M, N)
    bias = lambda score, b, h, i, j, t: score + t[j] * score  # noqa: E731
    out = attention(
      q.half().float(), k, v, attn_mask=mask, sinks=sinks, score_mod=bias, aux=(row + 1,), backend=backend
    )
    found[backend] = (out * do).sum().gradient(q, k, v, row, sinks)
    Tensor.realize(*found[backend])
  for got, want in zip(*found.values(), strict=True):
    np.testing.assert_allclose(got.float().numpy(), want.float().numpy(), atol=1e-4, rtol=1e-3)


@pytest.mark.each("as_tensor", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_sequences_one_after_another(as_tensor: bool, dtype: Any) -> None:
  check_gradients_of_sequences(dtype, as_tensor=as_tensor)


def test_without_kernels_it_goes_through_plain_ops_and_says_so(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  dispatch_among(monkeypatch, [], backward=True)
  log_once.cache_clear()
  q, k, v = qkv(1, 2, 1, 20, 30, 8, 8)
  do, dlse = cotangents(q, v)
  with pytest.raises(ValueError, match=r"backend='kernel': .*no kernels for gradients"):
    gradients_of(q, k, v, do, dlse)
  sinks = Tensor([0.5, -1.0])
  got = gradients_of(q, k, v, do, dlse, backend="auto", sinks=sinks)
  gradients_of(q, k, v, do, dlse, backend="auto", sinks=sinks)
  for report in verify_gradients(q, k, v, do, got, dlse, sinks=sinks.numpy()):
    assert report.correct, report
  assert caplog.text.count("the gradient of attention goes through plain tinygrad ops") == 1


def test_there_is_no_second_derivative() -> None:
  q, k, v = qkv(1, 1, 1, 4, 5, 4, 4)
  (grad,) = attention(q, k, v, backend="kernel").square().sum().gradient(q)
  with pytest.raises(NotImplementedError, match="backend='reference'"):
    grad.sum().gradient(k)


def test_a_kernel_is_compiled_once() -> None:
  before = compiled.cache_info().misses
  for seed in range(3):
    check_gradients(*qkv(1, 1, 1, 11, 13, 5, 7, seed=seed))
  assert compiled.cache_info().misses - before in (3, 5)  # forward, delta, backward; on many cores sums of dk and of dv
