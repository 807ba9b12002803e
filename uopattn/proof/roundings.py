"""Bounds of the errors that independent roundings leave in the products of attention; larger errors are faults.

The output and its gradients are products X = A Y per head: O = P V, dQ = dS K, dK = dS^T Q and dV = P^T dO. A kernel
rounds each weight of A to the inputs' type, computes the scores in float32, and rounds X. To first order the error is
linear in these roundings:

  R = (A e) Y + X f,  |f| <= u

The relative error e of a weight is the sum of three:

- The rounding of the weight itself, at most u = `Precision.unit`, or `Precision.least` below the type's range.
- The rounding of the sum: float32's u per weight, times the root of the number of terms, because partial sums grow
  like a random walk.
- The error of the score: an absolute error of a score is a relative error of its weight. It is of the size of float32's
  u times the score and its partial sums. An operand that is rounded again, such as q in a kernel that scales it first,
  adds u times each term of q.k. The sum that divides the weights has these errors too, so they multiply Y - X, not Y.

Each rounding error is modelled as uniform in its interval, centred, and independent of the others. Every linear form of
the errors is then sub-Gaussian, and its variance is the sum of the squares of its coefficients, times u^2 / 3. It
exceeds z standard deviations with a probability of at most 2 exp(-z^2 / 2). For K forms, z = sqrt(2 ln(2 K / ALARM))
keeps the probability of any false alarm below ALARM. The forms are:

- Each element of R, with the variance (var A) Y^2 + X^2 u^2 / 3.
- The sum of R X over each row, column and head of X, which shows a scale error. It averages the roundings of many
  elements. In rows and heads the error of a weight enters through A (X Y^T), because it is the same in all columns.
- For each row j of Y (a key of P V) the sum over i of A_ij R_i.y_j, which shows how much of its share in X is missing
  or too much, and likewise for tiles of such rows.

The roundings of equal weights are not independent; few different scores, or identical rows, give equal weights. They
are found by their bins between two numbers of the type. The covariance of two roundings at a distance of d steps, at
unknown offsets in between, is 1 - 6 d + 6 d^2 for d <= 1. Its mean over d is 0, so smooth distributions add nothing.
The sums of a form's coefficients by bin, combined with this covariance, give the factor by which its variance grows. It
is computed only for forms that exceed z.

The remaining errors are systematic. Tensor cores of NVIDIA cut long sums off, which makes X smaller as a whole; this
much, `Precision.lost`, any form may deviate besides. Others belong to the type: tf32 truncates, and small 8-bit outputs
vanish. A form that exceeds z is therefore compared with twice the largest deviation of the guide, the naive computation
of a fused kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log, prod, sqrt

import numpy as np

from uopattn.proof.oracle import CHUNK, Array, Precision, Rules

ALARM = 1e-6  # probability that the roundings of a correct result look like a fault
FLOAT32 = 2.0**-24  # unit roundoff of float32, in which all kernels accumulate
LEAST_UNIT = 2.0**-12  # lower bound of the unit roundoff of types narrower than float32, in which kernels keep weights
NEGLIGIBLE = 2.0**-40  # relative size below which a number is ignored
LEAST_SQUARE = np.float32(2.0**-120)  # keeps squares of nonzero numbers from underflowing to 0
MOST_ERROR = 2.0**60  # deviations; a larger error, which float32 might not hold, is a fault all the same
TILE = 64  # keys or queries per tile form
BINADES, BINS = 14, 8  # binades of weights below the largest; bins between two numbers of a type

Head = tuple[int, int]  # batch, head
Index = tuple[int, ...]
Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Term:
  """A term of a product: X[result][rows] += weights @ Y[operand][inner].

  Attributes:
    result, operand: the heads of X and of Y.
    head: the query head that the weights belong to.
    rows, inner: the rows of X and of Y.
    weights: (rows, inner).
    variance: variance of each weight's error.
    shared: variance of the errors that are also in the sum that divides the weights; None if there is no such sum.
    common: deviations of an error that is the same for all weights of a query, if any; `variance` includes it.
    by_row: whether a query is a row of X, or else of Y.
  """

  result: Head
  operand: Head
  head: Head
  rows: slice
  inner: slice
  weights: Array
  variance: Array
  shared: Array | None = None
  common: Array | None = None
  by_row: bool = True


Terms = Callable[[], Iterator[tuple[str, Term]]]  # pairs of a product's name and a term
_TINY = 2.0**-1000  # keeps a variance from being 0


@dataclass(frozen=True)
class Fault:
  """An error that roundings cannot explain.

  Attributes:
    kind: "element", "row", "column", "head", "key" or "tile" (of keys); for the gradients of k and v also "query", and
      "tile" (of queries).
    index: (B, H, M, D), (B, H, M), (B, H, D), (B, H), (B, H, N) or (B, H, tile), by kind; a tile has `TILE` keys.
    size: the error of an element; for other kinds, the excess relative to the exact value, -1 if it is missing.
    bound: the largest size that roundings explain.
  """

  kind: str
  index: tuple[int, ...]
  size: float
  bound: float

  def __str__(self) -> str:
    what = "off by" if self.kind == "element" else "too large, as a share of itself, by"
    return f"{self.kind} {self.index} is {what} {self.size:.3g} (bound {self.bound:.3g})"


@dataclass(frozen=True, eq=False)
class Family:
  """Linear forms of one kind in the error; all arrays have the same shape, starting with (B, H).

  Attributes:
    kind: see `Fault`.
    value, variance: the value and variance of each form.
    slack: deviation allowed besides the variance.
    size: the exact value, by which the size of a fault is divided.
  """

  kind: str
  value: Array
  variance: Array
  slack: Array
  size: Array

  def excess(self) -> Array:
    """Return each form's value beyond its slack, in standard deviations."""
    return np.maximum(np.abs(self.value) - self.slack, 0) / np.sqrt(self.variance + _TINY)

  def most(self) -> float:
    """Return the largest excess; 0 if there are no forms."""
    return float(self.excess().max(initial=0))

  def fault(self, index: Index, limit: float) -> Fault:
    """Return a form as a fault, with a bound of `limit` standard deviations."""
    size = self.size[index] or 1.0
    bound = limit * np.sqrt(self.variance[index]) + self.slack[index]
    return Fault(self.kind, index, float(self.value[index] / size), float(bound / size))


class Product:
  """The variances of the errors of one product X = A Y per head.

  Attributes:
    unit: the largest number of Y times those of the arrays in which A is linear; keeps squares in float32's range.
    exact, operand: X divided by `unit`, and Y divided by its largest number.
    lengths, directions: norms and unit vectors of the rows of X.
    elements, rows, columns, heads: variances of each element, of R along a row's direction, and of the sums of R X.
      `columns` holds only what exceeds those of the elements.
    slack: relative scale error that each head may have.
    key: what a row of Y is: "key" or "query".
    keys: (B, H, rows), the shape that `Term.head` and `Term.inner` index.
    limit: standard deviations that any form may have.
  """

  def __init__(
    self, exact: Array, operand: Array, unit: float, precision: Precision, rules: Rules, key: str, keys: Shape
  ):
    self.unit, self.key, self.keys, self.precision = unit, key, keys, precision
    self.exact, self.operand = finite(exact) / unit, (finite(operand) / largest(operand)).astype(np.float32)
    self.lengths = np.sqrt(np.square(self.exact).sum(-1))
    some = self.lengths[..., None] > 0
    self.directions = np.divide(self.exact, self.lengths[..., None], out=np.zeros(exact.shape), where=some)
    least = np.maximum(precision.least / unit, NEGLIGIBLE * np.abs(self.exact).max((2, 3), keepdims=True, initial=0))
    own = np.maximum(precision.unit * np.abs(self.exact), least) ** 2 / 3
    self.elements, self.rows = own, (np.square(self.directions) * own).sum(-1)
    self.columns, self.heads = np.zeros(np.delete(exact.shape, 2)), (np.square(self.lengths) * self.rows).sum(-1)
    terms = operand.shape[2] * max(1, operand.shape[1] // max(1, exact.shape[1]))  # of a sum
    self.slack = _slack(precision, rules, exact.shape[1]) + precision.lost * terms
    forms = exact.size + prod(exact.shape[:3]) + exact.shape[0] * exact.shape[1] * (exact.shape[3] + 1) + 2 * prod(keys)
    self.limit = sqrt(2 * log(2 * max(1, forms) / ALARM))

  def response(self, t: Term) -> Array:
    """Return the change of each row of X, along its direction, per unit of each weight: (rows, inner)."""
    return self.directions[t.result][t.rows].astype(np.float32) @ self.operand[t.operand][t.inner].T

  def add(self, t: Term) -> None:
    """Add the variances that the errors of these weights cause."""
    index, response, y = (*t.result, t.rows), self.response(t), self.operand[t.operand][t.inner]
    x, lengths = self.exact[index], self.lengths[index]
    elements = t.variance @ np.square(y)
    rows = np.einsum("ij,ij,ij->i", t.variance, response, response)
    if t.shared is not None:  # these errors multiply Y - X; and kernels may sum rounded weights
      own, shared = t.variance.sum(1, dtype=np.float64), t.shared.sum(1, dtype=np.float64)
      elements = elements + (t.shared @ np.square(y) - 2 * x * (t.shared @ y) + shared[:, None] * np.square(x)).clip(0)
      elements += own[:, None] * np.square(x)
      rows = rows + np.einsum("ij,ij->i", t.shared, np.square(response - lengths[:, None].astype(np.float32)))
      rows += own * np.square(lengths)
    heads = np.square(lengths) @ rows
    if t.common is not None and t.by_row:
      together = np.einsum("ij,ij->i", t.common, response)
      elements += np.square(t.common @ y)
      rows += np.square(together)
      heads += np.square(lengths * together).sum()
    elif t.common is not None:
      heads += np.square(lengths @ (t.common * response)).sum()
      self.columns[t.result] += np.square((t.common.T @ x) * y).sum(0)
    self.elements[index] += elements
    self.rows[index] += rows
    self.heads[t.result] += heads

  def error(self, got: Array) -> Array:
    """Return the error of an array against X, divided by `unit`; 0 where either is not finite."""
    return finite(got.astype(np.float64) / self.unit - self.exact)

  def coefficients(self, kind: str, index: Index) -> Array:
    """Return those of R of a head, (rows, columns), in a form of an element, row, column or head."""
    x = self.exact[index[0], index[1]]
    coefficients = np.zeros(x.shape)
    match kind:
      case "element":
        coefficients[index[2:]] = 1
      case "row":
        coefficients[index[2]] = self.directions[index]
      case "column":
        coefficients[:, index[2]] = x[:, index[2]]
      case _:
        coefficients = x
    return coefficients

  def families(self, error: Array) -> Iterator[Family]:
    """Yield the forms of elements, rows, columns and heads."""
    x, x2, lengths, slack = self.exact, np.square(self.exact), self.lengths, self.slack[:, None]
    yield Family("element", error, self.elements, slack[:, None] * np.abs(x), np.full(x.shape, 1 / self.unit))
    yield Family("row", (error * self.directions).sum(-1), self.rows, slack * lengths, lengths)
    sizes = x2.sum(2)
    yield Family("column", (error * x).sum(2), (x2 * self.elements).sum(2) + self.columns, slack * sizes, sizes)
    sizes = sizes.sum(-1)
    yield Family("head", (error * x).sum((2, 3)), self.heads, self.slack * sizes, sizes)


class Shares:
  """The forms of errors for the rows of Y and for tiles of them, weighted by their shares in X.

  Attributes:
    product: X.
    unit: (B, H, 1, 1), what errors are divided by, per head, so that no square underflows.
    of_rows, of_tiles: variance, slack and size of each form.
  """

  def __init__(self, product: Product):
    self.product, (B, H, rows) = product, product.keys
    self.of_rows = np.zeros((3, B, H, rows))
    self.of_tiles = np.zeros((3, B, H, -(-rows // TILE)))
    self.unit = np.sqrt(product.elements.max((2, 3), keepdims=True, initial=0))
    self.variance = (product.elements / np.square(self.unit)).astype(np.float32)

  def add(self, t: Term) -> None:
    """Add what these weights contribute to variances, slacks and sizes."""
    rows, unit = (*t.result, t.rows), np.float64(self.unit[t.result].item())
    variance, slack = self.variance[rows], self.product.slack[t.result[1]] * self.product.lengths[rows]
    y = self.product.operand[t.operand][t.inner]
    squares, lengths = np.square(t.weights) + LEAST_SQUARE, np.square(y).sum(-1)
    of_rows = self.of_rows[:, t.head[0], t.head[1], t.inner]
    of_rows[0] += unit**2 * np.einsum("jd,jd->j", squares.T @ variance, np.square(y))
    of_rows[0] += np.einsum("ij,ij->j", squares, t.variance if t.shared is None else t.variance + t.shared) * lengths**2
    of_rows[1] += (slack.astype(np.float32) @ np.abs(t.weights)) * np.sqrt(lengths)
    of_rows[2] += squares.sum(0) * lengths
    first = t.inner.start
    for tile in range(first // TILE, -(-t.inner.stop // TILE)):
      inner = slice(max(tile * TILE - first, 0), (tile + 1) * TILE - first)
      share = t.weights[:, inner] @ y[inner]
      squares = np.square(share) + LEAST_SQUARE
      variance_of_tile = unit**2 * np.vdot(squares, variance) + self._together(t, inner, y[inner], share, squares)
      size = squares.sum(1)
      self.of_tiles[:, t.head[0], t.head[1], tile] += variance_of_tile, slack @ np.sqrt(size), size.sum()

  def _together(self, t: Term, inner: slice, y: Array, share: Array, squares: Array) -> float:
    """Return what the errors of a tile's own weights add to its variance, as each is the same in all columns.

    In `Product.elements` they are as if independent: this is the difference, if it is positive. It matters where few
    weights, in few rows, are most of a tile.

    Args:
      inner: which of the weights' columns are the tile's.
      y: what they multiply.
      share, squares: the sums of their products, and the squares of these.
    """
    along, independent = share @ y.T, squares @ np.square(y).T
    added_variance = np.vdot(t.variance[:, inner], np.square(along) - independent)
    if t.shared is not None:  # these multiply Y - X
      x = self.product.exact[(*t.result, t.rows)].astype(np.float32)
      along = along - np.einsum("id,id->i", share, x)[:, None]
      independent = independent - 2 * (squares * x) @ y.T
      independent += np.einsum("id,id->i", squares, np.square(x))[:, None]
      added_variance += np.vdot(t.shared[:, inner], np.square(along) - independent)
    return max(float(added_variance), 0.0)

  def scaled(self, error: Array) -> Array:
    """Return an error of X as `values` takes it."""
    return np.clip(error / self.unit, -MOST_ERROR, MOST_ERROR).astype(np.float32)

  def values(self, t: Term, error: Array) -> Array:
    """Return what these weights contribute to the values of the forms of rows of Y: (inner,)."""
    of_rows = error[t.result][t.rows] @ self.product.operand[t.operand][t.inner].T
    return np.float64(self.unit[t.result].item()) * np.einsum("ij,ij->j", t.weights, of_rows)

  def families(self, values: Array) -> Iterator[Family]:
    """Yield the forms, whose values for rows of Y are given."""
    of_tiles = np.add.reduceat(values, np.arange(0, values.shape[-1], TILE), -1)
    kinds = (self.product.key, values, self.of_rows), ("tile", of_tiles, self.of_tiles)
    for kind, value, (variance, slack, size) in kinds:
      least = variance.max(-1, keepdims=True, initial=0) * NEGLIGIBLE
      yield Family(kind, value, variance + least, slack, size)


@dataclass(frozen=True, eq=False)
class Roundings:
  """The errors that roundings may leave in some products.

  Attributes:
    terms: returns an iterator over the terms of all products.
    products: the products by name.
    guides: the errors of the naive computation of a fused kernel, by name.
  """

  terms: Terms
  products: dict[str, Product]
  guides: dict[str, Array]

  @classmethod
  def of(cls, terms: Terms, products: dict[str, Product], guides: dict[str, Array]) -> "Roundings":
    """Compute the variances from the terms, which are kept in memory if small; `guides` are arrays, not errors."""
    if sum(prod(x.keys) * x.exact.shape[2] for x in products.values()) <= CHUNK:
      terms = list(terms()).__iter__
    for name, term in terms():
      products[name].add(term)
    return cls(terms, products, {name: x.error(guides[name]) for name, x in products.items()})

  def spread(self, name: str) -> tuple[Array, float] | tuple[()]:
    """Return the standard deviation of each element and the allowed number of them; () if `name` is no product."""
    if (product := self.products.get(name)) is None:
      return ()
    return np.sqrt(product.elements) * product.unit, product.limit

  def faults(self, **got: Array) -> dict[str, tuple[Fault, ...]]:
    """Return the worst fault of each kind, by the names of the products."""
    errors = {name: self.products[name].error(x) for name, x in got.items()}
    faults: dict[str, tuple[Fault, ...]] = dict.fromkeys(got, ())
    families = self._families(errors)
    suspects = [n for n, group in families.items() if any(f.most() > self.products[n].limit for f in group)]
    if suspects:
      shown = self._families({name: self.guides[name] for name in suspects})
    for name in suspects:
      found = (self._fault(name, f, guide.most()) for f, guide in zip(families[name], shown[name], strict=True))
      faults[name] = tuple(fault for fault in found if fault is not None)
    return faults

  def _fault(self, name: str, family: Family, guide: float) -> Fault | None:
    """Return the worst form that roundings cannot explain; None if they explain all.

    Args:
      guide: the largest deviation of the guide.
    """
    limit, excess = self.products[name].limit, family.excess()
    while excess.max(initial=0) > max(limit, 2 * guide):
      index = tuple(map(int, np.unravel_index(np.argmax(excess), excess.shape)))
      allowed = max(limit * sqrt(self._increase(name, family.kind, index)), 2 * guide)
      if excess[index] > allowed:
        return family.fault(index, allowed)
      excess[index] = 0
    return None

  @cached_property
  def _shares(self) -> dict[str, Shares]:
    """The forms by the names of the products; they are the same for all errors."""
    shares = {name: Shares(x) for name, x in self.products.items()}
    for name, term in self.terms():
      shares[name].add(term)
    return shares

  def _families(self, errors: dict[str, Array]) -> dict[str, list[Family]]:
    scaled = {name: self._shares[name].scaled(error) for name, error in errors.items()}
    values = {name: np.zeros(self.products[name].keys) for name in errors}
    for name, t in self.terms():
      if name in errors:
        values[name][t.head][t.inner] += self._shares[name].values(t, scaled[name])
    of_shares = {name: self._shares[name].families(x) for name, x in values.items()}
    return {name: [*self.products[name].families(error), *of_shares[name]] for name, error in errors.items()}

  def _increase(self, name: str, kind: str, index: Index) -> float:
    """Return the factor by which equal weights increase the variance of a form."""
    p, unit = self.products[name], self.products[name].precision.unit
    if unit < LEAST_UNIT:
      return 1.0
    result, of_errors = self._coefficients(name, kind, index)
    by_bin, alone = np.zeros(round(BINADES * BINS / (2 * unit))), 0.0
    for x, t in self.terms():
      if x == name and t.result == result:
        y = p.operand[t.operand][t.inner]
        of_roundings = (t.weights * (of_errors[t.rows].astype(np.float32) @ y.T)).ravel()
        by_bin += np.bincount(_bins(t.weights, unit, len(by_bin)), of_roundings, len(by_bin))
        alone += np.square(of_roundings.astype(np.float64)).sum()
    return max(1.0, _covariance(by_bin) / (alone + _TINY))

  def _coefficients(self, name: str, kind: str, index: Index) -> tuple[Head, Array]:
    """Return the head of X that a form is about, and the coefficients of its errors: (rows, columns)."""
    p, head = self.products[name], (index[0], index[1])
    if kind not in (p.key, "tile"):
      return head, p.coefficients(kind, index)
    first, count = (index[2] * TILE, TILE) if kind == "tile" else (index[2], 1)
    result, coefficients = head, np.zeros(p.exact.shape[2:])
    for x, t in self.terms():
      if x == name and t.head == head:
        inner = slice(max(first - t.inner.start, 0), max(first + count - t.inner.start, 0))
        coefficients[t.rows] += t.weights[:, inner] @ p.operand[t.operand][t.inner][inner]
        result = t.result
    return result, coefficients


def _slack(precision: Precision, r: Rules, heads: int) -> Array:
  """Return the relative scale error that each head may have: (heads,)."""
  slack = precision.unit**2 + 16 * FLOAT32  # second-order terms, and float32's exponentials and sums
  if (weights := precision.fused().weights) is not None:  # many weights are 1 times dropout's factor: rounded alike
    kept = np.float32(1 / (1 - r.dropout_p))
    slack += abs(float(weights(np.array(kept)) / kept) - 1)
  sinks: Array = np.zeros(heads)
  if r.sinks is not None and heads:
    sinks = np.abs(finite(r.sinks)).reshape(heads, -1).max(1)
  return slack + 2 * FLOAT32 * sinks  # the error of a sink's score is the same for all rows


def finite(x: Array) -> Array:
  """Return x in float64, with NaN and infinity replaced by 0."""
  return np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def largest(x: Array) -> float:
  """Return the largest finite absolute value, or 1 if it is 0."""
  return float(np.abs(finite(x)).max(initial=0)) or 1.0


def _bins(weights: Array, unit: float, count: int) -> Array:
  """Return the bin of each weight among the numbers of a type, counted down from the largest weight."""
  fraction, exponent = np.frexp(np.abs(weights).ravel().astype(np.float64))
  steps = (exponent + 2 * fraction) * (BINS / (2 * unit))
  return np.minimum(np.rint(steps.max() - steps), count - 1).astype(np.int64)


def _covariance(by_bin: Array) -> float:
  """Return the variance of a sum of roundings, over that of one rounding, from the sums of coefficients per bin."""
  diagonal = _TAPS[0] * np.dot(by_bin, by_bin)
  return float(diagonal + sum(2 * tap * np.dot(by_bin[d:], by_bin[:-d]) for d, tap in enumerate(_TAPS[1:], 1)))


def _taps() -> list[float]:
  """Return the covariance of two roundings at a distance of 0, 1, ... bins, as the mean over each pair."""
  near = (np.arange(-512, 512) + 0.5) / 512  # offsets within two adjacent bins
  distances = np.abs(np.arange(BINS + 1)[:, None] + near) / BINS
  covariance = np.where(distances < 1, 1 - 6 * distances + 6 * distances**2, 0)
  return (covariance * (1 - np.abs(near)) / 512).sum(1).tolist()


_TAPS = _taps()
