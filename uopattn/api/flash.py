"""`flash`: the forward kernel as an `fxn` for `Tensor.custom_kernel`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes

from uopattn.dsl.target import Target
from uopattn.plan.dispatch import check_guards, dispatch
from uopattn.plan.target import target_of
from uopattn.runtime.device import kind_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec
from uopattn.spec.tensors import batched, check_dimensions, check_int, described, dtype_name


def flash(
  o: UOp,
  q: UOp,
  k: UOp,
  v: UOp,
  lse: UOp | None = None,
  *aux: UOp,
  causal: bool = False,
  scale: float | None = None,
  q_start: int = 0,
  enable_gqa: bool = False,
  window: tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  score_mod: Callable[..., Any] | None = None,
  mask_mod: Callable[..., Any] | None = None,
  target: Target | None = None,
  tiles: Any = None,
) -> UOp:
  """Build the forward kernel, as the `fxn` of your own `Tensor.custom_kernel`; bind options with `functools.partial`.

  Outputs must be `Tensor.empty(...)`: tinygrad copies an input that is a view, and discards what is written to an
  output that is a view. Realize the results together, `Tensor.realize(o, lse)`; one at a time, the kernel runs twice.

  Args:
    o: (B, Hq, M, Dv), or (Hq, M, Dv), in q's dtype; receives the output.
    q: (B, Hq, M, Dk), or (Hq, M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2. No size may be 0.
    k: (B, Hkv, N, Dk), or (Hkv, N, Dk), in q's dtype.
    v: (B, Hkv, N, Dv), or (Hkv, N, Dv), in q's dtype.
    lse: (B, Hq, M), or (Hq, M), float32; receives the log-sum-exp (natural logarithm) of each row. None: not stored.
    aux: the buffers that score_mod and mask_mod index; they come after lse.
    causal: query i sees key j iff j <= i + q_start.
    scale: factor on q.k; None is 1/sqrt(Dk).
    q_start: position of the first query among the keys.
    window, softcap, score_mod, mask_mod: as in `uopattn.attention`, which has further arguments.
    enable_gqa: allows Hq to be a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
    target: the machine to build the kernel for; None is tinygrad's default device.
    tiles: the block sizes, an instance of the `Tiles` class of the kernel to use; None lets `dispatch` choose both.

  Raises:
    TypeError, ValueError: an argument does not fit, or no kernel serves the case; the message says what is accepted.

  Example:
    >>> from functools import partial
    >>> from tinygrad import Tensor
    >>> from uopattn import flash
    >>> q, k, v = (Tensor.randn(2, 50, 16) for _ in range(3))  # (heads, N, D)
    >>> o, lse = Tensor.empty(2, 50, 16), Tensor.empty(2, 50)
    >>> o, *_, lse = Tensor.custom_kernel(o, q, k, v, lse, fxn=partial(flash, causal=True))
    >>> o = o.realize(lse)  # together
    >>> o.shape, lse.shape
    ((2, 50, 16), (2, 50))
  """
  for name, x in (("o", o), ("q", q), ("k", k), ("v", v), ("lse", lse), *((f"aux[{i}]", x) for i, x in enumerate(aux))):
    if not isinstance(x, UOp) and (name, x) != ("lse", None):
      raise TypeError(f"{name} is {described(x)}; it must be a UOp, as Tensor.custom_kernel gives it")
  q4, k4, v4 = (batched(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
  check_dimensions(q=q, k=k, v=v)
  options = Arguments(
    is_causal=causal,
    scale=scale,
    q_start=check_int("q_start", q_start),
    enable_gqa=enable_gqa,
    window=window,
    softcap=softcap,
    score_mod=score_mod,
    mask_mod=mask_mod,
    return_lse=lse is not None,
  ).settled(None)
  options = replace(options, aux=tuple(map(Tensor, aux)))
  for name, x in (("q", q), ("k", k)):
    if 0 in x.shape:  # tinygrad cannot give a kernel an empty buffer
      raise ValueError(f"{name} has shape {x.shape}; in a Tensor.custom_kernel call every size must be at least 1")
  spec = make_spec(q4, k4, v4, options)
  _check_output("o", o, (*q.shape[:-1], v.shape[-1]), q.dtype)
  if lse is not None:
    _check_output("lse", lse, q.shape[:-1], dtypes.float32)
  machine, device = target_of(Device.DEFAULT), Device.DEFAULT
  is_elsewhere = target is not None and target != machine
  if target is not None and is_elsewhere:
    machine, device = target, target.device
  launch = replace(dispatch(spec, machine, tiles, single_kernel=True), splits=1)
  if not is_elsewhere:
    check_guards((launch,), device)
  buffers = (o, q, k, v, *([] if lse is None else [lse]), *aux)
  # Which devices the Tensors are on is unknown here: the kernel is loaded on all of this kind that are in use.
  kind = kind_of(device)
  devices = {device, *(x for x in Device._opened_devices if kind_of(x) == kind)}
  return launch.build((device, *sorted(devices - {device})), [x.base.arg.slot for x in buffers])


def _check_output(name: str, x: UOp, shape: tuple[Any, ...], dtype: Any) -> None:
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
  if x.dtype != dtype:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be {dtype_name(dtype)}")
