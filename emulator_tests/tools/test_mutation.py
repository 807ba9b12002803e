"""Faults of kernels, what notes that a case reaches them, and how quick.txt changes."""

import ast
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from mutation import NO_CASE, QUICK, changes, drawn, missing, report, selected, try_fault, untried, with_probes

TEXT = '''
@decorated
def f(a, b=1):
  """Not 2."""
  if a:
    return (
      b
      + 3
    )
  elif b:
    pass
  else: a = 4
  f(a)
  return lambda: f"{a + 5}"
'''
CASES = {f"emulator_tests/a.py::test_a[{i}]": {"seconds": float(i), "reached": [], "quick": i == 0} for i in range(3)}


def test_changes_of_a_function() -> None:
  assert [x[3:] for x in changes(TEXT)] == [("b\n      + 3", "(b - 3)"), ("3", "4"), ("4", "5"), ("f(a)", "pass")]
  for _, start, end, before, after in changes(TEXT):
    assert TEXT[start:end] == before
    ast.parse(TEXT[:start] + after + TEXT[end:])


def test_faults_of_a_seed_are_the_same() -> None:
  assert drawn(3, 5) == drawn(3, 9)[:5]
  assert not set(drawn(3, 5)) & set(drawn(4, 5))


@pytest.fixture
def reached() -> Iterator[set[int]]:
  sys.reached = set[int]()  # type: ignore[attr-defined]
  yield sys.reached  # type: ignore[attr-defined]
  del sys.reached  # type: ignore[attr-defined]


@pytest.mark.parametrize(("a", "b", "numbers"), [(1, 0, {5, 8, 10, 12}), (0, 1, {5, 10, 12})])
def test_probes(reached: set[int], a: int, b: int, numbers: set[int]) -> None:
  """Each fault has the number of its line. What has no line of its own is reached with what it is in."""
  found: dict[str, Any] = {"decorated": lambda function: function}
  exec(with_probes(TEXT.replace("f(a)", "()"), {line: line for line in (5, 8, 10, 12)}), found)
  assert not reached
  found["f"](a, b)
  assert reached == numbers


def test_what_is_recorded_of_a_fault_is_found_again() -> None:
  faults = drawn(0, 2)
  assert untried(faults, [try_fault(faults[0], {}, 0) or {}]) == [1]


def test_a_case_by_which_another_suite_notices_is_missing() -> None:
  fault = {"file": "kernels/a.py", "line": 1, "before": "a | b", "after": "b", "cases": 3, "ended": "fails"}
  first, _, last = CASES
  tried = [
    fault | {"by": first, "quick": True},
    fault | {"by": last, "quick": False},
    fault | {"by": None, "quick": False},
  ]
  record = {"seed": 0, "cases": CASES, "tried": tried}
  assert missing(record) == {last: 2.0}
  assert "3 faults" in report(record)
  assert f"| `a \\| b` | `b` | another: {last} fails |" in report(record)


def test_quick_cases_are_added_and_those_that_no_longer_exist_are_left_out() -> None:
  exist = {"a.py::test_a[1]", "a.py::test_a[2]", "a.py::test_b[1]", "a.py::test_c"}
  lines = ["a.py::test_a[1]", "a.py::test_a[0]", *(f"{NO_CASE}a.py::test_{x}" for x in "bcd")]
  found = selected(lines, ["a.py::test_a[2]", "a.py::test_b[1]"], exist)
  assert found == ["a.py::test_a[1]", "a.py::test_a[2]", "a.py::test_b[1]", f"{NO_CASE}a.py::test_c"]


def test_the_file_names_a_test_by_cases_or_as_having_none() -> None:
  lines = QUICK.read_text().splitlines()
  without = {x.removeprefix(NO_CASE) for x in lines if x.startswith(NO_CASE)}
  assert lines == sorted(set(lines))
  assert not without & {x.partition("[")[0] for x in lines}
