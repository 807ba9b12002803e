"""Rewrites the speed tables, all rows in scripts/results/README.md and some in README.md, from the bench's records.

Each page has its tables between two marker lines. The exit status is 2 if a page lacks the markers, or a record cannot
be read or lacks a row.
"""

import argparse
import re
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from speed import CASES, NAMES, RESULTS, ROOT, Case, Record, kind, problem, ratios, read_records, speed, unit_of

from uopattn.measure.bench_report import TERA, gpu_state, limit_name

BEGIN, END = "<!-- speed: begin, written by scripts/readme_table -->", "<!-- speed: end -->"


def table(record: dict[str, Any]) -> str:
  """Return the rows of a record as a Markdown table."""
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
  ours = row["contenders"]["uopattn"]
  cells = [problem(row), kind(row), _speed(ours, unit)]
  cells.append(f"{ours['spread']:.0%}" if ours["correct"] else "")
  cells += [_share_cell(ours, by) for by in limits]
  cells.append(f"{ours['error']:.1e}")
  for name in names:
    theirs, ratio = row["contenders"].get(name), row["ratios"].get(name)
    cells += [_speed(theirs, unit), f"{theirs['error']:.1e}"] if theirs else ["", ""]
    cells.append(f"{ratio['paired']:.2f} ({ratio['of_minima']:.2f})" if ratio else "")
  return _line(cells)


def _share_cell(contender: dict[str, Any], by: str) -> str:
  """Return the share of a limit as a cell; for a read, the cell also has the speed in GB/s."""
  if by not in _share(contender):
    return ""
  read = f" ({contender['gbytes']:.0f} GB/s)" if by == "read" else ""
  return f"{_share(contender)[by]:.0%}{read}"


def _speed(contender: dict[str, Any], unit: str) -> str:
  if not contender["correct"]:
    return "fails the gate"
  return speed(contender, unit)


def caption(record: dict[str, Any], file: str) -> str:
  """Return a paragraph on the machine, versions and date of a record."""
  machine, versions, of = record["machine"], record["versions"], record["rows"][0]["product_of"]
  libraries = ", ".join(f"{name} {v}" for name, v in versions.items() if name not in ("clang", "python", "uopattn"))
  on = machine["device"]
  if on.startswith("CPU"):
    clang = re.search(r"clang version [\d.]+", versions["clang"])  # vendors add text around it
    load = f"load average {machine['load']:.1f} at the start, " if "load" in machine else ""
    on = f"{machine['cpu']}, {machine['threads']} threads, {load}{clang[0] if clang else versions['clang']}"
  how = record.get("mode", "bursts")  # older records do not say it
  state = gpu_state(record["rows"])
  return (
    f"{on}, {libraries}; {record['date']}, {'in bursts' if how == 'bursts' else how}{f' ({state})' * bool(state)}, "
    f"medians of {record['rounds']} rounds ([{file}]({file})). "
    f"A product is of {of['dtype']} matrices of {of['size']} rows and columns."
  )


def tables(records: Mapping[str, Record], plots: Container[str] = ()) -> str:
  """Return the caption and table of each record, by file name, followed by its plot if that is among `plots`."""
  sections = []
  for name, record in records.items():
    plot = f"{name.removesuffix('.json')}.png"
    sections.append(f"{caption(record, name)}\n\n{table(record)}\n\n")
    sections.append(f"![Speed over N]({plot})\n\n" * (plot in plots))
  return "".join(sections)


def summary(records: Mapping[str, Record], cases: Sequence[Case] = CASES) -> str:
  """Return a table of a few cases: our speed, that of the best other library, and the ratio.

  Raises:
    ValueError: a case is in none of the records, or our result there is wrong.
  """
  lines = [_line(["case", "uopattn", "best other", "ratio", "machine"]), "|---|--:|--:|--:|---|"]
  for case in cases:
    row = case.row(records)
    contenders = row["contenders"]
    if not contenders["uopattn"]["correct"]:
      raise ValueError(f"{case.record}: uopattn fails the gate at {case.problem}, {case.kind}")
    unit = unit_of(row)
    name, ratio = next(iter(ratios(row).items()))
    ours, best = (f"{speed(contenders[x], unit)} {unit}" for x in ("uopattn", name))
    lines.append(_line([case.label, ours, f"{best}, {NAMES[name]}", f"{ratio:.2f}", case.machine]))
  return "\n".join(lines) + "\n"


def rewrite(page: str, text: str) -> str:
  """Return the page with a text between its marker lines. Raises ValueError if it has no markers."""
  before, begin, rest = page.partition(BEGIN + "\n")
  _, end, after = rest.partition(END)
  if not begin or not end:
    raise ValueError(f"has no lines {BEGIN!r} and {END!r}")
  return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def main(words: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  readme, results = ROOT / "README.md", RESULTS / "README.md"
  parser.add_argument("--summary", type=Path, default=readme, help="the page with some rows (default: %(default)s)")
  parser.add_argument("--page", type=Path, default=results, help="the page with all rows (default: %(default)s)")
  parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="the records (default: %(default)s)")
  args = parser.parse_args(words)
  page = args.results
  try:
    records = read_records(args.results)
    everything = tables(records, {path.name for path in args.results.glob("*.png")})
    for page, text in ((args.page, everything), (args.summary, summary(records))):
      page.write_text(rewrite(page.read_text(), text))
  except (OSError, ValueError, KeyError) as error:
    print(f"readme_table: {page}: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
