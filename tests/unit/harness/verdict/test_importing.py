import hashlib
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.record.folder import RunFolder
from harness.report.export import export
from harness.report.html import write_report
from harness.verdict import publish
from harness.verdict.importing import import_rows
from harness.verdict.reconcile import reconcile
from harness.verdict.schema import ReconcileFile, Summary
from scripts import summarize
from tests.command import kvcliff
from tests.factory import make_row

LAB = {"config": "baseline", "pass": "pass2-replay", "doc": 0, "doc_tokens": 5011,
       "ttft_ms": 500.0, "total_ms": 510.0}  # fmt: skip


def write(path: Path, *changes: dict[str, Any]) -> Path:
    lines = [json.dumps({**LAB, **change}) for change in changes]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return content


def test_the_labs_six_fields_are_enough_for_a_summary_and_a_report(tmp_path: Path) -> None:
    source = write(tmp_path / "ttft.jsonl", {}, {"config": "lmcache", "ttft_ms": 50.0})
    folder = import_rows(source, tmp_path / "results")
    summary = summary_of(folder)
    assert summary["passes"]["pass2-replay"]["paired_ratio"]["ratio"] == 10.0
    assert (folder / "ttft.jsonl").read_bytes() == source.read_bytes()
    assert write_report(folder, folder / "report.html")[0].stat().st_size > 500_000
    Summary.model_validate(summary)
    ReconcileFile.model_validate_json((folder / "reconcile.json").read_text(encoding="utf-8"))


def test_what_the_file_does_not_say_stays_unknown(tmp_path: Path) -> None:
    folder = import_rows(write(tmp_path / "t.jsonl", {}), tmp_path / "results")
    summary = summary_of(folder)
    assert summary["sources"] == {}
    assert summary["passes"]["pass2-replay"]["arms"]["baseline"]["tokens"]["n"] == 0
    assert summary["decision"]["verdict"] == "not decided"
    codes = [reason["code"] for reason in summary["decision"]["reasons"]]
    assert "no-prediction" in codes
    entry = json.loads((folder / "reconcile.json").read_text(encoding="utf-8"))["requests"][0]
    row = entry["row"]
    assert (row["computed"], row["gpu_hit"], row["host_loaded"]) == (None, None, None)
    assert (entry["predicted"], entry["reconciled"]) == (None, False)


def test_a_document_measured_twice_by_an_arm_means_two_sessions_and_says_it_is_assumed(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "t.jsonl", {}, {"ttft_ms": 300.0}, {"doc": 1})
    folder = import_rows(source, tmp_path / "results")
    names = [(s["session"], s["n"]) for s in summary_of(folder)["sessions"]]
    assert names == [("baseline-1", 2), ("baseline-2", 1)]
    assert findings_of(folder) == ["unequal-sessions", "nothing-compared", "sessions-assumed"]


def test_sources_in_the_file_are_kept(tmp_path: Path) -> None:
    tokens = {"prompt_tokens": 5031, "computed": 20, "gpu_hit": 0, "host_loaded": 5011}
    folder = import_rows(
        write(tmp_path / "t.jsonl", {**tokens, "session": "s", "config": "lmcache"}),
        tmp_path / "results",
    )
    assert summary_of(folder)["sources"]["host"]["n"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttft_ms": True}, "line 2: ttft_ms"),
        ({"ttft_ms": "0.5"}, "line 2: ttft_ms"),
        ({"ttft_ms": -1.0}, "line 2: ttft_ms"),
        ({"config": ""}, "line 2: config"),
        ({"doc_tokens": 1.5}, "line 2: doc_tokens"),
        ({"computed": 5}, "line 2: computed 5"),
        ({"prompt_tokens": 5012, "computed": 1, "gpu_hit": 2, "host_loaded": 3}, "sum to prompt"),
        ({"prompt_tokens": 9}, "prompt_tokens 9 is less than doc_tokens 5011"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    # A71
    source = write(tmp_path / "t.jsonl", {}, change)
    with pytest.raises(InputError, match=message):
        import_rows(source, tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"config": "a", "config": "b"}\n', "appears twice"),
        ("{}\n", "line 1: config"),
        ("", "has no row"),
        (json.dumps(LAB)[:-9], "line 1: not valid JSON.*no line end"),
        ("[1]\n", "line 1"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        import_rows(tmp_path / "t.jsonl", tmp_path / "results")


def test_documents_may_have_names(tmp_path: Path) -> None:
    source = write(
        tmp_path / "t.jsonl",
        {"doc": "moby"},
        {"doc": "dick"},
        {"doc": "dick", "config": "lmcache", "ttft_ms": 100.0},
    )
    pair = summary_of(import_rows(source, tmp_path / "results"))["passes"]["pass2-replay"]
    assert [d["doc"] for d in pair["paired_ratio"]["documents"]] == [1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"session": "s"}, {"session": "s", "doc": 1, "config": "lmcache"}],
            "line 2: session 's' is of arm",
        ),
        ([{}, {"doc": "zero"}], "line 2: doc is 'zero'; name all documents by numbers"),
        ([{"ttft_ms": 999.0}], "ttft_ms 999.0 is more than total_ms 510.0"),
        ([{"ttft_ms": 1.7e308, "total_ms": 1.7e308}], "line 1: ttft_ms"),
        ([{"doc": -(10**30)}], "line 1: doc"),
        ([{"doc": 10**30}], "line 1: doc"),
        ([{"pass": "warmup"}], "a warm-up row"),
        ([{"phase": "warmup"}], "a warm-up row"),
        (
            [{"session": "s"}, {"session": "s", "ttft_ms": 1.0}],
            "line 2: document 0 comes twice in 'pass2-replay' of session 's'",
        ),
        ([{"session": "s"}, {"doc": 1}], "line 2: session is None here and 's' in the first row"),
        ([{}, {"session": "s"}], "line 2: session is 's' here and None in the first row"),
        (
            [{"session": "s", "order": 1}, {"session": "t", "doc": 1}],
            "line 2: order is None here and 1 in the first row",
        ),
        (
            [{"session": "s", "order": 1}, {"session": "s", "order": 2, "doc": 1}],
            "order of session 's' is 2 here and 1 before",
        ),
        ([{"error": "boom"}], "line 1: an error beside a complete answer: 'boom'"),
        ([{"pass": "a\x00b"}], "line 1: pass: .*printable"),
        ([{"config": "\x1b[31m"}], "line 1: config: .*printable"),
        ([{"doc": "\u202etxt"}], "line 1: doc"),
        ([{"session": " "}], "line 1: session: .*not blank"),
        ([{"error": "\ud800", "complete": False}], "line 1: not valid JSON: .*surrogates"),
    ],
)
def test_rows_that_would_be_merged_or_are_impossible_are_refused_and_nothing_is_written(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        import_rows(write(tmp_path / "t.jsonl", *rows), tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_row_of_a_failed_request_counts_as_such(tmp_path: Path) -> None:
    lost = {"doc": 1, "ttft_ms": None, "total_ms": None, "complete": False}
    source = write(tmp_path / "t.jsonl", {}, lost)
    summary = summary_of(import_rows(source, tmp_path / "results"))
    cell = summary["passes"]["pass2-replay"]["arms"]["baseline"]
    assert (cell["n"], cell["failed"]) == (1, 1)


def test_a_long_error_is_cut_and_the_copied_file_has_it_whole(tmp_path: Path) -> None:
    lost = {"doc": 1, "ttft_ms": None, "total_ms": None, "error": "E" * 100_000}
    folder = import_rows(write(tmp_path / "t.jsonl", {}, lost), tmp_path / "results")
    entries = json.loads((folder / "reconcile.json").read_text(encoding="utf-8"))["requests"]
    assert entries[1]["row"]["error"] == "E" * 500 + "…"
    assert lost["error"] in (folder / "ttft.jsonl").read_text(encoding="utf-8")


def test_what_needs_a_plan_says_that_a_run_was_imported(tmp_path: Path) -> None:
    folder = import_rows(write(tmp_path / "t.jsonl", {}), tmp_path / "results")
    with pytest.raises(InputError, match="was imported"):
        reconcile(RunFolder(folder))
    with pytest.raises(InputError, match="was imported"):
        export(folder, "csv", tmp_path / "out.csv")


def test_a_last_line_without_a_line_end_is_read_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(LAB)}\n{json.dumps({**LAB, 'doc': 1})}")
    folder = import_rows(tmp_path / "t.jsonl", tmp_path / "results")
    assert summary_of(folder)["passes"]["pass2-replay"]["arms"]["baseline"]["n"] == 2
    assert (folder / "ttft.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()


def test_a_long_file_is_counted_in_full_and_listed_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MOST_LISTED", 4)
    source = write(tmp_path / "t.jsonl", *({"doc": doc} for doc in range(10)))
    folder = import_rows(source, tmp_path / "results")
    content = json.loads((folder / "reconcile.json").read_text(encoding="utf-8"))
    assert (content["requests_recorded"], content["every"]) == (10, 3)
    assert [entry["doc"] for entry in content["requests"]] == [0, 3, 6, 9]
    assert content["by_pass"][0]["recorded"] == 10
    ReconcileFile.model_validate(content)
    report = write_report(folder, folder / "report.html")[0].read_text(encoding="utf-8")
    assert "4 of 10 drawn, every k-th" in report
    assert "every k-th: 4 of 10" in report


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        import_rows(tmp_path / "pipe", tmp_path / "results")


def test_rows_of_kvcliffs_own_can_be_imported(tmp_path: Path) -> None:
    own = make_row(**{"pass": "pass1-cold"}, sent_unix_ns=1_767_225_600_000_000_000).to_json()
    (tmp_path / "ttft.jsonl").write_text(own + "\n")
    summary = summary_of(import_rows(tmp_path / "ttft.jsonl", tmp_path / "results"))
    assert summary["sources"]["recomputed"]["n"] == 1
    (span,) = summary["sessions"][0]["spans"]
    assert span["began_unix_ms"] == 1_767_225_600_000.0


def test_what_is_read_is_what_is_kept_however_the_file_grows_meanwhile(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", *({"doc": doc} for doc in range(2_000)))
    is_over = threading.Event()

    def grow() -> None:
        with source.open("ab", buffering=0) as file:
            for doc in itertools.count(2_000):
                if is_over.is_set():
                    return
                file.write(f"{json.dumps({**LAB, 'doc': doc})}\n".encode())

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        folder = import_rows(source, tmp_path / "results")
    finally:
        is_over.set()
        writer.join()
    kept = (folder / "ttft.jsonl").read_bytes()
    manifest = RunFolder(folder).read_manifest()
    assert manifest.sealed == {"ttft.jsonl": hashlib.sha256(kept).hexdigest()}
    content = json.loads((folder / "reconcile.json").read_text(encoding="utf-8"))
    assert content["requests_recorded"] == kept.count(b"\n")


def test_blocks_and_chunks_of_an_imported_run_are_said_and_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 40 document tokens 32 came from the GPU: all its whole blocks of 32 or 16, not of 8.
    row = {"doc_tokens": 40, "prompt_tokens": 45, "computed": 13, "gpu_hit": 32, "host_loaded": 0}
    source = write(tmp_path / "t.jsonl", *({**both, **row} for both in both_arms()))
    for block, source_class in ((None, "gpu"), (32, "gpu"), (8, "gpu+recomputed")):
        given = ["--block-size", str(block)] if block else []
        results = tmp_path / f"results-{block}"
        assert kvcliff("import", str(source), "--results", str(results), *given) == 0
        said = f"assumed: blocks of {block or 16} tokens (--block-size) and chunks of 256 tokens"
        assert said in " ".join(capsys.readouterr().err.split())
        (folder,) = results.iterdir()
        assert list(summary_of(folder)["sources"]) == [source_class]


def findings_of(folder: Path) -> list[str]:
    content = json.loads((folder / "reconcile.json").read_text(encoding="utf-8"))
    return [finding["code"] for finding in content["findings"]]


def both_arms(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two documents in two passes of two arms, and ``changes`` to the last rows."""
    rows = [
        {"config": arm, "session": f"s-{arm}", "pass": name, "doc": doc}
        for arm in ("baseline", "lmcache")
        for name in ("pass1-cold", "pass2-replay")
        for doc in (0, 1)
    ]
    for row, change in zip(reversed(rows), changes, strict=False):
        row.update(change)
    return rows


def test_an_imported_file_that_is_whole_has_no_finding(tmp_path: Path) -> None:
    folder = import_rows(write(tmp_path / "t.jsonl", *both_arms()), tmp_path / "results")
    assert findings_of(folder) == []


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        (both_arms({"complete": False, "ttft_ms": None}), ["failed-requests"]),
        (both_arms({"ok": False}), ["failed-requests"]),
        (both_arms()[:-1], ["unequal-sessions"]),  # a document
        (both_arms()[:-2], ["unequal-sessions"]),  # a pass
        (both_arms()[:4], ["nothing-compared"]),  # an arm
        (both_arms({"ttft_ms": 0.0}), ["times-of-zero"]),
        (both_arms({"run": "b"}, *[{"run": "a"}] * 7), ["several-runs"]),
        (both_arms({"config": "control", "session": "c"}), ["unequal-sessions"]),
    ],
)
def test_what_an_imported_file_lacks_is_a_finding(
    tmp_path: Path, rows: list[dict[str, Any]], codes: list[str]
) -> None:
    assert findings_of(import_rows(write(tmp_path / "t.jsonl", *rows), tmp_path / "r")) == codes


@pytest.mark.parametrize("arm", ["lmcache ", "LMCache", "Baseline", "CONTROL"])
def test_an_arm_that_is_another_but_for_case_or_blanks_is_named(tmp_path: Path, arm: str) -> None:
    rows = both_arms({"config": arm, "session": "s"})
    with pytest.raises(InputError, match=f"line 8: config is '{arm}', which is"):
        import_rows(write(tmp_path / "t.jsonl", *rows), tmp_path / "results")


@pytest.mark.parametrize(
    ("change", "judged"),
    [
        ({}, "used"),
        ({"complete": False}, "failed"),
        ({"complete": False, "ttft_ms": None, "total_ms": None}, "failed"),
        ({"ok": False}, "failed"),
        ({"ok": True}, "used"),
        ({"ttft_ms": None, "total_ms": None, "error": "boom"}, "failed"),
        ({"ttft_ms": None, "total_ms": None}, "refused"),
        ({"error": "boom"}, "refused"),
        ({"error": ""}, "used"),
        ({"config": "LMCache"}, "refused"),
        ({"config": "lmcache "}, "refused"),
        ({"complete": 1}, "refused"),
        ({"phase": "warmup"}, "refused"),
        ({"ttft_ms": 0.0}, "used"),
    ],
)
def test_an_import_and_the_labs_summary_judge_a_row_alike(
    tmp_path: Path, change: dict[str, Any], judged: str
) -> None:
    source = write(tmp_path / "t.jsonl", {}, {"config": "lmcache", "doc": 1, **change})
    lines = source.read_bytes().splitlines(keepends=True)
    try:
        labs = "failed" if summarize.summarize(lines, name="t").n_failed else "used"
    except summarize.SummaryError:
        labs = "refused"
    try:
        folder = import_rows(source, tmp_path / "results")
        ours = "failed" if "failed-requests" in findings_of(folder) else "used"
    except InputError:
        ours = "refused"
    assert (ours, labs) == (judged, judged)
