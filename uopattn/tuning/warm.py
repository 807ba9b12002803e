"""`warm`: kernels compiled before they are needed."""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinygrad import Context, Device
from tinygrad.engine import worker
from tinygrad.helpers import ALLOW_DEVICE_USAGE, CACHELEVEL, DEV, PARALLEL, tqdm

from uopattn.plan.chosen import launch_on
from uopattn.plan.dispatch import delta_launch, dispatch, dispatch_backward, stages, sums_launch
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.spec.spec import AttentionSpec

Shape = str | Mapping[str, Any]
Job = tuple[AttentionSpec, str, Any, int, bool]  # attention, device, tiles, splits, whether for gradients


def warm(what: Shape | Iterable[Shape], device: str | None = None, *, backward: bool = False) -> int:
  """Compile kernels ahead, so that a service's first request need not wait for them; return their number.

  The kernels stay in this process and in tinygrad's cache on disk. Several are compiled at once, by tinygrad's
  PARALLEL processes. While tuning is on, attentions are tuned first, see `uopattn.tune`.

  Args:
    what: attentions, each as the keys of `python -m uopattn.run`: "B=1 H=32 HKV=8 N=4096 D=128 DTYPE=half CAUSAL=1", or
      a dict of these keys. Their q, k and v are contiguous; views and other arguments are compiled when they are met.
    device: a tinygrad device; None is the default one.
    backward: also the kernels of the gradients.

  Raises:
    ValueError: a key or value is invalid, the shapes do not fit together, or no kernel serves them.

  Example:
    >>> import uopattn
    >>> uopattn.warm(["H=2 N=64 D=32 DTYPE=float", {"H": 2, "M": 1, "N": 64, "D": 32, "DTYPE": "float"}])
    2
  """
  device = Device.canonicalize(device)
  jobs = [job for spec in _specs(what, device) for job in _jobs(spec, device, backward)]
  launches = list(dict.fromkeys(x for job in jobs for x in _launches(job)))
  # The cache on disk is how the processes hand over what they made; the emulator's kernels are not kept by processes.
  if len(jobs) > 1 and PARALLEL > 1 and CACHELEVEL >= 1 and device.split(":")[0] != "EMU":
    _in_processes(jobs)
  for launch in tqdm(launches, desc="loading kernels", disable=None):
    launch.build(device)
  return len(launches)


def _in_processes(jobs: list[Job]) -> None:
  """Fill the cache on disk by several processes."""
  had_pool, pool = worker.worker_pool is not None, worker.get_worker_pool()
  if pool is None:
    return
  try:
    made = pool.imap_unordered(functools.partial(_build, str(DEV)), jobs)
    for _ in tqdm(made, desc="compiling", total=len(jobs), disable=None):
      pass
  finally:
    if not had_pool:  # a process holds memory of a GPU
      worker.terminate_worker_pool()


def _build(dev: str, job: Job) -> None:
  """Compile the kernels of a job in a worker. An error is not reported: it comes again where the kernel is loaded."""
  ALLOW_DEVICE_USAGE.value = 1  # for good: the devices are closed when the worker ends
  with Context(DEV=dev), contextlib.suppress(Exception):
    for launch in _launches(job):
      launch.build(job[1])


def _specs(what: Shape | Iterable[Shape], device: str) -> list[AttentionSpec]:
  from uopattn.measure.command_line import Usage
  from uopattn.tuning.command import config_of, spec_of  # which measures: not needed by whoever imports uopattn

  shapes = [what] if isinstance(what, str | Mapping) else list(what)
  found = []
  for shape in shapes:
    if not isinstance(shape, str | Mapping):
      raise TypeError(f"what holds {shape!r}; it must be text such as 'N=1024 D=64', or a dict of such keys")
    words = shape.split() if isinstance(shape, str) else [f"{key}={value}" for key, value in shape.items()]
    try:
      found.append(spec_of(config_of(words), device))
    except Usage as error:
      raise ValueError(f"what: {error}") from error
  return found


def _jobs(spec: AttentionSpec, device: str, backward: bool) -> list[Job]:
  launch = launch_on(spec, device)
  job = (spec, device, launch.tiles, launch.splits, False)
  return [job, (spec, device, None, 1, True)] if backward else [job]


def _launches(job: Job) -> list[Launch]:
  spec, device, tiles, splits, gradients = job
  target = target_of(device)
  if not gradients:
    return list(stages(replace(dispatch(spec, target, tiles), splits=splits)))
  found = [*dispatch_backward(spec, target), delta_launch(spec, target, False)]
  outputs = (x for launch in found for x in launch.buffers() if x.name in ("dk", "dv"))
  parts = ((x.shape[1] // spec.Hkv, x.shape[3]) for x in outputs if x.dtype != spec.stored or x.shape[1] > spec.Hkv)
  return found + [sums_launch(spec, *x) for x in parts]
