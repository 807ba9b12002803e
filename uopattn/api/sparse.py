"""`attention_sparse`: attention of queries that have each chosen their keys."""

from dataclasses import replace
from typing import Literal, Unpack, overload

from tinygrad import Tensor, dtypes

from uopattn.api.attention import Call, attend
from uopattn.dsl import sizes
from uopattn.plan.sparse import Sparse
from uopattn.spec.arguments import Arguments, SparseOptions
from uopattn.spec.tensors import at_hand, check_device, check_ints, operands, placed


@overload
def attention_sparse(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  indices: Tensor,
  *,
  return_lse: Literal[False] = False,
  **options: Unpack[SparseOptions],
) -> Tensor: ...


@overload
def attention_sparse(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  indices: Tensor,
  *,
  return_lse: Literal[True],
  **options: Unpack[SparseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_sparse(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  indices: Tensor,
  *,
  return_lse: bool,
  **options: Unpack[SparseOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_sparse(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  indices: Tensor,
  *,
  return_lse: bool = False,
  **options: Unpack[SparseOptions],
) -> Tensor | tuple[Tensor, Tensor]:
  """Compute attention in which each query sees only the keys that it has chosen (DeepSeek Sparse Attention, 2025).

  The chosen keys and values are gathered by the kernel, which reads no others. The indices are those of FlashMLA's
  sparse kernels: in any order, with negative ones for no key. A key that a query has chosen twice counts twice in its
  softmax. A query without keys gives 0, an LSE of -inf, or of its sink, and no gradient.

  An index of N or more raises an error if the indices are realized or made of Python or numpy numbers; on a GPU this
  check waits for pending work. Where their values are not known, and while a `TinyJit` captures or replays, it is no
  key. Nothing outside of k and v is read.

  For keys in pages, (P, Hkv, page_size, D), of a pool that sequences share, pass the pool as one batch with the queries
  of all sequences, and as indices page * page_size + offset: with Hkv=1 it is `pool.reshape(1, 1, P * page_size, D)`.

  q, k, v and sinks have gradients, which are the same bits in every run. Those of keys that no query has chosen are 0,
  whatever k and v hold there. The backward pass goes by the chosen keys or by all keys. By the chosen keys its time is
  O(M top_k D), and kernels gather them, on a GPU by chunks of queries, whose results take 1 GiB at most unless those
  of one query take more. Types of 8 bits take plain ops, and copies of the keys. By all keys it stores one byte for
  each pair of query and key, two bytes for top_k > 255; a key that any query has chosen must then be finite for all.
  With G = Hq / Hkv, and G' that rounded up to the rows of a tile, 64 on a GPU and the lanes of a vector on a CPU, it
  goes by the chosen keys if 2 top_k G' <= N G, if those bytes were more than 1 GiB, or if kernels
  would have to store the weights of all keys, as for large head sizes on GPUs.

  Args:
    q: (B, Hq, M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2.
    k: (B, Hkv, N, Dk), in q's dtype, or float16 or bfloat16 if that is float32. Views are read in place, as by
      `attention`.
    v: (B, Hkv, N, Dv), in k's dtype; `k[..., :Dv]` for multi-head latent attention with absorbed weights.
    indices: (B, Hkv, M, top_k), or (B, 1, M, top_k) for all heads, of an integer dtype: the keys of each query.
    topk_length: (B, M) integer Tensor: only so many indices of each query count; None is top_k.
    scale, enable_gqa, softcap, sinks, return_lse, backend: as in `attention`.

  Returns:
    (B, Hq, M, Dv) in q's dtype; with return_lse a pair.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention_sparse
    >>> q, k, v = Tensor.zeros(1, 1, 2, 4), Tensor.zeros(1, 1, 3, 4), Tensor([1.0, 3.0, 8.0]).reshape(1, 1, 3, 1)
    >>> indices = Tensor([[2, 0, 0], [1, -1, -1]]).reshape(1, 1, 2, 3)  # keys 2, 0 and 0 again; key 1
    >>> [round(x, 5) for x in attention_sparse(q, k, v, indices).flatten().tolist()]
    [3.33333, 3.0]
  """
  q, k, v = operands(q=q, k=k, v=v)
  lengths, backend = options.pop("topk_length", None), options.pop("backend", "auto")
  indices, lengths = (placed(x, q.device) for x in (indices, lengths))
  check_shapes(q, k, v)
  check_indices(indices, lengths, q, k)
  (B, _, M, _), (_, heads, _, top_k), N = sizes(q), sizes(indices), sizes(k)[2]
  arguments = Arguments.of("attention_sparse", SparseOptions, options, return_lse=return_lse)
  if 0 in (B, M, N, top_k, q.shape[1]):
    return attend(q, k[:, :, :0], v[:, :, :0], arguments, backend)
  table = _as_int32(indices, N).transpose(1, 2).reshape(B * M, heads, top_k)
  chosen = (table,) if lengths is None else (table, _as_int32(lengths, top_k + 1).reshape(B * M))
  arguments = replace(arguments, indices=chosen).settled(q.device)
  division = Sparse.of(q, k, v, arguments)
  return Call(q, k, v, division.spec, arguments, lambda x: x, M, q.dtype, division).by(backend)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
  """Raise ValueError unless q, k and v have four axes that fit each other."""
  if q.ndim != 4 or not q.shape[3]:
    raise ValueError(f"q has shape {q.shape}; it must be (B, Hq, M, Dk), the last at least 1")
  if isinstance(q.device, tuple):
    raise ValueError(f"q is on {q.device}; attention_sparse takes Tensors on one device")
  B, Dk = sizes(q)[0], sizes(q)[3]
  if k.ndim != 4 or (k.shape[0], k.shape[3]) != (B, Dk):
    raise ValueError(f"k has shape {k.shape}, q has {q.shape}; k must be ({B}, Hkv, N, {Dk})")
  if v.ndim != 4 or v.shape[:3] != k.shape[:3] or not v.shape[3]:
    shape = ", ".join(map(str, k.shape[:3]))
    raise ValueError(f"v has shape {v.shape}, k has {k.shape}; v must be ({shape}, Dv), the last at least 1")


def check_indices(indices: object, lengths: object, q: Tensor, k: Tensor) -> None:
  """Check the indices and their lengths, and their values as far as these are known without computing.

  Raises:
    TypeError: one is of a wrong type.
    ValueError: a shape does not fit, or an index or a length is out of range.
  """
  (B, _, M, _), (_, Hkv, N, _) = sizes(q), sizes(k)
  indices = check_ints("indices", indices)
  if indices.ndim != 4 or (indices.shape[0], indices.shape[2]) != (B, M) or indices.shape[1] not in (1, Hkv):
    heads = "1" if Hkv == 1 else f"{Hkv} or 1"
    raise ValueError(f"indices has shape {indices.shape}; it must be ({B}, {heads}, {M}, top_k)")
  check_device("indices", indices, q.device)
  top_k = sizes(indices)[3]
  _check_values(indices, "indices", N - 1, f"k has {N} keys; a negative one is no key")
  if lengths is not None:
    lengths = check_ints("topk_length", lengths, (B, M))
    check_device("topk_length", lengths, q.device)
    _check_values(lengths, "topk_length", top_k, f"each query has {top_k} indices", least=0)


def _check_values(x: Tensor, name: str, most: int, reason: str, least: int | None = None) -> None:
  """Raise ValueError if an element that is at hand is out of range."""
  if (values := at_hand(x)) is None:
    return
  import numpy as np

  wrong = values > most if least is None else (values > most) | (values < least)
  for index in np.argwhere(wrong)[:1].tolist():
    accepted = f"at most {most}" if least is None else f"from {least} to {most}"
    raise ValueError(f"{name}{index} is {values[tuple(index)]}; it must be {accepted}, as {reason}")


def _as_int32(x: Tensor, end: int) -> Tensor:
  """Cast integers to int32. What may not fit becomes `end` if it is larger, or -1 if it is negative."""
  if dtypes.int32.max < x.dtype.max:
    x = x.minimum(end) if x.dtype in dtypes.uints else x.clip(-1, end)
  return x.cast(dtypes.int)
