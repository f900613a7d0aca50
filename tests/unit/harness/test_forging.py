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
from tests.folder import seal, write_run

Edit = Callable[[Path], None]
READERS = ("summarize", "reconcile", "report", "compare", "latency", "export")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("honest"))
    for each in (run, write_run(run.parent, "20260101T000001Z-other")):
        publish(RunFolder(each))
    return run


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
    "a time is longer than the whole": (
        in_text(JOURNAL, '"ttft_ms": 10.0', '"ttft_ms": 100.0'),
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
        (in_text("ttft.jsonl", '"ttft_ms": 10.0', '"ttft_ms": 1.0'), "was changed after"),
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
