"""Runs that earlier versions of kvcliff wrote read as they did then: every number is the same.

``tests/data/old-runs`` has two runs as they were committed, each with the ``summary.json`` that the
code of then made: of the very first demo, whose rows have neither ``connector`` nor
``cached_tokens`` and whose manifest has neither ``run`` nor ``sealed``, and of the demo after it,
whose rows have no ``connector``.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.record.folder import RunFolder
from harness.record.row import SCHEMA
from harness.report.compare import compare
from harness.report.html import write_report
from harness.verdict.publish import Evidence, publish
from tests.places import DATA

RUNS = ("20261129T162315Z-demo-ccae8dec", "20261129T174919Z-demo-a2d14adc")
COUNTS = ("n", "p50_ms", "min_ms", "max_ms", "failed")
SOURCES = ("n", "prompt", "computed", "gpu_hit", "host_loaded")
RATIOS = ("ratio", "low", "high")


@pytest.fixture(params=RUNS)
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "old-runs" / request.param, tmp_path / request.param))


def numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """What was measured, of a ``summary.json`` of any version."""
    return {
        name: {
            "arms": {
                arm: [cell[key] for key in COUNTS] + [cell["tokens"][key] for key in SOURCES]
                for arm, cell in content["arms"].items()
            },
            "paired": [content["paired_ratio"][key] for key in RATIOS],
        }
        for name, content in summary["passes"].items()
    }


def sources(summary: dict[str, Any]) -> dict[str, list[Any]]:
    """Requests and times by where the document's KV came from."""
    return {
        name: [cell[key] for key in ("n", "p50_ms", "min_ms", "max_ms")]
        for name, cell in summary["sources"].items()
    }


def published(run: Path) -> tuple[Evidence, dict[str, Any]]:
    """What is published of the run today, and the summary that was published then."""
    then = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return publish(RunFolder(run)), then


def test_every_number_of_an_old_run_is_what_it_was(old_run: Path) -> None:
    evidence, then = published(old_run)
    today = evidence.summary.as_json()
    assert list(today["passes"]) == ["pass1-cold", "pass2-replay", "pass3-reverse"]
    assert numbers(today) == numbers(then)
    assert sources(today) == sources(then)


def test_every_request_of_an_old_run_is_reconciled_and_every_check_passes(old_run: Path) -> None:
    evidence, _ = published(old_run)
    assert evidence.reconciliation.findings == []
    assert evidence.reconciliation.requests_reconciled == 160
    residuals = [entry.residual for entry in evidence.reconciliation.requests]
    assert all(residual and not any(residual.values()) for residual in residuals)
    rows = [entry.row for entry in evidence.reconciliation.requests]
    assert {row.prompt_tokens for row in rows if row} == {2_068}


def test_an_old_run_is_reported_and_its_rows_are_todays(old_run: Path, tmp_path: Path) -> None:
    publish(RunFolder(old_run))
    (page,) = write_report(old_run, tmp_path / "report.html")
    text = re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))
    assert "160 of 160 planned requests are complete" in text
    rows = list(RunFolder(old_run).rows())
    assert {row.schema_version for row in rows} == {SCHEMA}
    assert {row.connector for row in rows} == {None}  # was not recorded, which is not "none"


def test_an_old_run_is_compared_with_one_like_it(tmp_path: Path) -> None:
    runs = []
    for name in (RUNS[1], "20261129T174920Z-demo-a2d14adc"):
        run = Path(shutil.copytree(DATA / "old-runs" / RUNS[1], tmp_path / name))
        for path in (*run.glob("journal-*"), run / "manifest.json"):
            path.write_text(path.read_text(encoding="utf-8").replace(RUNS[1], name))
        publish(RunFolder(run))
        runs.append(run)
    found = compare(runs)
    assert found.verdicts == ["supported", "supported"]
    ratios = found.ratios["pass2-replay"]
    assert [ratio and round(ratio.ratio, 2) for ratio in ratios] == [11.19, 11.19]
