"""Saves the q, k and v that one layer of SmolLM2-135M computes for a text, as a safetensors file.

The file holds q (1, 9, M, 64), k (1, 3, M, 64) and v (1, 3, M, 64) for the text's M tokens. They are the arguments of
the layer's causal attention, with rotary positions applied to q and k. The exit status is 2 if nothing could be saved.
"""

import argparse
import os
import sys
from pathlib import Path

from smollm import load
from tinygrad import Tensor, dtypes
from tinygrad.nn.state import safe_save

from uopattn.measure.program import check_writable, exit_status

DTYPES = {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}


def argument_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("text", help="the text to run through the model, or - for standard input")
  parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
  parser.add_argument("--layer", type=int, default=0, help="the layer, from 0 (default: %(default)s)")
  parser.add_argument("--dtype", choices=DTYPES, default="float32", help="the dtype to save (default: %(default)s)")
  return parser


def read_text(argument: str) -> str:
  """Return `argument`, or standard input if it is "-". Raises ValueError if the text is not UTF-8."""
  return (sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)).decode()


def capture(text: str, layer: int, dtype: str, output: Path) -> int:
  """Write the file and return the number of tokens.

  Raises ValueError if the text is empty or too long, the layer does not exist or `output` is not a regular file, Usage
  if `output` cannot be written, RuntimeError if the model cannot be downloaded.
  """
  if not text:
    raise ValueError("the text is empty")
  if output.exists() and not output.is_file():  # safe_save would delete a device file such as /dev/null
    raise ValueError(f"{output} is not a regular file")
  check_writable(str(output), output)
  model = load()
  tokens = model.tokenizer.encode(text).ids
  q, k, v = (x.cast(DTYPES[dtype]) for x in model.qkv(Tensor([tokens]), layer))
  safe_save({"q": q, "k": k, "v": v}, str(output))
  return len(tokens)


def main() -> int:
  parser = argument_parser()
  arguments = parser.parse_args()

  def run() -> int:
    tokens = capture(read_text(arguments.text), arguments.layer, arguments.dtype, arguments.output)
    print(f"saved q, k, v of layer {arguments.layer}, {tokens} tokens, {arguments.dtype}, to {arguments.output}")
    return 0

  return exit_status(parser.prog, run)


if __name__ == "__main__":
  sys.exit(main())
