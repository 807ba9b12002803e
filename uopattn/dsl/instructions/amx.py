# mypy: disable-error-code="empty-body, return"
"""Intel's Advanced Matrix Extensions (AMX): tiles, their products, and what brings operands into their layout.

A core has eight tiles, each of 16 rows of 64 bytes. `tile_product` computes C += A B with A (16, 32) and B (32, 16)
bfloat16 and C (16, 16) float32. A lies as it does in memory, row by row. B lies in pairs: row r of its tile holds
(B[2r, j], B[2r + 1, j]) for j = 0, 1, ..., so that 16 rows of pairs are A transposed as 32-bit words (`transpose`).

All that works on tiles needs `tile_config` first, and `tile_release` when it is done.
Denormal numbers count as 0 in products.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, "Intel Advanced Matrix Extensions", LDTILECFG,
TILELOADD, TILESTORED, TDPBF16PS; VREDUCEPS and VSCALEFPS.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType

from tinygrad import UOp

from uopattn.dsl.instruction import Instruction, Statement, instruction, statement
from uopattn.dsl.instructions.dialect import Dialect

TILES = 8
ROWS = 16  # of a tile
ROW_BYTES = 64
LANES = 16  # 32-bit elements per row
PAIR = 2  # bfloat16 elements per 32 bits
STEP = LANES * PAIR  # bfloat16 elements per row

# Polynomials of 2**f on [0, 1), constant term first, by their degree. Minimax in relative error, by Lawson's iteration,
# among polynomials that are exactly 1 at 0, as in `uopattn.dsl.math`; 8.6e-5 and 9.4e-8 with these constants.
EXP2: Mapping[int, tuple[float, ...]] = MappingProxyType(
  {
    3: (1.0, 0.6951167583465576, 0.22764499485492706, 0.07706703990697861),
    5: (
      1.0,
      0.6931512951850891,
      0.24016444385051727,
      0.05579991266131401,
      0.009017030708491802,
      0.001867129816673696,
    ),
  }
)

_VECTORS = "".join(
  f" typedef {of} {name} __attribute__((vector_size(64)));"
  for of, name in (("float", "vector"), ("int", "words"), ("unsigned", "bits"), ("short", "halves"))
)


def _block(*lines: str) -> str:
  """A C expression of value 0 that runs statements; braces in it are doubled, as in every text of an instruction."""
  return "({{ " + " ".join(lines) + " 0; }})"


def _shuffled(to: str, a: str, b: str, lanes: Sequence[int]) -> str:
  return f"words {to} = __builtin_shufflevector({a}, {b}, {', '.join(map(str, lanes))});"


def _transpose() -> str:
  """Text of `Amx.transpose`: four words of four rows, of which every fourth row is loaded, then these four rows."""
  rows = range(0, LANES, 4)
  unpack = {  # halves of each 128 bits of two rows, interleaved by 32 or 64 bits
    "low_words": [b + i for b in rows for i in (0, 16, 1, 17)],
    "high_words": [b + i for b in rows for i in (2, 18, 3, 19)],
    "low": [b + i for b in rows for i in (0, 1, 16, 17)],
    "high": [b + i for b in rows for i in (2, 3, 18, 19)],
  }
  lines = ["typedef int quad __attribute__((vector_size(16)));", "typedef int half __attribute__((vector_size(32)));"]
  for column in range(4):
    lines.append("{{")
    for i in range(4):  # loads of 128 bits need no shuffle, of which a processor can do one at a time
      for row in rows:
        source = f"(char *){{1}} + {row + i} * {{3}} + {16 * column}"
        lines.append(f"quad q{row}_{i}; __builtin_memcpy(&q{row}_{i}, {source}, 16);")
      for row in (0, 8):
        halves = f"q{row}_{i}, q{row + 4}_{i}, 0, 1, 2, 3, 4, 5, 6, 7"
        lines.append(f"half h{row}_{i} = __builtin_shufflevector({halves});")
      lines.append(_shuffled(f"r{i}", f"h0_{i}", f"h8_{i}", range(LANES)))
    for words in ("low", "high"):
      lines += [_shuffled(f"{words}{i}", f"r{i}", f"r{i + 1}", unpack[f"{words}_words"]) for i in (0, 2)]
    for i, (words, half) in enumerate((x, y) for x in ("low", "high") for y in ("low", "high")):
      lines.append(_shuffled(f"y{i}", f"{words}0", f"{words}2", unpack[half]))
      lines.append(f"__builtin_memcpy((char *){{0}} + {4 * column + i} * {{2}}, &y{i}, 64);")
    lines.append("}}")
  return _block(_VECTORS, *lines)


def _exp2(x: str, degree: int) -> str:
  """C text that replaces the vector x, at most 0, by 2**x: exactly 1 at 0, 0 at -inf, NaN at NaN."""
  *rest, last = (f"{c!r}f" for c in EXP2[degree])
  chain = f"((vector){{{{}}}} + {last})"
  for c in reversed(rest):
    chain = f"({chain} * f + {c})"
  masked = "(vector){{}}, 65535, 4"
  return (
    f"{{{{ vector f = __builtin_ia32_reduceps512_mask({x}, 1, {masked});"
    f" {x} = __builtin_ia32_scalefps512_mask({chain}, {x}, {masked}); }}}}"
  )


def _rounded(terms: int, in_pairs: bool, addresses: str) -> str:
  """C text that stores the vectors a and b in bfloat16, term by term at `addresses` with `term`, and changes them.

  One term is rounded to nearest; several, whose sum is the number, are cut off.
  """
  lines = ["a = (vector)((words)a + 32768); b = (vector)((words)b + 32768);"] if terms == 1 else []
  for term in range(terms):
    if in_pairs:
      # A shift and a blend; the compiler would merge them into one shuffle of 16-bit elements, which takes longer.
      lines.append('{{ bits y = (bits)a >> 16; __asm__("" : "+v"(y)); y |= (bits)b & 0xffff0000u;')
    else:
      order = ", ".join(map(str, range(1, 4 * LANES, 2)))
      lines.append(f"{{{{ halves y = __builtin_shufflevector((halves)a, (halves)b, {order});")
    lines.append(f"__builtin_memcpy({addresses.replace('term', str(term))}, &y, 64); }}}}")
    if term < terms - 1:
      lines += [f"{x} -= (vector)((words){x} & (int)0xffff0000);" for x in "ab"]
  return " ".join(lines)


def _weigh(terms: int, degree: int, subtracts: bool) -> str:
  """Text of `Amx.weigh`."""
  exponent = "({x} - shift) * factor" if subtracts else "{x} * factor - shift"
  return _block(
    _VECTORS,
    "char *p = (char *){0}; const float *s = {1}; vector shift, l, factor;",
    "__builtin_memcpy(&shift, {2}, 64); __builtin_memcpy(&l, {3}, 64); __builtin_memcpy(&factor, {4}, 64);",
    '_Pragma("clang loop unroll_count(4)") for (int i = 0; i < {5}; i += 2) {{ vector a, b;',
    "__builtin_memcpy(&a, s + 16 * i, 64); __builtin_memcpy(&b, s + 16 * i + 16, 64);",
    *(f"{x} = {exponent.format(x=x)};" for x in "ab"),
    _exp2("a", degree),
    _exp2("b", degree),
    "l += a + b;",
    _rounded(terms, True, "p + 32 * i + term * {6}"),
    "}} __builtin_memcpy({3}, &l, 64);",
  )


def _pack(terms: int, in_pairs: bool) -> str:
  """Text of `Amx.pack`."""
  return _block(
    _VECTORS,
    "char *to = (char *){0}; const char *x = (const char *){1}, *y = (const char *){2};",
    '_Pragma("clang loop unroll_count(4)") for (int i = 0; i < {4}; i++) {{ vector a, b;',
    "__builtin_memcpy(&a, x + i * {3}, 64); __builtin_memcpy(&b, y + i * {3}, 64);",
    _rounded(terms, in_pairs, "to + 64 * i + term * {5}"),
    "}}",
  )


_CONFIG = _block(
  f"__attribute__((aligned(64))) unsigned char c[64] = {{{{1}}}}; for (int i = 0; i < {TILES}; i++)",
  f"{{{{ c[16 + 2 * i] = {ROW_BYTES}; c[48 + i] = {ROWS}; }}}} __builtin_ia32_tile_loadconfig(c);",
)
_SCALE_ROWS = _block(
  _VECTORS,
  "vector y; __builtin_memcpy(&y, {1}, 64);",
  "if (__builtin_ia32_cmpps512_mask(y, (vector){{}} + 1.0f, 4, 65535, 4)) for (int i = 0; i < {2}; i++) {{ vector x;",
  "__builtin_memcpy(&x, {0} + 16 * i, 64); x *= y; __builtin_memcpy({0} + 16 * i, &x, 64); }}",
)

_WEIGH = {
  x: Instruction(f"weigh_{x[0]}_{x[1]}{'_subtracted' * x[2]}", {"c": _weigh(*x)}, parameters=x)
  for x in product((1, 2, 3), EXP2, (False, True))
  if x[1] == max(EXP2) or x[0] == 1
}
_PACK = {
  x: Instruction(f"pack_terms_{x[0]}{'_pairs' * x[1]}", {"c": _pack(*x)}, parameters=x)
  for x in product((1, 2, 3), (False, True))
}


def _check(*tiles: int) -> None:
  for tile in tiles:
    if not 0 <= tile < TILES:
      raise ValueError(f"tile {tile}: must be in 0..{TILES - 1}")


class Amx(Dialect):
  """Instructions on matrix tiles, and on vectors for their operands."""

  @instruction(c=_CONFIG)
  def tile_config(self, *after: UOp) -> Statement:
    """Make all tiles 16 rows of 64 bytes, with undefined content. A statement."""

  @instruction(c=_block("__builtin_ia32_tilerelease();"))
  def tile_release(self, *after: UOp) -> Statement:
    """Give up the tiles, so that the system need not save them. A statement."""

  @instruction(c=_block("__builtin_ia32_tilezero({0});"))
  def tile_zero(self, tile: int, *after: UOp) -> Statement:
    """Set a tile to 0. A statement. Raises ValueError if there is no such tile."""
    _check(tile)

  @instruction(c=_block("__builtin_ia32_tileloadd64({0}, {1}, {2});"))
  def tile_load(self, tile: int, address: UOp, stride: int, *after: UOp) -> Statement:
    """Load 16 rows of 64 bytes, the first from `address` (INDEX) and each next one `stride` bytes on. A statement."""
    _check(tile)

  @instruction(c=_block("__builtin_ia32_tilestored64({0}, {1}, {2});"))
  def tile_store(self, tile: int, address: UOp, stride: int, *after: UOp) -> Statement:
    """Store a tile to 16 rows of 64 bytes, the first at `address` (INDEX), each next one `stride` bytes on.

    A statement.
    """
    _check(tile)

  @instruction(c=_block("__builtin_ia32_tdpbf16ps({0}, {1}, {2});"))
  def tile_product(self, c: int, a: int, b: int, *after: UOp) -> Statement:
    """Add the product of tiles a and b to tile c, see above. A statement.

    Raises ValueError if there is no such tile, or if two of them are the same.
    """
    _check(c, a, b)
    if len({c, a, b}) < 3:
      raise ValueError(f"tiles {c}, {a} and {b}: a product needs three different ones")

  @instruction(c=_transpose())
  def transpose(self, to: UOp, source: UOp, to_stride: int, stride: int, *after: UOp) -> Statement:
    """Transpose 16 rows of 16 32-bit words. A statement.

    Args:
      to, source: INDEX of the first element, of any type.
      to_stride, stride: bytes between the rows of `to` and of `source`.
    """

  @instruction(c=_SCALE_ROWS)
  def scale_rows(self, rows: UOp, factors: UOp, count: int, *after: UOp) -> Statement:
    """Multiply `count` rows of 16 float32 by 16 factors, unless all factors are 1. A statement.

    Args:
      rows, factors: INDEX of the first element.
    """

  def weigh(
    self,
    to: UOp,
    scores: UOp,
    shift: UOp,
    sums: UOp,
    factor: UOp,
    rows: int,
    term_bytes: int,
    terms: int,
    degree: int,
    subtracts: bool,
    *after: UOp,
  ) -> UOp:
    """Turn scores of 16 queries, one per lane, into weights exp2(score * factor - shift) for `tile_product`.

    With `subtracts` they are exp2((score - shift) * factor). A statement.

    Args:
      to: INDEX of (rows / 2, 16) uint32, receives the weights of two keys each, lower key first, in bfloat16: rounded
        to nearest, or split into several terms by truncation.
      scores: INDEX of (rows, 16) float32.
      shift: INDEX of 16 float32, close to or above score * factor, or score.
      sums: INDEX of 16 float32, to which the weights, before rounding, are added.
      factor: INDEX of 16 float32, the factors on the scores.
      rows: keys, an even number.
      term_bytes: from one term to the next.
      terms: 1, 2 or 3.
      degree: of the polynomial that computes exp2, see `EXP2`; below 5 only with one term.
    """
    declared = _WEIGH[terms, degree, subtracts]
    return statement(declared, self.name, after, to, scores, shift, sums, factor, rows, term_bytes)

  def pack(
    self, to: UOp, a: UOp, b: UOp, stride: int, count: int, term_bytes: int, terms: int, in_pairs: bool, *after: UOp
  ) -> UOp:
    """Turn rows of 16 float32 into bfloat16, 32 of two rows in 64 bytes, `count` times. A statement.

    Args:
      to: INDEX of what receives them, of any type, 64 bytes after 64 bytes.
      a, b: INDEX of the first two rows; the next ones are `stride` bytes on.
      term_bytes: from one term to the next; see `weigh` for terms.
      terms: 1, 2 or 3.
      in_pairs: whether elements of a and b alternate, as in a right operand's rows; else those of b follow those of a.
    """
    return statement(_PACK[terms, in_pairs], self.name, after, to, a, b, stride, count, term_bytes)


# What has a text for each number of terms, and so is no declaration in the class.
IN_FAMILIES = *_WEIGH.values(), *_PACK.values()
