"""Compiling kernels ahead, several at once."""

import contextlib
import functools
import itertools

from tinygrad import Context
from tinygrad.engine import worker
from tinygrad.helpers import ALLOW_DEVICE_USAGE, CACHELEVEL, DEV, PARALLEL, tqdm

from uopattn.plan.dispatch import delta_launch, stages, sums_launches
from uopattn.plan.launch import Launch
from uopattn.runtime.device import kind_of
from uopattn.runtime.program_cache import NotCachedError, only_cached
from uopattn.tuning.case import Case, Choice

Job = tuple[Case, Choice | None]
"""What one process compiles: a case, and a choice or None for the model's."""

FEWEST = 4  # jobs: to start processes takes as long as to compile two


def compile_all(jobs: list[Job]) -> None:
  """Fill tinygrad's cache on disk, by its PARALLEL processes; nothing is done where that does not help."""
  # The cache is how the processes hand over what they made; the emulator's kernels are not kept by processes.
  if PARALLEL < 2 or CACHELEVEL < 1 or not jobs or kind_of(jobs[0][0].device) == "EMU":
    return
  missing = itertools.islice((i for i, job in enumerate(jobs) if not _is_cached(job)), FEWEST)
  if len(indices := list(missing)) < FEWEST:
    return
  jobs = jobs[indices[0] :]
  had_pool, pool = worker.worker_pool is not None, worker.get_worker_pool()
  if pool is None:  # in a process that may have no children
    return
  try:
    made = pool.imap_unordered(functools.partial(_build, str(DEV)), jobs)
    for _ in tqdm(made, desc="compiling", total=len(jobs), disable=None):
      pass
  finally:
    if not had_pool:  # a process holds memory of a GPU
      worker.terminate_worker_pool()


def _is_cached(job: Job) -> bool:
  """Return whether the kernels of a job are in the cache; then this process has loaded them."""
  try:
    with only_cached():
      for launch in kernels_of(job):
        launch.build(job[0].device)
  except NotCachedError:
    return False
  except Exception:  # it comes again where the kernel is used
    return True
  return True


def _build(dev: str, job: Job) -> None:
  """Compile the kernels of a job in a worker. An error is not reported: it comes again where the kernel is loaded."""
  ALLOW_DEVICE_USAGE.value = 1  # for good: the devices are closed when the worker ends
  with Context(DEV=dev), contextlib.suppress(Exception):
    for launch in kernels_of(job):
      launch.build(job[0].device)


def kernels_of(job: Job) -> list[Launch]:
  """Return all kernels of a forward pass, or of a backward pass. Raises NoKernel."""
  case, choice = job
  launches = (None if choice is None else case.launches(choice)) or case.model()
  if not case.backward:
    return list(stages(launches[0]))
  return [*launches, delta_launch(case.spec, case.target, False), *sums_launches(launches)]
