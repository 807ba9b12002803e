"""Packed queries over keys in pages, against the oracle on each sequence, with its keys gathered by numpy."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, on, on_device, placed
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import P, kept_weights
from test_paged import NO_PAGE
from test_varlen import biased, ends, near_keys, of_sequence
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.engine.realize import runtime_cache

from uopattn import BlockMask, attention_paged, attention_varlen
from uopattn.api import varlen_paged
from uopattn.api.varlen_paged import QueryBlocks, queries_per_block
from uopattn.proof.gate import Gate, numpy

HQ, HKV, DK, DV = 4, 2, 16, 24
Heads = tuple[int, int, int, int]
Array = np.ndarray[Any, Any]

# Queries and keys of each sequence.
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
  "decode": ([1, 1, 1, 1], [30, 9, 44, 70]),
  "chunks and single queries": ([1, 40, 1, 1, 70, 1], [33, 40, 1, 77, 100, 5]),
  "one": ([70], [90]),
  "no queries in some": ([0, 20, 0, 0, 9, 0], [7, 40, 3, 0, 20, 11]),
  "no keys in some": ([1, 13, 2], [0, 50, 0]),
  "more queries than keys": ([30, 1, 9], [20, 0, 4]),
  "whole blocks": ([8, 16, 64, 8], [8, 30, 64, 90]),
}


class Case:
  """Random packed queries, and pages in which everything that nobody may read is NaN, and every such id invalid.

  Attributes:
    rows: queries of q, of which those past the last end belong to no sequence.
  """

  def __init__(
    self,
    queries: list[int],
    lengths: list[int],
    page_size: int = 8,
    rows: int | None = None,
    max_pages: int | None = None,
    dtypes_: tuple[Any, Any] = (dtypes.float32, dtypes.float32),
    device: str = "CPU",
    seed: int = 0,
    heads: Heads = (HQ, HKV, DK, DV),
  ):
    rng, (Hq, Hkv, Dk, Dv) = np.random.default_rng(seed), heads
    self.queries, self.lengths, self.page_size, self.device = queries, lengths, page_size, device
    self.ends, self.Hq, used = ends(queries), Hq, [-(-n // page_size) for n in lengths]
    self.max_pages = max_pages or max([1, *used])
    order = rng.permutation(sum(used) + 2)
    self.table = np.full((len(lengths), self.max_pages), NO_PAGE, np.int32)
    pages = np.full((len(order), Hkv, page_size, Dk + Dv), math.nan, np.float32)
    for s, n in enumerate(lengths):
      self.table[s, : used[s]] = order[sum(used[:s]) : sum(used[: s + 1])]
      for j in range(n):
        pages[self.table[s, j // page_size], :, j % page_size] = rng.standard_normal((Hkv, Dk + Dv))
    total = rows or self.ends[-1]
    self.q = placed(rng.standard_normal((total, Hq, Dk), np.float32), dtypes_[0], device)
    self.k, self.v = (placed(np.ascontiguousarray(x), dtypes_[1], device) for x in np.split(pages, [Dk], axis=-1))

  def ints(self, x: Any) -> Tensor:
    return placed(np.asarray(x, np.int32), device=self.device)

  def arguments(self) -> tuple[Tensor, ...]:
    """q, k, v, and cu_seqlens_q, page_table and kv_lengths, which may change from call to call."""
    return self.q, self.k, self.v, self.ints(self.ends), self.ints(self.table), self.ints(self.lengths)

  def run(self, **options: Any) -> tuple[Tensor, Tensor]:
    q, k, v, cu, table, lengths = self.arguments()
    chosen = {"page_table": table, "kv_lengths": lengths, "backend": "kernel"} | options
    out, lse = attention_varlen(q, k, v, cu, None, enable_gqa=True, return_lse=True, **chosen)
    Tensor.realize(out, lse)
    return out, lse

  def keys(self, x: Tensor, s: int) -> Array:
    """(1, Hkv, keys, D): the keys or the values of a sequence."""
    places = np.arange(self.lengths[s])
    found = numpy(x)[self.table[s, places // self.page_size], :, places % self.page_size]
    return found.swapaxes(0, 1)[None]

  def compare(self, out: Tensor, lse: Tensor, q_start: list[int] | int | None = None, **options: Any) -> None:
    """Fail unless output and LSE pass the gate. `options` are the oracle's; a mask is of packed queries."""
    q, got, got_lse = (numpy(x).swapaxes(0, 1)[None] for x in (self.q, out, lse.transpose(0, 1)))
    alone = options.get("sinks", np.full(self.Hq, -np.inf))[:, None]  # the LSE of a row that sees no key
    mask, kept = options.pop("attn_mask", None), options.pop("kept", None)
    for s, (first, end) in enumerate(pairwise(self.ends)):
      rows, n = slice(first, end), self.lengths[s]
      if n == 0:
        assert (got[:, :, rows] == 0).all()
        assert (got_lse[0, :, rows] == alone).all()
      elif first < end:
        start = n - self.queries[s] if q_start is None else q_start if isinstance(q_start, int) else q_start[s]
        own = of_sequence(s, options) | ({} if kept is None else {"kept": kept[None, :, rows, :n]})
        if mask is not None:
          own["attn_mask"] = np.broadcast_to(mask, (self.Hq, *mask.shape[-2:]))[
            None, :, rows if mask.shape[-2] > 1 else slice(None), :n
          ]
        k, v = self.keys(self.k, s), self.keys(self.v, s)
        gate = Gate.of_arrays(q[:, :, rows], k, v, self.q.dtype, q_start=start, **own)
        for report in (gate.output(got[:, :, rows]), gate.lse(got_lse[:, :, rows])):
          assert report.correct, f"sequence {s}, worst at {report.worst}: {report}"
    assert (got[:, :, self.ends[-1] :] == 0).all()
    assert (got_lse[0, :, self.ends[-1] :] == alone).all()

  def check(self, q_start: Any = None, **options: Any) -> None:
    given = {name: on_device(x) for name, x in options.items()}
    if q_start is not None:
      given["q_start"] = q_start if isinstance(q_start, int) else self.ints(q_start)
    backend = given.pop("backend", "kernel")
    options.pop("backend", None)
    options.pop("max_seqlen_q", None)
    self.compare(*self.run(backend=backend, **given), q_start=q_start, **options)


@pytest.mark.each("is_causal", evenly=True)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_sequence_is_an_attention_of_its_own(name: str, is_causal: bool) -> None:
  Case(*LENGTHS[name]).check(is_causal=is_causal)


MIXED = LENGTHS["chunks and single queries"]
OPTIONS: dict[str, dict[str, Any]] = {
  "window": {"window": (9, 4)},
  "softcap": {"softcap": 1.5, "scale": 0.4, "is_causal": True},
  "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32), "is_causal": True},
  "one start": {"q_start": 13, "is_causal": True},
  "starts": {"q_start": [10, -40, 51, 0, 30, 2], "is_causal": True},
  "longest": {"max_seqlen_q": 70, "is_causal": True},
}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str) -> None:
  """With rows of q that belong to no sequence."""
  Case(*MIXED, rows=120).check(backend=backend, **OPTIONS[name])
