"""The order of a plan's sessions: given one by one, or drawn for a number of pairs."""

import random
from collections.abc import Iterator, Sequence

from harness.plan.arms import BASELINE, CONTROL


def drawn(n_pairs: int, treatment: str, *, seed: int, has_control: bool) -> list[str]:
    """Blocks of two pairs, A B B A or B A A B by ``seed``, and the control at the end.

    Up to two pairs are A B B A. The order of more must not be one a machine could have by itself:
    A B B A again and again has a period of four sessions, so blocks that are all alike are drawn
    again.
    """
    draw = random.Random(f"order {seed}")
    order = _blocks(n_pairs, treatment, draw)
    while _repeats_a_block(_pairs_of(order)):
        order = _blocks(n_pairs, treatment, draw)
    return order + [CONTROL] * has_control


def _blocks(n_pairs: int, treatment: str, draw: random.Random) -> list[str]:
    order: list[str] = []
    while len(order) < 2 * n_pairs:
        first, second = BASELINE, treatment
        if n_pairs > 2 and draw.random() < 0.5:
            first, second = second, first
        order += [first, second, second, first]
    return order[: 2 * n_pairs]


def weaknesses(order: Sequence[str], min_blocks: int) -> Iterator[str]:
    """Why sessions in ``order`` cannot decide, or not well."""
    compared = [arm for arm in order if arm != CONTROL]
    pairs = _pairs_of(compared)
    if len(set(compared)) < 2:
        return
    if len(pairs) < min_blocks:
        yield (
            f"the order has {len(pairs)} pair{'s' * (len(pairs) != 1)} of sessions, and the decision "
            f"needs {min_blocks} (decision.min_blocks): the verdict can only be not decided; "
            f"pairs = {max(4, min_blocks)} in place of order draws enough of them"
        )
    elif len(set(pairs)) == 1:
        yield (
            f"in every pair of the order {pairs[0][0]} comes first: a machine that grows slower or "
            "faster looks like an effect; turn every other pair around, as in A B B A"
        )
    elif _repeats_a_block(pairs):
        yield (
            "the order is one block again and again: a machine with the period of a block looks like "
            f"an effect; pairs = {len(pairs)} in place of order draws one that has none"
        )


_Pairs = Sequence[tuple[str, str]]


def _pairs_of(compared: Sequence[str]) -> _Pairs:
    """The arms of neighbouring sessions, two and two."""
    return list(zip(compared[::2], compared[1::2], strict=False))


def _repeats_a_block(pairs: _Pairs) -> bool:
    """Whether there are whole blocks of two pairs, and all of them are alike."""
    return len(pairs) > 3 and len({*zip(pairs[::2], pairs[1::2], strict=False)}) == 1
