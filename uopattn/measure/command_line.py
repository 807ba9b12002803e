"""Shared by the command-line programs: exit statuses, one-line errors, and checks of output files."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tinygrad.helpers import DEBUG

from uopattn.runtime.clang import NoCompiler

LONGEST = 500  # characters of an error: a compiler's contains all of a kernel's source


class Usage(Exception):
  """The arguments are invalid, or this machine cannot do what they ask for; the message is one line."""


def reason(error: BaseException) -> str:
  """Return an error as one line; an exception group as the errors in it."""
  if isinstance(error, BaseExceptionGroup):
    return "; ".join(dict.fromkeys(map(reason, error.exceptions)))
  said = " ".join(str(error).split())
  said = said if len(said) <= LONGEST else f"{said[:LONGEST]}... (DEBUG=1 shows all of it)"
  return said if said and isinstance(error, Usage | NoCompiler | ValueError) else f"{type(error).__name__}: {said}"


def exit_status(program: str, job: Callable[[], int]) -> int:
  """Run a program and return its exit status.

  `job` returns 0, or 1 only for wrong output. An exception gives status 2 and one line on stderr (with DEBUG=1 also the
  traceback); an interrupt gives 130.
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


def check_writable(name: str, path: str | Path) -> None:
  """Check before the work starts that its record can be written.

  Args:
    name: the file in the user's words, such as "JSON=a.json".

  Raises:
    Usage: the path is a folder, its folder does not exist, or permission is denied.
  """
  path = Path(path).absolute()
  if path.is_dir():
    raise Usage(f"{name} is a folder")
  if not path.exists() and not path.parent.is_dir():
    raise Usage(f"{name}: there is no such folder")
  if not os.access(path if path.exists() else path.parent, os.W_OK):
    raise Usage(f"{name} cannot be written: permission denied")
