"""The servers' own counters around one request: where its prompt tokens came from.

A reading is a Snapshot of raw counters; two of them that bracket exactly one finished request give
a Measured. Only differences of raw counters are used: hit-rate gauges describe other requests too,
and no absent series is ever read as zero unless its table entry (``harness.counters.pages``) says
why absence means "none yet".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.counters.errors import CounterError, CounterReset, ForeignTraffic, MissingSeries
from harness.counters.pages import SPLIT_NAMES, require_split
from harness.counters.tiers.base import Measured, require_one
from harness.counters.tiers.registry import COUNTED, STATE_NAMES, tier_of, with_tier
from servers.metrics import NAMED, OTHERS_FINISHED
from sim.split import TokenSplit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Raw counters of one reading, by the names of the tables above; ``host`` None: no host tier.

    ``launch`` identifies the server processes (the caller's launch id plus the start times the
    servers report, where they do).
    """

    vllm: Mapping[str, int]
    host: Mapping[str, int] | None
    launch: str

    def flat(self) -> dict[str, int]:
        """Both servers' counters in one dict, as the journal keeps them; names do not collide."""
        return {**self.vllm, **(self.host or {})}


def delta(
    before: Snapshot,
    after: Snapshot,
    *,
    prompt_tokens: int,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """What one request of ``prompt_tokens`` tokens did between two readings of one launch.

    Raises CounterReset, ForeignTraffic, MissingSeries or CounterError instead of guessing.
    """
    if before.launch != after.launch:
        raise CounterReset(
            f"the readings come from two server processes: {before.launch} and {after.launch}",
            hint="a server restarted during the session; its cache is gone, so run it again",
        )
    return derive(
        before.flat(),
        after.flat(),
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
    )


def derive(
    before: Mapping[str, int],
    after: Mapping[str, int],
    *,
    prompt_tokens: int,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """The same from two flat counter dicts (``Snapshot.flat``), for re-deriving a journal's rows.

    Which tier it was follows from the counters' names. ``chunk_tokens`` is None without a host
    tier; ``chunk_bytes`` is used where the tier's state does not tell. Raises as ``delta``.
    """
    moved = moved_between(before, after)
    if moved["preemptions"]:
        raise CounterError(
            f"{moved['preemptions']} preemptions happened: a preempted request counts its own "
            "blocks again, so its tokens cannot be attributed",
            hint="give the server more KV blocks or shorten the prompts",
        )
    require_one(moved["finished"], "vLLM finished", "requests")
    if others := moved.get(OTHERS_FINISHED):
        raise ForeignTraffic(
            f"{others} requests of another model finished beside ours",
            hint="it shares the GPU and the caches: give the server to this run alone",
        )
    return with_tier(
        Measured(_split(moved, prompt_tokens, with_host=tier_of(after) is not None)),
        moved,
        after,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
    )


_MAY_APPEAR = {
    s.name for tier in COUNTED.values() for s in tier.host_series if s.presence == "optional"
} | {OTHERS_FINISHED}  # from the first request of the first other model on


def moved_between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Differences of the counters present after; one absent before was first exported between.

    Raises MissingSeries for one that came or went, CounterReset for one that fell.
    """
    gone = sorted(set(before) - set(after))
    if gone:
        raise MissingSeries(f"{', '.join(gone)} no longer exported after the request")
    for name in ("finished", "preemptions"):
        if name not in before or name not in after:
            raise MissingSeries(f"{name} is not among the counters: {sorted(after)}")
    appeared = set(after) - set(before) - STATE_NAMES
    late = sorted(appeared - _MAY_APPEAR)
    if late:
        raise MissingSeries(f"{', '.join(late)} not exported before the request, only after it")
    moved = {n: v - before.get(n, 0) for n, v in after.items() if n not in STATE_NAMES}
    for name, change in moved.items():
        if change < 0:
            raise CounterReset(
                f"counter {name} fell from {before[name]} to {after[name]}",
                hint="the server restarted or its metrics were reset; run the session again",
            )
    return moved


def _split(moved: Mapping[str, int], prompt_tokens: int, *, with_host: bool) -> TokenSplit:
    if all(name in moved for name in SPLIT_NAMES):
        computed, gpu_hit, loaded = (moved[name] for name in SPLIT_NAMES)
        # Until April 2026 a token recomputed after a full hit was counted as a hit as well.
        again = moved.get("prompt_recomputed", 0)
        from_gpu = min(again, gpu_hit)
        gpu_hit, loaded = gpu_hit - from_gpu, loaded - (again - from_gpu)
        return _checked(prompt_tokens, computed, gpu_hit, loaded)
    require_split(moved, with_host=with_host)
    if moved["prefix_queries"] != prompt_tokens:
        # vLLM < 0.27 queries again each time a connector defers the request (#48860).
        raise CounterError(
            f"{NAMED['prefix_queries']} rose by {moved['prefix_queries']} for a prompt of "
            f"{prompt_tokens} tokens: hits are counted more than once",
            hint=f"use a vLLM that exports {NAMED['prompt_computed']} (0.16 or later)",
        )
    # Without a host tier nothing external can be hit, exported or not.
    gpu_hit, loaded = moved["prefix_hits"], moved.get("external_hits", 0)
    computed = moved["prompt_tokens"] - gpu_hit - loaded
    return _checked(prompt_tokens, computed, gpu_hit, loaded)


def _checked(prompt_tokens: int, computed: int, gpu_hit: int, host_loaded: int) -> TokenSplit:
    total = computed + gpu_hit + host_loaded
    numbers = f"{computed} computed + {gpu_hit} GPU + {host_loaded} host"
    if total > prompt_tokens:
        raise ForeignTraffic(
            f"{numbers} = {total} prompt tokens, our prompt has {prompt_tokens}",
            hint="another client's request, or a request counted twice, is in the difference",
        )
    if total < prompt_tokens or min(computed, gpu_hit, host_loaded) < 0:
        raise CounterError(
            f"{numbers} = {total} prompt tokens do not account for our prompt of {prompt_tokens}"
        )
    return TokenSplit(prompt_tokens, computed, gpu_hit, host_loaded)
