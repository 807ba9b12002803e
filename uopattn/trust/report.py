"""The report of `python -m uopattn.check`: its record, without private names, and its tables."""

import datetime
import getpass
import json
import math
import os
import platform
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinygrad import Device

from uopattn.measure.program import is_stream
from uopattn.plan.target import shortened, target_of
from uopattn.runtime.device import kind_of
from uopattn.runtime.gpu import driver, gpu_name
from uopattn.runtime.machine import cpu_name, machine_record
from uopattn.runtime.versions import versions
from uopattn.trust.cards import family
from uopattn.trust.outcome import ROOT, Outcome
from uopattn.trust.probe import Probe
from uopattn.trust.verdicts import REFUTED, RIGHT, UNSERVED

FORMAT = 1
SHORTEST = 3  # characters of a name that is removed as private
COLUMNS = ("kernel", "pass", "right", "wrong", "worst error", "GFLOP/s", "tinygrad", "product")


@dataclass
class KernelRecord:
  """What is known of a kernel.

  Attributes:
    backward: whether it computes gradients.
    probes: records of probes with what came of them, without those that the kernel does not serve.
    speed: see `uopattn.trust.speed`; {} until it is measured.
  """

  name: str
  backward: bool
  probes: list[dict[str, Any]] = field(default_factory=list)
  speed: dict[str, Any] = field(default_factory=dict)

  def add(self, probe: Probe, outcome: Outcome) -> None:
    """Add a probe, unless the kernel does not serve it."""
    if outcome.verdict == UNSERVED:
      return
    errors = {name: x if math.isfinite(x) else None for name, x in (outcome.errors or {}).items()}
    record = asdict(outcome) | {"reason": without_private(outcome.reason), "errors": errors}
    self.probes.append({"probe": asdict(probe), **record})

  def add_speed(self, speed: dict[str, Any]) -> None:
    """Add what was measured, or why nothing could be."""
    self.speed = {name: without_private(x) if name == "reason" else x for name, x in speed.items()}

  @property
  def counts(self) -> Counter[str]:
    """How often each verdict occurs."""
    return Counter(x["verdict"] for x in self.probes)

  @property
  def is_right(self) -> bool:
    """Whether there are probes and all are right."""
    return set(self.counts) == {RIGHT}

  @property
  def failed(self) -> list[dict[str, Any]]:
    """The probes that are wrong, fail or hang."""
    return [x for x in self.probes if x["verdict"] in REFUTED]

  def row(self) -> list[str]:
    """Return its row of the table."""
    errors = [x for probe in self.probes for x in probe["errors"].values() if x is not None]
    speeds = [self.speed.get(name) for name in ("uopattn", "tinygrad", "product")]
    return [
      self.name,
      "gradients" if self.backward else "forward",
      str(self.counts[RIGHT]),
      str(len(self.failed))
      + f" + {len(self.probes) - len(self.failed) - self.counts[RIGHT]} not run"
      * (len(self.probes) > len(self.failed) + self.counts[RIGHT]),
      f"{max(errors):.1e}" if errors else "-",
      *("-" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in speeds),
    ]


@dataclass
class CheckReport:
  """A report.

  Attributes:
    machine: the device, its driver, and all versions.
    kernels: in the order in which they are checked.
    quick: whether only some probes of each were to run.
    finished: whether all kernels were checked.
  """

  machine: dict[str, Any]
  kernels: list[KernelRecord] = field(default_factory=list)
  quick: bool = False
  finished: bool = False

  @classmethod
  def new(cls, device: str, quick: bool = False) -> "CheckReport":
    """Return an empty report on a device."""
    kind, target = kind_of(device), target_of(device)
    of_host = machine_record()
    return cls(
      {
        "date": datetime.date.today().isoformat(),
        "card": cpu_name() if kind == "CPU" else gpu_name(device) or f"{kind} {target.arch}",
        "device": kind,
        "arch": family(device),
        "target": str(target),
        "units": target.threads if kind == "CPU" else target.units,
        "driver": driver(device),
        "compiler": versions(device)["compiler"],
        "kernels": versions(device)["kernels"],
        "renderer": type(Device[device].renderer).__name__,
        **{name: of_host[name] for name in ("cpu", "cores", "versions")},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
      },
      quick=quick,
    )

  @classmethod
  def read(cls, file: str | Path) -> "CheckReport":
    """Read a report.

    Raises:
      ValueError: the file does not hold one.
      OSError: it cannot be read.
    """
    try:
      content = json.loads(Path(file).read_text())
      if content.pop("format") != FORMAT:
        raise ValueError("another format")
      kernels = [KernelRecord(**x) for x in content["kernels"]]
      return cls(content["machine"], kernels, content["quick"], content["finished"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
      raise ValueError(f"{file} is not a report that `python -m uopattn.check --json` wrote") from error

  def write(self, file: str | Path) -> None:
    """Write the report. An older file stays whole until this one is, if another can be written beside it."""
    text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"
    target = Path(file).resolve()  # a link stays
    if is_stream(file) or not os.access(target.parent, os.W_OK):
      Path(file).write_text(text)
      return
    unfinished = target.with_name(f"{target.name}.part")
    unfinished.write_text(text)
    unfinished.replace(target)

  @property
  def title(self) -> str:
    """The card with its driver, as one line."""
    m = self.machine
    return f"{m['card']} ({m['device']} {shortened(m['arch'])}), {m['driver']}, {m['compiler']}"

  @property
  def served(self) -> list[KernelRecord]:
    """The kernels that serve any probe."""
    return [x for x in self.kernels if x.probes]

  @property
  def is_right(self) -> bool:
    """Whether there are probes, and all are right."""
    return bool(self.served) and all(x.is_right for x in self.served)

  def verdict(self) -> str:
    """Return what the report shows, as a sentence."""
    served = self.served
    wrong = [x for x in served if x.failed]
    undecided = [x.name for x in served if not x.failed and not x.is_right]
    done = "" if self.finished else " so far"
    if wrong:
      count = sum(len(x.failed) for x in wrong)
      names = ", ".join(dict.fromkeys(x.name for x in wrong))
      return f"NOT TO BE TRUSTED{done}: wrong probes: {count}, of {names}. Please send us the report (--json FILE)."
    if not served:
      return f"UNDECIDED{done}: {'no kernel serves any of the probes' if self.finished else 'there are no results'}."
    if undecided:
      return f"UNDECIDED{done}: not all probes of {', '.join(dict.fromkeys(undecided))} could run."
    count = sum(len(x.probes) for x in served)
    return f"RIGHT{done}: all {count} probes of {len(served)} passes by kernels agree with the float64 reference."

  def table(self) -> str:
    """Return the kernels that serve any probe, one per row."""
    return aligned([list(COLUMNS), *(x.row() for x in self.served)])

  def failures(self) -> list[str]:
    """Return a line for each probe that is wrong, fails or hangs."""
    return [f"{Probe.read(x['probe'])} {x['verdict']}: {x['reason']}" for k in self.kernels for x in k.failed]


def compared(a: CheckReport, b: CheckReport) -> str:
  """Return two reports side by side: right and wrong probes of each kernel, and the ratio of their speeds."""
  rows = [["kernel", "pass", "right", "wrong", "GFLOP/s", "right", "wrong", "GFLOP/s", "second / first"]]
  kernels = [{(x.name, x.backward): x for x in report.served} for report in (a, b)]
  for name, backward in dict.fromkeys([*kernels[0], *kernels[1]]):
    both = [x.get((name, backward)) for x in kernels]
    cells = [["-"] * 3 if x is None else [*x.row()[2:4], x.row()[5]] for x in both]
    speeds = [None if x is None else x.speed.get("uopattn") for x in both]
    ratio = "-" if None in speeds else f"{speeds[1] / speeds[0]:.2f}"  # type: ignore[operator]
    rows.append([name, "gradients" if backward else "forward", *cells[0], *cells[1], ratio])
  return f"first   {a.title}\nsecond  {b.title}\n{aligned(rows)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Return a table as text, its first two columns to the left and the others to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(x.ljust(n) if i < 2 else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True))).rstrip()
    for row in rows
  )


def without_private(text: str) -> str:
  """Return a message with other names for the user, the host, and the folders that it most likely names.

  They are the user's, the working one, that of temporary files, Python's and this package's. Other paths stay.
  """
  folders = {str(Path.home()): "~", os.getcwd(): ".", tempfile.gettempdir(): "TMP", str(ROOT): "UOPATTN"}
  folders = dict.fromkeys((sys.prefix, sys.base_prefix), "PYTHON") | folders
  names = dict.fromkeys((_user(), socket.gethostname()), "***")
  private = {name: x for name, x in (folders | names).items() if len(name) >= SHORTEST}
  for name in sorted(private, key=len, reverse=True):
    text = text.replace(name, private[name])
  return text


def _user() -> str:
  try:
    return getpass.getuser()
  except (KeyError, OSError):  # a user without a name
    return ""
