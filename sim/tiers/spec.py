"""One server's tiers, described: what the predictor needs to know, and the rules by engine version."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sim.errors import SpecError
from sim.tiers.host import HostCache, NotPredictable
from sim.tiers.settings import DEFAULT_KIND, HostKind, HostSettings

Recency = Literal["finish", "access"]
"""When vLLM's own offloading makes a chunk recent: see ``sim.tiers.native``."""

COMPARED_ENGINES = ((0, 23), (0, 24), (0, 27), (0, 31), (0, 32), (0, 33))
"""The vLLMs whose own classes the rules were run against (``scripts/versions.py``).

One older or newer than all is taken for the nearest of them, and ``engine_note`` says so.
"""

OLDEST_ENGINE = (0, 16)
"""The oldest vLLM that counts token sources, which a prediction is held against."""


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
    store, which is a third rule. Raises SpecError for what is no version and NotPredictable for
    one that counts no token sources.
    """
    version = _version(engine)
    if version < OLDEST_ENGINE:
        oldest = ".".join(map(str, OLDEST_ENGINE))
        raise NotPredictable(
            f"vLLM {engine} does not count where tokens came from; {oldest} is the oldest that does"
        )
    recency: Recency | None = None
    if version >= (0, 31):
        recency = "access" if version >= (0, 33) else "finish"
    return EngineRules(hashless_first=version >= (0, 24), native_recency=recency)


def engine_note(engine: str) -> str | None:
    """What a prediction for vLLM ``engine`` takes for granted; None for one among those compared.

    Raises SpecError for what is no version.
    """
    version = _version(engine)
    oldest, newest = COMPARED_ENGINES[0], COMPARED_ENGINES[-1]
    if oldest <= version <= newest:
        return None
    end, which = (oldest, "oldest") if version < oldest else (newest, "newest")
    taken = ".".join(map(str, end))
    return f"vLLM {engine}: rules of {taken} assumed; the {which} compared is {taken}"


def _version(engine: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", engine)
    if match is None:
        raise SpecError(f"engine {engine!r} is no vLLM version; expected one like '0.32.0'")
    return (int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec(HostSettings):
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
    host_bytes: int | None = None
    chunk_bytes: int | None = None
    native_recency: Recency | None = None

    @property
    def host_kind(self) -> HostKind:
        """``host``, or what its absence means."""
        if self.host is not None:
            return self.host
        return "none" if self.host_chunks is None else DEFAULT_KIND


@dataclass(frozen=True, slots=True)
class TierModel:
    """How one kind of host tier is simulated.

    ``open_tier``: an empty one, as a spec describes it; raises NotPredictable with the reason for
    one that is not modelled. ``has_watermark``: a timer evicts it before it is full, so sizes in
    bytes matter to the chunk. ``takes_any_chunk``: its chunks need not be whole GPU blocks.
    """

    open_tier: Callable[[TierSpec], HostCache]
    has_watermark: bool = False
    takes_any_chunk: bool = False

    def evicts_early(self, policy: str) -> bool:
        """Whether it evicts under ``policy`` before it is full."""
        return self.has_watermark and policy != "noop"


def refuse_policy(spec: TierSpec) -> None:
    """NotPredictable for another policy than LRU, in a tier that is modelled with that alone."""
    if spec.policy.upper() != "LRU":
        raise NotPredictable(
            f"eviction policy {spec.policy!r} is not modelled for host {spec.host_kind!r}; "
            "known: 'LRU'"
        )
