"""Finds which tests notice faults of kernels: each of many small faults in a copy of the tree, and the tests that fail.

A fault is one change of an expression or a statement in kernels/ or uopattn/dsl/: a sign, a bound, a number, a
condition, an order of loads and stores. It is tried on all tests, one case of each kind, that run a kernel whose file
is the faulty one or imports it. The record says by which tests each fault was noticed, and the report which tests
suffice to notice all that were: a greedy set cover, by seconds (Chvatal, 1979). A fault that no test notices is a
missing test, or changes nothing that matters.

Faults are drawn by a seed, and the record is written after each, so that a run can be ended and taken up again. On a
machine of many cores, `--jobs` faults are tried at a time, each by `--workers` processes.

`--select` tries nothing, and writes from the record which cases the quick suite runs (emulator_tests/quick.txt): short
ones that notice every fault which any case notices, and of each test that has none of them the shortest, unless it
takes `LONG` seconds and its file has `FEWEST` tests there. Those of `test_matches_the_oracle` also have every value of
their parameters that a case of less than twice that has. The others notice nothing that these do not. Of some tests the
quick suite runs no case, which the file says.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "scripts" / "results" / "mutation.json"
REPORT = ROOT / "scripts" / "results" / "mutation.md"
QUICK = ROOT / "emulator_tests" / "quick.txt"
WHOLE = "::test_matches_the_oracle"  # the test of which the quick suite runs almost every value of each parameter
LONG = 1.0  # seconds that a case must not take which notices no fault of its own
FEWEST = 3  # tests of each file with a case in the quick suite, whatever they take
NO_CASE = "no case of "  # what stands in quick.txt before a test
OUTCOMES = "UOPATTN_OUTCOMES"  # the file to which pytest, with this module as a plugin, writes what became of each test
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


def sources() -> list[Path]:
  """Return the files that can have a fault."""
  return sorted(x for folder in ("kernels", "uopattn/dsl") for x in (ROOT / folder).rglob("*.py"))


def kernels_with(path: Path) -> set[str]:
  """Return the names of the kernel files that are this file, or import it, directly or not."""
  imports = {x: _imported(x) for x in sources()}
  found, waiting = {path}, [path]
  while waiting:
    one = waiting.pop()
    new = {x for x, names in imports.items() if one in names} - found
    found |= new
    waiting += new
  return {x.stem for x in found if x.parent.name == "kernels"}


def _imported(path: Path) -> set[Path]:
  """Return the files below `sources` that a file names in its imports."""
  names = set[str]()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      names |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
    elif isinstance(node, ast.Import):
      names |= {x.name for x in node.names}
  paths = {ROOT / (name.replace("uopattn.kernels", "kernels").replace(".", "/") + ".py") for name in names}
  return paths & set(sources())


def faults_of(path: Path) -> list[Fault]:
  """Return the faults that a file can have."""
  text = path.read_text()
  starts = [0]
  for line in text.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  found = []
  for node, after in _changes(ast.parse(text)):
    start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    found.append(Fault(str(path.relative_to(ROOT)), node.lineno, start, end, text[start:end], after))
  return found


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str]]:
  """Yield nodes of kernels and the texts to put in their places."""
  for node in ast.iter_child_nodes(tree):
    if getattr(node, "name", "") in CHOICES or isinstance(node, ast.Import | ast.ImportFrom | ast.arguments):
      continue
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      for statement in node.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
          yield from _of_statement(statement)
          yield from _changes(statement)
    elif not isinstance(tree, ast.Module):
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


class Outcomes:
  """A pytest plugin that writes what became of each test: seconds, whether it failed, and the schedules it ran."""

  def __init__(self, to: Path):
    self.to, self.found = to, dict[str, dict[str, Any]]()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
    from uopattn.plan import launch

    seen, right = set[str](), launch.prepared

    def prepared(build: Any, device: str, *given: Any) -> Any:
      seen.update(x.schedule.name for x in given if isinstance(x, launch.Launch))
      return right(build, device, *given)

    launch.prepared = prepared
    item.user_properties.append(("schedules", seen))
    try:
      return (yield)
    finally:
      launch.prepared = right

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    one = self.found.setdefault(report.nodeid, {"seconds": 0.0, "failed": False, "schedules": []})
    one["seconds"] += report.duration
    one["failed"] |= report.failed
    properties: dict[str, Any] = dict(report.user_properties)
    one["schedules"] = sorted({*one["schedules"], *properties.get("schedules", ())})

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
      self.to.write_text(json.dumps(self.found))


def pytest_configure(config: pytest.Config) -> None:
  if to := os.environ.get(OUTCOMES):
    config.pluginmanager.register(Outcomes(Path(to)))


def run_tests(tree: Path, tests: list[str], workers: str, seconds: float) -> dict[str, dict[str, Any]] | None:
  """Run tests, or one case of each kind if there are none; return `Outcomes`, or None after too many seconds."""
  with tempfile.TemporaryDirectory() as folder:
    to, listed = Path(folder) / "outcomes.json", Path(folder) / "tests"
    listed.write_text("\n".join(tests))
    options = ["--kinds", "-p", "mutation", "-p", "no:cacheprovider", "-n", workers, "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *options, *([f"@{listed}"] if tests else [])]
    paths = os.pathsep.join(map(str, (tree, tree / "scripts", *filter(None, [os.environ.get("PYTHONPATH")]))))
    env = os.environ | {OUTCOMES: str(to), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
      process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
      return None
    return cast(dict[str, dict[str, Any]], json.loads(to.read_text()) if to.exists() else {})


def try_fault(fault: Fault, suite: dict[str, dict[str, Any]], workers: int) -> dict[str, Any]:
  """Return what a fault did: the tests that failed, or that the tests did not end."""
  stems = kernels_with(ROOT / fault.file)
  tests = [name for name, x in suite.items() if any(y.startswith(stem) for y in x["schedules"] for stem in stems)]
  seconds = 60 + 3 * sum(suite[name]["seconds"] for name in tests) / workers
  if not tests:
    return asdict(fault) | {"ended": True, "tests": 0, "noticed": []}
  with tempfile.TemporaryDirectory() as folder:
    tree = Path(folder) / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "results")
    shutil.copytree(ROOT, tree, ignore=ignored)
    fault.apply(tree)
    found = run_tests(tree, tests, str(workers), seconds)
  if found is None:
    return asdict(fault) | {"ended": False, "tests": len(tests), "noticed": []}
  return asdict(fault) | {"ended": True, "tests": len(tests), "noticed": [x for x, y in found.items() if y["failed"]]}


def smallest(noticed: list[set[str]], seconds: dict[str, float]) -> list[str]:
  """Return few and short tests that notice all faults which any test notices, by greedy choice."""
  left, chosen = [x for x in noticed if x], list[str]()
  while left:
    tests = sorted({test for x in left for test in x})
    best = max(tests, key=lambda test: sum(test in x for x in left) / max(seconds[test], 0.01))
    chosen.append(best)
    left = [x for x in left if best not in x]
  return chosen


def quick_cases(record: dict[str, Any], exist: set[str]) -> list[str]:
  """Return the lines of quick.txt, in order: cases that the quick suite runs, of those that exist; see above."""
  seconds = {name: x["seconds"] for name, x in record["suite"].items() if name in exist}
  tests: dict[str, list[str]] = {}
  with_fact: dict[object, set[str]] = {}
  for i, fault in enumerate(record["faults"]):
    with_fact[i] = seconds.keys() & fault["noticed"]
  for name in seconds:
    test, _, values = name.partition("[")
    tests.setdefault(test, []).append(name)
    if test.endswith(WHOLE) and seconds[name] < 2 * LONG:
      for value in values.rstrip("]").split("-"):
        with_fact.setdefault((test, value), set()).add(name)
  chosen = smallest(list(with_fact.values()), seconds)
  with_case = {name.partition("[")[0] for name in chosen}
  count = Counter(test.partition("::")[0] for test in with_case)
  others = (min(tests[test], key=seconds.__getitem__) for test in tests.keys() - with_case)
  lines = list(chosen)
  for shortest in sorted(others, key=seconds.__getitem__):
    file, test = shortest.partition("::")[0], shortest.partition("[")[0]
    taken = seconds[shortest] < LONG or count[file] < FEWEST
    lines.append(shortest if taken else NO_CASE + test)
    count[file] += taken
  return sorted(line.replace("emulator_tests/", "", 1) for line in lines)


def cases_of_kinds() -> set[str]:
  """Return the names of all cases that --kinds runs."""
  command = [sys.executable, "-m", "pytest", "--kinds", "--collect-only", "-q", "-o", "addopts="]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  return {line for line in listed.splitlines() if "::" in line}


def report(record: dict[str, Any]) -> str:
  """Return the report in Markdown."""
  suite, faults = record["suite"], record["faults"]
  seconds = {name: x["seconds"] for name, x in suite.items()}
  noticed = [set(x["noticed"]) for x in faults]
  chosen = smallest(noticed, seconds)
  ended = [x for x in faults if x["ended"]]
  lines = [
    "# Faults of kernels, and the tests that notice them",
    "",
    f"{len(faults)} faults, drawn with seed {record['seed']}; {sum(map(bool, noticed))} were noticed by a test, "
    f"{len(faults) - len(ended)} kept the tests from ending, {sum(not x['noticed'] for x in ended)} no test noticed. "
    f"The suite has {len(suite)} tests of {sum(seconds.values()):.0f} seconds; "
    f"{len(chosen)} of them, of {sum(seconds[x] for x in chosen):.0f} seconds, notice all that any notices.",
    "",
    "| file, line | before | after | noticed by |",
    "|---|---|---|--:|",
  ]
  for x in faults:
    before, after = (" ".join(x[name].split()).replace("|", "\\|")[:60] for name in ("before", "after"))
    count = f"{len(x['noticed'])} of {x['tests']}" if x["ended"] else "no end"
    lines.append(f"| {x['file']}, {x['line']} | `{before}` | `{after}` | {count} |")
  lines += ["", "The tests that suffice:", "", *(f"- `{x}` ({seconds[x]:.1f} s)" for x in chosen)]
  return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
  """Parse the command line; argparse exits with status 2 if it is invalid."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=100, help="faults in all (%(default)s)")
  parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (%(default)s)")
  parser.add_argument("--tests", nargs="*", default=[], help="files or folders of tests (all)")
  parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time (%(default)s)")
  parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes for each fault (%(default)s)")
  parser.add_argument("--minutes", type=float, default=600, help="begin no further fault after this time (%(default)s)")
  parser.add_argument("--record", type=Path, default=RECORD, help="JSON, taken up again if it exists (%(default)s)")
  parser.add_argument("--report", type=Path, default=REPORT, help="Markdown (%(default)s)")
  parser.add_argument("--select", action="store_true", help="write which cases the quick suite runs, and end")
  return parser.parse_args()


def main() -> int:
  """Try the faults that the record does not have yet, and write the report."""
  given, start = arguments(), time.monotonic()
  record = json.loads(given.record.read_text()) if given.record.exists() else {"seed": given.seed, "faults": []}
  if given.select:
    QUICK.write_text("\n".join(quick_cases(record, cases_of_kinds())) + "\n")
    return 0
  if record["seed"] != given.seed:
    raise SystemExit(f"--seed {given.seed}: the record {given.record} has seed {record['seed']}; name another --record")
  if "suite" not in record:
    if not (suite := run_tests(ROOT, given.tests, "auto", 3600)):
      raise SystemExit("the tests do not run, or do not end within an hour")
    for name in [name for name, x in suite.items() if x["failed"]]:
      print(f"{name} fails without a fault; it is left out", flush=True)
      del suite[name]
    record["suite"] = suite
    given.record.write_text(json.dumps(record))
  drawn = random.Random(given.seed).sample([x for path in sources() for x in faults_of(path)], given.count)
  known = [{name: x[name] for name in Fault.__dataclass_fields__} for x in record["faults"]]

  def tried(fault: Fault) -> dict[str, Any] | None:
    if time.monotonic() - start > 60 * given.minutes:
      return None
    return try_fault(fault, record["suite"], given.workers)

  with ThreadPoolExecutor(given.jobs) as pool:
    for future in as_completed([pool.submit(tried, x) for x in drawn if asdict(x) not in known]):
      if done := future.result():
        record["faults"].append(done)
        given.record.write_text(json.dumps(record))
        print(f"{done['file']}:{done['line']} {len(done['noticed'])} of {done['tests']} tests", flush=True)
  given.report.write_text(report(record))
  return 0


if __name__ == "__main__":
  sys.exit(main())
