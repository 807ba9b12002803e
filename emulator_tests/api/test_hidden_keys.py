"""What hidden keys and values may hold: the table in emulator_tests/README.md, row by row, on every forward kernel."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import Device, Tensor, dtypes

from uopattn import BlockMask, attention, attention_varlen

N, LENGTH, D = 100, 66, 16
# By each argument the keys that it hides, and no other one, from the queries that stand before `LENGTH` and see key 30.
HIDDEN: dict[str, slice] = {
  "kv_lengths": slice(LENGTH, N),
  "is_causal": slice(LENGTH - 1, LENGTH),
  "window": slice(2, 3),
  "attn_mask of bool": slice(21, 22),
  "mask_mod": slice(22, 23),
  "score_mod": slice(23, 24),
  "block_mask": slice(24, 25),
}
EMULATED = ("gfx942", "sm_80", "sm_90", "gfx1100", "amx")
KERNELS = ("plain ops", "cpu_forward", "cpu_decode", *EMULATED[:-2])


def promised(row: str) -> tuple[str, str]:
  """What keys and values may hold, as the table says."""
  lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
  (found,) = (line for line in lines if line.startswith(f"| {row} |"))
  keys, values = (cell.strip() for cell in found.split("|")[3:5])
  assert {keys, values} <= {"anything", "finite numbers"}
  return keys, values


ROWS = {name: f"`{name}`" for name in HIDDEN} | {
  "attn_mask of bool": "`attn_mask` of bool",
  "score_mod": "`score_mod` that gives -inf",
}


def options(M: int, block_mask: bool) -> dict[str, Any]:
  """All the arguments together, each of which hides its own key."""
  seen = np.ones((1, 1, 1, N), bool)
  seen[..., HIDDEN["attn_mask of bool"]] = False
  start = LENGTH + 1 - M
  found: dict[str, Any] = {
    "kv_lengths": placed(np.array([LENGTH], np.int32)),
    "is_causal": True,
    "q_start": start,
    "window": (start - 3, None),
    "attn_mask": placed(seen),
    "mask_mod": lambda b, h, i, j: (j - 22).abs() > 0,
    "score_mod": lambda score, b, h, i, j: ((j - 23).abs() > 0).where(score, -math.inf),
  }
  if block_mask:
    hides = lambda b, h, i, j: (j - 24).abs() > 0  # noqa: E731
    found["block_mask"] = BlockMask.of(hides, 1, 1, M, N, (), 32, 32, Device.DEFAULT)
  return found


def computed(M: int, kernel: str, bad: dict[str, slice]) -> np.ndarray[Any, Any]:
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.standard_normal((1, 2, n, D)).astype(np.float32) for name, n in zip("qkv", (M, N, N), strict=True)
  }
  for name, keys in bad.items():
    arrays[name][:, :, keys] = np.resize([math.nan, math.inf, -math.inf], arrays[name][:, :, keys].shape)
  q, k, v = (placed(x, dtypes.float16) for x in arrays.values())
  backend = "reference" if kernel == "plain ops" else "kernel"
  out = attention(q, k, v, backend=backend, **options(M, kernel != "cpu_decode"))
  return out.realize().to("CPU").float().numpy()


@pytest.mark.kinds(kernel=("plain ops", "cpu_forward", "gfx942", "sm_90"))
@pytest.mark.parametrize(
  "kernel", [*KERNELS, *(pytest.param(x, marks=pytest.mark.slowest) for x in ("gfx1100", "amx"))]
)
def test_what_is_promised_of_hidden_keys(kernel: str) -> None:
  M = 3 if kernel == "cpu_decode" else 40
  with on(kernel) if kernel in EMULATED else nullcontext():
    clean = computed(M, kernel, {})
    assert np.isfinite(clean).all()
    for name, keys in HIDDEN.items():
      if name == "block_mask" and kernel == "cpu_decode":  # which has none
        continue
      free = promised(ROWS[name])
      bad = {x: keys for x, holds in zip("kv", free, strict=True) if holds == "anything"}
      assert "k" in bad
      rows = slice(M - 2) if name == "is_causal" else slice(M)  # those that it is hidden from
      np.testing.assert_array_equal(computed(M, kernel, bad)[:, :, rows], clean[:, :, rows], err_msg=name)


def test_what_is_promised_of_other_sequences() -> None:
  free, lengths = promised("`attention_varlen`, other sequences"), [0, 9, 30]
  rng = np.random.default_rng(0)
  q, k, v = (rng.standard_normal((30, 2, D)).astype(np.float32) for _ in range(3))
  found = []
  for bad in (False, True):
    if bad:
      for x, holds in ((k, free[0]), (v, free[1])):
        x[:9] = math.nan if holds == "anything" else x[:9]
    out = attention_varlen(Tensor(q), Tensor(k), Tensor(v), lengths, lengths, backend="kernel")
    found.append(out.numpy()[9:])
  assert free[0] == "anything"
  assert np.isfinite(found[0]).all()
  np.testing.assert_array_equal(found[0], found[1])
