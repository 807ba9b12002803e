"""RMS norm and rotary positions of new queries and keys, as arguments of the kernel that appends them to a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from uopattn.dsl import sizes
from uopattn.dsl.rules.norm_rope import NormRope
from uopattn.dsl.schedule import Shape
from uopattn.spec.shards import shard_of


@dataclass(frozen=True)
class NormRopeSpec:
  """What becomes of queries and keys: hashable, without Tensors.

  Attributes:
    buffers: shape and dtype of each Tensor: cos and sin if there is a rotation, then the weights that there are.
    rotates: whether there is a rotation.
    interleaved: whether its pairs are neighbours.
    norms: whether queries, and whether keys, have a norm.
    eps: of the norms.
  """

  buffers: tuple[tuple[Shape, DType], ...]
  rotates: bool
  interleaved: bool
  norms: tuple[bool, bool]
  eps: float

  def changes(self, buffer: Callable[[Sequence[int], DType], UOp]) -> tuple[NormRope | None, NormRope | None]:
    """Return what becomes of queries and of keys, None for nothing; `buffer` makes the kernel's arguments, in order."""
    args = iter([buffer(shape, dtype) for shape, dtype in self.buffers])
    cos, sin = (next(args), next(args)) if self.rotates else (None, None)
    weights = [next(args) if has else None for has in self.norms]
    q, k = (
      None if weight is None and cos is None else NormRope(weight, self.eps, cos, sin, self.interleaved)
      for weight in weights
    )
    return q, k


@dataclass(frozen=True, eq=False)
class NormRopeTensors:
  """What becomes of queries and keys.

  Attributes:
    rotary: cos and sin, (positions, R) each; () for no rotation.
    interleaved: whether its pairs are neighbours.
    weights: of the norms of queries and of keys, (Dk,) each; None for no norm.
    eps: of the norms.
  """

  rotary: tuple[Tensor, ...]
  interleaved: bool
  weights: tuple[Tensor | None, Tensor | None]
  eps: float

  @property
  def tensors(self) -> list[Tensor]:
    """All of them, whole on every device, in the order of `NormRopeSpec.buffers`."""
    return [shard_of(x, None) for x in (*self.rotary, *self.weights) if x is not None]

  @property
  def spec(self) -> NormRopeSpec:
    """The description of the kernel."""
    buffers = tuple((sizes(x), x.dtype) for x in self.tensors)
    q, k = (x is not None for x in self.weights)
    return NormRopeSpec(buffers, bool(self.rotary), self.interleaved, (q, k), self.eps)
