"""The exact curves against vLLM's and LMCache's own classes, and the bands around them.

The comparisons and their full counts are those of ``scripts/curves_exact.py``; here a share runs.
A failure names the seed of its trace.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import curves_exact
from scripts.curves_exact import Count
from sim.curves.convert import convert
from sim.curves.stack import curve
from sim.curves.synthetic import chat_trace
from sim.curves.tree import build_tree

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None,
        reason="no vLLM with LMCache here: `make setup` installs an engine build",
    ),
]

PAIRS = 1_000


@pytest.mark.parametrize(
    "check",
    [
        curves_exact.against_block_pool,
        curves_exact.decode_against_block_pool,
        curves_exact.overlapping_against_block_pool,
        curves_exact.against_lmcache_policy,
        curves_exact.against_lmcache_simulator,
        curves_exact.partial_tails_against_block_pool,
    ],
)
def test_no_trace_and_capacity_disagrees_with_the_engines_class(
    check: Callable[[int], Count],
) -> None:
    count = check(PAIRS)
    assert (count.mismatches, count.examples) == (0, [])
    assert count.pairs >= PAIRS
    assert count.with_hits > count.pairs // 2  # agreeing on misses alone proves nothing


@pytest.mark.parametrize("check", [curves_exact.watermark_band, curves_exact.in_process_band])
def test_the_bands_hold_at_every_capacity(check: Callable[[int], Count]) -> None:
    count = check(300)
    assert (count.mismatches, count.examples) == (0, [])
    assert count.with_hits > count.pairs // 2


def test_a_curve_of_the_wrong_order_is_caught_by_the_same_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = curves_exact.curve
    monkeypatch.setattr(
        curves_exact, "curve", lambda tree, **settings: right(tree, forward=True, **settings)
    )
    assert curves_exact.against_block_pool(200).mismatches > 20
    monkeypatch.setattr(
        curves_exact, "curve", lambda tree, **settings: right(tree, **settings | {"forward": False})
    )
    assert curves_exact.against_lmcache_simulator(200).mismatches > 20


def test_lmcaches_simulator_reads_the_file_we_write_and_agrees_with_us(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulator = importlib.import_module("lmcache.tools.cache_simulator.simulator")
    tree = build_tree(chat_trace(3, n_accesses=20_000, sessions_at_once=20))
    file = tmp_path / "lookup_hashes_1.jsonl"
    assert convert(tree, "lmcache", file, chunk_tokens=32, kv_bytes_per_token=64) > 50
    events = simulator.load_lookup_events([tmp_path])
    chunk_bytes = simulator.compute_kv_bytes_per_chunk(events[0])
    assert chunk_bytes == 32 * 64
    found = curve(tree, unit_tokens=32, forward=True)
    for chunks in (10, 100, 400, 10_000):
        theirs = simulator.simulate(events, chunks * chunk_bytes, chunk_bytes)
        assert theirs["total_hit_tokens"] == found.at(chunks) * 32
    assert found.ideal > 0
