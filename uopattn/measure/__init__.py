"""Timing kernels and other libraries, and the reports made of it."""
