"""`python -m uopattn.run KEY=VALUE ...`: runs the kernel, times it, and checks its output.

Exit status: 0 if the output is correct; 1 if it is wrong; 2 on any error, such as an invalid key or value, no kernel
for the case, an unusable device, a file that cannot be read or written, or too little memory.
"""

import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.dtype import DType
from tinygrad.nn.state import safe_load

from uopattn.api.attention import attention
from uopattn.dsl.schedule import DTYPES_8
from uopattn.dsl.target import Target
from uopattn.emulator import profile
from uopattn.measure.command_line import Usage, check_writable, exit_status, reason
from uopattn.measure.device import default_target, take_device
from uopattn.plan.context_parallel import ContextParallel, divided
from uopattn.plan.dispatch import NoKernel, launch_on
from uopattn.plan.forward import forward
from uopattn.plan.launch import Launch
from uopattn.plan.sharded import Sharded
from uopattn.plan.target import shown
from uopattn.proof.gate import Report, verify
from uopattn.runtime.machine import machine_record
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import devices_of
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import dtype_name

DTYPE_NAMES: dict[str, DType] = {
  "half": dtypes.float16,
  "float": dtypes.float32,
  "float16": dtypes.float16,
  "float32": dtypes.float32,
  "bfloat16": dtypes.bfloat16,
  "fp8e4m3": dtypes.fp8e4m3,
  "fp8e5m2": dtypes.fp8e5m2,
}


@dataclass(frozen=True)
class Config:
  """The runner's keys, in lower case.

  0 takes the value of another key: hkv that of h, m that of n, dv that of d. An empty dtype means half, or the dtype of
  the input file.
  """

  b: int = 1
  h: int = 32
  hkv: int = 0
  n: int = 1024
  m: int = 0
  d: int = 64
  dv: int = 0
  dtype: str = ""
  causal: int = 0
  cnt: int = 5
  verify: int = 1
  seed: int = 0
  gpus: int = 1
  shard: str = ""
  input: str = ""
  json: str = ""


KEYS = tuple(field.name.upper() for field in fields(Config))
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
ALIKE = 0.8  # similarity from which a name counts as a misspelt key
SWITCHES, NATURALS = ("CAUSAL", "VERIFY"), ("B", "H", "HKV", "N", "M", "D", "DV", "CNT", "GPUS")
SHARDS = ("batch", "heads", "sequence")  # in the order of q's axes
SHAPE_KEYS = ("B", "H", "HKV", "N", "M", "D", "DV")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
  """Parse KEY=VALUE words; missing keys are looked up in the environment.

  Raises:
    Usage: a key is unknown, or does not take its value.
  """
  given = {key: environment[key] for key in KEYS if key in environment}
  for word in arguments:
    key, equals, value = word.partition("=")
    if not equals or key not in KEYS:
      hint = f"; did you mean {meant}=?" if (meant := misspelt(key)) else ""
      raise Usage(f"{word!r} is not one of {', '.join(f'{key}=' for key in KEYS)}{hint}")
    given[key] = value
  if given.get("INPUT") and (clash := [key for key in SHAPE_KEYS if key in given]):
    raise Usage(f"{clash[0]}={given[clash[0]]} with INPUT={given['INPUT']}: the shape is that of the file")
  return Config(**{key.lower(): _value(key, text) for key, text in given.items()})


def misspelt(name: str) -> str | None:
  """Return the key that a name probably misspells: similar letters, or the same ones in another order; else None."""
  if name in KEYS:
    return None
  turned = (key for key in KEYS if len(key) > 1 and sorted(key) == sorted(name))
  alike = difflib.get_close_matches(name, [key for key in KEYS if len(key) > 3], n=1, cutoff=ALIKE)
  return next(turned, alike[0] if alike else None)


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
  """Warn on stderr of environment variables that look like a misspelt key."""
  for name, value in environment.items():
    if name.isupper() and (meant := misspelt(name)):
      print(f"uopattn.run: {name}={value} in the environment is no key; did you mean {meant}?", file=sys.stderr)


def _value(key: str, text: str) -> Any:
  if key in ("INPUT", "JSON"):
    return text
  if key == "DTYPE":
    if text not in DTYPE_NAMES:
      raise Usage(f"DTYPE={text} is not one of {', '.join(DTYPE_NAMES)}")
    return text
  if key == "SHARD":
    if text not in SHARDS:
      raise Usage(f"SHARD={text} is not one of {', '.join(SHARDS)}")
    return text
  if key in SWITCHES:
    if text not in ("0", "1"):
      raise Usage(f"{key}={text} is neither 0 nor 1")
    return int(text)
  lowest = 1 if key in NATURALS else 0
  if not (text.isascii() and text.isdigit() and int(text) >= lowest):
    raise Usage(f"{key}={text} is not a whole number of at least {lowest}")
  return int(text)


def inputs(config: Config) -> list[Tensor]:
  """Return q, k and v: normal random numbers, or the tensors of the INPUT file.

  Raises:
    Usage: the file is missing or does not contain q, k and v.
  """
  if not config.input:
    dtype = DTYPE_NAMES[config.dtype or "half"]
    hkv, m, dv = config.hkv or config.h, config.m or config.n, config.dv or config.d
    Tensor.manual_seed(config.seed)
    shapes = ((config.b, config.h, m, config.d), (config.b, hkv, config.n, config.d), (config.b, hkv, config.n, dv))
    return [Tensor.randn(*shape, dtype=dtypes.float32).cast(dtype).realize() for shape in shapes]
  try:
    tensors = safe_load(config.input)
    loaded = [tensors[name].to(Device.DEFAULT).realize() for name in ("q", "k", "v")]
  except Exception as error:  # an invalid header can make tinygrad's reader raise anything
    raise Usage(f"INPUT={config.input} is not a safetensors file with q, k and v: {reason(error)}") from error
  return [x.cast(DTYPE_NAMES[config.dtype] if config.dtype else x.dtype).contiguous().realize() for x in loaded]


@dataclass(frozen=True)
class Problem:
  """Inputs, and the kernel to run on them.

  Attributes:
    launch: on several devices that of one of them.
    spec: of the whole.
    divided: how several devices divide the work; None on one.
  """

  q: Tensor
  k: Tensor
  v: Tensor
  launch: Launch
  spec: AttentionSpec
  divided: Sharded | ContextParallel | None = None

  @property
  def devices(self) -> tuple[str, ...]:
    return devices_of(self.q.device)


def prepare(config: Config) -> Problem:
  """Load the inputs and choose the kernel.

  Raises:
    Usage: the inputs do not fit together, or no kernel supports them.
  """
  q, k, v = inputs(config)
  try:
    spec = make_spec(q, k, v, Arguments(is_causal=bool(config.causal), enable_gqa=True, return_lse=True))
  except (TypeError, ValueError) as error:
    raise Usage(str(error)) from error
  try:
    if config.gpus == 1:
      return Problem(q, k, v, launch_on(spec, Device.DEFAULT), spec)
    q, k, v = (x.shard(devices(config.gpus), shard_axis(config, spec)).realize() for x in (q, k, v))
    given = Arguments(is_causal=bool(config.causal), enable_gqa=True, return_lse=True)
    found = divided(q, k, v, spec, given)
    assert found is not None
    launch = found.launch()
    return Problem(q, k, v, next(iter(launch.values())) if isinstance(launch, dict) else launch, spec, found)
  except NoKernel as error:
    raise Usage(str(error)) from error


def devices(count: int) -> tuple[str, ...]:
  """Return the first `count` devices of the default device's kind."""
  kind = Device.DEFAULT.split(":")[0]
  return tuple(Device.canonicalize(f"{kind}:{i}") for i in range(count))


def shard_axis(config: Config, spec: AttentionSpec) -> int:
  """Return the axis that SHARD names, or the first that the devices can divide. Raises Usage if there is none."""
  sizes = {"batch": (spec.B,), "heads": (spec.Hq, spec.Hkv), "sequence": (spec.M, spec.N)}
  for axis, name in enumerate(SHARDS):
    if config.shard in ("", name) and not any(n % config.gpus for n in sizes[name]):
      return axis
  raise Usage(f"GPUS={config.gpus} do not divide {config.shard or 'batch, heads or sequence'} of this problem evenly")


def outputs(spec: AttentionSpec) -> tuple[Tensor, Tensor]:
  """Return new buffers for the output and the LSE."""
  o = Tensor.empty(spec.B, spec.Hq, spec.M, spec.Dv, dtype=spec.dtype)
  return o, Tensor.empty(spec.B, spec.Hq, spec.M, dtype=dtypes.float32)


def poison(*buffers: Tensor) -> None:
  """Fill outputs with NaN, so that elements which a kernel does not write are detected.

  By setting bits of what is there: clang 19 does not end on constants of bfloat16 for Intel CPUs with AVX512-BF16.
  """
  for x in buffers:
    size = x.dtype.itemsize
    bits = x.bitcast({1: dtypes.uchar, 2: dtypes.ushort, 4: dtypes.uint}[size])
    x.assign((bits | (1 << 8 * size - 1) - 1).bitcast(x.dtype)).realize()


def jitted(problem: Problem, o: Tensor, lse: Tensor, times: int = 1) -> Callable[[], None]:
  """Return a function that runs the kernel `times` times, writing `o` and `lse`; its third call is the first replay.

  The inputs are bound at capture, as within a model, because tinygrad takes about 0.05 ms to check each argument of a
  TinyJit.
  """
  p = problem

  @TinyJit
  def run() -> tuple[Tensor, Tensor]:
    out, sums = o, lse
    for _ in range(times):
      out, sums = forward(p.launch, p.q, p.k, p.v, out, sums)
    Tensor.realize(out, sums)
    return out, sums

  def call() -> None:
    run()

  return call


def replayed(problem: Problem, times: int = 1) -> Callable[[], tuple[Tensor, Tensor]]:
  """Return a function that runs the attention `times` times and returns the output and the LSE; see `jitted`.

  From the second call on it writes the same buffers.
  """
  if problem.divided is not None:
    return TinyJit(lambda: [realized(*over_devices(problem)) for _ in range(times)][-1])
  o, lse = outputs(problem.spec)
  call = jitted(problem, o, lse, times)

  def run() -> tuple[Tensor, Tensor]:
    call()
    return o, lse

  return run


def realized(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
  """Realize an output and its LSE together."""
  Tensor.realize(out, lse)
  return out, lse


def over_devices(p: Problem) -> tuple[Tensor, Tensor]:
  """Return the output and the LSE of a problem that several devices divide."""
  return attention(p.q, p.k, p.v, is_causal=p.spec.is_causal, enable_gqa=True, return_lse=True, backend="kernel")


def wait(on: tuple[str, ...] = ()) -> None:
  """Wait until these devices, or the default device, have finished all work."""
  for device in on or (Device.DEFAULT,):
    Device[device].synchronize()


def measure(problem: Problem, count: int) -> tuple[Tensor, Tensor, list[float]]:
  """Run the kernel `count` times on outputs filled with NaN; return the last output and LSE, and each run's seconds."""
  call = replayed(problem)
  o, lse = call()  # TinyJit compiles, then captures, then replays
  seconds: list[float] = []
  for warm_up in (True, *(False for _ in range(count))):
    poison(o, lse)
    wait(problem.devices)
    start = time.perf_counter()
    o, lse = call()
    wait(problem.devices)
    if not warm_up:
      seconds.append(time.perf_counter() - start)
      print(f"run {len(seconds)}/{count}  {seconds[-1] * 1e3:10.3f} ms  {speed(problem.spec, seconds[-1])}")
  return o, lse, seconds


def speed(spec: AttentionSpec, seconds: float) -> str:
  """Return the speed as text: in GFLOP/s, or in TFLOP/s from 1000 GFLOP/s on."""
  gflops = spec.flops / seconds / 1e9
  return f"{gflops:.1f} GFLOP/s" if gflops < 1000 else f"{gflops / 1e3:.1f} TFLOP/s"


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
  shape = f"B={s.B} H={s.Hq} HKV={s.Hkv} M={s.M} N={s.N} D={s.Dk} DV={s.Dv}"
  source = f" from {config.input}" if config.input else ""
  print(f"problem  {shape} {dtype_name(s.dtype)}{' causal' * s.is_causal}{source}")
  with profile() as counts:
    o, lse, seconds = measure(problem, config.cnt)
  if counts.kernels:  # on the emulator, over all runs
    print(counts)
  print(f"best     {min(seconds) * 1e3:10.3f} ms  {speed(s, min(seconds))}")
  reports: list[Report] = []
  if config.verify:
    schedule = problem.launch.schedule
    products = {"tf32": s.tf32 and schedule.tf32, "cut": schedule.cuts and s.dtype in DTYPES_8}
    reports = verify(problem.q, problem.k, problem.v, o, lse, is_causal=s.is_causal, progress=True, **products)
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
