"""Compiles the GPU kernels for AMD and NVIDIA without a GPU, and reports their resources and main loops.

The first table is AMD's, the second NVIDIA's. A row's name is the target, kernel, dtype and tiles: for AMD waves x
tiles of 16 rows x rows in LDS; for NVIDIA warps x tiles of 16 queries x keys x stages, or warpgroups x keys x stages.
The columns are registers, spills, bytes of LDS or shared memory per workgroup and occupancy, then the instructions of
the main loop: per matrix instruction ("each") and by kind. "lane" counts instructions that cross lanes; "wait" includes
barriers, scheduling hints and, for NVIDIA, jumps.

For AMD, "spills" counts registers, "scratch" bytes per lane and "occ" waves per SIMD. For NVIDIA, "spill" and "stack"
count bytes per thread, "smem" bytes of shared memory and "wgs" workgroups per multiprocessor. A warp executes an HMMA
(16 x 8 x 16); a warpgroup executes an HGMMA, whose columns are those of its tile. Compare only rows with the same kind
of matrix instruction.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence

import report_amd
import report_cuda
import sass
from report_table import Row, line

from uopattn.measure.program import Usage, exit_status


def show(columns: Mapping[str, int], rows: Iterable[Row]) -> None:
  """Print a table, each row when it is ready."""
  print(line("", list(columns), columns))
  compilers: dict[str, None] = {}
  for row in rows:
    print(line(row.name, row.cells, columns), flush=True)
    compilers[row.compiler] = None
  print(f"compiled by {', '.join(filter(None, compilers))}")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
  """Parse the command line; argparse exits with status 2 if it is invalid."""
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
  """Print the tables; return 0.

  Raises Usage, RuntimeError or ValueError if a named target cannot be compiled for.
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
  """Print the report; return the exit status, 2 if a target cannot be compiled for."""
  given = arguments(words)
  return exit_status("compile_report", lambda: report(given))


if __name__ == "__main__":
  sys.exit(main())
