"""Building blocks for kernels on AMD's matrix cores."""
