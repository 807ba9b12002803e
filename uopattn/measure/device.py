"""The device that the programs run on: the one that `DEV` names, else the first one that has kernels."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace

from tinygrad import Device
from tinygrad.device import ALL_DEVICES
from tinygrad.helpers import DEV

from uopattn.dsl.target import Target
from uopattn.measure.command_line import Usage, reason
from uopattn.plan.dispatch import DEVICES as WITH_KERNELS
from uopattn.plan.dispatch import schedules_on
from uopattn.plan.target import RUNTIMES, target_of
from uopattn.runtime.clang import NoCompiler

LAST = "CPU"  # which every machine has


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
  found = first_with_kernels(kind for kind in kinds_with_kernels() if kind != default)
  if found is None:
    raise Usage(against if default == LAST else f"{against}; nor can {LAST} be used: {why_not(LAST)}")
  DEV.value = [replace(DEV.value[0], device=found), *DEV.value[1:]]
  os.environ["DEV"] = repr(DEV)  # where tinygrad notes its own choice
  return f"{against}; DEV names no device, so {found} is used"


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
  """Return the kinds of devices that have kernels, in tinygrad's order, the CPU at last."""
  kinds = {*WITH_KERNELS, *RUNTIMES}
  return [kind for kind in ALL_DEVICES if kind in kinds - {LAST}] + [LAST]


def why_not(device: str) -> str:
  """Return why no kernel can run on a device, as one line; "" if one can."""
  try:
    schedules_on(target_of(device))
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
