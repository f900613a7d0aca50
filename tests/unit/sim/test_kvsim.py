import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.kvsim import LRUCache, TwoTierCache
from tests.places import ROOT

ACCESSES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=60)


def filled(capacity: int, **sizes: int) -> LRUCache:
    cache = LRUCache(capacity)
    for key, size in sizes.items():
        assert cache.access(key, size) is False
    return cache


def test_a_hit_becomes_the_most_recent():
    cache = filled(10, a=3, b=3, c=3)
    assert cache.access("a", 3) is True
    assert cache.keys() == ["b", "c", "a"]
    assert cache.used == 9


def test_asking_whether_a_key_is_stored_changes_no_order():
    cache = filled(10, a=3, b=3)
    assert "a" in cache
    assert "z" not in cache
    assert cache.keys() == ["a", "b"]


def test_a_miss_evicts_as_many_of_the_oldest_as_it_needs_and_no_more():
    cache = filled(10, a=3, b=3, c=3)  # 9 used; 6 more need a and b gone (3 + 6 = 9)
    assert cache.access("d", 6) is False
    assert cache.keys() == ["c", "d"]
    assert cache.used == 9


# A73: capacity edges
def test_an_entry_that_fills_the_capacity_exactly_is_stored():
    cache = filled(10, a=4, b=6)
    assert (cache.keys(), cache.used) == (["a", "b"], 10)


def test_an_entry_larger_than_the_capacity_is_not_stored_and_evicts_nothing():
    cache = filled(10, a=4, b=6)
    assert cache.access("c", 11) is False
    assert (cache.keys(), cache.used) == (["a", "b"], 10)


def test_on_a_hit_the_stored_size_stays():
    cache = filled(10, a=4)
    assert cache.access("a", 99) is True
    assert cache.used == 4


@pytest.mark.parametrize("size", [0, 1])
def test_capacity_zero_stores_nothing(size: int):
    cache = LRUCache(0)
    assert [cache.access("a", size), cache.access("a", size)] == [False, False]
    assert (cache.keys(), cache.used) == ([], 0)


def test_an_entry_of_size_zero_fits_a_full_cache():
    cache = filled(5, a=5, b=0)
    assert (cache.keys(), cache.used) == (["a", "b"], 5)


@pytest.mark.parametrize("capacity", [-1, float("nan")])
def test_a_negative_capacity_is_refused(capacity: int):
    with pytest.raises(ValueError, match=r"capacity is .*at least 0"):
        LRUCache(capacity)


@pytest.mark.parametrize("key", ["a", "new"])
def test_a_negative_size_is_refused_and_changes_nothing(key: str):
    cache = filled(10, a=4, b=4)
    with pytest.raises(ValueError, match=r"size of .*at least 0"):
        cache.access(key, -1)
    assert (cache.keys(), cache.used) == (["a", "b"], 8)


def test_rounding_of_fractional_sizes_leaves_no_dust_in_an_emptied_cache():
    # 0.2 + 0.6 - 0.2 - 0.6 is 1.1e-16 in floating point, and 0.8 + 1.1e-16 would not fit 0.8.
    cache = filled(0.8, a=0.2, b=0.6)
    assert cache.access("c", 0.8) is False
    assert (cache.keys(), cache.used) == (["c"], 0.8)


@given(capacity=st.integers(0, 20), accesses=ACCESSES)
def test_every_step_agrees_with_a_naive_list_of_entries(
    capacity: int, accesses: list[tuple[int, int]]
):
    cache = LRUCache(capacity)
    entries: list[tuple[int, int]] = []  # (key, size), oldest first
    for key, size in accesses:
        held = [entry for entry in entries if entry[0] == key]
        assert cache.access(key, size) is bool(held)
        if held:
            entries = [entry for entry in entries if entry[0] != key] + held
        elif 0 < capacity >= size:
            while sum(stored for _, stored in entries) > capacity - size:
                entries = entries[1:]
            entries = [*entries, (key, size)]
        assert cache.keys() == [key for key, _ in entries]
        assert cache.used == sum(stored for _, stored in entries) <= capacity


def test_a_gpu_hit_leaves_the_cpu_order_untouched():
    tiers = TwoTierCache(10, 10)
    assert [tiers.access(key, 4) for key in "aba"] == ["miss", "miss", "gpu"]
    assert tiers.gpu.keys() == ["b", "a"]
    assert tiers.cpu.keys() == ["a", "b"]


def test_a_cpu_hit_becomes_the_most_recent_there_and_is_loaded_into_the_gpu():
    tiers = TwoTierCache(4, 10)  # the GPU holds one of the two
    assert [tiers.access(key, 4) for key in "aba"] == ["miss", "miss", "cpu"]
    assert tiers.gpu.keys() == ["a"]
    assert tiers.cpu.keys() == ["b", "a"]


def test_a_miss_is_stored_in_both_tiers():
    tiers = TwoTierCache(10, 20)
    assert tiers.access("a", 7) == "miss"
    assert (tiers.gpu.used, tiers.cpu.used) == (7, 7)


def test_a_document_too_large_for_the_gpu_still_hits_in_the_cpu_tier():
    tiers = TwoTierCache(4, 10)
    assert [tiers.access("a", 5), tiers.access("a", 5)] == ["miss", "cpu"]
    assert tiers.gpu.keys() == []


@given(capacity=st.integers(0, 20), accesses=ACCESSES)
def test_a_cpu_capacity_of_zero_makes_it_a_one_tier_cache(
    capacity: int, accesses: list[tuple[int, int]]
):
    tiers, alone = TwoTierCache(capacity, 0), LRUCache(capacity)
    for key, size in accesses:
        assert tiers.access(key, size) == ("gpu" if alone.access(key, size) else "miss")
    assert tiers.gpu.keys() == alone.keys()


@pytest.mark.parametrize(
    ("folder", "module"), [(ROOT / "sim", "kvsim"), (ROOT, "sim.kvsim")], ids=["sim", "checkout"]
)
def test_it_imports_from_the_folder_and_from_a_checkout(folder: Path, module: str, tmp_path: Path):
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from {module} import LRUCache"
    program += "; cache = LRUCache(2); print(cache.access('a', 2), cache.access('a', 2))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False True\n", "")
