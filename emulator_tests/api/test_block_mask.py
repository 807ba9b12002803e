"""Block masks: what they count, the tiles that they list for kernels, and attention with them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import check, on, placed, qkv
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import KernelInfo

from uopattn import BlockMask, attention
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.rules import Rules
from uopattn.mods import and_masks, causal, document
from uopattn.proof.oracle import Array
from uopattn.runtime.prepare import compiled

B, H, M, N = 2, 3, 130, 201
DOCUMENTS = (np.arange(N) // 37).astype(np.int32)
BLOCKS = np.random.default_rng(2).random((B, H, 5, 7)) < 0.3

# A mask_mod, its aux, its batches and heads, and the same as a dense mask.
Case = tuple[Any, tuple[Array, ...], int, int, Any]
CASES: dict[str, Case] = {
  "causal": (causal, (), 1, 1, lambda b, h, i, j: j <= i),
  "documents": (document(), (DOCUMENTS,), 1, 1, lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]),
  "blocks": (lambda b, h, i, j, x: x[b, h, i // 32, j // 32], (BLOCKS,), B, H,
             lambda b, h, i, j: BLOCKS[b, h, i // 32, j // 32]),
  "heads": (lambda b, h, i, j: (j // 40 + h) % 3 == 0, (), 1, H, lambda b, h, i, j: (j // 40 + h + 0 * i) % 3 == 0),
  "batches": (lambda b, h, i, j: (i // 40 + b) % 2 == 0, (), B, 1, lambda b, h, i, j: (i // 40 + b + 0 * j) % 2 == 0),
  "nothing": (lambda b, h, i, j: False, (), 1, 1, lambda b, h, i, j: j < 0),
  "everything": (lambda b, h, i, j: j >= 0, (), 1, 1, lambda b, h, i, j: j >= 0),
}  # fmt: skip


EACH_LAYOUT = ("causal", "blocks", "nothing", "everything")  # one for all heads, one for each, and the extremes


def made(name: str, block_m: int = 32, block_n: int = 32, device: str | None = None) -> BlockMask:
  mod, aux, batches, heads, _ = CASES[name]
  tensors = tuple(placed(x, device=device) for x in aux)
  return BlockMask.of(mod, batches, heads, M, N, tensors, block_m, block_n, device)


def dense(name: str) -> Array:
  _, _, batches, heads, seen = CASES[name]
  return np.broadcast_to(seen(*np.ogrid[:batches, :heads, :M, :N]), (batches, heads, M, N))


def pairs(seen: Array, block_m: int, block_n: int) -> Array:
  rows = np.add.reduceat(seen.astype(int), range(0, M, block_m), 2)
  return np.add.reduceat(rows, range(0, N, block_n), 3)


@pytest.mark.each("size", evenly=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [(32, 32), (128, 70), (1000, 1000)], ids=str)
def test_counts_what_is_seen_of_each_block(name: str, size: tuple[int, int]) -> None:
  mask, seen = made(name, *size), dense(name)
  count, total = pairs(seen, *size), pairs(np.ones_like(seen), *size)
  np.testing.assert_array_equal(mask.counts.numpy(), count)
  for kind, want in (("full", count == total), ("empty", count == 0), ("partial", (count > 0) & (count < total))):
    np.testing.assert_array_equal(getattr(mask, kind).numpy(), want)
  assert mask.density == pytest.approx(seen.mean())


@pytest.mark.parametrize("arch", ["gfx1100", "sm_90"])
def test_counts_on_the_emulator(arch: str) -> None:
  with on(arch):
    mask = made("documents", device="EMU")
    lists = mask.tile_lists(48, 64, of_keys=False)
    np.testing.assert_array_equal(mask.counts.numpy(), pairs(dense("documents"), 32, 32))
  for got, want in zip(lists, made("documents").tile_lists(48, 64, of_keys=False), strict=True):
    np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_no_array_of_queries_and_keys_is_kept() -> None:
  before = GlobalCounters.mem_used
  with Context(DEBUG=0):
    mask = BlockMask.of(lambda b, h, i, j: (i ^ j) % 3 == 0, 1, 2, 4096, 4096)
    peak = GlobalCounters.mem_used - before
    mask.tile_lists(64, 64, of_keys=False)
  assert peak <= 2 * 32 * 32 * 4
  assert GlobalCounters.mem_used - before < 4096 * 4096 / 32


def check_lists(seen: Array, lists: tuple[Tensor, Tensor], block_m: int, block_n: int, complete: bool = False) -> None:
  """The laws of `Rules.tile_lists`, whatever the mask's own blocks are; with `complete` no whole tile has less rows."""
  order, numbers = (x.numpy() for x in lists)
  rows, columns = seen.shape[2:]
  tiles = ceildiv(columns, block_n)
  assert order.shape == (*seen.shape[:2], ceildiv(rows, block_m), tiles)
  assert numbers.shape == (*order.shape[:3], 2)
  for b, h, block in np.ndindex(*order.shape[:3]):
    whole, count = numbers[b, h, block]
    assert sorted(order[b, h, block]) == list(range(tiles))
    assert 0 <= whole <= count
    assert 1 <= count <= tiles
    for position, tile in enumerate(order[b, h, block]):
      inside = seen[b, h, block * block_m : (block + 1) * block_m, tile * block_n : (tile + 1) * block_n]
      if position < whole:
        assert inside.all()
        assert inside.shape[1] == block_n
        assert not complete or inside.shape[0] == block_m
      if position >= count:
        assert not inside.any()


@pytest.mark.each("tile", evenly=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tile", [(64, 16), (48, 20), (500, 500)], ids=str)
def test_lists_tiles_of_any_size(name: str, tile: tuple[int, int]) -> None:
  mask = made(name)
  check_lists(dense(name), mask.tile_lists(*tile, of_keys=False), *tile)
  check_lists(dense(name).transpose(0, 1, 3, 2), mask.tile_lists(*tile[::-1], of_keys=True), *tile[::-1], complete=True)


@pytest.mark.parametrize("name", [x if x in EACH_LAYOUT else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_lists_are_as_short_as_they_can_be_where_the_sizes_are_the_masks(name: str) -> None:
  mask, count = made(name), pairs(dense(name), 32, 32)
  numbers, of_keys = (
    x.numpy() for _, x in (mask.tile_lists(32, 32, of_keys=False), mask.tile_lists(32, 32, of_keys=True))
  )
  whole = (count == pairs(np.ones_like(dense(name)), 32, 32)) & ((np.arange(count.shape[3]) + 1) * 32 <= N)
  np.testing.assert_array_equal(numbers[..., 0], whole.sum(-1))
  np.testing.assert_array_equal(numbers[..., 1], np.maximum(1, (count > 0).sum(-1)))
  np.testing.assert_array_equal(of_keys[..., 0], (whole & ((np.arange(count.shape[2])[:, None] + 1) * 32 <= M)).sum(-2))
  np.testing.assert_array_equal(of_keys[..., 1], np.maximum(1, (count > 0).sum(-2)))


def test_lists_are_worked_out_once_a_size() -> None:
  mask = made("causal")
  of_keys = mask.tile_lists(16, 16, of_keys=True)
  assert of_keys[0] is mask.tile_lists(16, 16, of_keys=True)[0] is not mask.tile_lists(16, 16, of_keys=False)[0]
  assert mask.tile_lists(16, 16, of_keys=False)[0] is mask.tile_lists(16, 16, of_keys=False)[0]
  assert mask.tile_lists(16, 16, of_keys=False)[0] is not mask.tile_lists(16, 32, of_keys=False)[0]


def visited(mask: BlockMask, block_m: int, block_n: int, head: int, heads: int, of_keys: bool, **rules: Any) -> Array:
  """What `visit`, or `query_range`, makes of the lists, for each block: whole, count, the tile at each position."""
  own, walked = (block_n, block_m) if of_keys else (block_m, block_n)
  lists = mask.tile_lists(own, walked, of_keys)
  blocks, tiles = lists[0].shape[2:]

  def kernel(out: UOp, order: UOp, numbers: UOp) -> UOp:
    given = {"mask_mods": (causal,), **rules}
    here = Rules(M, N, heads=heads, tile_lists=(order, numbers), **given).at(UOp.const(head))
    block = UOp.range(int(blocks), 0)
    tile_range = (here.query_range if of_keys else here.key_range)(block * own, own, walked)
    found = [tile_range.n_full, tile_range.n_tiles, *(tile_range.tile(UOp.const(i)) for i in range(int(tiles)))]
    stores = [out[block, i].store(x.cast(dtypes.int)) for i, x in enumerate(found)]
    return UOp.group(*stores).end(block).sink(arg=KernelInfo(name="key_range", opts_to_apply=()))

  return Tensor.custom_kernel(Tensor.empty(blocks, 2 + tiles, dtype=dtypes.int), *lists, fxn=kernel)[0].numpy()


@pytest.mark.each("name", evenly=True)
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("head", [0, 2, 5])
@pytest.mark.parametrize("name", ["blocks", "heads", "batches", "causal"])
def test_kernels_read_the_lists_of_their_head(name: str, head: int, of_keys: bool) -> None:
  mask = made(name)
  order, numbers = (x.numpy() for x in mask.tile_lists(*((40, 32) if of_keys else (32, 40)), of_keys))
  index = (head // H if order.shape[0] > 1 else 0, head % H if order.shape[1] > 1 else 0)
  got = visited(mask, 32, 40, head, H, of_keys)
  np.testing.assert_array_equal(got[:, :2], numbers[index])
  np.testing.assert_array_equal(got[:, 2:], order[index])


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
  "others",
  [{"masks": (Window(None, 0),)}, {"kv_lengths": 70}, {"mask_mods": (causal, causal)}],
  ids=["window", "kv_lengths", "mask_mods"],
)
def test_no_tile_is_whole_where_other_rules_hide_keys(others: dict[str, Any], of_keys: bool) -> None:
  mask = made("everything")
  assert visited(mask, 32, 40, 0, 1, of_keys)[0, 0] == (M // 32 if of_keys else N // 40)
  np.testing.assert_array_equal(visited(mask, 32, 40, 0, 1, of_keys, **others)[:, 0], 0)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  "nothing else": ({}, {}),
  "causal": ({"is_causal": True, "q_start": 60}, {"is_causal": True, "q_start": 60}),
  "window": ({"window": (50, 20)}, {"window": (50, 20)}),
  "lengths": ({"kv_lengths": Tensor([150, 0])}, {"kv_lengths": np.array([150, 0])}),
  "mask_mod": ({"mask_mod": lambda b, h, i, j, x: (i + j) % x[0] != 0, "aux": (Tensor([5]),)},
               {"mask_mod": lambda b, h, i, j: (i + j) % 5 != 0}),
}  # fmt: skip


COMBINED = [
  ("kernel", name, other) for name in CASES for other in OTHERS if other == "nothing else" or name == "blocks"
]
COMBINED += [("reference", name, "mask_mod") for name in CASES if name in ("documents", "blocks")]
LONG = [pytest.param("reference", name, "mask_mod", marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize(("backend", "name", "other"), [*COMBINED, *(x for x in LONG if x.values not in COMBINED)])
def test_attention(backend: str, name: str, other: str) -> None:
  ours, theirs = OTHERS[other]
  q, k, v = qkv(B, H, 1, M, N, 16, 24)
  mask = made(name)
  out, lse = attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True, backend=backend, **ours)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, attn_mask=dense(name), **theirs)


@pytest.mark.parametrize("size", [(128, 128), (1000, 3), (20, 50)], ids=str)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.half], ids=str)
def test_blocks_of_any_size(size: tuple[int, int], dtype: Any) -> None:
  q, k, v = qkv(B, H, H, M, N, 16, 16, dtype)
  out = attention(q, k, v, block_mask=made("documents", *size), backend="kernel")
  check(q, k, v, out, attn_mask=dense("documents"))


def test_few_queries_and_grouped_heads() -> None:
  """Each head has tiles of its own, whatever heads share their keys."""
  seen = np.random.default_rng(5).random((2, 6, 3, N // 16 + 1)) < 0.4
  q, k, v = qkv(2, 6, 2, 3, N, 16, 16)
  mask = BlockMask.of(lambda b, h, i, j, x: x[b, h, i, j // 16], 2, 6, 3, N, (Tensor(seen),), 16, 16)
  out, lse = attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, mask_mod=lambda b, h, i, j: seen[b, h, i, j // 16])


def test_a_mask_for_all_heads_is_asked_about_the_first() -> None:
  q, k, v = qkv(B, H, H, M, N, 8, 8)
  mask = BlockMask.of(lambda b, h, i, j: (i + j + h + b) % 3 != 0, 1, 1, M, N)
  for backend in ("kernel", "reference"):
    out = attention(q, k, v, block_mask=mask, backend=backend)
    check(q, k, v, out, mask_mod=lambda b, h, i, j: (i + j) % 3 != 0)


def test_tiles_that_are_not_seen_are_not_visited() -> None:
  """Their values are NaN, which a weight of 0 would not hide."""
  rows, keys = 256, 512
  q, k, v = qkv(1, 2, 2, rows, keys, 16, 16)
  apart = lambda b, h, i, j: i // 128 == j // 256  # noqa: E731
  mask = BlockMask.of(apart, 1, 1, rows, keys)
  assert mask.density == 0.5
  want = attention(q, k, v, block_mask=mask, backend="kernel").numpy()
  for unseen, half in ((slice(256, 512), slice(0, 128)), (slice(0, 256), slice(128, 256))):
    gone = np.zeros((1, 1, keys, 1), bool)
    gone[:, :, unseen] = True
    bad_k, bad_v = (Tensor(gone).where(math.nan, x).realize() for x in (k, v))
    got = attention(q, bad_k, bad_v, block_mask=mask, backend="kernel").numpy()
    np.testing.assert_array_equal(got[:, :, half], want[:, :, half])
    with_every_tile = attention(q, bad_k, bad_v, mask_mod=apart, backend="kernel").numpy()
    assert np.isnan(with_every_tile[:, :, half]).all()


def test_inside_a_jit() -> None:
  mask = made("documents")

  @TinyJit
  def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, block_mask=mask, backend="kernel").realize()

  for seed in range(4):
    q, k, v = qkv(1, 2, 2, M, N, 8, 8, seed=seed)
    check(q, k, v, run(q, k, v), attn_mask=dense("documents"))


def test_gradients_are_those_of_the_reference() -> None:
  mask, found = made("documents"), []
  for backend in ("kernel", "reference"):
    q, k, v = qkv(1, 2, 2, M, N, 8, 8)
    loss = attention(q, k, v, block_mask=mask, backend=backend).square().sum()
    found.append([x.numpy() for x in loss.gradient(q, k, v)])
  for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_kernel_is_made_once_for_masks_that_do_the_same() -> None:
  inputs = qkv(1, 1, 1, M, N, 9, 7)
  before = compiled.cache_info().misses
  for shift in (0, 30):
    moved = (DOCUMENTS + (np.arange(N) > 100 + shift)).astype(np.int32)
    mask = BlockMask.of(and_masks(causal, document()), 1, 1, M, N, (Tensor(moved),))
    out = attention(*inputs, block_mask=mask, backend="kernel")
    check(*inputs, out, mask_mod=lambda b, h, i, j: (j <= i) & (moved[i] == moved[j]))
  assert compiled.cache_info().misses == before + 1


def test_prints_as_a_picture() -> None:
  mask = BlockMask.of(causal, 1, 2, 6, 9, block_m=2, block_n=2)
  assert str(mask).split("\n") == [
    "BlockMask(B=1, Hq=2, M=6, N=9): 38.9% seen; 3 x 5 blocks of 2 queries x 2 keys, 6 full, 6 partial, 18 empty",
    "▓····",
    "█▓···",
    "██▓··",
  ]
  large = str(BlockMask.of(causal, 1, 1, 3000, 3000, block_m=10, block_n=10)).split("\n")
  assert [len(line) for line in large[1:]] == [64] * 24
  assert large[1][-1] == "·"
  assert large[24][0] == "█"


def test_draws(tmp_path: Path) -> None:
  pytest.importorskip("matplotlib")
  path = tmp_path / "mask.png"
  made("heads").plot(str(path), h=1)
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("head", "error", "message"),
  [
    ({"b": 1}, ValueError, "b is 1; it must be less than 1: the mask has 1"),
    ({"h": 3}, ValueError, "h is 3; it must be less than 3: the mask has 3"),
    ({"h": -1}, ValueError, "h is -1; it must be at least 0"),
    ({"h": True}, TypeError, "h is True; it must be an int"),
  ],
)
def test_draws_a_head_that_is_there(head: dict[str, Any], error: type[Exception], message: str) -> None:
  with pytest.raises(error, match=f"^{message}$"):
    made("heads").draw(None, **head)


def test_more_pairs_than_int32_counts() -> None:
  with pytest.raises(ValueError, match=r"^a block has 65536 x 32768 pairs; there must be at most 2147483647,"):
    BlockMask.of(causal, 1, 1, 70000, 40000, block_m=65536, block_n=32768)
  assert BlockMask.of(causal, 1, 1, 3, 2, block_m=65536, block_n=65536).counts.tolist() == [[[[5]]]]


def test_on_the_device_of_its_aux() -> None:
  assert made("documents").counts.device == Device.DEFAULT == made("causal").counts.device
