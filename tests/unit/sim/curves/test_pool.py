import numpy as np

from sim.curves.pool import pool_hits
from sim.curves.stack import curve
from sim.curves.synthetic import random_trace, trace_of
from sim.curves.tree import build_tree


def test_a_prompt_found_whole_computes_its_last_block_and_keeps_it_twice() -> None:
    # 4 usable blocks: a and b; the second ab finds a alone, and b is there twice. c takes the
    # last free one, d the older b; ab then finds a, and ab with e finds both.
    tree = build_tree(trace_of([[1, 2], [1, 2], [3], [4], [1, 2], [1, 2, 5]]))
    assert pool_hits(tree, 4).tolist() == [0, 1, 0, 0, 1, 2]


def test_a_request_that_does_not_fit_is_not_served() -> None:
    tree = build_tree(trace_of([[1, 2], [1, 2, 3], [1, 2]]))
    assert pool_hits(tree, 2).tolist() == [0, 0, 1]


def test_without_second_copies_the_pool_is_the_stack() -> None:
    # Prompts end 1 token after their last block, so none is found whole; the partial block costs
    # at most one block of capacity.
    for seed in range(5):
        drawn = random_trace(seed, n_requests=30)
        trace = trace_of([drawn.path(r) for r in range(30)], block_tokens=16)
        trace.requests.input_tokens[:] = np.diff(trace.offsets) * trace.requests.block_tokens + 1
        tree = build_tree(trace)
        found = curve(tree, last_token=True)
        longest = int(tree.blocks_of_requests().max()) + 1
        for usable in range(longest, longest + 20):
            assert found.at(usable - 1) <= pool_hits(tree, usable).sum() <= found.at(usable)
