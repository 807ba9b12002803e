"""What the programs run, bench, tune and info share: problems, their timing and checks, and contenders."""
