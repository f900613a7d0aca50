import json
from pathlib import Path

import pytest

from harness.evidence import publish, summarize_stream
from harness.published import ReconcileFile, Summary
from harness.runfolder import RunFolder
from tests.folder import seal, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_both_files_have_the_published_shape(run: Path) -> None:
    publish(RunFolder(run))
    summary = Summary.model_validate_json((run / "summary.json").read_text(encoding="utf-8"))
    file = ReconcileFile.model_validate_json((run / "reconcile.json").read_text(encoding="utf-8"))
    assert (summary.decision.verdict, file.requests_reconciled) == ("supported", 20)


def test_publishing_twice_gives_the_same_bytes(run: Path) -> None:
    publish(RunFolder(run))
    first = [(run / name).read_bytes() for name in ("summary.json", "reconcile.json")]
    publish(RunFolder(run))
    assert [(run / n).read_bytes() for n in ("summary.json", "reconcile.json")] == first


def test_a_residual_is_shown_with_its_sign_and_decides_nothing(run: Path) -> None:
    path = run / "prediction.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    changed = json.loads(lines[3])  # 01-baseline, pass2-replay, document 0
    changed.update(computed=521)
    lines[3] = json.dumps(changed)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seal(run)
    evidence = publish(RunFolder(run))
    row = next(
        r
        for r in evidence.reconciliation["by_pass"]
        if (r["session"], r["pass"]) == ("01-baseline", "pass2-replay")
    )
    assert (row["requests"], row["reconciled"]) == (2, 1)
    assert row["largest"] == {"computed": -1, "gpu_hit": 0, "host_loaded": 0}
    assert evidence.summary["decision"]["verdict"] == "not decided"


def test_a_missing_session_is_missing_not_zero(run: Path) -> None:
    (run / "journal-03-lmcache.jsonl").unlink()
    evidence = publish(RunFolder(run))
    entries = [r for r in evidence.reconciliation["requests"] if r["session"] == "03-lmcache"]
    assert len(entries) == 5
    assert {entry["ttft_ms"] for entry in entries} == {None}
    codes = [reason["code"] for reason in evidence.summary["decision"]["reasons"]]
    assert {"unreconciled", "missing-requests", "too-few-sessions"} <= set(codes)


def test_the_curve_falls_once_everything_fits_and_the_measured_points_lie_on_it(run: Path) -> None:
    cliff = publish(RunFolder(run)).summary["cliff"]
    shares = {
        arm: [(p["gpu_tokens"], p["share"]) for p in cliff["points"] if p["arm"] == arm]
        for arm in ("baseline", "lmcache")
    }
    assert shares["baseline"][0] == (544, 1.0)
    assert shares["baseline"][-1][1] < 0.1
    # A replay computes its 8 question tokens of 520 and loads the document.
    assert {share for _, share in shares["lmcache"][:1]} == {8 / 520}
    for point in cliff["measured"]:
        assert (point["gpu_tokens"], point["share"]) in shares[point["arm"]]


def test_every_session_has_its_phases_in_order(run: Path) -> None:
    for session in publish(RunFolder(run)).summary["sessions"]:
        phases = [span["phase"] for span in session["spans"]]
        assert phases == ["start", "warmup", "pass1-cold", "pass2-replay", "stop"]
        assert all(s["began_unix_ms"] <= s["ended_unix_ms"] for s in session["spans"])


def test_a_streamed_summary_has_the_same_numbers_and_no_decision(run: Path) -> None:
    streamed = summarize_stream(RunFolder(run))
    whole = publish(RunFolder(run)).summary
    for part in ("passes", "sources", "outliers"):
        assert streamed[part] == whole[part]
    assert "decision" not in streamed


def test_a_plan_without_a_rule_is_decided_by_the_default_one_and_says_so(run: Path) -> None:
    summary = publish(RunFolder(run)).summary
    assert summary["decision"]["rule"]["min_ratio"] == 1.1
    assert summary["decision"]["rule_source"] == "kvcliff's default rule"
