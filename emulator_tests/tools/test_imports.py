"""No circle of imports between files, none upward, and `import uopattn` loads only what every user needs."""

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = (  # from the ground up; each imports from those below
  ("version",),
  ("dsl",),
  ("kernels", "emulator"),
  ("runtime",),
  ("spec",),
  ("plan", "proof"),
  ("api",),
  ("integrate",),
  ("measure",),
  ("tuning",),
  ("trust",),
)
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def module_of(path: Path) -> str:
  """A file's module; that of kernels/x.py is uopattn.kernels.x."""
  parts = path.relative_to(REPOSITORY).with_suffix("").parts
  parts = parts if parts[0] == "uopattn" else ("uopattn", *parts)
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(x): x for folder in ("uopattn", "kernels") for x in (REPOSITORY / folder).rglob("*.py")}


@functools.cache
def imports_of(path: Path) -> list[ast.AST]:
  """The imports of a file, at its top or within a function."""
  return [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Import | ast.ImportFrom)]


def imported_by(module: str) -> set[str]:
  """The package's modules that a file imports."""
  package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
  found: set[str] = set()
  for node in imports_of(FILES[module]):
    if isinstance(node, ast.Import):
      found |= {x.name for x in node.names}
    elif isinstance(node, ast.ImportFrom):
      above = ".".join(package.split(".")[: package.count(".") + 2 - node.level]) if node.level else ""
      source = ".".join(x for x in (above, node.module) if x)
      found |= {name if (name := f"{source}.{x.name}") in FILES else source for x in node.names}
  return found & set(FILES)


def floor_of(module: str) -> int:
  """A module's floor; what users import or run is at the top."""
  _, *names = module.split(".")
  return FLOORS.get(names[0], len(ROOMS)) if names else len(ROOMS)


def test_no_circle() -> None:
  try:
    TopologicalSorter({module: imported_by(module) for module in FILES}).prepare()
  except CycleError as error:
    pytest.fail(" imports ".join(reversed(error.args[1])))


def test_nothing_is_imported_upward() -> None:
  upward = [f"{a} imports {b}" for a in FILES for b in imported_by(a) if floor_of(b) > floor_of(a)]
  assert upward == []


def test_a_circle_and_a_way_up_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  low, high = tmp_path / "low.py", tmp_path / "high.py"
  low.write_text("def f():\n  from uopattn.api import high\n")
  high.write_text("from ..dsl.low import f\n")
  added = {"uopattn.dsl.low": low, "uopattn.api.high": high}
  monkeypatch.setattr(sys.modules[__name__], "FILES", FILES | added)
  with pytest.raises(AssertionError, match=r"uopattn\.dsl\.low imports uopattn\.api\.high"):
    test_nothing_is_imported_upward()
  with pytest.raises(pytest.fail.Exception, match=r"uopattn\.(api\.high|dsl\.low) imports uopattn"):
    test_no_circle()


SHARED = ("append", "choose", "chosen_gradients", "combine", "delta", "sum_splits")  # by several devices


def test_importing_the_package_loads_neither_kernels_of_a_device_nor_what_measures() -> None:
  code = "import sys, uopattn; print(*sorted(x for x in sys.modules))"
  loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
  kernels = {x for x in loaded if x.startswith("uopattn.kernels.")}
  assert kernels == {f"uopattn.kernels.{x}" for x in SHARED}
  assert "uopattn.mods" in loaded  # `uopattn.mods.alibi` needs no import of its own
  others = "numpy", "uopattn.measure", "uopattn.proof", "tinygrad.runtime.ops_cpu"
  assert [x for x in loaded if x.startswith(others)] == []
