from pathlib import Path

import pytest

from harness.errors import InputError
from harness.record.folder import RunFolder
from harness.report.watch import View, Watcher, watch
from harness.verdict.importing import import_rows
from harness.verdict.publish import publish
from tests.factory import PLAN_TOML
from tests.folder import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_the_numbers_are_the_reports(run: Path) -> None:
    view = Watcher(run).view()
    summary = publish(RunFolder(run)).summary
    assert view.statistics.passes == summary.passes
    assert view.statistics.sources == summary.sources


def test_a_line_still_being_written_waits_until_it_is_whole(run: Path) -> None:
    path = run / "journal-01-baseline.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    watcher = Watcher(run)
    assert watcher.view().sessions[0] == ("01-baseline", 3, 5)
    with path.open("ab") as file:
        file.write(lines[3][40:] + lines[4])
    assert watcher.view().sessions[0] == ("01-baseline", 5, 5)


def test_a_session_measured_again_replaces_its_rows(run: Path) -> None:
    watcher = Watcher(run)
    path = run / "journal-02-lmcache.jsonl"
    assert watcher.view().sessions[1] == ("02-lmcache", 5, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.rename(run / "cut-1-journal-02-lmcache.jsonl")
    assert watcher.view().sessions[1] == ("02-lmcache", 0, 5)
    path.write_bytes(lines[0])
    assert watcher.view().sessions[1] == ("02-lmcache", 1, 5)


def test_session_100_comes_after_session_99(tmp_path: Path) -> None:
    order = ", ".join(['"baseline", "lmcache"'] * 50)
    toml = PLAN_TOML.replace('"baseline", "lmcache", "lmcache", "baseline"', order)
    view = Watcher(write_run(tmp_path, toml=toml)).view()
    assert [s.session for s in view.statistics.sessions][-2:] == ["99-baseline", "100-lmcache"]


def test_watching_ends_when_every_planned_request_has_a_row(run: Path) -> None:
    path = run / "journal-04-baseline.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    seen: list[View] = []

    def write_one_more(_: float) -> None:
        with path.open("ab") as file:
            file.write(lines[len(path.read_bytes().splitlines())])

    with RunFolder(run).lock():  # someone measures it
        last = watch(run, seen.append, pause=write_one_more)
    assert [view.sessions[3][1] for view in seen] == [2, 3, 4, 5]
    assert last.is_complete
    assert last.last is not None
    assert last.last.key == ("04-baseline", "pass2-replay", 1)


def test_watching_a_run_nobody_measures_shows_it_once(run: Path) -> None:
    (run / "journal-04-baseline.jsonl").unlink()
    seen: list[View] = []
    last = watch(run, seen.append, pause=lambda _: pytest.fail("waited for nobody"))
    assert len(seen) == 1
    assert not last.is_running
    assert not last.is_complete


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        Watcher(tmp_path)


def test_a_broken_row_is_named(run: Path) -> None:
    with (run / "journal-01-baseline.jsonl").open("ab") as file:
        file.write(b'{"config": 1}\n')
    with pytest.raises(InputError, match=r"journal-01-baseline.jsonl, line 6: "):
        Watcher(run).view()


def test_an_imported_run_has_nothing_to_watch_and_says_what_shows_it(tmp_path: Path) -> None:
    source = tmp_path / "t.jsonl"
    source.write_text(
        '{"config": "baseline", "pass": "p", "doc": 0, "doc_tokens": 9, "ttft_ms": 1.0, '
        '"total_ms": 2.0}\n'
    )
    imported = import_rows(source, tmp_path / "results")
    with pytest.raises(InputError, match="was imported") as error:
        Watcher(imported)
    assert error.value.hint == "kvcliff report shows what it has"
