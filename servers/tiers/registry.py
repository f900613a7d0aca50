"""The kinds of host tier that can be started: a file of this folder each."""

from collections.abc import Mapping
from typing import Final, assert_never

from servers.metrics import CACHE_INFO
from servers.tiers import lmcache, lmcache_mp, native, simple
from servers.tiers.base import ServedTier
from sim.tiers.settings import TIER_KINDS, HostKind, TierKind


def _served(kind: TierKind) -> ServedTier:
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


SERVED: Final[Mapping[TierKind, ServedTier]] = {kind: _served(kind) for kind in TIER_KINDS}


INFOS: Final = (CACHE_INFO, *(series for tier in SERVED.values() for series in tier.infos))
"""vLLM's info metrics: what it says of itself in labels."""


def served_tier(kind: HostKind | None) -> ServedTier | None:
    """How ``kind`` is started and asked; None where there is no host tier."""
    return None if kind is None or kind == "none" else SERVED[kind]


def keeps_blocks(kind: object) -> bool:
    """Whether ``kind``, anything a file may say, is a tier whose chunk is vLLM's block."""
    return any(name == kind and tier.keeps_blocks for name, tier in SERVED.items())
