"""For kernels of NVIDIA's tensor cores."""
