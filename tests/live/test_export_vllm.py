"""An export read back by the peer it is for."""

from typing import Any

import pytest

from harness.report.export import vllm_bench
from tests.factory import make_row

pytestmark = pytest.mark.live


def test_vllms_own_timeline_reads_the_exported_requests() -> None:
    plot = pytest.importorskip("vllm.benchmarks.plot", reason="vLLM is not installed")
    rows = [
        make_row(sent_unix_ns=1_000_000_000_000_000_000),
        make_row(doc=1, sent_unix_ns=1_000_000_001_000_000_000),
    ]
    result = vllm_bench(rows, model="tiny")
    # As vllm/benchmarks/serve.py (0.32) hands a result to its timeline.
    names = {
        "start_time": "start_times", "ttft": "ttfts", "itl": "itls", "latency": "latencies",
        "prompt_len": "input_lens", "output_tokens": "output_lens",
    }  # fmt: skip
    requests: list[dict[str, Any]] = [
        {one: result[many][i] for one, many in names.items()} for i in range(2)
    ]
    segments = plot.construct_timeline_data(requests, [0.025, 0.05], ["fast", "medium", "slow"])
    assert [(s["type"], s["start"], s["end"]) for s in segments] == [
        ("TTFT", "00:00:00.000", "00:00:00.100"),
        ("fast", "00:00:00.100", "00:00:00.110"),
        ("TTFT", "00:00:01.000", "00:00:01.100"),
        ("fast", "00:00:01.100", "00:00:01.110"),
    ]
