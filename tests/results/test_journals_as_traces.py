"""Every committed journal as a trace: the curve at the run's own GPU size against what was measured."""

from pathlib import Path

import pytest

from harness.record.folder import RunFolder
from harness.traces.curve import run_curve
from harness.traces.load import TraceOptions, load
from harness.traces.serving import Serving
from tests.places import ROOT

JOURNALS = [
    folder.journal(session)
    for path in sorted((ROOT / "results").glob("**/plan.toml"))
    for folder in [RunFolder(path.parent)]
    for session in folder.read_manifest().sessions
    # The control has a GPU tier of another size.
    if not session.endswith("control")
]


def test_there_are_journals_of_every_run() -> None:
    assert len(JOURNALS) >= 21


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_journals_gpu_hits_are_those_of_its_curve(journal: Path) -> None:
    folder = RunFolder(journal.parent)
    server = folder.read_plan().server
    measured = sum(
        row.gpu_hit or 0 for row in folder.session_rows(journal.stem.removeprefix("journal-"))
    )
    usable = server.num_gpu_blocks - 1
    point, less = run_curve(
        load(str(journal), TraceOptions(block_tokens=server.block_size)),
        Serving(last_token=True, decode=True),
        at=f"{usable},{usable - 1}",
        policies=["vllm"],
    ).json["points"]
    assert point["policies"]["vllm"] * server.block_size == measured
    # Partial last blocks cost at most one block of capacity; second copies one each.
    assert measured <= point["hit_blocks"] * server.block_size
    if folder.read_plan().workload.questions != "repeated":
        assert measured >= less["hit_blocks"] * server.block_size
