import json
import tracemalloc
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.record.folder import RunFolder
from harness.record.row import NUMBERS
from harness.verdict import publish as evidence
from harness.verdict.publish import publish
from harness.verdict.schema import NotPredicted, ReconcileFile, Summary
from tests.factory import PLAN_TOML
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
    published = publish(RunFolder(run))
    row = next(
        r
        for r in published.reconciliation.by_pass
        if (r.session, r.pass_name) == ("01-baseline", "pass2-replay")
    )
    assert (row.requests, row.reconciled) == (2, 1)
    assert row.largest == {"computed": -1, "gpu_hit": 0, "host_loaded": 0}
    assert published.summary.decision.verdict == "not decided"


def test_a_missing_session_is_missing_not_zero(run: Path) -> None:
    (run / "journal-03-lmcache.jsonl").unlink()
    published = publish(RunFolder(run))
    entries = [r for r in published.reconciliation.requests if r.session == "03-lmcache"]
    assert len(entries) == 5
    assert {entry.row for entry in entries} == {None}
    codes = [reason.code for reason in published.summary.decision.reasons]
    assert {"unreconciled", "missing-requests", "too-few-sessions"} <= set(codes)


def test_the_curve_falls_once_everything_fits_and_the_measured_points_lie_on_it(run: Path) -> None:
    cliff = publish(RunFolder(run)).summary.cliff
    shares = {
        arm: [(p.gpu_tokens, p.share) for p in cliff.points if p.arm == arm]
        for arm in ("baseline", "lmcache")
    }
    assert shares["baseline"][0] == (544, 1.0)
    assert shares["baseline"][-1][1] < 0.1
    # A replay computes its 8 question tokens of 520 and loads the document.
    assert {share for _, share in shares["lmcache"][:1]} == {8 / 520}
    for point in cliff.measured:
        assert (point.gpu_tokens, point.share) in shares[point.arm]


def test_every_session_has_its_phases_in_order(run: Path) -> None:
    for session in publish(RunFolder(run)).summary.sessions:
        phases = [span.phase for span in session.spans]
        assert phases == ["start", "warmup", "pass1-cold", "pass2-replay", "stop"]
        assert all(s.began_unix_ms <= s.ended_unix_ms for s in session.spans)


def test_a_plan_without_a_rule_is_decided_by_the_default_one_and_says_so(run: Path) -> None:
    summary = publish(RunFolder(run)).summary
    assert summary.decision.rule.min_ratio == 1.1
    assert summary.decision.rule_source == "kvcliff's default rule"


def test_a_long_run_is_counted_in_full_and_listed_in_part(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MOST_LISTED", 7)
    content = publish(RunFolder(run)).reconciliation
    assert (content.requests_planned, content.requests_reconciled) == (20, 20)
    assert (content.every, len(content.requests)) == (3, 7)  # 20 requests: 0, 3, … 18
    assert sum(part.recorded for part in content.by_pass) == 20


def test_a_run_is_walked_without_keeping_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request with its row and prediction takes 6 kB as objects; 6,000 more of them, none kept.
    monkeypatch.setattr(evidence, "MOST_LISTED", 10)
    peaks = []
    for documents in (50, 800):
        toml = PLAN_TOML.replace("documents = 2", f"documents = {documents}", 1)
        toml = toml.replace("[64, 448]", "[64, 4096]")
        folder = write_run(tmp_path / str(documents), toml=toml)
        publish(RunFolder(folder))
        tracemalloc.start()
        try:
            publish(RunFolder(folder))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 500 * 8 * 750


def test_rows_that_do_not_come_in_the_plans_order_are_refused(run: Path) -> None:
    path = run / "prediction.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seal(run)
    with pytest.raises(InputError, match="comes twice, or after a request that the plan sends"):
        publish(RunFolder(run))


def test_a_session_nobody_planned_is_counted_and_said(run: Path) -> None:
    text = (run / "journal-04-baseline.jsonl").read_text(encoding="utf-8")
    text = text.replace("04-baseline", "05-baseline").replace('"order": 4', '"order": 5')
    (run / "journal-05-baseline.jsonl").write_text(text, encoding="utf-8")
    content = publish(RunFolder(run)).reconciliation
    assert (content.requests_planned, content.requests_recorded) == (20, 25)
    assert "5 rows or predictions belong to no planned" in content.findings[0].message
    assert [r.session for r in content.requests[-5:]] == ["05-baseline"] * 5


def test_an_arm_without_a_prediction_is_named_with_its_reason(run: Path) -> None:
    path = run / "prediction.jsonl"
    changed = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "lmcache" in record["session"]:
            record.update(dict.fromkeys(NUMBERS), why_not="timing")
        changed.append(json.dumps(record) + "\n")
    path.write_text("".join(changed), encoding="utf-8")
    seal(run)
    content = publish(RunFolder(run)).reconciliation
    assert content.requests_reconciled == 20
    assert content.not_predicted == [
        NotPredicted(why="timing", sessions=["02-lmcache", "03-lmcache"], requests=10)
    ]
    ReconcileFile.model_validate(content.as_json())
