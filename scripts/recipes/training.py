"""Training: a layer learns another one's attention.

The gradients of q, k and v are kernels, which recompute the weights instead of storing them. One `TinyJit` holds both
passes and AdamW. The results are the same bits in every run.
"""

from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn.optim import AdamW

from uopattn import attention

WIDTH, HEADS, STEPS = 64, 2, 300


def layer(x: Tensor, weights: list[Tensor]) -> Tensor:
  """(B, M, WIDTH) -> (B, M, WIDTH)."""
  q, k, v = ((x @ w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in weights)
  return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


teacher, pupil = ([(Tensor.randn(WIDTH, WIDTH) / 8).realize() for _ in "qkv"] for _ in range(2))
optimizer = AdamW([w.is_param_() for w in pupil], lr=1e-2)


@TinyJit
def step(x: Tensor) -> Tensor:
  optimizer.zero_grad()
  loss = (layer(x, pupil) - layer(x, teacher)).square().mean()
  loss.backward()
  return loss.realize(*optimizer.schedule_step())  # together


with Context(TRAINING=1):
  losses = [step(Tensor.randn(4, 256, WIDTH).realize()).item() for _ in range(STEPS)]
print(f"loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.1e}")
assert losses[-1] < losses[0] / 1000
