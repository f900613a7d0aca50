"""What we start: arms, commands, processes, the tiny model and the scripted loopback server."""
