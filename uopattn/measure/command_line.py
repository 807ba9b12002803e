"""What the programs share: exit statuses, errors in one line, and files that are to be written."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tinygrad import Device
from tinygrad.helpers import DEBUG, DEV

from uopattn.dsl.target import Target
from uopattn.plan.target import target_of
from uopattn.runtime.clang import NoCompiler

LONGEST = 500  # characters of an error: those of a compiler hold all of a kernel's source


class Usage(Exception):
  """The call's words are off, or this machine cannot do what they ask for; the message is one line."""


def reason(error: BaseException) -> str:
  """An error in one line; of a group, the errors within it."""
  if isinstance(error, BaseExceptionGroup):
    return "; ".join(dict.fromkeys(map(reason, error.exceptions)))
  said = " ".join(str(error).split())
  said = said if len(said) <= LONGEST else f"{said[:LONGEST]}... (DEBUG=1 shows all of it)"
  return said if said and isinstance(error, Usage | NoCompiler | ValueError) else f"{type(error).__name__}: {said}"


def exit_status(program: str, job: Callable[[], int]) -> int:
  """Runs a program and returns its exit status.

  That is what `job` returns, which is 0 or, for wrong output and nothing else, 1; 2 after an error, which is one line
  on stderr (with DEBUG=1 also the traceback); and 130 where it was interrupted.
  """
  try:
    return job()
  except KeyboardInterrupt:
    return 130
  except Exception as error:
    if DEBUG:
      traceback.print_exc()
    print(f"{program}: {reason(error)}", file=sys.stderr)
    return 2


def default_target() -> Target:
  """The target of tinygrad's default device.

  Raises:
    Usage: the device cannot be used.
    NoCompiler: it is a CPU and there is no clang.
  """
  try:
    return target_of(Device.DEFAULT)
  except NoCompiler:
    raise
  except Exception as error:  # whatever a missing driver, or a name that is no device's, makes tinygrad raise
    device = f"DEV={DEV!r}" if DEV.device else "the device that tinygrad chooses"
    raise Usage(f"{device} cannot be used: {reason(error)}") from error


def check_writable(name: str, path: str | Path) -> None:
  """Asks before the work is done whether its record can be written.

  Args:
    name: what the user calls the file, as "JSON=a.json".

  Raises:
    Usage: it is a folder, there is no folder for it, or permission is lacking.
  """
  path = Path(path).absolute()
  if path.is_dir():
    raise Usage(f"{name} is a folder")
  if not path.exists() and not path.parent.is_dir():
    raise Usage(f"{name}: there is no such folder")
  if not os.access(path if path.exists() else path.parent, os.W_OK):
    raise Usage(f"{name} cannot be written: permission denied")
