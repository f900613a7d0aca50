import numpy as np
import pytest

from scripts.curves_exact import surface_against_reference
from sim.curves.stack import curve
from sim.curves.surface import surface
from sim.curves.synthetic import chat_trace, random_trace, trace_of
from sim.curves.tree import build_tree


def test_the_sources_of_every_token_by_hand() -> None:
    # Blocks of 16. After a (4 blocks) and b (2) the GPU's stack is b b a a a a; the host's, in
    # chunks of 2 blocks, is b a a. Then a again: 64 tokens.
    tree = build_tree(trace_of([[1, 2, 3, 4], [8, 9], [1, 2, 3, 4]]))
    found = surface(tree, [0, 3, 6], [0, 1, 2, 3], chunk_tokens=32)
    assert found.gpu_hit_tokens.tolist() == [[0] * 4, [16] * 4, [64] * 4]
    # One chunk holds b only, two hold a's first 32 tokens too, three all of it. The GPU's hit of
    # 16 tokens comes off what the host loads; a GPU that holds all leaves nothing to load.
    assert found.host_loaded_tokens.tolist() == [[0, 0, 32, 64], [0, 0, 16, 48], [0, 0, 0, 0]]
    assert found.prompt_tokens == 160


def test_a_chunk_that_no_prompt_fills_is_never_loaded() -> None:
    # 3 blocks of 16 are one chunk of 32; its 16 tokens behind it are computed again.
    tree = build_tree(trace_of([[1, 2, 3], [1, 2, 3]]))
    found = surface(tree, [0], [99], chunk_tokens=32)
    assert found.host_loaded_tokens.tolist() == [[32]]


def test_the_last_token_costs_the_gpu_a_block_and_the_host_a_token() -> None:
    tree = build_tree(trace_of([[1, 2], [1, 2]]))
    found = surface(tree, [0, 9], [0, 9], last_token=True)
    # GPU: floor(31 / 16) blocks. Host: 31 of 32 tokens, and 31 − 16 behind the GPU's hit.
    assert found.gpu_hit_tokens.tolist() == [[0, 0], [16, 16]]
    assert found.host_loaded_tokens.tolist() == [[0, 31], [0, 15]]


def test_no_mismatch_against_two_ordered_dicts() -> None:
    count = surface_against_reference(600)
    assert (count.mismatches, count.examples) == (0, [])
    assert count.with_hits > count.pairs // 3


def test_compiled_and_plain_surfaces_are_identical() -> None:
    for trace in [random_trace(seed) for seed in range(4)] + [chat_trace(2, n_accesses=20_000)]:
        tree = build_tree(trace)
        block = trace.requests.block_tokens
        results = [
            surface(
                tree, range(0, 400, 7), range(0, 300, 5), chunk_tokens=5 * block, compiled=compiled
            )
            for compiled in (False, True)
        ]
        assert np.array_equal(results[0].gpu_hit_tokens, results[1].gpu_hit_tokens)
        assert np.array_equal(results[0].host_loaded_tokens, results[1].host_loaded_tokens)


def test_the_gpu_side_is_the_curve_and_an_idle_gpu_leaves_the_hosts_curve() -> None:
    tree = build_tree(random_trace(5))
    found = surface(tree, [0, 3, 9, 50], [0, 2, 5, 40])
    hits = curve(tree)
    block = tree.requests.block_tokens
    assert (found.gpu_hit_tokens[:, 0] // block).tolist() == [hits.at(c) for c in (0, 3, 9, 50)]
    assert (found.host_loaded_tokens[0] // block).tolist() == [hits.at(c) for c in (0, 2, 5, 40)]


def test_a_host_tier_no_larger_than_the_gpus_loads_nothing_under_write_through() -> None:
    found = surface(build_tree(random_trace(8)), [10, 20], [10])
    assert found.host_loaded_tokens.tolist() == [[0], [0]]


def test_capacities_out_of_range_are_refused() -> None:
    tree = build_tree(random_trace(1))
    with pytest.raises(ValueError, match="GPU capacities"):
        surface(tree, [-1], [1])
    with pytest.raises(ValueError, match="host capacities"):
        surface(tree, [1], [])
    with pytest.raises(ValueError, match="a block of -4 tokens"):
        surface(tree, [1], [1], gpu_tokens=-4)
