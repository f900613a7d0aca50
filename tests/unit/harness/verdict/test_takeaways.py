from pathlib import Path
from typing import Any

import pytest

from harness.record.folder import RunFolder
from harness.verdict.publish import publish
from harness.verdict.takeaways import takeaways
from tests.folder import write_run


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    return publish(RunFolder(write_run(tmp_path))).summary


def test_each_kind_of_chart_has_a_sentence_with_its_numbers(summary: dict[str, Any]) -> None:
    # 2 documents of 520 tokens; a replay loads 512 of them, in 10 ms instead of 100. The GPU tier
    # has 17 usable blocks of 32; two documents, a tail and the null block are 34.
    assert takeaways(summary) == {
        "ttft": "Median in pass2-replay: 100.0 ms with baseline (n 4), 10.0 ms with lmcache (n 4).",
        "paired": "In pass2-replay, 2 of 2 documents are faster with lmcache in every one of 2 "
        "blocks, 0 slower.",
        "sources": "Prompt tokens in pass2-replay: baseline 100.0% computed, 0.0% GPU hit, 0.0% "
        "host-loaded; lmcache 1.5% computed, 0.0% GPU hit, 98.5% host-loaded.",
        "cliff": "baseline is predicted to recompute 100.0% of pass2-replay with this plan's 544 "
        "tokens of GPU tier, and the least, 1.5%, from 1,056 on.",
        "timeline": "4 sessions in 30.0 min.",
    }


def test_documents_that_differ_by_block_are_neither_faster_nor_slower(
    summary: dict[str, Any],
) -> None:
    summary["passes"]["pass2-replay"]["paired_ratio"]["documents"][0].update(low=0.9)
    assert "1 of 2 documents are faster" in takeaways(summary)["paired"]
    assert takeaways(summary)["paired"].endswith("0 slower; the others differ by block.")


def test_no_sentence_is_made_from_an_empty_cell(summary: dict[str, Any]) -> None:
    summary["passes"] = {}
    summary["cliff"] = None
    for session in summary["sessions"]:
        session["spans"] = []
    assert takeaways(summary) == {}
