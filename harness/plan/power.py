"""How often pairs of sessions decide, and err: known before anything is measured.

Student's t on the logs of the pairs' ratios, as in ``verdict.procedure``.
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist, fmean

ERROR = 0.02
"""Share of runs in which a bound is wrong, on each side."""
PAIRS = (2, 3, 4, 5, 6, 8, 10, 12)
_NORMAL = [NormalDist().inv_cdf((i + 0.5) / 400) for i in range(400)]
SESSION_NOISE = 0.05
"""Standard deviation of a session's log median, where no run says another."""


def power(effect: float, noise: float, n_pairs: int) -> float:
    """Share of runs that are decided: ``effect`` and ``noise`` (standard deviation) of log ratios.

    The first pass's guard included, where sessions differ in both passes alike: a mean that chance
    has moved towards the verdict counts by one standard error at most.
    """
    from scipy.special import chdtr

    if noise == 0:
        return float(effect > 0)
    degrees, errors = n_pairs - 1, effect / noise * sqrt(n_pairs)
    quantile = student(degrees, 1 - ERROR)
    reached = (max(0.0, errors + min(z, 1.0)) / quantile for z in _NORMAL)
    return float(fmean(chdtr(degrees, degrees * ratio**2) for ratio in reached))


def squares_within(groups: Iterable[Sequence[float]]) -> float:
    """Sum of the squared distances of the values from the mean of their own group; none is empty."""
    means = [(values, fmean(values)) for values in groups]
    return sum((x - mean) ** 2 for values, mean in means for x in values)


def student(degrees: float, probability: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit  # here: a quarter of a second that most commands never need

    return float(stdtrit(degrees, probability))
