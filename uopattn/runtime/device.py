"""tinygrad's devices, by their names, such as "CPU" or "CUDA:1"."""

from typing import Any

from tinygrad import Context, Device


def kind_of(device: str) -> str:
  """Return the kind of a device: its name without its number and its renderer."""
  return device.split(":")[0].upper()


def opened(device: str) -> Any:
  """Return a device, opened; also while a tinygrad.function is traced, where nothing may run."""
  with Context(ALLOW_DEVICE_USAGE=1):
    return Device[device]
