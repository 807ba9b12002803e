"""A tinygrad device that executes and checks the UOps of a kernel written for another target."""
