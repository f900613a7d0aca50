"""The decision procedure: from the ratios of neighbouring sessions to a verdict with a stated error.

Student's bounds on the mean of the pairs' log ratios, for any number of pairs from two on, with two
guards. The first pass, in which both arms compute everything, is a negative control: what it says
against equal hosts is taken off. And of four pairs or more one is set aside whose host was in
trouble. How often this errs, by number of pairs and kind of host: ``scripts/operating.py``.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from harness.plan.power import ERROR, power, squares_within, student

Verdict = Literal["supported", "not supported", "not decided"]

MOST_PAIRS = 1_000
PROBABLY = 0.8
MIN_PAIRS_TO_SET_ASIDE = 4
# One honest session in a thousand looks like a bad one, of eight in a run less than one in a hundred.
BAD_SESSION_ERROR = 0.001
# Below it a session is not called bad however quiet the others are.
BAD_SESSION_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Level:
    """One session's median TTFT, logs of any one unit; ``first``: in the first pass.

    ``first`` None: the first pass is what is decided on, or the session has none of it. Either is
    None where the median is too short to have a log: such a session is never called bad.
    """

    session: str
    decided: float | None
    first: float | None


@dataclass(frozen=True, slots=True)
class SessionPair:
    """Two neighbouring sessions; the logs of their ratio, baseline ÷ treatment, by document."""

    base: Level
    treated: Level
    log_ratio: float
    log_first: float | None


@dataclass(frozen=True, slots=True)
class BadSession:
    """A session unlike its arm's others, in the first pass too; ``factor`` and ``first_factor``
    are its median ÷ theirs. Its pair is set aside."""

    session: str
    factor: float
    first_factor: float


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Ratios baseline ÷ treatment over ``n_pairs`` pairs.

    ``low`` and ``high``: what the true ratio is at least and at most, each wrong in ``ERROR`` of
    runs. ``host``: the first pass's ratio, None without one; ``allowance``: the factor by which a
    bound gave way to it. ``noise``: standard deviation of the pairs' log ratios.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    n_pairs: int
    noise: float
    host: float | None
    allowance: float
    set_aside: BadSession | None


def conclude(
    pairs: Sequence[SessionPair], *, min_ratio: float, may_set_aside: bool = True
) -> Conclusion:
    """What two pairs or more say of ``min_ratio``.

    ``may_set_aside`` False keeps a bad session's pair, to say what it changes.
    """
    bad = bad_session(pairs) if may_set_aside else None
    kept = [
        pair
        for pair in pairs
        if bad is None or bad.session not in (pair.base.session, pair.treated.session)
    ]
    ratios = [pair.log_ratio for pair in kept]
    firsts = [pair.log_first for pair in kept if pair.log_first is not None]
    host, certain = _host(firsts if len(firsts) == len(kept) else ())
    middle = fmean(ratios)
    margin = student(len(ratios) - 1, 1 - ERROR) * stdev(ratios) / sqrt(len(ratios))
    low, high = middle - max(0.0, certain) - margin, middle - min(0.0, certain) + margin
    verdict: Verdict = "not decided"
    if low >= log(min_ratio):
        verdict = "supported"
    elif high < log(min_ratio):
        verdict = "not supported"
    return Conclusion(
        verdict=verdict,
        ratio=exp(middle),
        low=exp(low),
        high=exp(high),
        n_pairs=len(kept),
        noise=stdev(ratios),
        host=None if host is None else exp(host),
        allowance=exp(abs(certain)),
        set_aside=bad,
    )


def pairs_needed(found: Conclusion, *, min_ratio: float) -> int | None:
    """Pairs with which a ratio and a noise like those found are decided in 80 % of runs.

    None above ``MOST_PAIRS``, and where the first pass says as much as the ratio.
    """
    effect = abs(log(found.ratio / min_ratio))
    if ((found.host or 1.0) > 1) == (found.ratio > min_ratio):
        effect -= log(found.allowance)  # the bound that decides gives way to it, pairs or no pairs
    if effect <= 0:
        return None
    # A pair more never takes power away, so the first that is enough is found by halving.
    numbers = range(2, MOST_PAIRS + 1)
    first = bisect_left(numbers, PROBABLY, key=lambda n: power(effect, found.noise, n))
    return numbers[first] if first < len(numbers) else None


def _host(firsts: Sequence[float]) -> tuple[float | None, float]:
    """The first pass's mean log ratio, and how much of it is beyond one standard error, signed.

    A trouble that hits one arm's sessions in every pair alike shows here in full, with a small
    error; the usual differences between sessions leave about nothing.
    """
    if len(firsts) < 2:
        return (firsts[0] if firsts else None), 0.0
    mean = fmean(firsts)
    beyond = max(0.0, abs(mean) - stdev(firsts) / sqrt(len(firsts)))
    return mean, beyond if mean > 0 else -beyond


def bad_session(pairs: Sequence[SessionPair]) -> BadSession | None:
    """The session that is farthest from its arm's others, if its host was in trouble.

    It was where both passes, the one decided on and the first, are off in the same direction,
    each beyond what ``BAD_SESSION_ERROR`` allows a session of the others' spread. A treatment that
    is slow in what it is there for, and nowhere else, has only itself to blame: it stays.
    """
    if len(pairs) < MIN_PAIRS_TO_SET_ASIDE:
        return None
    arms = [pair.base for pair in pairs], [pair.treated for pair in pairs]
    found: list[tuple[float, BadSession]] = []
    for own, other in (arms, arms[::-1]):
        for level in own:
            off = _distance(level, [each for each in own if each is not level], other)
            if off is not None:
                by, first_by, distance = off
                found.append((distance, BadSession(level.session, exp(by), exp(first_by))))
    return max(found, key=lambda each: each[0])[1] if found else None


def _distance(
    level: Level, own: Sequence[Level], other: Sequence[Level]
) -> tuple[float, float, float] | None:
    """Log factors of ``level`` to its arm's others: in the pass decided on, in the first pass, and
    the former ÷ its limit. None where it is no bad session."""
    offs: list[tuple[float, float]] = []
    for at in ("decided", "first"):
        value = getattr(level, at)
        mine, theirs = ([getattr(each, at) for each in arm] for arm in (own, other))
        if value is None or None in mine or None in theirs:
            return None
        middle, degrees = fmean(mine), len(mine) + len(theirs) - 2
        quantile = student(degrees, 1 - BAD_SESSION_ERROR / 2)
        variance = squares_within((mine, theirs)) / degrees
        limit = quantile * sqrt(variance * (1 + 1 / len(mine)))
        offs.append((value - middle, max(limit, log(BAD_SESSION_FACTOR))))
    (by, limit), (first_by, first_limit) = offs
    is_bad = abs(by) > limit and abs(first_by) > first_limit and (by > 0) == (first_by > 0)
    return (by, first_by, abs(by) / limit) if is_bad else None
