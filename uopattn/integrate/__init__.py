"""uopattn inside tinygrad's own functions, model blocks and ONNX operators."""
