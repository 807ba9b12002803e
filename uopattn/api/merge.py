"""`merge_states`: combines attention over disjoint sets of keys, given the output and the log-sum-exp of each."""

from collections.abc import Sequence

from tinygrad import Tensor, dtypes

from uopattn.dsl.schedule import DTYPES
from uopattn.plan.reference import merged_states
from uopattn.spec.tensors import check_device, check_dtype, check_tensor, described, dtype_name, operands, placed


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
  """Merge attention of the same queries over disjoint sets of keys into attention over all keys, exactly.

  Each output is weighted by its share of the sum of exponentials, exp(lse_i - lse). Their order does not matter.
  Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023) combines its splits this way, and FlashInfer its attention states
  (Ye et al., "FlashInfer", 2025, section 2.2). Sinks must be given to one of them only.

  Args:
    outs: one or more Tensors (B, H, M, Dv), all float32, all float16 or all bfloat16.
    lses: the log-sum-exp (natural logarithm) of each output, (B, H, M) float32. -inf marks a row that sees no key of
      its set and has no sink; its output is ignored, even if it is NaN. A log-sum-exp is as exact as float32: of logits
      beyond 1e7 it no longer tells how many keys had the largest one.

  Returns:
    The output (B, H, M, Dv) in the dtype of `outs`, and the LSE (B, H, M) float32. Rows that see no key of any set get
    0 and -inf. Accumulation is in float32.

  Raises:
    TypeError, ValueError: an argument does not fit.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention, merge_states
    >>> q, k, v = Tensor.zeros(1, 1, 1, 4), Tensor.zeros(1, 1, 4, 4), Tensor([1.0, 3.0, 5.0, 7.0]).reshape(1, 1, 4, 1)
    >>> states = [attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 1), (1, 4))]
    >>> out, lse = merge_states(*zip(*states))
    >>> [round(x.item(), 4) for x in (out, lse)]  # the mean of 1, 3, 5, 7, and log(4)
    [4.0, 1.3863]
  """
  outs, lses = _checked(outs, lses)
  return merged_states(outs, lses)


def _checked(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
  """Check outs and lses, and put constants on a device. Raises TypeError or ValueError."""
  for name, xs in (("outs", outs), ("lses", lses)):
    if not isinstance(xs, (list, tuple)):
      raise TypeError(f"{name} is {described(xs)}; it must be a list or tuple of Tensors")
  if not outs or len(outs) != len(lses):
    mismatch = f"outs has {len(outs)} parts and lses {len(lses)}"
    raise ValueError(f"{mismatch}; both must have the same number, at least one")
  outs = operands((), **{f"outs[{i}]": x for i, x in enumerate(outs)})
  device = outs[0].device
  lses = [placed(check_tensor(f"lses[{i}]", x), device) for i, x in enumerate(lses)]
  shape, dtype = outs[0].shape, outs[0].dtype
  check_dtype("outs[0]", dtype, DTYPES)
  for name, xs, want, wanted in (("outs", outs, shape, dtype), ("lses", lses, shape[:-1], dtypes.float32)):
    for i, x in enumerate(xs):
      if x.shape != want:
        raise ValueError(f"{name}[{i}] has shape {x.shape}; it must be {want}")
      if x.dtype != wanted:
        raise TypeError(f"{name}[{i}] has dtype {dtype_name(x.dtype)}; it must be {dtype_name(wanted)}")
      check_device(f"{name}[{i}]", x, device, of="outs[0]")
  return outs, lses
