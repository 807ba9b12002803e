"""Building blocks for CPU kernels."""
