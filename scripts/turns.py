"""Times versions of our kernels in turns: of other trees, or with other tiles, splits, or environment variables.

Each version is a process of its own. The turns are those of `uopattn.bench`. Results are not checked, as the runner and
the bench do that; but the table says which versions have the same bits as the first one. The exit status is 0, or 2 on
any error.

On a GPU two processes of the same code differ by up to 2 %, for as long as they run. `--starts` runs all of them anew,
and the figures are then medians over the starts.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tinygrad import Device

from uopattn.measure import contenders
from uopattn.measure.problem import parse, prepare
from uopattn.measure.program import Usage, exit_status, take_device
from uopattn.measure.timing import Runner, alternate, ratios
from uopattn.plan.dispatch import choose_by, dispatch, dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.spec.spec import AttentionSpec

CALL, WAIT = "call\n", "wait\n"  # what a version's process is asked to do
SETTINGS = ("tiles", "splits", "pack_gqa", "env")


@dataclass(frozen=True)
class Version:
  """A version of the kernels.

  Attributes:
    tree: the folder with its packages.
    settings: by the names in `SETTINGS`: fields of the tiles, and numbers of splits and of packed heads, in place of
      those that dispatch chooses; and environment variables.
  """

  name: str
  tree: Path
  settings: dict[str, Any]

  @classmethod
  def parse(cls, words: Sequence[str]) -> "Version":
    """Parse the words of --version. Raises Usage."""
    if len(words) not in (2, 3):
      raise Usage(f"--version {' '.join(words)}: must be a name, a tree and perhaps settings as JSON")
    name, tree = words[0], Path(words[1]).resolve()
    if not (tree / "uopattn" / "__init__.py").exists():
      raise Usage(f"--version {name}: {words[1]} is no tree with uopattn in it")
    try:
      settings = json.loads(words[2]) if len(words) == 3 else {}
    except json.JSONDecodeError as error:
      raise Usage(f"--version {name}: {words[2]!r} is not JSON: {error}") from error
    if not isinstance(settings, dict) or (unknown := [x for x in settings if x not in SETTINGS]):
      given = unknown[0] if isinstance(settings, dict) else words[2]
      raise Usage(f"--version {name}: {given!r} is not one of {', '.join(SETTINGS)}")
    return cls(name, tree, settings)


class Process:
  """The process of a version."""

  def __init__(self, version: Version, words: Sequence[str], backward: bool):
    """Start it."""
    command = [sys.executable, __file__, *words, "--serve", json.dumps(version.settings), *["--backward"] * backward]
    environment = os.environ | {k: str(v) for k, v in version.settings.get("env", {}).items()}
    environment["PYTHONPATH"] = os.pathsep.join([str(version.tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    self._version = version
    self._process = subprocess.Popen(command, text=True, bufsize=1, cwd=version.tree, env=environment, **pipes)

  def ready(self) -> tuple[Runner, str]:
    """Wait until it can be timed; return what times it, and a digest of its results. Raises Usage if it ends."""
    answer = json.loads(self._answer())
    return Runner(lambda: self._ask(CALL), list, answer["times"], self._wait), answer["bits"]

  def end(self) -> None:
    with contextlib.suppress(BrokenPipeError):
      self._process.communicate()

  def _ask(self, what: str) -> None:
    assert self._process.stdin is not None
    self._process.stdin.write(what)

  def _wait(self) -> None:
    self._ask(WAIT)
    self._answer()

  def _answer(self) -> str:
    assert self._process.stdout is not None
    if answer := self._process.stdout.readline():
      return answer
    said = self._process.communicate()[1].strip().splitlines()
    raise Usage(f"--version {self._version.name}: {said[-1].removeprefix('turns.py: ') if said else 'it ended'}")


def chosen(spec: AttentionSpec, device: str, backward: bool, settings: dict[str, Any]) -> tuple[Launch, ...]:
  """Return the launches that dispatch chooses, with the settings in place of what it chose.

  Raises:
    TypeError, ValueError: the tiles have no such field, or do not take its value.
  """
  target = target_of(device)
  launches = dispatch_backward(spec, target) if backward else (dispatch(spec, target),)
  first = replace(launches[-1], **{name: settings[name] for name in ("splits", "pack_gqa") if name in settings})
  if "tiles" in settings:
    first = replace(first, tiles=replace(first.tiles, **settings["tiles"]))
  if not backward:
    return (first,)
  kernels = (replace(first, kernel=x) for x in first.schedule.kernels)
  return tuple(x for x in kernels if x.kernel.when(x.tiles))


def serve(words: Sequence[str], settings: dict[str, Any], backward: bool) -> int:
  """Run a version when asked to, until the input ends."""
  if settings.keys() - {"env"}:
    choose_by(lambda spec, device, wanted: chosen(spec, device, wanted, settings) if wanted == backward else None)
  set_up = contenders.uopattn_backward if backward else contenders.uopattn
  runner = set_up(prepare(parse(words, os.environ)))
  digest = hashlib.sha256(b"".join(x.tobytes() for x in runner.result())).hexdigest()
  print(json.dumps({"times": runner.times, "bits": digest}), flush=True)
  for asked in sys.stdin:
    if asked == CALL:
      runner.call()
    else:
      runner.wait()
      print(flush=True)
  return 0


def compare(versions: Sequence[Version], words: Sequence[str], backward: bool, rounds: int, starts: int) -> int:
  """Time the versions and print a table; return 0."""
  take_device("turns")
  parse(words, os.environ)
  medians: dict[str, list[float]] = {x.name: [] for x in versions}
  speeds: dict[str, list[float]] = {x.name: [] for x in versions}
  bits: dict[str, str] = {}
  for _ in range(starts):
    with contextlib.ExitStack() as running:
      processes = {x.name: Process(x, words, backward) for x in versions}
      for process in processes.values():
        running.callback(process.end)
      ready = {name: x.ready() for name, x in processes.items()}
      bits = {name: digest for name, (_, digest) in ready.items()}
      timings = alternate({name: runner for name, (runner, _) in ready.items()}, rounds)
    first = timings[versions[0].name]
    for name, timing in timings.items():
      medians[name].append(timing.median)
      speeds[name].append(ratios(timing, first)["paired"])
  print(f"{Device.DEFAULT}, {' '.join(words)}{' gradients' * backward}, {rounds} rounds, {starts} starts")
  width = max(map(len, bits))
  for name, all_bits in bits.items():
    speed, us = speeds[name], median(medians[name]) * 1e6
    spread = f" ({min(speed):.3f} to {max(speed):.3f})" * (starts > 1)
    other = ", other bits" * (all_bits != bits[versions[0].name])
    print(f"{name:{width}} {us:10.1f} us  {median(speed):.3f} times as fast{spread}{other}")
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="the problem, as for scripts/run")
  of_version = 'a name, a tree, and perhaps settings: \'{"tiles": {"stages": 1}, "splits": 2, "env": {"KEY": 1}}\''
  parser.add_argument(
    "--version", action="append", nargs="+", default=[], metavar=("NAME", "TREE"), help=f"{of_version}; two or more"
  )
  parser.add_argument("--backward", action="store_true", help="time the gradients")
  parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
  parser.add_argument("--starts", type=int, default=1, help="how often all are started anew (%(default)s)")
  parser.add_argument("--serve", help=argparse.SUPPRESS)
  args = parser.parse_args()

  def job() -> int:
    if args.serve is not None:
      return serve(args.words, json.loads(args.serve), args.backward)
    versions = [Version.parse(x) for x in args.version]
    if len({x.name for x in versions}) < max(2, len(versions)):
      raise Usage("--version: needs two or more, of different names")
    for name, count in (("rounds", args.rounds), ("starts", args.starts)):
      if count < 1:
        raise Usage(f"--{name} {count}: must be at least 1")
    return compare(versions, args.words, args.backward, args.rounds, args.starts)

  return exit_status(parser.prog, job)


if __name__ == "__main__":
  sys.exit(main())
