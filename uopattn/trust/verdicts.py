"""What came of a check of a kernel, in one word."""

RIGHT = "right"
WRONG = "wrong"  # by the gate
FAILS = "fails"  # with an exception or a crash
HANGS = "hangs"
UNSERVED = "unserved"  # the schedule does not serve the probe
UNAVAILABLE = "unavailable"  # the device could not be used, which says nothing of the kernel
DIED = "died"  # the process that checked it, and that had no other process for it
REFUTED = (WRONG, FAILS, HANGS)  # after which a kernel is not used
