"""`uopattn.patch`: what a kernel serves passes the gate, and all else is tinygrad's own, node by node."""

import inspect
import logging
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import pytest
from helpers import check, on, qkv
from tinygrad import Context, GlobalCounters, Tensor, TinyJit, UOp, dtypes, function

import uopattn
from uopattn.integrate.patch import causal_start
from uopattn.plan import forward
from uopattn.proof.gate import verify_gradients
from uopattn.runtime.log import log_once

NAME = "scaled_dot_product_attention"
OWN = Tensor.scaled_dot_product_attention
START = UOp.variable("start", 0, 63)


def lower_right(M: int, N: int, **options: Any) -> Tensor:
  return Tensor.full((1, 1, M, N), -inf, **options).triu(N - M + 1)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
  log_once.cache_clear()
  yield
  assert Tensor.scaled_dot_product_attention is OWN


SERVED: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], dict[str, Any]]] = {
  # Hq, Hkv, M, N; arguments; options of the oracle
  "plain": ((2, 2, 10, 20), {}, {}),
  "causal": ((2, 2, 20, 30), {"is_causal": True}, {"is_causal": True}),
  "heads": ((4, 2, 10, 20), {"enable_gqa": True}, {}),
  "causal mask": ((2, 2, 10, 25), {"attn_mask": lambda: lower_right(10, 25)}, {"is_causal": True, "q_start": 15}),
  "dropout": ((2, 2, 10, 20), {"dropout_p": 0.5}, {}),
}


@pytest.mark.parametrize("case", SERVED)
def test_a_kernel_serves(case: str) -> None:
  (Hq, Hkv, M, N), given, options = SERVED[case]
  q, k, v = qkv(2, Hq, Hkv, M, N, 16, 8)
  arguments = {name: x() if callable(x) else x for name, x in given.items()}
  with uopattn.patch(backend="kernel"):
    check(q, k, v, q.scaled_dot_product_attention(k, v, **arguments), **options)


def test_a_mask_of_the_lowest_float_hides_nothing() -> None:
  """A row that is masked throughout by it, as padding is in many models, has the mean of the values, as in tinygrad."""
  q, k, v = qkv(1, 2, 2, 9, 12, 16, 16)
  low = np.zeros((1, 1, 9, 12), np.float32)
  low[:, :, 2:4] = low[:, :, 5, :7] = np.finfo(np.float32).min
  mask = Tensor(low)
  want = q.scaled_dot_product_attention(k, v, mask).numpy()
  with uopattn.patch(backend="kernel"):
    got = q.scaled_dot_product_attention(k, v, mask).numpy()
  np.testing.assert_allclose(got, want, atol=1e-5)
  np.testing.assert_allclose(got[:, :, 2], v.numpy().mean(2), atol=1e-5)


def test_masks_and_the_order_of_arguments() -> None:
  q, k, v = qkv(1, 4, 2, 9, 12, 16, 16)
  seen = Tensor(np.random.default_rng(1).random((9, 12)) < 0.7).realize()
  with uopattn.patch(backend="kernel"):
    by_order = q.scaled_dot_product_attention(k, v, seen, 0.0, False, True)
    by_name = Tensor.scaled_dot_product_attention(q, key=k, value=v, attn_mask=seen.where(0, -inf), enable_gqa=True)
    assert inspect.signature(Tensor.scaled_dot_product_attention) == inspect.signature(OWN)
  for out in (by_order, by_name):
    check(q, k, v, out, attn_mask=seen.numpy())


@pytest.mark.each("given", "shape")
@pytest.mark.parametrize("given", [("half", "half", "half"), ("float", "half", "half"), ("half", "half", "float")])
@pytest.mark.parametrize("shape", [(3, 8, 16), (8, 16)])
def test_shapes_and_dtypes_are_tinygrads(shape: tuple[int, ...], given: tuple[str, ...]) -> None:
  q, k, v = (Tensor.zeros(shape, dtype=getattr(dtypes, x)) for x in given)
  with uopattn.patch(backend="kernel"):
    got = q.scaled_dot_product_attention(k, v)
  want = OWN(q, k, v)
  assert (got.shape, got.dtype) == (want.shape, want.dtype)


def zeros(*shape: int, dtype: Any = dtypes.float32) -> Tensor:
  return Tensor.zeros(*shape, dtype=dtype)


UNSERVED: dict[str, tuple[Any, ...]] = {
  "float64": (*(zeros(1, 2, 4, 8, dtype=dtypes.float64) for _ in "qkv"),),
  "int": (*(zeros(1, 2, 4, 8, dtype=dtypes.int) for _ in "qkv"), None, 0.0, True),
  "weak": (*(Tensor.full((4, 8), 1.0, buffer=False) for _ in "qkv"),),
  "mask of ints": (*(zeros(2, 4, 8) for _ in "qkv"), zeros(4, 4, dtype=dtypes.int)),
  "mask with more batches": (*(zeros(1, 2, 4, 8) for _ in "qkv"), zeros(3, 1, 4, 4)),
  "heads of values": (zeros(1, 8, 4, 8), zeros(1, 2, 4, 8), zeros(1, 4, 4, 8), None, 0.0, False, True),
  "sharded in different ways": (*(zeros(2, 2, 4, 8).shard(("CPU:0", "CPU:1"), i) for i in (0, 1, 1)), None, 0.0, True),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_no_kernel_serves_is_tinygrads_own(case: str) -> None:
  with uopattn.patch():
    got = Tensor.scaled_dot_product_attention(*UNSERVED[case])
  assert got.uop is OWN(*UNSERVED[case]).uop


def test_masks_of_more_axes_or_batches() -> None:
  """The output has the axes and batches that tinygrad's has, whether a mask is recognised as causal or not."""
  q, wide = Tensor.ones(2, 4, 8), Tensor.ones(1, 2, 4, 8)
  for x, shape in ((q, (1, 1, 4, 4)), (q, (3, 1, 4, 4)), (q[0], (2, 4, 4)), (wide, (2, 1, 4, 4)), (wide, (1, 2, 4, 4))):
    for mask in (Tensor.full(shape, -inf).triu(1), Tensor.zeros(*shape)):
      with uopattn.patch(log=False):
        got = x.scaled_dot_product_attention(x, x, mask)
      assert got.shape == OWN(x, x, x, mask).shape
  with uopattn.patch(backend="kernel"):
    assert q.scaled_dot_product_attention(q, q, lower_right(4, 4)).shape == (1, 2, 4, 8)


WRONG: dict[str, tuple[Any, ...]] = {
  "causal and a mask": (*(zeros(2, 4, 8) for _ in "qkv"), zeros(4, 4), 0.0, True),
  "heads": (zeros(1, 5, 4, 8), zeros(1, 2, 4, 8), zeros(1, 2, 4, 8), None, 0.0, False, True),
  "two axes have no heads": (*(zeros(4, 8) for _ in "qkv"), None, 0.0, False, True),
  "head size": (zeros(2, 4, 8), zeros(2, 4, 6), zeros(2, 4, 8)),
  "mask": (*(zeros(2, 4, 8) for _ in "qkv"), zeros(5, 7)),
  "no key": (zeros(2, 4, 8),),
  "no Tensor": (zeros(2, 4, 8), "k", "v"),
}


def error_of(f: Callable[..., Any], given: tuple[Any, ...]) -> tuple[type, str]:
  try:
    f(*given)
  except Exception as error:
    return type(error), str(error)
  raise AssertionError("no error")


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_tinygrads_own(case: str) -> None:
  with uopattn.patch():
    got = error_of(Tensor.scaled_dot_product_attention, WRONG[case])
  assert got == error_of(OWN, WRONG[case])


@pytest.mark.parametrize("training", [0, 1])
def test_dropout_draws_only_in_training_and_once(training: int) -> None:
  def following(q: Tensor) -> float:
    Tensor.manual_seed(3)
    q.scaled_dot_product_attention(q, q, dropout_p=0.5).realize()
    return Tensor.rand(1).item()

  single, double = (Tensor.ones(2, 8, 8, dtype=x).realize() for x in (dtypes.float32, dtypes.float64))
  with Context(TRAINING=training):
    own = following(double)
    with uopattn.patch():
      assert following(double) == own  # which no kernel serves
      dropped = single.scaled_dot_product_attention(single, single, dropout_p=0.5)
    assert (dropped.numpy() == 1).all() == (not training)


def test_handles_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
  x, double = Tensor.ones(2, 4, 8), Tensor.ones(2, 4, 8, dtype=dtypes.float64)
  first, second = uopattn.patch(backend="kernel"), uopattn.patch(log=False)
  double.scaled_dot_product_attention(double, double)  # the youngest decides
  second.restore()
  second.restore()
  with pytest.raises(ValueError, match=r"^uopattn.patch\(backend='kernel'\): .* does not support q, k and v in double"):
    double.scaled_dot_product_attention(double, double)
  with uopattn.patch(log=False) as third:
    first.restore()
    assert x.scaled_dot_product_attention(x, x).uop is not OWN(x, x, x).uop
    first.restore()
    third.restore()
    assert Tensor.scaled_dot_product_attention is OWN
  assert caplog.text == ""


def test_what_others_replace_stays() -> None:
  x, calls = Tensor.ones(2, 4, 8), []
  with uopattn.patch() as handle:
    ours = Tensor.scaled_dot_product_attention

    def theirs(*given: Any) -> Tensor:
      calls.append(given)
      return ours(*given)

    setattr(Tensor, NAME, theirs)
    handle.restore()
    assert x.scaled_dot_product_attention(x, x).uop is OWN(x, x, x).uop
    with uopattn.patch(backend="kernel"):
      assert x.scaled_dot_product_attention(x, x).uop is not OWN(x, x, x).uop
    assert Tensor.scaled_dot_product_attention is theirs
  assert len(calls) == 1
  setattr(Tensor, NAME, OWN)


def test_one_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
  x = Tensor.ones(2, 4, 8, dtype=dtypes.float64)
  with caplog.at_level(logging.WARNING), uopattn.patch():
    for _ in range(2):
      x.scaled_dot_product_attention(x, x)
  (record,) = caplog.records
  assert record.getMessage().startswith("tinygrad's own attention is used: cpu_decode does not support q, k and v in ")


def test_an_unknown_backend() -> None:
  with pytest.raises(ValueError, match=r"^backend is 'reference'; accepted are auto, kernel$"):
    uopattn.patch(backend="reference")


def test_gradients() -> None:
  q, k, v = qkv(1, 2, 2, 12, 12, 16, 16)
  do = Tensor(np.random.default_rng(5).standard_normal(q.shape, np.float32)).realize()
  with uopattn.patch(backend="kernel"):
    out = q.scaled_dot_product_attention(k, v, is_causal=True)
  grads = dict(zip("qkv", (out * do).sum().gradient(q, k, v), strict=True))
  for report in verify_gradients(q, k, v, do, grads, is_causal=True):
    assert report.correct, report


def test_an_emulated_gpu() -> None:
  with on("gfx1201"), uopattn.patch():
    q = Tensor(np.random.default_rng(0).standard_normal((1, 2, 20, 16), np.float32)).half().realize()
    with uopattn.patch(backend="kernel"):
      check(q, q, q, q.scaled_dot_product_attention(q, q, is_causal=True), is_causal=True)
    double = q.double()  # which its kernels do not multiply
    assert double.scaled_dot_product_attention(double, double).uop is OWN(double, double, double).uop


def of_cache(cache: Tensor, new: Tensor, start: UOp, own: bool = False) -> Tensor:
  """One step of a decoder, as tinygrad's models write it."""
  T = new.shape[2]
  held = Tensor(cache.uop.after(cache[:, :, start : start + T].uop.store(new.cast(cache.dtype).uop)))
  k, mask = held[:, :, : start + T], None
  if T != 1:
    mask = Tensor.full((1, 1, T, start + T), -inf, dtype=new.dtype, buffer=False).triu(start + 1)
  return (OWN if own else Tensor.scaled_dot_product_attention)(new, k, k, attn_mask=mask)


@pytest.mark.each("inside", "rows")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("inside", ["TinyJit", "function"])
def test_a_cache_is_read_in_place(inside: str, rows: int) -> None:
  random = np.random.default_rng(7)
  filled = random.standard_normal((1, 2, 64, 16), np.float32)
  news = [Tensor(random.standard_normal((1, 2, rows, 16), np.float32)).realize() for _ in range(4)]

  def kernels(own: bool) -> int:
    cache = Tensor(filled).half().realize()

    def step(new: Tensor, start: UOp) -> Tensor:
      return of_cache(cache, new, start, own)

    run = function(step, precompile=True, allow_implicit=True) if inside == "function" else step
    jit = TinyJit(lambda new, start: run(new, start).contiguous().realize())
    for new, start in zip(news, range(20, 60, rows), strict=False):
      GlobalCounters.reset()
      out = jit(new, START.bind(start))
      count = GlobalCounters.kernel_count
      keys = cache[:, :, : start + rows].float().realize()
      check(new, keys, keys, out, is_causal=True, q_start=start)
    return count

  with Context(DEV="CPU"):
    with uopattn.patch(backend="kernel"):
      count = kernels(own=False)
    assert count == {"TinyJit": 2, "function": 3}[inside]  # the write, attention, and the function's result
    assert count < kernels(own=True)


@pytest.mark.parametrize("compiled", [True, False])
def test_training_inside_a_function(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  """By kernels; by tinygrad where kernels would have no gradients."""
  if not compiled:
    monkeypatch.setattr(forward, "is_compiled", lambda device: False)
  q, k, v = qkv(1, 2, 2, 8, 8, 16, 16)
  f = function(lambda q, k, v: q.scaled_dot_product_attention(k, v, is_causal=True))
  want = f(q, k, v).square().sum().gradient(q, k, v)
  with uopattn.patch(backend="kernel" if compiled else "auto"), Context(TRAINING=1):
    got = f(q, k, v).square().sum().gradient(q, k, v)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x.numpy(), y.numpy(), atol=1e-5)


CAUSAL = {
  "lower right": (lambda: lower_right(4, 9), 5),
  "square": (lambda: Tensor.full((4, 4), -inf).triu(1), 0),
  "upper left": (lambda: Tensor.full((4, 9), -inf).triu(1), 0),
  "half": (lambda: lower_right(4, 9, dtype=dtypes.half), 5),
  "bool": (lambda: Tensor.ones(4, 9, dtype=dtypes.bool).tril(5), 5),
  "another diagonal": (lambda: Tensor.full((4, 9), -inf).triu(3), None),
  "finite": (lambda: Tensor.full((4, 9), -1.0).triu(6), None),
  "the other triangle": (lambda: Tensor.full((4, 9), -inf).tril(5), None),
  "bool, the other triangle": (lambda: Tensor.ones(4, 9, dtype=dtypes.bool).triu(5), None),
  "numbers": (lambda: Tensor.arange(36).reshape(4, 9).float().triu(6), None),
  "padded": (lambda: Tensor.full((4, 8), -inf).pad((0, 1)).triu(6), None),
  "smaller": (lambda: Tensor.full((1, 9), -inf).triu(6), None),
  "realized": (lambda: lower_right(4, 9).realize(), None),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_causal_masks_are_recognised(case: str) -> None:
  mask, start = CAUSAL[case]
  keys = 4 if case == "square" else 9
  assert causal_start(mask(), 4, keys) == start
