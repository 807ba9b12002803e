"""ONNX's operators of attention as functions of Tensors.

They are Attention, opsets 23 to 25 (https://onnx.ai/onnx/operators/onnx__Attention.html), and com.microsoft's
MultiHeadAttention and GroupQueryAttention. The meaning of the latter two is that of onnxruntime's CPU provider, whose
documentation is https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. These things differ:

- A `local_window_size` of 0 is no window, as on its CUDA provider; the CPU provider of 1.32 returns zeros.
- GroupQueryAttention's norms of queries and keys, and a `k_quant_type` other than `v_quant_type`, which the CPU
  provider refuses, are those of the documentation.
- Among GroupQueryAttention's scores (`qk_output=1`) those of hidden keys are -inf; the CPU provider has 0 there.
- A scale for a cache that has no integers is refused, not ignored.
- With MultiHeadAttention's `unidirectional=1`, more keys than queries and no past, no query sees a key after its own
  number; the CPU provider shows the last query all keys.
- With a past, GroupQueryAttention may have several batches of several queries, and its total_sequence_length may lie
  between the rows of the past and those with the new ones; the CPU provider refuses both.
- `position_ids` without a row in cos_cache are refused if their values are known without computing.
- Presents may be left out, and a cache of integers need not have a past.
"""
