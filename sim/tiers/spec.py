"""One server's tiers, described: what the predictor needs to know, and the rules by engine version.

The tiers themselves are ``sim.tiers.gpu_pool`` and ``sim.tiers.lmcache_mp``, ``sim.tiers.lmcache``,
``sim.tiers.native``; what is offered under their names here is theirs.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sim.tiers.gpu_pool import NULL_BLOCK, GpuPool
from sim.tiers.host import ALIGN_BYTES, HostTier, NotPredictable, align_up
from sim.tiers.lmcache import InProcessChunks
from sim.tiers.lmcache_mp import POLICIES, HostChunks
from sim.tiers.native import NativeChunks, Recency
from sim.tiers.prefix_keys import PrefixKeys

__all__ = [
    "ALIGN_BYTES",
    "NEWEST_ENGINE",
    "NULL_BLOCK",
    "POLICIES",
    "EngineRules",
    "GpuPool",
    "HostChunks",
    "HostKind",
    "InProcessChunks",
    "NativeChunks",
    "NotPredictable",
    "PrefixKeys",
    "TierSpec",
    "align_up",
    "engine_note",
    "engine_rules",
    "open_gpu",
    "open_host",
]

HostKind = Literal["none", "lmcache-mp", "lmcache", "native"]
"""``lmcache-mp``: LMCache's server. ``lmcache``: it in vLLM's process. ``native``: vLLM's own."""

HOST_KINDS: tuple[HostKind, ...] = ("none", "lmcache-mp", "lmcache", "native")

OLDEST_ENGINE = (0, 16)
"""The oldest vLLM the GPU rules were run against."""

NEWEST_ENGINE = (0, 33)
"""The newest vLLM that was compared; a newer one is taken for it, and ``engine_note`` says so."""


class EngineRules(NamedTuple):
    """Which rules a vLLM version follows, where versions differ.

    ``native_recency`` None: the version's own host tier is not modelled.
    """

    hashless_first: bool
    native_recency: Recency | None


def engine_rules(engine: str) -> EngineRules:
    """The rules of vLLM ``engine``, a version such as "0.32.0"; a suffix does not matter.

    ``hashless_first`` since 0.24 (PR #42656). Native recency: at request finish since 0.31, at
    access, too, since 0.33; up to 0.30 the scheduler touched whole prefixes before and after each
    store, which is a third rule. Raises ValueError for what is no version and NotPredictable for
    one older than was ever compared.
    """
    version = _version(engine)
    if version < OLDEST_ENGINE:
        oldest = ".".join(map(str, OLDEST_ENGINE))
        raise NotPredictable(f"vLLM {engine} was never compared; {oldest} is the oldest that was")
    recency: Recency | None = None
    if version >= (0, 31):
        recency = "access" if version >= (0, 33) else "finish"
    return EngineRules(hashless_first=version >= (0, 24), native_recency=recency)


def engine_note(engine: str) -> str | None:
    """What a prediction for vLLM ``engine`` takes for granted; None for a version compared.

    Raises ValueError for what is no version.
    """
    if _version(engine) <= NEWEST_ENGINE:
        return None
    newest = ".".join(map(str, NEWEST_ENGINE))
    return f"vLLM {engine}: rules of {newest} assumed; the newest compared is {newest}"


def _version(engine: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", engine)
    if match is None:
        raise ValueError(f"engine {engine!r} is no vLLM version; expected one like '0.32.0'")
    return (int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """What the predictor needs to know of one server.

    ``num_gpu_blocks`` includes vLLM's null block. ``host_chunks`` None means no host tier; with a
    number, ``host`` defaults to ``lmcache-mp``. ``chunk_tokens`` is the host's chunk (for
    ``native``: block_size times its blocks_per_chunk). ``watermark``, ``evict_ratio``, the policy
    ``noop`` and the exact sizes ``host_bytes`` (all of the store) and ``chunk_bytes`` (one chunk,
    before alignment), which must agree with ``host_chunks``, concern ``lmcache-mp`` only.

    ``hashless_first`` and ``native_recency`` None follow ``engine``. ``async_scheduling``, vLLM's
    default, decides what an early stop costs. ``prefix_caching`` False is vLLM's
    ``--no-enable-prefix-caching``: blocks get no hash, and nothing is hit on the GPU; the order in
    which they are used again, which then matters to no token, is that of vLLM ≥ 0.31.
    """

    block_size: int
    num_gpu_blocks: int
    max_num_batched_tokens: int
    engine: str = "0.32.0"
    hashless_first: bool | None = None
    async_scheduling: bool = True
    prefix_caching: bool = True
    host: HostKind | None = None
    host_chunks: int | None = None
    chunk_tokens: int = 256
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: str = "LRU"
    host_bytes: int | None = None
    chunk_bytes: int | None = None
    native_recency: Recency | None = None

    @property
    def host_kind(self) -> HostKind:
        """``host``, or what its absence means."""
        if self.host is not None:
            return self.host
        return "none" if self.host_chunks is None else "lmcache-mp"


def open_gpu(spec: TierSpec) -> GpuPool:
    """The empty GPU tier of ``spec``. Raises ValueError for one no server could have."""
    rule = spec.hashless_first
    if rule is None:
        rule = engine_rules(spec.engine).hashless_first
    return GpuPool(spec.num_gpu_blocks, hashless_first=rule)


def open_host(spec: TierSpec) -> HostTier | None:
    """The empty host tier of ``spec``, or None for none.

    Raises ValueError for a spec no server could have, NotPredictable for one that is not modelled.
    """
    kind = spec.host_kind
    if kind not in HOST_KINDS:
        raise ValueError(f"host is {kind!r}; known: {', '.join(HOST_KINDS)}")
    if (kind == "none") != (spec.host_chunks is None):
        raise ValueError(f"host {kind!r} with host_chunks {spec.host_chunks}: one contradicts")
    if spec.host_chunks is None:
        return None
    _check_beside(spec, kind)
    if kind == "lmcache-mp":
        return HostChunks(
            spec.host_chunks,
            chunk_tokens=spec.chunk_tokens,
            watermark=spec.watermark,
            evict_ratio=spec.evict_ratio,
            policy=spec.policy,
            total_bytes=spec.host_bytes,
            chunk_bytes=spec.chunk_bytes,
        )
    if spec.policy.upper() != "LRU":
        raise NotPredictable(
            f"eviction policy {spec.policy!r} is not modelled for host {kind!r}; known: 'LRU'"
        )
    if kind == "lmcache":
        return InProcessChunks(spec.host_chunks, spec.chunk_tokens)
    recency = spec.native_recency or engine_rules(spec.engine).native_recency
    if recency is None:
        raise NotPredictable(
            f"host 'native' of vLLM {spec.engine} is not modelled; 0.31 is the oldest that is"
        )
    return NativeChunks(spec.host_chunks, spec.chunk_tokens, recency=recency)


def _check_beside(spec: TierSpec, kind: HostKind) -> None:
    """Refuse a host tier that does not go with the GPU tier beside it."""
    if spec.chunk_tokens < 1 or spec.chunk_tokens % spec.block_size:
        raise ValueError(
            f"chunks of {spec.chunk_tokens} tokens are not whole blocks of {spec.block_size}; "
            "the engines refuse such a pair"
        )
    if not spec.prefix_caching:
        raise NotPredictable(
            f"host {kind!r} without vLLM's prefix cache: never compared with the engine's classes"
        )
    if kind == "lmcache-mp" and spec.block_size == 1:
        # The load is allotted blocks for all but the last token of a prompt found in full, and
        # LMCache 0.5.6 refuses to write a whole chunk into one block less.
        raise NotPredictable(
            "host 'lmcache-mp' with blocks of 1 token: LMCache cannot load a prompt that it "
            "holds in full"
        )
