"""Loops over arrays of ints, compiled by numba where that pays, else run as they are."""

from typing import Any

Numbers = Any
"""A one-dimensional array of ints for numba, a list of ints for plain Python."""
