"""Adds the cards of reports to the record of cards, and writes the README's row of them; see `scripts/trust`."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from uopattn.dsl.target import WITHOUT_MATRIX_UNITS
from uopattn.measure.program import Usage, exit_status
from uopattn.trust.cards import RECORD, Card, cards
from uopattn.trust.report import CheckReport

README = Path(__file__).parents[1] / "README.md"
ROW = "| right on these cards |"  # how the README's row begins
COLUMNS = (("CPU",), ("AMD",), ("METAL", *WITHOUT_MATRIX_UNITS), ("CUDA", "NV"))  # devices of its columns


def card_of(report: CheckReport) -> Card:
  """Return the entry for the card of a report.

  Raises:
    Usage: the report is not of all probes, or a kernel was wrong.
  """
  m = report.machine
  if not report.finished or report.quick:
    raise Usage(
      f"the report on {m['card']} is {'a quick one' if report.quick else 'not finished'}; a full one is needed"
    )
  if wrong := [x.name for x in report.kernels if x.failed]:
    raise Usage(f"the report on {m['card']} has wrong results of {', '.join(wrong)}; look into them first")
  return {
    "name": m["card"],
    "device": m["device"],
    "arch": m["arch"],
    "driver": m["driver"],
    "uopattn": m["versions"]["uopattn"],
    "tinygrad": m["versions"]["tinygrad"],
    "date": m["date"],
    "kernels": sorted(x.name for x in report.kernels if x.is_right),
  }


def with_cards(old: Iterable[Card], new: Iterable[Card]) -> list[Card]:
  """Return the record with new entries in place of older ones of the same card, in order.

  A report may be of some kernels: the others stay on the record if they are of the same versions. Who changes a kernel
  takes it off the record.
  """
  entries: dict[tuple[str, str, str], Card] = {}
  for x in (*old, *new):
    key = (x["device"], x["arch"], x["name"])
    before = entries.get(key, x)
    same = all(before[name] == x[name] for name in ("uopattn", "tinygrad"))
    entries[key] = {**x, "kernels": sorted({*x["kernels"], *(before["kernels"] if same else ())})}
  return [entries[key] for key in sorted(entries)]


def row(record: Iterable[Card]) -> str:
  """Return the README's row: the cards on which the kernels of each device were right."""
  cells = []
  for devices in COLUMNS:
    names = (x["name"] for x in record if x["device"] in devices)
    cells.append(", ".join(sorted(set(names))) or "none yet")
  return f"{ROW} {' | '.join(cells)} | |"


def with_row(readme: str, record: Iterable[Card]) -> str:
  """Return the README with the row of a record.

  Raises:
    Usage: the README has no such row.
  """
  lines = readme.split("\n")
  if (numbers := [i for i, x in enumerate(lines) if x.startswith(ROW)]) == []:
    raise Usage(f"README.md has no row that begins with {ROW!r}")
  lines[numbers[0]] = row(record)
  return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
  """Parse the command line, and write both files; return the exit status."""
  parser = argparse.ArgumentParser(prog="scripts/trust", description=(__doc__ or "").split(";")[0] + ".")
  parser.add_argument("reports", nargs="+", metavar="REPORT.json")
  args = parser.parse_args(words)

  def job() -> int:
    record = with_cards(cards(), [card_of(CheckReport.read(x)) for x in args.reports])
    readme = with_row(README.read_text(), record)  # before anything is written: it may lack the row
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    README.write_text(readme)
    print(f"{len(record)} cards")
    return 0

  return exit_status("scripts/trust", job)


if __name__ == "__main__":
  sys.exit(main())
