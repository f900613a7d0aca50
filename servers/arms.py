"""What is compared: arms that differ in one factor, and the server shape they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from servers.tiers.base import HostTier, ServedTier
from servers.tiers.registry import SERVED
from sim.geometry import KvGeometry
from sim.tiers.settings import TierKind

SUPPORTED: Final = ("0.32.0", "0.5.6")
"""The (vLLM, LMCache) pair the predictor is proven on."""

Build = Literal["cpu", "gpu", "fake"]
"""Engine build: vLLM's CPU wheel, its CUDA wheel, or the scripted loopback server of the tests."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The vLLM server every arm of a plan shares.

    ``num_gpu_blocks`` includes vLLM's null block: usable blocks are one fewer.
    ``max_num_batched_tokens`` must be at least the longest prompt, so that prefill is one step and
    the host tier's eviction timer cannot fall inside a request. ``load_format`` "dummy": weights
    are made up, and outputs mean nothing. ``eager``: no compilation and no CUDA graphs, which
    saves most of a start; the CPU build always runs so. ``max_num_seqs``: requests that run at once,
    the others wait; on CUDA few of them also keep the graph captures few.
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
    max_num_seqs: int = 4

    def geometry(self) -> KvGeometry:
        """The KV of a model on this machine; vLLM is told the model's dtype, and none for its KV."""
        return KvGeometry.from_config(
            Path(self.model), "auto", model_dtype=self.dtype, max_model_len=self.max_model_len
        )


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
    def tier(self) -> ServedTier | None:
        """How its host tier is started and asked; None without one."""
        return None if self.host is None else SERVED[self.host.kind]

    @property
    def connector_class(self) -> str | None:
        """The KV connector vLLM must be seen to create; None for none."""
        return connector_class(self.host.kind if self.host else None, self.connector)


def connector_class(kind: TierKind | None, connector: Mapping[str, Any] | None) -> str | None:
    """The class vLLM creates for a tier or for a ``connector`` of the plan's own; None: none."""
    if connector is not None:
        return str(connector["kv_connector"])
    return None if kind is None else SERVED[kind].connector
