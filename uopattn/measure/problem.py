"""Problems to run, bench and tune: the keys that describe them, their inputs, and the kernel that serves them."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.nn.state import safe_load

from uopattn.api.attention import attention
from uopattn.dsl.rules.four_bits import elements_in
from uopattn.dsl.schedule import DTYPES_8
from uopattn.measure.program import Usage, reason
from uopattn.plan.dispatch import NoKernel, launch_on
from uopattn.plan.division import Division, division_of
from uopattn.plan.forward import forward
from uopattn.plan.launch import Launch
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime.device import kind_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import devices_of
from uopattn.spec.spec import AttentionSpec, Input, make_spec
from uopattn.spec.tensors import dtype_name

DTYPE_NAMES: dict[str, DType] = {
  "half": dtypes.float16,
  "float": dtypes.float32,
  "float16": dtypes.float16,
  "float32": dtypes.float32,
  "bfloat16": dtypes.bfloat16,
  "fp8e4m3": dtypes.fp8e4m3,
  "fp8e5m2": dtypes.fp8e5m2,
}


@dataclass(frozen=True)
class Config:
  """The keys of `python -m uopattn.run`, in lower case.

  0 takes the value of another key: hkv that of h, m that of n, dv that of d. An empty dtype means half, or the dtype of
  the input file.
  """

  b: int = 1
  h: int = 32
  hkv: int = 0
  n: int = 1024
  m: int = 0
  d: int = 64
  dv: int = 0
  dtype: str = ""
  causal: int = 0
  cnt: int = 5
  verify: int = 1
  seed: int = 0
  gpus: int = 1
  shard: str = ""
  input: str = ""
  json: str = ""

  @property
  def settled(self) -> "Config":
    """The same with the values that 0, or no dtype, stand for; without an input file."""
    hkv, m, dv = self.hkv or self.h, self.m or self.n, self.dv or self.d
    return replace(self, hkv=hkv, m=m, dv=dv, dtype=self.dtype or "half")

  @property
  def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
    """The shapes of q, k and v."""
    x = self.settled
    return (x.b, x.h, x.m, x.d), (x.b, x.hkv, x.n, x.d), (x.b, x.hkv, x.n, x.dv)

  @property
  def arguments(self) -> Arguments:
    """The arguments of the attention."""
    return Arguments(is_causal=bool(self.causal), enable_gqa=True, return_lse=True)

  def spec_of(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
    """Return the attention on q, k and v. Raises Usage if their shapes do not fit together."""
    try:
      return make_spec(q, k, v, self.arguments)
    except (TypeError, ValueError) as error:
      raise Usage(str(error)) from error

  def spec(self, device: str | None = None) -> AttentionSpec:
    """Return the attention on contiguous inputs, which need not exist. Raises Usage if the shapes do not fit."""
    dtype = DTYPE_NAMES[self.dtype or "half"]
    return self.spec_of(*(Tensor.empty(*shape, dtype=dtype, device=device) for shape in self.shapes))


KEYS = tuple(field.name.upper() for field in fields(Config))
SWITCHES, NATURALS = ("CAUSAL", "VERIFY"), ("B", "H", "HKV", "N", "M", "D", "DV", "CNT", "GPUS")
SHARDS = ("batch", "heads", "sequence")  # in the order of q's axes
SHAPE_KEYS = ("B", "H", "HKV", "N", "M", "D", "DV")
ATTENTION_KEYS = (*SHAPE_KEYS, "DTYPE", "CAUSAL")
ALIKE = 0.8  # similarity from which a name counts as a misspelt key
PERIOD = 1_000_003  # random numbers; larger inputs repeat them, and as it is prime no two rows or heads are the same


def parse(words: Sequence[str], environment: Mapping[str, str]) -> Config:
  """Parse KEY=VALUE words; missing keys are looked up in the environment.

  Raises:
    Usage: a key is unknown, or does not take its value.
  """
  settings = {key: environment[key] for key in KEYS if key in environment}
  for word in words:
    key, equals, value = word.partition("=")
    if not equals or key not in KEYS:
      hint = f"; did you mean {meant}=?" if (meant := misspelt(key)) else ""
      raise Usage(f"{word!r} is not one of {', '.join(f'{key}=' for key in KEYS)}{hint}")
    settings[key] = value
  if settings.get("INPUT") and (clash := [key for key in SHAPE_KEYS if key in settings]):
    raise Usage(f"{clash[0]}={settings[clash[0]]} with INPUT={settings['INPUT']}: the shape is that of the file")
  return Config(**{key.lower(): _value(key, text) for key, text in settings.items()})


def parse_attention(words: Sequence[str]) -> Config:
  """Parse KEY=VALUE words of `ATTENTION_KEYS` alone. Raises Usage, see `parse`."""
  config = parse(words, {})
  if other := next((word for word in words if word.partition("=")[0] not in ATTENTION_KEYS), None):
    raise Usage(f"{other!r} is not one of {', '.join(f'{key}=' for key in ATTENTION_KEYS)}")
  return config


def misspelt(name: str) -> str | None:
  """Return the key that a name probably misspells: similar letters, or the same ones in another order; else None."""
  if name in KEYS:
    return None
  anagrams = (key for key in KEYS if len(key) > 1 and sorted(key) == sorted(name))
  alike = difflib.get_close_matches(name, [key for key in KEYS if len(key) > 3], n=1, cutoff=ALIKE)
  return next(anagrams, alike[0] if alike else None)


def _value(key: str, text: str) -> Any:
  names: dict[str, Sequence[str]] = {"DTYPE": tuple(DTYPE_NAMES), "SHARD": SHARDS}
  if key in names and text not in names[key]:
    raise Usage(f"{key}={text} is not one of {', '.join(names[key])}")
  if key in ("INPUT", "JSON", *names):
    return text
  if key in SWITCHES:
    if text not in ("0", "1"):
      raise Usage(f"{key}={text} is neither 0 nor 1")
    return int(text)
  lowest = 1 if key in NATURALS else 0
  if not (text.isascii() and text.isdigit() and int(text) >= lowest):
    raise Usage(f"{key}={text} is not a whole number of at least {lowest}")
  return int(text)


def described(spec: AttentionSpec) -> str:
  """Return an attention as a line of text, in the runner's keys."""
  s = spec
  sizes = f"B={s.B} H={s.Hq} HKV={s.Hkv} M={s.M} N={s.N} D={s.Dk} DV={s.Dv}"
  keys = f" with keys in {dtype_name(s.stored)}" if s.stored != s.dtype else ""
  keys += f" in pages of {s.pages[1]}" if s.pages else ""
  return f"{sizes} {dtype_name(s.dtype)}{keys}{' causal' * s.is_causal}"


def normal(shape: tuple[int, ...], dtype: DType, random: np.random.Generator, device: str | None = None) -> Array:
  """Return normal random numbers that a dtype can hold, as float32; a large array repeats `PERIOD` of them."""
  numbers = random.standard_normal(min(math.prod(shape), PERIOD), np.float32)
  return np.resize(numpy(tensor(numbers, dtype, device)).astype(np.float32), shape)


def four_bits(shape: tuple[int, ...], random: np.random.Generator) -> Array:
  """Return bytes of rows of 4 bits: any elements, and scales of groups from 1/4 to 4."""
  first = elements_in(shape[-1]) // 2
  rows = random.integers(0, 256, shape)
  rows[..., first:] = random.integers(0x28, 0x48, rows[..., first:].shape)  # fp8e4m3
  return rows.astype(np.float32)


def tensor(array: Array, dtype: DType, device: str | None = None) -> Tensor:
  """Return a Tensor of numbers that a dtype can hold."""
  return Tensor(array, device=device).cast(dtype).contiguous().realize()


def inputs(config: Config) -> list[Tensor]:
  """Return q, k and v: normal random numbers, or the tensors of the INPUT file.

  Raises:
    Usage: the file is missing or does not contain q, k and v.
  """
  if not config.input:
    dtype, random = DTYPE_NAMES[config.dtype or "half"], np.random.default_rng(config.seed)
    return [tensor(normal(shape, dtype, random), dtype) for shape in config.shapes]
  try:
    tensors = safe_load(config.input)
    loaded = [tensors[name].to(Device.DEFAULT).realize() for name in ("q", "k", "v")]
  except Exception as error:  # an invalid header can make tinygrad's reader raise anything
    raise Usage(f"INPUT={config.input} is not a safetensors file with q, k and v: {reason(error)}") from error
  return [x.cast(DTYPE_NAMES[config.dtype] if config.dtype else x.dtype).contiguous().realize() for x in loaded]


@dataclass(frozen=True)
class Problem:
  """Inputs, and the kernel to run on them.

  Attributes:
    launch: on several devices that of one of them.
    spec: of the whole.
    division: how several devices divide the work; None on one.
  """

  q: Tensor
  k: Tensor
  v: Tensor
  launch: Launch
  spec: AttentionSpec
  division: Division | None = None

  @property
  def devices(self) -> tuple[str, ...]:
    return devices_of(self.q.device)

  @property
  def products(self) -> dict[str, bool]:
    """How the kernel multiplies, as the gate takes it: `tf32` and `cut`."""
    schedule = self.launch.schedule
    return {"tf32": self.spec.tf32 and schedule.tf32, "cut": self.spec.dtype in DTYPES_8 and schedule.cuts}

  def output_gradient(self) -> Tensor:
    """Return a normal random gradient of the output, (B, Hq, M, Dv), the same in each call."""
    s = self.spec
    return tensor(normal((s.B, s.Hq, s.M, s.Dv), s.dtype, np.random.default_rng(1)), s.dtype)

  def attend(self) -> tuple[Tensor, Tensor]:
    """Run the attention; return the output and the LSE, new and not yet realized."""
    if self.division is None:
      return forward(self.launch, self.q, self.k, self.v)
    causal = self.spec.is_causal
    return attention(self.q, self.k, self.v, is_causal=causal, enable_gqa=True, return_lse=True, backend="kernel")

  def computation(self, times: int = 1) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that runs the attention `times` times and returns the output and the LSE, realized.

    One device writes the same buffers each time. On several it does so when TinyJit replays it.
    """
    s = self.spec
    o = Tensor.empty(s.B, s.Hq, s.M, s.Dv, dtype=s.dtype)
    lse = Tensor.empty(s.B, s.Hq, s.M, dtype=dtypes.float32)

    def on_one_device() -> tuple[Tensor, Tensor]:
      out, sums = o, lse
      for _ in range(times):
        out, sums = forward(self.launch, self.q, self.k, self.v, out, sums)
      Tensor.realize(out, sums)
      return o, lse

    def on_several() -> tuple[Tensor, Tensor]:
      for _ in range(times):
        out, sums = self.attend()
        Tensor.realize(out, sums)
      return out, sums

    return on_one_device if self.division is None else on_several


def prepare(config: Config) -> Problem:
  """Load the inputs and choose the kernel.

  Raises:
    Usage: the inputs do not fit together, or no kernel supports them.
  """
  q, k, v = inputs(config)
  spec = config.spec_of(q, k, v)
  try:
    if config.gpus == 1:
      return Problem(q, k, v, launch_on(spec, Device.DEFAULT), spec)
    q, k, v = (x.shard(devices(config.gpus), shard_axis(config, spec)).realize() for x in (q, k, v))
    division = division_of(q, k, v, spec, config.arguments)
    launch = division.launch()
    return Problem(q, k, v, next(iter(launch.values())) if isinstance(launch, dict) else launch, spec, division)
  except NoKernel as error:
    raise Usage(str(error)) from error


def outputs_of(launches: Iterable[Launch]) -> dict[str, Input]:
  """Return the buffers that launches write, by name."""
  return {x.name: x for launch in launches for x in launch.buffers() if x.name in launch.kernel.outputs}


def devices(count: int) -> tuple[str, ...]:
  """Return the first `count` devices of the default device's kind."""
  return tuple(Device.canonicalize(f"{kind_of(Device.DEFAULT)}:{i}") for i in range(count))


def shard_axis(config: Config, spec: AttentionSpec) -> int:
  """Return the axis that SHARD names, or the first that the devices can divide. Raises Usage if there is none."""
  sizes = {"batch": (spec.B,), "heads": (spec.Hq, spec.Hkv), "sequence": (spec.M, spec.N)}
  for axis, name in enumerate(SHARDS):
    if config.shard in ("", name) and not any(n % config.gpus for n in sizes[name]):
      return axis
  axes = config.shard or "batch, heads or sequence"
  raise Usage(f"GPUS={config.gpus} does not evenly divide the {axes} of this problem")
