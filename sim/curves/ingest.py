"""JSON with long arrays of block ids, read fast: arrays by a compiled scanner, the rest by json.

The scanner only takes what it fully understands; whatever else a file holds, valid or not, goes to
the plain way, which decides and whose errors name file and line.
"""

from typing import Any

import numpy as np

from sim.curves.jit import run, runs_compiled
from sim.curves.kernels import scan
from sim.curves.trace import Ints, TraceError
from sim.errors import SpecError
from sim.strict_json import strict_json

BYTES_A_STEP = 10
"""JSON bytes the plain way reads in the time of one plain kernel step (≈ 50 MB/s)."""


class ArrayScanner:
    """Takes the arrays of one key out of JSON texts; reuses its memory from text to text.

    ``expected_bytes``: of all texts, as far as known; with what it has seen so far that decides
    whether compiling pays.
    """

    def __init__(self, key: str, *, compiled: bool | None = None, expected_bytes: int = 0) -> None:
        self._expected = expected_bytes
        self._seen = 0
        self._quoted = np.frombuffer(f'"{key}"'.encode(), dtype=np.uint8)
        self._compiled = compiled
        self._reserve(0)

    def _reserve(self, size: int) -> None:
        """Room for a text of ``size`` bytes: "…":[1,2] – a number takes two bytes at least."""
        self._text = np.empty(size + 64, dtype=np.uint8)
        self._rest = np.empty(size + 64, dtype=np.uint8)
        self._ids = np.empty(size // 2 + 1, dtype=np.int64)
        self._counts = np.empty(size // (len(self._quoted) + 3) + 1, dtype=np.int64)

    def extract(self, text: bytes) -> tuple[bytes, Ints, Ints] | None:
        """``text`` with its arrays replaced by their numbers, all their ids, how many each has.

        The ids and counts are good until the next call. None: the plain way must be taken.
        """
        self._seen += len(text)
        if not runs_compiled(max(self._seen, self._expected) // BYTES_A_STEP, self._compiled):
            return None
        if len(text) + 64 > len(self._text):
            self._reserve(len(text) * 5 // 4)
        self._text[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._text[len(text) : len(text) + 64] = 0
        sizes = np.zeros(3, dtype=np.int64)
        understood = run(
            scan.extract_arrays,
            *(self._text, len(text), self._quoted, self._rest, self._ids, self._counts, sizes),
            compiled=True,
        )
        if not understood:
            return None
        n_rest, n_ids, n_arrays = sizes.tolist()
        return self._rest[:n_rest].tobytes(), self._ids[:n_ids], self._counts[:n_arrays]


def load_json(text: bytes, where: str) -> Any:
    """``text`` as strict JSON; TraceError says where it is none."""
    try:
        return strict_json(text)
    except SpecError as error:
        raise TraceError(f"{where}: {error}") from None
