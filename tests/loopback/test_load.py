"""Several requests in flight on scripted loopback servers: every row against the servers' ledger."""

import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.measure.in_flight import Sent, Target, Turn, send_all
from harness.record.journal import read_journal
from harness.record.row import Row
from servers.fake.__main__ import LEDGER_VARIABLE, SCRIPT_VARIABLE
from sim.workload import Request
from tests.factory import PLAN_TOML
from tests.loopback.conftest import StartProcess

CLOSED = "[load]\nconcurrency = 4\n"
OPEN = "[load]\nrate = 50\n"
N_DOCUMENTS = 8
REQUESTS = 1 + 2 * N_DOCUMENTS  # of a session: a warm-up and two passes
SESSIONS = 4

Measure = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Run the plan of the tests with more documents and a load; ``script``: what goes wrong."""

    def run(load: str, script: Any = ()) -> subprocess.CompletedProcess[str]:
        plan = PLAN_TOML.replace("documents = 2\n", f"documents = {N_DOCUMENTS}\n", 1)
        (tmp_path / "plan.toml").write_text(plan + load)
        (tmp_path / "script.json").write_text(json.dumps(list(script)))
        more = {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            SCRIPT_VARIABLE: str(tmp_path / "script.json"),
            LEDGER_VARIABLE: str(tmp_path / "ledger.jsonl"),
        }
        return subprocess.run(
            [sys.executable, "-c", "from harness.cli import main; main()", "run", "plan.toml"],
            cwd=tmp_path,
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def rows_of(tmp_path: Path) -> list[Row]:
    (run,) = (tmp_path / "results").iterdir()
    return [row for path in sorted(run.glob("journal-*.jsonl")) for row in read_journal(path)]


def served(tmp_path: Path) -> dict[str, dict[str, Any]]:
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    entries = (json.loads(line) for line in lines)
    return {entry["request_id"]: entry for entry in entries if entry["request_id"]}


def unlike_ledger(rows: list[Row], ledger: dict[str, dict[str, Any]]) -> list[str]:
    """The attributed rows whose sources are not those that the server says."""
    names = ("computed", "gpu_hit", "host_loaded")
    return [
        name
        for row in rows
        if row.is_attributed
        for name in [f"{row.session}-{row.seq}"]
        if any(getattr(row, source) != ledger[name][source] for source in names)
    ]


@pytest.mark.parametrize(("load", "loop"), [(CLOSED, "closed"), (OPEN, "open")])
def test_every_request_in_flight_has_the_sources_the_server_says(
    measure: Measure, tmp_path: Path, load: str, loop: str
) -> None:
    done = measure(load)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert len(rows) == SESSIONS * REQUESTS
    assert unlike_ledger(rows, served(tmp_path)) == []
    sent = Counter((row.phase, row.loop, row.attributed_by) for row in rows)
    assert sent == {
        ("warmup", "serial", "counters"): SESSIONS,
        ("measure", loop, "events"): SESSIONS * 2 * N_DOCUMENTS,
    }
    loaded = [row for row in rows if row.host_loaded]
    assert {row.loaded_source for row in loaded} == {"token_sources"}
    assert {(row.late_ms is None) for row in rows if row.phase == "measure"} == {loop == "closed"}
    assert "only the sums were checked: several requests are in flight" in done.stdout


def test_every_session_is_asked_at_the_same_times(measure: Measure, tmp_path: Path) -> None:
    assert measure(OPEN).returncode == 0
    gaps: dict[str, list[float]] = {}
    for row in rows_of(tmp_path):
        if row.pass_name == "pass1-cold":
            assert row.late_ms is not None
            due_ms = row.sent_unix_ns / 1e6 - row.late_ms
            gaps.setdefault(row.session, []).append(due_ms)
    offsets = [[due - times[0] for due in times] for times in gaps.values()]
    for times in zip(*offsets, strict=True):
        assert max(times) - min(times) < 5  # the wall clock's own doing


def in_pass_two(session_rows: list[Row]) -> set[bool]:
    return {row.is_attributed for row in session_rows if row.pass_name == "pass2-replay"}


# Request 1 of a server is the launcher's, 2 the warm-up, 3 to 10 the first pass, 11 to 18 the second.
@pytest.mark.parametrize("broken", [{"no_done": True}, {"close_after": {"tokens": 1}}])
def test_one_broken_answer_among_others_harms_no_other_row(
    measure: Measure, tmp_path: Path, broken: dict[str, Any]
) -> None:
    done = measure(CLOSED, [{"match": {"nth": 6}, "do": [broken]}])
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path)
    lost = [row for row in rows if not row.complete]
    assert len(lost) == SESSIONS
    assert {row.pass_name for row in lost} == {"pass1-cold"}
    assert all(row.is_attributed for row in rows if row.complete)
    assert unlike_ledger(rows, served(tmp_path)) == []


def test_a_preempted_request_is_not_attributed_and_the_others_are(
    measure: Measure, tmp_path: Path
) -> None:
    assert measure(CLOSED, [{"match": {"nth": 6}, "do": [{"preempted": True}]}]).returncode == 1
    rows = rows_of(tmp_path)
    lost = [row for row in rows if not row.is_attributed]
    assert len(lost) == SESSIONS
    assert all("named its blocks twice" in (row.unattributed or "") for row in lost)
    assert unlike_ledger(rows, served(tmp_path)) == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"lost_event": True}, "batches of KV events were lost"),
        ({"foreign": 1}, "vLLM's finished requests moved by"),
        ({"miscount": 32}, "by source the requests sum to"),
        ({"no_cached_tokens": True}, "by source|blocks the request must have named"),
    ],
)
def test_a_pass_that_does_not_add_up_is_not_attributed(
    measure: Measure, tmp_path: Path, fault: dict[str, Any], why: str
) -> None:
    done = measure(CLOSED, [{"match": {"nth": 14}, "do": [fault]}])
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path)
    hit = [row for row in rows if not row.is_attributed]
    assert {row.pass_name for row in hit} == {"pass2-replay"}
    assert any(re.search(why, row.unattributed or "") for row in hit)
    assert unlike_ledger(rows, served(tmp_path)) == []


def test_events_that_contradict_the_counters_end_the_run_at_the_warm_up(
    measure: Measure, tmp_path: Path
) -> None:
    done = measure(CLOSED, [{"match": {"nth": 2}, "do": [{"miscount": 32}]}])
    assert done.returncode == 3, done.stderr
    assert "by the KV events" in done.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"gpu_hit": 32, "computed": 488, "cached_tokens": 32},
            "host_loaded is 32 without a host tier",
        ),
        ({"named_from": 64, "cached_tokens": 64, "computed": 456, "gpu_hit": 64}, "by source"),
        ({"attributed_by": "counters"}, "cannot tell requests in flight apart"),
        ({"loop": "serial"}, "counters_before are not|cannot|say"),
        ({"computed": 488, "gpu_hit": 32}, "cached_tokens|say"),
    ],
)
def test_a_forged_row_of_a_pass_is_refused(
    measure: Measure, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    assert measure(CLOSED).returncode == 0
    (run,) = (tmp_path / "results").iterdir()
    journal = run / "journal-01-baseline.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines[4]["pass"] == "pass1-cold"
    lines[4] |= changed
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=message):
        read_journal(journal)


def test_a_last_pass_that_lacks_rows_is_said(measure: Measure, tmp_path: Path) -> None:
    assert measure(CLOSED).returncode == 0
    (run,) = (tmp_path / "results").iterdir()
    journal = run / "journal-01-baseline.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))
    notes: list[str] = []
    assert len(read_journal(journal, notes)) == len(lines) - 2
    assert any("lacks requests that its counters have" in note for note in notes)


def prompts(n: int) -> list[Request]:
    return [
        Request("measure", "pass1-cold", doc, 500, tuple(range(doc, doc + 520)), 8)
        for doc in range(n)
    ]


def timed(url: str, *, due_s: float | None) -> list[Sent]:
    """320 answers with 32 in flight, or one due every ``due_s``."""
    turns = [
        Turn(request, f"r-{number}", None if due_s is None else number * due_s)
        for number, request in enumerate(prompts(320))
    ]
    target = Target(url, "fake", deadline_s=30)
    return send_all(turns, target, workers=32, check_alive=lambda: None)


def unlike_each_other(n: int) -> list[dict[str, Any]]:
    """A script of answers that do not come at the same moments."""
    rng = random.Random(1)
    return [
        {
            "match": {"nth": number},
            "do": [{"first_token_ms": rng.randrange(100, 300), "token_ms": rng.randrange(5, 15)}],
        }
        for number in range(1, n + 1)
    ]


@pytest.mark.alone
@pytest.mark.parametrize("due_s", [None, 0.01])
def test_the_stopwatch_is_right_with_32_in_flight(
    fake_process: StartProcess, due_s: float | None
) -> None:
    fake = fake_process("--num-gpu-blocks", "1000", script=unlike_each_other(320))
    sent = timed(fake.url, due_s=due_s)
    ledger = {entry["request_id"]: entry for entry in fake.ledger()}
    errors = []
    for number, each in enumerate(sent):
        assert each.result.ttft_ms is not None, each.result.error
        entry = ledger[f"r-{number}"]
        errors.append(each.result.ttft_ms - (entry["first_token_ns"] - entry["received_ns"]) / 1e6)
    assert statistics.median(errors) <= 0.5
    late_ms = [each.late_ms for each in sent if each.late_ms is not None]
    assert len(late_ms) == (0 if due_s is None else len(sent))
    if late_ms:
        assert min(late_ms) >= 0
        assert statistics.median(late_ms) <= 1.0
