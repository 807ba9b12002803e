"""Attention over chosen keys, against the oracle on the keys gathered by numpy."""

from typing import Any

import numpy as np
import pytest
from helpers import drawn, on, placed
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Context, Tensor, TinyJit, dtypes

from uopattn import attention_sparse
from uopattn.dsl import sizes
from uopattn.kernels import choose
from uopattn.proof.gate import numpy, verify
from uopattn.proof.oracle import Array

SIZES = (2, 4, 2, 3, 50, 37, 16, 24)  # B, Hq, Hkv, M, N, top_k, Dk, Dv


class Case:
  """Random queries, keys and lists of keys: in any order, with duplicates and entries that are none."""

  def __init__(
    self, shape: tuple[int, ...] = SIZES, dtype: Any = dtypes.float32, device: str = "CPU", per_head: bool = False
  ):
    B, Hq, Hkv, M, N, top_k, Dk, Dv = shape
    rng, self.device = np.random.default_rng(sum(shape)), device
    shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv)
    self.q, self.k, self.v = (placed(rng.standard_normal(x, np.float32), dtype, device) for x in shapes)
    self.table = rng.integers(-N // 3, N, (B, Hkv if per_head else 1, M, top_k)).astype(np.int32)
    self.table[0, 0, 0] = -1  # a query without keys
    self.table[-1, :, -1, : top_k // 2] = -5  # none at first
    self.table[-1, :, -1, -2:] = N - 1  # the last key twice

  @property
  def indices(self) -> Tensor:
    return placed(self.table, dtypes.int, self.device)

  def lists(self) -> list[list[list[Array]]]:
    """The keys of each batch, head and query."""
    B, Hkv, N = sizes(self.k)[:3]
    table = np.broadcast_to(self.table, (B, Hkv, *self.table.shape[2:]))
    return [[[row[(row >= 0) & (row < N)] for row in rows] for rows in heads] for heads in table]

  def check(self, out: Tensor, lse: Tensor, lists: Any = None, **rules: Any) -> None:
    """Fail unless output and LSE pass the gate."""
    B, Hq, M = sizes(self.q)[:3]
    Hkv, top_k = sizes(self.k)[1], self.table.shape[3]
    counts = np.zeros((B * M, Hkv), np.int32)
    keys, values = (np.zeros((B * M, Hkv, top_k, sizes(x)[3]), np.float32) for x in (self.k, self.v))
    for b, heads in enumerate(lists or self.lists()):
      for h, rows in enumerate(heads):
        for m, row in enumerate(rows):
          counts[b * M + m, h] = len(row)
          for found, x in ((keys, self.k), (values, self.v)):
            found[b * M + m, h, : len(row)] = numpy(x)[b, h, row]
    seen = np.arange(top_k) < counts.repeat(Hq // Hkv, 1)[:, :, None, None]
    k, v = (placed(x, self.q.dtype, "CPU") for x in (keys, values))
    q, out, lse = (
      of_sequences(placed(numpy(x), d, "CPU")) for x, d in ((self.q, self.q.dtype), (out, out.dtype), (lse, lse.dtype))
    )
    for report in verify(q, k, v, out, lse, attn_mask=seen, **rules):
      assert report.correct, f"worst at {report.worst}: {report}"

  def run(self, backend: str = "kernel", **options: Any) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend} | options
    out, lse = attention_sparse(self.q, self.k, self.v, self.indices, **given)
    Tensor.realize(out, lse)
    return out, lse


def of_sequences(x: Tensor) -> Tensor:
  B, H, M, *width = sizes(x)
  return x.transpose(1, 2).reshape(B * M, H, 1, *width).contiguous().realize()


CASES: dict[str, tuple[tuple[int, ...], bool]] = {
  "few": (SIZES, False),
  "per head": (SIZES, True),
  "longer lists than threads": ((1, 4, 2, 2, 40, 139, 16, 16), True),
  "one key": ((1, 2, 1, 2, 1, 3, 8, 8), False),
  "one head": ((1, 1, 1, 20, 33, 17, 24, 8), False),
}


@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_sizes(name: str, backend: str) -> None:
  shape, per_head = CASES[name]
  case = Case(shape, per_head=per_head)
  out, lse = case.run(backend)
  assert not out.numpy()[0, 0, 0].any()
  assert lse.numpy()[0, 0, 0] == -np.inf
  case.check(out, lse)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
  B, Hkv, group, M, N, top_k, Dk, Dv = (draw(st.integers(1, n)) for n in (2, 3, 4, 5, 90, 90, 40, 40))
  return B, Hkv * group, Hkv, M, N, top_k, Dk, Dv


@pytest.mark.slow
@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("arch", [None, "gfx942", "sm_80", "sm_90", "apple9", "cl"])
def test_drawn(arch: str | None) -> None:
  @drawn(1, 2, 30)
  @given(
    shape=shapes(),
    per_head=st.booleans(),
    dtype=st.sampled_from([dtypes.float32, dtypes.float16, dtypes.bfloat16]),
    has_lengths=st.booleans(),
    softcap=st.none() | st.floats(0.5, 10),
    has_sinks=st.booleans(),
  )
  def check(shape: Any, per_head: bool, dtype: Any, has_lengths: bool, softcap: float | None, has_sinks: bool) -> None:
    with on(arch) if arch else Context():
      case = Case(shape, dtype, "EMU" if arch else "CPU", per_head)
      rng, (B, Hq, _, M, _, top_k, *_) = np.random.default_rng(0), shape
      rules: dict[str, Any] = {"softcap": softcap}
      options, lists = dict(rules), case.lists()
      if has_sinks:
        rules["sinks"] = sinks = rng.standard_normal(Hq).astype(np.float32)
        options["sinks"] = placed(sinks, dtypes.float32, case.device)
      if has_lengths:
        lengths = rng.integers(0, top_k + 1, (B, M))
        options["topk_length"] = placed(lengths, dtypes.int, case.device)
        whole, case.table = case.table, np.where(np.arange(top_k) < lengths[:, None, :, None], case.table, -1)
        lists, case.table = case.lists(), whole
      case.check(*case.run(**options), lists=lists, **rules)

  check()


@pytest.mark.kinds(arch=("gfx942", "sm_80", "sm_90", "apple9", "cl"))
@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90", "apple9", "cl"])
def test_on_gpus(arch: str) -> None:
  with on(arch):
    case = Case(dtype=dtypes.float16, device="EMU", per_head=True)
    case.check(*case.run())


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_latent_on_gpus(arch: str) -> None:
  """Values in keys, as with absorbed weights."""
  with on(arch):
    case = Case((1, 16, 1, 1, 60, 40, 576, 512), dtypes.float16, "EMU")
    case.table[0, 0, 0, ::3] = np.arange(14)
    case.v = case.k[..., :512]
    case.check(*case.run())


def test_latent() -> None:
  case = Case((1, 16, 1, 2, 60, 40, 72, 64))
  case.v = case.k[..., :64]
  case.check(*case.run())


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_options(backend: str) -> None:
  sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
  case = Case()
  out, lse = case.run(backend, sinks=Tensor(sinks), softcap=1.5, scale=0.4)
  case.check(out, lse, sinks=sinks, softcap=1.5, scale=0.4)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_lengths(backend: str) -> None:
  case = Case()
  lengths = np.array([[5, 0, 37], [1, 20, 36]])
  lists = [[[row[:n][row[:n] >= 0] for row, n in zip(rows, ns, strict=True)] for rows in heads.repeat(2, 0)]
           for heads, ns in zip(case.table, lengths, strict=True)]  # fmt: skip
  case.check(*case.run(backend, topk_length=Tensor(lengths)), lists=lists)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_reads_only_chosen_keys(backend: str) -> None:
  """Keys that no query has chosen may hold anything, the one that an invalid index could stand for too."""
  case = Case()
  case.table[case.table == 0] = 3
  case.table[case.table == 49] = 7
  clean = [x.numpy() for x in case.run(backend)]
  k, v = (numpy(x).copy() for x in (case.k, case.v))
  k[:, :, [0, 49]], v[:, :, [0, 49]] = np.nan, np.nan
  case.k, case.v = Tensor(k), Tensor(v)
  for x, want in zip(case.run(backend), clean, strict=True):
    np.testing.assert_array_equal(x.numpy(), want)


def test_views_are_read_in_place(capsys: pytest.CaptureFixture[str]) -> None:
  case = Case()
  want = [x.numpy() for x in case.run()]
  whole = Tensor.zeros(2, 70, 2, 40).contiguous().realize()
  whole[:, 10:60, :, :16].assign(case.k.transpose(1, 2)).realize()
  whole[:, 10:60, :, 16:].assign(case.v.transpose(1, 2)).realize()
  case.k, case.v = whole[:, 10:60, :, :16].transpose(1, 2), whole[:, 10:60, :, 16:].transpose(1, 2)
  for x, y in zip(case.run(), want, strict=True):
    np.testing.assert_allclose(x.numpy(), y, rtol=1e-5, atol=1e-6)
  assert "copied" not in "".join(capsys.readouterr())


def test_replay_with_other_indices() -> None:
  """One compiled step serves all indices, and one that is out of range while it replays is no key."""
  case = Case()

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attention_sparse(q, k, v, indices, enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    return out, lse

  for i in range(4):
    case.table = np.roll(case.table, i, axis=2)
    if i == 3:
      case.table[:, :, :, 1::4] = 50 + 10**8
    case.check(*step(case.q, case.k, case.v, case.indices))


@pytest.mark.parametrize("mistake", ["counts", "entries"])
def test_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """A key too many, and an entry that is another key's."""
  list_keys = choose.list_keys

  def wrong(*given: Any, keys: int, on_cpu: bool) -> Any:
    return list_keys(*given, keys=keys - 2, on_cpu=on_cpu)

  with on("sm_80"):
    case = Case((1, 2, 1, 2, 40, 23, 16, 16), dtypes.float16, "EMU")
    if mistake == "entries":
      monkeypatch.setattr("uopattn.plan.sparse.list_keys", wrong)
    else:
      monkeypatch.setattr(choose, "all_of", lambda *x: x[0].cast(dtypes.int))
    with pytest.raises(AssertionError):
      case.check(*case.run())


Q, K, I = Tensor.zeros(2, 4, 3, 8), Tensor.zeros(2, 2, 9, 8), Tensor.zeros(2, 1, 3, 5, dtype=dtypes.int)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "index": ({"indices": Tensor([[[[0, 1], [-1, 2], [3, 9]]]] * 2)}, ValueError,
            r"indices\[0, 0, 2, 1\] is 9; it must be at most 8, as k has 9 keys; a negative one is no key"),
  "dtype": ({"indices": Tensor.zeros(2, 1, 3, 5)}, TypeError, "indices has dtype float; it must be a Tensor of an int"),
  "heads": ({"indices": I.expand(2, 4, 3, 5)}, ValueError, r"it must be \(2, 2 or 1, 3, top_k\)"),
  "no Tensor": ({"indices": [1]}, TypeError, "indices is a list; it must be a tinygrad Tensor"),
  "k": ({"k": K[:1]}, ValueError, r"k must be \(2, Hkv, N, 8\)"),
  "v": ({"v": K[:, :, 1:]}, ValueError, r"v must be \(2, 2, 9, Dv\)"),
  "length": ({"topk_length": Tensor([[1, 2, 6]] * 2)}, ValueError,
             r"topk_length\[0, 2\] is 6; it must be from 0 to 5, as each query has 5 indices"),
  "option": ({"is_causal": True}, TypeError, "unexpected keyword argument 'is_causal'"),
  "heads of q": ({"enable_gqa": False}, ValueError, "must be equal unless enable_gqa=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
  given, error, message = WRONG[name]
  operands: dict[str, Any] = {"q": Q, "k": K, "v": K, "indices": I, "enable_gqa": True}
  with pytest.raises(error, match=message):
    attention_sparse(**operands | given)


@pytest.mark.parametrize("empty", ["indices", "keys"])
def test_nothing_to_see(empty: str) -> None:
  k = K[:, :, :0] if empty == "keys" else K
  out, lse = attention_sparse(Q, k, k, I[..., :0] if empty == "indices" else I - 1, enable_gqa=True, return_lse=True)
  assert not out.numpy().any()
  assert (lse.numpy() == -np.inf).all()
