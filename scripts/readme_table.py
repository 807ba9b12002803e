"""Rewrites the speed tables of README.md, between their two marker lines, from the records of `uopattn.bench`.

Exit status 2 where the page has no markers or a record cannot be read.
"""

import argparse
import json
import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from uopattn.measure.bench_report import TERA, limit_name

BEGIN, END = "<!-- speed: begin, written by scripts/readme_table -->", "<!-- speed: end -->"
ROOT = Path(__file__).resolve().parent.parent


def table(record: dict[str, Any]) -> str:
  """The rows of a record as a Markdown table."""
  names = [name for name in dict.fromkeys(n for row in record["rows"] for n in row["contenders"]) if name != "uopattn"]
  limits = list(dict.fromkeys(by for row in record["rows"] for by in _share(row["contenders"]["uopattn"])))
  unit = _unit(record)
  head = ["B H N D", "dtype", unit, "spread", *(f"of {limit_name(by)}" for by in limits), "error"]
  for name in names:
    head += [f"{name}: {unit}", "error", "times as fast (by minima)"]
  aligned = ["---", "---", *("--:" for _ in head[2:])]
  return "\n".join(
    [_line(head), "|" + "|".join(aligned) + "|", *(_row(row, names, limits, unit) for row in record["rows"])]
  )


def _share(contender: dict[str, Any]) -> dict[str, float]:
  share: dict[str, float] = contender.get("share", {})
  return share


def _line(cells: Sequence[str]) -> str:
  return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _unit(record: dict[str, Any]) -> str:
  speeds = (c["gflops"] for row in record["rows"] for c in row["contenders"].values() if c["correct"])
  return "TFLOP/s" if max(speeds, default=0) >= TERA else "GFLOP/s"


def _row(row: dict[str, Any], names: Sequence[str], limits: Sequence[str], unit: str) -> str:
  p, ours = row["problem"], row["contenders"]["uopattn"]
  heads = f"{p['Hq']}" + (f"/{p['Hkv']}" if p["Hkv"] != p["Hq"] else "")
  lengths = (f"{p['M']}×" if p["M"] != p["N"] else "") + f"{p['N']}"
  sizes = f"{p['Dk']}" + (f"/{p['Dv']}" if p["Dv"] != p["Dk"] else "")
  kind = p["dtype"] + ", causal" * p["is_causal"] + ", gradients" * row.get("backward", False)
  cells = [f"{p['B']} {heads} {lengths} {sizes}", kind, _speed(ours, unit)]
  cells.append(f"{ours['spread']:.0%}" if ours["correct"] else "")
  cells += [_part(ours, by) for by in limits]
  cells.append(f"{ours['error']:.1e}")
  for name in names:
    theirs, ratio = row["contenders"].get(name), row["ratios"].get(name)
    cells += [_speed(theirs, unit), f"{theirs['error']:.1e}"] if theirs else ["", ""]
    cells.append(f"{ratio['paired']:.2f} ({ratio['of_minima']:.2f})" if ratio else "")
  return _line(cells)


def _part(contender: dict[str, Any], by: str) -> str:
  """A share of a limit; of a read, with the speed itself."""
  if by not in _share(contender):
    return ""
  speed = f" ({contender['gbytes']:.0f} GB/s)" if by == "read" else ""
  return f"{_share(contender)[by]:.0%}{speed}"


def _speed(contender: dict[str, Any], unit: str) -> str:
  if not contender["correct"]:
    return "fails the gate"
  speed = contender["gflops"] / (1000 if unit == "TFLOP/s" else 1)
  return f"{speed:.0f}" if speed >= 10 else f"{speed:#.2g}"


def caption(record: dict[str, Any], file: str) -> str:
  """What a record was made on, in a paragraph."""
  machine, versions, of = record["machine"], record["versions"], record["rows"][0]["product_of"]
  libraries = ", ".join(f"{name} {v}" for name, v in versions.items() if name not in ("clang", "python", "uopattn"))
  on = machine["device"]
  if on.startswith("CPU"):
    found = re.search(r"clang version [\d.]+", versions["clang"])  # makers put much around it
    load = f"load average {machine['load']:.1f} at the start, " if "load" in machine else ""
    on = f"{machine['cpu']}, {machine['threads']} threads, {load}{found[0] if found else versions['clang']}"
  return (
    f"{on}, {libraries}; {record['date']}, medians of {record['rounds']} rounds ([{file}](scripts/results/{file})). "
    f"A product is of {of['dtype']} matrices of {of['size']} rows and columns."
  )


def rewrite(page: str, records: dict[str, dict[str, Any]], plots: Container[str] = ()) -> str:
  """The page with the tables of `records`, by file name, between its markers.

  A record is followed by the plot of the same name, if that is among `plots`.

  Raises:
    ValueError: the page has no such lines.
  """
  before, begin, rest = page.partition(BEGIN + "\n")
  _, end, after = rest.partition(END)
  if not begin or not end:
    raise ValueError(f"has no lines {BEGIN!r} and {END!r}")
  parts = []
  for name, record in records.items():
    plot = f"{name.removesuffix('.json')}.png"
    parts.append(f"{caption(record, name)}\n\n{table(record)}\n\n")
    parts.append(f"![Speed over N](scripts/results/{plot})\n\n" * (plot in plots))
  return before + begin + "\n" + "".join(parts) + end + after


def main(words: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("page", nargs="?", type=Path, default=ROOT / "README.md", help="(default: %(default)s)")
  results = ROOT / "scripts" / "results"
  parser.add_argument("results", nargs="?", type=Path, default=results, help="the records (default: %(default)s)")
  given = parser.parse_args(words)
  page, results = given.page, given.results
  try:
    found = {path.name: json.loads(path.read_text()) for path in sorted(results.glob("*.json"), reverse=True)}
    records = {name: record for name, record in found.items() if "rows" in record}  # those of other scripts have none
    page.write_text(rewrite(page.read_text(), records, {path.name for path in results.glob("*.png")}))
  except (OSError, ValueError, KeyError) as error:
    print(f"readme_table: {page}: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
