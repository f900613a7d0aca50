"""The whole path ``kvcliff run`` on scripted loopback servers, as a user would start it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.plan.plan import BUILT_IN_ARMS
from harness.record.journal import read_journal
from harness.record.row import Row
from servers.fake.__main__ import LEDGER_VARIABLE, SCRIPT_VARIABLE
from servers.processes import leftovers
from tests.factory import PLAN_TOML

# Two documents of 16 blocks in a pool of 17 usable ones; each request holds 17, so every replay
# of the baseline is computed and every replay of the tier arm comes from the host.
# 5 requests a session: 1 warm-up and 2 passes over 2 documents. The launcher's readiness
# completion is request 1 of each server.
REQUESTS = 5
SESSIONS = ["01-baseline", "02-lmcache", "03-lmcache", "04-baseline"]

Kvcliff = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN_TOML)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def kvcliff(tmp_path: Path, environment: dict[str, str]) -> Kvcliff:
    """Run the command line in ``tmp_path``; ``script`` is what the fake servers do wrong."""

    def run(*words: str, script: Any = (), **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.json").write_text(json.dumps(list(script)))
        return subprocess.run(
            command(*words),
            cwd=tmp_path,
            env={**environment, SCRIPT_VARIABLE: str(tmp_path / "script.json"), **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def start(plan: Path, tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Start ``kvcliff run`` in the background, by default on servers of 400 ms a request."""
    started = []

    def run(script: Any = None) -> "subprocess.Popen[str]":
        slow = [{"match": {"all": True}, "do": [{"first_token_ms": 400}]}]
        (tmp_path / "script.json").write_text(json.dumps(script or slow))
        harness = subprocess.Popen(
            command("run", str(plan)),
            cwd=tmp_path,
            env={**environment, SCRIPT_VARIABLE: str(tmp_path / "script.json")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(harness)
        return harness

    yield run
    for harness in started:
        harness.kill()
        harness.communicate(timeout=30)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``kvcliff run plan.toml`` has been once."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "plan.toml").write_text(PLAN_TOML)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command("run", "plan.toml"), cwd=folder, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def finished_run(measured: Path, tmp_path: Path) -> Path:
    """A complete run folder, as ``kvcliff run`` leaves it, and the cache beside its results."""
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    return the_run(tmp_path)


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from harness.cli import main; main()", *words]


def the_run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "results").iterdir()
    return folder


def all_rows(run: Path) -> list[Row]:
    return [row for path in sorted(run.glob("journal-*.jsonl")) for row in read_journal(path)]


def finding_codes(run: Path) -> list[str]:
    content = json.loads((run / "reconcile.json").read_text())
    return [finding["code"] for finding in content["findings"]]


def assert_complete(run: Path, expected: int) -> list[Row]:
    """Refuse to assert anything about an empty or partial run."""
    rows = all_rows(run)
    assert len(rows) == expected
    assert all(row.complete for row in rows)
    return rows


def test_a_run_leaves_every_file_of_the_run_folder_and_reconciles_every_request(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    done = kvcliff("run", str(plan))
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path)
    rows = assert_complete(run, len(SESSIONS) * REQUESTS)
    assert sorted(path.name for path in run.glob("*.json*")) == sorted(
        [*(f"journal-{s}.jsonl" for s in SESSIONS), "manifest.json", "prediction.jsonl",
         "processes.jsonl", "reconcile.json", "summary.json", "ttft.jsonl"]
    )  # fmt: skip
    content = json.loads((run / "reconcile.json").read_text())
    assert (content["requests_planned"], content["requests_reconciled"]) == (20, 20)
    assert content["findings"] == []
    replayed = [row for row in rows if row.pass_name == "pass2-replay"]
    assert {(row.config, row.computed, row.gpu_hit, row.host_loaded) for row in replayed} == {
        ("baseline", 520, 0, 0),
        ("lmcache", 8, 0, 512),
    }
    assert "20 of 20 requests reconciled" in done.stdout
    assert f"run folder: results/{run.name}" in done.stderr.splitlines()
    assert done.stdout.splitlines()[-1].startswith(
        ("supported: ", "not supported: ", "not decided: ")
    )


def test_ttft_jsonl_holds_the_measured_rows_of_all_sessions_in_order(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    assert kvcliff("run", str(plan)).returncode == 0
    run = the_run(tmp_path)
    expected = [row for row in assert_complete(run, 20) if row.phase == "measure"]
    lines = (run / "ttft.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [row.seq for row in expected]
    assert [row.session for row in expected] == [s for s in SESSIONS for _ in range(4)]


def test_the_journal_agrees_with_the_ledger_the_servers_kept(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # Two independent accounts: ours from counters, theirs written as they served.
    ledger = tmp_path / "ledger.jsonl"
    assert kvcliff("run", str(plan), **{LEDGER_VARIABLE: str(ledger)}).returncode == 0
    served = [json.loads(line) for line in ledger.read_text().splitlines()]
    by_id = {entry["request_id"]: entry for entry in served if entry.get("request_id")}
    rows = assert_complete(the_run(tmp_path), 20)
    for row in rows:
        entry = by_id[f"{row.session}-{row.seq}"]
        assert (row.prompt_tokens, row.computed, row.gpu_hit, row.host_loaded) == (
            entry["prompt_tokens"], entry["computed"], entry["gpu_hit"], entry["host_loaded"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ({"miscount": 32}, "residual"),
        ({"foreign": 1}, "unattributed-requests"),
        ({"missing_series": ["vllm:prompt_tokens_by_source_total"]}, "unattributed-requests"),
        ({"metrics_status": 500}, "unattributed-requests"),
        ({"close_after": {"tokens": 1, "clean": True}}, "failed-requests"),
        ({"no_done": True}, "failed-requests"),
        ({"stop_after": 1}, "failed-requests"),
        ({"prompt_tokens_off": 1}, "failed-requests"),
    ],
)
def test_one_request_gone_wrong_in_one_session_fails_the_run_by_name(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path, do: dict[str, Any], code: str
) -> None:
    # A6, A7, A26, A29, A45, A50: request 4 of each server is the first of pass 2.
    short = plan.read_text().replace('"lmcache", "lmcache", "baseline"]', '"lmcache"]')
    plan.write_text(short + "[deadlines]\nsettle_s = 1.5\n")
    done = kvcliff("run", str(plan), script=[{"match": {"nth": 4}, "do": [do]}])
    assert done.returncode == 1, done.stderr
    run = the_run(tmp_path)
    assert len(all_rows(run)) == 2 * REQUESTS
    assert code in finding_codes(run)
    assert f"error: {code}:" in done.stderr


def test_a_session_whose_outputs_differ_from_the_other_sessions_fails_the_run(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    assert kvcliff("run", str(plan)).returncode == 0
    run = the_run(tmp_path)
    (run / "journal-02-lmcache.jsonl").unlink()
    other = [{"match": {"nth": 4}, "do": [{"other_output": True}]}]
    done = kvcliff("run", "--resume", str(run), script=other)
    assert done.returncode == 1, done.stderr
    assert finding_codes(run) == ["outputs-differ"]


def test_a_tier_that_drops_every_store_is_not_taken_for_a_working_one(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A42: LMCache broken, server answers all the same.
    done = kvcliff(
        "run", str(plan), script=[{"match": {"all": True}, "do": [{"drop_stores": True}]}]
    )
    assert done.returncode == 1
    assert {"tier-off", "residual"} <= set(finding_codes(the_run(tmp_path)))


def test_counters_that_come_late_are_waited_for_and_not_billed_to_the_next_request(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A33: every counter is published 0.3 s late.
    late = [{"match": {"all": True}, "do": [{"metrics_lag_s": 0.3}]}]
    done = kvcliff("run", str(plan), script=late)
    assert done.returncode == 0, done.stderr
    rows = assert_complete(the_run(tmp_path), 20)
    assert min(row.settle_ms or 0 for row in rows) > 50  # about 10 without the lag


def test_servers_whose_counters_do_not_start_fresh_are_refused_before_any_measurement(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A30: one request too many has finished before the first of ours.
    stale = [{"match": {"nth": 1}, "do": [{"foreign": 1}]}]
    done = kvcliff("run", str(plan), script=stale)
    assert done.returncode == 3, done.stderr
    assert "not fresh and idle" in done.stderr
    assert all_rows(the_run(tmp_path)) == []


@pytest.mark.parametrize(
    "series",
    [
        ["vllm:request_success_total"],
        ["vllm:kv_cache_usage_perc"],
        ["vllm:prompt_tokens_by_source_total", "vllm:prefix_cache_hits_total"],
    ],
)
def test_a_server_without_the_needed_series_is_refused_before_any_measurement(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path, series: list[str]
) -> None:
    # A25, A26: a renamed or missing counter is never read as zero.
    plan.write_text(plan.read_text() + "[deadlines]\nsettle_s = 1\n")
    gone = [{"match": {"all": True}, "do": [{"missing_series": series}]}]
    done = kvcliff("run", str(plan), script=gone)
    assert done.returncode == 3, done.stderr
    assert series[0] in done.stderr
    assert all_rows(the_run(tmp_path)) == []


def test_a_slow_first_request_is_warm_up_and_in_no_result(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A48: request 2 of each server is the first long one: it pays 400 ms of compilation.
    slow = [{"match": {"nth": 2}, "do": [{"first_token_ms": 400}]}]
    assert kvcliff("run", str(plan), script=slow).returncode == 0
    rows = assert_complete(the_run(tmp_path), 20)
    assert all((row.ttft_ms or 0) > 400 for row in rows if row.phase == "warmup")
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    slowest = [
        arm["max_ms"] for cells in summary["passes"].values() for arm in cells["arms"].values()
    ]
    assert len(slowest) == 4
    assert max(slowest) < 400


def test_a_harness_killed_in_a_session_leaves_a_readable_journal_and_resumes_to_the_exact_rows(
    kvcliff: Kvcliff, start: Start, tmp_path: Path
) -> None:
    run = _kill_in_second_session(start(), tmp_path)
    cut = read_journal(run / "journal-02-lmcache.jsonl")
    assert 1 <= len(cut) < REQUESTS
    _wait_until_gone(run)
    done = kvcliff("run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    rows = assert_complete(run, len(SESSIONS) * REQUESTS)
    assert len({row.key for row in rows}) == len(rows)
    # What the killed session measured is kept beside the run, outside its sessions.
    kept = read_journal(run / "cut-1-journal-02-lmcache.jsonl")
    assert kept == cut


@pytest.mark.parametrize("n_rows", range(REQUESTS + 1))
def test_a_session_cut_after_any_row_is_measured_again_and_the_total_is_exact(
    kvcliff: Kvcliff, finished_run: Path, n_rows: int
) -> None:
    # A65: the last case is a complete session, which is not measured again.
    journal = finished_run / "journal-02-lmcache.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:n_rows]) + (lines[n_rows][:40] if n_rows < 5 else b""))
    assert kvcliff("run", "--resume", str(finished_run)).returncode == 0
    rows = assert_complete(finished_run, len(SESSIONS) * REQUESTS)
    assert len({row.key for row in rows}) == len(rows)
    assert len(list(finished_run.glob("cut-*"))) == (1 if n_rows < REQUESTS else 0)


def test_a_copied_journal_is_refused_by_name(kvcliff: Kvcliff, finished_run: Path) -> None:
    # A66: rows of one session under another name would win or be counted twice.
    journal = finished_run / "journal-02-lmcache.jsonl"
    (finished_run / "journal-06-copy.jsonl").write_bytes(journal.read_bytes())
    done = kvcliff("reconcile", str(finished_run))
    assert done.returncode == 2
    assert "journal-06-copy.jsonl: row 1 belongs to session '02-lmcache'" in done.stderr


def test_a_row_of_another_run_is_refused(kvcliff: Kvcliff, finished_run: Path) -> None:
    # A66
    journal = finished_run / "journal-02-lmcache.jsonl"
    journal.write_text(journal.read_text().replace(finished_run.name, "another-run"))
    done = kvcliff("summarize", str(finished_run))
    assert done.returncode == 2
    assert "of run 'another-run'" in done.stderr


def test_a_plan_edited_after_the_run_began_cannot_be_resumed(
    kvcliff: Kvcliff, finished_run: Path
) -> None:
    (finished_run / "journal-02-lmcache.jsonl").unlink()
    plan = finished_run / "plan.toml"
    plan.write_text(plan.read_text().replace("seed = 1", "seed = 2"))
    for words in (("run", "--resume"), ("reconcile",), ("summarize",)):
        done = kvcliff(*words, str(finished_run))
        assert done.returncode == 2
        assert "plan.toml was changed after the run began" in done.stderr
    assert not (finished_run / "journal-02-lmcache.jsonl").exists()


def test_edited_predictions_are_refused(kvcliff: Kvcliff, finished_run: Path) -> None:
    predictions = finished_run / "prediction.jsonl"
    predictions.write_text(predictions.read_text().replace('"computed": 520', '"computed": 519', 1))
    done = kvcliff("reconcile", str(finished_run))
    assert done.returncode == 2
    assert "prediction.jsonl was changed after the run began" in done.stderr


@pytest.mark.parametrize("content", ["3", '{"schema": 1'])
def test_a_manifest_that_is_none_is_refused_before_anything_starts(
    kvcliff: Kvcliff, finished_run: Path, content: str
) -> None:
    (finished_run / "manifest.json").write_text(content)
    for words in (("run", "--resume"), ("reconcile",), ("summarize",)):
        done = kvcliff(*words, str(finished_run))
        assert (done.returncode, "manifest.json" in done.stderr) == (2, True)
        assert "Traceback" not in done.stderr


def test_a_locale_without_dashes_and_a_closed_stdout_cost_no_result(
    kvcliff: Kvcliff, finished_run: Path
) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert kvcliff("summarize", str(finished_run), **plain).returncode == 0


def test_a_second_run_on_the_machine_is_refused_while_one_measures(
    kvcliff: Kvcliff, start: Start, plan: Path, tmp_path: Path
) -> None:
    # Each would disturb the other, whatever folders they write to.
    harness = start()
    _wait_for_rows(tmp_path, harness)
    second = kvcliff("run", str(plan), "--results", "elsewhere")
    assert second.returncode == 3
    assert "another kvcliff run is measuring" in second.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_every_session_has_servers_of_its_own_so_no_cache_is_ever_reset(
    finished_run: Path,
) -> None:
    # A44: a reset may answer 200 and keep the cache; a fresh server cannot.
    manifest = json.loads((finished_run / "manifest.json").read_text())
    commands = [s["commands"][0]["argv"] for s in manifest["sessions"].values()]
    names = {argv[argv.index("--model-name") + 1] for argv in commands}
    assert len(names) == len(SESSIONS)
    events = map(json.loads, (finished_run / "processes.jsonl").read_text().splitlines())
    started = {(e["pid"], e["create_time"]) for e in events if e["event"] == "started"}
    assert len(started) == len(SESSIONS)


def test_a_request_that_timed_out_spoils_the_next_one_while_the_server_is_busy(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A21: request 3 hangs and its counters come too late, so the server is not seen idle.
    plan.write_text(plan.read_text() + "[deadlines]\nrequest_s = 1\nsettle_s = 1\n")
    hang = [{"match": {"nth": 3}, "do": [{"hang_after": 0}, {"metrics_lag_s": 3}]}]
    assert kvcliff("run", str(plan), script=hang).returncode == 1
    rows = [row for row in all_rows(the_run(tmp_path)) if row.session == "01-baseline"]
    assert [row.complete for row in rows[:3]] == [True, False, False]
    assert "was not idle" in str(rows[2].error)
    assert rows[2].ttft_ms is None


def test_leftover_servers_are_named_and_only_those_are_ended(
    kvcliff: Kvcliff, start: Start, plan: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    # A51, A53: servers that ignore SIGTERM for long outlive a killed harness.
    stubborn = [
        {"match": {"all": True}, "do": [{"sigterm_s": 20}, {"first_token_ms": 400}]},
    ]
    run = _kill_in_second_session(start(stubborn), tmp_path)
    left = leftovers(run / "processes.jsonl")
    assert left != []
    decoy = subprocess.Popen(psutil.Process(left[0].identity.pid).cmdline(), cwd=tmp_path,
                             env={**environment, "KVCLIFF": "decoy"}, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        refused = kvcliff("run", str(plan))
        assert refused.returncode == 3
        assert f"pid {left[0].identity.pid}: vllm of session 02-lmcache" in refused.stderr
        assert "--end-leftovers" in refused.stderr
        assert leftovers(run / "processes.jsonl") != []
        ended = kvcliff("run", "--resume", str(run), "--end-leftovers")
        assert ended.returncode == 0, ended.stderr
        assert leftovers(run / "processes.jsonl") == []
        assert_complete(run, len(SESSIONS) * REQUESTS)
    finally:
        decoy.kill()
        decoy.wait(10)


def test_ctrl_c_stops_the_servers_keeps_the_rows_and_exits_130(
    start: Start, tmp_path: Path
) -> None:
    harness = start()
    run = _wait_for_rows(tmp_path, harness)
    harness.send_signal(signal.SIGINT)
    _, said = harness.communicate(timeout=60)
    assert harness.returncode == 130, said
    assert "--resume" in said
    assert "Traceback" not in said
    assert leftovers(run / "processes.jsonl") == []
    assert len(read_journal(run / "journal-02-lmcache.jsonl")) >= 1


def test_a_run_whose_server_dies_says_how_to_go_on(start: Start, tmp_path: Path) -> None:
    harness = start()
    run = _wait_for_rows(tmp_path, harness)
    for server in leftovers(run / "processes.jsonl"):
        os.kill(server.identity.pid, signal.SIGKILL)
    _, said = harness.communicate(timeout=60)
    assert harness.returncode == 3, said
    assert f"go on with: kvcliff run --resume results/{run.name}" in " ".join(said.split())


def test_a_run_being_measured_cannot_be_resumed_by_a_second_process(
    kvcliff: Kvcliff, start: Start, tmp_path: Path
) -> None:
    # A66. The second process may not end the first one's servers either.
    harness = start()
    run = _wait_for_rows(tmp_path, harness)
    second = kvcliff("run", "--resume", str(run))
    assert second.returncode == 3, second.stderr
    assert "being measured by another process" in second.stderr
    _, said = harness.communicate(timeout=60)
    assert harness.returncode == 0, said


def test_inherited_settings_of_the_engines_do_not_reach_the_servers_and_are_noted(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    # A60, A18
    done = kvcliff("run", str(plan), LMCACHE_CHUNK_SIZE="7", HTTP_PROXY="http://127.0.0.1:9",
                   http_proxy="http://127.0.0.1:9", ALL_PROXY="http://127.0.0.1:9")  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((the_run(tmp_path) / "manifest.json").read_text())
    assert len(manifest["sessions"]) == len(SESSIONS)
    for session in manifest["sessions"].values():
        diff = session["commands"][0]["env_diff"]
        assert diff["LMCACHE_CHUNK_SIZE"] is None
        assert diff["HTTP_PROXY"] is None


def test_no_secret_and_no_folder_of_the_machine_is_in_the_committed_files(
    kvcliff: Kvcliff, plan: Path, tmp_path: Path
) -> None:
    assert kvcliff("run", str(plan), HF_TOKEN="hf_s3cr3t", MY_API_KEY="s3cr3t-key").returncode == 0
    run = the_run(tmp_path)
    texts = [path.read_text() for path in run.iterdir() if path.suffix != ".log"]
    assert len(texts) >= 10
    for text in texts:
        assert "s3cr3t" not in text
        assert str(tmp_path) not in text


def _wait_for_rows(tmp_path: Path, harness: "subprocess.Popen[str]") -> Path:
    """The run folder once its second session has a row."""
    until = time.monotonic() + 60
    while time.monotonic() < until and harness.poll() is None:
        for journal in tmp_path.glob("results/*/journal-02-lmcache.jsonl"):
            if journal.read_bytes().count(b"\n"):
                return journal.parent
        time.sleep(0.02)
    raise AssertionError(f"no row in the second session; exit code {harness.poll()}")


def _kill_in_second_session(harness: "subprocess.Popen[str]", tmp_path: Path) -> Path:
    run = _wait_for_rows(tmp_path, harness)
    harness.send_signal(signal.SIGKILL)
    harness.communicate(timeout=30)
    return run


def _wait_until_gone(run: Path) -> None:
    """The servers of a killed harness get SIGTERM from the kernel; give them their time."""
    until = time.monotonic() + 60
    while leftovers(run / "processes.jsonl"):
        assert time.monotonic() < until, "servers outlived the harness by a minute"
        time.sleep(0.05)


@pytest.mark.parametrize("label", BUILT_IN_ARMS)
def test_every_arm_runs_the_whole_path_and_reconciles(
    label: str, plan: Path, kvcliff: Kvcliff, tmp_path: Path
) -> None:
    order = f'order = ["baseline", "{label}", "{label}", "baseline"]'
    lines = PLAN_TOML.replace('order = ["baseline", "lmcache", "lmcache", "baseline"]', order)
    plan.write_text(lines.replace('[arms.lmcache]\ntier = "lmcache-mp"\n', ""))
    done = kvcliff("run", "plan.toml")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "results").iterdir()
    content = json.loads((run / "reconcile.json").read_text())
    assert content["requests_reconciled"] == content["requests_planned"] == 4 * REQUESTS
    assert content["findings"] == []
    exact = {
        request["predicted"]["why_not"] is None
        for request in content["requests"]
        if label in request["session"]
    }
    assert exact == {label != "simple"}
    rows = read_journal(run / f"journal-02-{label}.jsonl")
    replay = [row for row in rows if row.pass_name == "pass2-replay"]
    # 512 tokens of each document come back from every kind of host tier, and none without one.
    assert [row.host_loaded for row in replay] == [0 if label == "none" else 512] * 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["compared"] == ["baseline", label]
