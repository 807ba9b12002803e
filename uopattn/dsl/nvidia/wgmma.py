"""Hopper's asynchronous matrix product of a warpgroup (four warps, 128 threads), sm_90a.

`start` starts D (64, n) += A (64, 16 steps) B (16 steps, n), of 16 bits, as one group, with float32 accumulators in
registers; `wait` waits for it. B, and A if it is not in registers, are in shared memory, in panels of 64 columns with
the 128-byte swizzle (`uopattn.dsl.nvidia.swizzled`), each panel aligned to 1024 bytes. Warp w of the four has rows 16 w
to 16 w + 15 of A and D, in the layout of `uopattn.dsl.nvidia.mma_layout`.

Operands of 8 bits have 32 elements in a step. A step is 32 bytes of a row then too, and a panel's row 128, so rows and
panels are counted in units of 16 bits. k must run along the rows of both operands. Of A in registers, word i of a step
is of row 8 (i % 2) further on, k from 16 (i // 2) + 4 (lane % 4) on. The tensor cores keep 14 bits of each term and of
the sum (`uopattn.emulator.warpgroup.cut_product`). So long sums must not be left to them: a product with A in registers
clears D first, and the kernel adds it up.

Operands of float32 are given as `terms` of bfloat16 (`uopattn.dsl.gpu.terms`): side by side in a matrix's rows, each
from a panel of its own on, and one after another in registers. All products of terms are one group, which clears D.

The product and its fence are one text, and the wait names the accumulators. So neither the compiler's front end nor its
back end can move an access to a register into the time when the hardware owns it.

Source: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instructions".
"""

import re
from enum import StrEnum
from functools import cache

from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import UOp

from uopattn.dsl.gpu.terms import PAIRS
from uopattn.dsl.instruction import Instruction, statement
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import WARP

WARPS = 4  # of a warpgroup
THREADS = WARPS * WARP
M = 64
K = 16
PANEL = 64  # columns
MANY = 16  # steps


class Form(StrEnum):
  """Where a product has its operands, and whether D is cleared first: the name of its instruction.

  B is transposed, n rows of k, unless said otherwise.

  Attributes:
    SHARED: A is in shared memory. D is cleared.
    ADDED: the same, but D is not cleared.
    BY_ROWS: A and B, of 16 bits, are in shared memory as k rows of 64 and k rows of n. D is cleared.
    BY_ROWS_ADDED: the same, but D is not cleared.
    REGISTERS: A is in registers. In 16 bits B is k rows of n, and D is not cleared, except with several terms; in 8
      bits D is cleared.
    REGISTERS_CLEARED: A, of 16 bits, is in registers. D is cleared.
  """

  SHARED = "wgmma"
  ADDED = "wgmma_added"
  BY_ROWS = "wgmma_by_rows"
  BY_ROWS_ADDED = "wgmma_by_rows_added"
  REGISTERS = "wgmma_registers"
  REGISTERS_CLEARED = "wgmma_registers_cleared"


_REGISTERS_BYTES = "wgmma_registers_bytes"  # `Form.REGISTERS` in 8 bits
_KINDS = {"f16": dtypes.half, "bf16": dtypes.bfloat16, "e4m3": dtypes.fp8e4m3, "e5m2": dtypes.fp8e5m2}
_NAME = re.compile(r"/\* (wgmma\w*) n=(\d+)(?: steps=(\d+) (b?f16|e[45]m[23])(?: terms=(\d+))?)? \*/")

# The low word: start address, and leading offset between panels (used if B's rows are k). The high word is constant:
# stride of 1024 bytes per 8 rows, swizzle. Sums of 32 bits take half the registers of 64.
_DESCRIPTOR = """
  unsigned {name} = ((unsigned)__cvta_generic_to_shared({pointer}) & 0x3FFFF) >> 4 | (({panel}) * 2 >> 4) << 16;"""
_HIGH = f"{64 << 32 | 1 << 62:#x}ull"


def _described(low: str) -> str:
  """An operand of the instruction, with a descriptor of the given low word."""
  return f'"l"((unsigned long long)({low}) | {_HIGH})'


def _escaped(text: str) -> str:
  return text.replace("{", "{{").replace("}", "}}")


def _listed(form: str, count: int, first: int = 0) -> str:
  return ", ".join(form.replace("#", str(i)) for i in range(first, first + count))


@cache
def _product(n: int, steps: int, kind: str, name: str, terms: int = 1) -> Instruction:
  """Operands: accumulators, A (words in registers, or shared memory), B, elements per panel of A and of B."""
  count, lines, by_rows = n // 2, ["wgmma.fence.sync.aligned;"], name in (Form.BY_ROWS, Form.BY_ROWS_ADDED)
  registers = name in (Form.REGISTERS, Form.REGISTERS_CLEARED, _REGISTERS_BYTES)
  added, eight = name in (Form.ADDED, Form.BY_ROWS_ADDED), _KINDS[kind].itemsize == 1
  inputs: dict[str, int] = {}  # where each stands among all operands of the text
  shape = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 if eight else 16}.f32.{kind}.{kind} {{{_listed('%#', count)}}}"
  signs = "1, 1" if eight else "1, 1, 0, 0"

  def operand(text: str) -> str:
    return f"%{inputs.setdefault(text, count + len(inputs))}"

  def along_row(x: str, address: int, term: int, step: int) -> str:  # columns are k: by 32 bytes, or to the next panel
    panel, inner = term * ceildiv(steps, PANEL // K) + step // (PANEL // K), step % (PANEL // K) * K * 2 >> 4
    return operand(_described(f"{x} + {panel} * (({{{address}}}) * 2 >> 4) + {inner}"))

  def along_column(x: str, address: int, term: int, step: int) -> str:  # rows are k: by 16 rows
    first = f"{term * ceildiv(n, PANEL)} * (({{{address}}}) * 2 >> 4) + " if term else ""
    return operand(_described(f"{x} + {first}{step * K * PANEL * 2 >> 4}"))

  for i, (left, right) in enumerate(PAIRS[terms]):
    for step in range(steps):
      adds = int(i + step > 0 or added or (name == Form.REGISTERS and terms == 1))
      if registers:
        words = ", ".join(operand(f'"r"(a[{4 * (left * steps + step) + word}])') for word in range(4))
        if eight:
          lines.append(f"{shape}, {{{words}}}, {along_row('b', 4, right, step)}, {adds}, {signs};")
        elif name == Form.REGISTERS_CLEARED:
          lines.append(f"{shape}, {{{words}}}, {along_row('b', 4, right, step)}, {adds}, 1, 1, 0;")
        else:
          lines.append(f"{shape}, {{{words}}}, {along_column('b', 4, right, step)}, {adds}, 1, 1, 1;")
      elif by_rows:  # the rows of both are k
        a, b = along_column("a", 3, left, step), along_column("b", 4, right, step)
        lines.append(f"{shape}, {a}, {b}, {adds}, 1, 1, 1, 1;")
      else:
        a, b = along_row("a", 3, left, step), along_row("b", 4, right, step)
        lines.append(f"{shape}, {a}, {b}, {adds}, {signs};")
  lines.append("wgmma.commit_group.sync.aligned;")
  body = "".join(f'\n    "{_escaped(line)}\\n"' for line in lines)
  start = (
    "unsigned* a = {1};" if registers else _DESCRIPTOR.format(name="a", pointer="{1}", panel="{3}" if by_rows else "0")
  )
  start += _DESCRIPTOR.format(name="b", pointer="{2}", panel="{4}" if name == Form.REGISTERS or by_rows else "0")
  if terms > 1 or steps > MANY:  # so many descriptors are not to be kept in registers from one trip to the next
    start += ' asm volatile("" : "+r"(b)%s);' % ("" if registers else ', "+r"(a)')
  outputs = _listed('"+f"(d[#])', count)
  of_terms = f" terms={terms}" if terms > 1 else ""
  text = (
    f"/* {name} n={n} steps={steps} {kind}{of_terms} */ [&](){{{{ float* d = {{0}}; {start}\n"
    f'  asm volatile({body}\n    : {outputs}\n    : {", ".join(inputs)} : "memory"); return 0; }}}}()'
  )
  return Instruction(name, {"cuda": text}, cross_lane=True, parameters=(n, steps, _KINDS[kind], terms))


@cache
def _wait(n: int) -> Instruction:
  """Operands: groups that may be pending, accumulators."""
  count = n // 2
  text = (
    f"/* wgmma_wait n={n} */ [&](){{{{ float* d = {{1}}; asm volatile("
    f'"wgmma.wait_group.sync.aligned %{count};" : {_listed(chr(34) + "+f" + chr(34) + "(d[#])", count)} '
    f': "n"({{0}}) : "memory"); return 0; }}}}()'
  )
  return Instruction("wgmma_wait", {"cuda": text}, cross_lane=True, parameters=(n,))


def find(text: str) -> Instruction | None:
  """The instruction of this module that has the given text; None if there is none."""
  if (match := _NAME.match(text)) is None:
    return None
  name, n, steps, kind, terms = match.groups()
  instruction = _wait(int(n)) if steps is None else _product(int(n), int(steps), kind, name, int(terms or 1))
  return instruction if instruction.texts["cuda"] == text else None


def uniform(x: UOp) -> UOp:
  """An integer x >= 0 that is the same in all lanes of a warp, taken from lane 0, so that ptxas knows that it is.

  Then a warp leaves loops as a whole. Otherwise ptxas makes descriptors of products in vector registers, which takes 30
  instructions per tile, and spills. Nor does it compute x again in each trip of a loop, to save a register.
  """
  if x.vmin == x.vmax:
    return x
  return CUDA.shuffle(x.cast(dtypes.int), 0) & (1 << int(x.vmax).bit_length()) - 1


def start(
  dtype: DType,
  n: int,
  steps: int,
  d: UOp,
  a: UOp,
  b: UOp,
  panels: tuple[int, int],
  *after: UOp,
  form: Form = Form.SHARED,
  terms: int = 1,
) -> UOp:
  """Start a product as a group of its own. A statement.

  Args:
    dtype: type of A and B: float16, bfloat16, fp8e4m3 or fp8e5m2.
    n: columns of D, a multiple of 8 up to 256.
    steps: steps of 32 bytes along k, of each term.
    d: address of n / 2 float32 registers.
    a: address of A's rows in shared memory, or of 4 * steps 32-bit registers.
    b: address of B in shared memory.
    panels: units of 16 bits per panel of A, and of B.
    after: what the product must wait for.
    form: where A and B are, and whether D is cleared first.
    terms: terms of A and B, see `uopattn.dsl.gpu.terms`: 1, or those of float32.

  Raises:
    ValueError: the form does not exist in 8 bits.
  """
  kind = next(kind for kind, x in _KINDS.items() if x == dtype)
  name = form.value
  if dtype.itemsize == 1:
    if form not in (Form.SHARED, Form.ADDED, Form.REGISTERS):
      raise ValueError(f"{form}: must be of 16 bits, not {kind}")
    name = _REGISTERS_BYTES if form is Form.REGISTERS else name
  return statement(_product(n, steps, kind, name, terms), CUDA.name, after, d, a, b, *panels)


def wait(count: int, n: int, d: UOp, *after: UOp) -> UOp:
  """Wait until at most `count` of the warpgroup's products are pending; the result `d` may then be read."""
  return statement(_wait(n), CUDA.name, after, count, d)
