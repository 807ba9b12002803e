"""Each recipe runs by itself, checks its own result, and is explained by a docstring."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[2] / "scripts" / "recipes").glob("*.py"))
SLOW = (
  "continuous_batching",
  "training",
  "tree_masks",
  "mla_decode",
  "gpt_oss",
  "sliding_window_with_sinks",
  "shared_prefix",
  "learned_biases",
  "sparse_mla_decode",
  "llama_decode",
)
CASES = [pytest.param(x, id=x.stem, marks=[pytest.mark.slow] if x.stem in SLOW else []) for x in RECIPES]


@pytest.mark.parametrize("recipe", CASES)
def test_recipe(recipe: Path, tmp_path: Path) -> None:
  tree = ast.parse(recipe.read_text())
  assert ast.get_docstring(tree)
  assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), "it checks nothing"
  done = subprocess.run([sys.executable, recipe], capture_output=True, text=True, cwd=tmp_path, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert done.stdout
