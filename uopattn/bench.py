"""`python -m uopattn.bench`: times our kernels next to other libraries' attention on the same inputs.

Contenders take turns; a GPU is kept busy until their times settle, or with --burst pauses before each turn; see
`uopattn.measure.timing`. The gate checks every result before it is timed; a wrong one gets no speed.

Exit status: 0 if all of our results are correct; 1 if one is wrong; 2 on any error, such as invalid arguments, a
missing contender, an unusable device or an unwritable file; 130 if interrupted. A contender's wrong result is shown,
but does not change the status.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from tinygrad import Device
from tinygrad.helpers import DEV, Context, tqdm

from uopattn.dsl.schedule import FEW
from uopattn.dsl.target import WITHOUT_MATRIX_UNITS
from uopattn.measure.bench_report import lines, plot
from uopattn.measure.contenders import LOADERS, Contender, load, versions
from uopattn.measure.gpu_state import sampled
from uopattn.measure.limits import limit, product_size
from uopattn.measure.problem import DTYPE_NAMES, SHARDS, Config, Problem, parse, prepare, shard_axis
from uopattn.measure.program import (
  Usage,
  check_writable,
  default_device,
  default_target,
  exit_status,
  first_with_kernels,
  take_device,
)
from uopattn.measure.sample import Sample
from uopattn.measure.timing import BURSTS, GRADIENT_COST, Runner, alternate, on_cpu, ratios, share
from uopattn.plan.dispatch import backward_on
from uopattn.plan.target import shown
from uopattn.proof.gate import Report
from uopattn.runtime.clang import clang_version
from uopattn.runtime.device import kind_of
from uopattn.runtime.gpu import gpu_name
from uopattn.runtime.machine import machine_record, thread_count
from uopattn.tuning.case import choice

FORMAT = 3  # of the JSON record; 1 had no "mode", and was in bursts; 2 had the forward kernel in rows of gradients
ONE_DEVICE = "one device"  # the name of our kernels on one device where others of ours are on several
GPUS = ("CUDA", "NV", "AMD", "METAL", *WITHOUT_MATRIX_UNITS)


def cpu_rows() -> list[Config]:
  """Return the problems timed on a CPU."""
  rows = [Config(h=h, n=n, d=d, dtype="float") for h, n, d in ((8, 1024, 64), (32, 1024, 64), (32, 1024, 128))]
  rows += [Config(h=8, n=4096, dtype="float"), Config(dtype="float", causal=1), Config(dtype="half")]
  rows += [Config(dtype="bfloat16")]
  rows += [
    Config(hkv=8, m=1, n=n, d=d, dtype=dtype)
    for dtype in ("float", "half", "bfloat16")
    for n, d in ((4096, 128), (16384, 128), (32768, 64))
  ]
  rows += [Config(h=8, hkv=1, m=1, n=131072, d=128, dtype=dtype) for dtype in ("float", "bfloat16")]
  rows += [Config(hkv=8, m=m, n=16384, d=128, dtype=dtype) for dtype in ("float", "bfloat16") for m in (4, 8)]
  rows += [Config(h=8, n=n, dtype="float") for n in (1000, 1023, 1025)]
  rows += [Config(h=8, d=d, dtype="float") for d in (32, 48, 80, 96, 128, 192, 256)]
  rows += [Config(h=8, d=64, dv=128, dtype="float"), Config(h=8, d=192, dv=128, dtype="float")]
  return rows + [Config(h=8, n=n, d=d, dtype="float") for d in (64, 128) for n in (16, 64, 256)]


def gpu_rows() -> list[Config]:
  """Return the problems timed on a GPU; the total number of tokens is the same for all lengths."""
  rows = lengths()
  rows += [Config(), Config(b=4, n=4096, d=128, dtype="bfloat16"), *grouped_rows()]
  rows += [Config(b=4, n=4000, d=128), Config(b=4, n=4095, causal=1), Config(b=4, n=4096, d=80)]
  rows += [Config(b=4, n=4096, d=d, causal=causal) for d in (192, 256) for causal in (0, 1)]
  rows += [Config(hkv=8, m=m, n=16384, d=128) for m in (32, 128)]  # parts of a prompt
  return rows + decode_rows()


def small_rows() -> list[Config]:
  """Return the problems timed on a GPU without matrix units, which may be a small one."""
  rows = [Config(h=8, n=n, dtype="float", causal=causal) for n in (256, 512, 1024, 2048) for causal in (0, 1)]
  rows += [Config(h=8, n=1024, dtype=dtype) for dtype in ("half", "bfloat16")]
  rows += [Config(h=8, n=1024, d=d, dtype="float") for d in (32, 128)]
  return rows + [Config(h=8, hkv=hkv, m=1, n=4096, dtype="float") for hkv in (8, 2)]


def lengths() -> list[Config]:
  """Return problems of 512 to 16384 queries and keys, 16384 tokens each, with and without a causal mask."""
  every = (512, 1024, 2048, 4096, 8192, 16384)
  return [Config(b=16384 // n, n=n, d=d, causal=causal) for d in (64, 128) for causal in (0, 1) for n in every]


def grouped_rows() -> list[Config]:
  """Return the problems with key heads that query heads share, as in a language model that is trained."""
  return [Config(b=b, hkv=8, n=n, d=128, causal=causal) for b, n, causal in ((4, 4096, 0), (4, 4096, 1), (1, 8192, 1))]


def decode_rows() -> list[Config]:
  """Return the problems with few queries timed on a GPU."""
  rows = [Config(b=b, hkv=8, m=1, n=n, d=128) for b, n in ((16, 8192), (1, 8192), (16, 1024), (64, 2048), (1, 131072))]
  rows += [Config(m=1, n=4096), Config(b=4, m=1, n=2048, d=128), Config(b=16, hkv=8, m=4, n=8192, d=128)]
  return rows


def backward_rows(kind: str) -> list[Config]:
  """Return the problems whose gradients are timed."""
  if kind == "CPU":
    rows = [Config(h=h, n=n, d=d, dtype="float") for h, n, d in ((8, 1024, 64), (32, 1024, 64), (32, 1024, 128))]
    rows += [Config(h=8, n=4096, dtype="float"), Config(dtype="float", causal=1), Config(dtype="half")]
    return [
      *rows,
      Config(dtype="bfloat16"),
      Config(h=8, hkv=2, dtype="float"),
      Config(h=8, n=1000, d=80, dtype="float"),
    ]
  if kind in WITHOUT_MATRIX_UNITS:
    return [Config(h=8, n=n, dtype="float", causal=causal) for n in (256, 1024) for causal in (0, 1)]
  return [*lengths(), Config(b=4, n=4096, d=128, dtype="bfloat16"), *grouped_rows(), Config()]


def device_rows(backward: bool) -> list[Config]:
  """Return the problems timed on several GPUs: batches, heads and long sequences that they divide."""
  sizes, masks = ((128,) if backward else (64, 128)), (0, 1)
  rows = [Config(b=4, n=4096, d=d, causal=causal, shard="batch") for d in sizes for causal in masks]
  rows += [Config(b=4, n=4096, d=128, shard="heads")]
  return rows + [Config(h=16, n=131072, d=128, causal=causal, shard="sequence") for causal in masks]


def quick_rows(kind: str) -> list[Config]:
  """Return a few small problems, for trying out the bench."""
  return [
    Config(h=2, n=64, d=32, dtype="float" if kind == "CPU" else "half"),
    Config(h=2, n=100, d=32, dtype="half", causal=1),
    Config(h=4, hkv=2, m=1, n=128, d=32, dtype="bfloat16"),
  ]


def bench_row(
  config: Config, contenders: dict[str, Contender], rounds: int, backward: bool = False, burst: bool = False
) -> dict[str, Any]:
  """Check and time one problem, or its gradients; return its record.

  Raises:
    Usage: no kernel supports the problem.
  """
  target = default_target()
  problem = prepare(config)
  s = problem.spec
  alone = problem if config.gpus == 1 else prepare(replace(config, gpus=1))
  runners = _set_up(problem, alone, contenders)
  sample, flops = Sample.of(s, backward), int(s.flops * GRADIENT_COST) if backward else s.flops
  of_one = runners[ONE_DEVICE].result if ONE_DEVICE in runners else None
  check = sample.check_gradients(alone, of_one) if backward else sample.check(alone)
  reports = {name: check(runner.result()) for name, runner in runners.items()}
  right = [name for name in runners if all(r.correct for r in reports[name])]
  most = limit(s)
  of_limit = {} if most is None else {f"limit {most.name}": most.runner}
  timed = {name: runners[name] for name in right[:1]} | of_limit | {name: runners[name] for name in right[1:]}
  with sampled([] if on_cpu() else range(config.gpus)) as state:
    times = alternate(timed, rounds, BURSTS if burst else None)
  moved = s.kv_bytes if most is not None and most.moved else 0
  records = {name: _errors(reports[name]) for name in runners}
  for name in right:
    records[name] |= times[name].record(flops, moved) | {"share": {}} | state.means(times[name].turns)
  limits = {}
  if most is not None:
    its = times[f"limit {most.name}"]
    limits[most.name] = its.record(most.flops, most.moved)
    for name in right:
      records[name]["share"][most.name] = share(times[name], its, moved or flops, most.moved or most.flops)
  return {
    "problem": s.record(),
    "device": " ".join(filter(None, (shown(target, Device.DEFAULT), gpu_name(Device.DEFAULT)))),
    "devices": config.gpus,
    "shard": SHARDS[shard_axis(config, s)] if config.gpus > 1 else None,
    "gpu": state.summary() or None,
    **choice(backward_on(problem.launch.spec, Device.DEFAULT) if backward else (problem.launch,)),
    "flops": flops,
    "backward": backward,
    "contenders": records,
    "limits": limits,
    "product_of": {"dtype": "float32" if on_cpu() else "float16", "size": product_size()},
    "heads_checked": len(sample.pairs) * sample.group,
    "rows_checked": s.M if sample.queries is None else len(sample.queries),
    "ratios": {name: ratios(times["uopattn"], times[name]) for name in right[1:]} if "uopattn" in right else {},
  }


def _set_up(problem: Problem, alone: Problem, contenders: dict[str, Contender]) -> dict[str, Runner]:
  """Set up those contenders that take a problem; of one that several devices divide also ours on one of them.

  Args:
    alone: the problem on one device.
  """
  if problem is not alone:
    ours, *others = contenders.items()
    contenders = dict([ours, (ONE_DEVICE, ours[1]), *others])
  runners = {name: set_up(problem if name == "uopattn" else alone) for name, set_up in contenders.items()}
  return {name: runner for name, runner in runners.items() if runner is not None}


def _errors(reports: Sequence[Report]) -> dict[str, Any]:
  return {
    "correct": all(r.correct for r in reports),
    "error": max(r.relative for r in reports) if len(reports) > 2 else reports[0].relative,
    "errors": {r.name: r.record() for r in reports},
    "failures": [str(r) for r in reports if not r.correct],
  }


def record(rows: list[dict[str, Any]], names: list[str], args: argparse.Namespace, load: float) -> dict[str, Any]:
  """Return what --json writes; `load` is the system's load average before the first row."""
  machine = machine_record()
  machine_versions = machine.pop("versions")
  assert isinstance(machine_versions, dict)
  devices = dict.fromkeys(row["device"] for row in rows)
  timed = {name for row in rows for name in row["limits"] if name != "read"}
  more = [name for name in {*names, *timed} if name not in machine_versions]
  compiler = {"clang": clang_version()} if any(device.startswith("CPU") for device in devices) else {}
  return {
    "format": FORMAT,
    "date": date.today().isoformat(),
    "machine": machine | {"device": " and ".join(devices), "threads": thread_count(), "load": load},
    "versions": machine_versions | versions(sorted(more)) | compiler,
    "rounds": args.rounds,
    "mode": "bursts" if args.burst or all(device.startswith("CPU") for device in devices) else "sustained",
    "rows": rows,
  }


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
  """Parse the command line; argparse exits with status 2 if it is invalid."""
  parser = argparse.ArgumentParser(prog="uopattn.bench", description="Times and checks attention.")
  where = (
    "where to run: cpu, gpu or all (default: by DEV, as uopattn.run); only problems with these values: D=128 N=4096"
  )
  parser.add_argument("words", nargs="*", metavar="WORD", help=where)
  parser.add_argument("--against", default="", metavar="NAMES", help=f"contenders, by commas: {','.join(LOADERS)}")
  parser.add_argument("--dtype", default="", choices=list(DTYPE_NAMES), help="the dtype of all problems")
  parser.add_argument("--backward", action="store_true", help="time the gradients, from outputs computed beforehand")
  parser.add_argument(
    "--burst", action="store_true", help="on a GPU: pause before each turn, so that its clock recovers"
  )
  parser.add_argument("--few", action="store_true", help=f"time only the problems of at most {FEW} queries")
  parser.add_argument("--quick", action="store_true", help="a few small problems")
  parser.add_argument("--json", default="", metavar="FILE", help="where to write the record")
  parser.add_argument("--plot", default="", metavar="FILE.png", help="where to draw speed over N")
  parser.add_argument("--rounds", type=int, default=7, metavar="R", help="turns of each contender (%(default)s)")
  args = parser.parse_intermixed_args(words)
  args.only = [word for word in args.words if "=" in word]
  named = [word for word in args.words if "=" not in word]
  if len(named) > 1 or not {"cpu", "gpu", "all"}.issuperset(named):
    raise Usage(f"{' '.join(named)}: accepted are one of cpu, gpu, all, and KEY=VALUE")
  args.device = named[0] if named else None
  if args.rounds < 1:
    raise Usage(f"--rounds {args.rounds} is less than 1")
  for option, path in (("--json", args.json), ("--plot", args.plot)):
    if path:
      check_writable(f"{option} {path}", path)
  if args.plot:
    try:
      import matplotlib.figure  # noqa: F401
    except ImportError as error:
      raise Usage(f"--plot needs matplotlib, which pip install '.[bench]' in a checkout installs: {error}") from error
  return args


def gpu() -> str:
  """Return the GPU to use: the one that DEV names, else tinygrad's default if it has kernels, else the first of `GPUS`.

  Raises:
    Usage: there is no GPU that has kernels.
  """
  if DEV.device in GPUS:
    return DEV.device
  first_gpu = first_with_kernels(device for device in (default_device(), *GPUS) if kind_of(device) in GPUS)
  if first_gpu is None:
    raise Usage(f"gpu: tinygrad finds none of the devices {', '.join(GPUS)} here that can run the kernels")
  return first_gpu


def devices(name: str | None) -> list[str]:
  """Return the devices named by the first argument: cpu, gpu or all; None stands for the default device."""
  if name is None:
    take_device("uopattn.bench")
    return [default_device()]
  return [device for kind, device in (("cpu", "CPU"), ("gpu", gpu() if name != "cpu" else "")) if name in (kind, "all")]


def problems(args: argparse.Namespace) -> list[tuple[str, Config]]:
  """Return the problems to time, each with its device."""
  rows: list[tuple[str, Config]] = []
  over = parse([], {key: os.environ[key] for key in ("GPUS", "SHARD") if key in os.environ})
  over = replace(over, dtype=args.dtype)
  for device in devices(args.device):
    if (kind := kind_of(device)) not in ("CPU", *GPUS):
      raise Usage(f"there are no problems to time on {kind}; accepted are cpu and gpu")
    configs = cpu_rows() if kind == "CPU" else small_rows() if kind in WITHOUT_MATRIX_UNITS else gpu_rows()
    configs = quick_rows(kind) if args.quick else backward_rows(kind) if args.backward else configs
    configs = [config for config in configs if not args.few or 0 < config.m <= FEW]
    if over.gpus > 1 and kind != "CPU" and not (args.quick or args.few):
      configs = device_rows(args.backward)
    configs = [_with_overrides(config, over) for config in configs]
    rows += [(device, config) for config in dict.fromkeys(configs)]
  chosen = [(device, config) for device, config in rows if has_values(config, args.only)]
  if args.only and not chosen:
    raise Usage(f"{' '.join(args.only)}: none of the {len(rows)} problems has these values")
  return chosen


def has_values(config: Config, words: Sequence[str]) -> bool:
  """Whether a problem has the values of KEY=VALUE words.

  Raises:
    Usage: a key is unknown, or does not take its value.
  """
  wanted, actual = parse(words, {}), config.settled
  names = [word.partition("=")[0].lower() for word in words]
  wanted, actual = (replace(x, dtype=str(DTYPE_NAMES[x.settled.dtype])) for x in (wanted, actual))
  return all(getattr(actual, name) == getattr(wanted, name) for name in names)


def _with_overrides(config: Config, over: Config) -> Config:
  """Return a problem on as many devices as `over`, and with its division and dtype where it has them."""
  return replace(config, gpus=over.gpus, shard=over.shard or config.shard, dtype=over.dtype or config.dtype)


def bench(args: argparse.Namespace) -> int:
  """Run every row, print each when it is done, and write the files; return the exit status."""
  names = [name for name in args.against.split(",") if name]
  todo = problems(args)
  contenders = {}
  for device in dict.fromkeys(device for device, _ in todo):
    with Context(DEV=device):
      contenders[device] = load(names, args.backward)
  rows: list[dict[str, Any]] = []
  status, busy = 0, os.getloadavg()[0]
  try:
    for device, config in tqdm(todo, desc="bench", disable=None):
      with Context(DEV=device):
        row = bench_row(config, contenders[device], args.rounds, args.backward, args.burst)
      rows.append(row)
      if sys.stderr.isatty():  # erase the progress bar, whose line the row takes
        print("\r\033[K", end="", file=sys.stderr, flush=True)
      print("\n".join(lines(row)), flush=True)
      if not row["contenders"]["uopattn"]["correct"]:
        status = 1
  except KeyboardInterrupt:
    print(f"\ninterrupted after {len(rows)} rows", file=sys.stderr)
    status = 130
  finally:  # also write the rows before one that failed
    if args.json and rows:
      libraries = [name for on_device in contenders.values() for name in on_device if name != "uopattn"]
      Path(args.json).write_text(json.dumps(record(rows, libraries, args, busy), indent=1) + "\n")
    if args.plot and rows:
      plot(rows, args.plot)
  return status


def main(words: Sequence[str] | None = None) -> int:
  """Parse the command line and run; return the exit status."""
  return exit_status("uopattn.bench", lambda: bench(arguments(words)))


if __name__ == "__main__":
  sys.exit(main())
