"""What should happen: the simulator of both tiers, KV geometry, latency and curves."""
