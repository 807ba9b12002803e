"""Attention for tinygrad: kernels written by hand as UOp graphs, verified on every machine."""
