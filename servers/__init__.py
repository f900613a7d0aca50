"""What we start: arms, commands, processes, probes."""
