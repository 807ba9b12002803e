"""Choice and launch of the kernels for an attention on a machine, and the fallback to plain tinygrad ops."""
