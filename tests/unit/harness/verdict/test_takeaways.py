from pathlib import Path

import pytest

from harness.record.folder import RunFolder
from harness.verdict.publish import publish
from harness.verdict.schema import Summary
from harness.verdict.takeaways import takeaways_of
from tests.folder import write_run


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return publish(RunFolder(write_run(tmp_path))).summary


def sentences(summary: Summary) -> dict[str, str]:
    return takeaways_of(summary, summary.decision.pass_name, summary.cliff)


def test_each_kind_of_chart_has_a_sentence_with_its_numbers(summary: Summary) -> None:
    # 2 documents of 520 tokens; a replay loads 512 of them, in 10 ms instead of 100. The GPU tier
    # has 17 usable blocks of 32; two documents, a tail and the null block are 34.
    assert sentences(summary) == {
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
    summary: Summary,
) -> None:
    content = summary.as_json()
    content["passes"]["pass2-replay"]["paired_ratio"]["documents"][0].update(low=0.9)
    said = sentences(Summary.model_validate(content))["paired"]
    assert "1 of 2 documents are faster" in said
    assert said.endswith("0 slower; the others differ by block.")


def test_no_sentence_is_made_from_an_empty_cell(summary: Summary) -> None:
    silent = [session.model_copy(update={"spans": []}) for session in summary.sessions]
    empty = summary.model_copy(update={"passes": {}, "cliff": None, "sessions": silent})
    assert sentences(empty) == {}
