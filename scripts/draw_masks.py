"""Draws the masks of `uopattn.mods`, one cell per pair of query and key, for the README."""

import argparse
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tinygrad import Tensor

from uopattn import BlockMask, mods
from uopattn.measure.program import check_writable, exit_status

SIZE = 48
DOCUMENTS = Tensor(np.repeat([0, 1, 2, 3], [11, 17, 6, 14]).astype(np.int32))
MASKS = {
  "causal": mods.causal,
  "sliding_window(8, 3)": mods.sliding_window(8, 3),
  "dilated(20, 4)": mods.dilated(20, 4),
  "prefix_lm(12)": mods.prefix_lm(12),
  "document()": mods.document(),
  "and_masks(causal, document())": mods.and_masks(mods.causal, mods.document()),
  "or_masks(sliding_window(6), first)": mods.or_masks(mods.sliding_window(6), lambda b, h, i, j, *aux: j < 4),
  "neighbourhood((6, 8), (3, 5))": mods.neighbourhood((6, 8), (3, 5)),
}


def draw(path: Path) -> int:
  """Write the picture, eight panels with queries down and keys across; return 0."""
  check_writable(str(path), path)
  figure = Figure(figsize=(11, 5.6), layout="constrained")
  for panel, (name, mask) in zip(figure.subplots(2, 4).flat, MASKS.items(), strict=True):
    BlockMask.of(mask, 1, 1, SIZE, SIZE, (DOCUMENTS,), block_m=1, block_n=1).draw(panel)
    panel.set_title(name, fontsize=8, family="monospace")
    panel.label_outer()
  figure.savefig(path, dpi=110)
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("output", type=Path, metavar="FILE.png", help="the picture to write")
  path = parser.parse_args().output
  return exit_status(parser.prog, lambda: draw(path))


if __name__ == "__main__":
  sys.exit(main())
