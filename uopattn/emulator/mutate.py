"""Deletion of a kernel's barriers, fences and waits, one at a time, to see whether the checks notice.

If no check notices, the deleted statement is redundant, or a check is missing. The tests do this with every kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instructions import is_wave_fence

from .errors import KernelError, checking, instruction_of

if TYPE_CHECKING:
  from .program import Program

WAITS = (
  "bulk_wait",
  "bulk_wait_read",
  "cp_async_wait",
  "fence_proxy_async",
  "mbarrier_fence",
  "mbarrier_wait",
  "named_barrier_sync",
  "semaphore_wait",
  "tensor_map_acquire",
  "tile_config",
  "tile_release",
  "wgmma_wait",
)


@dataclass(frozen=True)
class Outcome:
  """The result of deleting one barrier or wait; `line` is its place in the linearised UOps of `kernel`."""

  kernel: str
  line: int
  what: str
  caught: KernelError | None

  def __str__(self) -> str:
    verdict = f"{type(self.caught).__name__}: {self.caught}" if self.caught else "nothing noticed: it is redundant"
    return f"{self.kernel} without the {self.what} at line {self.line}: {verdict}"


_replace: Callable[["Program"], "Program"] | None = None


def mutated(program: "Program") -> "Program":
  """Return the program to run in place of `program`: `program` itself unless a mutation is active."""
  return program if _replace is None else _replace(program)


@contextmanager
def _replacing(replace: Callable[["Program"], "Program"]) -> Iterator[None]:
  global _replace
  if _replace is not None:
    raise RuntimeError("a mutation is being tried already")
  _replace = replace
  try:
    yield
  finally:
    _replace = None


def _synchronises(u: UOp) -> str | None:
  if u.op is Ops.BARRIER:
    return None if is_wave_fence(u) else "barrier"
  if u.op is Ops.CUSTOM and (instruction := instruction_of(u.arg)) is not None and instruction.name in WAITS:
    return instruction.name
  return None


def delete_each_barrier(run: Callable[[], object], kernel: str | None = None) -> list[Outcome]:
  """Call `run` unchanged, then once without each barrier and each statement of WAITS of the kernels that it launches.

  run: launches kernels on the emulator with fresh outputs, as `lambda: Tensor.custom_kernel(...)[0].realize()` does; it
  must launch the same kernels each time. kernel: mutate only the kernel with this name; None for all. Raises
  KernelError if the unchanged `run` fails, and RuntimeError if the checks are off.
  """
  if not checking():
    raise RuntimeError("the checks are off (EMU_CHECK=0), so nothing could notice")
  seen: dict[str, Program] = {}

  def record(program: "Program") -> "Program":
    if kernel in (None, program.name):
      seen.setdefault(program.name, program)
    return program

  with _replacing(record):
    run()
  outcomes = []
  for name, program in seen.items():
    for line, u in enumerate(program.uops):
      if (what := _synchronises(u)) is not None:
        outcomes.append(Outcome(name, line, what, _without(run, program, u)))
  return outcomes


def _without(run: Callable[[], object], program: "Program", u: UOp) -> KernelError | None:
  """Return the error that `run` raises when `program` lacks the line `u`, or None."""
  from . import tracks  # imported here, so that registering the device does not load numpy

  broken = program.without(u)
  with _replacing(lambda launched: broken if launched.uops == program.uops else launched):
    for order in tracks.ORDERS if program.apart else tracks.ORDERS[:1]:
      try:
        with tracks.ordered(order):
          run()
      except KernelError as error:
        return error
  return None
