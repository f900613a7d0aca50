"""What is compared: arms that differ in one factor, and the server shape they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

GIB = 2**30

Build = Literal["cpu", "gpu", "fake"]
"""Engine build: vLLM's CPU wheel, its CUDA wheel, or the scripted loopback server of the tests."""

TierKind = Literal["lmcache-mp", "lmcache", "native", "simple"]
"""What keeps KV in host memory. ``lmcache-mp``: LMCache's server beside vLLM. ``lmcache``: LMCache
in vLLM's process. ``native``: vLLM's own offloading. ``simple``: vLLM's simple CPU offload."""

TIER_KINDS: tuple[TierKind, ...] = get_args(TierKind)

CONNECTORS: Mapping[TierKind, str] = {
    "lmcache-mp": "LMCacheMPConnector",
    "lmcache": "LMCacheConnectorV1",
    "native": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
}
"""The class of each tier in vLLM's log ("Creating v1 connector with name")."""

NOT_ON_CPU: Mapping[TierKind, str] = {
    "lmcache": "on vLLM's CPU build LMCache finds no connector for the device and turns itself off: "
    "every request is answered, nothing is cached, and each takes 3 s more",
    "native": "vLLM's CPU build refuses it: CPU offloading needs a CUDA-alike or XPU device",
    "simple": "vLLM's CPU build fails to start with it: it needs CUDA streams with priorities",
}
"""Why a tier cannot be measured without a GPU (vLLM 0.32.0, LMCache 0.5.6)."""


def connector_class(tier: TierKind | None, connector: Mapping[str, Any] | None) -> str | None:
    """The class vLLM creates for ``tier`` or for a ``connector`` of the plan's own; None: none."""
    if connector is not None:
        return str(connector["kv_connector"])
    return None if tier is None else CONNECTORS[tier]


@dataclass(frozen=True, slots=True)
class HostTier:
    """A tier of KV in host memory; ``gib`` in GiB, ``chunk_tokens`` is the unit it keeps.

    ``watermark``, ``evict_ratio`` (shares in (0, 1]) and the policy ``noop`` exist for
    ``lmcache-mp`` alone. Eviction there (LMCache 0.5.6 ``eviction_controller.eviction_loop``):
    once a second, at or above ``watermark``, ``evict_ratio`` of the stored chunks are dropped.
    """

    gib: float
    kind: TierKind = "lmcache-mp"
    chunk_tokens: int = 256
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: Literal["LRU", "noop"] = "LRU"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The vLLM server every arm of a plan shares.

    ``num_gpu_blocks`` includes vLLM's null block: usable blocks are one fewer.
    ``max_num_batched_tokens`` must be at least the longest prompt, so that prefill is one step and
    the host tier's eviction timer cannot fall inside a request. ``load_format`` "dummy": weights
    are made up, and outputs mean nothing. ``eager``: no compilation and no CUDA graphs, which
    saves most of a start; the CPU build always runs so.
    """

    build: Build
    model: str
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str
    load_format: Literal["auto", "dummy"] = "auto"
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration compared; ``name`` is the journal's field ``config``.

    ``host`` None: vLLM alone. ``env``, ``flags`` and ``connector`` (a ``--kv-transfer-config`` in
    place of a tier's) are a plan's own: what they do to the tiers, nobody here knows.
    """

    name: str
    server: ServerSpec
    host: HostTier | None = None
    prefix_caching: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    connector: Mapping[str, Any] | None = None

    @property
    def connector_class(self) -> str | None:
        """The KV connector vLLM must be seen to create; None for none."""
        return connector_class(self.host.kind if self.host else None, self.connector)

    @property
    def has_lmcache_server(self) -> bool:
        """Whether an LMCache server runs beside vLLM."""
        return self.host is not None and self.host.kind == "lmcache-mp"


SUPPORTED: Final = ("0.32.0", "0.5.6")
"""The (vLLM, LMCache) pair the predictor is proven on."""
