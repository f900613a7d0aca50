import tracemalloc

import pytest

from harness.record.row import Row
from harness.verdict.measured import FirstRequest, Paired, Pass
from harness.verdict.stats import summarize
from harness.verdict.tally import source_class
from tests.factory import failed, make_plan, make_row


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


def replay_pass(rows: list[Row]) -> Pass:
    return summarize(rows, run="r", plan_id="p", units=make_plan().units).passes["pass2-replay"]


def replay_pairs(rows: list[Row]) -> Paired:
    pairs = replay_pass(rows).paired_ratio
    assert pairs is not None
    return pairs


def test_the_median_of_an_even_count_is_the_mean_of_the_two_middle_values() -> None:
    # A67/C4
    cell = replay_pass(rows_of("01-baseline", [1.0, 2.0, 10.0, 20.0])).arms["baseline"]
    assert (cell.n, cell.p50_ms, cell.min_ms, cell.max_ms) == (4, 6.0, 1.0, 20.0)


@pytest.mark.parametrize(("n", "median"), [(1, 1.0), (2, 1.5), (4, 2.5), (20, 10.5), (100, 50.5)])
def test_medians_of_one_to_n_match_hand_values(n: int, median: float) -> None:
    # A67
    cell = replay_pass(rows_of("01-baseline", [float(i + 1) for i in range(n)]))
    assert cell.arms["baseline"].p50_ms == median


def test_a_failed_request_is_counted_and_in_no_median() -> None:
    # A5, A70
    cell = replay_pass(rows_of("01-baseline", [10.0, None, 30.0])).arms["baseline"]
    assert (cell.n, cell.failed, cell.p50_ms) == (2, 1, 20.0)


def test_a_stream_cut_short_after_its_first_token_is_in_no_median() -> None:
    # A7: it has a TTFT, and is still no success.
    cut = make_row(**{"pass": "pass2-replay"}, doc=1, ttft_ms=1.0, complete=False, error="cut")
    cell = replay_pass([*rows_of("01-baseline", [10.0]), cut]).arms["baseline"]
    assert (cell.n, cell.failed, cell.p50_ms) == (1, 1, 10.0)


def test_an_arm_whose_requests_all_failed_has_no_number() -> None:
    # A70
    cell = replay_pass(rows_of("01-baseline", [None, None])).arms["baseline"]
    assert (cell.n, cell.failed) == (0, 2)
    assert "p50_ms" not in cell.as_json()


def test_the_ratio_is_paired_by_document_and_ranges_over_the_blocks() -> None:
    rows = [
        *rows_of("01-baseline", [100.0, 300.0]),
        *rows_of("02-lmcache", [50.0, 100.0]),  # ratios 2 and 3: block 1 = 2.5
        *rows_of("03-lmcache", [50.0, 50.0]),
        *rows_of("04-baseline", [100.0, 300.0]),  # ratios 2 and 6: block 2 = 4
    ]
    ratio = replay_pairs(rows)
    assert (ratio.ratio, ratio.low, ratio.high) == (3.25, 2.5, 4.0)
    assert [b.sessions for b in ratio.blocks] == [
        ("01-baseline", "02-lmcache"),
        ("04-baseline", "03-lmcache"),
    ]


def test_swapping_the_arms_gives_the_reciprocal() -> None:
    # A69
    rows = [*rows_of("01-baseline", [100.0]), *rows_of("02-lmcache", [40.0])]
    swapped = [*rows_of("01-lmcache", [100.0]), *rows_of("02-baseline", [40.0])]
    assert replay_pairs(rows).ratio == 2.5
    assert replay_pairs(swapped).ratio == 0.4


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
    assert replay_pairs(rows).ratio == pytest.approx(1.0, abs=0.005)


def test_a_pass_in_one_arm_only_has_no_ratio() -> None:
    assert replay_pass(rows_of("01-baseline", [1.0])).paired_ratio is None


def test_a_document_that_failed_in_one_arm_is_in_no_pair() -> None:
    rows = [*rows_of("01-baseline", [100.0, 900.0]), *rows_of("02-lmcache", [50.0, None])]
    block = replay_pairs(rows).blocks[0]
    assert (block.n, block.ratio) == (1, 2.0)


def test_passes_are_never_pooled_and_warmup_is_in_none() -> None:
    # C7, A48
    rows = [
        *rows_of("01-baseline", [1.0], pass_name="pass1-cold"),
        *rows_of("01-baseline", [9.0]),
        make_row(**{"pass": "warmup"}, phase="warmup", ttft_ms=5000.0, doc=7),
    ]
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    assert {name: p.arms["baseline"].p50_ms for name, p in summary.passes.items()} == {
        "pass1-cold": 1.0,
        "pass2-replay": 9.0,
    }


def test_a_request_with_unknown_sources_has_no_class() -> None:
    row = make_row(computed=None, gpu_hit=None, host_loaded=None, unattributed="no scrape")
    assert source_class(row, units=make_plan().units) is None


def test_session_medians_are_the_unit_and_keep_their_spread() -> None:
    # Session medians 10 and 30; the median of all rows pooled would be 10.
    rows = [*rows_of("01-baseline", [10.0, 10.0, 10.0]), *rows_of("02-baseline", [30.0])]
    spread = replay_pass(rows).arms["baseline"].session_medians
    assert spread.as_json() == {
        "n": 2, "median_ms": 20.0, "low_ms": 10.0, "high_ms": 30.0, "spread_ratio": 3.0
    }  # fmt: skip


def test_a_90th_percentile_needs_20_rows_and_interpolates_linearly() -> None:
    # A67: of 1 … 21, type 7 puts p90 at rank 1 + 0.9 × 20 = 19.
    few = replay_pass(rows_of("01-baseline", [float(i) for i in range(1, 20)]))
    many = replay_pass(rows_of("01-baseline", [float(i) for i in range(1, 22)]))
    assert few.arms["baseline"].p90_ms is None
    assert many.arms["baseline"].p90_ms == 19.0


def test_the_order_effect_compares_the_first_and_last_session_of_an_arm_by_document() -> None:
    rows = [
        *rows_of("01-baseline", [100.0, 10.0]),
        *rows_of("02-lmcache", [50.0]),
        *rows_of("03-baseline", [777.0, 777.0]),
        *rows_of("04-baseline", [150.0, 11.0]),  # ratios 1.5 and 1.1
    ]
    effect = replay_pass(rows).order_effect
    assert list(effect) == ["baseline"]
    found = effect["baseline"]
    assert found is not None
    assert (found.sessions, found.n) == (("01-baseline", "04-baseline"), 2)
    assert found.last_over_first == pytest.approx(1.3)


def test_differences_are_paired_like_the_ratios() -> None:
    rows = [*rows_of("01-baseline", [100.0, 300.0]), *rows_of("02-lmcache", [40.0, 100.0])]
    pair = replay_pairs(rows)
    assert pair.difference_ms.median == 130.0  # of 60 and 200
    assert [(d.doc, d.ratio, d.difference_ms) for d in pair.documents or []] == [
        (0, 2.5, 60.0),
        (1, 3.0, 200.0),
    ]


def test_a_time_of_zero_has_no_ratio() -> None:
    # A69: never infinite, never silently 1.
    rows = [*rows_of("01-baseline", [100.0, 5.0]), *rows_of("02-lmcache", [50.0, 0.0])]
    assert replay_pairs(rows).n_documents == 1


def test_an_outlier_is_flagged_and_still_counts() -> None:
    # Median 10, MAD 0, so the limit is 10 × 1.4826 × 0.5 % of 10 = 0.7413.
    rows = rows_of("01-baseline", [10.0, 10.0, 10.0, 10.0, 10.7, 20.0])
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    found = summary.outliers
    assert (found.n, found.n_judged, found.n_flagged) == (6, 6, 1)
    assert (found.rows[0].doc, found.rows[0].ttft_ms) == (5, 20.0)
    assert summary.passes["pass2-replay"].arms["baseline"].n == 6


def test_four_rows_alike_are_too_few_to_judge_an_outlier() -> None:
    summary = summarize(
        rows_of("01-baseline", [1.0, 1.0, 1.0, 99.0]), run="r", plan_id="p", units=make_plan().units
    )
    assert (summary.outliers.n_judged, summary.outliers.n_flagged) == (0, 0)


@pytest.mark.parametrize(("first", "is_slow"), [(30.0, True), (10.5, False)])
def test_a_slow_first_request_is_told_from_its_like(first: float, is_slow: bool) -> None:
    rows = [
        row.model_copy(update={"seq": row.doc + 3})
        for row in rows_of("01-baseline", [first, 10.0, 10.0, 10.0, 10.0, 10.0])
    ]
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    found = summary.sessions[0].first_request
    assert found == FirstRequest(ttft_ms=first, others_p50_ms=10.0, n_others=5, is_slow=is_slow)


def test_sources_are_told_apart_by_pass_and_arm() -> None:
    def one(session: str, pass_name: str, ttft_ms: float, **tokens: int) -> Row:
        config = session.split("-")[1]
        return make_row(
            **{"session": session, "config": config, "pass": pass_name, "ttft_ms": ttft_ms},
            **tokens,
        )

    rows = [
        one("01-baseline", "pass1-cold", 100.0),
        one("01-baseline", "pass2-replay", 90.0),
        one("02-lmcache", "pass2-replay", 9.0, computed=8, host_loaded=512),
        one("02-lmcache", "pass2-replay", 60.0, doc=1, computed=264, host_loaded=256),
    ]
    sources = summarize(rows, run="r", plan_id="p", units=make_plan().units).sources
    assert list(sources) == ["recomputed", "host+recomputed", "host"]
    assert (sources["recomputed"].n, sources["recomputed"].p50_ms) == (2, 95.0)
    assert sources["recomputed"].by_pass["pass2-replay"]["baseline"].p50_ms == 90.0
    assert sources["host"].as_json()["by_pass"] == {
        "pass2-replay": {
            "lmcache": {"n": 1, "p50_ms": 9.0, "p90_ms": None, "min_ms": 9.0, "max_ms": 9.0}
        }
    }


def test_rows_are_walked_once_and_not_kept() -> None:
    # A Row takes about 3 kB; the arrays take 25 bytes a row, and sorting a cell 40 more.
    n = 20_000
    template = make_row()
    tracemalloc.start()
    try:
        rows = (template.model_copy(update={"doc": doc, "seq": doc + 1}) for doc in range(n))
        summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.passes["pass1-cold"].arms["baseline"].n == n
    assert peak_bytes < 300 * n


def test_a_time_below_a_nanosecond_gives_no_ratio_instead_of_infinity() -> None:
    # A69
    rows = [*rows_of("01-baseline", [100.0]), *rows_of("02-lmcache", [5e-324])]
    assert replay_pass(rows).paired_ratio is None


def test_any_arm_may_be_the_treatment_and_the_summary_names_it() -> None:
    rows = [*rows_of("01-baseline", [100.0, 300.0]), *rows_of("02-native", [50.0, 100.0])]
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    assert summary.compared == ("baseline", "native")
    assert summary.ratio_direction == "baseline / native: above 1 native is faster"
    assert summary.passes["pass2-replay"].paired_ratio.ratio == 2.5


def test_a_planned_treatment_without_a_row_is_still_the_one_compared() -> None:
    rows = rows_of("01-baseline", [100.0])
    arms = ("baseline", "native")
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units, arms=arms)
    assert summary.compared == ("baseline", "native")


def test_of_several_unnamed_treatments_none_is_compared() -> None:
    rows = [*rows_of("01-baseline", [1.0]), *rows_of("02-a", [1.0]), *rows_of("03-b", [1.0])]
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    assert summary.compared == ("baseline", None)
    assert summary.passes["pass2-replay"].paired_ratio is None
    assert summary.ratio_direction == "no arm is compared"


def test_stores_and_bytes_that_no_row_knows_are_unknown_not_zero() -> None:
    # A26
    tokens = replay_pass(rows_of("01-baseline", [1.0])).arms["baseline"].tokens
    assert (tokens.computed, tokens.stored, tokens.loaded_bytes) == (520, None, None)


def test_what_the_tier_adds_is_of_the_same_documents_from_the_same_source() -> None:
    # A B B A; two documents are GPU hits in both arms, 5 and 7 ms slower with the tier in the first
    # block, 9 and 9 in the second; the third is loaded from the host in one arm, so not compared.
    added = {2: (5.0, 7.0), 3: (9.0, 9.0)}
    rows = []
    for position, arm in enumerate(("baseline", "lmcache", "lmcache", "baseline"), start=1):
        for doc in range(3):
            is_hit = doc < 2
            ms = 30.0 + (added[position][doc] if is_hit and arm == "lmcache" else 0.0)
            split = {"computed": 8, "gpu_hit": 512} if is_hit else {"computed": 520}
            if not is_hit and arm == "lmcache":
                split = {"computed": 8, "host_loaded": 512}
            rows.append(
                make_row(
                    session=f"{position:02d}-{arm}", order=position, config=arm, doc=doc,
                    ttft_ms=ms, total_ms=ms + 1, **{"pass": "pass2-replay"}, **split,
                )
            )  # fmt: skip
    found = summarize(rows, run="r", plan_id="p", units=make_plan().units).sources
    price = found["gpu"].price_ms
    assert price is not None
    assert (price.median, price.low, price.high) == (7.5, 6.0, 9.0)  # medians of 5, 7 and of 9, 9
    assert {arm: cell.n for arm, cell in found["gpu"].by_arm.items()} == {
        "baseline": 4,
        "lmcache": 4,
    }
    assert (found["host"].price_ms, found["recomputed"].price_ms) == (None, None)
