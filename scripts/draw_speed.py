"""Draws the speed of uopattn next to other libraries, one line per case, for the README."""

import argparse
import sys
from pathlib import Path
from typing import Any

import speed
from matplotlib.figure import Figure
from speed import CASES, NAMES, Case

from uopattn.measure.program import check_writable, exit_status

OURS = "uopattn"
COLOURS = {OURS: "#0b5cad", "torch cudnn": "#d9822b", "torch flex": "#5a9e6f", "torch flash": "#777777"}
COLOURS |= {"fa3": "#8e44ad", "fa4": "#c0392b", "fa4-deterministic": "#e39b93"}
COLOURS["torch"] = COLOURS["torch flash"]
HEADS = {  # titles of the machines in the picture; other machines are only in the table
  "H200": "NVIDIA H200, bfloat16, 32 heads (forward and backward: B=4, N=4096)",
  "EPYC Zen 5, 2 cores": "CPU: two cores of an AMD EPYC (Zen 5), B=1, 32 heads, N=1024, D=64",
  "Xeon with AMX, 2 cores": "CPU: two cores of an Intel Xeon with AMX, the same problem",
}
GREY = "#555555"


def relative(row: speed.Record) -> dict[str, float]:
  """Return the speed of each correct contender as a multiple of the fastest other library's, ours last."""
  ratios = speed.ratios(row)
  ours = next(iter(ratios.values()))
  return {name: ours / ratio for name, ratio in ratios.items()} | {OURS: ours}


def draw(path: Path, results: Path) -> int:
  """Write the picture, with a line per case and a dot per library; return 0."""
  check_writable(str(path), path)
  records = speed.read_records(results)
  figure = Figure(figsize=(9.2, 5.6), layout="constrained")
  axis = figure.subplots()
  y = 0.0
  for machine, head in HEADS.items():
    style: dict[str, Any] = {"transform": axis.get_yaxis_transform(), "backgroundcolor": "white"}
    axis.text(-0.3, y, head, weight="bold", va="center", **style)
    y += 1.1
    for case in (case for case in CASES if case.machine == machine):
      _draw_case(axis, y, case, case.row(records))
      y += 1
    y += 0.5
  drawn = [case for case in CASES if case.machine in HEADS]
  dates = sorted({records[case.record]["date"] for case in drawn})
  dates = list(dict.fromkeys([dates[0], dates[-1]]))
  shown = {name for case in drawn for name in relative(case.row(records))}
  for name in (name for name in COLOURS if name in shown):
    axis.scatter([], [], color=COLOURS[name], label=OURS if name == OURS else NAMES[name])
  axis.legend(loc="upper right", frameon=False)
  axis.set(xlim=(0, 3.35), ylim=(y - 0.9, -0.6), yticks=[], xticks=(0, 1, 2, 3))
  axis.set_xticklabels(["0", "1×", "2×", "3×"])
  axis.set_xlabel(f"times as fast as the fastest other library, measured in the same run, {' to '.join(dates)}")
  axis.grid(axis="x", color="#e2e2e2", linewidth=0.8)
  axis.axvline(1, color=GREY, linewidth=1, zorder=0)
  axis.set_axisbelow(True)
  for side in ("top", "left", "right"):
    axis.spines[side].set_visible(False)
  figure.savefig(path, dpi=110)
  return 0


def _draw_case(axis: Any, y: float, case: Case, row: speed.Record) -> None:
  """Draw a line of dots, one per library."""
  speedups, unit = relative(row), speed.unit_of(row)
  axis.text(-0.02, y, case.label, transform=axis.get_yaxis_transform(), ha="right", va="center")
  axis.plot([0, max(speedups.values())], [y, y], color="#d5dde6", linewidth=3, zorder=1)
  for name, at in speedups.items():
    ours = name == OURS
    axis.scatter(at, y, s=90 if ours else 46, color=COLOURS[name], zorder=3 if ours else 2, edgecolor="white")
  told = f"{speed.speed(row['contenders'][OURS], unit)} {unit}"
  end, offset = (max(speedups.values()), y), {"textcoords": "offset points", "weight": "bold"}
  axis.annotate(told, end, (9, 0), va="center", color=COLOURS[OURS], **offset)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("output", type=Path, metavar="FILE.png", help="the picture to write")
  parser.add_argument("results", nargs="?", type=Path, default=speed.RESULTS, help="the records (default: %(default)s)")
  args = parser.parse_args()
  return exit_status(parser.prog, lambda: draw(args.output, args.results))


if __name__ == "__main__":
  sys.exit(main())
