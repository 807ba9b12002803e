"""Analysis of NVIDIA machine code (SASS): disassembly, detection of the main loop, and its instructions by kind."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from report_table import kind

# Kinds of instructions, as patterns of their names; the first match counts.
KINDS = {
  "matrix": r"[A-Z]G?MMA\b",
  "trans": r"MUFU",
  "float": r"(F(ADD|MUL|FMA|MNMX|SEL|SETP|SET|CHK)\d?|F2FP?|H(ADD|MUL|FMA|MNMX|SETP|SET)2|I2FP?)\b",
  "lane": r"(SHFL|VOTEU?|REDUX|MATCH|ELECT)\b",
  "async": r"(LDGSTS|LDGDEPBAR|UTMA\w*|UBLK(CP|RED))\b",
  "shared": r"(LDSM?|STSM?|ATOMS)\b",
  "memory": r"(LDG?|STG?|LDL|STL|U?LDCU?|ATOMG?|REDG?)\b",
  "wait": r"(BAR|DEPBAR|SYNCS|WARPSYNC|WARPGROUP\w*|ARRIVES|FENCE|MEMBAR|(CGA)?ERRBAR|CCTL\w*|NANOSLEEP|YIELD|NOP"
  r"|BR[AX]|BSSY|BSYNC|ENDCOLLECTIVE|BREAK|BMOV|CALL|RET|EXIT)\b",
  "int": r"(I[A-Z]\w+|U[A-Z]\w+|VI\w+|LEA|P?LOP3|SH[FLR]|MOV|SEL|PRMT|SGXT|POPC|FLO|BREV|BMSK"
  r"|R2UR|[RP]2[RP]|C?S2U?R)\b",
}
NEVER = "@!PT "  # a predicate that is never true, on instructions that only fill the time before a fence
NONE = (
  "no disassembler for the main loop: install NVIDIA's CUDA toolkit for nvdisasm, or pip install triton, which has one"
)


def disassembler() -> str | None:
  """Return the path of nvdisasm: the one on PATH, else the one in an installed triton, else None."""
  if nvdisasm := shutil.which("nvdisasm"):
    return nvdisasm
  triton = importlib.util.find_spec("triton")
  folders = triton.submodule_search_locations if triton else None
  return shutil.which("nvdisasm", path=str(Path(folders[0]) / "backends/nvidia/bin")) if folders else None


def disassemble(cubin: bytes) -> str | None:
  """Disassemble a cubin; None without a disassembler. Raises RuntimeError with the disassembler's message."""
  program = disassembler()
  if program is None:
    return None
  with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(cubin)
    file.flush()
    done = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False, timeout=300)
  if done.returncode:
    raise RuntimeError(done.stderr)
  return done.stdout


def main_loop(text: str) -> Counter[str]:
  """Count the instructions of each kind in the shortest loop with the most matrix instructions.

  A loop round another one that has matrix instructions does not count; persistent workgroups have one. Without a loop,
  all of the code counts. A loop is a natural loop (Aho, Lam, Sethi and Ullman, "Compilers", 9.6.6), restricted to the
  instructions between its first one and the jump back. The compiler moves rarely executed code, such as repeated polls
  of a barrier, elsewhere; its jumps back do not form a loop of their own.
  """
  code, after = _read(text)
  before: list[list[int]] = [[] for _ in code]
  for i, following in enumerate(after):
    for j in following:
      before[j].append(i)
  bodies: list[list[int]] = []
  for last, following in enumerate(after):
    for first in following:
      if first <= last and last not in _reached(0, after, without=first):
        bodies.append([i for i in sorted(_reached(last, before, without=first) | {first}) if first <= i <= last])
  counted = [(body, Counter(_kind(code[i]) for i in body)) for body in bodies or [list(range(len(code)))]]
  inner = [(body[0], set(body)) for body, count in counted if count["matrix"]]
  counts = [count for body, count in counted if not any(body[0] < first and x <= set(body) for first, x in inner)]
  return max(counts, key=lambda count: (count["matrix"], -count.total()))


def _read(text: str) -> tuple[list[str], list[list[int]]]:
  """Return the instructions, and for each the indices of those that may come next."""
  code: list[str] = []
  labels: dict[str, int] = {}
  for line in text.splitlines():
    if label := re.match(r"(\S+):$", line):
      labels[label[1]] = len(code)
    elif operation := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
      code.append(operation[1])
  after: list[list[int]] = []
  for i, instruction in enumerate(code):
    # CALL also stands for a jump within the kernel
    jump = re.search(r"\b(?:BRA|CALL)\b.*`\((\S+)\)", instruction)
    stays = not re.match(r"BRA `|EXIT|RET", instruction) and i + 1 < len(code)
    after.append([i + 1] * stays + ([labels[jump[1]]] if jump else []))
  return code, after


def _reached(start: int, after: list[list[int]], without: int) -> set[int]:
  """Return the instructions reachable from `start`, including it, on paths that avoid `without`."""
  visited, todo = {without}, [start]
  while todo:
    i = todo.pop()
    if i not in visited:
      visited.add(i)
      todo += after[i]
  return visited - {without}


def _kind(instruction: str) -> str:
  """Return the kind of an instruction, given as text with predicate and operands."""
  if instruction.startswith(NEVER):
    return "wait"
  return kind(re.sub(r"@!?U?P\w+\s+", "", instruction).split()[0], KINDS)
