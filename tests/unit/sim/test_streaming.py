import random

from sim.streaming import DigestKeys, segment_ids
from sim.tiers.prefix_keys import PrefixKeys


def test_digests_name_the_same_prefixes_equal_as_the_exact_table_does():
    rng = random.Random(3)
    table, digests = PrefixKeys(4), DigestKeys(4)
    exact: list[int] = []
    hashed: list[int] = []
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(24))]
        exact += table.of(tokens)
        hashed += digests.of(tokens)
    assert len(set(exact)) > 50
    assert len(exact) == len(hashed)
    assert len(set(zip(exact, hashed, strict=True))) == len(set(exact)) == len(set(hashed))


def test_a_block_is_named_with_everything_before_it():
    keys = DigestKeys(2)
    assert keys.of([1, 2, 3, 4])[1] != keys.of([9, 9, 3, 4])[1]
    assert keys.of([1, 2, 3, 4]) == keys.of([1, 2, 3, 4, 5])
    assert keys.of([1]) == []


def test_a_fresh_key_is_no_digest_and_never_repeats():
    keys = DigestKeys(1)
    named = set(keys.of(range(100)))
    fresh = {keys.fresh() for _ in range(100)}
    assert len(fresh) == 100
    assert not fresh & named


def test_a_segments_ids_depend_on_its_name_and_grow_with_its_length():
    assert segment_ids("a", 9)[:4] == segment_ids("a", 4)
    assert not set(segment_ids("a", 1000)) & set(segment_ids("b", 1000))
    assert segment_ids("a", 1).start >= 2**32
    assert segment_ids("", 1).stop < 2**63
