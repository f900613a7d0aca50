"""Curves over traces, one file a command."""
