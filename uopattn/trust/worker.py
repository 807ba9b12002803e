"""The process in which kernels are checked and timed: a request per line, as JSON, and an answer to each.

A request is {"probe": ...}, answered by COMPILED when it begins to run and then by its `Outcome`, or {"speed": [kernel,
backward]}. The first line that it writes says why the device cannot be used, or "". It ends when its input does.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tinygrad import Device

from uopattn.measure.program import reason
from uopattn.trust.outcome import COMPILED, outcome
from uopattn.trust.probe import Probe
from uopattn.trust.speed import speed


def main() -> None:
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # what kernels, compilers or tinygrad's DEBUG print is no answer
  device, against = sys.argv[1], ""
  try:
    Device[device].synchronize()
  except Exception as error:  # a driver may raise anything
    against = reason(error)

  def answer(x: Mapping[str, object]) -> None:
    answers.write(json.dumps(x) + "\n")
    answers.flush()

  answer({"reason": against})
  for line in sys.stdin:
    request = json.loads(line)
    if "probe" in request:
      answer(asdict(outcome(Probe.read(request["probe"]), device, lambda: answer(COMPILED))))
    else:
      answer({"speed": _speed(device, *request["speed"])})


def _speed(device: str, kernel: str, backward: bool) -> dict[str, Any] | None:
  try:
    return speed(kernel, backward, device)
  except Exception as error:  # of memory, of a driver
    return {"reason": reason(error)}


if __name__ == "__main__":
  main()
