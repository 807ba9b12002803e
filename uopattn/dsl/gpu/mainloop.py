"""The mainloop of forward kernels with synchronous matrix instructions: AMD's WMMA and MFMA, NVIDIA's `mma.sync`.

FlashAttention-2 (Dao, 2023, algorithm 1). A kernel supplies a `MatrixUnit`, which knows the hardware, and a
`KeyPipeline`, which brings tiles of K and V on chip. This module has the rest: the order of the steps, the state of the
online softmax, and two loops, one over full tiles of keys and one over tiles that need a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.softmax import LOWEST, Scaling
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.scope import Scope


class State(NamedTuple):
  """The state of the online softmax, which each lane keeps in registers from tile to tile.

  Attributes:
    acc: O of the lane's query rows, unnormalized, relative to m_i.
    m_i: row max of each row, (rows,).
    l_i: running sum of P of each row, relative to m_i, (rows,), over this lane's keys only.
  """

  acc: UOp
  m_i: UOp
  l_i: UOp

  @classmethod
  def make(cls, s: Scope, rows: int, shape: tuple[int, ...], *after: UOp) -> "State":
    """The state before the first tile, for `rows` query rows per lane; acc has `shape`."""
    acc = s.filled(0.0, *shape, after=after)
    return cls(acc, *(s.filled(x, rows, after=after) for x in (LOWEST, 0.0)))

  def after(self, *after: UOp) -> "State":
    """The state once `after` is done."""
    return State(*(x.after(*after) for x in self))


SoftmaxRow = tuple[list[UOp], UOp, UOp, UOp]  # of a row: P, m_i, l_i and alpha


class MatrixUnit(Protocol):
  """The matrix instructions of one warp, and which elements of operands and results its lanes hold.

  Each unit has its own format of operands. A row is a list of the elements that a lane holds.
  """

  @property
  def rows(self) -> Sequence[UOp]:
    """The query rows that this lane holds scores of."""

  def keys(self) -> tuple[UOp, Sequence[int]]:
    """The first key of a tile that this lane holds scores of, and the offsets of all of them from it."""

  def mma_abt(self, q: Any, k_tile: Any) -> list[list[UOp]]:
    """Compute S = Q K^T. Returns this lane's elements of each of its rows."""

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P of each row, its new m_i and l_i, and alpha; see `online_softmax`."""

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> Any:
    """P of all rows, rounded, as the left operand of `mma_ab`."""

  def mma_ab(self, p: Any, v_tile: Any, acc: UOp, old: UOp, alphas: list[UOp], stores: list[UOp]) -> list[UOp]:
    """Compute O = O alpha + P V from `old`. Returns the stores to `acc`; `stores` are the stores of m_i and l_i."""


class KeyPipeline(Protocol):
  """A pipeline that brings tiles of K and V from global memory to where the matrix unit reads them.

  A unit and its pipeline agree on what a tile is. A tile of V may be a function that waits for it. More tiles are those
  of the scales of keys and of values.
  """

  def acquire(self, n: UOp, *after: UOp) -> Sequence[Any]:
    """Wait for tile n of K and V, numbered by position in the key range, and start loading a later one."""

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Release tile n after `stores`: its memory may be overwritten."""


@dataclass(frozen=True)
class Mainloop:
  """The loops over the tiles of keys for one block of queries.

  Attributes:
    s: the kernel's axes.
    unit: the matrix unit.
    pipeline: the pipeline that loads the tiles.
    rules: the rules of the head.
    key_range: the tiles. Tiles are numbered by their position in it.
    block_n: keys per tile.
  """

  s: Scope
  unit: MatrixUnit
  pipeline: KeyPipeline
  rules: HeadRules
  key_range: TileRange
  block_n: int

  def run(self, q: Any, state: State) -> State:
    """Process all tiles."""
    for first, trips, masked in full_then_masked(UOp.const(0), self.key_range.n_full, self.key_range.n_tiles):
      state = self.attend(first, trips, masked, q, state)
    return state

  def attend(self, first: UOp, trips: UOp, masked: bool, q: Any, state: State) -> State:
    """Process `trips` tiles from the `first` on; `masked` says whether they need a mask."""
    trip = self.s.axis(trips, AxisType.REDUCE)
    n, old = first + trip, state.after(trip)
    k_tile, v_tile, *scales = self.pipeline.acquire(n, trip, *state)
    scores = self.unit.mma_abt(q, k_tile)
    p, alphas, stores = self.softmax(scores, n, masked, old, scales)
    operands = self.unit.as_operands(p, trip, *state)
    stores += self.unit.mma_ab(operands, v_tile, state.acc, old.acc, alphas, stores)
    return state.after(self.pipeline.release(n, *stores).end(trip))

  def softmax(
    self, products: list[list[UOp]], n: UOp, masked: bool, old: State, scales: Sequence[Any]
  ) -> tuple[list[list[UOp]], list[UOp], list[UOp]]:
    """Return P of the n-th tile and alpha for each of this lane's rows, and the stores of m_i and l_i."""
    lane_key, offsets = self.unit.keys()
    top = self.key_range.tile(n) * self.block_n
    first, rows, rules = top + lane_key, self.unit.rows, self.rules
    if scales:
      keys, values = scales
      rules = replace(rules, scales_near=(lambda key: keys.number(key - top), lambda key: values.number(key - top)))
    scores = [rules.scores(x, row, first, offsets, masked) for x, row in zip(products, rows, strict=True)]
    m_old, l_old = ([x[i].load() for i in range(len(rows))] for x in (old.m_i, old.l_i))
    p, alphas, stores = [], [], []
    for i, (p_row, *new, alpha) in enumerate(self.unit.softmax(scores, rules.scaling, m_old, l_old)):
      p.append(rules.weights(p_row, rows[i], first, offsets, masked))
      alphas.append(alpha)
      stores += [x[i].store(value) for x, value in zip((old.m_i, old.l_i), new, strict=True)]
    return p, alphas, stores
