# mypy: disable-error-code="empty-body, return"
"""Instructions of CPUs; `uopattn.dsl.instructions.amx` has those of matrix tiles."""

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import UOp

from uopattn.dsl.instruction import Condition, Instruction, Statement, instruction, statement
from uopattn.dsl.instructions.dialect import Dialect


def _add_neighbours(lanes: int, first: list[int], step: int) -> str:
  """C text: lane i of the result is the sum of lanes first[i] and first[i] + step of two vectors, concatenated."""
  terms = [f"__builtin_shufflevector(a, b, {', '.join(str(i + n) for i in first)})" for n in (0, step)]
  size = 4 * lanes
  return (
    f"({{{{ typedef float vector __attribute__((vector_size({size}))); vector a, b, y;"
    f" __builtin_memcpy(&a, {{1}}, {size}); __builtin_memcpy(&b, {{2}}, {size});"
    f" y = {' + '.join(terms)}; __builtin_memcpy({{0}}, &y, {size}); 0; }}}})"
  )


def _add_pairs(lanes: int) -> str:
  """C text of `Cpu.add_pairs`."""
  return _add_neighbours(lanes, [4 * q + i for q in range(lanes // 4) for i in (0, 2, lanes, lanes + 2)], 1)


def _add_quads(lanes: int) -> str:
  """C text of `Cpu.add_quads`."""
  return _add_neighbours(lanes, [8 * pair + i for pair in range(lanes // 4) for i in range(4)], 4)


def _dots(left: str, right: str) -> str:
  """C text that adds the products of two bfloat16 pairs to each of 16 float32; `left` and `right` set pairs a and b.

  Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS. Denormal numbers count as 0.
  """
  vectors = [("float", "vector", 64), ("int", "words", 64), ("__bf16", "pairs", 64), ("__bf16", "row", 32)]
  types = "".join(f" typedef {of} {name} __attribute__((vector_size({size})));" for of, name, size in vectors)
  return (
    f"({{{{{types} vector y; pairs a, b; {left} {right} __builtin_memcpy(&y, {{0}}, 64);"
    " y = __builtin_ia32_dpbf16ps_512(y, a, b); __builtin_memcpy({0}, &y, 64); 0; }})"
  )


def _group_scales(lanes: int, each: int) -> str:
  """C text of `Cpu.group_scales`."""
  size, count = 4 * lanes, lanes // each
  number = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[count]
  # All bytes are in each 16 bytes of the vector, so that none moves from one to another.
  sources = [i // 4 * 16 + i // each for i in range(lanes) for _ in range(4)]
  shuffled = f"words y = (words)__builtin_shufflevector(all, all, {', '.join(map(str, sources))}) >> 4;"
  if lanes == 16:  # with VBMI one instruction takes eight bits from anywhere in the same 64, for each byte
    shifts = [(8 * (i // each) + 8 * byte - 20) % 64 for i in range(lanes) for byte in range(4)]
    bits = f"__builtin_ia32_vpmultishiftqb512((selected){{{{{', '.join(map(str, shifts))}}}}}, (selected)all)"
    shuffled = (
      "typedef char selected __attribute__((vector_size(64)));"
      f"\n#ifdef __AVX512VBMI__\nwords y = (words){bits};\n#else\n{shuffled}\n#endif\n"
    )
  return (
    f"({{{{ typedef {number} numbers __attribute__((vector_size({size}))); typedef unsigned char bytes"
    f" __attribute__((vector_size({size}))); typedef unsigned words __attribute__((vector_size({size}))); {number} x;"
    f" __builtin_memcpy(&x, (const char *){{1}} + {{2}}, {count}); bytes all = (bytes)(x - (numbers){{{{}}}});"
    f" {shuffled} y = (y & 0x07f00000) + {{3}}; __builtin_memcpy({{0}}, &y, {size}); 0; }}}})"
  )


def _look_up(lanes: int, per_word: int) -> str:
  """C text of `Cpu.look_up`."""
  of_lane, entries = {1: "unsigned", 2: "unsigned short"}[per_word], ", ".join(f"{{{i}}}" for i in range(3, 19))
  types = {"float": "vector", "int": "indices", "unsigned": "words"}
  declared = "".join(f" typedef {of} {name} __attribute__((vector_size(64)));" for of, name in types.items())
  # Of whole words, a load that starts some bytes later takes the place of shifts by 8, 16 and 24.
  later, shift = (" + {2} / 8", "{2} % 8") if per_word == 1 else ("", "{2}")
  # Without the empty asm clang shifts before it widens, so that each plane is widened.
  return (
    f"({{{{{declared} typedef {of_lane} lanes __attribute__((vector_size({64 // per_word}))); lanes x = {{{{}}}};"
    f" __builtin_memcpy(&x, (const char *){{1}}{later}, {4 * lanes // per_word});"
    f" words y = __builtin_convertvector(x, words);"
    f"""{' __asm__("" : "+v"(y));' if per_word == 2 else ""}"""
    f" vector z = __builtin_ia32_permvarsf512((vector){{{{{entries}}}}}, (indices)(y >> {shift}));"
    f" __builtin_memcpy({{0}}, &z, {4 * lanes}); 0; }}}})"
  )


_ADD_PAIRS = {lanes: Instruction(f"add_pairs_{lanes}", {"c": _add_pairs(lanes)}) for lanes in (4, 8, 16)}
_ADD_QUADS = {lanes: Instruction(f"add_quads_{lanes}", {"c": _add_quads(lanes)}) for lanes in (8, 16)}
_GROUP_SCALES = {
  (lanes, each): Instruction(
    f"group_scales_{lanes}_{each}", {"c": _group_scales(lanes, each)}, parameters=(lanes, each)
  )
  for lanes in (2, 4, 8, 16)
  for each in (2, 4)
  if lanes >= each
}
_LOOK_UP = {
  (lanes, per): Instruction(f"look_up_{lanes}_{per}", {"c": _look_up(lanes, per)}, parameters=(lanes, per))
  for lanes in (2, 4, 8, 16)
  for per in (1, 2)
}


class Cpu(Dialect):
  """Instructions of CPUs."""

  @instruction(c="0; if ({0}) continue")
  def skip_trip(self, when: Condition, *after: UOp) -> Statement:
    """Go on to the next trip of the innermost loop, a plain `for` loop, where `when`. A statement."""

  # The empty asm makes the address opaque, so clang keeps each prefetch in place. Otherwise it would move all
  # prefetches of an unrolled loop to its start, and processors drop some of such a burst.
  @instruction(
    c='({{ const void *address = {0}; __asm__ volatile("" : "+r"(address)); __builtin_prefetch(address, 0, 2); 0; }})'
  )
  def prefetch(self, address: UOp, *after: UOp) -> Statement:
    """Prefetch the cache line of a buffer's element into the L2 cache. A statement that changes no result.

    Not into L1: a core can have too few L1 misses pending to reach full memory bandwidth. If `address` is past the
    buffer's end, nothing is prefetched.
    """

  def add_pairs(self, lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
    """Add neighbouring lanes of two vectors. A statement.

    Lanes 4q and 4q + 1 of `to` are the two sums of lanes 4q to 4q + 3 of `a`; lanes 4q + 2 and 4q + 3 are those of `b`.

    Args:
      lanes: float32 lanes per vector: 4, 8 or 16.
      to: INDEX of the first element that is written.
      a, b: INDEX of the first element of each vector that is read.
    """
    return statement(_ADD_PAIRS[lanes], self.name, after, to, a, b)

  def add_quads(self, lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
    """Add neighbouring groups of four lanes of two vectors. A statement.

    In each 8 lanes, lanes 0 to 3 are added to lanes 4 to 7. The first half of `to` are sums of `a`, the second of `b`.

    Args:
      lanes: float32 lanes per vector: 8 or 16.
      to: INDEX of the first element that is written.
      a, b: INDEX of the first element of each vector that is read.
    """
    return statement(_ADD_QUADS[lanes], self.name, after, to, a, b)

  def group_scales(self, lanes: int, each: int, to: UOp, words: UOp, offset: UOp | int, bias: int, *after: UOp) -> UOp:
    """Set to[i], for i < lanes, to the float32 with the bits (byte i // each << 20) + bias. A statement.

    The first bit of a byte does not count. Source, of the one instruction that shuffles and shifts with AVX512-VBMI:
    Intel 64 and IA-32 Architectures Software Developer's Manual, VPMULTISHIFTQB.

    Args:
      lanes: 2, 4, 8 or 16.
      each: lanes per byte: 2 or 4.
      to: INDEX of the first element that is written, float32.
      words, offset: INDEX of a word, uint32, and how many bytes after its start byte 0 is.
    """
    return statement(_GROUP_SCALES[lanes, each], self.name, after, to, words, offset, bias)

  def look_up(
    self, lanes: int, per_word: int, to: UOp, words: UOp, shift: int, table: tuple[float, ...], *after: UOp
  ) -> UOp:
    """Set to[i], for i < lanes, to the entry of `table` that four bits of lane i name. A statement.

    On an x86 CPU with AVX-512. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VPERMPS.

    Args:
      lanes: 2, 4, 8 or 16.
      per_word: lanes per word of 32 bits: 1 or 2.
      to: INDEX of the first element that is written, float32.
      words: INDEX of the first word, uint32. The one after the last must exist: bytes of it may be read.
      shift: where the four bits are in a lane.
      table: 16 numbers.
    """
    entries = [UOp.const(x, dtypes.float) for x in table]
    return statement(_LOOK_UP[lanes, per_word], self.name, after, to, words, shift, *entries)

  @instruction(c=_dots("__builtin_memcpy(&a, {1}, 64);", "__builtin_memcpy(&b, {2}, 64);"))
  def dot_pairs(self, to: UOp, a: UOp, b: UOp, *after: UOp) -> Statement:
    """Add a[2i] b[2i] + a[2i + 1] b[2i + 1] to to[i], for i < 16, on an x86 CPU with AVX512-BF16. A statement.

    Denormal inputs and results count as 0. Source: Intel 64 and IA-32 Architectures Software Developer's Manual,
    VDPBF16PS.

    Args:
      to: INDEX of the first element, float32.
      a, b: INDEX of the first element of each, bfloat16.
    """

  @instruction(
    c=_dots(
      "int w; __builtin_memcpy(&w, {1}, 4); words ws = w - (words){{}}; __builtin_memcpy(&a, &ws, 64);",
      "row c, d; __builtin_memcpy(&c, {2}, 32); __builtin_memcpy(&d, {3}, 32);"
      f" b = __builtin_shufflevector(c, d, {', '.join(f'{i}, {16 + i}' for i in range(16))});",
    )
  )
  def weighted_pair(self, to: UOp, weights: UOp, a: UOp, b: UOp, *after: UOp) -> Statement:
    """Add weights[0] a[i] + weights[1] b[i] to to[i], for i < 16; otherwise like `dot_pairs`. A statement."""


# What has a text for each number of lanes, and so is no declaration in the class.
IN_FAMILIES = tuple(x for family in (_ADD_PAIRS, _ADD_QUADS, _GROUP_SCALES, _LOOK_UP) for x in family.values())
