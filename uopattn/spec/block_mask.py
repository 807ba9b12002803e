"""`BlockMask`: counts visible pairs per block of queries and keys, so that kernels can skip empty tiles."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tinygrad import Context, Device, Tensor, UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from uopattn.dsl import clamp, sizes
from uopattn.dsl.rules.masks import Table
from uopattn.runtime.function import in_function
from uopattn.spec.shards import gathered, pieces, shard_of
from uopattn.spec.tensors import check_size, check_tensors, described, placed, with_axis
from uopattn.spec.trace import Mod, trace_mod

SHADES = "·░▒▓█"  # nothing seen, up to a third, two thirds, less than all, all
PICTURE = (24, 64)  # largest number of rows and columns of `str(mask)`

if TYPE_CHECKING:  # numpy is slow to import, and only block masks need it
  import numpy as np


@dataclass(frozen=True, eq=False)
class BlockMask:
  """A mask_mod with the number of visible pairs in each block of the scores, so that kernels skip empty blocks.

  Make one with `BlockMask.of`. It stores its own `mask_mod` and `aux`; rebuild it if either changes. `str(mask)` is a
  picture: "·" is an empty block, "█" a full one, with shades in between.

  Attributes:
    mask_mod: (b, h, q_idx, kv_idx, *aux) -> bool; False hides the key.
    aux: the Tensors that mask_mod indexes.
    M, N: queries and keys.
    block_m, block_n: queries and keys per block; the last blocks may have fewer.
    counts: pairs seen in each block, (B or 1, Hq or 1, ceil(M / block_m), ceil(N / block_n)) int32.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import BlockMask, attention, mods
    >>> mask = BlockMask.of(mods.sliding_window(100), 1, 1, 512, 512)
    >>> print(mask)
    BlockMask(B=1, Hq=1, M=512, N=512): 17.8% seen; 4 x 4 blocks of 128 queries x 128 keys, 0 full, 7 partial, 9 empty
    ▒···
    ░▒··
    ·░▒·
    ··░▒
    >>> q, k, v = (Tensor.randn(1, 2, 512, 16) for _ in range(3))
    >>> attention(q, k, v, block_mask=mask).realize().shape
    (1, 2, 512, 16)
  """

  mask_mod: Callable[..., Any]
  aux: tuple[Tensor, ...]
  M: int
  N: int
  block_m: int
  block_n: int
  counts: Tensor
  _lists: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)
  _shards: dict[Any, "BlockMask"] = field(default_factory=dict)

  @classmethod
  def of(
    cls,
    mask_mod: Callable[..., Any],
    B: int,
    Hq: int,
    M: int,
    N: int,
    aux: tuple[Tensor, ...] = (),
    block_m: int = 128,
    block_n: int = 128,
    device: str | None = None,
  ) -> "BlockMask":
    """Evaluate a mask_mod for every pair of a query and a key, in one kernel that stores one count per block.

    Small blocks let kernels skip more of a fine-grained mask. Blocks need not have the size of a kernel's tiles.

    Args:
      mask_mod: (b, h, q_idx, kv_idx, *aux) -> bool; False hides the key. See `uopattn.mods`.
      B, Hq: batches and query heads. 1 makes one mask for all, and mask_mod is called with index 0.
      M, N: queries and keys.
      aux: the Tensors that mask_mod indexes; out of bounds they read 0. The mask is made from their present content.
      block_m, block_n: queries and keys per block.
      device: the device of the mask; None is aux's device, the first one if there are several, or tinygrad's default.

    Raises:
      TypeError: mask_mod cannot be traced, aux is not a tuple of Tensors, or a size is not an int.
      ValueError: a size is negative, a block size is 0, a block has 2^31 pairs or more, or a `tinygrad.function` is
        traced, where it cannot be made.

    Example:
      >>> from uopattn import BlockMask
      >>> mask = BlockMask.of(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, 1, 1, 6, 6, block_m=2, block_n=2)
      >>> mask.counts.tolist()
      [[[[3, 0, 0], [4, 3, 0], [4, 4, 3]]]]
    """
    named = {"B": B, "Hq": Hq, "M": M, "N": N, "block_m": block_m, "block_n": block_n}
    B, Hq, M, N, block_m, block_n = (check_size(name, x, int(name.startswith("block"))) for name, x in named.items())
    check_tensors("aux", aux)
    if in_function():
      raise ValueError(
        "a BlockMask cannot be made inside a tinygrad.function; make it outside, with allow_implicit=True"
      )
    if not callable(mask_mod):
      raise TypeError(f"mask_mod is {described(mask_mod)}; it must be a function")
    block_m, block_n = min(block_m, max(M, 1)), min(block_n, max(N, 1))
    if block_m * block_n > dtypes.int32.max:
      raise ValueError(
        f"a block has {block_m} x {block_n} pairs; there must be at most {dtypes.int32.max}, which int32 counts"
      )
    aux, device = _on_one_device(aux, device)
    counts = Tensor.empty(B, Hq, ceildiv(M, block_m), ceildiv(N, block_n), dtype=dtypes.int, device=device)
    mod = trace_mod("mask_mod", mask_mod, (B, Hq, M, N), aux)
    kernel = _count(mod, M, N, block_m, block_n)
    if 0 not in counts.shape:
      if empty := [f"aux[{i}] has shape {x.shape}" for i, x in enumerate(aux) if 0 in x.shape]:
        raise ValueError(f"{empty[0]}; every size must be at least 1")
      counts = Tensor.custom_kernel(counts, *aux, fxn=kernel)[0].realize()
    return cls(mask_mod, aux, M, N, block_m, block_n, counts)

  def seen(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    """Call mask_mod as attention does: with batch or head 0 where one mask serves all of them."""
    B, H = self.heads
    return self.mask_mod(b if B > 1 else b * 0, h if H > 1 else h * 0, q_idx, kv_idx, *aux)

  @property
  def heads(self) -> tuple[int, int]:
    """Batches and query heads; 1 where one mask serves all of them."""
    B, H, *_ = sizes(self.counts)
    return B, H

  def on(self, devices: tuple[str, ...], axis: int | None) -> "BlockMask":
    """Return the shard of the mask for each of several devices, which divide batches (0) or heads (1) among them."""
    key = devices, axis
    if key not in self._shards:
      counts = self.counts.to(devices)
      shard = shard_of(counts, axis if axis is not None and self.heads[axis] > 1 else None)
      _realize(shard)
      aux = tuple(gathered(x if isinstance(x.device, tuple) else x.to(devices)) for x in self.aux)
      self._shards[key] = replace(self, counts=shard, aux=aux, _lists={}, _shards={})
    return self._shards[key]

  def within(
    self, devices: tuple[str, ...], rows: tuple[int, ...], M: int, keys: tuple[int, ...], N: int
  ) -> "BlockMask":
    """Return the shard of the mask for each of several devices: its M queries and its N keys.

    Args:
      rows, keys: the first query and the first key of each device. If blocks end elsewhere, no tile is skipped:
        see `fits`.
    """
    key = devices, rows, M, keys, N
    if key not in self._shards:
      whole = self.on(devices, None)
      counts, blocks = whole.counts, (self.block_m, self.block_n)
      if self.fits(rows, M, keys, N):
        for axis, block, firsts, count in zip((2, 3), blocks, (rows, keys), (M, N), strict=True):
          wanted = [(i, first // block, ceildiv(count, block)) for i, first in enumerate(firsts)]
          counts = pieces(counts, axis, wanted)
      _realize(counts)
      self._shards[key] = replace(whole, M=M, N=N, counts=counts, _lists={}, _shards={})
    return self._shards[key]

  def fits(self, rows: tuple[int, ...], M: int, keys: tuple[int, ...], N: int) -> bool:
    """Return whether shards of M queries and N keys, from these first ones on, begin and end where blocks do."""
    sides = ((self.block_m, rows, M, self.M), (self.block_n, keys, N, self.N))
    return all(
      x % block == 0 or x == most for block, firsts, n, most in sides for x in (*firsts, *(f + n for f in firsts))
    )

  @property
  def full(self) -> Tensor:
    """Blocks in which every pair is seen; bool, in the shape of `counts`.

    Example:
      >>> from uopattn import BlockMask, mods
      >>> BlockMask.of(mods.causal, 1, 1, 4, 4, block_m=2, block_n=2).full.tolist()
      [[[[False, False], [True, False]]]]
    """
    return self.counts == Tensor(self._pairs.astype("int32"), device=self.counts.device)

  @property
  def empty(self) -> Tensor:
    """Blocks in which no pair is seen; bool, in the shape of `counts`.

    Example:
      >>> from uopattn import BlockMask, mods
      >>> BlockMask.of(mods.causal, 1, 1, 4, 4, block_m=2, block_n=2).empty.tolist()
      [[[[False, True], [False, False]]]]
    """
    return self.counts == 0

  @property
  def partial(self) -> Tensor:
    """Blocks that are neither full nor empty; bool, in the shape of `counts`.

    Example:
      >>> from uopattn import BlockMask, mods
      >>> BlockMask.of(mods.causal, 1, 1, 4, 4, block_m=2, block_n=2).partial.tolist()
      [[[[True, False], [False, True]]]]
    """
    return (self.full | self.empty).logical_not()

  @property
  def density(self) -> float:
    """The share of query-key pairs that are visible, from 0 to 1; 0 if there are none.

    Example:
      >>> from uopattn import BlockMask, mods
      >>> BlockMask.of(mods.causal, 1, 1, 4, 4).density
      0.625
    """
    if 0 in self.counts.shape:
      return 0.0
    return float(self.counts.numpy().mean(axis=(0, 1)).sum()) / (self.M * self.N)

  @property
  def _pairs(self) -> "np.ndarray[Any, Any]":
    """Pairs in each block, (ceil(M / block_m), ceil(N / block_n))."""
    import numpy as np

    return np.outer(*(_lengths(n, block) for n, block in ((self.M, self.block_m), (self.N, self.block_n))))

  def check(self, B: int, Hq: int, M: int, N: int) -> None:
    """Raise ValueError if this mask does not fit scores of (B, Hq, M, N)."""
    mine = (*self.heads, self.M, self.N)
    if mine[0] not in (1, B) or mine[1] not in (1, Hq) or mine[2:] != (M, N):
      raise ValueError(
        f"block_mask was made for scores of {mine}; it must be for {(B, Hq, M, N)}, with 1 allowed for the first two"
      )

  def tile_lists(self, block: int, tile: int, of_keys: bool) -> tuple[Tensor, Tensor]:
    """List the tiles of keys that each block of queries attends to; see `uopattn.dsl.rules.masks.Masks.tile_lists`.

    A tile is full if all the mask's blocks that it touches are full and it ends before N. Kernels skip it if all of
    them are empty. The lists are computed once per tile size, by tinygrad ops.

    Args:
      block, tile: rows per block and per tile of the kernel.
      of_keys: whether to list the tiles of queries that see each block of keys instead. A full tile also ends before M.

    Returns:
      The tiles, full ones first and empty ones last, (B or 1, Hq or 1, blocks, tiles) int32; and how many are full and
      how many are not empty, at least 1, (B or 1, Hq or 1, blocks, 2) int32.
    """
    key = block, tile, of_keys
    if key not in self._lists:
      self._lists[key] = self._list(*key)
    return self._lists[key]

  def _list(self, block: int, tile: int, of_keys: bool) -> tuple[Tensor, Tensor]:
    block_m, block_n = (tile, block) if of_keys else (block, tile)
    device = self.counts.device
    rows, keys = (
      Tensor(_touches(n, size, own), device=device)
      for n, size, own in ((self.M, block_m, self.block_m), (self.N, block_n, self.block_n))
    )
    seen, doubtful = (rows @ x.float() @ keys.T > 0 for x in (self.empty.logical_not(), self.full.logical_not()))
    lengths = [(self.N, block_n), (self.M, block_m)]
    within = [Tensor([end <= n for end in range(size, n + size, size)], device=device) for n, size in lengths]
    whole = doubtful.logical_not() & within[0]
    if of_keys:
      seen, whole = (x.transpose(-1, -2) for x in (seen, whole & within[1].unsqueeze(-1)))
    kinds = Tensor.stack(whole, seen & whole.logical_not(), seen.logical_not(), dim=-2).int()  # in this order
    ranks = kinds.flatten(-2).cumsum(-1).reshape(kinds.shape)
    position = ((kinds * ranks).sum(-2) - 1).contiguous()
    order = Tensor.empty(*position.shape, dtype=dtypes.int, device=device)
    order = Tensor.custom_kernel(order, position, fxn=_scatter)[0]
    numbers = Tensor.stack(whole.int().sum(-1), seen.int().sum(-1).maximum(1), dim=-1).cast(dtypes.int).contiguous()
    _realize(order, numbers)
    return order, numbers

  def __repr__(self) -> str:
    B, H, blocks_m, blocks_n = sizes(self.counts)
    kinds = [int(x.sum().item()) for x in (self.full, self.partial, self.empty)]
    return (
      f"BlockMask(B={B}, Hq={H}, M={self.M}, N={self.N}): {self.density:.1%} seen; {blocks_m} x {blocks_n} blocks of "
      f"{self.block_m} queries x {self.block_n} keys, {kinds[0]} full, {kinds[1]} partial, {kinds[2]} empty"
    )

  def __str__(self) -> str:
    """Return the summary and a picture of the first head, with one character per block, or per group of blocks."""
    import numpy as np

    if 0 in self.counts.shape:
      return repr(self)
    counts, pairs = self.counts[0, 0].numpy(), self._pairs
    for axis, most in enumerate(PICTURE):
      size = counts.shape[axis]
      starts = np.linspace(0, size, min(size, most), endpoint=False).astype(int)
      counts, pairs = (np.add.reduceat(x, starts, axis) for x in (counts, pairs))
    shades = np.where(counts == pairs, 4, np.ceil(np.minimum(counts / pairs * 3, 3)).astype(int))
    return "\n".join([repr(self), *("".join(SHADES[x] for x in row) for row in shades)])

  def plot(self, path: str, b: int = 0, h: int = 0) -> None:
    """Draw the visible share of each block of one head into a file; the file's suffix selects the format.

    Args:
      path: the file, such as "mask.png".
      b, h: the batch and the query head; 0 where one mask serves all of them.

    Raises:
      ImportError: matplotlib is missing; `pip install '.[bench]'` in a checkout installs it.
      TypeError, ValueError: see `draw`.

    Example:
      >>> import tempfile
      >>> from uopattn import BlockMask, mods
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   BlockMask.of(mods.causal, 1, 1, 512, 512).plot(f"{folder}/mask.png")
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4 * max(0.3, min(3, self.M / max(1, self.N)))), layout="constrained")
    self.draw(figure.subplots(), b, h)
    figure.savefig(path, dpi=120)

  def draw(self, panel: Any, b: int = 0, h: int = 0) -> None:
    """Draw the visible share of each block of one head into a matplotlib `Axes`.

    Args:
      panel: the `Axes`.
      b, h: as in `plot`.

    Raises:
      TypeError: b or h is not an int.
      ValueError: the mask has no such batch or head, or no pairs of queries and keys.

    Example:
      >>> from matplotlib.figure import Figure
      >>> from uopattn import BlockMask, mods
      >>> BlockMask.of(mods.causal, 1, 1, 512, 512).draw(Figure().subplots())
    """
    if 0 in self.counts.shape:
      raise ValueError(f"the mask has no pairs of queries and keys to draw: {self!r}")
    for name, x, count in zip(("b", "h"), (b, h), self.heads, strict=True):
      check_size(name, x, 0)
      if x >= count:
        raise ValueError(f"{name} is {x}; it must be less than {count}: the mask has {count}")
    shares = self.counts[int(b), int(h)].numpy() / self._pairs
    rows, keys = ([*range(0, n, block), n] for n, block in ((self.M, self.block_m), (self.N, self.block_n)))
    panel.pcolormesh(keys, rows, shares, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=0.3)
    panel.set(xlim=(0, self.N), ylim=(self.M, 0), xlabel="key", ylabel="query", aspect="equal")


def _on_one_device(aux: tuple[Tensor, ...], device: str | None) -> tuple[tuple[Tensor, ...], str]:
  """Return aux as the kernel takes it, and the device of a mask; see `BlockMask.of`. Raises ValueError."""
  aux = tuple(x.to(x.device[0]) if isinstance(x.device, tuple) else x for x in aux)
  known = [str(x.device) for x in aux if x.device is not None]
  device = Device.canonicalize(device) if device or not known else known[0]
  aux = tuple(x.contiguous() for x in with_axis(placed(aux, device)))
  if any(x.device != device for x in aux):
    raise ValueError(
      f"aux is on {', '.join(str(x.device) for x in aux)}, the mask on {device}; it must be on one device"
    )
  return aux, device


def _realize(*xs: Tensor) -> None:
  """Realize what depends on a mask alone: that may be done while a `tinygrad.function` is traced, too."""
  with Context(ALLOW_DEVICE_USAGE=1):
    Tensor.realize(*xs)


def _count(mod: Mod, M: int, N: int, block_m: int, block_n: int) -> Callable[..., UOp]:
  """Return the kernel that counts the visible pairs of each block. tinygrad chooses its schedule."""

  def count(counts: UOp, *aux: UOp) -> UOp:
    b, h, m, n = at = [UOp.range(size, i) for i, size in enumerate(sizes(counts))]
    i, j = UOp.range(block_m, 4, AxisType.REDUCE), UOp.range(block_n, 5, AxisType.REDUCE)
    row, key = m * block_m + i, n * block_n + j
    seen = mod(tuple(map(Table, aux)))(*(x.cast(dtypes.int) for x in (b, h, row, key)))
    number = ((row < M) & (key < N) & seen).cast(dtypes.int).reduce(i, j, arg=Ops.ADD)
    return counts[tuple(at)].store(number).end(*at).sink(arg=KernelInfo(name="count_seen"))

  return count


def _scatter(order: UOp, position: UOp) -> UOp:
  """Build the kernel of order[..., position[..., t]] = t."""
  at = [UOp.range(size, i) for i, size in enumerate(sizes(order))]
  index = clamp(
    position[tuple(at)].load().cast(dtypes.weakint), 0, sizes(order)[-1] - 1
  )  # otherwise it would be an int64
  store = order[(*at[:-1], index)].store(at[-1].cast(dtypes.int))
  return store.end(*at).sink(arg=KernelInfo(name="order_tiles", opts_to_apply=()))


def _lengths(n: int, block: int) -> "np.ndarray[Any, Any]":
  """Return the lengths of consecutive blocks that cover n, (ceil(n / block),) float64."""
  import numpy as np

  return np.minimum(block, n - np.arange(0, n, block)).astype(np.float64)


def _touches(n: int, tile: int, block: int) -> "np.ndarray[Any, Any]":
  """Return which blocks each tile overlaps, both counted from 0 to n: (tiles, blocks), 1 or 0."""
  import numpy as np

  tiles, blocks = np.arange(0, n, tile)[:, None], np.arange(0, n, block)
  return ((tiles < blocks + block) & (blocks < tiles + tile)).astype(np.float32)
