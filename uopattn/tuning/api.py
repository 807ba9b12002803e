"""What users call: `tune`, the switch and what is known by it, and `warm`, which compiles kernels ahead.

Modules that measure are imported when they are needed, as few processes need them.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinygrad import Device
from tinygrad.helpers import tqdm

from uopattn.integrate.handle import Handle, Switch
from uopattn.plan.dispatch import choose_by
from uopattn.plan.launch import Launch
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.winners import WINNERS, is_entry

FORMAT = 2  # of the exported file
SWITCH = Switch(lambda undo: None)  # nothing of tinygrad is replaced; its options are the argument `search`
Shape = str | Mapping[str, Any] | AttentionSpec


class Tune:
  """Choose kernels, tiles and splits by measuring, instead of by the model that each kernel comes with.

  While tuning is on, the first `attention` of each shape measures some candidates, checks each by the gate on random
  inputs, and remembers the fastest in tinygrad's database on disk: other processes search nothing. So does the first
  `backward` for the gradients. It takes some 10 to 60 seconds for each. Other tiles may give other bits, within the
  gate's bounds. `flash` uses the model's tiles, as do attentions whose time depends on what Tensors hold: with
  `score_mod`, `mask_mod`, `block_mask`, pages, 8-bit caches, dropout or packed sequences.

  Inside a `TinyJit`'s capture or a `tinygrad.function`, and on the emulator, nothing is measured; what is known is used
  there, with one log line. A candidate with a wrong result is never chosen, and logged as an error.
  `UOPATTN_TUNE=1` in the environment turns tuning on for a process; `python -m uopattn.tune` tunes ahead.

  Args:
    search: whether to measure what is not known yet; False uses only what is known, as after `tune.load`.

  Returns:
    A handle: `restore()`, or the end of a `with` block, turns tuning off.

  Example:
    >>> from tinygrad import Tensor
    >>> import uopattn
    >>> q = k = v = Tensor.ones(1, 2, 64, 32)
    >>> with uopattn.tune(search=False):  # without the argument it would measure
    ...   uopattn.attention(q, k, v).mean().item()
    1.0
  """

  def __call__(self, *, search: bool = True) -> Handle:
    if search not in (False, True):
      raise TypeError(f"search is {search!r}; it must be True or False")
    return SWITCH.add(search)

  def clear(self) -> int:
    """Forget all that was measured, for all devices; return the number of entries.

    Example:
      >>> import uopattn
      >>> forgotten = uopattn.tune.clear()
      >>> uopattn.tune.clear()
      0
    """
    _forget()
    return WINNERS.clear()

  def export(self, file: str | Path) -> int:
    """Write all that was measured to a JSON file; return the number of entries.

    Example:
      >>> import os, tempfile
      >>> import uopattn
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   count = uopattn.tune.export(f"{folder}/tuned.json")
      ...   uopattn.tune.load(f"{folder}/tuned.json") == count
      True
    """
    entries = WINNERS.every()
    Path(file).write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n")
    return len(entries)

  def load(self, file: str | Path) -> int:
    """Add the entries of an exported file to what is known, replacing older ones; return the number stored.

    An entry is used only on the device model, and with the versions, that it was measured with, and only if it names
    one of the candidates: tune once for a fleet of the same machines.

    Raises:
      ValueError: the file was not made by `export`.

    Example: see `export`.

      >>> import uopattn
      >>> uopattn.tune.load("/dev/null")
      Traceback (most recent call last):
      ...
      ValueError: /dev/null is not a file that uopattn.tune.export wrote
    """
    try:
      content: Any = json.loads(Path(file).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
      content = None
    valid = isinstance(content, dict) and content.get("format") == FORMAT and isinstance(content.get("entries"), list)
    if not valid or not all(map(is_entry, content["entries"])):
      raise ValueError(f"{file} is not a file that uopattn.tune.export wrote")
    stored = sum(map(WINNERS.write, content["entries"]))
    _forget()
    return stored


def _forget() -> None:
  """Forget what this process knows; the entries on disk stay."""
  from uopattn.tuning.search import KNOWN

  KNOWN.clear()


def _measured(spec: AttentionSpec, device: str, backward: bool) -> tuple[Launch, ...] | None:
  """Return the launches to use while tuning is on, else None; see `choose_by`.

  The youngest handle says how to tune. Without one `UOPATTN_TUNE=1` tunes by searching.
  """
  search: bool | None = SWITCH.options
  if search is None and os.environ.get("UOPATTN_TUNE") != "1":
    return None
  from uopattn.tuning.search import chosen

  return chosen(spec, device, search is not False, backward)


tune = Tune()
choose_by(_measured)


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
  from uopattn.tuning.case import Case, choice
  from uopattn.tuning.compile import compile_all, kernels_of

  device = Device.canonicalize(device)
  cases = [Case.of(spec, device, x) for spec in _specs(what, device) for x in ((False, True) if backward else (False,))]
  measured = [(case, _measured(case.spec, device, case.backward)) for case in cases]
  jobs = [(case, None if launches is None else choice(launches)) for case, launches in measured]
  compile_all(jobs)
  launches = list(dict.fromkeys(x for job in jobs for x in kernels_of(job)))
  for launch in tqdm(launches, desc="loading kernels", disable=None):
    launch.build(device)
  return len(launches)


def _specs(what: Shape | Iterable[Shape], device: str) -> list[AttentionSpec]:
  from uopattn.measure.problem import parse_attention
  from uopattn.measure.program import Usage

  shapes = [what] if isinstance(what, str | Mapping | AttentionSpec) else list(what)
  specs = []
  for shape in shapes:
    if isinstance(shape, AttentionSpec):
      specs.append(replace(shape, return_lse=True))  # as `attention` launches it
      continue
    if not isinstance(shape, str | Mapping):
      raise TypeError(f"what holds {shape!r}; it must be text such as 'N=1024 D=64', a dict of such keys, or a spec")
    words = shape.split() if isinstance(shape, str) else [f"{key}={value}" for key, value in shape.items()]
    try:
      specs.append(parse_attention(words).spec(device))
    except Usage as error:
      raise ValueError(f"what: {error}") from error
  return specs
