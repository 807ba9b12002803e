"""Masks that hide single keys in pages, and dropout, against the oracle on the keys gathered by numpy."""

from typing import Any

import numpy as np
import pytest
from helpers import on, placed
from test_dropout import P, kept_weights
from test_paged import HQ, B, Case
from tinygrad import Context, dtypes

from uopattn import BlockMask


def masks(name: str, M: int, N: int, device: str = "CPU") -> tuple[dict[str, Any], dict[str, Any]]:
  """What `attention_paged` takes, and what the oracle does, for what hides single keys."""
  rng = np.random.default_rng(M)
  bias = rng.standard_normal((HQ, M, N)).astype(np.float32)
  bias[:, :, 70:] = np.nan  # beyond the lengths
  seen = rng.random((B, 1, M, N)) < 0.6
  if name == "dropout":
    return {"dropout_p": P}, {"dropout_p": P, "kept": kept_weights(B, HQ, M, N)}
  if name == "block_mask":
    given = BlockMask.of(banded, 1, HQ, M, N, block_m=16, block_n=10, device=device)
    return {"block_mask": given}, {"mask_mod": banded}
  x = bias if name == "additive" else seen[:1, :, :1] if name == "of keys" else seen
  return {"attn_mask": placed(x, device=device)}, {"attn_mask": np.where(np.isnan(x), 0, x) if x is bias else x}


def banded(b: Any, h: Any, i: Any, j: Any) -> Any:
  return (j <= i + 40) & (j % 30 < 15 + 5 * h)


def check_masks(name: str, M: int, backend: str = "kernel", device: str = "CPU", **options: Any) -> None:
  case = Case([70, 41], 13, M=M, device=device, **options)
  given, theirs = masks(name, M, case.max_pages * 13, device)
  with Context(TRAINING=int(name == "dropout")):
    results = case.run(backend, is_causal=True, q_start=38, **given)
  for report in case.reports(*results, is_causal=True, q_start=38, **theirs):
    assert report.correct, f"worst at {report.worst}: {report}"


MASKS = ("bool", "of keys", "additive", "block_mask", "dropout")


@pytest.mark.each("way", evenly=True)
@pytest.mark.parametrize("way", [("kernel", 3), ("kernel", 40), ("reference", 3)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_dropout(name: str, way: tuple[str, int]) -> None:
  check_masks(name, way[1], way[0])


@pytest.mark.kinds(arch=("gfx942", "sm_90", "apple9", "cl"))
@pytest.mark.each("name", "arch", evenly=True)
@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90", "apple9", "cl"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_dropout_on_gpus(name: str, arch: str) -> None:
  with on(arch):
    check_masks(name, 20, device="EMU", dtype=dtypes.float16)
