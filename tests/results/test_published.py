"""The committed runs publish the files that are committed with them, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.record.folder import RunFolder
from harness.verdict.publish import publish
from harness.verdict.schema import ReconcileFile, Summary

RESULTS = Path(__file__).parents[2] / "results"
DEMO = RESULTS / "20261203T055042Z-demo-8901a276"
MATRIX = sorted((RESULTS / "matrix").glob("*-matrix-*"))


def published(run: Path) -> dict[str, Any]:
    written: dict[str, Any] = {}
    publish(RunFolder(run), write=lambda path, content: written.update({path.name: content}))
    assert list(written) == ["reconcile.json", "summary.json"]
    return written


def on_disk(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def test_there_are_committed_runs_to_look_at() -> None:
    assert len(MATRIX) >= 13
    assert DEMO.is_dir()


def test_the_demo_publishes_the_same_bytes() -> None:
    for name, content in published(DEMO).items():
        assert on_disk(content) == (DEMO / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("run", MATRIX, ids=lambda run: run.name)
def test_a_run_of_the_matrix_publishes_the_same_bytes_but_for_its_curve(run: Path) -> None:
    # These plans name no engine, so there are no rules to predict a curve by; their summaries were
    # written before that was asked.
    written = published(run)
    assert on_disk(written["reconcile.json"]) == (run / "reconcile.json").read_text("utf-8")
    committed = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    summary = written["summary.json"]
    assert list(summary) == list(committed)
    assert on_disk({**summary, "cliff": None}) == on_disk({**committed, "cliff": None})
    assert summary["cliff"].keys() == committed["cliff"].keys()


@pytest.mark.parametrize("run", [DEMO, *MATRIX], ids=lambda run: run.name)
def test_what_was_read_back_is_written_the_same(run: Path) -> None:
    for name, shape in (("summary.json", Summary), ("reconcile.json", ReconcileFile)):
        text = (run / name).read_text(encoding="utf-8")
        assert on_disk(shape.model_validate(json.loads(text)).as_json()) == text, name
