"""The text of kernels for Apple's GPUs, checked, and run on a CPU: a second opinion, with EMU_TEXT=1.

The emulator runs the UOps of a kernel. Between these and the GPU is the text in Metal Shading Language (MSL) that
tinygrad renders. `check` refuses what Apple would refuse; `Text` compiles the rest as C++, with the `metal_stdlib`
beside this file in place of Apple's. Threads are fibers, and simdgroups take turns, in an order that EMU_SEED makes
random.

Source: Apple, Metal Shading Language Specification.
"""

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinygrad.helpers import round_up

from uopattn.dsl.target import lds_limit

from .errors import Divergence, KernelError, LaunchError

HEADER = Path(__file__).parent
MOST_BUFFERS = 31  # of a kernel, constants included
KIND = r"(?:unsigned )?\w+"  # of a scalar
SIZES = {"bool": 1, "char": 1, "short": 2, "half": 2, "bfloat": 2, "int": 4, "float": 4, "long": 8}
SIZES |= {f"{sign}{kind}": SIZES[kind] for sign in ("u", "unsigned ") for kind in ("char", "short", "int", "long")}
ALIGNED = r"(?:__attribute__\(\(aligned\(16\)\)\) )?"
SHARED = re.compile(rf"^ *threadgroup {ALIGNED}({KIND}) (\w+)\[(\d+)\];", re.MULTILINE)
PRIVATE = re.compile(rf"^ *{KIND} (buf\d+)\[\d+\];", re.MULTILINE)
CAST = re.compile(rf"\(\((device|threadgroup|constant)? ?{ALIGNED}({KIND})\*\)\(*(\w+)")
# What C++ has and MSL has not, or has by other names.
REFUSED = re.compile(r"__builtin_\w+|__asm__|\basm\b|\[&\]|\bdouble\b|\bgoto\b|\bthrow\b|\bnew\b|\bvirtual\b|\(\{")


class TextError(KernelError):
  """The text is not what Apple's compiler takes."""


def shared_bytes(text: str) -> int:
  """Return the bytes of threadgroup memory that a kernel uses."""
  return sum(round_up(int(count) * SIZES[kind], 16) for kind, _, count in SHARED.findall(text))


def arguments_of(name: str, text: str) -> list[str]:
  """Return the declarations of the arguments of a kernel that are buffers."""
  (arguments,) = re.findall(rf"^kernel void {re.escape(name)}\((.*)\) {{$", text, re.MULTILINE)
  return [x for x in arguments.split(", ") if "[[" not in x]


def check(name: str, text: str, arch: str) -> None:
  """Check what can be checked of a kernel's text without Apple's compiler: types, address spaces, limits.

  Raises:
    TextError: something that MSL does not have, a pointer of another address space than what it points to, or more
      buffers than a kernel may have.
    LaunchError: more threadgroup memory than there is.
  """

  def fail(what: str) -> TextError:
    return TextError(f"kernel {name}: {what}")

  if refused := REFUSED.search(text):
    raise fail(f"has {refused[0]!r}, which MSL does not have")
  arguments = arguments_of(name, text)
  if len(arguments) > MOST_BUFFERS:
    raise fail(f"has {len(arguments)} buffers; Metal allows {MOST_BUFFERS}")
  spaces = {}
  for argument in arguments:
    declaration = re.fullmatch(rf"(device|constant) ({KIND})[*&] (\w+)", argument)
    if declaration is None or declaration[2] not in SIZES:
      raise fail(f"has the argument {argument!r}, which must be in device or constant memory, of a scalar type")
    spaces[declaration[3]] = declaration[1]
  spaces |= {buffer: "threadgroup" for _, buffer, _ in SHARED.findall(text)}
  spaces |= dict.fromkeys(PRIVATE.findall(text), "thread")
  for space, kind, buffer in CAST.findall(text):
    if re.sub("[234]$", "", kind) not in SIZES:
      raise fail(f"has a pointer to {kind!r}, which is no type of MSL")
    if spaces.get(buffer) != (space or "thread"):
      raise fail(f"points to {buffer}, in {spaces.get(buffer)} memory, as if it were in {space or 'thread'} memory")
  if (used := shared_bytes(text)) > (limit := lds_limit(arch)):
    raise LaunchError(f"kernel {name}: a threadgroup uses {used} bytes of threadgroup memory, but {arch} has {limit}")


def as_cpp(name: str, text: str) -> str:
  """Return the text as C++ with a function `shim_run`: buffers, threadgroups, threads of each, seed -> error or 0."""
  kinds = [re.findall(rf"({KIND})([*&])", x)[0] for x in arguments_of(name, text)]
  passed = [f"({kind} *)a[{i}]" if by == "*" else f"*({kind} *)a[{i}]" for i, (kind, by) in enumerate(kinds)]
  shared = SHARED.findall(text)
  text = SHARED.sub("", text)
  memory = "\n".join(f"alignas(16) static {kind} {buffer}[{count}];" for kind, buffer, count in shared)
  spoil = " ".join(f"memset({buffer}, 0xFF, sizeof {buffer});" for _, buffer, _ in shared)
  return f"""#include <metal_stdlib>
{memory}
{text}
static void **a;
static uint3 gid;
static void shim_body(uint3 lid) {{ {name}({", ".join([*passed, "gid", "lid"])}); }}
extern "C" const char *shim_run(void **buffers, const unsigned *groups, const unsigned *size, unsigned seed) {{
  a = buffers; shim::body = shim_body; shim::failure = 0; shim::threads = size[0] * size[1] * size[2];
  for (unsigned i = 0; i < groups[0] * groups[1] * groups[2]; i++) {{
    gid = (uint3){{i % groups[0], i / groups[0] % groups[1], i / groups[0] / groups[1]}};
    {spoil}
    if (const char *error = shim::run(size, seed)) return error;
  }}
  return 0;
}}
"""


@functools.cache
def compiled(source: str) -> Any:
  """Compile C++ with the clang in `CC` and return its `shim_run`. Raises TextError with the compiler's message."""
  with tempfile.TemporaryDirectory(prefix="uopattn_") as folder:
    library = Path(folder) / "kernel.so"
    flags = ["-x", "c++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared", f"-I{HEADER}"]
    command = [os.environ.get("CC", "clang"), *flags, "-", "-o", str(library), "-lm"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
      raise TextError(f"does not compile as C++:\n{done.stderr}")
    shim_run = ctypes.CDLL(str(library)).shim_run
  shim_run.restype = ctypes.c_char_p
  return shim_run


class Text:
  """A kernel as text."""

  def __init__(self, name: str, text: str, arch: str):
    """Check and compile the text. Raises TextError and LaunchError; see `check`."""
    check(name, text, arch)
    self.name, self.call = name, compiled(as_cpp(name, text))

  def __call__(
    self, buffers: Sequence[Any], groups: Sequence[int], size: Sequence[int], arguments: Sequence[int] = ()
  ) -> None:
    """Run the kernel.

    Args:
      buffers: the bytes of each buffer, in order.
      groups, size: threadgroups, and threads of each, along x, y and z.
      arguments: the kernel's integers.

    Raises:
      Divergence: lanes or threads wait for one another at different statements.
    """
    keep: list[Any] = [(ctypes.c_char * len(x)).from_buffer(x) for x in buffers] + [ctypes.c_int(x) for x in arguments]
    addresses = (ctypes.c_void_p * len(keep))(*(ctypes.addressof(x) for x in keep))
    seed = int(os.environ.get("EMU_SEED", "0"))
    error = self.call(addresses, (ctypes.c_uint * 3)(*groups), (ctypes.c_uint * 3)(*size), ctypes.c_uint(seed))
    if error is not None:
      raise Divergence(f"kernel {self.name}: {error.decode()}")
