"""The demo's path on the real engines, at a size a test can afford: one A B block and the control."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record.journal import read_journal
from harness.record.row import Row
from servers.processes import leftovers

pytestmark = [pytest.mark.live, pytest.mark.timeout(600), pytest.mark.alone]

# Four documents of 768 tokens (24 blocks, 3 chunks) and 20 of question. A request holds 25 blocks,
# one of them un-hashed. 58 usable blocks are two documents (48), that un-hashed block, and 9 blocks
# of a third: 288 tokens, 32 more than one chunk.
PLAN = """
schema = 1
name = "live"
order = ["baseline", "lmcache-mp", "control"]
[workload]
documents = 4
document_tokens = 768
question_tokens = 20
output_tokens = 2
passes = ["fwd", "fwd", "rev"]
warmup_documents = 1
seed = 1
[server]
block_size = 32
num_gpu_blocks = 59
max_num_batched_tokens = 1024
max_model_len = 1024
[host]
gib = 0.25
[control]
num_gpu_blocks = 200
[arms.lmcache-mp]
tier = "lmcache-mp"
"""
CHUNK_BYTES = 256 * 12_288  # tokens a chunk x KV bytes a token of the tiny model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "plan.toml").write_text(PLAN)
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "run", "plan.toml"],
        cwd=folder,
        env={**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "LMCACHE_CHUNK_SIZE": "7"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    (created,) = (folder / "results").iterdir()
    return created


@pytest.fixture(scope="module")
def rows(run: Path) -> dict[tuple[str, str, int], Row]:
    found = [row for path in sorted(run.glob("journal-*.jsonl")) for row in read_journal(path)]
    assert len(found) == 3 * (1 + 3 * 4)
    assert all(row.complete for row in found)
    return {(row.config, row.pass_name, row.doc): row for row in found}


def sources(row: Row) -> tuple[int | None, int | None, int | None]:
    return (row.computed, row.gpu_hit, row.host_loaded)


def test_every_request_reconciles_with_residual_zero(run: Path) -> None:
    content = json.loads((run / "reconcile.json").read_text())
    assert content["requests_planned"] == content["requests_reconciled"] == 39
    assert content["findings"] == []
    assert all(set(r["residual"].values()) == {0} for r in content["requests"])


def test_the_replay_is_computed_without_the_tier_and_loaded_with_it(
    rows: dict[tuple[str, str, int], Row],
) -> None:
    for doc in range(4):
        assert sources(rows["baseline", "pass2-replay", doc]) == (788, 0, 0)
        assert sources(rows["lmcache-mp", "pass2-replay", doc]) == (20, 0, 768)
        assert rows["lmcache-mp", "pass2-replay", doc].loaded_bytes == 3 * CHUNK_BYTES


def test_the_reverse_pass_has_gpu_hits_one_partial_hit_and_host_loads(
    rows: dict[tuple[str, str, int], Row],
) -> None:
    reverse = [sources(rows["lmcache-mp", "pass3-reverse", doc]) for doc in (3, 2, 1, 0)]
    assert reverse == [(20, 768, 0), (20, 768, 0), (20, 288, 480), (20, 0, 768)]
    # 480 tokens are counted, yet whole chunks move: 288 tokens end inside the second chunk.
    assert rows["lmcache-mp", "pass3-reverse", 1].loaded_bytes == 2 * CHUNK_BYTES
    assert sources(rows["baseline", "pass3-reverse", 1]) == (500, 288, 0)


def test_the_control_holds_everything_in_the_gpu_and_loads_nothing(
    rows: dict[tuple[str, str, int], Row],
) -> None:
    for name in ("pass2-replay", "pass3-reverse"):
        assert [sources(rows["control", name, doc]) for doc in range(4)] == [(20, 768, 0)] * 4


def test_the_same_prompt_gets_the_same_output_in_every_arm_and_prompts_differ(
    rows: dict[tuple[str, str, int], Row],
) -> None:
    for (_, name, doc), row in rows.items():
        assert row.output_sha256 == rows["baseline", name, doc].output_sha256
    assert len({row.output_sha256 for row in rows.values()}) > 5


def test_no_process_of_the_run_is_left(run: Path) -> None:
    events = [json.loads(line) for line in (run / "processes.jsonl").read_text().splitlines()]
    started = {event["pid"] for event in events if event["event"] == "started"}
    assert len(started) >= 5  # vLLM and its engine core three times, LMCache twice
    assert leftovers(run / "processes.jsonl") == []
