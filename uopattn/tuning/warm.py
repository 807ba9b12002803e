"""`warm`: kernels compiled before they are needed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinygrad import Device
from tinygrad.helpers import tqdm

from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.compile import Job, compile_all, kernels_of
from uopattn.tuning.switch import options

Shape = str | Mapping[str, Any] | AttentionSpec


def warm(what: Shape | Iterable[Shape], device: str | None = None, *, backward: bool = False) -> int:
  """Compile kernels ahead, so that a service's first request need not wait for them; return their number.

  The kernels stay in this process and in tinygrad's cache on disk. Several are compiled at once, by tinygrad's
  PARALLEL processes. While tuning is on, attentions are tuned first, see `uopattn.tune`.

  Args:
    what: attentions, each as the keys of `python -m uopattn.run`: "B=1 H=32 HKV=8 N=4096 D=128 DTYPE=half CAUSAL=1", or
      a dict of these keys. Their q, k and v are contiguous. For views and other arguments give what
      `uopattn.spec.spec.make_spec(q, k, v, Arguments(...))` returns.
    device: a tinygrad device; None is the default one.
    backward: also the kernels of the gradients.

  Raises:
    ValueError: a key or value is invalid, the shapes do not fit together, or no kernel serves them.

  Example:
    >>> import uopattn
    >>> uopattn.warm(["H=2 N=64 D=32 DTYPE=float", {"H": 2, "M": 1, "N": 64, "D": 32, "DTYPE": "float"}])
    2
  """
  device = Device.canonicalize(device)
  jobs = [job for spec in _specs(what, device) for job in _jobs(spec, device, backward)]
  compile_all(jobs)
  launches = list(dict.fromkeys(x for job in jobs for x in kernels_of(job)))
  for launch in tqdm(launches, desc="loading kernels", disable=None):
    launch.build(device)
  return len(launches)


def _specs(what: Shape | Iterable[Shape], device: str) -> list[AttentionSpec]:
  from uopattn.measure.command_line import Usage
  from uopattn.tuning.command import config_of, spec_of  # which measures: not needed by whoever imports uopattn

  shapes = [what] if isinstance(what, str | Mapping | AttentionSpec) else list(what)
  found = []
  for shape in shapes:
    if isinstance(shape, AttentionSpec):
      found.append(replace(shape, return_lse=True))  # as `attention` launches it
      continue
    if not isinstance(shape, str | Mapping):
      raise TypeError(f"what holds {shape!r}; it must be text such as 'N=1024 D=64', a dict of such keys, or a spec")
    words = shape.split() if isinstance(shape, str) else [f"{key}={value}" for key, value in shape.items()]
    try:
      found.append(spec_of(config_of(words), device))
    except Usage as error:
      raise ValueError(f"what: {error}") from error
  return found


def _jobs(spec: AttentionSpec, device: str, backward: bool) -> list[Job]:
  passes = (False, True) if backward else (False,)
  if (tuning := options()) is None:
    return [(spec, device, None, x) for x in passes]
  from uopattn.tuning.choice import choice
  from uopattn.tuning.choose import chosen

  return [(spec, device, choice(chosen(spec, device, tuning, x)), x) for x in passes]
