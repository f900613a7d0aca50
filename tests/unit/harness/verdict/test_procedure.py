"""The procedure alone; what it does to whole runs is in test_decision, how often it errs in results/."""

import json
from itertools import pairwise
from math import exp, log, sqrt

import pytest

from harness.plan.power import power
from harness.verdict.decision import TWO_PAIRS_FALSE, TWO_PAIRS_POWER
from harness.verdict.procedure import Level, SessionPair, conclude, pairs_needed
from tests.places import ROOT


def pair(number: int, base: float, treated: float, *first: float) -> SessionPair:
    """Sessions that took so long in the pass decided on, and in the first pass, if one is given."""
    before = (*map(log, first), None, None)[:2]
    return SessionPair(
        base=Level(f"{number}-a", log(base), before[0]),
        treated=Level(f"{number}-b", log(treated), before[1]),
        log_ratio=log(base / treated),
        log_first=log(first[0] / first[1]) if first else None,
    )


def test_four_pairs_have_students_bounds() -> None:
    # Logs of the ratios 0.1, 0.2, 0.3, 0.4: mean 0.25, sd 0.1291, error 0.06455; t (3, 2 %) = 3.482.
    pairs = [pair(i, 2.718281828459045 ** (i / 10), 1) for i in (1, 2, 3, 4)]
    found = conclude(pairs, min_ratio=1.1)
    assert (log(found.ratio), found.noise) == pytest.approx((0.25, 0.1291), abs=1e-4)
    assert (log(found.low), log(found.high)) == pytest.approx((0.0252, 0.4748), abs=1e-4)
    assert (found.verdict, found.host, found.allowance) == ("not decided", None, 1.0)
    assert conclude(pairs, min_ratio=1.02).verdict == "supported"
    assert conclude(pairs, min_ratio=1.7).verdict == "not supported"


def test_what_the_first_pass_says_for_certain_is_taken_off_the_bound_it_may_have_moved() -> None:
    # The first pass differs by 1.1 and 1.3, mean log 0.1788, error 0.0835: 0.0953 is certain.
    upwards = conclude([pair(1, 2, 1, 1.1, 1), pair(2, 2, 1, 1.3, 1)], min_ratio=1.1)
    assert log(upwards.allowance) == pytest.approx(0.0953, abs=1e-4)
    assert (log(upwards.low), log(upwards.high)) == pytest.approx(
        (log(2) - 0.0953, log(2)), abs=1e-4
    )
    downwards = conclude([pair(1, 2, 1, 1, 1.1), pair(2, 2, 1, 1, 1.3)], min_ratio=1.1)
    assert (log(downwards.low), log(downwards.high)) == pytest.approx(
        (log(2), log(2) + 0.0953), abs=1e-4
    )


def test_sessions_that_differ_either_way_leave_nothing_certain() -> None:
    found = conclude([pair(1, 2, 1, 1.2, 1), pair(2, 2, 1, 1, 1.2)], min_ratio=1.1)
    assert (found.host, found.allowance) == (1.0, 1.0)


def test_more_pairs_are_not_promised_where_the_first_pass_says_as_much_as_the_ratio() -> None:
    # What favours the treatment in the first pass is taken off whatever the number of pairs is.
    logs = (0.355, 0.405, 0.455, 0.405)
    pairs = [pair(i, exp(x), 1, exp(x), 1) for i, x in enumerate(logs)]
    found = conclude(pairs, min_ratio=1.1)
    assert found.verdict == "not decided"
    assert pairs_needed(found, min_ratio=1.1) is None


@pytest.fixture(scope="module")
def table() -> dict[str, object]:
    return json.loads((ROOT / "results" / "operating.json").read_text(encoding="utf-8"))


def test_no_host_without_an_effect_is_called_supported_too_often(table) -> None:
    assert len(table["false_supported"]) >= 20
    for host, shares in table["false_supported"].items():
        for n, share in shares.items():
            assert share <= (0.025 if int(n) >= 4 else TWO_PAIRS_FALSE), (host, n)


def test_power_is_as_promised_and_never_falls_when_a_pair_is_added(table) -> None:
    # A run in 2,000 more or less is chance: 0.03 is three standard errors of a difference.
    for ratio in ("1.2", "1.5", "3"):
        for sessions in ("sessions differ by 5 %", "sessions differ by 10 %"):
            shares = list(table["power"][ratio][sessions].values())
            assert all(b >= a - 0.03 for a, b in pairwise(shares)), (
                ratio,
                sessions,
            )
    quiet, usual = (table["power"]["1.5"][f"sessions differ by {s} %"] for s in (5, 10))
    assert all(quiet[n] >= 0.9 for n in ("4", "5", "6", "8", "12"))
    assert all(usual[n] >= 0.9 for n in ("6", "8", "12"))


@pytest.mark.parametrize("percent", [2, 5, 10, 20])
@pytest.mark.parametrize("ratio", ["1.2", "1.5", "3"])
def test_the_power_a_plan_announces_is_that_of_the_synthetic_runs(table, percent, ratio) -> None:
    # A pair's noise is that of two sessions and of two passes, 2 % each.
    noise = sqrt(2 * ((percent / 100) ** 2 + 0.02**2))
    found = table["power"][ratio][f"sessions differ by {percent} %"]
    assert len(found) == 7
    for n, share in found.items():
        assert power(log(float(ratio) / 1.1), noise, int(n)) == pytest.approx(share, abs=0.04), n


def test_what_two_pairs_can_do_is_quoted_from_the_table(table) -> None:
    worst = max(shares["2"] for shares in table["false_supported"].values())
    assert worst == TWO_PAIRS_FALSE
    assert round(table["power"]["1.5"]["sessions differ by 5 %"]["2"], 2) == TWO_PAIRS_POWER
