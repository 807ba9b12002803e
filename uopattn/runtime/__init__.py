"""How a kernel's graph becomes what a device runs."""
