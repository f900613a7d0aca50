import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.summarize import summarize as summarize_lines
from tests.places import ROOT

SUMMARIZE = ROOT / "scripts" / "summarize.py"


def row(config: str = "baseline", doc: object = 0, ttft_ms: object = 1.0, **more: object) -> bytes:
    fields = {"config": config, "pass": "pass2-replay", "doc": doc, "doc_tokens": 5011}
    fields |= {"ttft_ms": ttft_ms, "total_ms": 900, **more}
    return json.dumps(fields).encode() + b"\n"


GOOD = row() + row("lmcache")


@pytest.fixture
def summarize(tmp_path: Path):
    def run(*journal: bytes, expect: int = 0):
        (tmp_path / "in.jsonl").write_bytes(b"".join(journal))
        argv = [sys.executable, "-I", "-S", str(SUMMARIZE), "in.jsonl", "out.json"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (expect, ""), done.stderr
        return done.stderr, (tmp_path / "out.json")

    return run


def tables(output: Path) -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(output.read_text("utf-8"))


def test_medians_means_and_ratios_come_from_unrounded_values(summarize):
    # baseline 10.04 20.08 90 → p50 20.08, mean 120.12 / 3 = 40.04; lmcache 6.01 6.07 → 6.04 both.
    # ratios 20.08 / 6.04 = 3.3245 and 40.04 / 6.04 = 6.6291 (from rounded 20.1 / 6.0 it were 3.35).
    baseline = [row(doc=doc, ttft_ms=ms) for doc, ms in enumerate([90, 10.04, 20.08])]
    lmcache = [row("lmcache", doc=doc, ttft_ms=ms) for doc, ms in enumerate([6.07, 6.01])]
    stderr, output = summarize(*baseline, *lmcache)
    assert tables(output) == {
        "baseline": {"pass2-replay": {"n": 3, "p50_ms": 20.1, "mean_ms": 40.0}},
        "lmcache": {"pass2-replay": {"n": 2, "p50_ms": 6.0, "mean_ms": 6.0}},
        "ratio": {"pass2-replay": {"p50": 3.32, "mean": 6.63}},
    }
    assert stderr == (
        "summarize.py: pass2-replay: the arms' complete documents differ: baseline has 3 rows, "
        "lmcache 2; unequal for [2]\n"
    )


def test_a_ratio_is_not_formed_from_rounded_values(summarize):
    # A68: 0.0174 / 0.0063 is 2.76; from the displayed 0.0 and 0.0 there would be none.
    _, output = summarize(row(ttft_ms=0.0174), row("lmcache", ttft_ms=0.0063))
    assert tables(output)["ratio"] == {"pass2-replay": {"p50": 2.76, "mean": 2.76}}


def test_swapping_the_arms_inverts_the_ratio(summarize):
    _, output = summarize(row(ttft_ms=2), row("lmcache", ttft_ms=8))
    assert tables(output)["ratio"] == {"pass2-replay": {"p50": 0.25, "mean": 0.25}}


def test_the_output_is_indented_with_passes_in_order_of_first_appearance(summarize):
    rows = [row(arm, **{"pass": name}) for name in ("z", "a") for arm in ("lmcache", "baseline")]
    _, output = summarize(*rows)
    text = output.read_text("utf-8")
    assert text.startswith('{\n  "baseline": {\n    "z": {\n      "n": 1,\n      "p50_ms": 1.0,\n')
    assert text.endswith("}\n")
    assert [list(table) for table in tables(output).values()] == [["z", "a"]] * 3


def test_a_mark_crlf_blank_lines_and_a_last_line_without_its_end_are_read(summarize):
    journal = b"\xef\xbb\xbf" + row().replace(b"\n", b"\r\n") + b"\n \t\r\n" + row("lmcache")
    stderr, output = summarize(journal.rstrip(b"\n"))
    assert stderr == ""
    assert [tables(output)[arm]["pass2-replay"]["n"] for arm in ("baseline", "lmcache")] == [1, 1]


def test_lines_end_at_lf_only(summarize):
    fields = json.loads(row(note="\u2028\u2029\x85"))
    line = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
    stderr, _ = summarize(line, row("lmcache"))
    assert stderr == ""


def test_failed_rows_are_counted_and_left_out_and_the_exit_status_is_1(summarize):
    failed = row(doc=1, ttft_ms=None, total_ms=None, complete=False)
    stderr, output = summarize(GOOD, failed, row("control", ttft_ms=9e9, complete=False), expect=1)
    assert tables(output)["baseline"]["pass2-replay"] == {"n": 1, "p50_ms": 1.0, "mean_ms": 1.0}
    assert stderr.splitlines() == [
        "summarize.py: baseline pass2-replay: 1 failed row left out of the times",
        "summarize.py: control pass2-replay: 1 failed row left out of the times",
        'summarize.py: config "control": 1 row, not part of the comparison',
    ]


def test_the_time_of_a_request_that_failed_after_its_first_token_does_not_count(summarize):
    cut_short = row(doc=1, ttft_ms=500.0, total_ms=None, complete=False)
    _, output = summarize(GOOD, cut_short, expect=1)
    assert tables(output)["baseline"]["pass2-replay"] == {"n": 1, "p50_ms": 1.0, "mean_ms": 1.0}


def test_rows_of_another_config_are_said_and_no_failure(summarize):
    stderr, output = summarize(GOOD, row("control"), row("control", complete=True))
    assert stderr == 'summarize.py: config "control": 2 rows, not part of the comparison\n'
    assert list(tables(output)) == ["baseline", "lmcache", "ratio"]


def test_a_pass_in_one_arm_only_has_no_ratio_and_is_said(summarize):
    stderr, output = summarize(GOOD, row(**{"pass": "pass3-reverse"}))
    assert list(tables(output)["baseline"]) == ["pass2-replay", "pass3-reverse"]
    assert list(tables(output)["ratio"]) == ["pass2-replay"]
    assert stderr == "summarize.py: pass3-reverse: no complete row of lmcache, so no ratio\n"


def test_an_absent_arm_is_an_empty_object_and_is_said(summarize):
    stderr, output = summarize(row())
    assert (tables(output)["lmcache"], tables(output)["ratio"]) == ({}, {})
    assert stderr == "summarize.py: lmcache: no complete row, so no figures and no ratio\n"


def test_a_zero_denominator_gives_no_ratio_and_is_said(summarize):
    # lmcache 0 0 3: p50 0, mean 1; baseline 1 1 1: the mean's ratio is 1.
    times = {"baseline": [1, 1, 1], "lmcache": [0, 0, 3]}
    rows = [row(arm, doc, ms) for arm in times for doc, ms in enumerate(times[arm])]
    stderr, output = summarize(*rows)
    assert tables(output)["ratio"] == {"pass2-replay": {"mean": 1.0}}
    assert stderr == (
        "summarize.py: 2 rows with a time of 0 ms\n"
        "summarize.py: pass2-replay: the p50 of lmcache is 0 ms, so no p50 ratio\n"
    )


def test_a_repeat_is_an_error_only_where_rows_name_their_session(summarize):
    _, output = summarize(row(), row(), row("lmcache"), row("lmcache"))
    assert tables(output)["baseline"]["pass2-replay"]["n"] == 2
    summarize(row(session="01-a"), row(session="04-a"), row(doc="0", session="01-a"))
    stderr, _ = summarize(row(session="01-a"), row(), row(session="01-a"), expect=2)
    assert "in.jsonl line 3: config, session, pass and doc" in stderr
    assert "line 1; accepted: one row" in stderr


def without(field: str) -> bytes:
    fields = json.loads(row())
    del fields[field]
    return json.dumps(fields).encode() + b"\n"


def raw(old: str, new: str) -> bytes:
    assert old in row().decode()
    return row().replace(old.encode(), new.encode())


BAD_ROWS = {
    **{
        f"no {name}": (without(name), [f'"{name}" is missing', "accepted"])
        for name in ("config", "pass", "doc", "doc_tokens", "ttft_ms", "total_ms")
    },
    "config empty": (row(""), ['"config" is ""', "non-empty string"]),
    "config a number": (raw('"baseline"', "7"), ['"config" is 7', "non-empty string"]),
    "pass null": (raw('"pass2-replay"', "null"), ['"pass" is null', "non-empty string"]),
    "doc true": (row(doc=True), ['"doc" is true', "integer or a non-empty string"]),
    "doc a fraction": (row(doc=1.5), ['"doc" is 1.5', "integer"]),
    "doc a list": (row(doc=[1]), ['"doc" is [1]', "integer"]),
    "doc_tokens text": (raw("5011", '"5011"'), ['"doc_tokens" is "5011"', "finite number >= 0"]),
    "ttft true": (row(ttft_ms=True), ['"ttft_ms" is true', "finite number >= 0"]),
    "ttft text": (row(ttft_ms="0.5"), ['"ttft_ms" is "0.5"', "finite number >= 0"]),
    "ttft negative": (row(ttft_ms=-0.5), ['"ttft_ms" is -0.5', "finite number >= 0"]),
    "ttft null": (row(ttft_ms=None), ['"ttft_ms" is null', "finite number >= 0"]),
    "ttft too large": (raw("1.0", "1e400"), ["1e400", "finite"]),
    "ttft an endless integer": (raw("1.0", "9" * 400), ['"ttft_ms" is 999', "finite"]),
    "ttft of 5,000 digits": (raw("1.0", "9" * 5000), ["not valid JSON", "5000 digits"]),
    "NaN": (raw("1.0", "NaN"), ["NaN", "finite numbers"]),
    "Infinity in a field not used": (raw("{", '{"x": -Infinity, '), ["-Infinity", "finite"]),
    "total_ms null": (row(total_ms=None), ['"total_ms" is null', "finite number >= 0"]),
    "duplicate key": (raw("{", '{"doc": 1, '), ['"doc" comes twice', "once"]),
    "complete a number": (row(complete=1), ['"complete" is 1', "true or false"]),
    "warm-up": (row(phase="warmup"), ['"phase" is "warmup"', "measured rows"]),
    "session a list": (row(session=[]), ['"session" is []', "no such field"]),
    "a list": (b"[]\n", ["holds []", "one JSON object"]),
    "garbage": (b"nonsense\n", ["not valid JSON", "one JSON object"]),
    "two objects": (b"{} {}\n", ["not valid JSON", "one JSON object"]),
    "not UTF-8": (b'{"a": "\xff"}\n', ["not valid JSON", "utf-8"]),
    "nested too deep": (b"[" * 100_000 + b"\n", ["not valid JSON", "one JSON object"]),
    "second byte order mark": (b"\xef\xbb\xbf" + row(), ["not valid JSON"]),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_one_line_with_file_line_and_field(summarize, kind: str):
    bad, named = BAD_ROWS[kind]
    stderr, output = summarize(row(), b"\n", bad, row("lmcache"), expect=2)
    assert stderr.count("\n") == 1
    assert [text for text in ["in.jsonl line 3: ", *named] if text not in stderr] == []
    assert not output.exists()


def test_a_tail_cut_at_any_byte_is_an_error_with_its_line(summarize):
    last = row("lmcache", note="é").replace(b"\\u00e9", "é".encode())
    for length in (1, len(last) // 2, last.index(b"\xc3") + 1, len(last) - 2):
        stderr, output = summarize(row(), last[:length], expect=2)
        assert "in.jsonl line 2: the last line is torn" in stderr
        assert stderr.count("\n") == 1
        assert not output.exists()


@pytest.mark.parametrize(
    "journal",
    [b"", b"\xef\xbb\xbf\n\n", row("control"), row(ttft_ms=None, complete=False)],
    ids=["empty", "blank", "control only", "all failed"],
)
def test_no_usable_row_is_an_error(summarize, journal: bytes):
    stderr, output = summarize(journal, expect=2)
    assert "no complete row of baseline or lmcache" in stderr
    assert not output.exists()


def test_times_too_large_to_average_are_an_error_not_infinity(summarize):
    stderr, output = summarize(row(ttft_ms=1.7e308), row(doc=1, ttft_ms=1.7e308), expect=2)
    assert "too large to average" in stderr
    assert not output.exists()


def test_a_failure_leaves_an_existing_output_and_the_folder_as_they_were(summarize, tmp_path: Path):
    (tmp_path / "out.json").write_text("mine")
    summarize(row(), b"nonsense\n", expect=2)
    assert (tmp_path / "out.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.json"]


def test_a_success_replaces_the_output_and_leaves_nothing_beside_it(summarize, tmp_path: Path):
    (tmp_path / "out.json").write_text("mine")
    _, output = summarize(GOOD)
    assert tables(output)["ratio"] == {"pass2-replay": {"p50": 1.0, "mean": 1.0}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.json"]


def test_a_linked_output_is_written_where_the_link_points(summarize, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.json").symlink_to(tmp_path / "elsewhere" / "real.json")
    _, output = summarize(GOOD)
    assert output.is_symlink()
    assert list(tables(tmp_path / "elsewhere" / "real.json")) == ["baseline", "lmcache", "ratio"]


BAD_ARGUMENTS = {
    "none": ([], ["INPUT.jsonl", "OUTPUT.json"]),
    "one": (["in.jsonl"], ["OUTPUT.json"]),
    "three": (["in.jsonl", "out.json", "more"], ["more", "INPUT.jsonl OUTPUT.json"]),
    "unknown flag": (["--x", "in.jsonl", "out.json"], ["--x", "INPUT.jsonl OUTPUT.json"]),
    "input missing": (["none.jsonl", "out.json"], ["INPUT none.jsonl", "No such file"]),
    "input a folder": ([".", "out.json"], ["INPUT .", "s a directory"]),
    "output is the input": (["in.jsonl", "./in.jsonl"], ["OUTPUT in.jsonl", "another file"]),
    "output a folder": (["in.jsonl", "."], ["OUTPUT .", "not a regular file"]),
    "output a device": (["in.jsonl", os.devnull], ["OUTPUT", "not a regular file"]),
    "output under a file": (["in.jsonl", "in.jsonl/x"], ["OUTPUT in.jsonl/x", "Not a directory"]),
    "output in no folder": (["in.jsonl", "no/out.json"], ["OUTPUT no/out.json", "No such file"]),
}


@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_writes_nothing(tmp_path: Path, kind: str):
    words, named = BAD_ARGUMENTS[kind]
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    argv = [sys.executable, str(SUMMARIZE), *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert [text for text in named if text not in done.stderr] == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (tmp_path / "in.jsonl").read_bytes() == GOOD


def test_the_mean_is_rounded_once():
    # The exact sum of these six is 2234.1, a mean of 372.35; summed as floats it was 372.3.
    times = [577.4, 127.8, 317.0, 596.4, 235.9, 379.6]
    summary = summarize_lines([row(doc=i, ttft_ms=ms) for i, ms in enumerate(times)], name="x")
    assert summary.tables["baseline"]["pass2-replay"]["mean_ms"] == 372.4


def test_rows_of_lmcache_mp_stand_in_for_lmcache_where_there_is_none(summarize):
    rows = [row("lmcache-mp", ttft_ms=2, **{"pass": "z"}), row(ttft_ms=8, **{"pass": "z"})]
    later = [row("lmcache-mp", ttft_ms=1), row(ttft_ms=3)]
    stderr, output = summarize(*rows, *later)
    assert tables(output)["lmcache"]["z"] == {"n": 1, "p50_ms": 2.0, "mean_ms": 2.0}
    assert tables(output)["ratio"] == {
        "z": {"p50": 4.0, "mean": 4.0}, "pass2-replay": {"p50": 3.0, "mean": 3.0},
    }  # fmt: skip
    assert list(tables(output)["ratio"]) == ["z", "pass2-replay"]
    assert "lmcache is read from the 2 rows of lmcache-mp" in stderr


def test_rows_of_lmcache_mp_stay_out_where_lmcache_has_rows(summarize):
    stderr, output = summarize(
        row(), row("lmcache"), row("lmcache-mp", ttft_ms=9, **{"pass": "only-there"})
    )
    assert list(tables(output)["lmcache"]) == ["pass2-replay"]
    assert 'config "lmcache-mp": 1 row, not part of the comparison' in stderr
