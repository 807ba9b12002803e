import gc
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import Phase, settings
from tinygrad import Context, Device

# The quick run draws the same examples every time, and shows the first that fails as it is: to find a smaller one takes
# minutes, as each is a kernel to compile. The slow one draws new ones, and more.
QUICK = (Phase.explicit, Phase.generate)
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, phases=QUICK)
settings.register_profile("slow", max_examples=400, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--slow", action="store_true", help="run the long cases too")
  parser.addoption("--no-skips", action="store_true", help="fail what would be skipped")


def pytest_configure(config: pytest.Config) -> None:
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
  if config.getoption("--slow"):
    return
  cases: Counter[str] = Counter()  # seen so far, of each thinned test

  def is_quick(item: pytest.Item) -> bool:
    if "slow" in item.keywords:
      return False
    if (thinned := item.get_closest_marker("thinned")) is None:
      return True
    test = item.nodeid.split("[")[0]
    cases[test] += 1
    return (cases[test] - 1) % thinned.args[0] == 0

  quick, rest = list[pytest.Item](), list[pytest.Item]()
  for item in items:
    (quick if is_quick(item) else rest).append(item)
  config.hook.pytest_deselected(items=rest)
  items[:] = quick


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
  """Tests that name no device mean the CPU, also those of other processes, if DEV is a GPU; test_gpu means that one."""
  if request.module.__name__ == "test_gpu" or Device.DEFAULT.split(":")[0] == "CPU":
    yield
    return
  monkeypatch.setenv("DEV", "CPU")
  with Context(DEV="CPU"):
    yield
