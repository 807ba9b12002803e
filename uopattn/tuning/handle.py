"""`tune`: the public switch, and what is known by it."""

import json
from pathlib import Path
from typing import Any

from uopattn.integrate.handle import Handle
from uopattn.plan.dispatch import choose_by
from uopattn.plan.launch import Launch
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning import store
from uopattn.tuning.switch import SWITCH, Options, options

FORMAT = 2  # of the exported file


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
    return SWITCH.add(Options(search))

  def clear(self) -> int:
    """Forget all that was measured, for all devices; return the number of entries.

    Example:
      >>> import uopattn
      >>> forgotten = uopattn.tune.clear()
      >>> uopattn.tune.clear()
      0
    """
    _forget()
    return store.clear()

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
    entries = store.every()
    Path(file).write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n")
    return len(entries)

  def load(self, file: str | Path) -> int:
    """Add the entries of an exported file to what is known, in the place of others; return the number stored.

    An entry is used only by the device's model and the versions that it was measured with, and only if it names one of
    the candidates: tune once for a fleet of the same machines.

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
    if not valid or not all(map(store.is_entry, content["entries"])):
      raise ValueError(f"{file} is not a file that uopattn.tune.export wrote")
    stored = sum(map(store.write, content["entries"]))
    _forget()
    return stored


def _forget() -> None:
  """Forget what this process knows; the entries on disk stay."""
  from uopattn.tuning.choose import KNOWN  # imports all that measuring needs

  KNOWN.clear()


def _measured(spec: AttentionSpec, device: str, backward: bool) -> tuple[Launch, ...] | None:
  """Return the launches to use while tuning is on; see `choose_by`."""
  if (tuning := options()) is None:
    return None
  from uopattn.tuning.choose import chosen  # which measures, by modules that few processes need

  return chosen(spec, device, tuning, backward)


tune = Tune()
choose_by(_measured)
