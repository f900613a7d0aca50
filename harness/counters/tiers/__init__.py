"""One file a kind of host tier: what it counts and when it is at rest."""
