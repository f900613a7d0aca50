import random
from math import log

import pytest

from harness.plan.arms import compared
from harness.verdict.paired import interval_of, neighbours


@pytest.mark.parametrize(
    ("arms", "treatment"),
    [
        (["baseline", "native", "native", "baseline", "control"], "native"),
        (["baseline", "none"], "none"),
        (["lmcache"], "lmcache"),
        (["baseline", "a", "lmcache", "b"], "lmcache"),
        (["baseline", "a", "b"], None),
        (["baseline", "control"], None),
        ([], None),
    ],
)
def test_the_treatment_is_the_one_arm_that_is_neither_baseline_nor_control(
    arms: list[str], treatment: str | None
) -> None:
    assert compared(arms) == ("baseline", treatment)


@pytest.mark.parametrize(
    ("n_blocks", "low", "high", "share", "words"),
    [
        (1, 1, 1, 0.0, "range over 1 A B block, which says no spread"),
        (2, 1, 2, 0.5, "range over 2 A B blocks, which holds the median in 50% of runs"),
        (3, 1, 3, 0.75, "range over 3 A B blocks, which holds the median in 75% of runs"),
        (5, 1, 5, 15 / 16, "range over 5 A B blocks, which holds the median in 94% of runs"),
        (6, 1, 6, 31 / 32, "range over 6 A B blocks, which holds the median in 97% of runs"),
        # 2 x (1 + 9) of 512 orders of heads and tails, and 2 x (1 + 12 + 66) of 4,096
        (9, 2, 8, 1 - 20 / 512, "ranks 2 to 8 of 9 A B blocks, which holds the median in 96% of runs"),
        (12, 3, 10, 1 - 158 / 4096, "ranks 3 to 10 of 12 A B blocks, which holds the median in 96% of runs"),
    ],
)  # fmt: skip
def test_an_interval_says_in_how_many_runs_it_holds_the_median(
    n_blocks: int, low: int, high: int, share: float, words: str
) -> None:
    found = interval_of([float(i) for i in range(n_blocks, 0, -1)])
    assert (found.low, found.high, found.coverage) == (low, high, pytest.approx(share))
    assert (found.interval, found.median) == (words, (n_blocks + 1) / 2)


def test_thousands_of_blocks_have_an_interval_too() -> None:
    found = interval_of([float(i) for i in range(3_000)])
    assert found.coverage == pytest.approx(0.9534, abs=0.0001)
    assert 1_440 < found.low < found.high < 1_560


@pytest.mark.parametrize("n_blocks", [2, 5, 12])
def test_an_interval_of_skew_values_holds_their_median_as_often_as_it_says(n_blocks: int) -> None:
    random_, n, truth = random.Random(3), 2_000, log(2)  # the median of exponential draws
    runs = [interval_of([random_.expovariate(1) for _ in range(n_blocks)]) for _ in range(n)]
    held = sum(found.low <= truth <= found.high for found in runs) / n
    assert held == pytest.approx(runs[0].coverage, abs=0.035)  # three standard errors


def test_sessions_are_paired_by_the_order_of_the_plan_whatever_was_measured() -> None:
    order = dict(enumerate(["baseline", "a", "a", "baseline", "control", "a", "baseline"], start=1))
    assert neighbours(order, "baseline", "a") == [(1, 2), (4, 3), (7, 6)]
    assert neighbours(order, "baseline", None) == []
