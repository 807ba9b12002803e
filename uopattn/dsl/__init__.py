"""The words that kernels are written in."""
