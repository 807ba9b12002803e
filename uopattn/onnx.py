"""ONNX models with fast attention: `uopattn.onnx.register()`."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from uopattn.api.attention import check_backend
from uopattn.integrate.handle import Handle, Switch


def register(*, backend: str = "auto") -> Handle:
  """Let tinygrad's `OnnxRunner` compute attention by kernels from now on.

  The operators are Attention, opsets 23 to 25, and com.microsoft's MultiHeadAttention and GroupQueryAttention, which
  tinygrad lacks. `qk_matmul_output` is computed by plain tinygrad ops, if a model reads it. `uopattn.integrate.onnx`
  says what the latter two mean. MultiHeadAttention's cache_indirection is not supported.

  Kernels read GroupQueryAttention's caches of 8 bits as they are stored, with scales of channels multiplied into
  queries and outputs instead. Caches of 4 bits are copied to 8 bits first.

  Args:
    backend: as for `uopattn.attention`.

  Returns:
    A handle: `restore()`, or the end of a `with` block, puts tinygrad's table of operators back. Several may be held,
    and restored in any order; the youngest that is left decides the backend.

  Raises:
    ValueError: the backend is unknown.

  Example:
    >>> import uopattn
    >>> from tinygrad.nn.onnx import onnx_ops
    >>> with uopattn.onnx.register():
    ...   "GroupQueryAttention" in onnx_ops
    True
    >>> "GroupQueryAttention" in onnx_ops
    False
  """
  check_backend(backend)
  return REGISTER.add(backend)


def _with_backend(operator: Callable[..., Any]) -> Callable[..., Any]:
  """Return an operator that uses the backend of the youngest handle."""
  return lambda *inputs, **attributes: operator(*inputs, **attributes, backend=REGISTER.options or "auto")


def _install(undo: ExitStack) -> None:
  from tinygrad.nn.onnx import Domain, OpSetId, onnx_ops  # takes a while, and few programs need it

  from uopattn.integrate.onnx.grouped import group_query_attention
  from uopattn.integrate.onnx.multi_head import multi_head_attention
  from uopattn.integrate.onnx.standard import attention

  if "GroupQueryAttention" in onnx_ops:
    return
  table = cast(dict[str, Any], onnx_ops)
  contrib = OpSetId(Domain.MICROSOFT_CONTRIB_OPS, 1)
  added = {
    "Attention": table["Attention"] | {OpSetId(Domain.ONNX, 23): _with_backend(attention)},
    "MultiHeadAttention": {contrib: _with_backend(multi_head_attention)},
    "GroupQueryAttention": {contrib: _with_backend(group_query_attention)},
  }
  before = {name: table[name] for name in added if name in table}
  table |= added

  def put_back() -> None:
    for name in added:
      del table[name]
    table.update(before)

  undo.callback(put_back)


REGISTER = Switch(_install)
