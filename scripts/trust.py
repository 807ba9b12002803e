"""Adds the cards of reports to the record of cards, and writes the README's table of them; see `scripts/trust`."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from uopattn.measure.program import Usage, exit_status
from uopattn.plan.dispatch import MODULES
from uopattn.trust.cards import RECORD, Card, cards
from uopattn.trust.report import Report

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- cards: begin, written by scripts/trust -->\n", "<!-- cards: end -->\n"


def card_of(report: Report) -> Card:
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
  """Return the record with new entries in the place of older ones of the same card, in order."""
  found = {(x["device"], x["arch"], x["name"]): x for x in (*old, *new)}
  return [found[place] for place in sorted(found)]


def table(record: Iterable[Card]) -> str:
  """Return the README's table: on which cards the kernels of each device have run."""
  by_arch: dict[tuple[str, str], list[Card]] = {}
  for x in record:
    by_arch.setdefault((x["device"], x["arch"]), []).append(x)
  lines = ["| device | cards | kernels that have run there |", "|---|---|---|"]
  for (device, arch), entries in by_arch.items():
    names = ", ".join(dict.fromkeys(x["name"] for x in entries))
    kernels = ", ".join(sorted({f"`{name}`" for x in entries for name in x["kernels"]}))
    lines.append(f"| {device} {arch} | {names} | {kernels} |")
  known = {x["device"] for x in record}
  lines += [f"| {device} | none yet | |" for device in MODULES if device not in known]
  return "\n".join(lines) + "\n"


def with_table(readme: str, record: Iterable[Card]) -> str:
  """Return the README with the table of a record."""
  before, rest = readme.split(BEGIN)
  return before + BEGIN + "\n" + table(list(record)) + "\n" + END + rest.split(END)[1]


def main(words: list[str] | None = None) -> int:
  """Parse the command line, and write both files; return the exit status."""
  parser = argparse.ArgumentParser(prog="scripts/trust", description=(__doc__ or "").split(";")[0] + ".")
  parser.add_argument("reports", nargs="+", metavar="REPORT.json")
  given = parser.parse_args(words)

  def job() -> int:
    record = with_cards(cards(), [card_of(Report.read(x)) for x in given.reports])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    README.write_text(with_table(README.read_text(), record))
    print(f"{len(record)} cards")
    return 0

  return exit_status("scripts/trust", job)


if __name__ == "__main__":
  sys.exit(main())
