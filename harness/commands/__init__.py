"""The commands, one file each: what a command takes, and which wing answers it.

A command imports its wing in its body: naming all commands must cost none of them.
"""
