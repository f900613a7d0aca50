from pathlib import Path

import pytest

from tests.command import kvcliff
from tests.folder import Ttft, helps, write_run


def flat(_position: int, _arm: str, _pass: str, _doc: int) -> float:
    return 100.0


@pytest.mark.parametrize(("ttft", "code"), [(helps, 0), (flat, 4)])
def test_a_gate_lets_only_a_supported_run_pass(tmp_path: Path, ttft: Ttft, code: int) -> None:
    run = write_run(tmp_path, "a", ttft)
    assert kvcliff("summarize", str(run), "--gate") == code
    assert kvcliff("summarize", str(run)) == 0


def test_a_failed_check_comes_before_the_gate(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", flat)
    journal = run / "journal-01-baseline.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]), encoding="utf-8")
    assert kvcliff("summarize", str(run), "--gate") == 1
