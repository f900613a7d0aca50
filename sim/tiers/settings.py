"""What a host tier is asked to be; the one place that states these settings and their defaults."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

TierKind = Literal["lmcache-mp", "lmcache", "native", "simple"]
"""What keeps KV in host memory. ``lmcache-mp``: LMCache's server beside vLLM. ``lmcache``: LMCache
in vLLM's process. ``native``: vLLM's own offloading. ``simple``: vLLM's simple CPU offload."""

TIER_KINDS: tuple[TierKind, ...] = get_args(TierKind)

HostKind = Literal["none", TierKind]
"""A kind, or that there is no host tier."""

HOST_KINDS: tuple[HostKind, ...] = ("none", *TIER_KINDS)

DEFAULT_KIND: TierKind = "lmcache-mp"
"""The kind meant where none is named: the one that works with and without a GPU."""


Policy = Literal["LRU", "noop"]
"""The policies that are modelled; ``noop`` never evicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The unit a host tier keeps, and how it evicts.

    ``chunk_tokens``: tokens of a chunk; vLLM's own tiers keep blocks, so there it is the block
    size. ``watermark`` and ``evict_ratio`` (shares in (0, 1]) and the policy ``noop`` exist for
    ``lmcache-mp`` alone: once a second, at or above ``watermark``, ``evict_ratio`` of the stored
    chunks are dropped (LMCache 0.5.6 ``eviction_controller.eviction_loop``).
    """

    chunk_tokens: int = 256
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: Policy = "LRU"

    def settings(self) -> dict[str, Any]:
        """These fields alone, by name, of whatever has more."""
        return {field.name: getattr(self, field.name) for field in fields(HostSettings)}
