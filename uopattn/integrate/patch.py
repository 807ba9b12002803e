"""`patch`: kernels for models that call tinygrad's own attention."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from tinygrad import Tensor, dtypes
from tinygrad.helpers import TRAINING

from uopattn.api.attention import Call
from uopattn.integrate.causal import causal_start
from uopattn.integrate.handle import Handle, Switch, replace_method
from uopattn.integrate.llm import replace_mla
from uopattn.plan.dispatch import NoKernel
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments

BACKENDS = ("auto", "kernel")


@dataclass(frozen=True)
class Options:
  """The arguments of `patch`."""

  backend: str
  log: bool


def patch(*, backend: str = "auto", log: bool = True) -> Handle:
  """Let `Tensor.scaled_dot_product_attention` use kernels from now on, in every model.

  Call it before modules are imported that keep the function under a name of their own. Arguments, shapes, dtypes and
  gradients are tinygrad's. Where no kernel serves a call, tinygrad's own function does, errors included. Where one
  does, three things differ: a row that sees no key gives 0 instead of NaN, `dropout_p` drops other weights for the same
  seed, and second derivatives raise an error.

  Keys and values that are views of a cache are read in place, as are those of symbolic length. Causal masks made by
  `Tensor.full(shape, -inf).triu(start + 1)`, as in tinygrad's own models, are recognised: hidden tiles are skipped.
  In a `tinygrad.function` tinygrad's attention stays while `TRAINING` is set, as gradients of kernels end there. Of
  tinygrad.llm, if it can be imported, the blocks with multi-head latent attention use kernels too.

  Args:
    backend: "kernel" raises an error if no kernel serves a call; "auto" uses tinygrad's own attention.
    log: log why tinygrad's own attention is used, one line per reason.

  Returns:
    A handle: `restore()`, or the end of a `with` block, puts tinygrad's function back. Several may be held, and
    restored in any order; the youngest that is left decides the options.

  Raises:
    ValueError: the backend is unknown.

  Example:
    >>> from tinygrad import Tensor
    >>> import uopattn
    >>> q = k = v = Tensor.ones(1, 8, 100, 64)
    >>> with uopattn.patch():
    ...   q.scaled_dot_product_attention(k, v, is_causal=True).mean().item()
    1.0
  """
  if backend not in BACKENDS:
    raise ValueError(f"backend is {backend!r}; accepted are {', '.join(BACKENDS)}")
  return PATCH.add(Options(backend, log))


def _install(undo: ExitStack) -> None:
  replace_method(Tensor, "scaled_dot_product_attention", _with_kernels, undo)
  replace_mla(served, undo)


PATCH = Switch(_install)


def _with_kernels(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
  """Return tinygrad's `scaled_dot_product_attention` with kernels."""

  def scaled_dot_product_attention(
    self: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
  ) -> Tensor:
    out = None
    if _is_attention(self, key, value, attn_mask, is_causal, enable_gqa):
      out = served(self, key, value, _arguments(self, key, attn_mask, dropout_p, is_causal, enable_gqa))
    return own(self, key, value, attn_mask, dropout_p, is_causal, enable_gqa) if out is None else out

  return scaled_dot_product_attention


def _arguments(
  q: Tensor, k: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> Arguments:
  start = None if attn_mask is None else causal_start(attn_mask, q.shape[-2], k.shape[-2])
  return Arguments(
    attn_mask=attn_mask if start is None else None,
    q_start=0 if start is None else start,
    is_causal=is_causal or start is not None,
    dropout_p=dropout_p,
    enable_gqa=enable_gqa,
  )


def _is_attention(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, enable_gqa: bool) -> bool:
  """Return whether a patch is in force, and both libraries take the arguments; tinygrad judges all others."""
  if PATCH.options is None:
    return False
  if not all(isinstance(x, Tensor) and x.ndim >= 2 and x.dtype not in dtypes.weaks for x in (q, k, v)):
    return False
  if mask is not None and (is_causal or not isinstance(mask, Tensor)):
    return False
  return not enable_gqa or min(q.ndim, k.ndim, v.ndim) >= 3


def served(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> Tensor | None:
  """Return the output of a kernel; None, logging why, if there is none, or no patch is in force."""
  options: Options | None = PATCH.options
  if options is None:
    return None
  try:
    if in_function() and TRAINING:
      raise NoKernel("TRAINING is set, and tinygrad takes no gradient of kernels inside a tinygrad.function")
    call = Call.of(q, k, v, arguments)
    launch = call.launch()
  except (TypeError, ValueError) as error:
    if options.backend == "kernel":
      raise ValueError(f"uopattn.patch(backend='kernel'): {error}") from error
    if options.log:
      for reason in error.reasons if isinstance(error, NoKernel) else (str(error),):
        log_once(f"tinygrad's own attention is used: {reason}")
    return None
  return cast(Tensor, call.run(launch, "auto"))
