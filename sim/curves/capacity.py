"""Capacities as people write them: blocks, tokens or GiB, singly or in ranges."""

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sim.curves.trace import MOST_TRACE_TOKENS
from sim.errors import SpecError
from sim.units import GIB

_ITEM = re.compile(  # "GiB" starts with a scale letter that is none
    r"([0-9]{1,60}(?:\.[0-9]{1,60})?)\s*((?!(?i:gib))[kMG]|)\s*([A-Za-z]*)", re.ASCII
)
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_UNITS = {"": "blocks", "block": "blocks", "blocks": "blocks",
          "tok": "tokens", "token": "tokens", "tokens": "tokens",
          "gib": "GiB"}  # fmt: skip
FORMS = "100 (blocks), 2M tokens, 40 GiB, or LOW..HIGH:N for N values spaced evenly by ratio"


@dataclass(frozen=True, slots=True)
class Ruler:
    """Turns capacities into blocks of ``block_tokens`` tokens.

    ``bytes_per_token``: KV bytes, None where no model was given; then GiB cannot be used.
    """

    block_tokens: int
    bytes_per_token: float | None = None

    def blocks(self, text: str) -> int:
        """Whole blocks that fit into ``text``, e.g. "100", "2M tokens" or "40GiB", or SpecError."""
        found = _ITEM.fullmatch(text.strip())
        unit = _UNITS.get(found[3].lower()) if found else None
        if found is None or unit is None:
            raise SpecError(f"capacity {text!r} is not understood; accepted: {FORMS}")
        # A fraction, not a float: 0.1 M tokens are 100,000, not 99,999.
        amount = Fraction(found[1]) * _SCALES[found[2]]
        if unit == "blocks":
            if amount.denominator != 1:
                raise SpecError(f"capacity {text!r} is no whole number of blocks")
            blocks = int(amount)
        elif unit == "tokens":
            blocks = int(amount // self.block_tokens)
        elif self.bytes_per_token is None:
            raise SpecError(f"capacity {text!r} in GiB needs a model: give --model CONFIG")
        else:
            blocks = int(float(amount * GIB) // (self.bytes_per_token * self.block_tokens))
        if blocks * self.block_tokens >= MOST_TRACE_TOKENS:
            raise SpecError(f"capacity {text!r} is not below 2**61 tokens")
        return blocks

    def all(self, text: str) -> list[int]:
        """The comma-separated capacities of ``text``, in its order, in blocks."""
        items = [item.strip() for item in text.split(",")]
        if not all(items):
            raise SpecError(f"capacities {text!r} have an empty item; accepted: {FORMS}")
        return [blocks for item in items for blocks in self._expand(item)]

    def _expand(self, item: str) -> list[int]:
        if ".." not in item:
            return [self.blocks(item)]
        ends, colon, points = item.partition(":")
        low_text, _, high_text = ends.partition("..")
        if not colon or not re.fullmatch(r"[0-9]{1,6}", points.strip()):
            raise SpecError(f"range {item!r} does not say how many values; accepted: {FORMS}")
        low, high, n = self.blocks(low_text), self.blocks(high_text), int(points)
        if not 1 <= low < high or n < 2:
            raise SpecError(f"range {item!r} must rise from at least 1 block, in 2 or more values")
        return spaced(low, high, n)

    def gib(self, tokens: int) -> float | None:
        """GiB of KV of ``tokens`` tokens, None without a model."""
        return None if self.bytes_per_token is None else tokens * self.bytes_per_token / GIB


def spaced(low: int, high: int, n: int) -> list[int]:
    """At most ``n`` whole capacities from ``low`` to ``high``, evenly spaced by ratio."""
    grid = np.rint(np.geomspace(max(low, 1), max(high, 1), n)).astype(np.int64)
    return [int(value) for value in np.unique(grid)]
