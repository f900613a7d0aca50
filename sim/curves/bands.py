"""Bands, where a real cache's content is only known to lie between two curves.

Each gives the least and the most hits at one capacity; a point inside would be a guess.
"""

from fractions import Fraction

from sim.curves.stack import Curve

WATERMARK = Fraction(4, 5)
"""LMCache 0.5.6's MP server evicts from this usage on (``EvictionConfig.trigger_watermark``)."""

KEPT = Fraction(16, 25)
"""Share still full right after one eviction tick at the watermark: 0.8 × (1 − 0.2)."""


Band = tuple[int, int]


def watermark(curve: Curve, capacity: int) -> Band:
    """LMCache MP server of ``capacity`` chunks: filled between 64 % and 80 %, polled once a second.

    Holds while the chunks stored between two polls fit above the watermark.
    """
    return curve.at(int(KEPT * capacity)), curve.at(int(WATERMARK * capacity))


def partial_tail(curve: Curve, capacity: int) -> Band:
    """vLLM pool of ``capacity`` usable blocks whose prompts end in a partial, never cached block.

    Such a block takes room while its request runs and goes to the head of the free queue after.
    """
    return curve.at(max(capacity - 1, 0)), curve.at(capacity)


def in_process(forward: Curve, reverse: Curve, capacity: int) -> Band:
    """LMCache's in-process CPU backend: hits are touched tail first, new chunks put head first.

    That is no stack algorithm; its hits lay between the two pure orders at all of 22,720
    capacities tried.
    """
    low, high = sorted((forward.at(capacity), reverse.at(capacity)))
    return low, high
