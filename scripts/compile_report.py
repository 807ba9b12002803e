"""Compiles the GPU kernels without a GPU, and reports their resources and main loops.

A row is named by its target, kernel, dtype and tiles. AMD's tiles are waves x tiles of 16 rows x rows in LDS. NVIDIA's
are warps x tiles of 16 queries x keys x stages, or warpgroups x keys x stages. "regs" and "vgprs" are per thread, "LDS"
and "smem" bytes per workgroup. "each" is the number of instructions per matrix instruction in the main loop; the
columns after it count them by kind. "lane" is for instructions that cross lanes. "wait" includes barriers, scheduling
hints and, for NVIDIA, jumps.

For AMD, "spills" counts registers, "scratch" bytes per lane and "occ" waves per SIMD: at most 16 on RDNA, 8 on CDNA.
For NVIDIA, "spill" and "stack" count bytes per thread, and "wgs" workgroups per multiprocessor. A warp executes an HMMA
(16 x 8 x 16); a warpgroup executes an HGMMA, whose columns are those of its tile. Compare only rows with the same kind
of matrix instruction. In 16 bits the loop of `hopper_forward` includes a branch that few tiles take, which finds maxima
and rescales O.

Compilers for Apple's GPUs, and for those without matrix units (cl), run nowhere else: their rows count what tinygrad
renders for one thread. A tile is queries x keys; "words" are 32-bit words that are in registers from one tile to the
next, the least that a thread needs. In kernels for GPUs without matrix units a "matrix" instruction is a multiply-add.
"""

import argparse
import datetime
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import report_amd
import report_counted
import report_cuda
import sass
from report_table import Row, line, markdown

from uopattn.measure.program import Usage, check_writable, exit_status

ROWS = (__doc__ or "").split("\n\n", 1)[1]  # the meaning of rows and columns
REPORTS = {"AMD": report_amd, "NVIDIA": report_cuda, "other GPUs": report_counted}


def show(title: str, columns: Mapping[str, int], rows: Iterable[Row]) -> str:
  """Print a table, each row when it is ready; return it as Markdown."""
  print(line(title, list(columns), columns))
  done = []
  for row in rows:
    print(line(row.name, row.cells, columns), flush=True)
    done.append(row)
  compilers = ", ".join(dict.fromkeys(row.compiler for row in done if row.compiler))
  compiled_by = f"compiled by {compilers}" if compilers else "counted"
  print(compiled_by)
  return f"## {title}, {compiled_by}\n\n{markdown(columns, done)}\n"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
  """Parse the command line; argparse exits with status 2 if it is invalid."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  every = [arch for module in REPORTS.values() for arch in module.ARCHES]
  names = report_counted.NAMES
  parser.add_argument("arch", nargs="*", help=f"gfx..., sm_..., {', '.join(names)}; default: {' '.join(every)}")
  parser.add_argument("--H", type=int, default=32, help="heads, by which tiles are chosen (default 32)")
  parser.add_argument("--M", type=int, default=1024, help="queries (default 1024)")
  parser.add_argument("--N", type=int, default=1024, help="keys (default 1024)")
  parser.add_argument("--D", type=int, nargs="+", default=[64], help="head sizes (default 64)")
  parser.add_argument("--causal", action="store_true", help="with a causal mask")
  parser.add_argument("--markdown", metavar="FILE", help="also write the tables, without and with a causal mask")
  args = parser.parse_args(words)
  for arch in args.arch:
    if not any(module.serves(arch) for module in REPORTS.values()):
      parser.error(
        f"{arch!r} is no target; accepted are {', '.join(names)}, and gfx... of AMD and sm_... of NVIDIA, such as "
        f"{', '.join(report_amd.ARCHES + report_cuda.ARCHES)}"
      )
  return args


def report(args: argparse.Namespace, command: str = "scripts/compile_report") -> int:
  """Print the tables, and write them to a file if asked to; return 0.

  Raises Usage, RuntimeError or ValueError if a named target cannot be compiled for.
  """
  if args.markdown:
    check_writable(f"--markdown {args.markdown}", args.markdown)
  tables = []
  cases = [(D, causal) for D in args.D for causal in ((False, True) if args.markdown else (args.causal,))]
  for vendor, module in REPORTS.items():
    arches = [x for x in args.arch if module.serves(x)] if args.arch else module.ARCHES
    if not arches:
      continue
    if module is report_cuda and report_cuda.compiler() is None:
      if args.arch:
        raise Usage(report_cuda.NONE)
      print(report_cuda.NONE)
      continue
    for D, causal in cases:
      rows = module.rows(arches, args.H, args.M, args.N, D, causal)
      tables.append(show(f"{vendor}, D={D}{', causal' * causal}", module.COLUMNS, rows))
    if module is report_cuda and sass.disassembler() is None:
      print(sass.NONE)
  if args.markdown:
    about = f"# Compile report\n\nWritten on {datetime.date.today()} by\n\n```sh\n{command}\n```\n\n{ROWS}"
    Path(args.markdown).write_text("\n".join([about, *tables]))
  return 0


def main(words: Sequence[str] | None = None) -> int:
  """Print the report; return the exit status, 2 if a target cannot be compiled for."""
  args = arguments(words)
  command = shlex.join(["scripts/compile_report", *(sys.argv[1:] if words is None else words)])
  return exit_status("compile_report", lambda: report(args, command))


if __name__ == "__main__":
  sys.exit(main())
