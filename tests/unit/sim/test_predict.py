import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predict import NotPredictable, Prediction, Predictor, TierSpec, predict
from sim.workload import WorkloadSpec, build_workload

# Blocks of 4 tokens, chunks of 8; room for everything unless a test says otherwise.
TIERS = TierSpec(
    block_size=4, num_gpu_blocks=101, max_num_batched_tokens=1000, host_chunks=100, chunk_tokens=8
)
GPU_ONLY = replace(TIERS, host_chunks=None)


def doc(name: int, n_tokens: int) -> list[int]:
    """A prompt of ``n_tokens`` that shares no block with one of another name."""
    return [1000 * name + i for i in range(n_tokens)]


def sources(prediction: Prediction) -> tuple[int, int, int]:
    split = prediction.split
    return split.computed, split.gpu_hit, split.host_loaded


def chunks(prediction: Prediction) -> tuple[int, int, int]:
    return prediction.hit_chunks, prediction.loaded_chunks, prediction.stored_chunks


# --- the recorded run (vLLM 0.32 CPU + LMCache 0.5.6)


def recorded_run() -> dict[tuple[str, int], Prediction]:
    spec = WorkloadSpec(
        documents=8,
        document_tokens=3000,
        question_tokens=20,
        output_tokens=2,
        passes=("fwd", "fwd", "rev"),
        warmup_documents=0,
        seed=1,
        vocab=(0, 30_000),
    )
    tiers = TierSpec(
        block_size=32, num_gpu_blocks=600, max_num_batched_tokens=4096, host_chunks=1000
    )
    requests = build_workload(spec)
    return dict(zip([r.key for r in requests], predict(requests, tiers), strict=True))


def test_the_recorded_run_is_reproduced_to_the_token():
    split = {key: sources(p) for key, p in recorded_run().items()}
    assert split == {
        **{("pass1-cold", d): (3020, 0, 0) for d in range(8)},
        **{("pass2-replay", d): (204, 0, 2816) for d in range(8)},
        **{("pass3-reverse", d): (44, 2976, 0) for d in range(2, 8)},
        ("pass3-reverse", 1): (204, 896, 1920),
        ("pass3-reverse", 0): (204, 0, 2816),
    }


def test_the_recorded_run_moves_whole_chunks_more_than_the_tokens_counted():
    run = recorded_run()
    assert sum(p.stored_chunks for p in run.values()) == 88  # 8 documents of 11 chunks, once
    # 1,920 tokens counted, but 11 - floor(896 / 256) = 8 chunks, 2,048 tokens, moved.
    assert chunks(run["pass3-reverse", 1]) == (11, 8, 0)
    assert chunks(run["pass3-reverse", 7]) == (11, 0, 0)  # looked up, not loaded


# --- GPU rules


def test_a_prompt_seen_before_reuses_its_full_blocks_only():
    server = Predictor(GPU_ONLY)
    server.request(doc(1, 10), 1)
    assert sources(server.request(doc(1, 10), 1)) == (2, 8, 0)


@pytest.mark.parametrize(("n_tokens", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_fully_cached_aligned_prompt_loses_a_whole_block(n_tokens, hit):
    server = Predictor(GPU_ONLY)
    server.request(doc(1, n_tokens), 1)
    assert sources(server.request(doc(1, n_tokens), 1)) == (n_tokens - hit, hit, 0)


@pytest.mark.parametrize(
    ("n_prompt", "n_out", "n_blocks"), [(4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3)]
)
def test_a_request_needs_blocks_for_all_but_its_last_token(n_prompt, n_out, n_blocks):
    Predictor(replace(GPU_ONLY, num_gpu_blocks=n_blocks + 1)).request(doc(1, n_prompt), n_out)
    if n_blocks > 1:
        with pytest.raises(ValueError, match=f"needs {n_blocks} blocks of 4; {n_blocks - 1} of"):
            Predictor(replace(GPU_ONLY, num_gpu_blocks=n_blocks)).request(doc(1, n_prompt), n_out)


def test_generated_tokens_are_reused_when_the_next_prompt_repeats_them():
    server = Predictor(GPU_ONLY)
    # 5 + 4 - 1 = 8 slots: the second block ends in the third generated token.
    server.request(doc(1, 5), 4, output_ids=[51, 52, 53, 54])
    assert sources(server.request([*doc(1, 5), 51, 52, 53, 54, 6], 1)) == (2, 8, 0)


def test_the_last_generated_token_is_never_cached():
    server = Predictor(GPU_ONLY)
    server.request(doc(1, 5), 3, output_ids=[51, 52, 53])  # 7 slots: one full block
    assert sources(server.request([*doc(1, 5), 51, 52, 53, 6], 1)) == (5, 4, 0)


def test_generated_tokens_not_given_are_never_reused_but_hold_their_blocks():
    tiers = replace(GPU_ONLY, num_gpu_blocks=4)
    server = Predictor(tiers)
    server.request(doc(1, 5), 8)  # 12 slots: all 3 blocks full and hashed
    assert len(server.gpu.hashed()) == 3
    assert sources(server.request(doc(1, 12), 1)) == (8, 4, 0)


def test_the_free_rule_of_older_vllm_predicts_another_hit():
    # 3 usable blocks. A holds 2 (one full), C 1 (partial), D 2 (one full), then A again.
    # >= 0.24: C and D reuse A's partial block and the unused one, A's full block survives.
    # <= 0.23: C takes the unused block and queues it behind A's, so D evicts both of A's.
    def a_again(hashless_first: bool) -> tuple[int, int, int]:
        server = Predictor(replace(GPU_ONLY, num_gpu_blocks=4, hashless_first=hashless_first))
        for prompt in (doc(1, 6), doc(2, 3), doc(3, 6)):
            server.request(prompt, 1)
        return sources(server.request(doc(1, 6), 1))

    assert a_again(True) == (2, 4, 0)
    assert a_again(False) == (6, 0, 0)


# --- host rules


def evict_gpu(server: Predictor) -> None:
    """Fill the GPU pool with one unrelated prompt; its chunks at the host do no harm."""
    n_tokens = server.gpu.usable * 4
    server.request(doc(99, n_tokens), 1)


def test_without_a_host_tier_nothing_is_loaded_stored_or_resident():
    server = Predictor(GPU_ONLY)
    assert chunks(server.request(doc(1, 40), 1)) == (0, 0, 0)
    assert (server.resident_chunks, server.evicted_chunks) == (0, 0)


@pytest.mark.parametrize(("n_tokens", "stored"), [(7, 0), (8, 1), (9, 1), (15, 1), (16, 2)])
def test_only_full_prompt_chunks_are_stored(n_tokens, stored):
    server = Predictor(TIERS)
    assert chunks(server.request(doc(1, n_tokens), 8)) == (0, 0, stored)
    assert server.resident_chunks == stored


def test_a_chunk_completed_by_generated_tokens_is_not_stored():
    server = Predictor(TIERS)
    assert chunks(server.request(doc(1, 7), 5, output_ids=[51, 52, 53, 54, 55])) == (0, 0, 0)
    assert chunks(server.request([*doc(1, 7), 51, 52], 1)) == (0, 0, 1)  # as a prompt it is


def test_a_chunk_is_hit_only_when_all_of_its_blocks_agree():
    server = Predictor(TIERS)
    server.request(doc(1, 9), 1)
    assert chunks(server.request([*doc(1, 4), *doc(2, 5)], 1)) == (0, 0, 1)


def test_a_prompt_evicted_from_the_gpu_is_loaded_from_the_host_up_to_its_last_full_chunk():
    server = Predictor(TIERS)
    server.request(doc(1, 22), 1)
    evict_gpu(server)
    prediction = server.request(doc(1, 22), 1)
    assert sources(prediction) == (6, 0, 16)
    assert chunks(prediction) == (2, 2, 0)


def test_a_full_host_hit_computes_one_token_where_a_full_gpu_hit_computes_a_block():
    server = Predictor(TIERS)
    server.request(doc(1, 16), 1)
    assert sources(server.request(doc(1, 16), 1)) == (1, 12, 3)  # GPU 3 blocks, host the rest
    evict_gpu(server)
    assert sources(server.request(doc(1, 16), 1)) == (1, 0, 15)
    only_gpu = Predictor(GPU_ONLY)
    only_gpu.request(doc(1, 16), 1)
    assert sources(only_gpu.request(doc(1, 16), 1)) == (4, 12, 0)


def test_a_partial_gpu_hit_inside_a_chunk_still_moves_that_whole_chunk():
    server = Predictor(replace(TIERS, num_gpu_blocks=6))
    server.request(doc(1, 17), 1)  # all 5 usable blocks, 4 of them full; 2 chunks stored
    server.request(doc(2, 13), 1)  # 4 blocks: all but document 1's first, the last to be evicted
    prediction = server.request(doc(1, 17), 1)
    assert sources(prediction) == (1, 4, 12)
    assert chunks(prediction) == (2, 2, 0)  # both chunks, 16 tokens, for 12 counted


def test_what_the_host_loads_is_cached_on_the_gpu_like_what_was_computed():
    server = Predictor(TIERS)
    server.request(doc(1, 17), 1)
    evict_gpu(server)
    assert sources(server.request(doc(1, 17), 1)) == (1, 0, 16)
    assert sources(server.request(doc(1, 17), 1)) == (1, 16, 0)


def test_chunks_the_gpu_still_holds_are_stored_again_after_the_host_lost_them():
    # A store of 4 chunks that drops its older half when full.
    server = Predictor(replace(TIERS, host_chunks=4, watermark=1.0, evict_ratio=0.5))
    server.request(doc(1, 17), 1)
    server.request(doc(2, 17), 1)  # full: the 2 chunks of document 1 go
    assert (server.resident_chunks, server.evicted_chunks) == (2, 2)
    again = server.request(doc(1, 17), 1)
    assert sources(again) == (1, 16, 0)  # a pure GPU hit
    assert chunks(again) == (0, 0, 2)
    assert chunks(server.request(doc(2, 17), 1)) == (0, 0, 2)  # so document 2 was dropped


def test_a_pure_gpu_hit_still_refreshes_the_prompt_at_the_host():
    server = Predictor(replace(TIERS, host_chunks=6, watermark=1.0, evict_ratio=0.34))
    server.request(doc(1, 17), 1)
    server.request(doc(2, 17), 1)
    server.request(doc(1, 17), 1)  # GPU hit; document 2 is now the older at the host
    server.request(doc(3, 17), 1)  # 6 of 6: int(6 * 0.34) = 2 chunks go
    evict_gpu(server)  # 400 tokens do not fit the host: nothing stored
    assert server.request(doc(1, 17), 1).hit_chunks == 2
    assert server.request(doc(2, 17), 1).hit_chunks == 0


def test_a_prompt_larger_than_the_free_share_is_not_stored_at_all():
    server = Predictor(replace(TIERS, host_chunks=4))
    server.request(doc(1, 16), 1)  # 2 of 4 chunks: 0.5 < 0.8
    assert chunks(server.request(doc(2, 24), 1)) == (0, 0, 0)  # needs 3, 2 are free
    assert server.resident_chunks == 2


def test_eviction_drops_a_prompts_tail_so_its_prefix_still_hits():
    server = Predictor(replace(TIERS, host_chunks=5))
    server.request(doc(1, 33), 1)  # 4 chunks: 0.8 -> int(0.8) = 0, so one goes: the last
    assert (server.resident_chunks, server.evicted_chunks) == (3, 1)
    evict_gpu(server)
    prediction = server.request(doc(1, 33), 1)
    assert sources(prediction) == (9, 0, 24)
    assert chunks(prediction) == (3, 3, 1)


def test_bytes_beyond_whole_chunks_keep_the_store_below_its_watermark():
    # 4 chunks of 4,096 bytes in a store of 5 and 4,095 bytes over: 16,384 / 24,575 = 0.667.
    exact = replace(TIERS, host_chunks=5, host_bytes=24_575, chunk_bytes=4_096)
    server = Predictor(exact)
    server.request(doc(1, 33), 1)
    assert (server.resident_chunks, server.evicted_chunks) == (4, 0)


def test_a_host_tier_of_zero_chunks_predicts_what_no_host_tier_does():
    prompts = [doc(1, 17), doc(2, 17), doc(1, 17)]
    off, none = Predictor(replace(TIERS, host_chunks=0)), Predictor(GPU_ONLY)
    assert [off.request(p, 1) for p in prompts] == [none.request(p, 1) for p in prompts]


# --- refusals


def test_several_prefill_steps_that_a_tick_may_fall_between_are_refused_with_the_numbers():
    # 5 chunks of 8 tokens; steps of 16 bring 2 and 4 of them: 0.8 is reached with a fifth to come.
    server = Predictor(replace(TIERS, max_num_batched_tokens=16, host_chunks=5))
    before = server.gpu.free_order()
    with pytest.raises(
        NotPredictable, match=r"of 41 tokens, computed in steps of at most 16 .*to 4 of 5 chunks"
    ):
        server.request(doc(1, 41), 4)
    assert (server.gpu.free_order(), server.resident_chunks) == (before, 0)
    # Whoever knows the ticks is told: none, and the fifth chunk is kept until the session has ended.
    assert chunks(server.request(doc(1, 41), 4, ticks=(0,))) == (0, 0, 5)
    assert server.resident_chunks == 3


def test_several_prefill_steps_that_reach_the_watermark_with_the_last_are_predicted():
    # 2 of 4 chunks, and 2 more with the first step of two: the tick takes the other prompt's.
    server = Predictor(replace(TIERS, max_num_batched_tokens=16, host_chunks=4))
    server.request(doc(1, 16), 4)
    prediction = server.request(doc(2, 17), 4)
    assert (sources(prediction), chunks(prediction)) == ((17, 0, 0), (0, 0, 2))
    assert (server.resident_chunks, server.evicted_chunks) == (3, 1)


def test_several_prefill_steps_beside_a_host_that_cannot_evict_are_predicted():
    server = Predictor(replace(TIERS, max_num_batched_tokens=16))
    assert sources(server.request(doc(1, 17), 4)) == (17, 0, 0)
    assert chunks(server.request(doc(1, 40), 4)) == (2, 0, 3)


def test_several_prefill_steps_fill_a_store_without_eviction_as_far_as_they_fit():
    server = Predictor(
        replace(TIERS, max_num_batched_tokens=8, host_chunks=2, policy="noop", watermark=1.0)
    )
    assert chunks(server.request(doc(1, 24), 1)) == (0, 0, 2)


def test_several_prefill_steps_change_nothing_on_the_gpu():
    one, many = Predictor(GPU_ONLY), Predictor(replace(GPU_ONLY, max_num_batched_tokens=3))
    for name in (1, 2, 1, 3):
        assert one.request(doc(name, 30), 5) == many.request(doc(name, 30), 5)
        assert one.gpu.free_order() == many.gpu.free_order()


def test_without_a_prefix_cache_nothing_is_ever_hit_or_named():
    # Blocks without a hash come back last one first: 1, 2, 3 are the next ones, over and over.
    server = Predictor(replace(GPU_ONLY, num_gpu_blocks=6, prefix_caching=False))
    for _ in range(3):
        assert sources(server.request(doc(1, 9), 2)) == (9, 0, 0)
        assert server.gpu.hashed() == {}
        assert server.gpu.free_order() == (3, 2, 1, 4, 5)
        server.request(doc(2, 9), 2)
        assert server.gpu.free_order() == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("host", ["lmcache-mp", "lmcache"])
def test_without_vllms_prefix_cache_all_that_the_host_has_is_loaded(host):
    # 263 tokens are one whole chunk of 256, loaded; the other 7 are computed.
    tiers = replace(TIERS, host=host, prefix_caching=False, num_gpu_blocks=80, chunk_tokens=256)
    server = Predictor(tiers)
    assert sources(server.request(doc(1, 263), 2)) == (263, 0, 0)
    again = server.request(doc(1, 263), 2)
    assert (sources(again), chunks(again)) == ((7, 0, 256), (1, 1, 0))
    assert server.gpu.hashed() == {}


def test_lmcache_in_process_takes_chunks_of_any_size():
    # A document of 24 tokens, chunks of 8, blocks of 16: the GPU has block 1, the host chunk 3.
    tiers = replace(TIERS, host="lmcache", block_size=16, chunk_tokens=8, num_gpu_blocks=8)
    server = Predictor(tiers)
    assert chunks(server.request([*doc(1, 24), *doc(2, 8)], 2)) == (0, 0, 4)
    again = server.request([*doc(1, 24), *doc(3, 8)], 2)
    assert (sources(again), chunks(again)) == ((8, 16, 8), (3, 1, 1))
    assert again.moved_tokens == 8
    named = Predictor(tiers)
    for _ in range(2):
        last = named.request_named([-1], 32, 2, chunks=[-1, -2, -3])
    assert last == again
    with pytest.raises(ValueError, match="chunks of 8 tokens are not whole blocks of 16; host"):
        Predictor(replace(tiers, host="lmcache-mp"))


def test_a_prompt_named_by_its_blocks_is_served_as_its_tokens_are():
    # Documents of 9 tokens, 2 blocks of 4 and one token; a question of 5 that ends block 3.
    by_tokens, by_names = Predictor(TIERS), Predictor(TIERS)
    for turn, name in enumerate((1, 2, 1, 3, 2)):
        told = by_tokens.request([*doc(name, 9), *doc(100 + turn, 5)], 6)
        assert by_names.request_named([-2 * name, -2 * name - 1], 14, 6) == told
        assert by_names.gpu.free_order() == by_tokens.gpu.free_order()
    assert told.split.gpu_hit == 8
    with pytest.raises(ValueError, match="at least 1"):
        by_names.request_named([], 0, 1)


def test_an_early_stop_costs_one_more_step_under_async_scheduling_only():
    # 4 + 1 - 1 = 4 slots are one block; the step beyond the stop token begins a second one.
    fits = replace(GPU_ONLY, num_gpu_blocks=4, async_scheduling=True)
    server = Predictor(fits)
    server.request(doc(1, 4), 1, output_ids=[9], stopped=True)
    assert server.gpu.free_order() == (2, 3, 1)  # block 2 was taken, and has no key
    server = Predictor(replace(fits, async_scheduling=False))
    server.request(doc(1, 4), 1, output_ids=[9], stopped=True)
    assert server.gpu.free_order() == (2, 3, 1)  # block 2 was not taken
    server = Predictor(replace(fits, num_gpu_blocks=2))
    with pytest.raises(NotPredictable, match="preempted"):
        server.request(doc(1, 4), 1, stopped=True)
    Predictor(replace(fits, num_gpu_blocks=2, async_scheduling=False)).request(
        doc(1, 4), 1, stopped=True
    )


def test_what_a_request_generated_is_hit_by_its_next_turn():
    server = Predictor(GPU_ONLY)
    first = doc(1, 6)
    server.request(first, 3, output_ids=[71, 72, 73])  # 8 slots: 2 full blocks
    second = [*first, 71, 72, 73, 5]
    assert sources(server.request(second, 2, output_ids=[81, 82])) == (2, 8, 0)
    assert sources(server.request([*second, 81, 82, 6, 6], 1)) == (6, 8, 0)


# --- the other host tiers


def test_lmcache_in_process_loads_like_the_server_and_never_waits_for_a_tick():
    server = Predictor(replace(TIERS, host="lmcache", num_gpu_blocks=6, host_chunks=2))
    assert chunks(server.request(doc(1, 17), 1)) == (0, 0, 2)
    evict_gpu(server)  # 20 tokens of another prompt: 2 chunks, which evict both
    prediction = server.request(doc(1, 17), 1)
    assert sources(prediction) == (17, 0, 0)
    assert chunks(prediction) == (0, 0, 2)
    assert server.evicted_chunks == 4


def test_lmcache_in_process_takes_a_prompt_in_several_steps():
    server = Predictor(replace(TIERS, host="lmcache", max_num_batched_tokens=10))
    assert chunks(server.request(doc(1, 30), 1)) == (0, 0, 3)
    evict_gpu(server)
    assert sources(server.request(doc(1, 30), 1)) == (6, 0, 24)


def test_a_full_native_hit_reports_no_computed_token():
    server = Predictor(replace(TIERS, host="native"))
    server.request(doc(1, 16), 1)
    evict_gpu(server)
    prediction = server.request(doc(1, 16), 1)
    assert sources(prediction) == (0, 0, 16)
    assert chunks(prediction) == (2, 2, 0)
    assert prediction.moved_tokens == 16


def test_lmcache_moves_whole_chunks_and_native_only_what_the_gpu_lacks():
    def third(host: str) -> Prediction:
        server = Predictor(replace(TIERS, num_gpu_blocks=6, host=host))
        server.request(doc(1, 17), 1)
        server.request(doc(2, 13), 1)  # leaves document 1 its first block
        return server.request(doc(1, 17), 1)

    assert [sources(third(host)) for host in ("lmcache-mp", "native")] == [(1, 4, 12)] * 2
    assert [third(host).moved_tokens for host in ("lmcache-mp", "lmcache", "native")] == [
        16,
        16,
        12,
    ]


def test_a_prompt_larger_than_the_native_tier_is_refused_and_changes_nothing():
    server = Predictor(replace(TIERS, host="native", host_chunks=1))
    server.request(doc(1, 9), 1)
    before = server.gpu.free_order(), server.host.recency()
    with pytest.raises(NotPredictable, match="2 full chunks and the native host tier holds 1"):
        server.request(doc(2, 16), 1)
    assert (server.gpu.free_order(), server.host.recency()) == before


@pytest.mark.parametrize(
    ("host", "policy"), [("native", "ARC"), ("lmcache", "FIFO"), ("lmcache-mp", "ARC")]
)
def test_an_eviction_policy_that_is_not_modelled_is_refused(host, policy):
    with pytest.raises(NotPredictable, match=f"'{policy}' is not modelled"):
        Predictor(replace(TIERS, host=host, policy=policy))


def test_the_native_tier_of_an_engine_with_an_older_rule_is_refused():
    with pytest.raises(NotPredictable, match=r"vLLM 0\.30\.0 is not modelled; 0\.31 is"):
        Predictor(replace(TIERS, host="native", engine="0.30.0"))


def test_blocks_of_one_token_beside_lmcaches_server_are_refused():
    # A prompt of 8 found in full is allotted 7 blocks, and a chunk of 8 does not fit into them.
    with pytest.raises(NotPredictable, match="cannot load a prompt that it holds in full"):
        Predictor(replace(TIERS, block_size=1))
    Predictor(replace(TIERS, block_size=1, host="lmcache"))


def test_a_host_that_contradicts_its_size_or_is_unknown_is_refused():
    with pytest.raises(ValueError, match="host 'none' with host_chunks 100"):
        Predictor(replace(TIERS, host="none"))
    with pytest.raises(ValueError, match="host 'native' with host_chunks None"):
        Predictor(replace(TIERS, host="native", host_chunks=None))
    with pytest.raises(ValueError, match="known: none, lmcache-mp, lmcache, native"):
        Predictor(replace(TIERS, host="disk"))


def test_a_host_size_alone_still_means_lmcaches_server():
    assert (TIERS.host_kind, GPU_ONLY.host_kind) == ("lmcache-mp", "none")


def test_a_refused_request_changes_nothing():
    tiers = replace(TIERS, num_gpu_blocks=6)
    server = Predictor(tiers)
    server.request(doc(1, 17), 1)
    before = server.gpu.free_order(), server.gpu.hashed(), server.host.recency()
    with pytest.raises(ValueError, match="needs 6 blocks of 4; 5 of 6 GPU blocks are usable"):
        server.request(doc(2, 21), 1)
    assert (server.gpu.free_order(), server.gpu.hashed(), server.host.recency()) == before


@pytest.mark.parametrize(("prompt", "n_out"), [([], 1), ([1], 0), ([1], -1)])
def test_an_empty_request_is_refused(prompt, n_out):
    with pytest.raises(ValueError, match="at least 1"):
        Predictor(TIERS).request(prompt, n_out)


def test_output_ids_of_another_length_are_refused():
    with pytest.raises(ValueError, match="2 output ids for 3 output tokens"):
        Predictor(TIERS).request([1], 3, output_ids=[7, 8])


@pytest.mark.parametrize("chunk_tokens", [0, 6, 2])
def test_chunks_that_are_not_whole_blocks_are_refused(chunk_tokens):
    with pytest.raises(ValueError, match=f"chunks of {chunk_tokens} tokens"):
        Predictor(replace(TIERS, chunk_tokens=chunk_tokens))


# --- speed (CPU time, so that other work on the machine does not count)


def replay_s(prompts: list[tuple[int, ...]], tiers: TierSpec) -> float:
    server = Predictor(tiers)
    started = time.process_time()
    for prompt in prompts:
        server.request(prompt, 2)
    return time.process_time() - started


def test_a_million_block_touches_are_replayed_within_two_seconds():
    # 50 documents of 100 blocks, 3 in 5 of them on the GPU at a time, in an order without pattern.
    documents = [tuple(doc(name, 1600)) for name in range(50)]
    order = random.Random(1)
    prompts = [documents[order.randrange(50)] for _ in range(10_000)]
    tiers = TierSpec(block_size=16, num_gpu_blocks=3_000, max_num_batched_tokens=8192)
    assert replay_s(prompts, tiers) <= 2.0


def test_a_lab_plan_of_30_requests_is_predicted_within_50_ms():
    prompts = [tuple(doc(name, 3020)) for name in [*range(10), *range(10), *reversed(range(10))]]
    tiers = TierSpec(
        block_size=32, num_gpu_blocks=600, max_num_batched_tokens=4096, host_chunks=1000
    )
    assert replay_s(prompts, tiers) <= 0.05


# --- properties


@settings(deadline=None)
@given(
    st.integers(5, 30),
    st.one_of(st.none(), st.integers(0, 12)),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 3))),
)
def test_sources_sum_to_the_prompt_and_no_tier_exceeds_its_size(num_gpu_blocks, host, requests):
    server = Predictor(
        replace(
            TIERS, block_size=4, chunk_tokens=4, num_gpu_blocks=num_gpu_blocks, host_chunks=host
        )
    )
    for prompt, n_out in requests:
        before = server.resident_chunks, server.evicted_chunks
        prediction = server.request(prompt, n_out)
        split = prediction.split
        assert split.computed + split.gpu_hit + split.host_loaded == len(prompt)
        assert split.computed >= 1  # the last token's logits are always computed
        assert split.gpu_hit % 4 == 0
        assert split.host_loaded <= prediction.loaded_chunks * 4
        assert prediction.loaded_chunks <= prediction.hit_chunks
        assert sorted(server.gpu.free_order()) == list(range(1, num_gpu_blocks))
        assert server.resident_chunks <= (host or 0)
        dropped = server.evicted_chunks - before[1]
        assert server.resident_chunks == before[0] + prediction.stored_chunks - dropped
