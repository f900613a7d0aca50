"""What the loopback server pretends to be: its sizes, its tiers, and what it was started with."""

from dataclasses import dataclass, replace

from sim.predict import TierSpec
from sim.tiers.host import align_up
from sim.tiers.settings import TierKind

UNLIMITED_TOKENS = 2**31
"""Batch size of the fake: every prompt is one prefill step."""


PLAYED: tuple[TierKind, ...] = ("lmcache-mp", "lmcache", "native", "simple")
"""The kinds of host tier it can pretend to have."""


@dataclass(frozen=True, slots=True)
class FakeSpec:
    """The server pretended: sizes as in ``sim.predict.TierSpec``; ``chunk_bytes`` per chunk.

    ``host_chunks`` None: no host tier. ``host_kind`` then says nothing; ``simple`` is played as
    ``native`` that leaves the last block of a prompt found in full (exact while nothing is
    evicted). ``host_bytes`` None: exactly those chunks, aligned. ``kv_offloading_size``: the
    option of that name, as vLLM says it. ``max_model_len`` in tokens, prompt and output.
    """

    model_name: str = "fake"
    block_size: int = 32
    num_gpu_blocks: int = 64
    host_kind: TierKind = "lmcache-mp"
    host_chunks: int | None = None
    chunk_tokens: int = 256
    chunk_bytes: int = 2**20
    host_bytes: int | None = None
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: str = "LRU"
    prefix_caching: bool = True
    kv_offloading_size: str = "None"
    max_model_len: int = 32768
    version: str = "0.32.0"

    def __post_init__(self) -> None:
        """ValueError for a kind of tier the server was not taught: it would serve another's."""
        if self.host_kind not in PLAYED:
            raise ValueError(f"no {self.host_kind!r} is played; known: {', '.join(PLAYED)}")

    @property
    def kind(self) -> TierKind | None:
        """The host tier's kind; None without one."""
        return None if self.host_chunks is None else self.host_kind

    @property
    def has_lmcache_port(self) -> bool:
        """Whether LMCache answers on a port of its own."""
        return self.kind in ("lmcache-mp", "lmcache")

    def tiers(self, *, drop_stores: bool = False) -> TierSpec:
        """The tiers behind the answers; ``drop_stores`` gives a host tier that holds nothing."""
        gpu_only = TierSpec(
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_num_batched_tokens=UNLIMITED_TOKENS,
            engine=self.version,
            prefix_caching=self.prefix_caching,
        )
        if self.kind is None or (drop_stores and self.kind in ("native", "simple")):
            return gpu_only
        is_exact = self.kind == "lmcache-mp" and self.host_bytes is not None and not drop_stores
        return replace(
            gpu_only,
            host="native" if self.kind == "simple" else self.kind,
            host_chunks=0 if drop_stores else self.host_chunks,
            chunk_tokens=self.chunk_tokens,
            watermark=self.watermark,
            evict_ratio=self.evict_ratio,
            policy=self.policy,
            host_bytes=self.host_bytes if is_exact else None,
            chunk_bytes=self.chunk_bytes if is_exact else None,
        )

    def total_host_bytes(self) -> int:
        """Bytes of the whole host tier."""
        return self.host_bytes or (self.host_chunks or 0) * align_up(self.chunk_bytes)
