"""Locating the clang that tinygrad needs to compile for a CPU."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


class NoCompiler(RuntimeError):
  """No clang was found, or the given one cannot compile."""


def find_clang() -> str:
  """Return the clang to use: `CC`, else `clang` or the newest `clang-NN` on PATH, else this Python environment's.

  Raises:
    NoCompiler: none was found; the message names three ways to get one.
  """
  if cc := os.environ.get("CC"):
    if shutil.which(cc) is None:
      raise NoCompiler(f"CC={cc!r} is not a program; CC takes the name or path of a clang, without arguments")
    return cc
  clang = shutil.which("clang") or _newest_on_path() or shutil.which("clang", path=str(Path(sys.prefix) / "bin"))
  if clang is None:
    raise NoCompiler(
      "no clang was found, and tinygrad compiles its CPU kernels with one. Any of these gives one: "
      "pip install '.[clang]' in a checkout of uopattn (x86-64 Linux); the system's own, for example by "
      "apt-get install clang or xcode-select --install; or CC=/path/to/clang for one that is installed elsewhere"
    )
  return clang


def _newest_on_path() -> str | None:
  versions: dict[int, str] = {}
  for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
    try:
      names = os.listdir(folder or ".")
    except OSError:
      continue
    for name in names:
      if (match := re.fullmatch(r"clang-(\d+)", name)) and (path := shutil.which(name, path=folder)):
        versions.setdefault(int(match[1]), path)
  return versions[max(versions)] if versions else None


def provide_clang() -> None:
  """Set `CC` to the clang of `find_clang` for tinygrad to use; do nothing if `CC` is set or no clang is found.

  `CC` is an absolute path, because tinygrad also compiles in worker processes, which may start after PATH has changed.
  tinygrad's cached environment is cleared, and workers that it has started without `CC` are shut down.
  """
  if os.environ.get("CC"):
    return
  with contextlib.suppress(NoCompiler):  # code that needs a clang calls find_clang, which raises the message
    os.environ["CC"] = os.path.abspath(find_clang())
    if helpers := sys.modules.get("tinygrad.helpers"):
      helpers.getenv.cache_clear()
    worker: Any = sys.modules.get("tinygrad.engine.worker")
    if worker and worker.worker_pool:
      worker.worker_pool.close()  # jobs of other threads still finish
      worker.worker_pool = None


def clang_version() -> str:
  """Return the first line of the compiler's `--version`."""
  return _version(find_clang())


@functools.cache
def _version(clang: str) -> str:
  return subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
