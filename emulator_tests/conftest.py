import gc
import os
from collections import Counter
from collections.abc import Generator, Hashable

import pytest
from hypothesis import Phase, settings
from tinygrad import Context, Device
from tinygrad.helpers import PARALLEL, SPEC

# The quick run draws the same examples every time, and shows the first that fails as it is: to find a smaller one takes
# minutes, as each is a kernel to compile. The slow one draws new ones, and more.
QUICK = (Phase.explicit, Phase.generate)
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, phases=QUICK)
settings.register_profile("slow", max_examples=400, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--slow", action="store_true", help="run the long cases too")
  parser.addoption("--no-skips", action="store_true", help="fail what would be skipped")


def pytest_configure(config: pytest.Config) -> None:
  # A process for each core: threads of numpy's products would only wait for one another, at twice the cost of the gate,
  # and tinygrad's worker processes, which are started anew for every 16 kernels, for the process that feeds them.
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
  PARALLEL.value = 0
  # tinygrad's own check of graphs, a twentieth of the time.
  SPEC.value = int(config.getoption("--slow"))
  # Graphs are millions of objects that live long: with Python's thresholds a quarter of the time is a search for dead
  # ones among them.
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)
  settings.load_profile("slow" if config.getoption("--slow") else "quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
  report = yield
  if report.skipped and item.config.getoption("--no-skips"):
    report.outcome = "failed"
  return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves the long cases for `--slow`, and of tests marked `each` all but a cover of their cases."""
  if config.getoption("--slow"):
    return
  tests: dict[str, list[pytest.Item]] = {}
  for item in items:
    tests.setdefault(item.nodeid.split("[")[0], []).append(item)
  quick = {item for cases in tests.values() for item in cover([x for x in cases if "slow" not in x.keywords])}
  config.hook.pytest_deselected(items=[item for item in items if item not in quick])
  items[:] = [item for item in items if item in quick]


def cover(cases: list[pytest.Item]) -> list[pytest.Item]:
  """Cases of a test marked `each("dtype", "shape")`: every value of these parameters and every combination of the rest.

  Each of them stands in at least one case; which values meet in it changes from case to case. A test without the mark
  keeps all its cases. `each("shape", evenly=True)` takes the values in about equal numbers, not mostly the first one.
  """
  if not cases or (mark := cases[0].get_closest_marker("each")) is None:
    return cases
  waiting: set[Hashable] = set()
  facts: dict[pytest.Item, set[Hashable]] = {}
  for case in cases:
    assert isinstance(case, pytest.Function)
    values = {name: repr(value) for name, value in case.callspec.params.items()}
    rest = tuple(value for name, value in values.items() if name not in mark.args)
    facts[case] = {rest, *((name, values[name]) for name in mark.args)}
    waiting |= facts[case]
  found: list[pytest.Item] = []
  taken: Counter[Hashable] = Counter()
  while waiting:
    evenly = (lambda case: -sum(taken[x] for x in facts[case])) if mark.kwargs.get("evenly") else (lambda case: 0)
    found.append(max(cases, key=lambda case: (len(facts[case] & waiting), evenly(case))))
    waiting -= facts[found[-1]]
    taken.update(facts[found[-1]])
  return found


@pytest.fixture(autouse=True)
def unoptimized(request: pytest.FixtureRequest) -> Generator[None, None, None]:
  """tinygrad's own ops as they are where only kernels are tested: lowering them takes a fifth less.

  Not those of a whole model, which would take long to run.
  """
  with Context(NOOPT=int(request.path.parent.name == "api" and request.path.stem != "test_real_input")):
    yield


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
  """Tests that name no device mean the CPU, also those of other processes, if DEV is a GPU; test_gpu means that one."""
  if request.module.__name__ == "test_gpu" or Device.DEFAULT.split(":")[0] == "CPU":
    yield
    return
  monkeypatch.setenv("DEV", "CPU")
  with Context(DEV="CPU"):
    yield
