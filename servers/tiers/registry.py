"""The kinds of host tier that can be started: a file of this folder each.

A new kind is a name in ``sim.tiers.settings.TierKind``, one file in each of ``sim/tiers``,
``servers/tiers`` and ``harness/counters/tiers``, and a line in each of their registries.
"""

from collections.abc import Mapping
from typing import Final

from servers.tiers import lmcache, lmcache_mp, native, simple
from servers.tiers.base import ServedTier
from sim.tiers.settings import HostKind, TierKind

SERVED: Final[Mapping[TierKind, ServedTier]] = {
    "lmcache-mp": lmcache_mp.TIER,
    "lmcache": lmcache.TIER,
    "native": native.TIER,
    "simple": simple.TIER,
}


def served_tier(kind: HostKind | None) -> ServedTier | None:
    """How ``kind`` is started and asked; None where there is no host tier."""
    return None if kind is None or kind == "none" else SERVED[kind]


def keeps_blocks(kind: object) -> bool:
    """Whether ``kind``, anything a file may say, is a tier whose chunk is vLLM's block."""
    return any(name == kind and tier.keeps_blocks for name, tier in SERVED.items())
