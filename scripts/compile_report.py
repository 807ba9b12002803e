"""What AMD's and NVIDIA's compilers make of the GPU kernels, without a GPU: what they take, and their main loop.

A table for AMD, then one for NVIDIA. The names: target, kernel, dtype, and its tiles: of AMD's waves x tiles of 16 rows
x rows in LDS, of NVIDIA's warps x tiles of 16 queries x keys x stages, or warpgroups x keys x stages. Then registers,
what found no place in them, the bytes of LDS or shared memory of a workgroup, and what fits at once; then the
instructions of the main loop, for each matrix instruction and by kind. "lane" are those that cross lanes, "wait" also
barriers, hints to the scheduler and, of NVIDIA's, jumps.

Of AMD, "spills" counts registers and "scratch" bytes a lane, and "occ" waves on a SIMD; of NVIDIA, "spill" and "stack"
count bytes a thread, "smem" bytes of shared memory, and "wgs" workgroups on a multiprocessor. A warp takes part in an
HMMA, of 16 x 8 x 16 steps, and a warpgroup in an HGMMA, of as many columns as its tile has: only alike ones compare.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence

import report_amd
import report_cuda
import sass
from report_table import Row, line

from uopattn.measure.command_line import Usage, exit_status


def show(columns: Mapping[str, int], rows: Iterable[Row]) -> None:
  """Prints a table, each row as it is made."""
  print(line("", list(columns), columns))
  compilers: dict[str, None] = {}
  for row in rows:
    print(line(row.name, row.cells, columns), flush=True)
    compilers[row.compiler] = None
  print(f"compiled by {', '.join(filter(None, compilers))}")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line; argparse ends the process with 2 where it is off."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  every = report_amd.ARCHES + report_cuda.ARCHES
  parser.add_argument("arch", nargs="*", help=f"targets, gfx... or sm_...; default: {' '.join(every)}")
  parser.add_argument("--H", type=int, default=32, help="heads, by which NVIDIA's tiles are chosen (default 32)")
  parser.add_argument("--M", type=int, default=1024, help="queries (default 1024)")
  parser.add_argument("--N", type=int, default=1024, help="keys (default 1024)")
  parser.add_argument("--D", type=int, default=64, help="head size (default 64)")
  parser.add_argument("--causal", action="store_true")
  given = parser.parse_args(words)
  for arch in given.arch:
    if not arch.startswith(("gfx", "sm_")):
      parser.error(
        f"{arch!r} is no target; accepted are gfx... of AMD and sm_... of NVIDIA, such as {', '.join(every)}"
      )
  return given


def report(given: argparse.Namespace) -> int:
  """Prints the tables; returns 0.

  Raises RuntimeError or ValueError where a target that was named cannot be compiled for.
  """
  amd = [arch for arch in given.arch if arch.startswith("gfx")] or () if given.arch else report_amd.ARCHES
  cuda = [arch for arch in given.arch if arch.startswith("sm_")] or () if given.arch else report_cuda.ARCHES
  if amd:
    show(report_amd.COLUMNS, report_amd.rows(amd, given.M, given.N, given.D, given.causal))
  if not cuda:
    return 0
  if report_cuda.compiler() is None:
    if given.arch:
      raise Usage(report_cuda.NONE)
    print(report_cuda.NONE)
    return 0
  show(report_cuda.COLUMNS, report_cuda.rows(cuda, given.H, given.M, given.N, given.D, given.causal))
  if sass.disassembler() is None:
    print(sass.NONE)
  return 0


def main(words: Sequence[str] | None = None) -> int:
  """Prints the report; exit status 2 where a target cannot be compiled for."""
  given = arguments(words)
  return exit_status("compile_report", lambda: report(given))


if __name__ == "__main__":
  sys.exit(main())
