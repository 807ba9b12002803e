"""`python -m uopattn.info`: shows the device, the compiler, and which kernels serve this machine, or why not.

Exit status: 0 if the device that the programs take can be used, 2 if not.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import DEV, Context

from uopattn.dsl import sizes
from uopattn.dsl.schedule import DTYPES, Schedule
from uopattn.dsl.target import GENERIC, Target
from uopattn.measure.program import Usage, choose_device, default_target, exit_status, kinds_with_kernels, reason
from uopattn.plan.bias import mask_bias
from uopattn.plan.dispatch import (
  Kind,
  NoKernel,
  all_schedules_on,
  bias_launch,
  dispatch,
  dispatch_backward,
  every_schedule,
  schedules_on,
)
from uopattn.plan.target import shown, target_of
from uopattn.plan.tiles import tiles_for
from uopattn.runtime.clang import NoCompiler, clang_version, find_clang
from uopattn.runtime.device import kind_of
from uopattn.runtime.machine import machine_record
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import dtype_name

QUERIES = {1024: "", 1: " of few queries"}  # numbers of queries that are tried, with their labels
KEYS, HEAD_SIZE = 1024, 64  # keys and head size of every case


def line(name: str, text: object) -> None:
  print(f"{name:<10} {text}")


def case(dtype: DType, queries: int, of_bias: bool = False) -> AttentionSpec:
  """Return the spec of an attention without a mask, or for the gradient of an additive mask that two heads share."""
  q, k, v = (Tensor.empty(1, 1 + of_bias, n, HEAD_SIZE, dtype=dtype) for n in (queries, KEYS, KEYS))
  mask = Tensor.empty(1, 1, queries, KEYS, dtype=dtype) if of_bias else None
  spec = make_spec(q, k, v, Arguments(return_lse=True, attn_mask=mask))
  return spec if mask is None else replace(spec, bias=mask_bias(sizes(mask)))


def taken(schedule: Schedule, spec: AttentionSpec, target: Target) -> str:
  """Return the name of the schedule chosen for a case ("" if none), for the pass that `schedule` is for."""
  try:
    if spec.bias is not None:
      return bias_launch(spec, target).schedule.name
    launch = dispatch_backward(spec, target)[0] if _is_backward(schedule) else dispatch(spec, target)
  except NoKernel:
    return ""
  return launch.schedule.name


def served(schedule: Schedule, target: Target) -> str:
  """Return which cases a schedule serves on a machine, or why it serves none, as text."""
  if schedule not in _listed(target) and target.device not in schedule.devices:
    of = ["GPUs without matrix units" if x == GENERIC else x for x in schedule.devices]
    return f"not for this machine, for {' and '.join(of)}"
  cases: dict[str, str] = {}
  for dtype in DTYPES:
    for queries, name in QUERIES.items():
      if taken(schedule, case(dtype, queries, _is_of_bias(schedule)), target) == schedule.name:
        cases.setdefault(dtype_name(dtype), name)
  return f"serves {', '.join(x + few for x, few in cases.items())}" if cases else against(schedule, target)


def _listed(target: Target) -> tuple[Schedule, ...]:
  """Return the schedules that a machine has, whether or not they are made for it."""
  try:
    return schedules_on(target) + all_schedules_on(target, backward=True)
  except NoKernel:
    return ()


def _is_backward(schedule: Schedule) -> bool:
  return schedule in every_schedule("backward")


def _is_of_bias(schedule: Schedule) -> bool:
  return schedule in every_schedule("bias")


def against(schedule: Schedule, target: Target) -> str:
  """Return why a schedule for this kind of device serves none of the cases; float16 is tried if it accepts that."""
  dtype = dtypes.float16 if dtypes.float16 in schedule.dtypes else schedule.dtypes[0]
  spec = case(dtype, max(QUERIES), _is_of_bias(schedule))
  try:
    for kernel in schedule.kernels:
      next(tiles_for(schedule, kernel, spec, target))
  except ValueError as error:
    return f"not for this machine: {error}"
  several = _is_backward(schedule) or len(schedule.kernels) > 1  # which pays if there is much to do
  if several and not schedule.preferred(spec, target):
    return f"serves problems for which it is faster than {taken(schedule, spec, target)}, large ones"
  return f"serves only what {taken(schedule, spec, target)} does not"


def other_targets(default: str) -> Iterator[str]:
  """Yield the targets of the other devices that have kernels, or why a device cannot be used.

  Args:
    default: the default device, which is skipped; its name may also have a number and a renderer.
  """
  for device in (kind for kind in kinds_with_kernels() if kind != kind_of(default)):
    try:
      with Context(DEV=device):
        yield shown(target_of(device), device)
    except Exception as error:  # a missing driver can raise anything
      yield f"{device}: none: {reason(error)}"


def report() -> int:
  """Print the whole report; return the exit status."""
  for key, value in machine_record().items():
    line(key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value)
  try:
    line("compiler", f"{find_clang()}: {clang_version()}")
  except (NoCompiler, OSError, subprocess.CalledProcessError) as error:
    line("compiler", f"none: {reason(error)}")
  target = None
  try:
    if said := choose_device():
      line("default", said)
    target = default_target()
    line("device", shown(target, Device.DEFAULT))
  except (Usage, NoCompiler) as error:
    line("device", f"none: {reason(error)}")
  for text in other_targets(DEV.device if target is None else Device.DEFAULT):
    line("another", text)
  if target is None:
    return 2
  names: dict[str, Kind] = {"kernel": "forward", "gradients": "backward", "biases": "bias"}
  for name, kind in names.items():
    try:
      schedules_on(target, kind)
    except NoKernel as error:
      line(name, f"none: {error}")
      continue
    for schedule in every_schedule(kind):
      line(name, f"{schedule.name}: {served(schedule, target)}")
  return 0


def main() -> int:
  """Parse the command line and report; return the exit status."""
  description = (__doc__ or "").splitlines()[0].split(": ", 1)[1]
  argparse.ArgumentParser(prog="python -m uopattn.info", description=description).parse_args()
  return exit_status("uopattn.info", report)


if __name__ == "__main__":
  sys.exit(main())
