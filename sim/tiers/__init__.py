"""The GPU block pool and one file a kind of host tier, as the engines really do it."""
