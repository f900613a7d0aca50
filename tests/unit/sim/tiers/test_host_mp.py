"""LMCache's server beside prompts of several prefill steps, by hand: chunks of one token."""

import random
from dataclasses import replace

import pytest

from sim.tiers.host import HostRequest, TicksMatter
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.moments import Moments, TooManyMoments

STEP = 4


def store(capacity: int = 10, **changes: object) -> HostChunks:
    """Evicts a fifth from 80 % on, in whole chunks."""
    return HostChunks(capacity, chunk_tokens=1, **changes)  # type: ignore[arg-type]


def prompt(chunks: range, ticks: tuple[int, ...] | None = None, rest: int = 1) -> HostRequest:
    """A prompt of ``chunks`` and, so that it is never found whole, a token more."""
    return HostRequest(len(chunks) * 1 + rest, chunks, 0, STEP, ticks)


def loaded(host: HostChunks, request: HostRequest) -> int:
    return host.serve(request).loaded_tokens


def test_a_prompt_larger_than_the_store_is_kept_as_far_as_its_steps_fit() -> None:
    # Steps of 4 chunks: 4, 8, and the last 4 do not fit into 2. In one step 12 would not fit into 10.
    host = store()
    assert host.serve(prompt(range(12), (0,))).stored_chunks == 8
    # 8 of 10 reach the watermark: a tick takes int(1.6) = 1, the prompt's tail.
    assert host.recency() == (6, 5, 4, 3, 2, 1, 0)
    assert loaded(host, prompt(range(12), (0,))) == 7
    in_one_step = store()
    in_one_step.serve(replace(prompt(range(12)), step_tokens=100))
    assert len(in_one_step) == 0


def test_a_tick_between_two_steps_takes_what_was_written_first() -> None:
    # Written last chunk first, step by step: 3 2 1 0 7 6 5 4. The tick behind step 2 takes 3, so that
    # 3 are free for the last step's 4, which are lost; the end of the session puts the rest in order.
    host = store()
    assert host.serve(prompt(range(12), (99,))).stored_chunks == 8
    assert host.recency() == (7, 6, 5, 4, 2, 1, 0)
    assert loaded(host, prompt(range(12), (0,))) == 3


def test_a_lookup_makes_what_it_finds_recent_before_a_tick_comes() -> None:
    # 0 1 are found and touched; 2 to 5 bring 4 + 4 of 10: the tick takes 9, the oldest other.
    host = store()
    host.serve(prompt(range(2), (0,)))
    host.serve(prompt(range(8, 10), (0,)))
    host.serve(replace(prompt(range(6), (1, 0)), step_tokens=4))
    assert host.recency() == (8, 5, 4, 3, 2, 1, 0)


def test_without_an_eviction_what_comes_late_is_lost_step_by_step() -> None:
    host = store(policy="noop")
    host.check(prompt(range(12)))
    assert host.serve(prompt(range(12))).stored_chunks == 8
    assert loaded(host, prompt(range(12))) == 8


def test_ticks_below_the_watermark_do_not_matter() -> None:
    host = store(20)
    host.check(prompt(range(12)))
    for ticks in (None, (0,), (99,)):
        host = store(20)
        assert (host.serve(prompt(range(12), ticks)).stored_chunks, len(host)) == (12, 12)


def test_ticks_behind_the_last_store_do_not_matter_where_they_take_others() -> None:
    # 2 others and 6 in two steps: 8 of 10 only then. One is taken, the others' last, come what may.
    for ticks in (None, (0,), (0, 99)):
        host = store()
        host.serve(prompt(range(20, 22), (0,)))
        host.check(prompt(range(6), ticks))
        host.serve(prompt(range(6), ticks))
        assert host.recency() == (20, 5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize(
    ("before", "chunks"),
    [
        (0, range(12)),  # 8 of 10 behind the second step, and a third to come
        (
            1,
            range(7),
        ),  # 8 of 10 behind the last step; the tick takes the other, or the 1st of step 1
        (0, range(8)),  # nothing but its own
    ],
)
def test_where_it_matters_when_a_tick_comes_nothing_is_claimed_or_changed(
    before: int, chunks: range
) -> None:
    host = store(evict_ratio=0.3)  # takes 2 of 8
    host.serve(prompt(range(90, 90 + before), (0,)))
    held = host.recency()
    with pytest.raises(TicksMatter, match=r"steps of at most 4 .*to 8 of 10 chunks before it has"):
        host.check(prompt(chunks))
    assert host.recency() == held
    host.check(prompt(chunks, (0,)))


# --- all moments


def bounds(capacity: int, *requests: HostRequest) -> list[tuple[int, int]]:
    """Least and most tokens that each of ``requests`` loads."""
    moments = Moments(store(capacity))
    found = []
    for request in requests:
        moments.forget()
        moments.serve(request)
        found.append(moments.loaded)
    return found


def test_the_bounds_are_what_the_moments_of_the_ticks_can_lead_to() -> None:
    # By hand above: 7 chunks are found where the tick comes at the end, 3 where it comes before.
    # A tick while 4 to 7 are being written spares them, and takes 3 as well.
    assert bounds(10, prompt(range(12)), prompt(range(12))) == [(0, 0), (3, 7)]
    assert bounds(20, prompt(range(12)), prompt(range(12))) == [(0, 0), (12, 12)]


def test_a_large_store_is_followed_in_numbers_of_its_most_recent_chunks() -> None:
    # 100 prompts of 60 chunks, 1,000 kept: a settled store has at most 799, at least the 640 that a
    # tick leaves of 800, and a walk back loads what there is. One content at a time it takes minutes.
    moments = Moments(HostChunks(1000, chunk_tokens=1))
    for number in [*range(100), *range(100)]:
        moments.serve(HostRequest(61, range(100 * number, 100 * number + 60), 0, 20))
    assert moments.loaded == (0, 0)
    for number in reversed(range(100)):
        moments.serve(HostRequest(61, range(100 * number, 100 * number + 60), 0, 20))
    assert moments.loaded == (640, 799)


def test_bounds_hold_whenever_ticks_come_and_are_mostly_reached() -> None:
    rng = random.Random(3)
    n_wide = n_reached = 0
    for _ in range(60):
        capacity = rng.randint(6, 40)
        starts = [rng.randrange(3) * 100 for _ in range(5)]
        asked = [prompt(range(a, a + rng.randint(5, 16)), rest=rng.randint(0, 3)) for a in starts]
        moments = Moments(store(capacity))
        for request in asked:
            moments.serve(request)
        seen = set()
        for _ in range(300):
            host, total = store(capacity), 0
            for request in asked:
                # A prompt of one step is taken to end before a tick comes.
                n_steps = len(host.plan(request, set(host.recency()))[2])
                ticks = [rng.choice([0, 0, 1, 3]) if n_steps > 1 else 0 for _ in range(n_steps)]
                total += loaded(host, replace(request, ticks=tuple(ticks)))
            seen.add(total)
        assert moments.loaded[0] <= min(seen)
        assert max(seen) <= moments.loaded[1]
        n_wide += len(seen) > 1
        n_reached += (min(seen), max(seen)) == moments.loaded
    assert n_wide >= 10
    assert n_reached >= 50  # of 60; ticks while a step is being written are not among these


def test_what_is_exact_has_bounds_that_agree_with_it() -> None:
    rng = random.Random(4)
    n_exact = 0
    for _ in range(200):
        capacity = rng.randint(6, 60)
        moments, host, total = Moments(store(capacity)), store(capacity), 0
        for _ in range(6):
            start = rng.randrange(3) * 100
            request = prompt(range(start, start + rng.randint(1, 9)))
            try:
                host.check(request)
            except TicksMatter:
                break
            total += loaded(host, request)
            moments.serve(request)
            assert moments.loaded == (total, total)
            n_exact += total > 0
    assert n_exact > 100


def test_too_many_contents_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.tiers.moments.MOST_WORK", 20)
    with pytest.raises(TooManyMoments):
        bounds(10, prompt(range(12)), prompt(range(12)))
