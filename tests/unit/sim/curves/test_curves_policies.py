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


def test_arc_brings_a_ghost_back_as_frequent() -> None:
    # At 2: 3 is used twice; 2 and then 0 come once, and 0 leaves for 2 as a ghost. 0's return sets
    # the target to 1 and takes the place of 3, since only 2 was seen once: 3 misses.
    assert count_hits([[0], [3], [3], [2], [0], [3]], 2, "arc") == 1


class PaperArc:
    """ARC(c) of Megiddo and Modha (FAST 2003), figure 4, line by line; lists run from LRU to MRU."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def asked_for(self, x: int) -> bool:
        """Whether ``x`` is a hit."""
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:  # case II
            self.p = min(self.c, self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            self.replace(x)
            b1.remove(x)
            t2.append(x)
            return False
        if x in b2:  # case III
            self.p = max(0, self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            self.replace(x)
            b2.remove(x)
            t2.append(x)
            return False
        if len(t1) + len(b1) == self.c:  # case IV
            if len(t1) < self.c:
                b1.pop(0)
                self.replace(x)
            else:
                t1.pop(0)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= self.c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * self.c:
                b2.pop(0)
            self.replace(x)
        t1.append(x)
        return False


def test_arc_is_that_of_the_paper() -> None:
    n_hits = 0
    for seed in range(1_500):
        draw = random.Random(seed)
        capacity, n_names = draw.randint(1, 8), draw.randint(2, 20)
        asked = [int(n_names * draw.random() ** 2) for _ in range(draw.randint(5, 120))]
        paper = PaperArc(capacity)
        expected = sum(paper.asked_for(x) for x in asked)
        assert count_hits([[x] for x in asked], capacity, "arc") == expected, (seed, capacity)
        n_hits += expected
    assert n_hits > 10_000


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
