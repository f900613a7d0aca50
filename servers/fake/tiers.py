"""The kinds of host tier the loopback server can pretend to have."""

from typing import Final, assert_never

from servers.fake.lmcache import InProcessPlay, ServerPlay
from servers.fake.offload import NativePlay, SimplePlay
from servers.fake.play import Play
from servers.fake.spec import FakeSpec
from sim.tiers.registry import with_host
from sim.tiers.settings import TierKind
from sim.tiers.spec import TierSpec

_UNLIMITED_TOKENS: Final = 2**31
"""Batch size of the fake: every prompt is one prefill step."""


def play_of(kind: TierKind | None) -> Play:
    """How ``kind`` is shown; one line a kind, and mypy names a kind that has none."""
    match kind:
        case None:
            return Play()
        case "lmcache-mp":
            return ServerPlay()
        case "lmcache":
            return InProcessPlay()
        case "native":
            return NativePlay()
        case "simple":
            return SimplePlay()
        case _:
            assert_never(kind)


def simulated(spec: FakeSpec, *, drop_stores: bool = False) -> TierSpec:
    """The tiers behind the answers; ``drop_stores``: a host tier that holds nothing ever."""
    gpu_only = TierSpec(
        block_size=spec.block_size,
        num_gpu_blocks=spec.num_gpu_blocks,
        max_num_batched_tokens=_UNLIMITED_TOKENS,
        engine=spec.version,
        prefix_caching=spec.prefix_caching,
    )
    if spec.kind is None or drop_stores:
        return gpu_only
    kind = play_of(spec.kind).simulated_as or spec.kind
    return with_host(
        gpu_only,
        kind,
        spec,
        chunks=spec.host_chunks,
        host_bytes=spec.host_bytes,
        chunk_bytes=spec.chunk_bytes,
    )
