"""Building blocks for kernels of all GPUs."""
