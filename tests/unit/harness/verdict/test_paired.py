import random

import pytest

from harness.plan.arms import compared
from harness.verdict.measured import Interval
from harness.verdict.paired import MIN_BLOCKS_FOR_INTERVAL, interval_of


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


def test_fewer_than_six_blocks_get_a_range_that_says_it_is_no_interval() -> None:
    assert interval_of([3.0, 1.0, 2.0]) == Interval(
        median=2.0,
        low=1.0,
        high=3.0,
        interval="range over 3 A B blocks; too few for a confidence interval",
        interval_kind="range",
    )


def test_six_equal_blocks_have_a_range_of_nothing_and_no_bootstrap_of_it() -> None:
    found = interval_of([2.0] * MIN_BLOCKS_FOR_INTERVAL)
    assert (found.low, found.high, found.interval_kind) == (2.0, 2.0, "range")


def test_six_blocks_get_an_interval_inside_their_range_and_the_same_one_twice() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 9.0]
    found = interval_of(values)
    assert found == interval_of(values)
    assert found.interval_kind == "bootstrap"
    assert 1.0 <= found.low < 1.25 < found.high <= 9.0


@pytest.mark.parametrize("n_blocks", [6, 12])
def test_a_95_percent_interval_holds_the_truth_in_about_95_percent_of_cases(n_blocks: int) -> None:
    random_ = random.Random(3)
    n, held = 100, 0
    for _ in range(n):
        found = interval_of([random_.gauss(5.0, 1.0) for _ in range(n_blocks)])
        held += found.low <= 5.0 <= found.high
    assert 0.88 * n <= held <= n
