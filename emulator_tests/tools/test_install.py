"""Where Python finds uopattn and its kernels: in a bare checkout, as a wheel, and as an editable install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinygrad

import uopattn
from uopattn.runtime.clang import find_clang

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from hatchling.build import build_editable, build_wheel; print({}(sys.argv[1]))"
RUN = "from runpy import run_module; import sys; run_module('uopattn.run', run_name='__main__', alter_sys=True)"
PROBLEM = ("N=20", "D=8", "H=1", "CNT=1")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A copy of what is installed, in a folder called as the package is."""
  root = tmp_path_factory.mktemp("above") / "uopattn"
  for name in ("uopattn", "kernels"):
    shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, root)
  return root


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder with tinygrad and numpy, and not even their metadata."""
  folder = tmp_path_factory.mktemp("libraries")
  for library in (tinygrad, np):
    package = Path(library.__path__[0])
    for path in (package, package.with_name(f"{package.name}.libs")):
      if path.exists():
        (folder / path.name).symlink_to(path)
  return folder


def python(code: str, *words: str, cwd: Path, path: Path, site: Path | None = None) -> str:
  """What a Python prints that has only the packages in `path` and, as one that is installed, those in `site`."""
  start = f"import site; site.addsitedir({str(site)!r}); " if site else ""
  done = subprocess.run(
    [sys.executable, "-S", "-c", start + code, *words],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=os.environ | {"PYTHONPATH": str(path), "CC": find_clang()},
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def installed(checkout: Path, build: str, folder: Path) -> Path:
  """A folder that stands for site-packages, with the checkout installed by one of hatchling's builds."""
  command = [sys.executable, "-c", BUILD.format(build), str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=checkout)
  assert done.returncode == 0, done.stderr
  wheel = folder / done.stdout.split()[-1]
  shutil.unpack_archive(wheel, folder / "site", format="zip")
  return folder / "site"


def test_runs_from_a_bare_checkout(checkout: Path, libraries: Path) -> None:
  assert "flash attention is correct!" in python(RUN, *PROBLEM, cwd=checkout, path=libraries)


def test_runs_from_the_checkouts_root_beside_an_installed_wheel(
  checkout: Path, libraries: Path, tmp_path: Path
) -> None:
  site = installed(checkout, "build_wheel", tmp_path)
  assert (site / "uopattn" / "kernels" / "cpu_forward.py").exists()
  assert not (site / "uopattn" / "kernels" / "README.md").exists()
  assert "flash attention is correct!" in python(RUN, *PROBLEM, cwd=checkout, path=libraries, site=site)
  where = "import uopattn.kernels; print(uopattn.kernels.__file__)"
  assert python(where, cwd=tmp_path, path=libraries, site=site).strip() == str(site / "uopattn/kernels/__init__.py")


def test_an_editable_install_is_found_from_the_folder_above(checkout: Path, libraries: Path, tmp_path: Path) -> None:
  site = installed(checkout, "build_editable", tmp_path)
  code = "from uopattn import attention, kernels; print(attention.__module__, kernels.__file__)"
  expected = f"uopattn.api.attention {checkout / 'kernels' / '__init__.py'}\n"
  for cwd in (checkout.parent, checkout, tmp_path):
    assert python(code, cwd=cwd, path=libraries, site=site) == expected


def test_the_version_and_the_programs() -> None:
  done = subprocess.run([sys.executable, "-m", "uopattn"], capture_output=True, text=True)
  assert done.returncode == 0
  for name in ("run", "bench", "info"):
    assert f"python -m uopattn.{name} " in done.stdout
  done = subprocess.run([sys.executable, "-m", "uopattn", "--version"], capture_output=True, text=True)
  assert done.stdout == f"uopattn {uopattn.__version__}\n"
