"""`python -m uopattn.check`: checks and times every kernel that serves this machine, and writes a report to send.

Exit status: 0 if all is right, 1 if a kernel is wrong, 2 if that could not be determined, as where no kernel serves
any probe, 130 if it was interrupted.
"""

import argparse
import sys
from pathlib import Path

from tinygrad import Device
from tinygrad.helpers import tqdm

from uopattn.dsl.schedule import Schedule
from uopattn.measure.program import Usage, check_writable, default_target, exit_status, is_stream, take_device
from uopattn.plan.dispatch import NoKernel, all_schedules_on
from uopattn.plan.target import is_emulated
from uopattn.runtime.machine import usable_cores
from uopattn.trust.cover import probes_of
from uopattn.trust.outcome import ProbeProcess, outcomes
from uopattn.trust.report import CheckReport, KernelRecord, compared

MOST_JOBS = 8  # processes at once: each needs some memory of the device
EPILOG = """\
Each kernel runs small attentions with every feature, dtype and kind of size that it serves, in a process of its own,
and their results are compared with a float64 reference. It takes some minutes. The speeds are GFLOP/s on contiguous
inputs of one size, beside tinygrad's own attention and tinygrad's product of two matrices.

The report has the names and versions of the card, its driver, the compiler and the system, and what came of each
attention. In messages of errors, the names of the user and the host are replaced, and so are the working folder and
those of the user, of this program, of Python, and for temporary files; other paths stay. Please send it to the
project."""


def run(kernels: list[str], jobs: int, quick: bool, timed: bool, file: str | None, other: CheckReport | None) -> int:
  """Check all kernels, print the report and write it; return the exit status.

  Args:
    kernels: names of those to check; [] for all.
    jobs: processes at once.
    timed: whether to measure speeds.
    file: where to write the report to.
    other: a report to show beside it.

  Raises:
    Usage: the device has no kernels, or none of these names.
  """
  target, device = default_target(), Device.DEFAULT
  passes = [(x, backward) for backward in (False, True) for x in _schedules(backward)]
  names = list(dict.fromkeys(x.name for x, _ in passes))
  if unknown := set(kernels) - set(names):
    raise Usage(f"--kernel {min(unknown)} is not for {target}; accepted are {', '.join(names)}")
  report = CheckReport.new(device, quick)
  print(report.title, flush=True)
  try:
    for schedule, backward in passes:
      if not kernels or schedule.name in kernels:
        report.kernels.append(KernelRecord(schedule.name, backward))
        _check(report.kernels[-1], schedule, device, jobs, quick, timed and not is_emulated(device))
        if file and not is_stream(file):
          report.write(file)
    report.finished = True
  finally:  # interrupted, it keeps what it has
    print(report.table())
    for text in report.failures():
      print(f"  {text}")
    print(report.verdict(), flush=True)
    if file:
      report.write(file)
      print(f"wrote {file}; --help says what it tells of this machine")
  if other is not None:
    print(compared(report, other))
  return 1 if report.failures() else 0 if report.is_right else 2


def _schedules(backward: bool) -> tuple[Schedule, ...]:
  try:
    return all_schedules_on(default_target(), backward)
  except NoKernel as error:
    raise Usage(str(error)) from error


def _check(kernel: KernelRecord, schedule: Schedule, device: str, jobs: int, quick: bool, timed: bool) -> None:
  """Check a kernel, and time it."""
  probes, label = probes_of(schedule, kernel.backward, quick), f"{kernel.name}{' gradients' * kernel.backward}"
  for probe, outcome in tqdm(outcomes(probes, device, jobs), desc=label, total=len(probes), disable=None):
    kernel.add(probe, outcome)
  if timed and kernel.is_right:
    with ProbeProcess(device) as process:
      kernel.add_speed(process.speed(kernel.name, kernel.backward) or {})


def main() -> int:
  """Parse the command line and check; return the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m uopattn.check",
    description=(__doc__ or "").splitlines()[0].split(": ", 1)[1],
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--json", metavar="FILE", help="write the report, into a file after each kernel too")
  parser.add_argument("--quick", action="store_true", help="one attention for each dtype and kind of shape")
  parser.add_argument(
    "--kernel", metavar="NAME", action="append", default=[], help="check this kernel; may be repeated"
  )
  parser.add_argument(
    "--jobs", metavar="N", type=_count, default=_jobs(), help="processes at once (default %(default)s)"
  )
  parser.add_argument("--no-speed", action="store_true", help="measure no speeds")
  parser.add_argument(
    "--compare", metavar="FILE", nargs="+", help="show a report beside this one; with two files nothing is checked"
  )
  args = parser.parse_args()

  def job() -> int:
    reports = [_read(x) for x in args.compare or ()]
    if len(reports) > 2:
      raise Usage(f"--compare takes one file or two, and was given {len(reports)}")
    if len(reports) == 2:
      print(compared(*reports))
      return 0
    if args.json:
      check_writable(f"--json {args.json}", args.json)
    take_device("uopattn.check")
    return run(args.kernel, args.jobs, args.quick, not args.no_speed, args.json, reports[0] if reports else None)

  return exit_status("uopattn.check", job)


def _jobs() -> int:
  """Return the number of processes at once: most of the time is that of compiling, on a core each."""
  return max(1, min(usable_cores() // 2, MOST_JOBS))


def _count(text: str) -> int:
  if not (text.isascii() and text.isdigit() and int(text)):
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
  return int(text)


def _read(file: str | Path) -> CheckReport:
  try:
    return CheckReport.read(file)
  except OSError as error:
    raise Usage(f"--compare {file}: {error.strerror}") from error


if __name__ == "__main__":
  sys.exit(main())
