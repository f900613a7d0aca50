import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.tiers.host import HostRequest
from sim.tiers.lmcache import InProcessChunks

CHUNK = 4  # tokens


def ask(host: InProcessChunks, keys, *, rest=1, gpu_hit=0, step_tokens=10**6):
    """A prompt of ``keys`` full chunks and ``rest`` more tokens."""
    n_prompt = len(keys) * CHUNK + rest
    return host.serve(HostRequest(n_prompt, keys, gpu_hit, step_tokens))


def test_a_new_prompts_first_chunk_is_the_first_to_be_evicted():
    host = InProcessChunks(4, CHUNK)
    ask(host, [1, 2, 3])
    assert host.recency() == (1, 2, 3)
    ask(host, [11, 12])  # one is free, one must go
    assert host.recency() == (2, 3, 11, 12)
    assert host.evicted == 1


def test_a_hit_puts_the_first_chunk_last():
    host = InProcessChunks(4, CHUNK)
    ask(host, [1, 2, 3])
    share = ask(host, [1, 2, 3])
    assert (share.hit_chunks, share.loaded_tokens, share.stored_chunks) == (3, 12, 0)
    assert host.recency() == (3, 2, 1)


def test_chunks_behind_a_hole_cost_buffers_although_they_are_resident():
    host = InProcessChunks(3, CHUNK)
    ask(host, [1, 2, 3])
    ask(host, [11])  # evicts 1
    assert host.recency() == (2, 3, 11)
    # Lookup misses at 1, so 1, 2 and 3 each take a buffer: 2, 3 and 11 all go first.
    assert ask(host, [1, 2, 3]).stored_chunks == 3
    assert host.recency() == (1, 2, 3)


def test_a_prompt_larger_than_the_store_keeps_its_first_chunks():
    host = InProcessChunks(2, CHUNK)
    ask(host, [9])
    assert ask(host, [1, 2, 3]).stored_chunks == 2
    assert host.recency() == (1, 2)


def test_a_store_of_nothing_stores_nothing():
    assert ask(InProcessChunks(0, CHUNK), [1, 2]).stored_chunks == 0


def test_a_last_prefill_step_of_one_token_is_not_saved():
    # 9 tokens in steps of 4: 4 + 4 + 1. With 8 tokens in steps of 7: 7 + 1, which ends chunk 2.
    assert ask(InProcessChunks(9, CHUNK), [1, 2], rest=1, step_tokens=4).stored_chunks == 2
    assert ask(InProcessChunks(9, CHUNK), [1, 2], rest=0, step_tokens=7).stored_chunks == 1
    # A first step of one token is saved: chunk 2's last token is all the host has to compute.
    host = InProcessChunks(9, CHUNK)
    assert ask(host, [1, 2], rest=0, gpu_hit=7, step_tokens=7).stored_chunks == 2


def test_a_full_hit_computes_the_last_token():
    host = InProcessChunks(9, CHUNK)
    ask(host, [1, 2], rest=0)
    assert ask(host, [1, 2], rest=0).loaded_tokens == 7


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 chunks"):
        InProcessChunks(-1, CHUNK)


@settings(deadline=None)
@given(
    st.integers(0, 6),
    st.integers(1, 9),
    st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8), max_size=20),
)
def test_the_store_never_exceeds_its_capacity(capacity, step_tokens, prompts):
    host = InProcessChunks(capacity, CHUNK)
    for keys in prompts:
        before = len(host), host.evicted
        share = ask(host, keys, step_tokens=step_tokens)
        assert len(host) <= capacity
        assert len(host) == before[0] + share.stored_chunks - (host.evicted - before[1])
