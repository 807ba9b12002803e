"""`python -m uopattn.info`: the device, the compiler, and which kernels serve this machine."""

import sys

from tinygrad import Device

from uopattn.dispatch import KERNELS
from uopattn.machine import machine_record
from uopattn.target import Target
from uopattn.toolchain import NoCompiler, clang_version, find_clang


def main() -> int:
  """Prints the report; 1 if the default device cannot be used."""
  for key, value in machine_record().items():
    print(f"{key:<10}", ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value)
  try:
    print(f"{'compiler':<10} {find_clang()}: {clang_version()}")
    target = Target.of(Device.DEFAULT)
  except (NoCompiler, ValueError) as error:
    print(f"{'device':<10} none: {error}")
    return 1
  print(f"{'device':<10} {target}")
  for kernel in KERNELS:
    serves = "serves this machine" if target.device in kernel.devices else "not for this machine"
    print(f"{'kernel':<10} {kernel.name}, for {', '.join(kernel.devices)}: {serves}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
