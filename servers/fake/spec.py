"""What the loopback server pretends to be: its sizes, its tiers, and what it was started with."""

from dataclasses import dataclass

from servers.tiers.registry import SERVED
from sim.tiers.host import align_up
from sim.tiers.settings import DEFAULT_KIND, HostSettings, TierKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSpec(HostSettings):
    """The server pretended: sizes as in ``sim.predict.TierSpec``; ``chunk_bytes`` per chunk.

    ``host_chunks`` None: no host tier, and ``host_kind`` says nothing. ``host_bytes`` None: exactly
    those chunks, aligned. ``kv_offloading_size``: the option of that name, as vLLM says it.
    ``max_model_len`` in tokens, prompt and output.
    """

    model_name: str = "fake"
    block_size: int = 32
    num_gpu_blocks: int = 64
    host_kind: TierKind = DEFAULT_KIND
    host_chunks: int | None = None
    chunk_bytes: int = 2**20
    host_bytes: int | None = None
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

    def bytes_of(self, n_tokens: int) -> int:
        """KV of so many tokens."""
        return n_tokens * self.chunk_bytes // self.chunk_tokens

    def total_host_bytes(self) -> int:
        """Bytes of the whole host tier."""
        return self.host_bytes or (self.host_chunks or 0) * align_up(self.chunk_bytes)
