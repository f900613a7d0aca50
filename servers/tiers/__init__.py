"""One file a kind of host tier: how it is started, and what its servers are asked about it."""
