"""`attention`: the main entry point."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING

from uopattn.api.shapes import check_axes, with_four_axes, with_known_sizes
from uopattn.dsl.random import draw_seed
from uopattn.plan.dispatch import NoKernel
from uopattn.plan.division import Division, division_of, run
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, AttentionOptions, check_dropout, check_flag
from uopattn.spec.layout import distinct_heads
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import described, operands, plain, promoted

scaled_dot_product_attention = Tensor.scaled_dot_product_attention  # tinygrad's, as it was before `patch` replaced it
BACKENDS = ("auto", "kernel", "reference")
TINYGRADS = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")  # its arguments


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: Literal[False] = False,
  **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: Literal[True],
  **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: bool,
  **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: bool = False,
  **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
  """Compute softmax(scale * q k^T) v without storing the scores.

  The score of query i and key j is scale * q[i].k[j], then softcap * tanh(score / softcap), then score_mod, then an
  additive attn_mask is added. Query i has position i + q_start. A row that sees no key gives 0, a log-sum-exp of -inf,
  or of its sink where there are sinks, and no gradient. Keys and values at or beyond kv_lengths are never read.
  emulator_tests/README.md lists what other hidden keys may hold, under "What hidden keys may hold". B, Hq, M and N may
  be 0: results are then empty or those of rows that see no key, and gradients are 0.

  q, k, v, sinks, an additive attn_mask and the aux Tensors that score_mod reads have gradients. `uopattn.plan.gradient`
  says which gradients kernels compute. Second derivatives need `backend="reference"`.

  q, k and v may be views of buffers: transposed, slices of a cache or of packed projections, expanded heads. If the
  last axis is contiguous, kernels read the buffer in place; otherwise the view is copied, with one log line. The output
  has q's memory layout: if q is (B, M, Hq, Dk) transposed, it is (B, M, Hq, Dv) transposed. M and N may hold bound
  Variables, as in `cache[:, :, :start_pos + T]`: one kernel serves all their values and copies no cache.

  q, k and v may be sharded over devices along batches, heads or the sequence, all along the same axis, or whole. The
  output is sharded like q, or like k if q is whole and k is sharded by batches or heads. See kernels/README.md.

  Tensors without a device, such as `Tensor.arange(n)`, are put on the device of q, k and v. If q, k or v has a weak
  dtype, it takes the dtype of the others. Any other Tensor of a weak dtype becomes float32 or the default int dtype.

  Args:
    q: (..., Hq, M, Dk) or (M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2, with sums in float32; or float64, in
      plain ops. Dtypes that differ are promoted: kernels/README.md says how, under "Dtypes that differ".
      Batches and heads of q, k and v broadcast; B is all batches in one axis. On NVIDIA's GPUs float32 is multiplied
      in tf32 if tinygrad's `ALLOW_TF32` is set, else at its own accuracy.
    k: (..., Hkv, N, Dk) or (N, Dk).
    v: (..., Hkv, N, Dv) or (N, Dv).
    attn_mask: broadcasts to (B, Hq, M, N). bool: False hides a key. Float dtypes: added to the scores, -inf hides.
    dropout_p: probability of dropping a weight while tinygrad's `TRAINING` is set. `Tensor.manual_seed` determines
      which weights are dropped; the choice differs from call to call, and from replay to replay of a `TinyJit`.
    is_causal: query i sees key j iff j <= i + q_start.
    scale: factor on q.k; None is 1/sqrt(Dk).
    enable_gqa: allows Hq to be a multiple of Hkv; query head h reads key head h // (Hq // Hkv). Nothing is copied.
    window: (left, right): query i sees key j iff i + q_start - left <= j <= i + q_start + right. Each side is at least
      0, or None for no bound.
    softcap: bounds the scores smoothly to (-softcap, softcap).
    q_start: int, bound Variable, an expression of Variables (start + 1), or (B,) Tensor of any integer dtype. 0 aligns
      causal masks upper left, N - M lower right.
    kv_lengths: accepts the types of q_start; key j of batch b is seen iff j < kv_lengths[b] and j < N. None is N.
    sinks: (Hq,) logits; each joins the sum of exponentials of its head's rows, without a value.
    score_mod: f(score, b, h, q_idx, kv_idx, *aux) -> score. It is called with symbols: write x.where(a, b), &, | and ~
      for if, and, or and not; abs(x) works, max(x, y) is x.maximum(y), math.exp(x) is x.exp().
    mask_mod: f(b, h, q_idx, kv_idx, *aux) -> bool, written like score_mod; False hides the key. For both, q_idx counts
      the queries from 0, whatever q_start is; `uopattn.mods` shows how to add that.
    aux: Tensors that score_mod and mask_mod index, with one integer per axis, and with 0 where there is no axis.
      Indices out of bounds, negative ones included, read 0 (False) and have no gradient.
    block_mask: a mask_mod with its own aux, and the number of visible pairs in each block, which lets kernels skip
      tiles. If mask_mod is given too, a key must pass both.
    q_scale, k_scale, v_scale: factors on q, k and v, for 8-bit types: FlashAttention-3's q_descale, k_descale and
      v_descale. Each is a number or a float Tensor that broadcasts to (B, Hkv): query heads that share a key head share
      a scale. One kernel serves all values. Tensors for q and k must not hold negative numbers, for which kernels give
      NaN. Scales have no gradients. The output, v_scale included, is rounded to q's dtype, and numbers out of the range
      of an 8-bit type become its largest.
    return_lse: also return the log-sum-exp (natural logarithm) of each row, (B, Hq, M) float32, or float64 if q is.
      Realize both together, `Tensor.realize(out, lse)`; one at a time, the kernel runs twice.
    backend: "kernel" raises an error if no kernel serves the case. "reference" uses plain tinygrad ops, which store the
      scores. "auto" uses the kernel if there is one, otherwise the reference. What only tinygrad's own attention
      accepts, such as integers, it leaves to that. Each fallback is logged once per reason.

  Returns:
    (..., Hq, M, Dv), or (M, Dv), in the dtype of q and v, with as many axes as the q, k, v or attn_mask that has the
    most; with return_lse a pair.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention
    >>> q, k, v = Tensor.randn(1, 8, 10, 32), Tensor.randn(1, 2, 20, 32), Tensor.randn(1, 2, 20, 16)
    >>> out, lse = attention(q, k, v, is_causal=True, q_start=10, enable_gqa=True, return_lse=True)
    >>> out = out.realize(lse)  # together
    >>> out.shape, lse.shape
    ((1, 8, 10, 16), (1, 8, 10))

    If all scores are equal, each row is the mean of the values that it sees:

    >>> q = k = Tensor.zeros(1, 3, 4)
    >>> attention(q, k, Tensor([[[1.0], [3.0], [5.0]]]), is_causal=True).tolist()
    [[[1.0], [2.0], [3.0]]]
  """
  backend, own = options.pop("backend", "auto"), {"dropout_p": dropout_p, "is_causal": is_causal}
  arguments = Arguments.of("attention", AttentionOptions, options, attn_mask=attn_mask, return_lse=return_lse, **own)
  try:
    call = Call.of(q, k, v, arguments)
  except (TypeError, ValueError) as refusal:
    if backend != "auto":
      raise
    return by_tinygrad(q, k, v, arguments, refusal)
  return call.by(backend)


def attend(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, backend: str) -> Any:
  """Check all arguments and run the backend, for the functions built on `attention`."""
  return Call.of(q, k, v, arguments).by(backend)


def check_backend(backend: str, accepted: tuple[str, ...] = BACKENDS) -> None:
  """Raise ValueError unless the backend is accepted."""
  if backend not in accepted:
    raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(accepted)}")


def by_tinygrad(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, refusal: Exception) -> Tensor:
  """Return tinygrad's own attention for arguments that uopattn refused, and log the reason once.

  Examples are integers, and masks with batches that q, k and v lack: Tensors of dtypes and shapes that only tinygrad's
  takes. Flags and the probability of dropout must be what uopattn accepts.

  Raises:
    Exception: the refusal, if tinygrad refuses these arguments too or does not have all of them.
  """
  check_flag("is_causal", arguments.is_causal)
  check_flag("enable_gqa", arguments.enable_gqa)
  check_dropout("dropout_p", arguments.dropout_p)
  kwargs = {name: plain(getattr(arguments, name)) for name in TINYGRADS}
  beyond = [name for name, x, value in arguments.active if name not in TINYGRADS and value is not x.default]
  tensors = [x for x in (q, k, v, kwargs["attn_mask"]) if isinstance(x, Tensor)]
  devices = {x.device for x in tensors if x.device is not None}
  if beyond or len(devices) > 1:  # tinygrad would notice devices only when it runs
    raise refusal
  try:
    out = scaled_dot_product_attention(q, k, v, **kwargs)
  except Exception:
    raise refusal from None
  log_once(f"attention falls back to tinygrad's own: {refusal}")
  return out


@dataclass(frozen=True, eq=False)
class Call:
  """A checked call of `attention`, before a backend is chosen.

  Attributes:
    q, k, v: (B, Hq, M, Dk), (B, Hkv, N, Dk) and (B, Hkv, N, Dv).
    arguments: without the seed of dropout, which is drawn when the call runs.
    restored: reshapes a result, (B, Hq, M, ...), to the axes of the inputs.
    rows: the number of queries, which may be made of Variables; M is its largest value.
    dtype: of the output.
    division: how the work is divided over devices.
  """

  q: Tensor
  k: Tensor
  v: Tensor
  spec: AttentionSpec
  arguments: Arguments
  restored: Callable[[Tensor], Tensor]
  rows: int | UOp
  dtype: DType
  division: Division

  @classmethod
  def of(cls, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> "Call":
    """Check all arguments. Raises TypeError or ValueError if one does not fit."""
    q, k, v = operands((-2,), q=q, k=k, v=v)
    check_axes(q=q, k=k, v=v)
    dtype, rows = q.dtype, q.shape[-2]
    if arguments.scales is None and arguments.page_table is None:
      q, k, v, dtype = promoted(q, k, v)
    q, k, v, arguments = with_known_sizes(q, k, v, arguments)
    q4, k4, v4, restored = q, k, v, lambda x: x
    if arguments.page_table is None:
      q4, k4, v4, arguments, restored = with_four_axes(q, k, v, arguments)
    if q4.shape[1] == k4.shape[1] == v4.shape[1]:
      k4, v4 = distinct_heads(k4, v4)
      if k4.shape[1] != q4.shape[1]:
        arguments = replace(arguments, enable_gqa=True)
    check_dropout("dropout_p", arguments.dropout_p)
    arguments = arguments.settled(q.device)
    seeded = arguments
    if arguments.dropout_p > 0 and TRAINING:
      seeded = replace(arguments, seed=Tensor.zeros(2, dtype=dtypes.uint32, device=q.device))
    spec = make_spec(q4, k4, v4, seeded)
    division = division_of(q4, k4, v4, spec, seeded)
    return cls(q4, k4, v4, spec, arguments, restored, rows, dtype, division)

  def by(self, backend: str) -> Any:
    """Return the output, or with return_lse the output and the LSE. Raises ValueError if the backend is unknown."""
    check_backend(backend)
    launch = None
    if backend != "reference":
      try:
        launch = self.division.launch()
      except NoKernel as error:
        if backend == "kernel":
          raise ValueError(f"backend='kernel': {error}") from error
        for reason in error.reasons:
          log_once(f"attention falls back to plain tinygrad ops: {reason}")
    return self.run(launch, backend)

  def run(self, launch: Any, backend: str) -> Any:
    """Return the output, or with return_lse the output and the LSE, by a kernel or by the reference.

    Args:
      backend: "kernel" raises an error if no kernels compute the gradient.
    """
    arguments = self.arguments
    if self.spec.dropout_p > 0:
      if in_function():
        dropout = f"dropout_p is {arguments.dropout_p}"
        raise ValueError(f"{dropout}; inside a tinygrad.function, where no seed can be drawn, it must be 0")
      arguments = replace(arguments, seed=draw_seed(self.q.device))
    out, lse = run(self.division, launch, self.q, self.k, self.v, arguments, backend)
    out, lse = self.restored(out).cast(self.dtype), self.restored(lse)
    if isinstance(self.rows, UOp):
      out, lse = out[..., : self.rows, :], lse[..., : self.rows]
    return (out, lse) if arguments.return_lse else out
