"""`python -m uopattn.run KEY=VALUE ...`: runs the kernel, times it, and checks its output.

Exit status: 0 if the output is correct; 1 if it is wrong; 2 on any error, such as an invalid key or value, no kernel
for the case, an unusable device, a file that cannot be read or written, or too little memory.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinygrad import Device, Tensor

from uopattn.dsl.target import Target
from uopattn.emulator import profile
from uopattn.measure.bench_report import speed_text
from uopattn.measure.problem import Config, Problem, described, misspelt, parse, prepare
from uopattn.measure.program import check_writable, default_target, exit_status, take_device
from uopattn.measure.timing import captured, poison, wait
from uopattn.plan.target import shown
from uopattn.proof.gate import Report, verify
from uopattn.runtime.machine import machine_record
from uopattn.spec.spec import AttentionSpec

HELP = """\
usage: python -m uopattn.run [KEY=VALUE ...]

Runs the kernel, times it, and checks its output. A key that is not given is taken from the environment.

  B, H, N, D     batch, query heads, keys, head size of queries and keys (1, 32, 1024, 64)
  HKV, M, DV     key heads, queries, head size of values (as H, N, D)
  DTYPE          half, float, bfloat16, fp8e4m3 or fp8e5m2 (half)
  CAUSAL         1: causal (0)
  CNT            timed runs (5)
  VERIFY         0: no check (1)
  SEED           of the random inputs (0)
  GPUS           devices of one kind that divide the work: 2 is CUDA and CUDA:1 (1)
  SHARD          batch, heads or sequence: what they divide (the first of these that they can)
  INPUT          a safetensors file with q, k and v, in place of random inputs
  JSON           a file for the record: machine, versions, tiles, times, errors

tinygrad's DEV chooses the device, otherwise the first that has kernels: CPU, CUDA, NV, AMD, EMU::gfx1100, ...
Exit status: 0 correct, 1 wrong output, 2 anything else."""


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
  """Warn on stderr of environment variables that look like a misspelt key."""
  for name, value in environment.items():
    if name.isupper() and (meant := misspelt(name)):
      print(f"uopattn.run: {name}={value} in the environment is no key; did you mean {meant}?", file=sys.stderr)


def measure(problem: Problem, count: int) -> tuple[Tensor, Tensor, list[float]]:
  """Run the kernel `count` times on outputs filled with NaN; return the last output and LSE, and each run's seconds."""
  call, (o, lse) = captured(problem.computation())
  seconds: list[float] = []
  for number in range(1, count + 1):
    poison((o, lse))
    wait(problem.devices)
    start = time.perf_counter()
    o, lse = call()
    wait(problem.devices)
    seconds.append(time.perf_counter() - start)
    print(f"run {number}/{count}  {seconds[-1] * 1e3:10.3f} ms  {_speed(problem.spec, seconds[-1])}")
  return o, lse, seconds


def _speed(spec: AttentionSpec, seconds: float) -> str:
  return speed_text(spec.flops / seconds / 1e9)


def report(reports: Sequence[Report]) -> bool:
  """Print the verdict; return whether everything is correct."""
  output, lse = reports
  print(f"mean squared error {output.mse:.3g}")
  print(
    f"relative error {output.relative:.3g} (bound {output.relative_bound:.3g}), "
    f"largest {output.largest:.3g} (bound {output.largest_bound:.3g}); "
    f"lse {lse.relative:.3g} (bound {lse.relative_bound:.3g})"
  )
  for wrong in (r for r in reports if not r.correct):
    print(f"flash attention is WRONG, worst at {wrong.worst} of (B, H, M{', D' * (len(wrong.worst) == 4)}): {wrong}")
  correct = all(r.correct for r in reports)
  if correct:
    print("flash attention is correct!")
  return correct


def run(config: Config) -> int:
  """Run, time and check the kernel; return the exit status."""
  if config.json:
    check_writable(f"JSON={config.json}", config.json)
  take_device("uopattn.run")
  target = default_target()
  problem = prepare(config)
  s = problem.spec
  print(f"device   {f'{config.gpus} x ' if config.gpus > 1 else ''}{shown(target, Device.DEFAULT)}")
  print(f"kernel   {problem.launch}")
  print(f"problem  {described(s)}{f' from {config.input}' if config.input else ''}")
  with profile() as counts:
    o, lse, seconds = measure(problem, config.cnt)
  if counts.kernels:  # on the emulator, over all runs
    print(counts)
  print(f"best     {min(seconds) * 1e3:10.3f} ms  {_speed(s, min(seconds))}")
  reports: list[Report] = []
  if config.verify:
    options = {"is_causal": s.is_causal, "progress": True, **problem.products}
    reports = verify(problem.q, problem.k, problem.v, o, lse, **options)
  correct = report(reports) if reports else True
  if config.json:
    Path(config.json).write_text(json.dumps(record(config, target, problem, seconds, reports), indent=2) + "\n")
  return 0 if correct else 1


def record(
  config: Config, target: Target, problem: Problem, seconds: list[float], reports: list[Report]
) -> dict[str, Any]:
  """Return the record that JSON= writes."""
  return {
    "machine": machine_record() | {"device": shown(target, Device.DEFAULT)},
    "config": asdict(config),
    "problem": problem.spec.record(),
    "kernel": problem.launch.schedule.name,
    "tiles": asdict(problem.launch.tiles),
    "seconds": seconds,
    "flops": problem.spec.flops,
    "errors": {r.name: r.record() for r in reports},
  }


def main() -> int:
  """Parse the command line and the environment, and run; return the exit status."""
  words = sys.argv[1:]
  if {"-h", "--help"} & set(words):
    print(HELP)
    return 0
  warn_of_misspelt(os.environ)
  return exit_status("uopattn.run", lambda: run(parse(words, os.environ)))


if __name__ == "__main__":
  sys.exit(main())
