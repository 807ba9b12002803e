"""What stands between q.k and the weighted sum, and where the keys are: the same for all targets."""
