"""What the loopback server pretends to be: its sizes, its tiers, and what it was started with."""

from dataclasses import dataclass
from typing import Final

from servers.tiers.play import Play, PlayedTier
from servers.tiers.registry import SERVED
from sim.tiers.registry import with_host
from sim.tiers.settings import DEFAULT_KIND, TierKind
from sim.tiers.spec import TierSpec

_UNLIMITED_TOKENS: Final = 2**31
"""Batch size of the fake: every prompt is one prefill step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSpec(PlayedTier):
    """The server pretended: sizes as in ``sim.predict.TierSpec``.

    ``host_kind`` says nothing where ``host_chunks`` is None. ``kv_offloading_size``: the option of
    that name, as vLLM says it. ``max_model_len`` in tokens, prompt and output.
    """

    num_gpu_blocks: int = 64
    host_kind: TierKind = DEFAULT_KIND
    prefix_caching: bool = True
    kv_offloading_size: str = "None"
    max_model_len: int = 32768
    version: str = "0.32.0"

    @property
    def kind(self) -> TierKind | None:
        """The host tier's kind; None without one."""
        return None if self.host_chunks is None else self.host_kind

    @property
    def has_lmcache_port(self) -> bool:
        """Whether LMCache answers on a port of its own."""
        return self.kind is not None and SERVED[self.kind].has_lmcache

    def play(self) -> Play:
        """How its host tier shows."""
        return Play() if self.kind is None else SERVED[self.kind].play()

    def tiers(self, *, drop_stores: bool = False) -> TierSpec:
        """The tiers behind the answers; ``drop_stores``: a host tier that holds nothing ever."""
        gpu_only = TierSpec(
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_num_batched_tokens=_UNLIMITED_TOKENS,
            engine=self.version,
            prefix_caching=self.prefix_caching,
        )
        if self.kind is None or drop_stores:
            return gpu_only
        return with_host(
            gpu_only,
            self.play().simulated_as or self.kind,
            self,
            chunks=self.host_chunks,
            host_bytes=self.host_bytes,
            chunk_bytes=self.chunk_bytes,
        )
