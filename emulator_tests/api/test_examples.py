"""The example of each public name, in its docstring, runs by itself and prints what it says."""

import doctest
import inspect
from types import FunctionType
from typing import Any

import pytest

import uopattn
from uopattn import mods


def public() -> dict[str, Any]:
  """What users may call: all names of the package, with the methods of its classes, and all of `uopattn.mods`."""
  found: dict[str, Any] = {}
  for name in uopattn.__all__:
    value = getattr(uopattn, name)
    if isinstance(value, str):  # the version
      continue
    found[name] = value
    if not inspect.isfunction(value):  # a class, or an object as uopattn.tune is
      methods = vars(value if inspect.isclass(value) else type(value))
      found |= {f"{name}.{method}": x for method, x in methods.items() if documented(method, x)}
  found["onnx.register"] = uopattn.onnx.register
  own = {name: x for name, x in vars(mods).items() if not name.startswith("_") and inspect.isfunction(x)}
  return found | {f"mods.{name}": x for name, x in own.items() if x.__module__ == mods.__name__}


INTERNAL = (
  "seen",
  "heads",
  "check",
  "tile_lists",
  "on",
  "within",
  "fits",
)  # of BlockMask, for kernels and plain ops


def documented(name: str, x: object) -> bool:
  return isinstance(x, (FunctionType, classmethod, property)) and not name.startswith("_") and name not in INTERNAL


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_prints_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
  text = inspect.getdoc(PUBLIC[name]) or ""
  example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
  assert example.examples, f"{name} has no example"
  results = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE).run(example)
  assert results.failed == 0, capsys.readouterr().out


def test_all_public_names_are_met() -> None:
  assert {
    "attention",
    "flash",
    "KVCache.append",
    "BlockMask.of",
    "mods.causal",
    "mods.softcap",
    "patch",
    "tune.load",
  } <= set(PUBLIC)
  assert len(PUBLIC) >= 25
