"""Finds faults of kernels that the quick suite does not notice, and the cases of `--kinds` that do.

A fault is one change of an expression or a statement in kernels/ or uopattn/dsl/: a sign, a bound, a number, a
condition, an order of loads and stores. Faults are drawn by a seed. A first run of all cases, without a fault, records
how long each takes and which faults' statements it reaches. Then each fault is tried in a copy of the tree: on the
cases of the quick suite that reach it, shortest first until one fails, and if none does, on the others for `--seconds`.
A case that does not end in `HANGS` seconds counts as one that fails. A fault that no case notices is a missing test, or
changes nothing that matters.

`--jobs` faults are tried at a time. The record is written after each, so that a run can be stopped and resumed.
`--select` tries nothing: it adds to emulator_tests/quick.txt the cases, of less than `LONG` seconds, that noticed a
fault which the quick suite did not, and takes out what the tests no longer have.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build" / "mutation.json"
REPORT = ROOT / "scripts" / "results" / "mutation.md"
QUICK = ROOT / "emulator_tests" / "quick.txt"
NO_CASE = "no case of "  # what stands in quick.txt before a test
HANGS = 120  # seconds
LONG = 1.5  # seconds that a case of the quick suite must not take
MEMORY = 8 << 30  # bytes of one process; a fault may be an endless list
LINES = "UOPATTN_LINES"  # the file to which pytest, with this module as a plugin, writes what each case does
REACHED = '__import__("sys").__dict__.setdefault("reached", set()).add({})'
CHOICES = {"Tiles", "preferred", "__post_init__", "serves", "largest_head"}  # what only chooses a kernel
OTHER_OPERATOR = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
OTHER_BOUND = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}


@dataclass(frozen=True)
class Fault:
  """One change of a file.

  Attributes:
    file: its path in the project.
    line: where the change begins.
    start, end: the characters that are replaced.
    before, after: the text there, and what replaces it.
  """

  file: str
  line: int
  start: int
  end: int
  before: str
  after: str

  def apply(self, tree: Path) -> None:
    """Make the change in a copy of the project."""
    path = tree / self.file
    text = path.read_text()
    path.write_text(text[: self.start] + self.after + text[self.end :])


def drawn(seed: int, count: int) -> list[Fault]:
  """Return faults of all files, in an order that depends on the seed alone."""
  files = (path for folder in ("kernels", "uopattn/dsl") for path in sorted((ROOT / folder).rglob("*.py")))
  faults = [Fault(str(path.relative_to(ROOT)), *x) for path in files for x in changes(path.read_text())]
  random.Random(seed).shuffle(faults)
  return faults[:count]


def changes(text: str) -> list[tuple[int, int, int, str, str]]:
  """Return the faults that a file can have, as the fields of `Fault` without the file."""
  starts = [0]
  for line in text.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  faults = []
  for node, after in _changes(ast.parse(text)):
    start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    faults.append((node.lineno, start, end, text[start:end], after))
  return faults


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str]]:
  """Yield nodes of functions, but for the defaults of arguments, and the texts to replace them by."""
  for node in ast.iter_child_nodes(tree):
    if getattr(node, "name", "") in CHOICES or isinstance(node, ast.arguments | ast.JoinedStr):
      continue
    if isinstance(node, ast.FunctionDef):
      for statement in node.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
          yield from _of_statement(statement)
          yield from _changes(statement)
    elif isinstance(node, ast.ClassDef):
      yield from _changes(node)
    elif not isinstance(tree, ast.Module | ast.ClassDef):
      yield from _of_statement(node)
      yield from _of_expression(node)
      yield from _changes(node)


def _of_statement(node: ast.AST) -> Iterator[tuple[Any, str]]:
  stores = isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
  if stores:
    yield node, "pass"


def _of_expression(node: ast.AST) -> Iterator[tuple[Any, str]]:
  match node:
    case ast.BinOp(left, op, right) if type(op) in OTHER_OPERATOR:
      yield node, f"({ast.unparse(ast.BinOp(left, OTHER_OPERATOR[type(op)](), right))})"
    case ast.Compare(left, [op], right) if type(op) in OTHER_BOUND:
      yield node, f"({ast.unparse(ast.Compare(left, [OTHER_BOUND[type(op)]()], right))})"
    case ast.Constant(bool(value)):
      yield node, str(not value)
    case ast.Constant(int(value)):
      yield node, str(value + 1)
    case ast.IfExp(test, body, orelse):
      yield node, f"({ast.unparse(ast.IfExp(test, orelse, body))})"
    case ast.Call(ast.Attribute(value, "after"), args, _) if args:
      kept = ", ".join(map(ast.unparse, args[:-1]))
      yield node, f"{ast.unparse(value)}.after({kept})"


def with_probes(text: str, lines: dict[int, int]) -> str:
  """Return a file that notes, in `sys.reached`, which of the statements run that have a fault.

  Args:
    lines: the line of each fault, by its number.
  """
  rows = text.splitlines(keepends=True)
  statements = []  # where a line can be put before them
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.stmt):
      first = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
      is_elif = rows[first - 1].lstrip().startswith("elif")
      if not (rows[first - 1][: node.col_offset].strip() or is_elif):
        statements.append((first, node.end_lineno or first))
  for number, line in lines.items():
    first = max(first for first, last in statements if first <= line <= last)
    row = rows[first - 1]
    rows[first - 1] = row[: len(row) - len(row.lstrip())] + REACHED.format(number) + "\n" + row
  return "".join(rows)


class Lines:
  """A pytest plugin that writes a line of JSON where a case begins, and another where it ends."""

  def __init__(self, to: Path):
    self.to, self.failed = to, False

  def write(self, **line: Any) -> None:
    with self.to.open("a") as file:
      file.write(json.dumps(line) + "\n")

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
    from uopattn.runtime.prepare import compiled

    compiled.cache_clear()  # so that each case reaches all statements of its kernels
    self.failed, reached = False, set[int]()
    sys.reached = reached  # type: ignore[attr-defined]
    self.write(case=item.nodeid)
    start = time.monotonic()
    signal.alarm(HANGS)  # ends the process
    try:
      return (yield)
    finally:
      signal.alarm(0)
      seconds = round(time.monotonic() - start, 2)
      self.write(case=item.nodeid, seconds=seconds, failed=self.failed, reached=sorted(reached))

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    self.failed |= report.failed
    return report


def pytest_configure(config: pytest.Config) -> None:
  if to := os.environ.get(LINES):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    config.pluginmanager.register(Lines(Path(to)))


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
  with tempfile.TemporaryDirectory() as folder:
    tree = Path(folder) / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "build"))
    yield tree


def run(tree: Path, tests: Iterable[str], *options: str, seconds: float | None = None) -> tuple[int | None, list[Any]]:
  """Run tests of `--kinds`, in order; return pytest's status, or None if time was up, and what `Lines` wrote."""
  with tempfile.TemporaryDirectory() as folder:
    to, listed = Path(folder) / "lines", Path(folder) / "tests"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "--kinds", "-o", "addopts=", "-p", "mutation", "-p", "no:cacheprovider"]
    paths = os.pathsep.join(map(str, (tree, tree / "scripts", *filter(None, [os.environ.get("PYTHONPATH")]))))
    env = os.environ | {LINES: str(to), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command += [*options, f"@{listed}"]
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
      status = process.wait(seconds)
    except subprocess.TimeoutExpired:
      status = None
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what tests have started, too
    return status, [json.loads(x) for x in to.read_text().splitlines()] if to.exists() else []


def baseline(faults: list[Fault], tests: list[str], jobs: int) -> dict[str, dict[str, Any]]:
  """Return, for each case that passes without a fault, its seconds, the faults it reaches, and if it is a quick one."""
  quick, lines = cases_of(), dict[str, dict[int, int]]()
  for number, fault in enumerate(faults):
    lines.setdefault(fault.file, {})[number] = fault.line
  with copy_of_the_tree() as tree:
    for file, numbered in lines.items():
      (tree / file).write_text(with_probes((tree / file).read_text(), numbered))
    ended = {x["case"]: x for x in run(tree, tests, "-n", str(jobs), "--dist", "worksteal")[1]}
  for case in [case for case, x in ended.items() if x.get("failed", True)]:
    print(f"{case} fails without a fault; it is left out", flush=True)
    del ended[case]
  return {case: {"quick": case in quick, "seconds": x["seconds"], "reached": x["reached"]} for case, x in ended.items()}


def cases_of(*options: str) -> set[str]:
  """Return the names of the cases that pytest runs with some options."""
  command = [sys.executable, "-m", "pytest", *options, "--collect-only", "-q", "-o", "addopts="]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  return {line for line in listed.splitlines() if "::" in line}


def try_fault(fault: Fault, cases: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any] | None:
  """Return what a fault did: the case that noticed it, if any, whether that is a quick one, and how it ended.

  None if the tests were killed, as where memory is short, which says nothing of the fault.

  Args:
    cases: those that reach the fault.
    seconds: after which the cases that are not quick ones are ended.
  """
  outcome: dict[str, Any] = asdict(fault) | {"cases": len(cases), "by": None, "quick": False, "ended": ""}
  with copy_of_the_tree() as tree:
    fault.apply(tree)
    for is_quick in (True, False):
      chosen = sorted((x for x in cases if cases[x]["quick"] == is_quick), key=lambda x: cases[x]["seconds"])
      if not chosen:
        continue
      status, lines = run(tree, chosen, "-x", "-p", "no:xdist", seconds=None if is_quick else seconds)
      if status == -signal.SIGKILL:
        return None
      if status is None:
        outcome["ended"] = "in time"
      elif status:
        ended = "hangs" if status == -signal.SIGALRM else "crashes" if status < 0 else "fails"
        return outcome | {"by": lines[-1]["case"] if lines else chosen[0], "quick": is_quick, "ended": ended}
  return outcome


def untried(faults: list[Fault], tried: list[dict[str, Any]]) -> list[int]:
  """Return the numbers of the faults that are not among those tried."""
  known = [{name: x[name] for name in Fault.__dataclass_fields__} for x in tried]
  return [number for number, fault in enumerate(faults) if asdict(fault) not in known]


def missing(record: dict[str, Any]) -> dict[str, float]:
  """Return the cases that the quick suite does not have and by which alone a fault was noticed, and their seconds."""
  cases = {x["by"] for x in record["tried"] if x["by"] and not x["quick"]}
  return {case: record["cases"][case]["seconds"] for case in sorted(cases)}


def selected(lines: Iterable[str], new: Iterable[str], exist: Iterable[str]) -> list[str]:
  """Return the lines of quick.txt with new cases, and without those that do not exist."""
  exist, new = ({case.removeprefix("emulator_tests/") for case in cases} for cases in (exist, new))
  tests = {case.partition("[")[0] for case in exist}
  cases = exist & {*lines, *new}
  without = {x for x in lines if x.startswith(NO_CASE) and x.removeprefix(NO_CASE) in tests}
  return sorted(cases | (without - {NO_CASE + case.partition("[")[0] for case in cases}))


def report(record: dict[str, Any]) -> str:
  """Return the report in Markdown."""
  cases, tried = record["cases"].values(), record["tried"]
  seconds = {quick: [x["seconds"] for x in cases if x["quick"] >= quick] for quick in (True, False)}
  counts = {
    "were noticed by the quick suite": sum(x["quick"] for x in tried),
    "by other cases alone": sum(bool(x["by"]) and not x["quick"] for x in tried),
    "by none": sum(not x["by"] for x in tried),
    "of these no case reaches": sum(not x["cases"] for x in tried),
    "of all keep a case from ending": sum(x["ended"] == "hangs" for x in tried),
  }
  lines = [
    "# Faults of kernels, and the cases that notice them",
    "",
    f"{len(tried)} faults, drawn with seed {record['seed']}; "
    + ", ".join(f"{count} {text}" for text, count in counts.items())
    + f". They were tried on {len(seconds[False])} cases of `--kinds`, of {sum(seconds[False]):.0f} seconds; "
    f"{len(seconds[True])} of these, of {sum(seconds[True]):.0f} seconds, are in the quick suite.",
    "",
    "| file, line | before | after | noticed by |",
    "|---|---|---|---|",
  ]
  for x in sorted(tried, key=lambda x: (x["quick"], bool(x["by"]), x["file"], x["line"])):
    by = f"{'' if x['quick'] else 'another: '}{x['by']}" if x["by"] else f"none of {x['cases']}"
    row = f"{x['file']}, {x['line']}", f"`{x['before'][:60]}`", f"`{x['after'][:60]}`", f"{by} {x['ended']}"
    lines.append("| " + " | ".join(" ".join(y.split()).replace("|", "\\|") for y in row) + " |")
  new = (f"- `{case}` ({x:.1f} s)" for case, x in missing(record).items())
  return "\n".join([*lines, "", "Cases that quick.txt lacks:", "", *new]) + "\n"


def arguments() -> argparse.Namespace:
  """Parse the command line; argparse exits with status 2 if it is invalid."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=100, help="faults in all (%(default)s)")
  parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (%(default)s)")
  parser.add_argument("--tests", nargs="+", default=["emulator_tests"], help="files or folders of tests (all)")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults tried at a time (%(default)s)")
  parser.add_argument("--seconds", type=float, default=300, help="of cases that are not quick ones (%(default)s)")
  parser.add_argument("--minutes", type=float, default=600, help="begin no further fault after this time (%(default)s)")
  parser.add_argument("--record", type=Path, default=RECORD, help="JSON, taken up again if it exists (%(default)s)")
  parser.add_argument("--report", type=Path, default=REPORT, help="Markdown (%(default)s)")
  parser.add_argument("--select", action="store_true", help="add the cases that quick.txt lacks, and end")
  return parser.parse_args()


def main() -> int:
  """Try the faults that the record does not have yet, and write the report."""
  args, start = arguments(), time.monotonic()
  drawing = {"seed": args.seed, "count": args.count}
  record = json.loads(args.record.read_text()) if args.record.exists() else drawing | {"tried": []}
  if args.select:
    new = [case for case, seconds in missing(record).items() if seconds < LONG]
    QUICK.write_text("\n".join(selected(QUICK.read_text().splitlines(), new, cases_of("--kinds"))) + "\n")
    return 0
  if record | drawing != record:
    raise SystemExit(f"{args.record} has seed {record['seed']}, count {record['count']}; name another --record")

  def write() -> None:
    args.record.parent.mkdir(parents=True, exist_ok=True)
    args.record.write_text(json.dumps(record))

  faults = drawn(**drawing)
  if "cases" not in record:
    if not (cases := baseline(faults, args.tests, args.jobs)):
      raise SystemExit("no case passes without a fault")
    record["cases"] = cases
    write()

  def tried(number: int) -> dict[str, Any] | None:
    if time.monotonic() - start > 60 * args.minutes:
      return None
    cases = {name: x for name, x in record["cases"].items() if number in x["reached"]}
    return try_fault(faults[number], cases, args.seconds)

  with ThreadPoolExecutor(args.jobs) as pool:
    for future in as_completed([pool.submit(tried, number) for number in untried(faults, record["tried"])]):
      if done := future.result():
        record["tried"].append(done)
        write()
        print(f"{done['file']}:{done['line']} {done['by']} {done['ended']}", flush=True)
  args.report.write_text(report(record))
  return 0


if __name__ == "__main__":
  sys.exit(main())
