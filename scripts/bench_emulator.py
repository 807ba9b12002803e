"""Times the emulator: seconds of a forward pass with all checks on, including lowering, in a new process.

The columns are the time of importing, the first and the second call of B=H=1, M=N=128, D=64 in float16, and then the
first call of M=N=1024, as medians over the rounds. The exit status is 1 if an output fails the gate, 2 on any other
error.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")
COLUMNS = ("import", "first 128", "second 128", "first 1024")
HEAD_DIM = 64


def measure() -> list[float]:
  """Return the seconds of each column, on the device that DEV names."""
  start = time.perf_counter()
  import numpy as np
  from tinygrad import Tensor, dtypes

  from uopattn import attention
  from uopattn.proof.gate import verify

  seconds = [time.perf_counter() - start]
  rng = np.random.default_rng(0)
  for n in (128, 128, 1024):
    q, k, v = (Tensor(rng.standard_normal((1, 1, n, HEAD_DIM)).astype(np.float16)).realize() for _ in range(3))
    assert q.dtype == dtypes.float16
    start = time.perf_counter()
    out, lse = attention(q, k, v, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    seconds.append(time.perf_counter() - start)
    if wrong := [report for report in verify(q, k, v, out, lse) if not report.correct]:
      raise SystemExit(f"wrong output: {wrong}")
  return seconds


def in_new_process(arch: str) -> list[float]:
  environment = os.environ | {"DEV": f"EMU::{arch}", "EMU_CHECK": "1"}
  done = subprocess.run([sys.executable, __file__, "--measure"], env=environment, stdout=subprocess.PIPE)
  if done.returncode:
    sys.exit(done.returncode)  # the process has printed the error
  return json.loads(done.stdout)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("arch", nargs="*", default=ARCHES, help=f"targets; default: {' '.join(ARCHES)}")
  parser.add_argument("--rounds", type=int, default=3, help="processes for each target (default 3)")
  parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.measure:
    try:
      print(json.dumps(measure()))
    except Exception as error:
      from uopattn.measure.program import reason  # not earlier, because importing is timed

      print(f"{parser.prog}: {os.environ['DEV']}: {reason(error)}", file=sys.stderr)
      return 2
    return 0
  if arguments.rounds < 1:
    parser.error(f"--rounds {arguments.rounds}: must be at least 1")
  print(f"{'seconds':8} " + " ".join(f"{column:>10}" for column in COLUMNS))
  for arch in arguments.arch:
    rounds = [in_new_process(arch) for _ in range(arguments.rounds)]
    print(f"{arch:8} " + " ".join(f"{median(column):>10.2f}" for column in zip(*rounds, strict=True)), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
