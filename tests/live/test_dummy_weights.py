"""A shape and no weights, on the real engine: a config.json is all that a run needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.tinymodel import CONFIG

pytestmark = [pytest.mark.live, pytest.mark.alone]

PLAN = """
schema = 1
name = "shape-only"
order = ["baseline"]
[model]
path = "shape"
[workload]
documents = 2
document_tokens = 256
question_tokens = 8
output_tokens = 2
passes = ["fwd", "fwd"]
warmup_documents = 1
seed = 1
[server]
block_size = 32
num_gpu_blocks = 60
max_num_batched_tokens = 512
max_model_len = 320
[host]
gib = 0.1
"""


def test_a_folder_with_nothing_but_a_config_is_measured_with_dummy_weights(tmp_path: Path):
    # More words than the tiny model has: the tokenizer that answers is the one written for this.
    (tmp_path / "shape").mkdir()
    config = CONFIG | {"num_hidden_layers": 2, "vocab_size": 3000}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    (tmp_path / "p.toml").write_text(PLAN)
    command = [sys.executable, "-c", "from harness.cli import main; main()", "run", "p.toml"]
    done = subprocess.run(
        [*command, "--dummy-weights"], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: outputs-meaningless" in done.stderr
    [run] = (tmp_path / "results").iterdir()
    rows = [json.loads(line) for line in (run / "ttft.jsonl").read_text().splitlines()]
    assert [(row["pass"], row["computed"], row["gpu_hit"]) for row in rows] == [
        ("pass1-cold", 264, 0), ("pass1-cold", 264, 0),
        ("pass2-replay", 8, 256), ("pass2-replay", 8, 256),
    ]  # fmt: skip
    assert all(row["complete"] for row in rows)
    [session] = json.loads((run / "manifest.json").read_text())["sessions"].values()
    argv = session["commands"][0]["argv"]
    assert argv[argv.index("--load-format") + 1] == "dummy"
