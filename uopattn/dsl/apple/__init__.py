"""Apple's GPUs: simdgroup matrices, and tiles in threadgroup memory."""
