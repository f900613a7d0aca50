"""Sums over a sequence of counts that change one at a time (a Fenwick tree).

Like all kernels: one-dimensional arrays of ints, source that numba and plain Python both run.
"""

from sim.curves.kernels import Numbers


def add(sums: Numbers, i: int, value: int) -> None:
    """Add ``value`` at position ``i`` ≥ 1 of the Fenwick tree ``sums``."""
    while i < len(sums):
        sums[i] += value
        i += i & -i


def prefix(sums: Numbers, i: int) -> int:
    """Sum of positions 1..i of the Fenwick tree ``sums``."""
    total = 0
    while i > 0:
        total += sums[i]
        i &= i - 1
    return total
