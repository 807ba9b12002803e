"""Launching of a kernel: its workgroups run in batches, each with its own lanes and memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import round_up

from uopattn.dsl.target import MAX_THREADS, lds_limit

from . import counters
from .copies import Copies
from .errors import SPACES, LaunchError, Race, checking
from .hopper import THREADS
from .lanes import Run, Shape, wave_size
from .memory import LDS, Global, Registers
from .program import Program, execute
from .semaphores import Sums
from .tiles import Tiles
from .tracks import MOST, REGISTERS, Tracks

# Lanes per batch: enough to make numpy's cost per call negligible, few enough that all values fit in 64 MiB.
BATCH_LANES, BATCH_VALUES = 8192, 1 << 24


def launch(
  program: Program,
  buffers: Sequence[Any],
  global_size: Sequence[int],
  local_size: Sequence[int],
  arguments: Sequence[int] = (),
) -> None:
  """Execute a kernel.

  buffers: the bytes of each buffer parameter, in order; global_size, local_size: workgroups and threads along x, y, z;
  arguments: the kernel's integers. Raises KernelError.
  """
  profile = counters.active()
  count = profile.of(program.name) if profile is not None else None
  if count is not None:
    count.launches += 1
  _check_launch(program, buffers, local_size)
  data = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
  writers = [np.zeros(x.size, np.int32) for x in data]
  groups, threads = int(np.prod(global_size)), int(np.prod(local_size))
  batch = 1 if program.asynchronous else max(1, min(BATCH_LANES, BATCH_VALUES // len(program.uops)) // threads)
  sums = Sums()
  with np.errstate(all="ignore"):  # infinities and integer wraparound are what the hardware gives too
    for first in range(0, groups, batch):
      shape = Shape(min(batch, groups - first), threads, wave_size(program.arch))
      run = Run(program.name, program.arch, shape, tuple(local_size), checking(), count)
      run.first_group, run.global_size, run.arguments = first, tuple(global_size), tuple(arguments)
      _fill(program, run, data, writers)
      run.sums = sums.of_batch()
      if program.asynchronous:
        # As many as there are for each lane, but ptxas gives a kernel no more than the most that it takes later.
        at_first = min(program.most_registers or MOST, REGISTERS // round_up(threads, THREADS) // 8 * 8)
        run.registers = [at_first] * shape.waves
        by_warps = program.uses("semaphore_wait") or program.uses("ldmatrix")
        run.tracks = Tracks(run, partial(execute, program.steps, run), by_warps)
        run.tracks.finish()
      else:
        execute(program.steps, run)
      if run.check and run.copies is not None and run.copies.loads:
        raise run.fail(Race, program.uops[-1], "ends while a bulk copy is under way")
      if run.check and run.sums.flights:
        raise run.fail(Race, program.uops[-1], "ends while a bulk copy reads LDS or adds to global memory")
      if run.check and run.copies is not None and run.copies.started:
        lanes = run.copies.started[0].lanes
        raise run.fail(Race, program.uops[-1], "ends while a copy to LDS is under way", lanes)
      if run.check and run.tiles is not None and run.tiles.configured.any():
        raise run.fail(LaunchError, program.uops[-1], "ends without tile_release", np.flatnonzero(run.tiles.configured))


def _check_launch(program: Program, buffers: Sequence[Any], local_size: Sequence[int]) -> None:
  name, arch = program.name, program.arch
  threads = int(np.prod(local_size))
  if threads > MAX_THREADS:
    raise LaunchError(f"kernel {name}: a workgroup has {threads} threads, but {arch} allows {MAX_THREADS}")
  lds = [u.max_numel() * u.dtype.itemsize for u in program.buffers if u.addrspace is AddrSpace.LOCAL]
  used = sum(-(-size // 16) * 16 for size in lds)
  if used > (limit := lds_limit(arch)):
    raise LaunchError(f"kernel {name}: a workgroup uses {used} bytes of LDS, but {arch} has {limit}")
  if len(buffers) != len(program.params):
    raise LaunchError(f"kernel {name}: {len(buffers)} buffers for {len(program.params)} parameters")


def _fill(program: Program, run: Run, data: list[np.ndarray], writers: list[np.ndarray]) -> None:
  """Set up the values and the memory of a run."""
  run.values = list(program.template)
  if any(map(program.uses, ("cp_async", "tma_load", "bulk_load"))):
    run.copies = Copies(np.zeros(run.shape.lanes, np.int64))
  run.stamped, run.asynchronous, run.contracted = program.uses("mbarrier"), program.asynchronous, program.contracted
  if any(map(program.uses, ("wgmma", "tma_reduce_add", "tma_store"))):
    run.flights = []
  if program.uses("tile_"):
    run.tiles = Tiles.of(run.shape.lanes)
  arguments = zip(program.params, data, writers, strict=True)
  run.memory = [Global(run, f"argument {u.arg.slot}", x, by) for u, x, by in arguments]
  for u in list(program.buffers)[len(program.params) :]:
    size = u.max_numel()
    name = f"{SPACES[u.addrspace]} {u.arg.slot} ({str(u.dtype).removeprefix('dtypes.')} x {size})"
    if u.addrspace is AddrSpace.LOCAL:
      run.memory.append(LDS(run, name, size * u.dtype.itemsize, program.granule.get(u, u.dtype.itemsize)))
    else:
      run.memory.append(Registers(run, name, u.dtype, size))
