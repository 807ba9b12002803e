"""Tiles and kernels chosen by measuring: candidates are timed and checked, and the fastest is remembered on disk."""
