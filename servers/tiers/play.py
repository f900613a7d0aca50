"""How the scripted server shows a host tier: what all kinds have in common.

The tokens are those of ``sim.tiers``. A kind adds the counters, gauges and pages it has in the
engines, under the names read there, so that a reader's own table of names is not checked by itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sim.predict import Prediction
from sim.tiers.host import align_up
from sim.tiers.settings import HostSettings, TierKind

Sample = tuple[str, tuple[tuple[str, str], ...], float]
"""A sample's whole name, its labels, and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTier(HostSettings):
    """The tier pretended, and what its pages say of the server it belongs to.

    ``host_chunks`` None: there is none. ``chunk_bytes``: of one chunk. ``host_bytes`` None: exactly
    those chunks, aligned.
    """

    model_name: str = "fake"
    block_size: int = 32
    host_chunks: int | None = None
    chunk_bytes: int = 2**20
    host_bytes: int | None = None

    def bytes_of(self, n_tokens: int) -> int:
        """KV of so many tokens."""
        return n_tokens * self.chunk_bytes // self.chunk_tokens

    def total_host_bytes(self) -> int:
        """Bytes of the whole host tier."""
        return self.host_bytes or (self.host_chunks or 0) * align_up(self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class TierNow:
    """What the tier is in now. ``open_chunks``: of stores that are not over. ``faults``: scripted."""

    spec: PlayedTier
    resident: int
    open_chunks: int
    faults: Mapping[str, Any]

    @property
    def used_bytes(self) -> int:
        """Bytes that hold chunks."""
        return self.resident * align_up(self.spec.chunk_bytes)

    @property
    def usage(self) -> float:
        """Used share of all bytes."""
        total = self.spec.total_host_bytes()
        return self.used_bytes / total if total else 0.0


class Play:
    """One kind of host tier; as it stands here, one that shows nothing of itself.

    Samples named ``vllm:`` are on vLLM's page and get its labels, all others on the tier's own.
    ``simulated_as``: the kind that moves its tokens, where that is another. ``cached_source``: what
    vLLM's counters call where they came from. ``zeros``: samples that are there from the start.
    """

    simulated_as: TierKind | None = None
    cached_source: str = "external_unspecified"
    zeros: tuple[Sample, ...] = ()

    def counted(self, spec: PlayedTier, served: Prediction) -> Prediction:
        """``served`` as the tier accounts for it."""
        return served

    def loaded(self, spec: PlayedTier, served: Prediction, *, evicted: int) -> Iterable[Sample]:
        """What is added to counters by the first token; ``evicted``: chunks dropped since the last."""
        return ()

    def stored(self, spec: PlayedTier, served: Prediction) -> Iterable[Sample]:
        """What is added to counters when the request's stores are over."""
        return ()

    def gauges(self, now: TierNow) -> Iterable[Sample]:
        """Live values; those of vLLM's page from the first step on."""
        return ()

    def pages(self, now: TierNow) -> Mapping[str, object]:
        """JSON by path, on LMCache's port, beside /metrics."""
        return {}
