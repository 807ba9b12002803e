"""The kernels, one file per schedule."""
