import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.tiers.host import HostRequest, NotPredictable
from sim.tiers.native import NativeChunks

CHUNK = 4  # tokens


def ask(host: NativeChunks, keys, *, rest=1, gpu_hit=0, step_tokens=10**6):
    """A prompt of ``keys`` full chunks and ``rest`` more tokens."""
    request = HostRequest(len(keys) * CHUNK + rest, keys, gpu_hit, step_tokens)
    host.check(request)
    return host.serve(request)


def test_a_finished_prompts_last_chunk_is_the_first_to_be_evicted():
    host = NativeChunks(4, CHUNK, recency="finish")
    ask(host, [1, 2, 3])
    assert host.recency() == (3, 2, 1)
    ask(host, [11, 12])
    assert host.recency() == (2, 1, 12, 11)
    assert host.evicted == 1


def test_what_is_offered_is_not_evicted_for_itself():
    host = NativeChunks(3, CHUNK, recency="finish")
    ask(host, [1, 2])
    ask(host, [9])
    # GPU hit of everything: chunks 1, 2, 3 are offered; only 9 may go for 3.
    assert ask(host, [1, 2, 3], gpu_hit=12).stored_chunks == 1
    assert host.recency() == (3, 2, 1)


def test_less_than_a_chunk_is_not_loaded():
    host = NativeChunks(9, CHUNK, recency="finish")
    ask(host, [1, 2])
    assert ask(host, [1, 2], gpu_hit=6).loaded_tokens == 0  # 8 - 6 = 2 < 4
    assert ask(host, [1, 2], gpu_hit=3).loaded_tokens == 5
    assert ask(host, [1, 2], gpu_hit=4).loaded_tokens == 4


def test_a_prompt_found_in_full_counts_as_loaded_in_full():
    host = NativeChunks(9, CHUNK, recency="finish")
    ask(host, [1, 2], rest=0)
    assert ask(host, [1, 2], rest=0).loaded_tokens == 8


def test_a_load_does_not_see_the_chunks_the_gpu_had():
    host = NativeChunks(9, CHUNK, recency="finish")
    ask(host, [1, 2, 3])
    ask(host, [9])
    assert host.recency() == (3, 2, 1, 9)
    assert ask(host, [1, 2, 3], gpu_hit=4).loaded_tokens == 8
    assert host.recency() == (1, 9, 3, 2)


def test_the_two_recency_rules_evict_different_chunks_for_a_request_that_loaded():
    # 1 and 2 are the oldest and are loaded; chunk 3 is new and needs room in a store of 3.
    def after(recency):
        host = NativeChunks(3, CHUNK, recency=recency)
        ask(host, [1, 2])
        ask(host, [9])
        ask(host, [1, 2, 3])
        return host.recency()

    # By 0.32 the loaded ones only count at the end: 2 goes. By 0.33 they count at once: 9 goes.
    assert after("finish") == (9, 3, 1)
    assert after("access") == (3, 2, 1)


def test_offers_are_made_a_prefill_step_at_a_time():
    def stored_again(step_tokens):
        host = NativeChunks(2, CHUNK, recency="finish")
        ask(host, [1, 2])
        ask(host, [1, 2], gpu_hit=4)  # loads 2 alone, so 1 is now the older
        ask(host, [9])  # evicts 1
        assert host.recency() == (2, 9)
        return ask(host, [1, 2], step_tokens=step_tokens).stored_chunks

    # Offered with 1, 2 is protected and 9 goes. Offered a step later, 2 has already gone for 1.
    assert stored_again(10**6) == 1
    assert stored_again(4) == 2


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(NotPredictable, match="3 full chunks and the native host tier holds 2"):
        ask(NativeChunks(2, CHUNK, recency="finish"), [1, 2, 3])


def test_a_prompt_of_one_token_that_is_loaded_in_full_is_refused():
    # vLLM 0.32 looks it up and loads it for ever: 1 token less the last one is 0 computed tokens.
    host = NativeChunks(2, 1, recency="finish")
    request = HostRequest(1, [7], 0, 10**6)
    host.check(request)
    host.serve(request)
    with pytest.raises(NotPredictable, match="1 token"):
        host.check(request)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 chunks"):
        NativeChunks(-1, CHUNK, recency="finish")


@settings(deadline=None)
@given(
    st.sampled_from(["finish", "access"]),
    st.integers(1, 9),
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), unique=True, max_size=5), st.integers(0, 5)),
        max_size=20,
    ),
)
def test_the_store_never_exceeds_its_capacity(recency, step_tokens, prompts):
    host = NativeChunks(5, CHUNK, recency=recency)
    for keys, gpu_chunks in prompts:
        before = len(host), host.evicted
        gpu_hit = min(gpu_chunks, len(keys)) * CHUNK
        share = ask(host, keys, gpu_hit=gpu_hit, step_tokens=step_tokens)
        assert len(host) <= 5
        assert len(host) == before[0] + share.stored_chunks - (host.evicted - before[1])
