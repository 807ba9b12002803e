"""The choice of launches while tuning is on: what is known, or else what a search finds."""

import logging

from tinygrad.engine.realize import capturing
from tinygrad.helpers import DEV

from uopattn.dsl.target import Target
from uopattn.measure.program import reason
from uopattn.plan.dispatch import dispatch, dispatch_backward
from uopattn.plan.target import target_of
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning import store
from uopattn.tuning.compile import Launches, choice, compile_all, launches_of
from uopattn.tuning.search import jobs_of, problem, search
from uopattn.tuning.store import key_of
from uopattn.tuning.trial import unmeasured

log = logging.getLogger("uopattn")
KNOWN: dict[tuple[AttentionSpec, str, Target, bool], Launches] = {}  # in this process


def refusal(device: str) -> str:
  """Return why nothing is measured on a device; "" if it is."""
  kind = device.split(":")[0].upper()
  if kind == "EMU" or DEV.target(kind).interface.upper().startswith("MOCK"):
    return f"{device} is emulated, and an emulator's times say nothing of a device: nothing is tuned"
  return ""


def chosen(spec: AttentionSpec, device: str, measure: bool, backward: bool = False) -> Launches:
  """Return the launches measured to be the fastest, or the model's where nothing is known and nothing is measured.

  Args:
    measure: whether to measure what is not known yet.
    backward: whether for the gradient of the attention.

  Raises:
    NoKernel: no kernel serves the attention.
  """
  target = target_of(device)
  place = spec, device, target, backward
  if (found := KNOWN.get(place)) is not None:
    return found
  model = dispatch_backward(spec, target) if backward else (dispatch(spec, target),)
  if against := refusal(device):
    log_once(f"uopattn.tune: {against}")
    return model
  if against := unmeasured(spec):
    log_once(f"uopattn.tune: the model's tiles are used with {against}")
    return model
  if (found := known(spec, device, target, backward)) is None:
    if capturing or in_function():
      log_once("uopattn.tune: nothing is measured inside a TinyJit's capture or a function: the model's tiles are used")
      return model
    if not measure:
      log.info(
        "uopattn.tune: nothing is known of %s, and search=False: the model's tiles are used", problem(spec, backward)
      )
      return model
    found = measured_anew(spec, device, target, model, backward)
  KNOWN[place] = found
  return found


def known(spec: AttentionSpec, device: str, target: Target, backward: bool = False) -> Launches | None:
  """Return the launches that an earlier search chose; None if there are none, or their entry makes no sense."""
  if (entry := store.read(key_of(spec, device, target, backward))) is None:
    return None
  found = launches_of(entry["choice"], spec, target, backward) if store.is_entry(entry) else None
  if found is None:
    log.warning("uopattn.tune: an entry names tiles that are no candidates, and is measured anew")
  return found


def measured_anew(spec: AttentionSpec, device: str, target: Target, model: Launches, backward: bool) -> Launches:
  """Search, remember the winner and return it; the model's choice if the search cannot be made."""
  with store.one_at_a_time():
    if (found := known(spec, device, target, backward)) is not None:  # by a process that was waited for
      return found
    try:
      compile_all(jobs_of(spec, device, target, backward))
      result = search(spec, device, target, backward)
    except Exception as error:  # of memory, of a driver: the attention itself may still run
      log.error("uopattn.tune: the model's tiles are used, because the search failed: %s", reason(error))
      return model
    if result.best.seconds is None:
      return model
    store.write(result.entry(key_of(spec, device, target, backward)))
    return launches_of(choice(result.best.launches), spec, target, backward) or model
