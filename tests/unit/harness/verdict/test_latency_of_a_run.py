import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.record.journal import read_journal
from harness.record.row import Row
from harness.verdict.latency import check_folder, check_rows, split_rows
from harness.verdict.latency_result import LatencyCheck
from tests.factory import failed, make_row
from tests.folder import write_run
from tests.places import ROOT

CHUNK = {"chunk_tokens": 256, "chunk_bytes": 2**20}


def rows_of(session: str, passes: dict[str, tuple[int, int, int, float]], n: int) -> Iterator[Row]:
    """``n`` rows a pass of 1,044 tokens; per pass: computed, GPU hit, host-loaded, TTFT in ms."""
    seq = 0
    host = CHUNK if not session.endswith("baseline") else {}
    for pass_name, (computed, gpu_hit, host_loaded, ttft_ms) in passes.items():
        for doc in range(n):
            seq += 1
            yield make_row(
                **{
                    **host, "session": session, "order": int(session[:2]), "seq": seq,
                    "config": session[3:], "pass": pass_name, "doc": doc, "prompt_tokens": 1_044,
                    "computed": computed, "gpu_hit": gpu_hit, "host_loaded": host_loaded,
                    "ttft_ms": ttft_ms,
                    "loaded_bytes": host_loaded // 256 * 2**20 if host else None,
                }
            )  # fmt: skip


def lab() -> list[Row]:
    """4 documents: computed in 520 ms, found in 10 ms, loaded (4 chunks of 1 MiB) in 50 ms."""
    cold, hit, loaded = (1_044, 0, 0, 520.0), (20, 1_024, 0, 10.0), (20, 0, 1_024, 50.0)
    sessions = {
        "01-baseline": {"cold": cold, "replay": cold},
        "02-lmcache": {"cold": cold, "replay": loaded},
        "03-control": {"cold": cold, "replay": hit},
    }
    return [row for name, passes in sessions.items() for row in rows_of(name, passes, 4)]


def demo_rows() -> list[Row]:
    """The committed demo run."""
    # The first by name: a user's own demo runs lie beside the committed one.
    run = min(ROOT.glob("results/*-demo-*"))
    journals = sorted(run.glob("journal-*.jsonl"))
    assert len(journals) >= 5
    return [row for path in journals for row in read_journal(path)]


def test_first_passes_the_control_and_every_second_tier_row_calibrate() -> None:
    calibration, held_out = split_rows(lab())
    names = [(row.session, row.pass_name, row.doc) for row in held_out]
    assert names == [
        *(("01-baseline", "replay", doc) for doc in range(4)),
        ("02-lmcache", "replay", 1),
        ("02-lmcache", "replay", 3),
    ]
    assert len(calibration) == 24 - 6


def test_rows_that_follow_the_model_are_predicted_without_error() -> None:
    found = check_rows(lab(), run="r", where="here")
    assert found.calibration.n_by_arm == {"baseline": 4, "lmcache": 6, "control": 8}
    assert found.held_out.n == 6
    assert found.held_out.worst_absolute_percentage_error == pytest.approx(0, abs=1e-6)
    assert [(e.arm, e.n) for e in found.held_out.by_split] == [
        ("baseline", 4),
        ("lmcache", 2),
    ]
    assert found.extrapolated == []
    assert "overhead, per_token, per_pair" in found.only_together[0]


def test_break_even_states_both_speeds_and_the_bandwidth_needed() -> None:
    largest = check_rows(lab(), run="r", where="here").break_even.sizes[-1]
    # 1,024 tokens: 510 ms to compute, 40 ms to load 4 MiB
    assert (largest.label, largest.tokens, largest.assumed) == ("predicted", 1_024, [])
    assert largest.saved_ms == pytest.approx(470)
    assert largest.prefill_tokens_per_s == pytest.approx(1_024 / 0.510)
    assert largest.load_gb_per_s == pytest.approx(4 * 2**20 / 0.040 / 1e9)
    assert largest.needed_gb_per_s == pytest.approx(4 * 2**20 / 0.510 / 1e9)


def test_break_even_on_an_assumption_is_called_extrapolated() -> None:
    # One load size: what a single chunk costs is not told from what any load costs.
    found = check_rows(lab(), run="r", where="here").break_even
    assert found.from_tokens == 256
    assert found.sizes[0].label == "extrapolated"
    assert found.statement.startswith("Extrapolated: from 256 tokens, one chunk")
    assert "load_setup" in found.statement


def test_a_saving_within_its_own_error_establishes_no_break_even() -> None:
    # Loads scatter from 10 to 1,000 ms about the 520 ms of computing: nothing can be said.
    rows = [
        row.model_copy(update={"ttft_ms": (10.0, 1_000.0, 900.0, 30.0)[row.doc]})
        if row.host_loaded
        else row
        for row in lab()
    ]
    statement = check_rows(rows, run="r", where="lab").break_even.statement
    assert "no break-even is established" in statement
    assert "inf" not in statement


def test_held_out_times_do_not_touch_the_fit() -> None:
    rows = lab()
    slower = [
        row.model_copy(update={"ttft_ms": 780.0})
        if (row.config, row.pass_name) == ("baseline", "replay")
        else row
        for row in rows
    ]
    before, after = (check_rows(each, run="r", where="here") for each in (rows, slower))
    assert before.coefficients == after.coefficients
    # 520 predicted ÷ 780 measured − 1 = −1/3 on 4 of 6 rows
    assert after.held_out.median_percentage_error == pytest.approx(-100 / 3)


def test_a_held_out_split_the_calibration_does_not_cover_is_in_no_other_figure() -> None:
    part = rows_of("04-baseline", {"replay": (500, 544, 0, 300.0)}, 3)
    found = check_rows([*lab(), *part], run="r", where="here")
    assert found.held_out.n == 6
    (entry,) = found.extrapolated
    assert (entry.label, entry.n, entry.predicted_low_ms) == ("extrapolated", 3, None)
    # 10 + 480 · 510/1024 ms, with nothing for token pairs
    assert entry.predicted_ms == pytest.approx(249.0625)
    assert "per_pair" in entry.assumed[0]


def test_rows_that_cannot_be_used_are_counted_by_reason() -> None:
    bad: list[dict[str, Any]] = [
        {"phase": "warmup"},
        failed(),
        {"computed": None, "gpu_hit": None, "host_loaded": None},
        {"disagreement": "by 3"},
        {"conn_reused": False},
        {"computed": 264, "host_loaded": 256},
    ]
    found = check_rows([*lab(), *(make_row(**changed) for changed in bad)], run="r", where="here")
    assert found.left_out == {
        "warm-up": 1, "incomplete": 1, "token sources unknown": 1, "ledgers disagree": 1,
        "a connection was set up": 1, "bytes of the load unknown": 1,
    }  # fmt: skip
    assert found.calibration.n == 18


def test_a_run_without_a_tier_has_no_break_even_and_says_why() -> None:
    rows = [row for row in lab() if row.config == "baseline"]
    found = check_rows(rows, run="r", where="here")
    assert found.held_out.n == 4
    assert found.break_even.statement == "not established: no calibration row loads"


def test_a_run_without_usable_rows_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match="the run x has no row to calibrate on"):
        check_rows([make_row(**failed())], run="r", where="the run x")


def test_a_run_folder_is_checked_from_its_journals(tmp_path: Path) -> None:
    found = check_folder(write_run(tmp_path))
    assert found.run == "20260101T000000Z-two-docs"
    # 4 sessions × 2 documents cold, and the first and third of 4 tier replays; 4 + 2 held out
    assert (found.calibration.n, found.held_out.n) == (10, 6)
    assert LatencyCheck.model_validate_json(json.dumps(found.as_json(), allow_nan=False)) == found


def test_the_committed_demo_run_is_predicted_within_a_quarter() -> None:
    found = check_rows(demo_rows(), run="r", where="demo")
    held_out = found.held_out
    assert held_out.n >= 50
    assert held_out.median_absolute_percentage_error < 25
    assert held_out.n_with_interval == held_out.n
    assert held_out.interval_coverage > 0.5
    assert found.break_even.sizes[-1].load_gb_per_s > 0
