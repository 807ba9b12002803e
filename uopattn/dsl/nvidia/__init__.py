"""Building blocks for kernels on NVIDIA's tensor cores."""
