from typing import Any

import pytest

from harness.journal import Row
from harness.stats import source_class, summarize
from tests.factory import failed, make_row


def rows_of(
    session: str, times: list[float | None], *, pass_name: str = "pass2-replay"
) -> list[Row]:
    order, config = session.split("-")
    common = {"session": session, "order": int(order), "config": config, "pass": pass_name}
    return [
        Row.model_validate(failed(**common, doc=doc))
        if ttft is None
        else make_row(**common, doc=doc, ttft_ms=ttft, total_ms=ttft)
        for doc, ttft in enumerate(times)
    ]


def replay_pass(rows: list[Row]) -> dict[str, Any]:
    summary = summarize(rows, run="r", plan_id="p", block_size=32)
    content: dict[str, Any] = summary["passes"]["pass2-replay"]
    return content


def test_the_median_of_an_even_count_is_the_mean_of_the_two_middle_values() -> None:
    # A67/C4
    cell = replay_pass(rows_of("01-baseline", [1.0, 2.0, 10.0, 20.0]))["arms"]["baseline"]
    assert (cell["n"], cell["p50_ms"], cell["min_ms"], cell["max_ms"]) == (4, 6.0, 1.0, 20.0)


@pytest.mark.parametrize(("n", "median"), [(1, 1.0), (2, 1.5), (4, 2.5), (20, 10.5), (100, 50.5)])
def test_medians_of_one_to_n_match_hand_values(n: int, median: float) -> None:
    # A67
    cell = replay_pass(rows_of("01-baseline", [float(i + 1) for i in range(n)]))
    assert cell["arms"]["baseline"]["p50_ms"] == median


def test_a_failed_request_is_counted_and_in_no_median() -> None:
    # A5, A70
    cell = replay_pass(rows_of("01-baseline", [10.0, None, 30.0]))["arms"]["baseline"]
    assert (cell["n"], cell["failed"], cell["p50_ms"]) == (2, 1, 20.0)


def test_an_arm_whose_requests_all_failed_has_no_number() -> None:
    # A70
    cell = replay_pass(rows_of("01-baseline", [None, None]))["arms"]["baseline"]
    assert (cell["n"], cell["failed"]) == (0, 2)
    assert "p50_ms" not in cell


def test_the_ratio_is_paired_by_document_and_ranges_over_the_blocks() -> None:
    rows = [
        *rows_of("01-baseline", [100.0, 300.0]),
        *rows_of("02-lmcache", [50.0, 100.0]),  # ratios 2 and 3: block 1 = 2.5
        *rows_of("03-lmcache", [50.0, 50.0]),
        *rows_of("04-baseline", [100.0, 300.0]),  # ratios 2 and 6: block 2 = 4
    ]
    ratio = replay_pass(rows)["paired_ratio"]
    assert (ratio["ratio"], ratio["low"], ratio["high"]) == (3.25, 2.5, 4.0)
    assert [b["sessions"] for b in ratio["blocks"]] == [
        ["01-baseline", "02-lmcache"],
        ["04-baseline", "03-lmcache"],
    ]


def test_swapping_the_arms_gives_the_reciprocal() -> None:
    # A69
    rows = [*rows_of("01-baseline", [100.0]), *rows_of("02-lmcache", [40.0])]
    swapped = [*rows_of("01-lmcache", [100.0]), *rows_of("02-baseline", [40.0])]
    assert replay_pass(rows)["paired_ratio"]["ratio"] == 2.5
    assert replay_pass(swapped)["paired_ratio"]["ratio"] == 0.4


def test_linear_drift_over_a_b_b_a_leaves_no_speed_up() -> None:
    # A49: both arms cost 100 ms at time 0 and 1 ms more each request of the run.
    n_docs = 10
    rows = [
        row
        for order, config in enumerate(["baseline", "lmcache", "lmcache", "baseline"])
        for row in rows_of(
            f"0{order + 1}-{config}", [100.0 + order * n_docs + doc for doc in range(n_docs)]
        )
    ]
    assert replay_pass(rows)["paired_ratio"]["ratio"] == pytest.approx(1.0, abs=0.005)


def test_a_pass_in_one_arm_only_has_no_ratio() -> None:
    assert replay_pass(rows_of("01-baseline", [1.0]))["paired_ratio"] is None


def test_a_document_that_failed_in_one_arm_is_in_no_pair() -> None:
    rows = [*rows_of("01-baseline", [100.0, 900.0]), *rows_of("02-lmcache", [50.0, None])]
    block = replay_pass(rows)["paired_ratio"]["blocks"][0]
    assert (block["n"], block["ratio"]) == (1, 2.0)


def test_passes_are_never_pooled_and_warmup_is_in_none() -> None:
    # C7, A48
    rows = [
        *rows_of("01-baseline", [1.0], pass_name="pass1-cold"),
        *rows_of("01-baseline", [9.0]),
        make_row(**{"pass": "warmup"}, phase="warmup", ttft_ms=5000.0, doc=7),
    ]
    summary = summarize(rows, run="r", plan_id="p", block_size=32)
    assert {name: p["arms"]["baseline"]["p50_ms"] for name, p in summary["passes"].items()} == {
        "pass1-cold": 1.0,
        "pass2-replay": 9.0,
    }


@pytest.mark.parametrize(
    ("computed", "gpu_hit", "host_loaded", "source"),
    [
        (520, 0, 0, "recomputed"),
        (8, 0, 512, "host"),
        (8, 512, 0, "gpu"),
        (40, 480, 0, "gpu"),  # the document's last block was partly the question
        (41, 479, 0, "gpu+recomputed"),
        (8, 256, 256, "gpu+host"),
        (264, 256, 0, "gpu+recomputed"),
    ],
)
def test_a_request_is_classed_by_where_its_document_came_from(
    computed: int, gpu_hit: int, host_loaded: int, source: str
) -> None:
    row = make_row(computed=computed, gpu_hit=gpu_hit, host_loaded=host_loaded)
    assert source_class(row, block_size=32) == source


def test_a_request_with_unknown_sources_has_no_class() -> None:
    row = make_row(computed=None, gpu_hit=None, host_loaded=None, unattributed="no scrape")
    assert source_class(row, block_size=32) is None
