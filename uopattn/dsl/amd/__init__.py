"""For kernels of AMD's matrix cores."""
