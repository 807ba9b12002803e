"""For kernels of any GPU."""
