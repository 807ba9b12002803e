"""Deletion of a kernel's barriers, fences and waits, one at a time, to see whether the checks notice.

If no check notices, the deleted statement is redundant, or a check is missing. The tests do this with every kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instructions import is_wave_fence

from .errors import KernelError, as_text, checking, instruction_of

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
  """The result of deleting one barrier or wait; `line` is its index among the linearised UOps of `kernel`."""

  kernel: str
  line: int
  what: str
  caught: KernelError | None

  def __str__(self) -> str:
    verdict = f"{type(self.caught).__name__}: {self.caught}" if self.caught else "nothing noticed: it is redundant"
    return f"{self.kernel} without the {self.what} at line {self.line}: {verdict}"


@dataclass(frozen=True)
class Launched:
  """A launch of a kernel: the arguments of `launch.launch`, with the bytes that the buffers held before."""

  program: "Program"
  buffers: Sequence[bytes]
  rest: tuple[Sequence[int], ...]

  def again(self, program: "Program") -> None:
    """Launch another program in the same way, on copies of the buffers. Raises KernelError."""
    from .launch import launch  # imported here, so that registering the device does not load numpy

    launch(program, [bytearray(x) for x in self.buffers], *self.rest)


_launches: list[Launched] | None = None


def record(program: "Program", buffers: Sequence[Any], *rest: Sequence[int]) -> None:
  """Note a launch, before it, if barriers are to be deleted."""
  if _launches is not None:
    _launches.append(Launched(program, [bytes(x) for x in buffers], rest))


@contextmanager
def _recording() -> Iterator[list[Launched]]:
  """Yield the launches inside the `with` block, in order."""
  global _launches
  if _launches is not None:
    raise RuntimeError("a mutation is being tried already")
  _launches = []
  try:
    yield _launches
  finally:
    _launches = None


def _synchronises(u: UOp) -> str | None:
  if u.op is Ops.BARRIER:
    return None if is_wave_fence(u) else "barrier"
  if u.op is Ops.CUSTOM and (instruction := instruction_of(u.arg)) is not None and instruction.name in WAITS:
    return instruction.name
  return None


def delete_each_barrier(run: Callable[[], object], kernel: str | None = None) -> list[Outcome]:
  """Call `run`, then launch its kernels again without each barrier and each statement of WAITS, one at a time.

  Every launch is repeated by itself, on the buffers as they were. A name that several kernels have stands for all.

  Args:
    run: launches kernels on the emulator.
    kernel: the name of the kernel to mutate; None for all.

  Raises:
    KernelError: the unchanged `run` fails.
    ValueError: `run` launches no kernel, or none with this name.
    RuntimeError: the checks are off, or kernels run as text.
  """
  if not checking():
    raise RuntimeError("the checks are off (EMU_CHECK=0), so nothing could notice")
  if as_text():
    raise RuntimeError("kernels run as text (EMU_TEXT=1), from which nothing can be deleted")
  with _recording() as launches:
    run()
  programs: dict[tuple[UOp, ...], Program] = {}
  for x in launches:
    if kernel in (None, x.program.name):
      programs.setdefault(tuple(x.program.uops), x.program)
  if not programs:
    names = ", ".join(sorted({x.program.name for x in launches})) or "nothing"
    raise ValueError(f"no kernel {kernel or ''} was launched, but {names}")
  outcomes = []
  for uops, program in programs.items():
    own = [x for x in launches if tuple(x.program.uops) == uops]
    for line, u in enumerate(uops):
      if (what := _synchronises(u)) is not None:
        outcomes.append(Outcome(program.name, line, what, _without(own, program, u)))
  return outcomes


def _without(launches: Sequence[Launched], program: "Program", u: UOp) -> KernelError | None:
  """Return the error that launches of `program` raise when it lacks the line `u`, or None."""
  from . import tracks  # imported here, so that registering the device does not load numpy

  broken = program.without(u)
  for order in tracks.ORDERS if program.asynchronous else tracks.ORDERS[:1]:
    try:
      with tracks.ordered(order):
        for launched in launches:
          launched.again(broken)
    except KernelError as error:
      return error
  return None
