"""Gradients of `attention_sparse`, by the keys that queries have chosen and by all keys."""

from typing import Any

import numpy as np
import pytest
from helpers import dispatch_among, drawn, on, placed
from hypothesis import given
from hypothesis import strategies as st
from test_sparse import Case, shapes
from tinygrad import Context, Tensor, dtypes

from uopattn import attention_sparse
from uopattn.dsl import sizes
from uopattn.kernels import choose, chosen_gradients, cuda_backward
from uopattn.plan import chosen_rows
from uopattn.plan.sparse import Sparse
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.spec.arguments import Arguments

WAYS = ("chosen", "all keys", "reference")


def set_way(monkeypatch: pytest.MonkeyPatch, way: str) -> str:
  """Make gradients go one way, whatever the sizes; return the backend."""
  monkeypatch.setattr(Sparse, "gathers", way == "chosen")
  return "reference" if way == "reference" else "kernel"


def of_oracle(
  case: Case, do: Array, dlse: Array, lists: Any = None, softcap: float | None = None, sinks: Array | None = None
) -> tuple[Array, Array, Array]:
  """Gradients by their definition, in float64."""
  q, k, v = (numpy(x).astype(np.float64) for x in (case.q, case.k, case.v))
  dq, dk, dv, group = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), q.shape[1] // k.shape[1]
  scale, lists = q.shape[3] ** -0.5, lists or case.lists()
  for b, h, m in np.ndindex(q.shape[:3]):
    head, keys = h // group, lists[b][h // group][m]
    if len(keys):
      scores, slopes = k[b, head, keys] @ q[b, h, m] * scale, np.ones(len(keys))
      if softcap is not None:
        scores = np.tanh(scores / softcap)
        scores, slopes = scores * softcap, 1 - scores**2
      largest = max(scores.max(), -np.inf if sinks is None else sinks[h])
      p = np.exp(scores - largest)
      p /= p.sum() + (0 if sinks is None else np.exp(sinks[h] - largest))
      dp = v[b, head, keys] @ do[b, h, m]
      ds = p * (dp - p @ dp + dlse[b, h, m]) * slopes * scale
      dq[b, h, m] = ds @ k[b, head, keys]
      np.add.at(dk[b, head], keys, ds[:, None] * q[b, h, m])
      np.add.at(dv[b, head], keys, p[:, None] * do[b, h, m])
  return dq, dk, dv


def gradients(
  case: Case, backend: str, lists: Any = None, **options: Any
) -> tuple[list[Array], tuple[Array, Array, Array]]:
  """The gradients of q, k and v that were found, and those of the oracle."""
  rng, (B, Hq, M, _) = np.random.default_rng(1), sizes(case.q)
  do, dlse = (rng.standard_normal(x).astype(np.float32) for x in ((B, Hq, M, sizes(case.v)[3]), (B, Hq, M)))
  leaves = [x.detach().clone().realize().is_param_() for x in (case.q, case.k, case.v)]
  rules = {name: options[name] for name in ("softcap", "sinks") if name in options}
  if "sinks" in options:
    options["sinks"] = placed(options["sinks"], dtypes.float32, case.device)
  q, k, v = leaves
  out, lse = attention_sparse(q, k, v, case.indices, enable_gqa=True, return_lse=True, backend=backend, **options)
  weights = [placed(x, dtypes.float32, case.device) for x in (do, dlse)]
  ((out * weights[0]).sum() + (lse.isinf().where(0, lse) * weights[1]).sum()).backward()
  found = [numpy(x.grad.realize()) for x in leaves if x.grad is not None]
  return found, of_oracle(case, do, dlse, lists, **rules)


def check(found: list[Array], wanted: tuple[Array, ...], dtype: Any = dtypes.float32) -> None:
  rtol, atol = {dtypes.float32: (1e-4, 2e-6), dtypes.float16: (0.02, 0.004), dtypes.bfloat16: (0.1, 0.03)}[dtype]
  for x, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, want, rtol=rtol, atol=atol * np.abs(want).max() + 1e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(per_head: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
  check(*gradients(Case(per_head=per_head), set_way(monkeypatch, way)))


@pytest.mark.kinds(arch=("gfx942", "sm_80", "cl"))
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_80", "sm_90", "apple9", "cl"])
@pytest.mark.parametrize("way", WAYS[:2])
def test_gradients_on_gpus(way: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """By chosen keys, in two chunks of queries, the last of which is not full."""
  count_of_chunks(monkeypatch, 2)
  with on(arch):
    case = Case((1, 4, 2, 3, 20, 23, 16, 24), dtypes.float16, "EMU")
    check(*gradients(case, set_way(monkeypatch, way)), dtypes.float16)


def count_of_chunks(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
  """Have so many queries in each chunk."""
  monkeypatch.setattr(chosen_rows.ChosenRows, "count", property(lambda self: min(queries, self.M)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_75", "gfx942", "apple9", "cl"])
@pytest.mark.each("arch", "per_head")
@pytest.mark.parametrize("per_head", [False, True])
def test_head_sizes_of_latent_attention(per_head: bool, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Through P and dS in memory, by the chosen keys whatever the choice."""
  count_of_chunks(monkeypatch, 2)
  with on(arch):
    case = Case((1, 4, 1 + per_head, 3, 10, 8, 576, 512), dtypes.float16, "EMU", per_head)
    check(*gradients(case, set_way(monkeypatch, "all keys" if per_head else "chosen")), dtypes.float16)


@pytest.mark.slow
def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
  """Chunks of queries in plain ops."""
  count_of_chunks(monkeypatch, 2)
  set_way(monkeypatch, "chosen")
  dispatch_among(monkeypatch, [cuda_backward.SEPARATE], backward=True)
  with on("sm_80"):
    case = Case((1, 4, 1, 3, 10, 8, 576, 512), dtypes.float16, "EMU")
    check(*gradients(case, "auto"), dtypes.float16)
    with pytest.raises(ValueError, match="backend='kernel'"):
      gradients(case, "kernel")


@pytest.mark.slow
@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("arch", [None, "sm_80", "gfx1100"])
def test_drawn(arch: str | None) -> None:
  @drawn(1, 2, 30)
  @given(
    shape=shapes(),
    way=st.sampled_from(WAYS[:2]),
    per_head=st.booleans(),
    dtype=st.sampled_from([dtypes.float32, dtypes.float16, dtypes.bfloat16]),
    has_lengths=st.booleans(),
    softcap=st.none() | st.floats(0.5, 10),
    has_sinks=st.booleans(),
    queries=st.integers(1, 5),
  )
  def check_drawn(
    shape: Any,
    way: str,
    per_head: bool,
    dtype: Any,
    has_lengths: bool,
    softcap: float | None,
    has_sinks: bool,
    queries: int,
  ) -> None:
    with pytest.MonkeyPatch.context() as patch, on(arch) if arch else Context():
      count_of_chunks(patch, queries)
      case = Case(shape, dtype, "EMU" if arch else "CPU", per_head)
      rng, (B, Hq, _, M, _, top_k, *_) = np.random.default_rng(0), shape
      options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
      lists = case.lists()
      if has_sinks:
        options["sinks"] = rng.standard_normal(Hq).astype(np.float32)
      if has_lengths:
        lengths = rng.integers(0, top_k + 1, (B, M))
        options["topk_length"] = placed(lengths, dtypes.int, case.device)
        whole, case.table = case.table, np.where(np.arange(top_k) < lengths[:, None, :, None], case.table, -1)
        lists, case.table = case.lists(), whole
      check(*gradients(case, set_way(patch, way), lists, **options), dtype)

  check_drawn()


@pytest.mark.parametrize("way", WAYS)
def test_many_duplicates(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """More of one key than a byte can count; and lists that are longer than there are keys."""
  case = Case((1, 2, 1, 2, 5, 300, 8, 8))
  case.table[:] = 2
  case.table[..., ::7] = 4
  found, wanted = gradients(case, set_way(monkeypatch, way))
  for x, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, want, rtol=1e-4, atol=4e-6 * np.abs(want).max())


@pytest.mark.parametrize("way", WAYS)
def test_of_sinks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
  found = []
  for backend in (set_way(monkeypatch, way), "reference"):
    case, sinks = Case(), Tensor([0.5, -1.0, 2.0, 0.0]).is_param_()
    attention_sparse(
      case.q, case.k, case.v, case.indices, enable_gqa=True, sinks=sinks, backend=backend
    ).square().sum().backward()
    assert sinks.grad is not None
    found.append(sinks.grad.numpy())
  np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def check_unread(case: Case, backend: str) -> None:
  """NaN in the keys that nobody has chosen changes no bit, twice."""
  case.table[case.table == 0] = 3
  case.table[case.table == sizes(case.k)[2] - 1] = 7
  unused = [0, sizes(case.k)[2] - 1]
  clean, _ = gradients(case, backend)
  k, v = (numpy(x).copy() for x in (case.k, case.v))
  k[:, :, unused], v[:, :, unused] = np.nan, np.nan
  case.k, case.v = (placed(x, case.q.dtype, case.device) for x in (k, v))
  for x, want in zip(gradients(case, backend)[0], clean, strict=True):
    np.testing.assert_array_equal(x, want)
  assert not any(x[:, :, unused].any() for x in clean[1:])
  assert all(x.any() for x in clean)


@pytest.mark.parametrize("way", WAYS)
def test_reads_only_chosen_keys(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
  check_unread(Case(), set_way(monkeypatch, way))


@pytest.mark.slow
def test_reads_only_chosen_keys_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
  count_of_chunks(monkeypatch, 2)
  with on("sm_80"):
    check_unread(Case((1, 2, 1, 3, 20, 9, 16, 16), dtypes.float16, "EMU"), set_way(monkeypatch, "chosen"))


@pytest.mark.kinds(arch=(None,))
@pytest.mark.parametrize("arch", [None, "sm_80"])
def test_padding(arch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
  """A query without keys may hold NaN, and so may the gradient of its output."""
  backend = set_way(monkeypatch, "chosen")
  with on(arch) if arch else Context():
    case = Case((1, 4, 2, 3, 20, 9, 16, 16), dtypes.float16 if arch else dtypes.float32, "EMU" if arch else "CPU")
    clean, _ = gradients(case, backend)
    q = numpy(case.q).copy()
    q[0, :, 0] = np.nan
    case.q = placed(q, case.q.dtype, case.device)
    for x, want in zip(gradients(case, backend)[0], clean, strict=True):
      np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("way", WAYS[:2])
def test_views(way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  """Heads last in q, and keys and values in one cache; gradients by the keys that queries have chosen copy nothing."""
  backend, case = set_way(monkeypatch, way), Case()
  wanted, _ = gradients(case, backend)
  q = case.q.transpose(1, 2).contiguous().realize().is_param_()
  whole = case.k.cat(case.v, dim=3).transpose(1, 2).contiguous().realize().is_param_()
  k, v = whole[..., :16].transpose(1, 2), whole[..., 16:].transpose(1, 2)
  out, lse = attention_sparse(q.transpose(1, 2), k, v, case.indices, enable_gqa=True, return_lse=True, backend=backend)
  rng = np.random.default_rng(1)
  do, dlse = (Tensor(rng.standard_normal(sizes(x)).astype(np.float32)) for x in (out, lse))
  ((out * do).sum() + (lse.isinf().where(0, lse) * dlse).sum()).backward()
  assert q.grad is not None
  assert whole.grad is not None
  dq, of_keys = q.grad.transpose(1, 2).numpy(), whole.grad.transpose(1, 2).numpy()
  for x, want in zip((dq, of_keys[..., :16], of_keys[..., 16:]), wanted, strict=True):
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)
  assert way == "all keys" or "copied" not in "".join(capsys.readouterr())


CHOICES: dict[str, tuple[tuple[int, ...], bool]] = {  # Hq, Hkv, M, N, top_k
  "many heads, few of the keys": ((16, 1, 64, 8192, 128), True),
  "many heads, most of the keys": ((16, 1, 64, 8192, 6000), False),
  "one head per key head, few of the keys": ((2, 2, 64, 8192, 128), True),
  "one head per key head, many of the keys": ((2, 2, 64, 8192, 2048), False),
  "too many pairs": ((1, 1, 1 << 18, 1 << 18, 200000), True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
  (Hq, Hkv, M, N, top_k), gathers = CHOICES[name]
  q, k, table = Tensor.empty(1, Hq, M, 8), Tensor.empty(1, Hkv, N, 8), Tensor.empty(M, 1, top_k, dtype=dtypes.int)
  assert Sparse.of(q, k, k, Arguments(enable_gqa=True, return_lse=True, indices=(table,))).gathers is gathers


def test_size_of_chunks() -> None:
  """As many queries as fit, evenly; one if none do."""
  assert chosen_rows.chunk_size(100, chosen_rows.CHUNK_BYTES // 30) == 25
  assert chosen_rows.chunk_size(100, chosen_rows.CHUNK_BYTES // 1000) == 100
  assert chosen_rows.chunk_size(100, chosen_rows.CHUNK_BYTES * 2) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["slots", "duplicates", "chunks"])
def test_mistakes_in_chunks_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Rows that are another key's, a duplicate that counts once, and chunks that overlap."""
  backend = set_way(monkeypatch, "chosen")
  count_of_chunks(monkeypatch, 2)
  if mistake == "slots":
    right = chosen_gradients.list_choosers
    monkeypatch.setattr(chosen_rows, "list_choosers", lambda *x, top_k: right(*x, top_k=top_k - 1))
  elif mistake == "duplicates":
    monkeypatch.setattr(chosen_rows, "find_chosen", lambda *x: once(chosen_gradients.find_chosen(*x)))
  else:
    zero = chosen_rows.zero_after
    monkeypatch.setattr(chosen_rows, "zero_after", lambda *x: zero(*x) - 1)
  with on("sm_80"), pytest.raises(AssertionError):
    check(*gradients(Case((1, 2, 1, 4, 20, 23, 16, 16), dtypes.float16, "EMU"), backend), dtypes.float16)


def once(graph: Any) -> Any:
  """The kernel, counting a key at most once."""
  return graph.substitute({u: u.src[1] for u in graph.toposort() if u.op.name == "ADD" and u.dtype == dtypes.uchar})


@pytest.mark.slow
def test_a_mistake_in_all_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
  """A duplicate that counts once."""
  backend, right = set_way(monkeypatch, "all keys"), choose.count_chosen
  monkeypatch.setattr("uopattn.plan.sparse.count_chosen", lambda *x, on_cpu: once(right(*x, on_cpu=on_cpu)))
  with on("sm_80"), pytest.raises(AssertionError):
    check(*gradients(Case((1, 2, 1, 2, 40, 23, 16, 16), dtypes.float16, "EMU"), backend), dtypes.float16)
