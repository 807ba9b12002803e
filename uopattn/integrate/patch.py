"""`patch`: kernels for models that call tinygrad's own attention.

Masks that are causal by construction are recognised: kernels then skip hidden tiles, and read no mask. tinygrad.llm's
block with multi-head latent attention (MLA; DeepSeek-V2, 2024), which multiplies without SDPA, is replaced too. Its
other blocks call `scaled_dot_product_attention`, or kernels of their own, which stay.
"""

import hashlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import TRAINING
from tinygrad.uop.ops import GroupOp, Ops

from uopattn.api.attention import Call, check_backend
from uopattn.integrate.handle import Handle, Switch, replace_method
from uopattn.plan.dispatch import NoKernel
from uopattn.plan.forward import has_gradients
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import device_of

Start = int | UOp
# SHA-256 of the source of the MLA block's method in tinygrad 0.14.0.
KNOWN_MLA = "224d8e5a2a2ce60c44017c243fadbf771d057282ce745a02aece32e1002de9a7"


@dataclass(frozen=True)
class Options:
  """The arguments of `patch`."""

  backend: str
  log: bool


def patch(*, backend: str = "auto", log: bool = True) -> Handle:
  """Let `Tensor.scaled_dot_product_attention` use kernels from now on, in every model.

  Call it before importing modules that keep their own reference to the function. Arguments, shapes, dtypes and
  gradients are tinygrad's. Where no kernel serves a call, tinygrad's own function does, errors included. Where one
  does, three things differ: a row that sees no key gives 0 instead of NaN, `dropout_p` drops other weights for the same
  seed, and second derivatives raise an error.

  Keys and values that are views of a cache are read in place, as are those of symbolic length. Causal masks made by
  `Tensor.full(shape, -inf).triu(start + 1)`, as in tinygrad's own models, are recognised: hidden tiles are skipped.
  In a `tinygrad.function`, while `TRAINING` is set, tinygrad's attention stays where kernels have no gradients: with
  dropout or Variables, on several devices, and on GPUs of which tinygrad itself renders the kernels. Of tinygrad.llm,
  if it can be imported, the blocks with multi-head latent attention use kernels too.

  Args:
    backend: "kernel" raises an error if no kernel serves a call; "auto" uses tinygrad's own attention.
    log: log why tinygrad's own attention is used, one line per reason. Other lines of the logger "uopattn" stay: those
      on views that are copied, and on gradients that go through plain tinygrad ops.

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
  check_backend(backend, ("auto", "kernel"))
  return PATCH.add(Options(backend, log))


def _install(undo: ExitStack) -> None:
  replace_method(Tensor, "scaled_dot_product_attention", _with_kernels, undo)
  _replace_mla(undo)


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
      out = served(self, key, value, _arguments(self, key, value, attn_mask, dropout_p, is_causal, enable_gqa))
    return own(self, key, value, attn_mask, dropout_p, is_causal, enable_gqa) if out is None else out

  return scaled_dot_product_attention


def _arguments(
  q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> Arguments:
  start = None
  if attn_mask is not None and _has_axes_of(attn_mask, q, k, v):
    start = causal_start(attn_mask, q.shape[-2], k.shape[-2])
  return Arguments(
    attn_mask=attn_mask if start is None else None,
    q_start=0 if start is None else start,
    is_causal=is_causal or start is not None,
    dropout_p=dropout_p,
    enable_gqa=enable_gqa,
  )


def _has_axes_of(mask: Tensor, *qkv: Tensor) -> bool:
  """Return whether a mask gives the output no further axes, and no batches or heads that q, k and v lack."""
  leading = zip_longest(*(x.shape[-3::-1] for x in (mask, *qkv)), fillvalue=1)  # heads, then batches
  return mask.ndim <= max(x.ndim for x in qkv) and all(n in (1, *others) for n, *others in leading)


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
    call = Call.of(q, k, v, arguments)
    launch = call.division.launch()
    drops = in_function() and call.spec.dropout_p > 0
    if TRAINING and (drops or not has_gradients(launch, device_of(q))):
      raise NoKernel("TRAINING is set, and kernels have no gradients, or no dropout, in this tinygrad.function")
  except (TypeError, ValueError) as error:
    if options.backend == "kernel":
      raise ValueError(f"uopattn.patch(backend='kernel'): {error}") from error
    if options.log:
      for reason in error.reasons if isinstance(error, NoKernel) else (str(error),):
        log_once(f"tinygrad's own attention is used: {reason}")
    return None
  return cast(Tensor, call.run(launch, "auto"))


def causal_start(mask: Tensor, rows: Start, keys: Start) -> Start | None:
  """Return the position of the first query if a mask is causal, for `q_start`; None for any other mask.

  A mask is recognised if it was made by `Tensor.full(shape, -inf).triu(start + 1)` or
  `Tensor.ones(shape, dtype=dtypes.bool).tril(start)`, is not realized, and `start` is 0 or keys - rows. Its graph must
  be the one that tinygrad makes for these, node by node; nothing is inferred from values.

  Args:
    mask: of the scores' shape, or with sizes of 1 for batches and heads.
    rows, keys: the numbers of queries and of keys, which may hold Variables.
  """
  if mask.uop.op is not Ops.WHERE or mask.ndim < 2 or mask.shape[-2:] != (rows, keys):
    return None
  is_seen, hidden, seen = mask.uop.src
  values = (False, True) if mask.dtype == dtypes.bool else (-inf, 0.0)
  if (_filling(hidden), _filling(seen)) != values:
    return None
  last = keys - rows
  for start in (last if isinstance(last, int) else last.simplify(), 0):
    expected = Tensor.full(mask.shape, -inf, buffer=False).triu(start + 1)
    if expected.uop.src[0] is is_seen:
      return start
  return None


def _filling(x: UOp) -> object:
  """Return the number that x is filled with: an expanded constant, or a new buffer that only holds one."""
  while x.op in GroupOp.Movement - {Ops.PAD} or x.op is Ops.AFTER:
    if x.op is not Ops.AFTER:
      x = x.src[0]
    elif len(x.src) == 2 and x.src[1].op is Ops.STORE and x.src[1].src[0] is x.src[0]:
      x = x.src[1].src[1]
    else:
      return None
  return x.arg if x.op is Ops.CONST else None


def _replace_mla(undo: ExitStack) -> None:
  """Replace the attention of `tinygrad.llm.model.MLATransformerBlock`, if that is the method known here."""
  try:
    from tinygrad.llm import model
  except ImportError:  # in 0.14.0's wheel, which lacks tinygrad.llm.kernels
    return
  source = inspect.getsource(model.MLATransformerBlock._attention)
  if hashlib.sha256(source.encode()).hexdigest() != KNOWN_MLA:
    log_once("the MLA blocks of tinygrad.llm are left as they are: tinygrad has changed since 0.14.0")
    return

  def wrap(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def _attention(self: Any, x: Tensor, start_pos: Start) -> Tensor:
      out = _latent_attention(self, x, start_pos, model.apply_rope)
      return own(self, x, start_pos) if out is None else out

    return _attention

  replace_method(model.MLATransformerBlock, "_attention", wrap, undo)


def _latent_attention(
  block: Any, x: Tensor, start_pos: Start, rotate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
  """Return the attention of an MLA block, with weights absorbed as in decoding; None if no kernel serves it.

  All heads share one key, the latent vector and its rotated part; the value is the latent vector, read from the keys.

  Args:
    x: (B, T, width), the normalised input at the positions from `start_pos` on.
  """
  c, (B, T, _) = block.config, x.shape
  rank, nope, end = c.kv_lora_rank, c.head_dim - c.rope_dim, start_pos + T

  def with_rotation(first: Tensor, rest: Tensor) -> Tensor:
    has_positions = not (c.ssm and c.ssm.kda)
    return first.cat(rotate(rest, block.freqs_cis[start_pos:end]) if has_positions else rest, dim=-1)

  queries = block.attn_q_b(block.attn_q_a_norm(block.attn_q_a(x))) if c.q_lora_rank else block.attn_q(x)
  q = queries.reshape(B, T, c.n_heads, c.head_dim).transpose(1, 2)
  q = with_rotation(q[..., :nope] @ block.attn_k_b["weight"].transpose(-1, -2), q[..., nope:])
  new = block.attn_kv_a_mqa(x).unsqueeze(1)  # (B, 1, T, rank + rope_dim)
  new = with_rotation(block.attn_kv_a_norm(new[..., :rank]), new[..., rank:])
  cache = block.cache_k.uop
  keys = Tensor(cache.after(block.cache_k[:, :, start_pos:end].uop.store(new.uop)))[:, :, :end]
  arguments = Arguments(is_causal=True, q_start=start_pos, scale=c.head_dim**-0.5, enable_gqa=True)
  out = served(q, keys, keys[..., :rank], arguments)  # (B, Hq, T, rank)
  if out is None:
    return None
  heads = out @ block.attn_v_b["weight"].transpose(-1, -2)
  return block.attn_output(heads.transpose(1, 2).reshape(B, T, -1))
