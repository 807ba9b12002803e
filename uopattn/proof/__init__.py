"""The float64 oracle, and the gate that every output must pass."""
