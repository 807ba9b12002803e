"""What the command-line programs share: exit statuses, one-line errors, checks of output files, and their device.

A program runs on the device that `DEV` names, else on the first one that has kernels.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tinygrad import Device, dtypes
from tinygrad.device import ALL_DEVICES
from tinygrad.helpers import DEBUG, DEV

from uopattn.dsl.target import Target
from uopattn.plan.dispatch import WITH_KERNELS, dispatch
from uopattn.plan.target import RUNTIMES, target_of
from uopattn.runtime.clang import NoCompiler
from uopattn.spec.spec import AttentionSpec

LONGEST = 500  # characters of an error: a compiler's contains all of a kernel's source
LAST = "CPU"  # which every machine has
SMALL = AttentionSpec(1, 1, 1, 64, 64, 64, 64, dtypes.float16, 0.125)  # which each kernel serves where it runs at all


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


def is_stream(path: str | Path) -> bool:
  """Return whether a path is a pipe, a terminal or the like, where what is written cannot be replaced later."""
  return Path(path).exists() and not Path(path).is_file()


def take_device(program: str) -> None:
  """Choose the device that a program runs on, and say so in one line on stderr if it is not tinygrad's default."""
  if said := choose_device():
    print(f"{program}: {said}", file=sys.stderr)


def choose_device() -> str:
  """Make the first device that has kernels the default one, here and in child processes, unless `DEV` names a device.

  tinygrad's own default comes first, then the others of `kinds_with_kernels`.

  Returns:
    Why tinygrad's own default cannot be used and what is, as one line; "" if it can.

  Raises:
    Usage: none of these devices can be used.
  """
  if DEV.device or not (against := why_not(default := default_device())):
    return ""
  device = first_with_kernels(kind for kind in kinds_with_kernels() if kind != default)
  if device is None:
    raise Usage(against if default == LAST else f"{against}; nor can {LAST} be used: {why_not(LAST)}")
  take(device)
  return f"{against}; DEV names no device, so {device} is used"


def take(device: str) -> None:
  """Make a device the default one, here and in child processes."""
  DEV.value = [replace(DEV.value[0], device=device), *DEV.value[1:]]
  os.environ["DEV"] = repr(DEV)  # where tinygrad notes its own choice


def default_device() -> str:
  """Return tinygrad's default device; the CPU where tinygrad can open none, as without a compiler."""
  try:
    return Device.DEFAULT
  except RuntimeError:
    return LAST


def first_with_kernels(devices: Iterable[str]) -> str | None:
  """Return the first of these devices that can be used and has kernels; None if there is none."""
  return next((device for device in devices if not why_not(device)), None)


def kinds_with_kernels() -> list[str]:
  """Return the kinds of devices that have kernels, in tinygrad's order, the CPU last."""
  kinds = {*WITH_KERNELS, *RUNTIMES}
  return [kind for kind in ALL_DEVICES if kind in kinds - {LAST}] + [LAST]


def why_not(device: str) -> str:
  """Return why no kernel can run on a device, as one line; "" if one can."""
  try:
    dispatch(SMALL, target_of(device))
  except Exception as error:  # a missing driver can raise anything
    return reason(error)
  return ""


def default_target() -> Target:
  """Return the target of the default device.

  Raises:
    Usage: the device cannot be used.
    NoCompiler: the device is a CPU and there is no clang.
  """
  try:
    return target_of(default_device())
  except NoCompiler:
    raise
  except Exception as error:  # a missing driver or an unknown device name can raise anything
    device = f"DEV={DEV!r}" if DEV.device else "the device that tinygrad chooses"
    raise Usage(f"{device} cannot be used: {reason(error)}") from error
