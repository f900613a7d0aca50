"""The scripted loopback server, whose token sources come from the simulator."""
