"""Timing of our kernels and of other libraries, and reports on it."""
