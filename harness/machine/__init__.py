"""Can this machine run a plan: engines, GPUs, memory, left-over servers."""
