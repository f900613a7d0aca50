"""Every arm on a GPU, with a real model's shape and weights made up: nothing is downloaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import MachineError
from harness.plan.experiment import installed_build
from harness.record.journal import read_journal
from servers.gpu.devices import survey

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(900)]

# Four documents of 2,048 tokens (128 blocks, 8 chunks of LMCache's); 319 usable blocks hold two and
# a half prompts, the host tier (2 GiB) all of them (4 x 224 MiB).
PLAN = """
schema = 1
name = "gpu-arms"
order = ["{label}"]
[model]
path = "Qwen/Qwen3-0.6B"
weights = "dummy"
[workload]
documents = 4
document_tokens = 2048
question_tokens = 20
output_tokens = 2
passes = ["fwd", "fwd", "rev"]
warmup_documents = 2
[server]
block_size = 16
num_gpu_blocks = 320
max_num_batched_tokens = 4096
max_model_len = 2304
eager = true
[host]
gib = 2
"""
REQUESTS = 2 + 3 * 4


@pytest.fixture(autouse=True)
def _gpu_build() -> None:
    try:
        build = installed_build()
    except MachineError:
        build = None
    if build != "gpu" or not survey().gpus:
        pytest.skip(
            "needs an NVIDIA GPU and vLLM's CUDA build: `make test` where nvidia-smi answers"
        )


@pytest.mark.parametrize(
    ("label", "connector"),
    [
        ("baseline", None),
        ("none", None),
        ("lmcache-mp", "LMCacheMPConnector"),
        ("lmcache", "LMCacheConnectorV1"),
        ("native", "OffloadingConnector"),
        ("simple", "SimpleCPUOffloadConnector"),
    ],
)
def test_every_request_of_an_arm_reconciles(
    label: str, connector: str | None, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.format(label=label))
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "run", "plan.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "results").iterdir()
    rows = read_journal(run / f"journal-01-{label}.jsonl")
    assert [row.complete for row in rows] == [True] * REQUESTS
    assert {row.connector for row in rows} == {connector or "none"}
    content = json.loads((run / "reconcile.json").read_text())
    assert content["requests_reconciled"] == REQUESTS
    replay = [row for row in rows if row.pass_name == "pass2-replay"]
    loaded = [bool(row.host_loaded) for row in replay]
    assert loaded == [connector is not None] * 4
    if label in ("lmcache-mp", "lmcache", "native"):  # bytes are counted, and more than the tokens'
        assert all((row.loaded_bytes or 0) >= (row.host_loaded or 0) * 114_688 for row in replay)
