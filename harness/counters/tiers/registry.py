"""The kinds of host tier whose counters are known: a file of this folder each."""

from collections.abc import Iterable, Mapping
from typing import Final, assert_never

from harness.counters.errors import CounterError, MissingSeries
from harness.counters.tiers import lmcache, lmcache_mp, native, simple
from harness.counters.tiers.base import CountedTier, Measured, Unit
from servers.metrics import PROCESS_START, VLLM_GAUGES, VLLM_SERIES, Series
from servers.tiers.registry import INFOS
from sim.tiers.settings import TIER_KINDS, TierKind


def _counted(kind: TierKind) -> CountedTier:
    """One line a kind; mypy names a kind that has none."""
    match kind:
        case "lmcache-mp":
            return lmcache_mp.TIER
        case "lmcache":
            return lmcache.TIER
        case "native":
            return native.TIER
        case "simple":
            return simple.TIER
        case _:
            assert_never(kind)


COUNTED: Final[Mapping[TierKind, CountedTier]] = {kind: _counted(kind) for kind in TIER_KINDS}

STATE_NAMES: Final = frozenset(name for tier in COUNTED.values() for name in tier.state)
"""Live state kept beside the counters; it may go down."""

BY_EVENTS: Final = "token_sources"
"""The word for bytes that follow from what a request loaded, where others were in flight."""

LOADED_SOURCES: Final = (
    *(s for tier in COUNTED.values() for s in tier.loaded_sources), BY_EVENTS,
)  # fmt: skip
"""Every word for what the bytes moved host → GPU follow from."""

ALL_SERIES: Final[tuple[Series, ...]] = (
    *VLLM_SERIES, *VLLM_GAUGES, *INFOS, PROCESS_START,
    *(s for tier in COUNTED.values() for s in (*tier.vllm_series, *tier.host_series, *tier.gauges)),
)  # fmt: skip
"""Every metric kvcliff reads."""


def tier_of(counters: Iterable[str]) -> TierKind | None:
    """The host tier a reading is of: each kind's readings have a name of their own, from the first.

    None: no tier, or one that only vLLM's own counters tell of.
    """
    names = set(counters)
    kinds = [kind for kind, tier in COUNTED.items() if tier.witness in names]
    if len(kinds) > 1:
        raise CounterError(f"counters of several host tiers in one reading: {', '.join(kinds)}")
    return kinds[0] if kinds else None


def with_tier(
    gpu: Measured,
    moved: Mapping[str, int],
    after: Mapping[str, int],
    *,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """``gpu`` with what the tier did, from the differences ``moved`` and the reading ``after``.

    The kind of tier follows from the names in ``after``. Raises ValueError without
    ``chunk_tokens`` where there is a tier, CounterError where its counters are not all there or
    contradict themselves.
    """
    kind = tier_of(after)
    if kind is None:
        return gpu
    if chunk_tokens is None:
        raise ValueError("chunk_tokens is None but the counters include a host tier")
    tier = COUNTED[kind]
    needed = (s.name for s in (*tier.vllm_series, *tier.host_series) if s.presence == "lazy")
    if missing := sorted(name for name in needed if name not in moved):
        raise MissingSeries(f"{', '.join(missing)} not among the counters of a {kind} tier")
    unit = Unit(chunk_tokens, tier.chunk_bytes(after) or chunk_bytes)
    return tier.measured(gpu, moved, unit)


def refused_chunks(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Chunks a tier found no room for between two readings; 0 where it counts none."""
    names = (tier.refused for tier in COUNTED.values() if tier.refused)
    return sum(after.get(name, 0) - before.get(name, 0) for name in names)
