import contextlib
import functools
import gc
import math
import os
import random
import time
from collections import Counter
from collections.abc import Container, Generator, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from tinygrad import Context, Device
from tinygrad.helpers import DEV, NUM_CPU_THREADS, PARALLEL, SPEC
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from uopattn.dsl.target import WITHOUT_MATRIX_UNITS
from uopattn.kernels import cpu_backward, cpu_bias_backward, cpu_decode, cpu_forward
from uopattn.measure import program
from uopattn.measure.program import Usage, choose_device
from uopattn.plan import dispatch, gradient

# What is run: the cases that notice faults which shorter ones do not, and one of most other tests; with --kinds one
# case of each kind; with --values every value of each parameter, and the long tests; with --slow all, on new examples
# by hypothesis. Otherwise it draws the same in every run, and shows the first that fails as it is: to find a smaller
# one takes minutes, as each is a kernel to compile.
QUICK = (Phase.explicit, Phase.generate)
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, phases=QUICK)
settings.register_profile("kinds", settings.get_profile("quick"))
settings.register_profile("values", max_examples=50, deadline=None, derandomize=True, phases=QUICK)
settings.register_profile("slow", max_examples=400, deadline=None)

# Targets for which kernels are lowered as for another one, but for numbers such as the size of shared memory.
LOWERED_AS = {
  "gfx1151": "gfx1100",
  "gfx1200": "gfx1201",
  "gfx950": "gfx942",
  "sm_86": "sm_80",
  "sm_89": "sm_80",
  "sm_100": "sm_80",
  "sm_120": "sm_89",
  "apple7": "apple9",
  "apple8": "apple9",
}
# What says how many rows, and vectors of each, a CPU kernel holds in registers.
ACCUMULATORS = {
  cpu_forward.Tiles: ("unroll",),
  cpu_decode.Tiles: ("unroll_m", "unroll_n", "unroll_d"),
  cpu_backward.Tiles: ("unroll", "vectors"),
  cpu_bias_backward.Tiles: ("unroll", "vectors"),
}
# Kernels built from components of others: of the checks all kernels share, the quick suite runs only
# `test_matches_the_oracle` on them.
LATER = {"hopper32", "hopper-wide", "amd32", "amd8", "float32", "float8", "turing", "apple32"}
OF_LATER = "test_matches_the_oracle"
REPOSITORY = Path(__file__).parents[1]
QUICK_CASES = Path(__file__).with_name("quick.txt")  # written by scripts/mutation --select
NO_CASE = "no case of "  # there before a test
IS_QUICK = pytest.StashKey[bool]()
DEADLINE = pytest.StashKey[float]()  # in seconds of time.monotonic(); --minutes sets it


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--kinds", action="store_true", help="run one case of each kind, not only those in quick.txt")
  parser.addoption("--values", action="store_true", help="run every value of each parameter, and the long tests")
  parser.addoption("--slow", action="store_true", help="run every combination of values too")
  parser.addoption("--no-skips", action="store_true", help="fail what would be skipped")
  parser.addoption("--minutes", type=float, help="after so many, skip what the quick suite does not run")


def profile(config: pytest.Config) -> str:
  return next((name for name in ("slow", "values", "kinds") if config.getoption(f"--{name}")), "quick")


def pytest_configure(config: pytest.Config) -> None:
  # A process for each core: threads of numpy's products would only wait for one another, at twice the cost of the gate,
  # and tinygrad's worker processes, which are started anew for every 16 kernels, for the process that feeds them.
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
  if hasattr(config, "workerinput"):
    NUM_CPU_THREADS.value = min(NUM_CPU_THREADS.value, 2)  # likewise: threads of ours that spin
    os.environ["NUM_CPU_THREADS"] = str(NUM_CPU_THREADS.value)
  if (minutes := config.getoption("--minutes")) is not None:
    config.stash[DEADLINE] = time.monotonic() + 60 * minutes
  os.environ["UOPATTN_CHECK"] = "0"  # the suite is the check; tests of self-checks turn them on
  PARALLEL.value = 0
  # tinygrad's own check of graphs, a twentieth of the time. Tests of drawn sizes have it always.
  SPEC.value = int(config.getoption("--slow"))
  # Graphs are millions of objects that live long: with Python's thresholds a quarter of the time is a search for dead
  # ones among them.
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)
  settings.load_profile(profile(config))
  with contextlib.suppress(Usage):  # before modules are imported, some of which make Tensors on the default device
    if not DEV.device and program.default_device() in WITHOUT_MATRIX_UNITS:
      program.take("CPU")
    choose_device()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
  report = yield
  if report.skipped and item.config.getoption("--no-skips"):
    report.outcome = "failed"
  return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves what is asked for; see emulator_tests/README.md for what that is."""
  chosen, tests, arguments = profile(config), dict[str, list[pytest.Item]](), named_by(config)
  if chosen == "slow":
    return
  for item in items:
    tests.setdefault(item.nodeid.split("[")[0], []).append(item)
  left: set[pytest.Item] = set()
  for every in tests.values():
    cases = [case for case in every if case.get_closest_marker("slowest") is None]
    of_kinds = cover(kinds(cases))
    named = [case for case in every if (case.path, case.nodeid.partition("::")[2]) in arguments]
    left.update(named)
    for case in (of_quick := {*named, *quick(of_kinds, arguments)}):
      case.stash[IS_QUICK] = True
    left.update(cover(cases, of_kinds) if chosen == "values" else of_kinds if chosen == "kinds" else of_quick)
  config.hook.pytest_deselected(items=[item for item in items if item not in left])
  items[:] = [item for item in items if item in left]
  if DEADLINE in config.stash:
    items[:] = in_order_of_the_code(items)


def in_order_of_the_code(items: list[pytest.Item]) -> list[pytest.Item]:
  """Return the tests file by file, in an order that changes with the code: time is not always up at the same files."""
  code = (path for folder in ("uopattn", "kernels") for path in sorted((REPOSITORY / folder).rglob("*.py")))
  files = sorted({item.path for item in items})
  random.Random(b"".join(path.read_bytes() for path in code)).shuffle(files)
  return sorted(items, key=lambda item: files.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
  if time.monotonic() > item.config.stash.get(DEADLINE, math.inf) and not item.stash.get(IS_QUICK, False):
    pytest.skip(f"not begun within --minutes={item.config.getoption('--minutes'):g}")


def quick(cases: list[pytest.Item], arguments: Container[tuple[Path, str]]) -> list[pytest.Item]:
  """Those of a test's cases that quick.txt names; all of a test that it does not name at all, as of a new one.

  Of a test that has none there, none are run, unless `arguments`, those of `named_by`, name the test.
  """
  if not cases or NO_CASE + (test := name_of(cases[0]).split("[")[0]) in in_quick():
    return cases if cases and (cases[0].path, test.partition("::")[2]) in arguments else []
  named = {x for x in in_quick() if x.split("[")[0] == test}
  found = [case for case in cases if name_of(case) in named]
  unknown = named - {name_of(case) for case in found}
  if unknown and not any("::" in x for x in cases[0].config.args):  # which may name some of the cases alone
    raise pytest.UsageError(f"quick.txt names {min(unknown)}, which --kinds does not run: scripts/mutation --select")
  return found or cases


def named_by(config: pytest.Config) -> set[tuple[Path, str]]:
  """The tests and cases that arguments name, by file and name."""
  return {(Path(file).resolve(), name) for file, _, name in (x.partition("::") for x in config.args)}


def name_of(case: pytest.Item) -> str:
  return case.nodeid.removeprefix("emulator_tests/")


@functools.cache
def in_quick() -> frozenset[str]:
  return frozenset(QUICK_CASES.read_text().splitlines())


def values_of(case: pytest.Item) -> dict[str, object]:
  return case.callspec.params if isinstance(case, pytest.Function) and hasattr(case, "callspec") else {}


def kinds(cases: list[pytest.Item]) -> list[pytest.Item]:
  """The cases of a test that stand for the others: `kinds(arch=("gfx942", "sm_80"))` names the values of a parameter.

  Cases marked slow stand for none, nor do those on a target where another one of the same test stands for it.
  """
  marks = [mark.kwargs for case in cases[:1] for mark in case.iter_markers("kinds")]
  named = {name: {str(x) for x in mark[name]} for mark in marks for name in mark}
  for name, wanted in named.items():
    unknown = wanted - {str(values_of(case)[name]) for case in cases}
    if unknown and not any("::" in x for x in cases[0].config.args):  # which may name some of the cases alone
      raise pytest.UsageError(f"{cases[0].nodeid}: kinds({name}=...) names {sorted(unknown)}, which no case has")
  cases = [case for case in cases if "slow" not in case.keywords and not is_later(case)]
  for name, wanted in named.items():
    cases = [case for case in cases if str(values_of(case)[name]) in wanted]
  texts = {repr(values_of(case)) for case in cases}

  def represented(case: pytest.Item) -> bool:
    text = repr(values_of(case))
    others = {text.replace(f"{arch}'", f"{other}'") for arch, other in LOWERED_AS.items()} - {text}
    return bool(others & texts)

  return cases if {"arch", "machine"} & named.keys() else [case for case in cases if not represented(case)]


def is_later(case: pytest.Item) -> bool:
  """Whether the case is of a kernel in `LATER`, and not of `OF_LATER`."""
  values = values_of(case)
  return str(values.get("subject", values.get("name"))) in LATER and f"::{OF_LATER}[" not in case.nodeid


def cover(cases: list[pytest.Item], first: Iterable[pytest.Item] = ()) -> list[pytest.Item]:
  """Cases of a test marked `each("dtype", "shape")`: every value of these parameters and every combination of the rest.

  Each of them stands in at least one case; which values meet in it changes from case to case. A test without the mark
  keeps all its cases. `each("shape", evenly=True)` takes the values in about equal numbers, not mostly the first one.
  The cases of `first` are among them.
  """
  if not cases or (mark := cases[0].get_closest_marker("each")) is None:
    return cases
  waiting: set[Hashable] = set()
  facts: dict[pytest.Item, set[Hashable]] = {}
  for case in cases:
    values = {name: repr(value) for name, value in values_of(case).items()}
    rest = tuple(value for name, value in values.items() if name not in mark.args)
    facts[case] = {rest, *((name, values[name]) for name in mark.args)}
    waiting |= facts[case]
  found: list[pytest.Item] = []
  taken: Counter[Hashable] = Counter()

  def take(case: pytest.Item) -> None:
    found.append(case)
    waiting.difference_update(facts[case])
    taken.update(facts[case])

  for case in first:
    take(case)
  while waiting:
    evenly = (lambda case: -sum(taken[x] for x in facts[case])) if mark.kwargs.get("evenly") else (lambda case: 0)
    take(max(cases, key=lambda case: (len(facts[case] & waiting), evenly(case))))
  return found


@pytest.fixture(autouse=True, scope="module")
def others_garbage() -> None:
  """What earlier modules have left, mostly in caches, is not searched for garbage any more: millions of objects."""
  gc.freeze()


@pytest.fixture
def no_plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
  """Fails what would compute gradients of biases by plain ops."""

  def refused(*given: Any) -> None:
    raise AssertionError("plain ops")

  monkeypatch.setattr(gradient, "of_scores", refused)


def is_small(request: pytest.FixtureRequest) -> bool:
  """Whether a test calls the public functions, and not on a whole model, which would take long to run."""
  of_models = request.path.stem in ("test_real_input", "test_models")
  return request.path.parent.name in ("api", "integrate") and not of_models


@pytest.fixture(autouse=True)
def unoptimized(request: pytest.FixtureRequest) -> Generator[None, None, None]:
  """tinygrad's own ops as they are where only kernels are tested: lowering them takes a fifth less.

  Those of the model of test_train too, which is small.
  """
  with Context(NOOPT=int(is_small(request) or request.path.stem == "test_train")):
    yield


@pytest.fixture(autouse=True)
def one_accumulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """CPU kernels with the tiles of choice, but one row of accumulators in registers, where public functions are tested.

  These kernels take half the time to lower and less to compile. Tests of the kernels have the registers of choice.
  """
  if not is_small(request):
    return
  right = dispatch.tiles_for

  def found(*given: Any) -> Iterator[Any]:
    for tiles in right(*given):
      yield replace(tiles, **dict.fromkeys(ACCUMULATORS.get(type(tiles), ()), 1))

  monkeypatch.setattr(dispatch, "tiles_for", found)


@pytest.fixture(autouse=True)
def compiled_sooner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """Where not the kernels are tested, by `clang -O1`, which takes half the time of -O2, but for --values and --slow."""
  tested = request.path.parent.name not in ("api", "integrate", "tools")
  if tested or profile(request.config) in ("values", "slow"):
    return
  right = ClangCompiler.compile_cached

  def compile_cached(self: ClangCompiler, source: str) -> bytes:
    sooner = copy(self)
    sooner.args = [*self.args, "-O1"]
    sooner.cachekey = self.cachekey and f"{self.cachekey}_O1"  # on disk they are apart
    return right(sooner, source)

  monkeypatch.setattr(ClangCompiler, "compile_cached", compile_cached)


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
  """Tests that name no device mean the CPU, also those of other processes, if DEV is a GPU, but for those of GPUs."""
  if request.module.__name__ in ("test_gpu", "test_generic_cl") or Device.DEFAULT.split(":")[0] == "CPU":
    yield
    return
  monkeypatch.setenv("DEV", "CPU")
  with Context(DEV="CPU"):
    yield
