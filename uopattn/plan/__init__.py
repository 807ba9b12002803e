"""Which kernels serve an attention on which machine, and what is done where none does."""
