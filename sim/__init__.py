"""What should happen: workloads, cache models and predictions (standard library only)."""
