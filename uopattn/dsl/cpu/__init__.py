"""For kernels of CPUs."""
