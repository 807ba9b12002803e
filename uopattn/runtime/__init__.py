"""Compiling, caching and running kernels on each device."""
