"""Counters of running kernels: instructions, bytes moved and LDS bank conflicts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
  """The counts of one kernel over all its launches.

  Instructions are counted once per wave that executes them, barriers, named ones too, once per workgroup, exp2s and
  bytes once per lane.
  """

  launches: int = 0
  matrix: int = 0
  shuffles: int = 0
  barriers: int = 0
  global_read: int = 0
  global_written: int = 0
  lds_read: int = 0
  lds_written: int = 0
  bank_conflicts: int = 0
  exp2s: int = 0


@dataclass(eq=False)
class Profile:
  """Counters by kernel name, in the order of first launch; `str` gives a table. Kernels with the same name add up."""

  kernels: dict[str, Counters] = field(default_factory=dict)

  def of(self, kernel: str) -> Counters:
    """Return the counters of one kernel, which are created at its first launch."""
    return self.kernels.setdefault(kernel, Counters())

  def __str__(self) -> str:
    names = [f.name for f in fields(Counters)]
    rows = [["kernel", *(name.replace("_", " ") for name in names)]]
    rows += [[kernel, *(f"{getattr(c, name):,}" for name in names)] for kernel, c in self.kernels.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
      "  ".join(
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
      )
      for row in rows
    )


_active: list[Profile] = []


@contextmanager
def profile() -> Iterator[Profile]:
  """Count the costs of the kernels launched on the emulator inside the `with` block."""
  _active.append(result := Profile())
  try:
    yield result
  finally:
    _active.remove(result)


def active() -> Profile | None:
  """Return the innermost active profile, if any."""
  return _active[-1] if _active else None
