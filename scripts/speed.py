"""The cases of the README's speed table and picture, read from the records in scripts/results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uopattn.measure.bench_report import TERA

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
  """One row of a record.

  Attributes:
    record: file name of the record.
    problem, kind: the row's first two cells in the speed table, as the functions `problem` and `kind` return them.
    label: name of the case in the README.
    machine: name of the machine in the README.
  """

  record: str
  problem: str
  kind: str
  label: str
  machine: str

  def row(self, records: Mapping[str, Record]) -> Record:
    """Return the case's row from the records, by file name. Raises ValueError if there is none."""
    for row in records.get(self.record, {}).get("rows", ()):
      if (problem(row), kind(row)) == (self.problem, self.kind):
        return row
    raise ValueError(f"{self.record} has no row {self.problem}, {self.kind}")


def problem(row: Record) -> str:
  """Return batch, heads, lengths and head sizes as "B H N D", with H/HKV, M×N and D/DV where they differ."""
  p = row["problem"]
  heads = f"{p['Hq']}" + (f"/{p['Hkv']}" if p["Hkv"] != p["Hq"] else "")
  lengths = (f"{p['M']}×" if p["M"] != p["N"] else "") + f"{p['N']}"
  sizes = f"{p['Dk']}" + (f"/{p['Dv']}" if p["Dv"] != p["Dk"] else "")
  return f"{p['B']} {heads} {lengths} {sizes}"


def kind(row: Record) -> str:
  """Return the dtype, with "causal", "gradients" and what several devices divide where they apply."""
  p = row["problem"]
  divided = f", {row['devices']} devices by {row['shard']}" if row.get("shard") else ""
  return p["dtype"] + ", causal" * p["is_causal"] + ", gradients" * row.get("backward", False) + divided


def rounded(number: float) -> str:
  """Format a number with two significant digits, or with all digits before the point."""
  return f"{number:.0f}" if number >= 10 else f"{number:#.2g}"


def speed(contender: Record, unit: str) -> str:
  """Return a contender's speed, in a unit of `unit_of`."""
  if unit == "GB/s":
    return rounded(contender["gbytes"])
  return rounded(contender["gflops"] / (1000 if unit == "TFLOP/s" else 1))


def unit_of(row: Record) -> str:
  """Return the unit of speed of a row: "GB/s" of keys and values read with few queries, else "GFLOP/s" or "TFLOP/s"."""
  ours = row["contenders"]["uopattn"]
  if "read" in ours.get("share", {}):
    return "GB/s"
  return "TFLOP/s" if ours["gflops"] >= TERA else "GFLOP/s"


def ratios(row: Record) -> dict[str, float]:
  """Return how many times as fast as each correct contender ours is, fastest contender first."""
  correct = {n: c for n, c in row["contenders"].items() if n != "uopattn" and c["correct"]}
  best_first = sorted(correct, key=lambda name: -correct[name]["gflops"])
  return {name: row["ratios"][name]["paired"] for name in best_first}


def read_records(folder: Path) -> dict[str, Record]:
  """Return the records of `uopattn.bench` in a folder, by file name, newest first."""
  records = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)}
  return {name: record for name, record in records.items() if "rows" in record}  # records of other scripts have no rows


NAMES = {  # of contenders
  "torch": "PyTorch",
  "torch flash": "FlashAttention-2",
  "torch cudnn": "cuDNN",
  "torch flex": "FlexAttention",
  "fa3": "FlashAttention-3",
  "fa4": "FlashAttention-4",
  "fa4-deterministic": "FlashAttention-4, deterministic",
  "tinygrad": "tinygrad",
  "one device": "on one of them",
}
_H200, _ZEN5, _ZEN4, _XEON = "H200", "EPYC Zen 5, 2 cores", "EPYC Zen 4, 2 cores", "Xeon with AMX, 2 cores"
_TWO, _ONE, _GRADIENTS, _CPU, _AMX = (
  "2026-11-25-cuda-2-h200",
  "2026-12-01-cuda-h200",
  "2026-11-30-cuda-h200-backward-tma",
  "2026-11-22-cpu-epyc-zen5",
  "2026-11-25-cpu-xeon-amx",
)
CASES = (
  Case(f"{_ONE}.json", "4 32 4096 64", "bfloat16", "forward, D=64", _H200),
  Case(f"{_ONE}.json", "4 32 4096 128", "bfloat16", "forward, D=128", _H200),
  Case(f"{_ONE}.json", "4 32 4096 128", "bfloat16, causal", "causal, D=128", _H200),
  Case(f"{_ONE}.json", "4 32 4096 256", "bfloat16, causal", "causal, D=256", _H200),
  Case(f"{_ONE}-backward.json", "4 32 4096 64", "bfloat16, gradients", "backward, D=64", _H200),
  Case(f"{_GRADIENTS}.json", "4 32 4096 128", "bfloat16, gradients", "backward, D=128", _H200),
  Case(f"{_GRADIENTS}.json", "4 32 4096 128", "bfloat16, causal, gradients", "backward, causal, D=128", _H200),
  Case(f"{_ONE}.json", "16 32/8 1×8192 128", "bfloat16", "decode, 8192 keys, B=16", _H200),
  Case(f"{_TWO}.json", "1 16 131072 128", "half, 2 devices by sequence", "forward, N=131072 on two GPUs", "2 H200"),
  Case(f"{_CPU}.json", "1 32 1024 64", "float", "forward, float32", _ZEN5),
  Case(f"{_CPU}-backward.json", "1 32 1024 64", "float, gradients", "backward, float32", _ZEN5),
  Case(f"{_AMX}.json", "1 32 1024 64", "bfloat16", "forward, bfloat16", _XEON),
  Case(f"{_AMX}.json", "1 32 1024 64", "float", "forward, float32", _XEON),
  Case(f"{_AMX}-backward.json", "1 32 1024 64", "float, gradients", "backward, float32", _XEON),
  Case("2026-11-25-cpu-epyc-zen4.json", "1 32/8 1×4096 128", "float", "decode, 4096 keys, float32", _ZEN4),
)
