"""Masks, score functions, the online softmax and the layout of keys in memory, shared by all targets."""
