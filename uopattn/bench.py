"""`python -m uopattn.bench`: how fast the kernel is, next to other libraries' attention on the same inputs.

Contenders take turns, round after round, so that what else the machine does meets them alike. Every result is checked
by the gate before it is timed; a wrong one gets no speed.

Exit status: 0 all of our results are right, 1 one is wrong, 2 the call is off or a contender is missing, 130
interrupted. A contender's wrong result is shown, and is its own affair.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device
from tinygrad.helpers import Context, tqdm

from uopattn.contenders import PRODUCT, Contender, Runner, load, product, versions
from uopattn.machine import machine_record
from uopattn.run import Config, Usage, prepare
from uopattn.spec import dtype_name
from uopattn.target import Target
from uopattn.threads import thread_count
from uopattn.toolchain import NoCompiler, clang_version
from uopattn.verify import Gate, Report

SETTLE = 0.05  # seconds before a turn: OpenMP threads of the one before spin for a while, on cores that others need
SPIN = 0.2  # the same after numpy's products, whose OpenBLAS threads spin for a tenth of a second
TURN = 0.02  # seconds that a turn lasts at least; short calls are repeated
FORMAT = 1  # of the JSON record


def cpu_rows() -> list[Config]:
  """The problems timed on a CPU."""
  rows = [Config(h=h, n=n, d=d, dtype="float") for h, n, d in ((8, 1024, 64), (32, 1024, 64), (32, 1024, 128))]
  rows += [Config(h=8, n=4096, dtype="float"), Config(dtype="float", causal=1), Config(dtype="half")]
  rows += [Config(dtype="bfloat16")]
  rows += [Config(hkv=8, m=1, n=4096, d=128, dtype=dtype) for dtype in ("float", "bfloat16")]
  rows += [Config(h=8, n=n, dtype="float") for n in (1000, 1023, 1025)]
  rows += [Config(h=8, d=d, dtype="float") for d in (32, 48, 80, 96, 128, 192, 256)]
  rows += [Config(h=8, d=64, dv=128, dtype="float"), Config(h=8, d=192, dv=128, dtype="float")]
  return rows + [Config(h=8, n=n, d=d, dtype="float") for d in (64, 128) for n in (16, 64, 256)]


def quick_rows() -> list[Config]:
  """A few small problems: the bench itself is tried, rather than the machine."""
  return [
    Config(h=2, n=64, d=32, dtype="float"),
    Config(h=2, n=100, d=32, dtype="half", causal=1),
    Config(h=4, hkv=2, m=1, n=128, d=32, dtype="bfloat16"),
  ]


@dataclass(frozen=True)
class Timing:
  """Seconds a call, one number a round."""

  seconds: list[float]

  @property
  def median(self) -> float:
    return float(np.median(self.seconds))

  @property
  def spread(self) -> float:
    """Distance between the quartiles over the median."""
    low, high = np.percentile(self.seconds, (25, 75))
    return float(high - low) / self.median

  def record(self, flops: int) -> dict[str, Any]:
    """For JSON; `flops` is the work of one call."""
    return {
      "seconds": self.seconds,
      "median": self.median,
      "minimum": min(self.seconds),
      "spread": self.spread,
      "gflops": flops / self.median / 1e9,
    }


def alternate(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
  """Times calls in turns: A B C, A B C, ..."""
  repeats: dict[str, int] = {}
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  time.sleep(SPIN)  # the oracle was numpy's
  for _ in range(rounds):
    for name, call in calls.items():
      time.sleep(SETTLE)
      start = time.perf_counter()
      call()  # wakes threads and fills caches, untimed
      repeats.setdefault(name, max(1, math.ceil(TURN / (time.perf_counter() - start))))
      start = time.perf_counter()
      for _ in range(repeats[name]):
        call()
      seconds[name].append((time.perf_counter() - start) / repeats[name])
      if name == "product numpy":
        time.sleep(SPIN)
  return {name: Timing(times) for name, times in seconds.items()}


def ratios(ours: Timing, theirs: Timing) -> dict[str, float]:
  """How many times as fast as the contender we are.

  By the medians, by the minima (which other work on the machine disturbs least), and the median and extremes of the
  rounds' own ratios.
  """
  pairs = [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
  return {
    "of_medians": theirs.median / ours.median,
    "of_minima": min(theirs.seconds) / min(ours.seconds),
    "paired": float(np.median(pairs)),
    "lowest": min(pairs),
    "highest": max(pairs),
  }


def bench_row(config: Config, contenders: dict[str, Contender], rounds: int) -> dict[str, Any]:
  """Checks and times one problem; returns its record.

  Raises:
    Usage: no kernel serves it.
  """
  problem = prepare(config, Target.of(Device.DEFAULT))
  s = problem.spec
  runners: dict[str, Runner] = {}
  for name, set_up in contenders.items():
    if (runner := set_up(problem)) is not None:
      runners[name] = runner
  gate = Gate.of(problem.q, problem.k, problem.v, is_causal=s.is_causal)
  reports = {name: runner.check(gate) for name, runner in runners.items()}
  right = [name for name in runners if all(r.correct for r in reports[name])]
  by, multiply = product()
  times = alternate({name: runners[name].call for name in right} | {f"product {by}": multiply}, rounds)
  multiplied = times[f"product {by}"].record(2 * PRODUCT**3)
  records = {name: _errors(reports[name]) for name in runners}
  for name in right:
    records[name] |= times[name].record(s.flops)
    records[name]["share"] = {by: records[name]["gflops"] / multiplied["gflops"]}
  return {
    "problem": asdict(s) | {"dtype": dtype_name(s.dtype)},
    "kernel": problem.choice.kernel.name,
    "tiles": asdict(problem.choice.tiles),
    "flops": s.flops,
    "contenders": records,
    "product": {by: multiplied},
    "ratios": {name: ratios(times["uopattn"], times[name]) for name in right[1:]} if "uopattn" in right else {},
  }


def _errors(reports: Sequence[Report]) -> dict[str, Any]:
  return {
    "correct": all(r.correct for r in reports),
    "error": reports[0].relative,
    "errors": {r.name: r.record() for r in reports},
    "failures": [str(r) for r in reports if not r.correct],
  }


def title(problem: dict[str, Any]) -> str:
  """A problem in a few words, from its record."""
  p = problem
  heads = f"H={p['Hq']}" + (f" HKV={p['Hkv']}" if p["Hkv"] != p["Hq"] else "")
  lengths = (f"M={p['M']} " if p["M"] != p["N"] else "") + f"N={p['N']}"
  sizes = f"D={p['Dk']}" + (f" DV={p['Dv']}" if p["Dv"] != p["Dk"] else "")
  return f"B={p['B']} {heads} {lengths} {sizes} {p['dtype']}{' causal' * p['is_causal']}"


def lines(row: dict[str, Any]) -> Iterator[str]:
  """A row for people."""
  yield title(row["problem"])
  for name, c in row["contenders"].items():
    if not c["correct"]:
      yield f"  {name:<9} fails the gate: {'; '.join(c['failures'])}"
      continue
    shares = ", ".join(f"{share:4.0%} of {by}'s product" for by, share in c["share"].items())
    text = (
      f"  {name:<9} {c['median'] * 1e3:9.3f} ms (min {c['minimum'] * 1e3:.3f}, spread {c['spread']:.0%}) "
      f"{c['gflops']:7.1f} GFLOP/s, {shares}, error {c['error']:.2g}"
    )
    if ratio := row["ratios"].get(name):
      text += f"; uopattn is {ratio['paired']:.2f} times as fast (by minima {ratio['of_minima']:.2f})"
    yield text


def record(rows: list[dict[str, Any]], names: list[str], rounds: int, load: float) -> dict[str, Any]:
  """What --json writes; `load` is the system's load average before the first row."""
  machine = machine_record()
  found = machine.pop("versions")
  assert isinstance(found, dict)
  more = [name for name in {*names, *(rows[0]["product"] if rows else ())} if name not in found]
  return {
    "format": FORMAT,
    "date": date.today().isoformat(),
    "machine": machine | {"device": str(Target.of(Device.DEFAULT)), "threads": thread_count(), "load": load},
    "versions": found | versions(sorted(more)) | {"clang": clang_version()},
    "product_size": PRODUCT,
    "rounds": rounds,
    "rows": rows,
  }


def plot(rows: list[dict[str, Any]], path: str) -> None:
  """Draws GFLOP/s over N, a panel for each D: float32 without a mask, as many queries as keys; the fewest heads."""
  from matplotlib.figure import Figure

  points: dict[int, dict[str, dict[int, float]]] = {}
  for row in sorted(rows, key=lambda row: row["problem"]["Hq"]):
    p = row["problem"]
    heads = {p["Hq"], p["Hkv"]}
    if p["dtype"] == "float" and not p["is_causal"] and len(heads) == 1 and (p["M"], p["Dk"]) == (p["N"], p["Dv"]):
      for name, c in row["contenders"].items():
        if c["correct"]:
          points.setdefault(p["Dk"], {}).setdefault(name, {}).setdefault(p["N"], c["gflops"])
  columns = min(4, max(1, len(points)))
  figure = Figure(figsize=(3.2 * columns, 2.8 * max(1, math.ceil(len(points) / columns))), layout="constrained")
  panels = figure.subplots(math.ceil(max(1, len(points)) / columns), columns, squeeze=False, sharex=True, sharey=True)
  legend: dict[str, Any] = {}
  for panel, (d, by_name) in zip(panels.flat, sorted(points.items()), strict=False):
    for i, name in enumerate(("uopattn", "torch", "tinygrad")):
      if name in by_name:
        xy = zip(*sorted(by_name[name].items()), strict=True)
        (legend[name],) = panel.plot(*xy, "o-", ms=4, color=f"C{i}")
    panel.set(title=f"D = {d}", xlabel="N", ylabel="GFLOP/s", xscale="log")
    panel.grid(alpha=0.3)
  for panel in panels.flat[len(points) :]:
    panel.set_visible(False)
  panels.flat[0].set_ylim(bottom=0)  # of all, once all are drawn
  panels.flat[0].legend(list(legend.values()), list(legend))
  figure.savefig(path, dpi=120)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line; argparse ends the process with 2 where it is off."""
  parser = argparse.ArgumentParser(prog="uopattn.bench", description="Times and checks attention.")
  parser.add_argument("device", nargs="?", choices=["cpu"], help="where to run (default: tinygrad's default device)")
  parser.add_argument("--against", default="", metavar="NAMES", help="contenders, by commas: torch,tinygrad")
  parser.add_argument("--quick", action="store_true", help="a few small problems")
  parser.add_argument("--json", default="", metavar="FILE", help="where to write the record")
  parser.add_argument("--plot", default="", metavar="FILE.png", help="where to draw speed over N")
  parser.add_argument("--rounds", type=int, default=7, metavar="R", help="turns of each contender (%(default)s)")
  given = parser.parse_args(words)
  if given.rounds < 1:
    raise Usage(f"--rounds {given.rounds} is less than 1")
  for option, path in (("--json", given.json), ("--plot", given.plot)):
    if path and not Path(path).absolute().parent.is_dir():  # told now, rather than after minutes of timing
      raise Usage(f"{option} {path}: there is no such folder")
  if given.plot:
    try:
      import matplotlib.figure  # noqa: F401
    except ImportError as error:
      raise Usage(f"--plot needs matplotlib, which is in the extra uopattn[bench]: {error}") from error
  return given


def bench(given: argparse.Namespace) -> int:
  """Runs every row, printing each as it is done, and writes the files; returns the exit status."""
  if (device := Device.DEFAULT.split(":")[0]) != "CPU":
    raise Usage(f"there are no problems to time on {device} yet; accepted is cpu")
  names = [name for name in given.against.split(",") if name]
  contenders = load(names)
  rows: list[dict[str, Any]] = []
  status, busy = 0, os.getloadavg()[0]
  try:
    for config in tqdm(quick_rows() if given.quick else cpu_rows(), desc="bench", disable=None):
      row = bench_row(config, contenders, given.rounds)
      rows.append(row)
      if sys.stderr.isatty():  # where the progress bar is; the row takes its line
        print("\r\033[K", end="", file=sys.stderr, flush=True)
      print("\n".join(lines(row)), flush=True)
      if not row["contenders"]["uopattn"]["correct"]:
        status = 1
  except KeyboardInterrupt:
    print(f"\ninterrupted after {len(rows)} rows", file=sys.stderr)
    status = 130
  if given.json:
    Path(given.json).write_text(json.dumps(record(rows, names, given.rounds, busy), indent=1) + "\n")
  if given.plot:
    plot(rows, given.plot)
  return status


def main(words: Sequence[str] | None = None) -> int:
  """Exit status 2 with one line on stderr where the call is off."""
  try:
    given = arguments(words)
    with Context(DEV="CPU") if given.device == "cpu" else nullcontext():
      return bench(given)
  except (Usage, NoCompiler) as error:
    print(f"uopattn.bench: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
