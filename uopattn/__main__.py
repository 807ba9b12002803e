"""`python -m uopattn`: prints the version and the modules that are programs."""

import argparse

from uopattn.version import __version__

PROGRAMS = """\
  python -m uopattn.run N=1024 D=64   runs the kernel, times it and checks its output
  python -m uopattn.bench --quick     times it next to other libraries
  python -m uopattn.tune N=1024 D=64  measures which tiles are the fastest, and remembers them
  python -m uopattn.info              lists the kernels for this machine
  python -m uopattn.check             checks all kernels for this machine, and writes a report to send

Each has --help."""


def main() -> None:
  """Print the usage. Exits with status 2 on unknown arguments."""
  parser = argparse.ArgumentParser(
    prog="python -m uopattn",
    description="Attention for tinygrad. These are its programs:",
    epilog=PROGRAMS,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=f"uopattn {__version__}")
  parser.parse_args()
  parser.print_help()


if __name__ == "__main__":
  main()
