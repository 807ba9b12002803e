"""`python -m uopattn.tune KEY=VALUE ... | FILE`: measures candidates for attentions and remembers the fastest.

Exit status: 0 if all candidates were right; 1 if one was wrong; 2 on any error, such as an invalid key or value, no
kernel for the case, an emulated device, or a file that cannot be read or written.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tinygrad import Device
from tinygrad.helpers import tqdm

from uopattn.measure.problem import Config, parse_attention
from uopattn.measure.program import Usage, check_writable, default_target, exit_status, take_device
from uopattn.plan.dispatch import NoKernel
from uopattn.plan.target import shown
from uopattn.tuning.api import tune
from uopattn.tuning.case import Case
from uopattn.tuning.compile import compile_all
from uopattn.tuning.search import DISTURBED, NOISY, Result, jobs_of, known, refusal, text_of, tuned

HELP = """\
keys: B H N D HKV M DV DTYPE CAUSAL, as for python -m uopattn.run, whose --help explains them.
A FILE has the keys of one attention on each line; # begins a comment.
tinygrad's DEV chooses the device, otherwise the first that has kernels."""


def configs(words: Sequence[str]) -> list[Config]:
  """Return the attentions of the command line: one of KEY=VALUE words, and those of each file."""
  attentions: list[Config] = []
  keys = [word for word in words if "=" in word]
  for path in (word for word in words if "=" not in word):
    try:
      lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
      raise Usage(f"{path!r} is neither KEY=VALUE nor a file of such: {error}") from error
    attentions += [parse_attention(text.split()) for text in (line.partition("#")[0] for line in lines) if text.strip()]
  return attentions + ([parse_attention(keys)] if keys or not attentions else [])


def row(result: Result) -> str:
  """Return a row of the table: the model's choice, the measured one, and by how much that is faster."""
  model, best, count = result.model, result.best, len(result.tried)
  if best.seconds is None:
    return f"  none of {count} candidates is right"
  if model.seconds is None:
    return f"  model     {'':13}  {model}\n  measured  {best.seconds * 1e3:10.4f} ms  {best}"
  times = f"  model     {model.seconds * 1e3:10.4f} ms  {model}"
  if best is model:
    return f"{times}\n  measured  the same, of {count} candidates"
  gain = f"{model.seconds / best.seconds:.3f} times as fast, of {count} candidates"
  return f"{times}\n  measured  {best.seconds * 1e3:10.4f} ms  {best}\n  {gain}"


def run(words: Sequence[str], again: bool, backward: bool) -> int:
  """Tune for all attentions and print a table; return the exit status."""
  take_device("uopattn.tune")
  target, device = default_target(), Device.DEFAULT
  if against := refusal(device):
    raise Usage(against)
  passes = (False, True) if backward else (False,)
  cases = [Case(config.spec(), device, target, x) for config in configs(words) for x in passes]
  print(f"device   {shown(target, device)}", flush=True)
  try:
    wanted = [x for x in cases if again or known(x) is None]
    compile_all([job for x in wanted for job in jobs_of(x)])
    rows = tqdm(cases, desc="tuning", disable=None if len(cases) > 1 else True)
    return max(tune_case(x, again) for x in rows)
  except NoKernel as error:
    raise Usage(str(error)) from error


def tune_case(case: Case, again: bool) -> int:
  """Tune for one case and print its row; return the exit status."""
  result = tuned(case, again)
  if not isinstance(result, Result):
    print(f"{case}\n  known     {text_of(result)}", flush=True)
    return 0
  print(case, row(result), *([f"  {DISTURBED}"] * (result.spread > NOISY)), sep="\n", flush=True)
  for x in result.defects:
    print(f"  DEFECT    {x} {x.defect}", flush=True)
  return 1 if result.defects else 0


def main() -> int:
  """Parse the command line and tune; return the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m uopattn.tune",
    description="Measures candidates for attentions, checks them, and remembers the fastest.",
    epilog=HELP,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("words", nargs="*", metavar="KEY=VALUE|FILE", help="an attention, or a file of attentions")
  parser.add_argument("--backward", action="store_true", help="tune for the gradients too")
  parser.add_argument("--again", action="store_true", help="measure also what is known")
  parser.add_argument("--export", metavar="FILE", help="write all that is known to a file, at the end")
  parser.add_argument("--load", metavar="FILE", help="add a file's entries to what is known, at the beginning")
  parser.add_argument("--clear", action="store_true", help="forget all that is known first")
  args = parser.parse_args()

  def job() -> int:
    if args.export:
      check_writable(f"--export {args.export}", args.export)
    if args.clear:
      print(f"forgot {tune.clear()} entries")
    if args.load:
      try:
        print(f"loaded {tune.load(args.load)} entries")
      except OSError as error:
        raise Usage(f"--load {args.load}: {error.strerror}") from error
    only_files = not args.words and (args.clear or args.load or args.export)
    status = 0 if only_files else run(args.words, args.again, args.backward)
    if args.export:
      print(f"wrote {tune.export(args.export)} entries")
    return status

  return exit_status("uopattn.tune", job)
