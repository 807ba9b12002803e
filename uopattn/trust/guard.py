"""The self-check: a kernel that is not known to run right on a kind of card proves itself there before it is used.

The first use of a schedule, with its tiles and features, runs a probe of the same kind through the gate, in a process
of its own. The verdict is kept in tinygrad's database on disk, for all processes on this machine.
"""

import functools
import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from tinygrad import Context
from tinygrad.engine.realize import capturing
from tinygrad.helpers import DEV

from uopattn.plan.dispatch import guard_by
from uopattn.plan.launch import Launch
from uopattn.plan.target import is_emulated, target_of
from uopattn.runtime.function import in_function
from uopattn.runtime.gpu import driver
from uopattn.runtime.store import Entry, Store
from uopattn.runtime.versions import product, versions
from uopattn.trust.cards import is_recorded
from uopattn.trust.verdicts import DIED, RIGHT, UNAVAILABLE

if TYPE_CHECKING:  # modules that measure are imported when they are needed, as few processes need them
  from uopattn.trust.probe import Probe

log = logging.getLogger("uopattn")
VERDICTS = Store("uopattn_verdicts", "uopattn.check", "a verdict")
"""An entry has a "key", the probe and the machine; a "verdict", and its "reason"."""
SEND = "please send us what `python -m uopattn.check --json report.json` writes"
_KNOWN: dict[tuple[tuple[Launch, ...], str, str], str] = {}


def against(launches: tuple[Launch, ...], device: str, backward: bool) -> str:
  """Return why these launches may not be used on a device, as one line; "" if they may."""
  if not is_checked(launches[0].schedule.name, device):
    return ""
  case = launches, device, repr(DEV)
  if case not in _KNOWN:
    why_not = _verdict(launches, device, backward)
    if why_not is None:
      return (
        f"{launches[0].schedule.name} has not been checked on this machine, and cannot be in a TinyJit's capture or a "
        "function: call it once outside"
      )
    _KNOWN[case] = why_not
  return _KNOWN[case]


def is_checked(kernel: str, device: str) -> bool:
  """Return whether a kernel is checked before its first use on a device.

  UOPATTN_CHECK=0 turns that off, and 1 forces it for all kernels, also recorded and emulated ones.

  Raises:
    ValueError: UOPATTN_CHECK has another value.
  """
  wanted = os.environ.get("UOPATTN_CHECK", "")
  if wanted not in ("", "0", "1"):
    raise ValueError(f"UOPATTN_CHECK is {wanted!r}; accepted are 0 and 1")
  if wanted:
    return wanted == "1"
  return _is_unknown(kernel, device, repr(DEV))


@functools.cache
def _is_unknown(kernel: str, device: str, dev: str) -> bool:
  """Return whether a kernel is not on the record for a device; `dev` may name another architecture later."""
  return not is_emulated(device) and not is_recorded(kernel, device)


def forget() -> None:
  """Forget what this process knows; the entries on disk stay."""
  _KNOWN.clear()
  _is_unknown.cache_clear()


def _verdict(launches: tuple[Launch, ...], device: str, backward: bool) -> str | None:
  """Return why a kind of launches may not be used; None if nothing is known, and nothing can be found out now."""
  from uopattn.trust.probe import Probe

  probe = Probe.of(launches, backward)
  key = _key(probe, device)
  if (entry := _known(key)) is None:
    with VERDICTS.one_at_a_time():
      entry = _known(key) or _checked(probe, device, key)  # known by a process that was waited for
  return None if entry is None else _why_not(entry, probe)


def _known(key: Entry) -> Entry | None:
  """Return the entry that says how a check went; None if there is none, or the device could not be used then."""
  entry = VERDICTS.read(key)
  return None if entry is None or entry.get("verdict") in (None, UNAVAILABLE) else entry


def _key(probe: "Probe", device: str) -> Entry:
  """Return what a verdict holds for: the probe, the product with its driver, and the versions of what made the code."""
  return {"probe": asdict(probe), "machine": _machine(device, repr(DEV))}


@functools.cache
def _machine(device: str, dev: str) -> Entry:
  with Context(ALLOW_DEVICE_USAGE=1):  # also while a tinygrad.function is traced, where nothing may run
    return {"product": product(device, target_of(device)), "driver": driver(device), "versions": versions(device)}


def _checked(probe: "Probe", device: str, key: Entry) -> Entry | None:
  """Check a probe and store the verdict; None if it cannot be checked now."""
  from uopattn.trust.outcome import ProbeProcess, outcome

  log.info("uopattn.check: a first use on this machine is checked: %s", probe)
  with ProbeProcess(device) as process:
    probe_outcome = process.outcome(probe)
  if probe_outcome.verdict == UNAVAILABLE:  # as where only one process may use the device: then check in this one
    if capturing or in_function():
      return None
    log.info("uopattn.check: in this process, because another one cannot: %s", probe_outcome.reason)
    VERDICTS.write(_entry(key, DIED, "the process that checked it died"))  # what is read if this one does
    try:
      probe_outcome = outcome(probe, device)
    except KeyboardInterrupt:  # which says nothing of the kernel
      VERDICTS.write(_entry(key, UNAVAILABLE, "the check was interrupted"))
      raise
  entry = _entry(key, probe_outcome.verdict, probe_outcome.reason)
  VERDICTS.write(entry)
  log.info("uopattn.check: %s after %.1f s: %s", probe_outcome.verdict, probe_outcome.seconds, probe)
  return entry


def _entry(key: Entry, verdict: str, reason: str) -> Entry:
  return {"key": key, "verdict": verdict, "reason": reason}


def _why_not(entry: Entry, probe: "Probe") -> str:
  """Return why a kernel of this verdict may not be used; "" if it may."""
  if entry["verdict"] == RIGHT:
    return ""
  return (
    f"{probe.kernel} did not pass its check on this machine ({probe} {entry['verdict']}: {entry['reason']}); {SEND}"
  )


guard_by(against)
