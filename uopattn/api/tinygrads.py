"""tinygrad's own attention, for what uopattn refuses and tinygrad takes."""

from tinygrad import Tensor

from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments

scaled_dot_product_attention = Tensor.scaled_dot_product_attention  # as it was before anything replaced it
PARAMETERS = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")


def by_tinygrad(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, refusal: Exception) -> Tensor:
  """Return what tinygrad computes where uopattn refused its arguments, with one log line that says why.

  Integers and masks with batches of their own are examples.

  Raises:
    Exception: the refusal, if tinygrad refuses these arguments too or does not have all of them.
  """
  given = {name: getattr(arguments, name) for name in PARAMETERS}
  others = (x for x in arguments.given if x[0] not in PARAMETERS)
  beyond = [name for name, declared, value in others if value is not declared.default]
  tensors = [x for x in (q, k, v, given["attn_mask"]) if isinstance(x, Tensor)]
  devices = {x.device for x in tensors if x.device is not None}
  if beyond or len(devices) > 1:  # tinygrad would notice devices only when it runs
    raise refusal
  try:
    out = scaled_dot_product_attention(q, k, v, **given)
  except Exception:
    raise refusal from None
  log_once(f"attention falls back to tinygrad's own: {refusal}")
  return out
