"""Handles: what `uopattn.patch` and `uopattn.onnx.register` return, to undo what they did."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Function = Callable[..., Any]


class Handle:
  """Undoes a replacement, by `restore()` or at the end of a `with` block.

  Several handles of the same replacement may be held, and restored in any order: the youngest one that is left decides
  the options, and the last one puts back what was there before. `restore()` of a restored handle does nothing.
  """

  def __init__(self, switch: "Switch", options: Any):
    self.options = options
    self._switch = switch

  def restore(self) -> None:
    """End this replacement."""
    self._switch.remove(self)

  def __enter__(self) -> "Handle":
    return self

  def __exit__(self, *_: object) -> None:
    self.restore()


class Switch:
  """A replacement of some of tinygrad's functions, in force while at least one of its handles is held.

  Args:
    install: replaces, and pushes the functions that undo it to an ExitStack.
  """

  def __init__(self, install: Callable[[ExitStack], None]):
    self._install = install
    self._handles: list[Handle] = []
    self._undo = ExitStack()

  @property
  def options(self) -> Any:
    """The options of the youngest handle; None if none is held."""
    return self._handles[-1].options if self._handles else None

  def add(self, options: Any) -> Handle:
    """Return a new handle."""
    with ExitStack() as undo:
      self._install(undo)  # what is in place already stays
      self._undo.push(undo.pop_all())
    handle = Handle(self, options)
    self._handles.append(handle)
    return handle

  def remove(self, handle: Handle) -> None:
    self._handles = [x for x in self._handles if x is not handle]
    if not self._handles:
      self._undo.close()


def replace_method(
  owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack
) -> None:
  """Replace a method by `wrap(method)`, and push what puts it back. It does nothing if the method is one of ours.

  If someone else has replaced the method since, theirs stays: ours then calls the one that it was made from.
  """
  own, inherited = getattr(owner, name), name not in vars(owner)
  if own.__module__.startswith("uopattn."):
    return
  value = functools.update_wrapper(wrap(own), own, assigned=("__name__", "__qualname__", "__doc__"))
  setattr(owner, name, value)

  def put_back() -> None:
    if vars(owner).get(name) is not value:
      return
    if inherited:
      delattr(owner, name)
    else:
      setattr(owner, name, own)

  undo.callback(put_back)
