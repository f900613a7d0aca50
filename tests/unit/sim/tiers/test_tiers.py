import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.tiers.gpu_pool import GpuPool
from sim.tiers.host import NotPredictable, align_up
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.prefix_keys import PrefixKeys
from sim.tiers.spec import engine_note, engine_rules


def _serve(pool: GpuPool, keys: list[int], *, n_blocks: int) -> list[int]:
    """A request that reuses nothing: ``n_blocks`` blocks, of which the first get ``keys``."""
    blocks = pool.take([], n_blocks)
    pool.name(blocks, keys)
    pool.free(blocks)
    return blocks


# --- rules by version


@pytest.mark.parametrize(
    ("engine", "hashless_first", "native_recency"),
    [
        ("0.16.0", False, None),
        ("0.23.0+cpu", False, None),
        ("0.24.0", True, None),
        ("0.30.0", True, None),
        ("0.31.0", True, "finish"),
        ("0.32.0", True, "finish"),
        ("0.33.0rc1", True, "access"),
        ("1.0", True, "access"),
    ],
)
def test_a_version_decides_the_free_rule_and_the_native_recency(
    engine, hashless_first, native_recency
):
    assert engine_rules(engine) == (hashless_first, native_recency)


def test_an_engine_that_counts_no_sources_is_refused_and_a_word_is_no_version():
    with pytest.raises(NotPredictable, match=r"0\.15\.1 does not count .* 0\.16 is the oldest"):
        engine_rules("0.15.1")
    with pytest.raises(ValueError, match="'newest' is no vLLM version"):
        engine_rules("newest")


def test_an_engine_newer_than_any_compared_is_said_to_be_taken_for_the_newest():
    assert engine_note("0.33.9") is None
    assert engine_note("0.34.0") == (
        "vLLM 0.34.0: rules of 0.33 assumed; the newest compared is 0.33"
    )
    assert engine_rules("0.34.0") == engine_rules("0.33.0")
    with pytest.raises(ValueError, match="'newest' is no vLLM version"):
        engine_note("newest")


def test_an_engine_older_than_any_compared_is_said_to_be_taken_for_the_oldest():
    assert engine_note("0.23.0") is None
    assert engine_note("0.22.1") == (
        "vLLM 0.22.1: rules of 0.23 assumed; the oldest compared is 0.23"
    )
    assert engine_rules("0.22.1") == engine_rules("0.23.0")


# --- prefix keys


def test_a_key_names_the_whole_prefix_not_the_block():
    keys = PrefixKeys(2)
    a, b = keys.of([1, 2, 3, 4]), keys.of([9, 9, 3, 4])
    assert a[1] != b[1]  # the same block (3, 4) after another first block
    assert keys.of([1, 2, 3, 4, 5, 6])[:2] == a


def test_a_partial_last_block_has_no_key():
    keys = PrefixKeys(4)
    assert [len(keys.of(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_fresh_key_equals_no_other():
    keys = PrefixKeys(1)
    seen = [keys.fresh(), *keys.of([5, 6]), keys.fresh()]
    assert len(set(seen)) == 4


def test_blocks_of_no_tokens_are_refused():
    with pytest.raises(ValueError, match="0 tokens"):
        PrefixKeys(0)


# --- GPU pool


def test_the_null_block_is_never_handed_out():
    pool = GpuPool(4)
    assert pool.usable == 3
    assert pool.take([], 3) == [1, 2, 3]


def test_never_used_blocks_go_before_cached_ones_and_a_tail_before_its_prefix():
    pool = GpuPool(5)
    _serve(pool, [10, 11], n_blocks=2)  # blocks 1, 2
    assert pool.free_order() == (3, 4, 2, 1)


def test_a_block_taken_from_the_head_forgets_its_key_and_the_prefix_before_it_stays():
    pool = GpuPool(5)
    _serve(pool, [10, 11], n_blocks=2)
    pool.take([], 3)  # 3, 4, then 2: the tail
    assert pool.longest_hit([10, 11]) == [1]
    assert pool.hashed() == {1: 10}


def test_blocks_without_a_key_are_reused_first_since_vllm_0_24():
    pool = GpuPool(5)
    _serve(pool, [10, 11], n_blocks=3)  # block 3 is partial, 4 was never used
    assert pool.free_order() == (3, 4, 2, 1)


def test_several_blocks_without_a_key_are_reused_last_one_first():
    pool = GpuPool(6)
    _serve(pool, [10], n_blocks=4)
    assert pool.free_order() == (4, 3, 2, 5, 1)


def test_up_to_vllm_0_23_blocks_without_a_key_wait_their_turn():
    pool = GpuPool(5, hashless_first=False)
    _serve(pool, [10, 11], n_blocks=3)
    assert pool.free_order() == (4, 3, 2, 1)


def test_a_key_on_two_blocks_is_hit_on_the_first_named_and_survives_its_loss():
    pool = GpuPool(6)
    _serve(pool, [10], n_blocks=1)  # block 1
    _serve(pool, [10], n_blocks=1)  # block 2: vLLM does not de-duplicate
    assert pool.free_order() == (3, 4, 5, 1, 2)
    assert pool.longest_hit([10]) == [1]
    pool.take([], 4)  # 3, 4, 5, 1
    assert pool.longest_hit([10]) == [2]
    pool.take([], 1)  # 2
    assert pool.longest_hit([10]) == []


def test_a_key_loses_a_later_block_and_stays_on_the_first():
    pool = GpuPool(4)
    for _ in range(3):
        _serve(pool, [10], n_blocks=1)
    pool.free(pool.take(pool.longest_hit([10]), 1))  # block 1 goes behind 2 and 3
    pool.take([], 1)
    assert pool.hashed() == {1: 10, 3: 10}
    assert pool.longest_hit([10]) == [1]
    pool.take([], 2)
    assert (pool.hashed(), pool.longest_hit([10])) == ({}, [])


def test_a_hit_stops_at_the_first_missing_key():
    pool = GpuPool(9)
    _serve(pool, [10, 11, 12], n_blocks=3)
    assert pool.longest_hit([10, 99, 12]) == [1]
    assert pool.longest_hit([99, 10]) == []


def test_a_request_cannot_evict_the_prefix_it_hits():
    pool = GpuPool(3)
    _serve(pool, [10], n_blocks=1)  # free: 2, 1
    assert pool.take(pool.longest_hit([10]), 2) == [1, 2]


def test_a_hit_moves_its_blocks_to_the_end_of_the_queue():
    pool = GpuPool(4)
    _serve(pool, [10], n_blocks=1)
    _serve(pool, [20], n_blocks=1)
    _serve(pool, [30], n_blocks=1)
    pool.free(pool.take(pool.longest_hit([10]), 1))
    assert pool.free_order() == (2, 3, 1)


def test_a_pool_of_any_size_costs_what_is_used_of_it():
    # A list of 2**40 blocks would not fit any memory.
    pool = GpuPool(2**40)
    assert _serve(pool, [10, 11], n_blocks=3) == [1, 2, 3]
    assert pool.n_free == 2**40 - 1
    hit = pool.longest_hit([10, 11])
    assert pool.take(hit, 5) == [1, 2, 3, 4, 5]  # 3 came back without a key, 4 was never used


def test_taking_exactly_all_blocks_works_and_one_more_is_refused_unchanged():
    pool = GpuPool(4)
    _serve(pool, [10], n_blocks=1)
    hit = pool.longest_hit([10])
    with pytest.raises(ValueError, match=r"request of 4 blocks, 1 of them cached.*3 of 3 usable"):
        pool.take(hit, 4)
    assert pool.free_order() == (2, 3, 1)
    assert len(pool.take(hit, 3)) == 3


@pytest.mark.parametrize("num_gpu_blocks", [-1, 0, 1])
def test_a_pool_with_no_usable_block_is_refused(num_gpu_blocks):
    with pytest.raises(ValueError, match=f"{num_gpu_blocks} GPU blocks"):
        GpuPool(num_gpu_blocks)


@settings(deadline=None)
@given(
    st.integers(2, 12),
    st.booleans(),
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 2)), max_size=25),
)
def test_no_block_is_ever_lost_doubled_or_left_with_a_stale_key(num_gpu_blocks, rule, requests):
    pool, names = GpuPool(num_gpu_blocks, hashless_first=rule), PrefixKeys(1)
    for tokens, n_partial in requests:
        keys = names.of(tokens)[: pool.usable - n_partial if pool.usable > n_partial else 0]
        hit = pool.longest_hit(keys)
        blocks = pool.take(hit, min(pool.usable, len(keys) + n_partial))
        assert pool.n_free + len(blocks) == pool.usable
        assert set(blocks).isdisjoint(pool.free_order())
        pool.name(blocks, keys)
        pool.free(blocks)
        assert sorted(pool.free_order()) == list(range(1, num_gpu_blocks))
        hashed = pool.hashed()
        # What was just served is hit in full, on blocks that say so themselves.
        found = pool.longest_hit(keys)
        assert [hashed[block] for block in found] == keys
        assert found[: len(hit)] == hit


# --- host store


def _store(chunks: HostChunks, *keys: int) -> int:
    stored = chunks.store(keys)
    chunks.touch(keys)
    return stored


def test_a_lookup_stops_at_the_first_missing_chunk():
    host = HostChunks(9)
    _store(host, 1, 2, 4)
    assert host.longest_hit([1, 2, 3, 4]) == 2
    assert host.longest_hit([3, 1]) == 0


def test_only_chunks_not_yet_resident_are_written():
    host = HostChunks(9)
    assert _store(host, 1, 2) == 2
    assert _store(host, 1, 2, 3) == 1
    assert len(host) == 3


def test_a_batch_that_just_fits_is_written_and_one_chunk_more_loses_all_of_it():
    host = HostChunks(4)
    _store(host, 1, 2)
    assert _store(host, 3, 4, 5) == 0  # 2 free, 3 needed; nothing is evicted to make room
    assert sorted(host.recency()) == [1, 2]
    assert _store(host, 3, 4) == 2
    assert len(host) == 4


def test_resident_chunks_of_a_batch_need_no_room():
    host = HostChunks(3)
    _store(host, 1, 2)
    assert _store(host, 1, 2, 3) == 1


def test_a_touch_makes_the_first_chunk_the_most_recent_and_skips_the_absent():
    host = HostChunks(9)
    _store(host, 1, 2, 3)
    _store(host, 7, 8)
    assert host.recency() == (3, 2, 1, 8, 7)
    host.touch([1, 2, 99])
    assert host.recency() == (3, 8, 7, 2, 1)


def test_usage_just_below_the_watermark_evicts_nothing():
    host = HostChunks(10)
    _store(host, *range(7))
    assert host.settle() == 0  # 0.7 < 0.8


def test_usage_at_the_watermark_evicts_one_fifth_of_the_chunks_rounded_down():
    host = HostChunks(10)
    _store(host, *range(8))
    assert host.settle() == 1  # 0.8 >= 0.8; int(8 * 0.2) = 1; then 0.7
    assert host.recency() == (6, 5, 4, 3, 2, 1, 0)  # 7, the tail, went first
    assert host.evicted == 1


def test_ticks_repeat_until_usage_is_below_the_watermark():
    host = HostChunks(10)
    _store(host, *range(10))
    assert host.settle() == 3  # 10 -> 8 (int(2.0)) -> 7 (int(1.6)); 0.8 is not below 0.8


def test_a_tick_evicts_at_least_one_chunk():
    host = HostChunks(2, watermark=0.5)
    _store(host, 1)
    assert host.settle() == 1  # int(1 * 0.2) = 0
    assert len(host) == 0


def test_the_least_recent_prompt_is_evicted_first():
    host = HostChunks(4, watermark=1.0, evict_ratio=0.5)
    _store(host, 1, 2)
    _store(host, 3, 4)
    host.touch([1, 2])
    assert host.settle() == 2
    assert host.recency() == (2, 1)


def test_policy_noop_evicts_nothing_and_a_full_store_stores_nothing():
    host = HostChunks(2, policy="noop")
    _store(host, 1, 2)
    assert host.settle() == 0
    assert _store(host, 3) == 0
    assert host.longest_hit([1, 2]) == 2


def test_the_usage_ratio_counts_bytes_a_whole_number_of_chunks_does_not_fill():
    # 4,000-byte chunks take 4,096; 45,055 bytes hold 10 of them and 4,095 bytes over.
    exact = HostChunks(10, total_bytes=45_055, chunk_bytes=4_000)
    _store(exact, *range(8))
    assert exact.usage == 8 * 4_096 / 45_055  # 0.727; counted in chunks it would be 0.8
    assert exact.settle() == 0


def test_bytes_that_contradict_the_capacity_are_refused():
    with pytest.raises(ValueError, match="40960 bytes holds 10 chunks of 4096 aligned bytes"):
        HostChunks(11, total_bytes=40_960, chunk_bytes=4_000)


@pytest.mark.parametrize("half", [{"total_bytes": 4096}, {"chunk_bytes": 4096}])
def test_half_of_the_byte_sizes_is_refused(half):
    with pytest.raises(ValueError, match="needs both"):
        HostChunks(1, **half)


def test_a_host_tier_of_zero_chunks_is_off():
    host = HostChunks(0)
    assert (_store(host, 1), host.settle(), host.usage) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"watermark": 0.0}, "watermark is 0.0"),
        ({"watermark": 1.1}, "watermark is 1.1"),
        ({"evict_ratio": 0.0}, "evict_ratio is 0.0"),
        ({"evict_ratio": -0.2}, "evict_ratio is -0.2"),
        ({"policy": "ARC"}, "'ARC' is not modelled"),
    ],
)
def test_a_setting_that_is_not_modelled_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        HostChunks(4, **setting)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 chunks"):
        HostChunks(-1)


def test_sizes_are_rounded_up_to_4096():
    assert [align_up(n) for n in (1, 4095, 4096, 4097)] == [4096, 4096, 4096, 8192]


@settings(deadline=None)
@given(
    st.integers(0, 8),
    st.sampled_from([0.5, 0.8, 1.0]),
    st.sampled_from([0.01, 0.2, 1.0]),
    st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=25),
)
def test_the_store_equals_a_plain_list_and_never_exceeds_its_capacity(
    capacity, watermark, ratio, batches
):
    host = HostChunks(capacity, watermark=watermark, evict_ratio=ratio)
    plain: list[int] = []  # least recent first
    for batch in batches:
        missing = [key for key in batch if key not in plain]
        if len(plain) + len(missing) <= capacity:
            plain += missing
        else:
            missing = []
        assert _store(host, *batch) == len(missing)
        assert len(host) <= capacity
        touched = [key for key in reversed(batch) if key in plain]
        plain = [key for key in plain if key not in touched] + touched
        while plain and len(plain) / capacity >= watermark:
            plain = plain[max(1, int(len(plain) * ratio)) :]
        host.settle()
        assert host.recency() == tuple(plain)
