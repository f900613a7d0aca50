import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.files import load_json, refuse_evidence, write_atomically
from harness.record.journal import JournalWriter, read_journal
from harness.record.row import Row
from tests.factory import failed, make_record, make_row, write_journal


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [make_row(), make_row(doc=1, ttft_ms=0.1 + 0.2)]
    with JournalWriter(tmp_path / "j.jsonl") as journal:
        for row in rows:
            journal.append(row)
    assert read_journal(tmp_path / "j.jsonl") == rows


def test_a_row_starts_with_the_six_lab_fields() -> None:
    fields = list(json.loads(make_row().to_json()))
    assert fields[:6] == ["config", "pass", "doc", "doc_tokens", "ttft_ms", "total_ms"]


def test_an_existing_journal_is_never_written_again(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "j.jsonl", make_record())
    with pytest.raises(InputError, match="exists already"):
        JournalWriter(path)
    assert len(read_journal(path)) == 1


def test_a_row_is_on_disk_when_append_returns_even_if_the_writer_is_killed(tmp_path: Path) -> None:
    # A72-style: SIGKILL right after append; nothing is flushed by an orderly exit.
    path = tmp_path / "j.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from harness.record.journal import JournalWriter; from tests.factory import make_row\n"
        "journal = JournalWriter(Path(sys.argv[1])); journal.append(make_row())\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == -9
    assert read_journal(path) == [make_row()]


def test_a_torn_last_line_is_left_out_and_said_wherever_it_is_cut(tmp_path: Path) -> None:
    # A61: truncate at every byte of the last record.
    whole = write_journal(tmp_path / "j.jsonl", make_record(), make_record(doc=1)).read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole)):
        (tmp_path / "j.jsonl").write_bytes(whole[:end])
        notes: list[str] = []
        assert [row.doc for row in read_journal(tmp_path / "j.jsonl", notes)] == [0]
        assert len(notes) == 1
        assert f"{end - first} bytes" in notes[0]


def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path: Path) -> None:
    # A62: garbage in line 2 of 3.
    path = tmp_path / "j.jsonl"
    good = [json.dumps(make_record(doc=doc)).encode() for doc in (0, 1)]
    path.write_bytes(good[0] + b"\n{garbage\n" + good[1] + b"\n")
    with pytest.raises(InputError, match="line 2: not valid JSON"):
        read_journal(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_json_does_not_have_are_rejected(tmp_path: Path, number: str) -> None:
    # A63
    text = json.dumps(make_record()).replace('"ttft_ms": 100.0', f'"ttft_ms": {number}')
    (tmp_path / "j.jsonl").write_text(text + "\n")
    with pytest.raises(InputError, match="line 1"):
        read_journal(tmp_path / "j.jsonl")


def test_a_number_json_does_not_have_cannot_be_written() -> None:
    # A63: the row itself refuses it, so no file can hold it.
    with pytest.raises(ValueError, match="ttft_ms"):
        make_row(ttft_ms=float("nan"))


def test_line_separators_in_an_error_text_survive_any_locale(tmp_path: Path) -> None:
    # A64: U+2028, U+0085, VT and a non-ASCII letter inside one string, written under LANG=C.
    code = (
        "import sys; from pathlib import Path; from harness.record.journal import JournalWriter\n"
        "from harness.record.journal import Row; from tests.factory import failed\n"
        "with JournalWriter(Path(sys.argv[1])) as journal:\n"
        "    journal.append(Row.model_validate(failed(error='a\\u2028b\\u0085c\\x0bd\\u00e9')))"
    )
    path = tmp_path / "j.jsonl"
    env = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, env=env, check=True)
    assert path.read_bytes().count(b"\n") == 1
    assert read_journal(path)[0].error == "a\u2028b\u0085c\x0bd\u00e9"


def test_a_byte_order_mark_and_crlf_line_ends_are_read(tmp_path: Path) -> None:
    # A64
    content = b"\xef\xbb\xbf" + json.dumps(make_record()).encode() + b"\r\n\r\n"
    (tmp_path / "j.jsonl").write_bytes(content)
    assert read_journal(tmp_path / "j.jsonl") == [make_row()]


def test_the_same_request_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    # A65
    path = write_journal(tmp_path / "j.jsonl", make_record(), make_record())
    with pytest.raises(InputError, match=r"line 2: request .* was recorded before, in line 1"):
        read_journal(path)


def test_a_second_writer_is_refused_while_the_first_writes_a_thousand_long_rows(
    tmp_path: Path,
) -> None:
    # A66: rows of 8 KiB, one write each; the second process cannot even open the file.
    path = tmp_path / "j.jsonl"
    code = (
        "import sys; from pathlib import Path; from harness.record.journal import JournalWriter\n"
        "JournalWriter(Path(sys.argv[1]))"
    )
    with JournalWriter(path) as journal:
        journal.append(make_row(doc=0))
        second = subprocess.run(
            [sys.executable, "-c", code, str(path)], timeout=60, capture_output=True, text=True
        )
        for doc in range(1, 1000):
            journal.append(Row.model_validate(failed(doc=doc, error="x" * 8192)))
    assert second.returncode != 0
    assert "exists already" in second.stderr
    assert [row.doc for row in read_journal(path)] == list(range(1000))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("doc", True),
        ("doc", "0"),
        ("doc", 0.0),
        ("doc", -1),
        ("ttft_ms", "100"),
        ("ttft_ms", True),
        ("ttft_ms", -0.5),
        ("complete", 1),
        ("config", ""),
        ("config", None),
        ("phase", "Measure"),
        ("unknown_field", 1),
        ("counters_after", [1]),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named(
    tmp_path: Path, field: str, value: object
) -> None:
    # A71
    path = write_journal(
        tmp_path / "j.jsonl", make_record(), make_record(**{"doc": 1, field: value})
    )
    with pytest.raises(InputError, match=f"line 2: {field}"):
        read_journal(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    # A71
    record = make_record()
    del record["settle_ms"]
    with pytest.raises(InputError, match="line 1: settle_ms: Field required"):
        read_journal(write_journal(tmp_path / "j.jsonl", record))


def test_a_key_given_twice_in_a_record_is_rejected(tmp_path: Path) -> None:
    # A71: the last one would win silently.
    text = json.dumps(make_record()).replace('"doc": 0', '"doc": 0, "doc": 1')
    (tmp_path / "j.jsonl").write_text(text + "\n")
    with pytest.raises(InputError, match="'doc' appears twice"):
        read_journal(tmp_path / "j.jsonl")


def test_a_record_of_a_newer_schema_says_what_to_do_whatever_else_is_in_it(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "j.jsonl", {"schema": 4, "speed": {}})
    with pytest.raises(InputError, match="written by a newer kvcliff, schema 4") as caught:
        read_journal(path)
    assert caught.value.hint is not None
    assert "manifest.json" in caught.value.hint


def test_sources_that_do_not_follow_from_the_rows_own_counters_are_refused(tmp_path: Path) -> None:
    record = make_record()
    record["computed"], record["gpu_hit"] = 500, 20  # sums to the prompt, but is not what was read
    with pytest.raises(InputError, match=r"computed is 500, but the row's own counters say 520"):
        read_journal(write_journal(tmp_path / "j.jsonl", record))


def test_a_tiers_counters_without_the_size_of_its_chunks_are_refused(tmp_path: Path) -> None:
    record = make_record()
    for counters in ("counters_before", "counters_after"):
        record[counters] = {**record[counters], "native_load_bytes": 0}
    with pytest.raises(InputError, match="line 1: chunk_tokens is None but the counters include"):
        read_journal(write_journal(tmp_path / "j.jsonl", record))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"ttft_ms": None}, "complete is true beside an error, or without times"),
        ({"error": "boom"}, "complete is true beside an error"),
        ({"output_tokens": None}, "without times, finish_reason, output tokens"),
        ({"output_tokens": 0}, "without times, finish_reason, output tokens"),
        ({"output_sha256": None}, "output digest"),
        ({"output_sha256": ""}, "output digest"),
        ({"finish_reason": None}, "without times, finish_reason"),
        ({"first_byte_ms": 100.5}, "first_byte_ms 100.5 is more than ttft_ms 100.0"),
        ({"config": "lmcache"}, "session '01-baseline' is not that of order 1, config 'lmcache'"),
        ({"order": 3}, "session '01-baseline' is not that of order 3"),
        ({"phase": "warmup"}, "phase is 'warmup' in pass 'pass1-cold'"),
        ({"pass": "warmup"}, "phase is 'measure' in pass 'warmup'"),
        ({"doc_tokens": 521}, "doc_tokens 521 is more than prompt_tokens 520"),
        ({"cached_tokens": 9}, "cached_tokens is 9 beside 0 tokens from caches"),
        ({"loaded_bytes": 0}, "loaded_bytes without a loaded_source"),
        ({"chunk_tokens": 256, "chunk_bytes": 1}, "chunk_bytes 1 is no whole number of bytes"),
        ({"chunk_tokens": None, "chunk_bytes": 1}, "chunk_bytes 1 is no whole number of bytes"),
        ({"complete": False}, "complete is false without an error"),
        ({"ttft_ms": 200.0}, "ttft_ms 200.0 is more than total_ms 110.0"),
        ({"unattributed": "not settled"}, "unattributed must say why exactly when"),
        ({"seq": 3}, "seq is 3 in the first row"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(
    tmp_path: Path, changed: dict[str, object], problem: str
) -> None:
    # A70: green from nothing.
    path = write_journal(tmp_path / "j.jsonl", make_record(**changed))
    with pytest.raises(InputError, match=problem):
        read_journal(path)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"connector": "LMCacheMPConnector"}, "connector is 'LMCacheMPConnector' after 'none'"),
        ({"chunk_tokens": 256}, "chunk_tokens 256, chunk_bytes None after None, None"),
        ({"config": "lmcache"}, "session '01-baseline' is not that of order 1"),
        ({"order": 2}, "seq 2, order 2 after seq 1, order 1"),
    ],
)
def test_what_a_server_is_cannot_change_between_two_of_its_rows(
    tmp_path: Path, changed: dict[str, object], problem: str
) -> None:
    path = write_journal(tmp_path / "j.jsonl", make_record(), make_record(doc=1, **changed))
    with pytest.raises(InputError, match=f"line 2: {problem}"):
        read_journal(path)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    # It can be held in memory and written to no file: the report would end in the middle.
    path = write_journal(tmp_path / "j.jsonl", failed(error="\ud800"))
    with pytest.raises(InputError, match=r"line 1: not valid JSON: .*surrogates not allowed"):
        read_journal(path)
    assert load_json(b'"\\ud83d\\ude00 \\\\ud800"', where="x") == "\U0001f600 \\ud800"


def test_counters_that_jump_between_two_rows_are_refused(tmp_path: Path) -> None:
    # A29: somebody else's request between two of ours.
    second = make_record(doc=1)
    second["counters_before"]["finished"] += 1
    second["counters_after"]["finished"] += 1
    with pytest.raises(InputError, match=r"line 2: counters_before are not the counters_after"):
        read_journal(write_journal(tmp_path / "j.jsonl", make_record(), second))


def test_every_row_is_synced_to_the_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with JournalWriter(tmp_path / "j.jsonl") as journal:
        journal.append(make_row())
        journal.append(make_row(doc=1))
    line = len(make_row().to_json()) + 1
    assert len(synced) == 2
    assert synced[0] == line


def test_a_failed_row_is_kept_with_null_times(tmp_path: Path) -> None:
    row = read_journal(write_journal(tmp_path / "j.jsonl", failed()))[0]
    assert (row.complete, row.ttft_ms, row.error) == (False, None, "boom")


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(InputError, match=r"nested too deeply|not valid JSON"):
        load_json(b"[" * 100_000, where="line 1")


def test_a_device_is_never_replaced_and_a_link_is_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        write_atomically(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_link_to_itself_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "loop.html").symlink_to("loop.html")
    for refused in (refuse_evidence, lambda path: write_atomically(path, "x")):
        with pytest.raises((InputError, OSError), match=r"loop\.html"):
            refused(tmp_path / "loop.html")


def test_the_files_of_a_run_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    for name in ("plan.toml", "journal-01-baseline.jsonl", "summary.json"):
        with pytest.raises(InputError, match="would take the place of one"):
            refuse_evidence(tmp_path / name)
    refuse_evidence(tmp_path / "report.html")


def test_an_interrupted_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_file_that_cannot_be_written_is_named_as_asked_for_never_the_hidden_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        InputError, match=r"nowhere/f cannot be written: there is no folder .*nowhe"
    ):
        write_atomically(tmp_path / "nowhere" / "f", "text")
    nobody_writes_here = Path("/proc/self/f")
    with pytest.raises(OSError, match="/proc/self/f") as error:
        write_atomically(nobody_writes_here, "text")
    assert error.value.filename == "/proc/self/f"
    assert ".kvcliff-" not in str(error.value)


def test_the_fast_reader_refuses_what_the_strict_one_refuses(tmp_path: Path) -> None:
    # A71: pydantic's own parser would keep the second of two equal keys.
    line = json.dumps(make_record())
    for key, value in (("doc", 0), ("finished", 1)):
        twice = line.replace(f'"{key}": {value}', f'"{key}": {value}, "{key}": {value}', 1)
        assert twice != line
        (tmp_path / "j.jsonl").write_text(twice + "\n")
        with pytest.raises(InputError, match=f"key '{key}' appears twice"):
            read_journal(tmp_path / "j.jsonl")


def test_a_text_that_looks_like_a_key_is_read_all_the_same(tmp_path: Path) -> None:
    record = failed(error='the server said {"detail":"no"}')
    row = read_journal(write_journal(tmp_path / "j.jsonl", record))[0]
    assert row.error == 'the server said {"detail":"no"}'


def test_a_pass_that_goes_on_after_another_began_is_refused(tmp_path: Path) -> None:
    names = ("pass1-cold", "pass2-replay", "pass1-cold")
    records = [make_record(**{"pass": name}, doc=doc) for doc, name in enumerate(names)]
    with pytest.raises(InputError, match="line 3: pass 'pass1-cold' of 01-baseline goes on after"):
        read_journal(write_journal(tmp_path / "j.jsonl", *records))


def test_rows_whose_counters_moved_alike_are_each_checked(tmp_path: Path) -> None:
    # The second row says what its equal counters do not.
    records = [make_record(), make_record(doc=1), make_record(doc=2)]
    records[2].update(computed=519, gpu_hit=1)
    with pytest.raises(InputError, match="line 3: computed is 519, but the row's own counters"):
        read_journal(write_journal(tmp_path / "j.jsonl", *records))
