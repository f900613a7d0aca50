"""Small linear algebra for ``sim/latency/model.py``: what rows determine, exactly, and an inverse."""

from collections.abc import Sequence
from fractions import Fraction

_SINGULAR = 1e-13  # a smaller pivot of scaled normal equations is rounding of 64-bit floats


class Span:
    """The vectors that are combinations of those added: a reduced echelon form, in rationals.

    A combination of coefficients is determined by the rows exactly when its vector is in here.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Fraction]] = {}

    @property
    def pivots(self) -> tuple[int, ...]:
        """The first columns, left to right, that no earlier ones make up."""
        return tuple(sorted(self._rows))

    def add(self, vector: Sequence[int]) -> None:
        """Extend the span by ``vector``."""
        if len(self._rows) == len(vector):
            return
        rest = self._rest(vector)
        pivot = next((i for i, value in enumerate(rest) if value), None)
        if pivot is None:
            return
        new = [value / rest[pivot] for value in rest]
        for column, row in self._rows.items():
            self._rows[column] = [a - row[pivot] * b for a, b in zip(row, new, strict=True)]
        self._rows[pivot] = new

    def lacking(self, vector: Sequence[int]) -> list[int]:
        """Columns left of ``vector`` by the best combination; empty: it is one of those added."""
        return [i for i, value in enumerate(self._rest(vector)) if value]

    def is_empty(self, column: int) -> bool:
        """Whether every vector added has 0 in ``column``."""
        return not any(row[column] for row in self._rows.values())

    def ties(self) -> list[set[int]]:
        """For each column that is no pivot and not empty: it and the pivots it goes with."""
        size = len(next(iter(self._rows.values())))
        free = set(range(size)) - self._rows.keys()
        ties = [{i, *(p for p, row in self._rows.items() if row[i])} for i in sorted(free)]
        return [tie for tie in ties if len(tie) > 1]

    def _rest(self, vector: Sequence[int]) -> list[Fraction]:
        rest = [Fraction(value) for value in vector]
        for pivot, row in self._rows.items():
            factor = rest[pivot]
            if factor:
                rest = [a - factor * b for a, b in zip(rest, row, strict=True)]
        return rest


def inverse(matrix: list[list[float]]) -> tuple[tuple[float, ...], ...] | None:
    """Gauss-Jordan with row pivoting; None when the matrix is singular to working precision."""
    size = len(matrix)
    work = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    smallest = _SINGULAR * max(matrix[i][i] for i in range(size))
    for column in range(size):
        top = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[top][column]) <= smallest:
            return None
        work[column], work[top] = work[top], work[column]
        pivot = work[column][column]
        work[column] = [value / pivot for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return tuple(tuple(row[size:]) for row in work)
