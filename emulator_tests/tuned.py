"""What the tests of the tuner share: specs, their candidates, and the command."""

import sys
from typing import Any

import pytest
from helpers import qkv
from tinygrad import Tensor, UOp, dtypes

from uopattn import KVCache
from uopattn.dsl.rules.quantized import INT4, NVFP4
from uopattn.plan import dispatch
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.tuning import command

SHAPE = (1, 2, 1, 20, 24, 16, 16)
WORDS = ("B=1", "H=2", "HKV=1", "M=20", "N=24", "D=16", "DTYPE=float")


def spec_of(shape: tuple[int, int, int, int, int, int, int] = SHAPE, **options: Any) -> AttentionSpec:
  """B, Hq, Hkv, M, N, Dk and Dv, in float32, with the log-sum-exp."""
  return make_spec(*qkv(*shape), Arguments(enable_gqa=True, return_lse=True, **options))


def the(number: int, spec: AttentionSpec) -> Launch:
  """One of a CPU's candidates; the model's choice is the first."""
  return dispatch.candidates(spec, target_of("CPU"))[number]


def tuned_by_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
  """The exit status of `python -m uopattn.tune` with these words."""
  monkeypatch.setattr(sys, "argv", ["uopattn.tune", *words])
  return command.main()


def views() -> AttentionSpec:
  q, k, v = (Tensor.empty(2, n, 4, 16).transpose(1, 2) for n in (20, 30, 30))
  return make_spec(q, k[:, ::2], v[:, ::2], Arguments(enable_gqa=True, return_lse=True, window=(9, 0)))


def step_of_a_cache() -> AttentionSpec:
  start = UOp.variable("start", 0, 38).bind(5)
  q, k, v = (Tensor.empty(1, heads, n, 16) for heads, n in ((4, 2), (2, 40), (2, 40)))
  return make_spec(q, k, v, Arguments(enable_gqa=True, is_causal=True, q_start=start, kv_lengths=start + 2))


def with_tensors() -> AttentionSpec:
  mask, sinks, lengths = Tensor.empty(2, 1, 20, 24), Tensor.empty(4), Tensor.empty(2, dtype=dtypes.int)
  return spec_of(
    (2, 4, 2, 20, 24, 16, 8), attn_mask=mask, sinks=sinks, kv_lengths=lengths, q_start=lengths, softcap=5.0
  )


def cache_of_8_bits() -> AttentionSpec:
  q, k, v = (Tensor.empty(2, *shape) for shape in ((4, 3, 16), (2, 24, 16), (2, 24, 8)))
  scales, lengths = (Tensor.empty(2, 2, 24), Tensor.empty(2, 2, 24)), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"scales": scales, "kv_lengths": lengths, "q_start": lengths, "is_causal": True}
  return make_spec(q, k.cast(dtypes.int8), v.cast(dtypes.int8), Arguments(enable_gqa=True, **options))


def cache_of_4_bits() -> AttentionSpec:
  cache, lengths = KVCache(2, 2, 24, 32, 16, dtype="nvfp4"), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"scales": (cache.k_scale, cache.v_scale), "four": NVFP4, "kv_lengths": lengths}
  q = Tensor.empty(2, 4, 3, 32)
  return make_spec(q, cache.k, cache.v, Arguments(enable_gqa=True, is_causal=True, q_start=lengths, **options))


def pages() -> AttentionSpec:
  """Two sequences, each of three entries in the page table, over a pool of five pages."""
  q, k, v = (Tensor.empty(*shape) for shape in ((2, 4, 3, 16), (5, 2, 8, 16), (5, 2, 8, 16)))
  table, lengths = Tensor.empty(2, 3, dtype=dtypes.int), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "q_start": lengths, "is_causal": True}
  return make_spec(q, k, v, Arguments(enable_gqa=True, **options))


def pages_of_4_bits() -> AttentionSpec:
  """Those of one layer of a pool of two, heads after keys."""
  table, lengths, scales = (
    Tensor.empty(2, 3, dtype=dtypes.int),
    Tensor.empty(2, dtype=dtypes.int),
    Tensor.empty(5, 2, 8),
  )
  options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "scales": (scales, scales), "four": INT4}
  pool = Tensor.empty(2, 2, 5, 8, 2, 20, dtype=dtypes.uint8)
  k, v = (pool[1, i].transpose(1, 2) for i in range(2))
  return make_spec(Tensor.empty(2, 4, 3, 32), k, v, Arguments(enable_gqa=True, **options))
