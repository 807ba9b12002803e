"""Which cases the quick suite runs, as chosen from a record of faults."""

from typing import Any

from mutation import FEWEST, LONG, NO_CASE, QUICK, quick_cases


def chosen(seconds: dict[str, float], *noticed: list[str]) -> list[str]:
  suite: dict[str, Any] = {f"emulator_tests/{name}": {"seconds": x} for name, x in seconds.items()}
  faults = [{"noticed": [f"emulator_tests/{name}" for name in names]} for names in noticed]
  return quick_cases({"suite": suite, "faults": faults}, set(suite))


def test_a_fault_is_noticed_by_the_shortest_case_of_any_test() -> None:
  others = {f"b.py::test_{i}": 0.1 for i in range(FEWEST)}
  seconds = {"a.py::test_a[1]": 0.1, "a.py::test_a[2]": 0.2, "b.py::test_b[1]": 2 * LONG, "b.py::test_b[2]": 3 * LONG}
  found = chosen(seconds | others, ["a.py::test_a[2]", "b.py::test_b[1]"])
  assert found == sorted(["a.py::test_a[2]", f"{NO_CASE}b.py::test_b", *others])
  assert chosen(seconds, ["b.py::test_b[2]"]) == ["a.py::test_a[1]", "b.py::test_b[2]"]


def test_a_test_that_notices_nothing_has_its_shortest_case_unless_it_is_long() -> None:
  assert chosen({"a.py::test_a[1]": 0.9 * LONG, "a.py::test_a[2]": 0.1}) == ["a.py::test_a[2]"]


def test_of_each_file_the_shortest_tests_have_a_case_though_it_is_long() -> None:
  seconds = {f"a.py::test_{i}": LONG + i for i in range(FEWEST + 1)}
  assert chosen(seconds) == [*list(seconds)[:-1], f"{NO_CASE}a.py::test_{FEWEST}"]
  assert chosen({"a.py::test_a": 0.1} | seconds)[: FEWEST - 1] == [f"a.py::test_{i}" for i in range(FEWEST - 1)]


def test_the_oracle_meets_every_value_of_a_case_that_is_not_long() -> None:
  name = "a.py::test_matches_the_oracle"
  seconds = {f"{name}[sm_80-small]": 0.1, f"{name}[sm_80-large]": 1.9 * LONG, f"{name}[gfx942-large]": 2 * LONG}
  assert chosen(seconds) == [f"{name}[sm_80-large]", f"{name}[sm_80-small]"]


def test_the_file_names_a_test_by_cases_or_as_having_none() -> None:
  lines = QUICK.read_text().splitlines()
  without = {x.removeprefix(NO_CASE) for x in lines if x.startswith(NO_CASE)}
  assert lines == sorted(set(lines))
  assert not without & {x.partition("[")[0] for x in lines}
