"""The commands over traces: what they read, compute with ``sim.curves``, draw and print."""
