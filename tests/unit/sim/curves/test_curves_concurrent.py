import random

import numpy as np
import pytest

from scripts.curves_exact import random_events
from sim.curves.concurrent import concurrent_curve, events_of
from sim.curves.stack import curve
from sim.curves.synthetic import random_trace, trace_of
from sim.curves.tree import build_tree


def test_one_after_the_other_it_is_the_serial_curve() -> None:
    for seed in range(20):
        tree = build_tree(random_trace(seed, n_requests=30))
        events = [event for r in range(30) for event in (r, -1 - r)]
        found, exact_from = concurrent_curve(tree, events)
        serial = curve(tree).hits
        assert found.hits[: len(serial)].tolist() == serial.tolist()
        assert exact_from == max(tree.blocks_of_requests())


def test_a_prompt_that_runs_is_a_hit_for_those_that_start_meanwhile() -> None:
    tree = build_tree(trace_of([[1, 2], [1, 2], [9]]))
    found, exact_from = concurrent_curve(tree, [0, 1, 2, -1, -2, -3])
    assert exact_from == 3  # 1 2 held twice are two blocks, 9 is the third
    assert found.at(3) == 2


def test_blocks_in_use_stand_before_free_ones() -> None:
    # [1 2] is done and free; [5 6 7] runs; then 1 2 start again: they stand fourth and fifth.
    tree = build_tree(trace_of([[1, 2], [5, 6, 7], [1, 2]]))
    found, exact_from = concurrent_curve(tree, [0, -1, 1, 2, -2, -3])
    assert [found.at(c) for c in (3, 4, 5)] == [0, 1, 2]
    assert exact_from == 5


def test_a_block_is_as_recent_as_its_last_holders_finish() -> None:
    # Both hold 1; the first ends, then [8] comes and goes, then the second ends: 1 is newest.
    tree = build_tree(trace_of([[1], [1], [8], [1], [8]]))
    found, _ = concurrent_curve(tree, [0, 1, -1, 2, -3, -2, 3, -4, 4, -5])
    assert found.at(1) == 2  # the second and the fourth request find 1
    assert found.at(2) == 3


def test_generated_tokens_are_held_too_and_stand_behind_their_prompt() -> None:
    trace = trace_of([[1], [9], [1]])
    trace.requests.output_tokens[:] = 17  # 16 of them with a slot: one block of 16 more
    found, exact_from = concurrent_curve(build_tree(trace), [0, -1, 1, -2, 2, -3], decode=True)
    # Free when 1 returns: 9, its generated block, 1, its generated block.
    assert [found.at(c) for c in (2, 3)] == [0, 1]
    assert exact_from == 2


def test_compiled_and_plain_results_are_identical() -> None:
    for seed in range(10):
        tree = build_tree(random_trace(seed))
        events = random_events(60, seed)
        plain, plain_from = concurrent_curve(tree, events, compiled=False)
        fast, fast_from = concurrent_curve(tree, events, compiled=True)
        assert np.array_equal(plain.hits, fast.hits)
        assert plain_from == fast_from


def test_events_are_in_order_of_time_and_an_instant_frees_first() -> None:
    starts, finishes = np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 3.0])
    # 1 starts and ends at 1 s; at 2 s request 0 ends before 2 starts.
    assert events_of(starts, finishes).tolist() == [0, 1, -2, -1, 2, -3]


def test_an_order_that_is_none_is_refused() -> None:
    tree = build_tree(trace_of([[1], [2]]))
    for events in ([0, -1], [0, 1, -1, -1], [0, 0, -1, -2]):
        with pytest.raises(ValueError, match="each of 2 requests must start once and finish once"):
            concurrent_curve(tree, events)
    with pytest.raises(ValueError, match="request 1 finishes before it starts"):
        concurrent_curve(tree, [0, -2, 1, -1])


def test_more_room_never_hits_less() -> None:
    for seed in range(10):
        tree = build_tree(random_trace(seed))
        found, _ = concurrent_curve(tree, random_events(60, random.Random(seed).randrange(99)))
        assert (np.diff(found.hits) >= 0).all()
