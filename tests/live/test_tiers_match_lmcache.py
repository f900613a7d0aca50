"""``sim.tiers.lmcache_mp.HostChunks`` against the installed LMCache's own L1Manager and eviction loop.

The store, its allocator, the LRU policy and the body of the eviction thread are LMCache's; this
file plays the server around them: lookup, load, store, end of session, ticks until settled. A
failure names the seed of its workload; ``_mismatch(seed)`` alone reproduces it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sim.tiers.host import align_up
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.prefix_keys import PrefixKeys
from tests.live.differential.claims import needs
from tests.live.differential.engines import lmcache_storage, tick_until_settled

pytestmark = needs("lmcache")

N_WORKLOADS = 200
MIN_REQUESTS = 4_000
MIN_WITH_HITS = 1_000
MIN_EVICTIONS = 500
MIN_LOST_STORES = 100


@dataclass(frozen=True, slots=True)
class Case:
    """A store and its prompts, as tokens; a chunk is one token here, so chunks = tokens."""

    chunk_bytes: int
    total_bytes: int
    watermark: float
    ratio: float
    policy: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request at the store, the chunks ticks then dropped, and who is left, oldest first."""

    hit: int
    stored: int
    evicted: int
    recency: tuple[Any, ...]
    lost: bool = field(default=False, compare=False)  # LMCache said out of memory; it alone says so


def _case(seed: int) -> Case:
    """Small stores, so that most requests evict; sizes that are not whole numbers of chunks."""
    rng = random.Random(seed)
    chunk_bytes = rng.choice([1, 4095, 4096, 4097, 12_000])
    capacity = rng.randint(1, 40)
    history: list[tuple[int, ...]] = [()]
    prompts = []
    for _ in range(rng.randint(15, 35)):
        base = rng.choice(history)
        cut = rng.choice([len(base), rng.randint(0, len(base))])
        fresh = tuple(rng.randrange(3) for _ in range(rng.randint(0, capacity // 2 + 1)))
        prompts.append((base[:cut] + fresh)[: capacity + 3] or (0,))
        history.append(prompts[-1])
    return Case(
        chunk_bytes=chunk_bytes,
        total_bytes=capacity * align_up(chunk_bytes) + rng.choice([0, 0, 1, 4000]),
        watermark=rng.choice([0.5, 0.8, 0.8, 0.95, 1.0]),
        ratio=rng.choice([0.01, 0.2, 0.2, 0.5, 1.0]),
        policy=rng.choice(["LRU", "LRU", "LRU", "noop"]),
        prompts=tuple(prompts),
    )


def _by_lmcache(case: Case) -> Iterator[Outcome]:
    lmcache = lmcache_storage()
    memory = lmcache.config.L1MemoryManagerConfig(case.total_bytes, use_lazy=False, shm_name="")
    store = lmcache.L1Manager(lmcache.config.L1ManagerConfig(memory))
    eviction = lmcache.config.EvictionConfig(case.policy, case.watermark, case.ratio)
    controller = lmcache.L1EvictionController(store, eviction)
    policy = controller._eviction_policy
    torch = lmcache.torch
    layout = lmcache.api.MemoryLayoutDesc([torch.Size([case.chunk_bytes])], [torch.uint8])
    try:
        for prompt in case.prompts:
            keys = [_object_key(prompt[: end + 1]) for end in range(len(prompt))]
            hit, stored, lost = _serve(store, keys, layout)
            before = store.report_status()["total_object_count"]
            tick_until_settled(controller, store, policy=case.policy, watermark=case.watermark)
            after = store.report_status()["total_object_count"]
            order = tuple(policy.get_eviction_candidates(10**6)) if case.policy == "LRU" else ()
            yield Outcome(hit, stored, before - after, order, lost)
    finally:
        store.close()


def _object_key(prefix: tuple[int, ...]) -> Any:
    return lmcache_storage().api.ObjectKey(chunk_hash=bytes(prefix), model_name="m", kv_rank=0)


def _serve(store: Any, keys: list[Any], layout: Any) -> tuple[int, int, bool]:
    """One request against the store: (chunks hit, chunks newly written, the write was refused)."""
    success, full = lmcache_storage().L1Error.SUCCESS, lmcache_storage().L1Error.OUT_OF_MEMORY
    found = store.reserve_read(keys)
    hit = next((i for i, key in enumerate(keys) if found[key][0] != success), len(keys))
    store.finish_read([key for key in keys if found[key][0] == success])
    store.touch_keys(keys[:hit])
    written, lost = [], False
    if keys[hit:]:
        reserved = store.reserve_write(keys[hit:], [False] * len(keys[hit:]), layout)
        written = [key for key, (error, _) in reserved.items() if error == success]
        lost = any(error == full for error, _ in reserved.values())
        store.finish_write(written)
    store.touch_keys(keys)  # END_SESSION
    return hit, len(written), lost


def _by_sim(case: Case) -> Iterator[Outcome]:
    unit = align_up(case.chunk_bytes)
    store = HostChunks(
        case.total_bytes // unit,
        watermark=case.watermark,
        evict_ratio=case.ratio,
        policy=case.policy,
        total_bytes=case.total_bytes,
        chunk_bytes=case.chunk_bytes,
    )
    names = PrefixKeys(1)
    prefix_of: dict[int, tuple[int, ...]] = {}
    for prompt in case.prompts:
        keys = names.of(prompt)
        prefix_of.update({key: prompt[: end + 1] for end, key in enumerate(keys)})
        hit = store.longest_hit(keys)
        stored = store.store(keys[hit:])
        store.touch(keys)
        evicted = store.settle()
        order = [_object_key(prefix_of[key]) for key in store.recency()]
        yield Outcome(hit, stored, evicted, tuple(order) if case.policy == "LRU" else ())


@dataclass(slots=True)
class Tally:
    """What a comparison really covered; ``difference`` is the first one found, or None."""

    difference: str | None = None
    requests: int = 0
    with_hit: int = 0
    evictions: int = 0
    lost_stores: int = 0


def _mismatch(seed: int, **sim_changes: Any) -> Tally:
    case = _case(seed)
    tally = Tally()
    sides = zip(_by_lmcache(case), _by_sim(replace(case, **sim_changes)), strict=True)
    for number, (real, sim) in enumerate(sides):
        if real != sim:
            tally.difference = f"seed {seed}, request {number}: LMCache {real}, sim {sim}"
            return tally
        tally.requests += 1
        tally.with_hit += real.hit > 0
        tally.evictions += real.evicted > 0
        tally.lost_stores += real.lost
    return tally


def test_host_chunks_equal_lmcache_after_every_request_of_random_workloads() -> None:
    tallies = [_mismatch(seed) for seed in range(N_WORKLOADS)]
    assert [t.difference for t in tallies if t.difference] == []
    assert sum(t.requests for t in tallies) >= MIN_REQUESTS
    assert sum(t.with_hit for t in tallies) >= MIN_WITH_HITS
    assert sum(t.evictions for t in tallies) >= MIN_EVICTIONS
    assert sum(t.lost_stores for t in tallies) >= MIN_LOST_STORES


def test_a_wrong_eviction_ratio_is_caught_by_the_same_comparison() -> None:
    caught = [seed for seed in range(40) if _mismatch(seed, ratio=0.3).difference]
    assert len(caught) >= 10
