"""Trust in kernels on cards that they may never have run on: the record of cards, self-checks, and their verdicts."""
