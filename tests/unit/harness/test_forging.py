"""Edits of a run folder, each refused by every reader or named by a check; none comes up as a bug."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.files import write_json
from harness.record.folder import RunFolder
from harness.verdict.importing import import_rows
from harness.verdict.publish import publish
from tests.folder import helps, seal, write_run

Edit = Callable[[Path], None]
READERS = ("summarize", "reconcile", "report", "compare", "latency", "export")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("honest"), ttft=ten_times_slower)
    for each in (run, write_run(run.parent, "20260101T000001Z-other")):
        publish(RunFolder(each))
    return run


def ten_times_slower(position: int, arm: str, pass_name: str, doc: int) -> float:
    return 10 * helps(position, arm, pass_name, doc)


def read(reader: str, run: Path, out: Path) -> int:
    """The exit code of one reader; 70 would be a fault of kvcliff's own."""
    more = {
        "report": ["--out", str(out / "report.html")],
        "compare": [str(run.parent / "20260101T000001Z-other")],
        "export": [str(out / "rows.csv")],
    }
    with pytest.raises(SystemExit) as ended:
        main([reader, str(run), *more.get(reader, [])])
    return int(str(ended.value.code))


def copy(honest: Path, tmp_path: Path) -> Path:
    shutil.copytree(honest.parent, tmp_path / "results")
    return tmp_path / "results" / honest.name


def in_manifest(**changed: Any) -> Edit:
    def edit(run: Path) -> None:
        path = run / "manifest.json"
        content = {**json.loads(path.read_text(encoding="utf-8")), **changed}
        content = {name: value for name, value in content.items() if value is not ...}
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


def in_session(**changed: Any) -> Edit:
    def edit(run: Path) -> None:
        path = run / "manifest.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["sessions"]["01-baseline"].update(changed)
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


def in_text(file: str, before: str, after: str) -> Edit:
    def edit(run: Path) -> None:
        path = run / file
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")

    return edit


def removed(file: str) -> Edit:
    return lambda run: (run / file).unlink()


def in_rows(pattern: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Edit:
    def edit(run: Path) -> None:
        journals = sorted(run.glob(pattern))
        assert journals
        for path in journals:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            path.write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))

    return edit


def times(factor: float, *names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {name: row[name] * factor for name in names}


def from_other(file: str) -> Edit:
    def edit(run: Path) -> None:
        shutil.copyfile(run.parent / "20260101T000001Z-other" / file, run / file)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(run: Path) -> None:
        for each in edits:
            each(run)

    return edit


JOURNAL = "journal-02-lmcache.jsonl"
REFUSED: dict[str, tuple[Edit, str]] = {
    "the plan is another": (in_text("plan.toml", "gib = 0.1", "gib = 0.2"), "was changed after"),
    "the plan is another, sealed again": (
        both(in_text("plan.toml", "gib = 0.1", "gib = 0.2"), seal),
        "that of plan.toml is",
    ),
    "the plan is another, the seal is empty": (
        both(in_text("plan.toml", "gib = 0.1", "gib = 0.2"), in_manifest(sealed={})),
        "seals no file",
    ),
    "the plan is gone": (removed("plan.toml"), "cannot read"),
    "the plan and its seal are gone": (
        both(removed("plan.toml"), in_manifest(sealed={})),
        "cannot read",
    ),
    "the plan is a folder": (
        both(removed("plan.toml"), lambda run: (run / "plan.toml").mkdir()),
        "cannot read",
    ),
    "the predictions are others": (
        in_text("prediction.jsonl", '"computed": 520', '"computed": 8'),
        "was changed after",
    ),
    "the predictions are gone": (removed("prediction.jsonl"), "cannot read"),
    "the seal is empty": (in_manifest(sealed={}), "seals no file"),
    "the seal is gone, as in schema 1": (in_manifest(schema=1, sealed=...), "seals no file"),
    "the seal is of one file": (in_manifest(sealed={"plan.toml": "00"}), "sealed names"),
    "the seal is of another file": (in_manifest(sealed={"../x": "00"}), "sealed names"),
    "the plan's id is another": (in_manifest(plan_id="two-docs-1"), "but the run is called"),
    "the model's shape is another": (in_manifest(shape="{}"), "that of plan.toml is"),
    "the run is called otherwise": (in_manifest(run="x-two-docs-02a67760"), "belongs to session"),
    "a journal is another run's": (from_other(JOURNAL), "belongs to session"),
    "a journal is another session's": (
        lambda run: (run / JOURNAL).rename(run / "journal-04-lmcache.jsonl"),
        "belongs to session",
    ),
    "a server started at no time": (in_session(started="garbage"), "started"),
    "a server ended at no time": (in_session(ended=5), "ended"),
    "commands are a text": (in_session(commands="x"), "commands"),
    "a command has no words": (in_session(commands=[{"role": "vllm", "env_diff": {}}]), "argv"),
    "facts are a list": (in_session(facts=[1]), "facts"),
    "GPUs have no name": (in_manifest(gpus=[{}]), "gpus"),
    "there are no sessions": (in_manifest(sessions=[]), "sessions"),
    "a source is another": (in_text(JOURNAL, '"computed": 8,', '"computed": 9,'), "computed is 9"),
    "a document's number is beyond counting": (in_text(JOURNAL, '"doc": 1,', f'"doc": {10**30},'), "doc"),
    "a request was sent at no time": (
        in_rows(JOURNAL, lambda _: {"sent_unix_ns": 2**63}),
        "sent_unix_ns",
    ),
    "a time is longer than the whole": (
        in_text(JOURNAL, '"ttft_ms": 100.0', '"ttft_ms": 1000.0'),
        "more than total_ms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("edited", REFUSED)
def test_every_reader_refuses_a_run_of_which(
    edited: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(honest, tmp_path)
    edit, said = REFUSED[edited]
    edit(run)
    for reader in READERS:
        code = read(reader, run, tmp_path)
        assert (reader, code, said in capsys.readouterr().err) == (reader, 2, True)


CLIENTS = ("ttft_ms", "total_ms", "first_byte_ms")
EVERY_TIME = (*CLIENTS, "server_ttft_ms", "settle_ms")
ENDED = "2026-01-01T00:00:01+00:00"
NAMED: dict[str, tuple[Edit, str]] = {
    "the tier is slower": (in_rows("*-lmcache.jsonl", times(10, *CLIENTS)), "times-disagree"),
    "the baseline is slower by every account": (
        in_rows("*-baseline.jsonl", times(10, *EVERY_TIME)),
        "times-disagree",
    ),
    "the tier is faster": (in_rows("*-lmcache.jsonl", times(0.1, *CLIENTS)), "times-disagree"),
    "the tier is faster by every account": (
        in_rows("*-lmcache.jsonl", times(0.1, *EVERY_TIME)),
        "times-disagree",
    ),
    "requests were sent a day ago": (
        in_rows(JOURNAL, lambda row: {"sent_unix_ns": row["sent_unix_ns"] - 86_400 * 10**9}),
        "times-disagree",
    ),
    "a server had ended before": (in_session(ended=ENDED), "times-disagree"),
    "a server started later": (in_session(started="2026-01-02T00:00:00+00:00"), "times-disagree"),
    "the predictions are others, sealed again": (
        both(in_text("prediction.jsonl", '"computed": 520', '"computed": 8'), seal),
        "residual",
    ),
    "predictions are missing, sealed again": (
        both(lambda run: cut(run / "prediction.jsonl"), seal),
        "missing-predictions",
    ),
    "the last row is missing": (lambda run: cut(run / JOURNAL), "missing-requests"),
    "a journal is missing": (removed(JOURNAL), "missing-requests"),
    "an output is another": (
        in_rows(JOURNAL, lambda row: {"output_sha256": f"{row['output_sha256']}x"}),
        "outputs-differ",
    ),
    "a server had another GPU tier": (
        in_session(facts={"vllm_version": "0.32.0", "num_gpu_blocks": 99, "block_size": 32}),
        "servers-unlike-plan",
    ),
    "nobody knows the servers": (in_manifest(sessions={}), "servers-unlike-plan"),
}


def cut(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")


@pytest.mark.parametrize("edited", NAMED)
def test_a_check_names_a_run_of_which(
    edited: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(honest, tmp_path)
    edit, code = NAMED[edited]
    edit(run)
    assert read("reconcile", run, tmp_path) == 1
    assert code in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["decision"]["verdict"] == "not decided"


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_report_never_believes_an_edited_summary(
    is_imported: bool,
    is_read_only: bool,
    honest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = copy(honest, tmp_path)
    if is_imported:
        rows = [row for row in RunFolder(run).rows() if row.phase == "measure"]
        (tmp_path / "rows.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
        run = import_rows(tmp_path / "rows.jsonl", tmp_path / "results")
    path = run / "summary.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["passes"]["pass2-replay"]["paired_ratio"]["ratio"] = 99.0
    write_json(path, content)
    if is_read_only:
        monkeypatch.setattr("harness.files.write_json", refused_by_storage)
    assert read("report", run, tmp_path) == (2 if is_read_only else 0)
    written = tmp_path / "report.html"
    assert not written.exists() if is_read_only else "99.0" not in written.read_text("utf-8")


def refused_by_storage(path: Path, _content: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (in_text("ttft.jsonl", '"ttft_ms": 100.0', '"ttft_ms": 1.0'), "was changed after"),
        (removed("ttft.jsonl"), "cannot read"),
        (in_manifest(sealed={}), "seals no file"),
        (in_manifest(plan_id="import-00000000"), "its ttft.jsonl is"),
        (in_manifest(imported_from=...), "sealed names"),
    ],
)
def test_a_report_refuses_an_edited_import(
    edit: Edit, said: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in RunFolder(honest).rows() if row.phase == "measure"]
    (tmp_path / "rows.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    run = import_rows(tmp_path / "rows.jsonl", tmp_path / "results")
    edit(run)
    assert read("report", run, tmp_path) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("reader", ["latency", "export", "summarize"])
def test_a_journal_cut_short_is_said_by_whoever_reads_rows(
    reader: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(honest, tmp_path)
    path = run / JOURNAL
    path.write_bytes(path.read_bytes()[:-5])
    assert read(reader, run, tmp_path) == (1 if reader == "summarize" else 0)
    assert "cut short" in capsys.readouterr().err


def test_latency_says_that_a_run_has_no_row(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(honest, tmp_path)
    for journal in run.glob("journal-*"):
        journal.write_bytes(b"")
    assert read("latency", run, tmp_path) == 2
    assert "its 4 journals hold no row" in capsys.readouterr().err


def test_every_reader_takes_the_run_that_nobody_edited(honest: Path, tmp_path: Path) -> None:
    run = copy(honest, tmp_path)
    assert [read(reader, run, tmp_path) for reader in READERS] == [0] * len(READERS)
