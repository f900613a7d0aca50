import itertools
import random

import pytest

from sim.curves.policies import POLICIES, count_hits
from sim.curves.reference import prefix_keys
from sim.curves.stack import curve
from sim.curves.synthetic import random_trace
from sim.curves.tree import build_tree


def keys_of(seed: int, **sizes: int) -> list[list[int]]:
    trace = random_trace(seed, **sizes)
    return prefix_keys(trace.path(r) for r in range(len(trace.requests)))


def single(text: str) -> list[list[int]]:
    """Prompts of one block each, named by letters."""
    return [[ord(letter)] for letter in text]


def test_lru_replayed_is_the_stack_curve() -> None:
    for seed in range(15):
        trace = random_trace(seed, n_requests=30)
        found = curve(build_tree(trace))
        for capacity in range(len(found.hits) + 1):
            assert count_hits(keys_of(seed, n_requests=30), capacity, "lru") == found.at(capacity)


def test_each_policy_by_hand() -> None:
    # Capacity 2. "abacb": LRU evicts b for c; FIFO evicts a; MRU evicts a, the youngest used.
    assert count_hits(single("abacb"), 2, "lru") == 1
    assert count_hits(single("abacb"), 2, "fifo") == 2
    assert count_hits(single("abacb"), 2, "mru") == 2
    # a was used twice, so LFU evicts b for c and c for d: a stays.
    assert count_hits(single("aabcda"), 2, "lfu") == 2
    assert count_hits(single("aabcda"), 2, "lru") == 1
    # ARC too keeps what was used twice through a scan.
    assert count_hits(single("aabcdea"), 2, "arc") == 2


def test_arc_learns_from_its_ghosts() -> None:
    # b leaves as a ghost of the recency list; its return is a miss that enters as frequent, so the
    # scan x y z does not push it out again.
    assert count_hits(single("abcbxyzb"), 2, "arc") >= 1


def test_belady_by_hand() -> None:
    # Capacity 2, "abcab": after c, keeping a and b (c is never used again) hits both.
    assert count_hits(single("abcab"), 2, "belady") == 2
    assert count_hits(single("abcab"), 1, "belady") == 1
    assert count_hits(single("abcab"), 0, "belady") == 0


def best_by_trying(paths: list[list[int]], capacity: int) -> int:
    """The most hits of any choice of what to keep after each request."""
    states = {frozenset[int](): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = next((i for i, key in enumerate(path) if key not in kept), len(path))
            room = sorted(kept | set(path))
            for choice in itertools.combinations(room, min(capacity, len(room))):
                state = frozenset(choice)
                after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


def test_belady_is_what_trying_everything_finds() -> None:
    for seed in range(25):
        paths = keys_of(seed, n_requests=7, longest=3)
        for capacity in (1, 2, 3):
            assert count_hits(paths, capacity, "belady") == best_by_trying(paths, capacity), (
                seed,
                capacity,
            )


def test_no_policy_beats_belady_and_none_hits_without_room() -> None:
    for seed in range(10):
        paths = keys_of(seed, n_requests=40)
        for policy in POLICIES:
            assert count_hits(paths, 0, policy) == 0
            for capacity in (1, 5, 20, 60):
                assert count_hits(paths, capacity, policy) <= count_hits(paths, capacity, "belady")


def test_with_room_for_everything_every_policy_hits_what_there_is_to_hit() -> None:
    paths = keys_of(4)
    everything = len({key for path in paths for key in path})
    ideal = sum(map(len, paths)) - everything
    for policy in POLICIES:
        assert count_hits(paths, everything, policy) == ideal
    assert count_hits(paths, everything, "belady") == ideal


def test_a_request_never_evicts_its_own_blocks_and_a_longer_one_keeps_its_head() -> None:
    paths = [[1, 2, 3, 4], [1, 2, 3, 4]]
    for policy in POLICIES:
        assert [count_hits(paths, c, policy) for c in range(6)] == [0, 1, 2, 3, 4, 4], policy


def test_every_policy_stays_within_its_capacity() -> None:
    # A policy that lost a block would raise inside; one that held too many would hit too often.
    for seed in range(30):
        draw = random.Random(seed)
        paths = keys_of(seed, n_requests=50, longest=8)
        for policy in POLICIES:
            assert 0 <= count_hits(paths, draw.randint(1, 12), policy) <= sum(map(len, paths))


def test_unknown_policies_and_capacities_below_0_are_refused() -> None:
    with pytest.raises(ValueError, match="policy 'clock' is not known; known: fifo, lru"):
        count_hits([], 1, "clock")
    with pytest.raises(ValueError, match="a capacity of -1"):
        count_hits([], -1, "lru")
    with pytest.raises(ValueError, match="a capacity of -1"):
        count_hits([], -1, "belady")
