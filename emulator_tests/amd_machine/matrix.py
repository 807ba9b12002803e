"""Matrix instructions: WMMA of RDNA3 and RDNA4, MFMA of CDNA.

A lane's elements of A (16, K) and B (K, 16) lie in order of its registers, from the low bits up. Of A, lane l holds row
l % 16, and of B column l % 16; for which k is the same of both, so that it does not matter to a product.

Source: AMD, "RDNA3 Instruction Set Architecture", section "Wave Matrix Multiply Accumulate (WMMA)"; "AMD Instinct MI300
Instruction Set Architecture", section "Matrix Arithmetic Instructions"; AMD matrix instruction calculator.
"""

import re

import numpy as np

from .errors import KernelError
from .float8 import table
from .instruction import Instruction, Step, every
from .operands import constant, names, raw, register
from .wave import ACC, Wave

WMMA = re.compile(r"V_WMMA_F32_16X16X(\d+)_(F16|BF16|FP8_FP8|BF8_BF8)")
MFMA = re.compile(r"V_MFMA_F32_16X16X(\d+)_(F16|BF16|F32|FP8_FP8|BF8_BF8|F8F6F4)")
FORMS = {"FP8": (4, 3), "BF8": (5, 2)}


def elements(words: np.ndarray, kind: str, fnuz: bool) -> np.ndarray:
  """The numbers in a lane's registers: words (registers, 2, lanes) -> (2, lanes, elements) of float64."""
  words = np.ascontiguousarray(np.moveaxis(words, 0, -1))
  if kind == "F32":
    return words.view(np.float32).astype(np.float64)
  if kind == "F16":
    return words.view(np.float16).astype(np.float64)
  if kind == "BF16":
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
  return table(*FORMS[kind], fnuz)[words.view(np.uint8)].astype(np.float64)


class Product:
  """A matrix instruction's registers and types."""

  def __init__(self, i: Instruction, k: int, kinds: tuple[str, str]):
    inst = i.inst
    self.k, self.kinds, self.fnuz = k, kinds, i.target.arch == "gfx942"
    acc = raw(inst, "acc") if "acc" in dict(inst._fields) else 0
    is_acc = bool(raw(inst, "acc_cd")) if "acc_cd" in dict(inst._fields) else False
    self.a, self.b = (register(inst, f"src{n}") - 256 + (ACC if acc >> n & 1 else 0) for n in range(2))
    bits = {"F32": 32, "F16": 16, "BF16": 16}.get(kinds[0], 8)
    lanes = i.target.lanes
    per_lane = 16 if i.target.family == "rdna3" else 16 * k // lanes
    self.registers = max(1, per_lane * bits // 32)
    self.results = 256 // lanes
    self.constant = constant(register(inst, "src2"), 32, None, None)
    self.c = register(inst, "src2") - 256 + (ACC if is_acc else 0)
    self.d = register(inst, "vdst") - 256 + (ACC if is_acc else 0)

  def touched(self) -> frozenset[int]:
    size = 32 * self.registers
    found = [names(self.a + 256, size), names(self.b + 256, size), names(self.d + 256, 32 * self.results)]
    return every(*found, names(self.c + 256, 32 * self.results) if self.constant is None else ())

  def operands(self, w: Wave) -> tuple[np.ndarray, np.ndarray]:
    n = self.registers
    return tuple(
      elements(w.v[x : x + n], kind, self.fnuz) for x, kind in zip((self.a, self.b), self.kinds, strict=True)
    )  # type: ignore[return-value]

  def accumulator(self, w: Wave) -> np.ndarray:
    """(registers, 2, lanes) of float32."""
    if self.constant is not None:
      return np.full((self.results, 2, w.lanes), np.uint32(self.constant).view(np.float32))
    return w.v[self.c : self.c + self.results].view(np.float32)

  def write(self, w: Wave, sums: np.ndarray) -> None:
    """Write (registers, 2, lanes), of all lanes: EXEC is ignored."""
    w.v[self.d : self.d + self.results] = sums.astype(np.float32).view(np.uint32)


def wmma(i: Instruction, k: int, kind: str) -> Step:
  """D = A B + C of 16x16, by 32 lanes."""
  inst, product = i.inst, Product(i, k, tuple(kind.split("_")[:2]) if "_" in kind else (kind, kind))  # type: ignore[arg-type]
  neg, neg_hi, rdna3 = raw(inst, "neg"), raw(inst, "neg_hi"), i.target.family == "rdna3"
  if raw(inst, "clmp") or (i.target.family == "rdna4" and raw(inst, "opsel")):
    raise i.unknown("a matrix instruction with a modifier")
  signs = [np.tile([-1.0 if neg >> n & 1 else 1.0, -1.0 if neg_hi >> n & 1 else 1.0], 8) for n in range(2)]

  def run(w: Wave) -> None:
    a, b = product.operands(w)
    if rdna3:
      for name, first in (("A", product.a), ("B", product.b)):
        words = w.v[first : first + product.registers]
        if not np.array_equal(words[..., :16], words[..., 16:]):
          raise w.fail(KernelError, f"lanes 16 to 31 do not repeat {name} of lanes 0 to 15")
      a, b = a[:, :16], b[:, :16]
    else:
      a, b = (np.concatenate([x[:, :16], x[:, 16:]], -1) for x in (a, b))
    if neg & 3 or neg_hi & 3:
      a, b = a * signs[0][: a.shape[-1]], b * signs[1][: b.shape[-1]]
    c = product.accumulator(w)
    c = np.abs(c) if neg_hi & 4 else c
    c = -c if neg & 4 else c
    d = a @ b.swapaxes(-1, -2)  # (2, rows, columns)
    # Register r of lane l holds row 2 r + l // 16 on RDNA3, r + 8 (l // 16) on RDNA4.
    d = d.reshape(2, 8, 2, 16).transpose(1, 0, 2, 3) if rdna3 else d.reshape(2, 2, 8, 16).transpose(2, 0, 1, 3)
    product.write(w, d.reshape(8, 2, 32) + c)

  return Step(run, product.touched())


def mfma(i: Instruction, k: int, kind: str) -> Step:
  """D = A B + C of 16x16, by 64 lanes."""
  inst = i.inst
  kinds = tuple(kind.split("_")[:2]) if "_" in kind else (kind, kind)
  if kind == "F8F6F4":
    forms = {0: "FP8", 1: "BF8"}
    if raw(inst, "cbsz") not in forms or raw(inst, "blgp") not in forms:
      raise i.unknown("a matrix instruction of 4 or 6 bits")
    kinds = forms[raw(inst, "cbsz")], forms[raw(inst, "blgp")]
  elif raw(inst, "cbsz") or raw(inst, "abid") or raw(inst, "blgp"):
    raise i.unknown("a matrix instruction that broadcasts")
  product = Product(i, k, kinds)  # type: ignore[arg-type]

  def run(w: Wave) -> None:
    a, b = (np.concatenate(np.split(x, 4, 1), -1) for x in product.operands(w))  # (2, 16, K)
    d = a @ b.swapaxes(-1, -2)
    d = d.reshape(2, 4, 4, 16).transpose(2, 0, 1, 3)  # register r of lane l holds row 4 (l // 16) + r
    product.write(w, d.reshape(4, 2, 64) + product.accumulator(w))

  return Step(run, product.touched())


def build(i: Instruction) -> Step | None:
  """Return the step of a matrix instruction, None for another."""
  if found := WMMA.fullmatch(i.name):
    return wmma(i, int(found[1]), found[2])
  if found := MFMA.fullmatch(i.name):
    return mfma(i, int(found[1]), found[2])
  return None
