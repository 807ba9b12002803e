"""The record of the cards, and processors, on which each kernel has run right: `cards.json`, see `scripts/trust`."""

import functools
import json
from pathlib import Path
from typing import TypedDict

from uopattn.runtime.device import kind_of, opened
from uopattn.runtime.gpu import gpu_name

RECORD = Path(__file__).with_name("cards.json")


class Card(TypedDict):
  """An entry: one card.

  Attributes:
    name: the product's.
    device: its kind in tinygrad: "CUDA", "AMD", "CPU".
    arch: its architecture, see `family`.
    driver, uopattn, tinygrad: versions.
    date: of the report, as YYYY-MM-DD.
    kernels: the schedules that were right with all their probes.
  """

  name: str
  device: str
  arch: str
  driver: str
  uopattn: str
  tinygrad: str
  date: str
  kernels: list[str]


@functools.cache
def cards() -> tuple[Card, ...]:
  """Return all entries of the record."""
  return tuple(json.loads(RECORD.read_text()))


def family(device: str) -> str:
  """Return the architecture of a device as the record has it.

  A CPU's is given without compiler flags. OpenCL has no architecture, so the card's name is used.
  """
  if kind_of(device) == "CL":
    return gpu_name(device)
  return str(opened(device).renderer.target.arch).split(",")[0]


def is_recorded(kernel: str, device: str) -> bool:
  """Return whether a kernel is recorded as run on a card of the device's kind and architecture."""
  return _is_recorded(kernel, kind_of(device), family(device))


@functools.cache
def _is_recorded(kernel: str, kind: str, arch: str) -> bool:
  return any((x["device"], x["arch"]) == (kind, arch) and kernel in x["kernels"] for x in cards())
