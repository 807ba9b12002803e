"""Gradients of additive masks and of what score mods read, by kernels, against those of the reference in float64."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from gradients import check_gradients, cotangents
from helpers import normal, qkv
from mistakes import Mistake
from tinygrad import Context, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.helpers import NUM_CPU_THREADS, GlobalCounters

from uopattn import BlockMask, attention
from uopattn.dsl.cpu import gradients as cpu
from uopattn.dsl.rules.bias import BiasWork
from uopattn.plan import bias

Array = np.ndarray[Any, Any]
Options = dict[str, Any]
Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv
ODD: Shape = (2, 4, 2, 77, 131, 24, 17)
BUCKETS = np.random.default_rng(0).integers(0, 8, 300).astype(np.int32)
PAIRS = np.random.default_rng(1).integers(0, 8, (77, 131)).astype(np.int32)


def by_head_and_batch(x: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, factor: Any, of: Any) -> Any:
  return x * factor[0] - slopes[h] * abs(j - i).cast(dtypes.float) * 0.1 + of[b, h] * x * x


def by_query_and_by_key(x: Any, b: Any, h: Any, i: Any, j: Any, of_query: Any, of_key: Any) -> Any:
  return x * (1 + of_key[b, j]) + of_query[i, h] * (j % 5).cast(dtypes.float)


def by_distance(x: Any, b: Any, h: Any, i: Any, j: Any, table: Any, short: Any) -> Any:
  return (x + table[h, j - i + 76]) * (1 + short[j - i + 20, 1, h])


def by_buckets(x: Any, b: Any, h: Any, i: Any, j: Any, table: Any, of: Any, other: Any, unread: Any) -> Any:
  return x + table[of[j - i + 76], h] + other[h, (abs(j - i) + 1) // 20]


def several_reads(x: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
  return x + t[h] * t[h + 1] + t[j - i]


def by_pairs(x: Any, b: Any, h: Any, i: Any, j: Any, moved: Any, table: Any, of: Any) -> Any:
  return x + moved[j + 2, h, i] + table[of[i, j], h]


# The score_mod, and the aux that it reads; those of float dtypes have gradients.
MODS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
  # with a factor for which the terms of its gradient do not cancel to next to nothing
  "heads and batches": (by_head_and_batch, (normal(4), normal(1, seed=3), normal(2, 4))),
  "queries and keys": (by_query_and_by_key, (normal(77, 4), normal(2, 131))),
  "distances": (by_distance, (normal(4, 207), normal(50, 3, 4).astype(np.float16))),
  "buckets": (by_buckets, (normal(8, 4), BUCKETS, normal(4, 8), normal(3))),
  "several reads": (several_reads, (normal(20),)),
  "pairs": (by_pairs, (normal(140, 4, 77), normal(8, 4), PAIRS)),
}
MASKS = {
  "pairs": (1, 4, 77, 131),
  "all": (2, 4, 77, 131),
  "keys": (2, 1, 1, 131),
  "queries": (1, 4, 77, 1),
  "one": (1,),
}
QUICK = ("pairs", "heads and batches", "distances")


def named(values: Iterable[str]) -> list[Any]:
  """Values of a parameter, of which the quick suite has few."""
  return [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in values]


OPTIONS: dict[str, Options] = {
  "plain": {},
  "causal": {"is_causal": True, "q_start": 20},
  "window": {"window": (30, 10), "softcap": 3.0},
  "lengths": {"kv_lengths": np.array([131, 40], np.int32), "sinks": normal(4)},
  "dropout": {"dropout_p": 0.3},
  "block mask": {"block_mask": BlockMask.of(lambda b, h, i, j: (i // 32) != (j // 32), 1, 1, 77, 131)},
}


def by(backend: str, options: Options, mod: Any, aux: tuple[Array, ...]) -> list[Tensor]:
  """The gradients of all aux of float dtypes; 0 for one that is not read. The LSE is in the loss."""
  q, k, v = qkv(*ODD)
  do, dlse = cotangents(q, v)
  wide = backend == "reference"

  def given(x: Array) -> Tensor:
    return Tensor(x.astype(np.float64) if wide and x.dtype.kind == "f" else x)

  options = {name: given(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
  tables = tuple(map(given, aux))
  q, k, v, do = (x.cast(dtypes.float64) for x in (q, k, v, do)) if wide else (q, k, v, do)
  Tensor.manual_seed(3)
  with Context(TRAINING=1):
    given_mod = {"score_mod": mod, "aux": tables}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **options, **given_mod)
    loss = (out * do).sum() + (lse.isfinite().where(lse, 0) * dlse).sum()
    found = loss.gradient(*(x for x in tables if x.is_floating_point()))
    Tensor.realize(*found)
  return list(found)


def check(options: Options, mod: Any, aux: tuple[Array, ...]) -> None:
  """Fails unless the gradients of the kernel and the reference agree.

  Up to 80,000 terms of both signs are added up, each right to some 1e-7 of itself; what cancels is not in the result.
  """
  for a, b in zip(*(by(x, options, mod, aux) for x in ("kernel", "reference")), strict=True):
    got, want = a.numpy().astype(np.float64), b.numpy()
    assert got.shape == want.shape
    atol = np.abs(want).max() * (1e-4 if a.dtype == dtypes.float32 else 1e-3)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol + 1e-6)


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.each("name", "options", evenly=True)
@pytest.mark.parametrize("options", [x for x in OPTIONS if x not in ("dropout", "block mask")])
@pytest.mark.parametrize("name", named(MASKS))
def test_of_masks(name: str, options: str) -> None:
  check_gradients(*qkv(*ODD), {**OPTIONS[options], "attn_mask": normal(*MASKS[name])})


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("dtype", [dtypes.float16, pytest.param(dtypes.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_in_16_bits(dtype: DType) -> None:
  check_gradients(*qkv(*ODD, dtype), {"is_causal": True, "attn_mask": normal(1, 4, 77, 131)})


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.each("name", "options", evenly=True)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", named(MODS))
def test_of_mods(name: str, options: str) -> None:
  check(OPTIONS[options], *MODS[name])


@pytest.mark.usefixtures("no_plain_ops")
def test_by_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
  whole = by("kernel", {}, *MODS["pairs"])
  monkeypatch.setattr(bias, "BLOCK_BYTES", 4 * 4 * 131 * 64)
  for x, y in zip(by("kernel", {}, *MODS["pairs"]), whole, strict=True):
    np.testing.assert_allclose(x.numpy(), y.numpy(), atol=1e-5 * np.abs(y.numpy()).max())


@pytest.mark.parametrize("wanted", ["q", "attn_mask", "aux"])
def test_only_kernels_of_wanted_gradients_are_made(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """A mask or a table that is not trained costs nothing."""
  made: list[str] = []
  launch = bias.bias_launch

  def launched(spec: Any, target: Any) -> Any:
    made.append(spec.bias.indexed_by.name)
    return launch(spec, target)

  monkeypatch.setattr(bias, "bias_launch", launched)
  q, k, v = qkv(1, 2, 2, 20, 30, 16, 16)
  given = {"attn_mask": Tensor(normal(1, 2, 20, 30)), "aux": Tensor(normal(2, 50))}
  mod = lambda x, b, h, i, j, t: x + t[h, j - i + 19]  # noqa: E731
  out = attention(q, k, v, given["attn_mask"], score_mod=mod, aux=(given["aux"],), backend="kernel")
  (grad,) = out.sum().gradient(q if wanted == "q" else given[wanted])
  assert np.isfinite(grad.numpy()).all()
  assert made == {"q": [], "attn_mask": ["PAIRS"], "aux": ["DISTANCES"]}[wanted]


def test_an_index_that_depends_on_the_score_is_left_to_plain_ops() -> None:
  check({}, lambda x, b, h, i, j, t: x + t[x.maximum(-3).minimum(3).cast(dtypes.int) + 3], (normal(7),))


def test_an_aux_that_is_q_too_is_counted_once() -> None:
  q, k, v = qkv(1, 2, 2, 9, 10, 16, 16)
  mod = lambda x, b, h, i, j, t: x + t[b, h, i, (x > 0).cast(dtypes.int)]  # noqa: E731
  grads = (
    attention(q, k, v, score_mod=mod, aux=(q,), backend=x).square().sum().gradient(q)[0]
    for x in ("kernel", "reference")
  )
  got, want = (x.numpy() for x in grads)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_every_run_gives_the_same_bits() -> None:
  first = by("kernel", {}, *MODS["distances"])
  for threads in (1, NUM_CPU_THREADS.value):
    with Context(NUM_CPU_THREADS=threads):
      for x, y in zip(by("kernel", {}, *MODS["distances"]), first, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_in_a_jit() -> None:
  q, k, v = qkv(1, 2, 2, 40, 40, 16, 16)
  mod = lambda x, b, h, i, j, t: x + t[h, j - i + 39]  # noqa: E731

  def step(table: Tensor) -> Tensor:
    (grad,) = attention(q, k, v, score_mod=mod, aux=(table,), backend="kernel").square().sum().gradient(table)
    return grad.realize()

  jitted = TinyJit(step)
  for i in range(4):
    table = Tensor(np.random.default_rng(i).standard_normal((2, 79), np.float32)).realize()
    np.testing.assert_array_equal(jitted(table).numpy(), step(table).numpy())


def looked_up_by_pairs(x: Any, b: Any, h: Any, i: Any, j: Any, t: Any, of: Any) -> Any:
  return x + t[of[(i * 7 + j) % 8192], h]


def looked_up_by_distance(x: Any, b: Any, h: Any, i: Any, j: Any, t: Any, of: Any) -> Any:
  return x + t[of[j - i + 4096], h]


@pytest.mark.parametrize("mod", [looked_up_by_distance, pytest.param(looked_up_by_pairs, marks=pytest.mark.slow)])
def test_at_most_a_few_blocks_of_scores_are_kept(mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
  """Of 4096 queries and keys, whose scores take 64 MiB."""
  q, k, v = qkv(1, 1, 1, 4096, 4096, 16, 16)
  table, of = Tensor(normal(32, 1)).realize(), np.random.default_rng(2).integers(0, 32, 8192)
  buckets = Tensor(of.astype(np.int32)).realize()
  monkeypatch.setattr(bias, "BLOCK_BYTES", 4 << 20)
  (grad,) = attention(q, k, v, score_mod=mod, aux=(table, buckets), backend="kernel").sum().gradient(table)
  before, peak, allocate = GlobalCounters.mem_used, 0, Buffer.allocate

  def allocated(*given: Any, **named: Any) -> Buffer:
    nonlocal peak
    found = allocate(*given, **named)
    peak = max(peak, GlobalCounters.mem_used - before)
    return found

  monkeypatch.setattr(Buffer, "allocate", allocated)
  grad.realize()
  assert peak <= 5 * bias.BLOCK_BYTES


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
  "each trip is the first one": (BiasWork, "at", lambda right: lambda self, item, trip: right(self, item, trip * 0)),
  "the first head's for all": (BiasWork, "kept_head", lambda right: lambda self, item: right(self, item) * 0),
  "no delta": (
    cpu.Gradients,
    "_of_score",
    lambda right: (
      lambda self, product, dp, n, m: (
        right(self, product, dp, n, m)[0],
        right(self, product, dp, n, m)[1] + right(self, product, dp, n, m)[0] * self.delta_i[m],
      )
    ),
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str) -> None:
  with Mistake(*MISTAKES[mistake]).made(), pytest.raises(AssertionError, match="worst at"):
    check_gradients(*qkv(*ODD), {"attn_mask": normal(1, 4, 77, 131)})
