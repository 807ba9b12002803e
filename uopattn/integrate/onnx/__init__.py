"""ONNX's operators of attention as functions of Tensors.

They are Attention, opsets 23 to 25 (https://onnx.ai/onnx/operators/onnx__Attention.html), and com.microsoft's
MultiHeadAttention and GroupQueryAttention. The meaning of the latter two is that of onnxruntime's CPU provider, whose
documentation is https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. One thing differs: a
`local_window_size` of 0 is no window, as on its CUDA provider; the CPU provider of 1.32 returns zeros.
"""
