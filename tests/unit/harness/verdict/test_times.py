"""Bounds that honest rows keep; each is met just inside and just outside."""

from typing import Any

import pytest

from harness.record.manifest import SessionRecord
from harness.verdict.times import Times
from tests.factory import make_row

S = 1_000_000_000
NOON_S = 1_767_268_800  # 2026-01-01T12:00:00+00:00


def problems_of(*rows: dict[str, Any], **session: Any) -> list[str]:
    """Of requests of 110 ms that settle in 20 ms, unless changed."""
    times = Times()
    for seq, changed in enumerate(rows, start=1):
        times.add(make_row(**{"seq": seq, "doc": seq, "server_ttft_ms": None, **changed}))
    return list(times.problems({"01-baseline": SessionRecord.model_validate(session)}))


@pytest.mark.parametrize(("sent_ms", "is_told"), [(80.1, False), (79.9, True)])
def test_a_request_is_sent_once_the_one_before_has_settled(sent_ms: float, is_told: bool) -> None:
    # Settled after 130 ms; a wall clock may be set by 50.
    found = problems_of({"sent_unix_ns": S}, {"sent_unix_ns": S + round(sent_ms * 1e6)})
    assert bool(found) == is_told
    if is_told:
        assert "01-baseline/pass1-cold/2: sent 50 ms before the request before it" in found[0]


@pytest.mark.parametrize(
    ("ttft_ms", "server_ms", "is_told"),
    [
        (50.0, 100.0, False),
        (49.9, 100.0, True),
        (2_500.0, 1_250.0, False),  # not above twice the server's
        (1_100.0, 100.5, False),  # not a second above it
        (1_100.0, 99.5, True),
    ],
)
def test_a_ttft_is_near_the_servers_own(ttft_ms: float, server_ms: float, is_told: bool) -> None:
    row = {"ttft_ms": ttft_ms, "total_ms": ttft_ms + 1, "server_ttft_ms": server_ms}
    assert bool(problems_of({**row, "first_byte_ms": None})) == is_told


@pytest.mark.parametrize(("idle_ms", "is_told"), [(249.0, False), (251.0, True)])
def test_requests_follow_each_other(idle_ms: float, is_told: bool) -> None:
    gap = round((130 + idle_ms) * 1e6)
    found = problems_of(*({"sent_unix_ns": S + i * gap} for i in range(3)))
    told = (
        "01-baseline: 2 requests and their settling took 260 ms, and nothing was asked for 502 ms "
        "between them"
    )
    assert found == ([told] if is_told else [])


def test_long_requests_may_have_long_gaps_between_them() -> None:
    row = {"ttft_ms": 900.0, "total_ms": 980.0}  # busy for 1,000 ms, idle for 900
    assert problems_of(*({**row, "sent_unix_ns": S + i * 19 * S // 10} for i in range(3))) == []


@pytest.mark.parametrize(
    ("sent_s", "told"),
    [
        (NOON_S + 8.1, []),
        (NOON_S + 7.9, ["01-baseline: the first request was sent 2 s before its servers were ready"]),
        (NOON_S + 61.8, []),
        (NOON_S + 61.95, ["01-baseline: the last answer came 2 s after its servers had ended"]),
    ],
)  # fmt: skip
def test_requests_lie_where_the_servers_ran(sent_s: float, told: list[str]) -> None:
    found = problems_of(
        {"sent_unix_ns": round(sent_s * S)},
        started="2026-01-01T12:00:00+00:00", start_s=10.0, ended="2026-01-01T12:01:00+00:00",
    )  # fmt: skip
    assert found == told


def test_a_request_that_failed_says_nothing_of_the_next_one() -> None:
    failed = {"ttft_ms": None, "total_ms": None, "complete": False, "error": "boom"}
    assert problems_of({**failed, "sent_unix_ns": S}, {"sent_unix_ns": 9 * S}) == []


# The longest of the pass took 2,000 ms from scheduled to first token, so 5,000 ms may be missing.
@pytest.mark.parametrize(("ttft_ms", "is_told"), [(5_099.0, False), (5_101.0, True)])
@pytest.mark.parametrize("pass_name", ["pass1-cold", "pass2-replay"])
def test_a_request_in_flight_waits_no_longer_than_a_step_of_its_pass(
    ttft_ms: float, is_told: bool, pass_name: str
) -> None:
    busy = {"loop": "closed", "sent_unix_ns": S, "first_byte_ms": None, "queue_ms": 50.0}
    long = {**busy, "ttft_ms": 2_100.0, "total_ms": 2_200.0, "server_ttft_ms": 2_050.0}
    row = {**busy, "ttft_ms": ttft_ms, "total_ms": ttft_ms, "server_ttft_ms": 100.0}
    found = problems_of(long, {**row, "pass": pass_name})
    # A step of another pass is no excuse.
    assert bool(found) == (is_told or pass_name == "pass2-replay")


def test_requests_in_flight_may_be_sent_before_others_have_settled() -> None:
    row = {"loop": "closed", "sent_unix_ns": S, "settle_ms": None}
    assert problems_of(row, row, {**row, "sent_unix_ns": S + 60 * S}) == []
