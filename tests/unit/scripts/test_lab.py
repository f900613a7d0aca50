import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

NAMES = [
    "baseline.json",
    "cliff.json",
    "cpu_cliff.json",
    "cyclic.json",
    "measured.json",
    "offload.json",
    "ttft.jsonl",
]


def journal(baseline_ms: float) -> bytes:
    # A CRLF and a blank line, so that a copy that re-writes lines shows.
    return "".join(
        f'{{"config":"{arm}","pass":"pass2-replay","doc":0,"doc_tokens":9,"ttft_ms":{ms},'
        f'"total_ms":99}}{end}'
        for arm, ms, end in (("baseline", baseline_ms, "\r\n\n"), ("lmcache", 2, "\n"))
    ).encode()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The two folders alone: a checkout whose results/ this test decides."""
    for folder in ("sim", "scripts"):
        shutil.copytree(
            ROOT / folder, tmp_path / "co" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path / "co"


@pytest.fixture
def lab(checkout: Path, tmp_path: Path):
    def run(*words: str, expect: int = 0) -> str:
        argv = [sys.executable, "-I", "-S", str(checkout / "scripts" / "lab.py"), *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (expect, ""), done.stderr
        return done.stderr

    return run


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(journal(8))
    return path


def test_it_writes_the_seven_files_into_a_new_folder(lab, measured: Path, tmp_path: Path):
    stderr = lab("new/lab", "--journal", str(measured))
    assert sorted(path.name for path in (tmp_path / "new" / "lab").iterdir()) == NAMES
    assert stderr == f"lab.py: wrote 7 files to new/lab, measured: {measured}\n"


def test_the_cliffs_are_where_the_last_of_ten_documents_fits(lab, measured: Path, tmp_path: Path):
    # 10 x 5,011 = 50,110: one token fewer and a cyclic pass finds nothing.
    lab("lab", "--journal", str(measured))
    assert json.loads((tmp_path / "lab" / "cliff.json").read_text()) == {
        "21520": 0,
        "30000": 0,
        "40000": 0,
        "45000": 0,
        "50109": 0,
        "50110": 10,
    }
    assert json.loads((tmp_path / "lab" / "cpu_cliff.json").read_text()) == {
        "0": 10,
        "20000": 10,
        "30000": 10,
        "40000": 10,
        "50109": 10,
        "50110": 0,
        "56000": 0,
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cyclic.json", ["--passes", "fwd,fwd"]),
        ("baseline.json", ["--passes", "fwd,fwd,rev"]),
        ("offload.json", ["--gpu", "21520", "--cpu", "56000", "--passes", "fwd,fwd,rev"]),
    ],
)
def test_a_scenario_file_is_what_the_command_prints(
    lab, measured: Path, tmp_path: Path, name: str, words: list[str]
):
    lab("lab", "--journal", str(measured))
    argv = [sys.executable, str(ROOT / "sim" / "scenario.py"), *words]
    printed = subprocess.run(argv, capture_output=True, check=True).stdout
    assert (tmp_path / "lab" / name).read_bytes() == printed
    assert printed.startswith(b'{"passes": [{"order": "fwd", "gpu_hits": 0, ')


def test_the_journal_is_copied_byte_for_byte_and_summarised(lab, measured: Path, tmp_path: Path):
    lab("lab", "--journal", str(measured))
    assert (tmp_path / "lab" / "ttft.jsonl").read_bytes() == journal(8)
    argv = [sys.executable, str(ROOT / "scripts" / "summarize.py"), str(measured), "sum.json"]
    subprocess.run(argv, cwd=tmp_path, check=True)
    written = (tmp_path / "lab" / "measured.json").read_bytes()
    assert written == (tmp_path / "sum.json").read_bytes()
    assert json.loads(written)["ratio"] == {"pass2-replay": {"p50": 4.0, "mean": 4.0}}


def test_by_default_the_journal_of_the_newest_run_is_taken(lab, checkout: Path, tmp_path: Path):
    for run, ms in (("20260102T000000Z-b", 6), ("20260101T000000Z-a", 4)):
        (checkout / "results" / run).mkdir(parents=True)
        (checkout / "results" / run / "ttft.jsonl").write_bytes(journal(ms))
    (checkout / "results" / "20270101T000000Z-cut-short").mkdir()
    lab("lab")
    assert (tmp_path / "lab" / "ttft.jsonl").read_bytes() == journal(6)


def test_without_any_run_it_names_the_option_and_writes_nothing(lab, tmp_path: Path):
    stderr = lab("lab", expect=2)
    assert stderr.count("\n") == 1
    assert "--journal PATH" in stderr
    assert not (tmp_path / "lab").exists()


def test_running_again_replaces_its_own_files_and_no_others(lab, measured: Path, tmp_path: Path):
    lab("lab", "--journal", str(measured))
    (tmp_path / "lab" / "notes.txt").write_text("mine")
    measured.write_bytes(journal(6))
    lab("lab", "--journal", str(measured))
    assert (tmp_path / "lab" / "ttft.jsonl").read_bytes() == journal(6)
    assert (tmp_path / "lab" / "notes.txt").read_text() == "mine"
    assert len(list((tmp_path / "lab").iterdir())) == 8


def test_its_own_copy_can_be_the_journal(lab, measured: Path, tmp_path: Path):
    lab("lab", "--journal", str(measured))
    lab("lab", "--journal", "lab/ttft.jsonl")
    assert (tmp_path / "lab" / "ttft.jsonl").read_bytes() == journal(8)


def test_failed_rows_are_said_and_the_exit_status_is_1(lab, measured: Path, tmp_path: Path):
    failed = journal(8).splitlines(keepends=True)[0].replace(b"{", b'{"complete":false,')
    measured.write_bytes(journal(8) + failed)
    stderr = lab("lab", "--journal", str(measured), expect=1)
    assert "lab.py: baseline pass2-replay: 1 failed row left out" in stderr
    assert sorted(path.name for path in (tmp_path / "lab").iterdir()) == NAMES


def test_a_journal_that_cannot_be_used_leaves_the_folder_as_it_was(
    lab, measured: Path, tmp_path: Path
):
    lab("lab", "--journal", str(measured))
    before = {path.name: path.read_bytes() for path in (tmp_path / "lab").iterdir()}
    measured.write_bytes(journal(6) + b"nonsense\n")
    stderr = lab("lab", "--journal", str(measured), expect=2)
    assert f"{measured} line 4: not valid JSON" in stderr
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "lab").iterdir()}


BAD_ARGUMENTS = {
    "no folder": ([], "DIR"),
    "repeated": (["lab", "--journal", "a", "--journal", "b"], "--journal: given again, as 'b'"),
    "abbreviated": (["lab", "--jour", "a"], "--jour"),
    "journal missing": (["lab", "--journal", "none.jsonl"], "INPUT none.jsonl"),
    "folder is a file": (["rows.jsonl", "--journal", "rows.jsonl"], "DIR rows.jsonl"),
    "a target is a folder": (
        ["full", "--journal", "rows.jsonl"],
        "DIR full has a folder cliff.json",
    ),
}


@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_writes_nothing(
    lab, measured: Path, tmp_path: Path, kind: str
):
    (tmp_path / "full" / "cliff.json").mkdir(parents=True)
    words, named = BAD_ARGUMENTS[kind]
    stderr = lab(*words, expect=2)
    assert stderr.count("\n") == 1
    assert named in stderr
    assert "accepted" in stderr
    assert not (tmp_path / "lab").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["cliff.json"]
    assert measured.read_bytes() == journal(8)
