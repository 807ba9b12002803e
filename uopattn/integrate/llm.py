"""tinygrad.llm's block with multi-head latent attention (MLA; DeepSeek-V2, 2024), which multiplies without SDPA.

Its other blocks call `scaled_dot_product_attention`, or kernels of their own, which stay.
"""

import hashlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tinygrad import Tensor, UOp

from uopattn.integrate.handle import replace_method
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments

# Called as served(q, k, v, arguments); returns None if no kernel serves the case.
Served = Callable[[Tensor, Tensor, Tensor, Arguments], Tensor | None]

# SHA-256 of the method's source in tinygrad 0.14.0.
KNOWN = "224d8e5a2a2ce60c44017c243fadbf771d057282ce745a02aece32e1002de9a7"


def replace_mla(served: Served, undo: ExitStack) -> None:
  """Replace the attention of `tinygrad.llm.model.MLATransformerBlock`, if that is the method known here."""
  try:
    from tinygrad.llm import model
  except ImportError:  # in 0.14.0's wheel, which lacks tinygrad.llm.kernels
    return
  source = inspect.getsource(model.MLATransformerBlock._attention)
  if hashlib.sha256(source.encode()).hexdigest() != KNOWN:
    log_once("the MLA blocks of tinygrad.llm are left as they are: tinygrad has changed since 0.14.0")
    return

  def wrap(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def _attention(self: Any, x: Tensor, start_pos: int | UOp) -> Tensor:
      out = latent_attention(self, x, start_pos, model.apply_rope, served)
      return own(self, x, start_pos) if out is None else out

    return _attention

  replace_method(model.MLATransformerBlock, "_attention", wrap, undo)


def latent_attention(
  block: Any, x: Tensor, start_pos: int | UOp, rotate: Callable[[Tensor, Tensor], Tensor], served: Served
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
