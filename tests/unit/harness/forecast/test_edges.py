from dataclasses import replace

import pytest

from harness.forecast.edges import (
    Served,
    edge_between,
    gpu_edge,
    host_edge,
    least_from,
    why_too_large,
)
from sim.predict import TierSpec
from sim.workload import WorkloadSpec, build_workload

# 3 documents of 8 tokens, 4-token blocks and 8-token chunks: 2 blocks or 1 chunk a document.
SPEC = WorkloadSpec(
    documents=3,
    document_tokens=8,
    question_tokens=2,
    output_tokens=2,
    passes=("fwd", "fwd"),
    warmup_documents=0,
    seed=1,
    vocab=(0, 100),
)
REQUESTS = build_workload(SPEC)
TIERS = TierSpec(
    block_size=4, num_gpu_blocks=5, max_num_batched_tokens=64, host_chunks=3, chunk_tokens=8,
)  # fmt: skip


def test_the_gpu_edge_holds_every_document_a_scratch_block_and_the_null_block():
    # 6 document blocks stay, each request of 10 + 2 - 1 = 11 tokens has a third block without a
    # hash, which the next one reuses, and block 0 is vLLM's: 8 blocks.
    edge = gpu_edge(REQUESTS, TIERS, least_blocks=4)
    assert edge.smallest == 8
    assert edge.sizes[8] == Served(computed=36, gpu_hit=24, host_loaded=0, is_full=True)
    assert edge.sizes[7].is_full is False
    assert edge.endless == edge.sizes[8]
    assert edge.is_steady


def test_the_gpu_edge_is_no_smaller_than_what_the_server_needs_to_start():
    edge = gpu_edge(REQUESTS, TIERS, least_blocks=12)
    assert edge.smallest == 12
    assert min(edge.sizes) == 12


def test_the_host_edge_leaves_room_above_the_watermark():
    # 3 chunks below 0.8 of the tier: 3 of 4 is 0.75.
    edge = host_edge(REQUESTS, TIERS, gpu_hits=[0] * 6)
    assert edge.smallest == 4
    # Pass 2 loads 8 of each 10 tokens; pass 1 computes 30.
    assert edge.endless == Served(computed=36, gpu_hit=0, host_loaded=24, is_full=True)
    assert edge.sizes[3].is_full is False


def test_the_tier_described_is_tried_with_the_bytes_beyond_its_last_chunk():
    # 3 chunks of 4,096 bytes in one byte less than 4: 0.75 of it, below 0.8, so it is full.
    described = replace(TIERS, host_bytes=4 * 4096 - 1, chunk_bytes=100)
    assert host_edge(REQUESTS, described, gpu_hits=[0] * 6).smallest == 3
    just_three = replace(described, host_bytes=3 * 4096)
    assert host_edge(REQUESTS, just_three, gpu_hits=[0] * 6).smallest == 4


def test_the_host_edge_without_eviction_is_the_number_of_chunks():
    noop = TierSpec(
        block_size=4, num_gpu_blocks=5, max_num_batched_tokens=64, host_chunks=3, chunk_tokens=8,
        policy="noop",
    )  # fmt: skip
    assert host_edge(REQUESTS, noop, gpu_hits=[0] * 6).smallest == 3


def test_a_host_beside_a_gpu_that_hits_everything_needs_no_chunk():
    assert host_edge(REQUESTS, TIERS, gpu_hits=[0, 0, 0, 8, 8, 8]).smallest == 0


def test_only_measured_requests_decide():
    # A warm-up that walks its 5 documents twice would need 12 blocks for its own hits.
    more = replace(SPEC, documents=5, seed=2)
    warmup = [replace(request, phase="warmup") for request in build_workload(more)]
    assert gpu_edge(build_workload(more), TIERS, least_blocks=4).smallest == 12
    edge = gpu_edge([*warmup, *REQUESTS], TIERS, least_blocks=4)
    assert edge.smallest == 8
    assert edge.endless == Served(computed=36, gpu_hit=24, host_loaded=0, is_full=True)


def test_an_edge_between_two_steps_is_found_to_the_unit():
    edge = edge_between(lambda n: Served(0, n, 0, is_full=n >= 777), 5, 1205)
    assert edge.smallest == 777
    assert edge.sizes[776].is_full is False
    assert len(edge.sizes) < 25


def test_sizes_that_fall_short_above_the_edge_are_said():
    edge = edge_between(lambda n: Served(0, n, 0, is_full=n >= 50 and n != 75), 0, 300)
    assert edge.smallest == 50
    assert not edge.is_steady


@pytest.mark.parametrize("guess", [5, 6, 776, 777, 778, 5000])
def test_the_least_size_is_found_from_any_guess_and_cheaply_from_a_good_one(guess):
    tried = []

    def works(size):
        tried.append(size)
        return size >= 777

    assert least_from(works, guess=guess, lowest=5) == 777
    assert {776, 777} <= set(tried)
    assert len(tried) <= (2 if guess == 777 else 30)


@pytest.mark.parametrize("guess", [5, 9])
def test_the_least_size_may_be_the_lowest(guess):
    assert least_from(lambda size: size >= 5, guess=guess, lowest=5) == 5


def test_a_watermark_that_no_store_stays_below_leaves_nothing_to_load():
    # The smallest number above 0: every store of a chunk is at it, and evicts all it has.
    edge = host_edge(REQUESTS, replace(TIERS, watermark=5e-324, evict_ratio=1.0), [0] * 6)
    assert edge.endless.host_loaded == 0
    assert edge.smallest == 0


def test_a_plan_of_too_many_blocks_is_refused_with_their_number():
    assert why_too_large(REQUESTS, 4) is None
    # 6 requests of 12 tokens, a token a block: 72 blocks; 5,000 times that is 360,000.
    assert "360,000 blocks" in (why_too_large(REQUESTS * 5_000, 1) or "")


def test_a_prompt_that_the_least_gpu_tier_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="needs 3 blocks"):
        gpu_edge(REQUESTS, TIERS, least_blocks=3)
