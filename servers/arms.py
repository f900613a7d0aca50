"""What is compared: arms that differ in one factor, and the server shape they share."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Build = Literal["cpu", "gpu", "fake"]
"""Engine build: vLLM's CPU wheel, its CUDA wheel, or the scripted loopback server of the tests."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """An LMCache MP server behind vLLM. ``watermark`` and ``evict_ratio`` are shares in (0, 1].

    Eviction (LMCache 0.5.6 ``eviction_controller.eviction_loop``): once a second, at or above
    ``watermark``, ``evict_ratio`` of the stored chunks are dropped.
    """

    gib: float
    chunk_tokens: int = 256
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: Literal["LRU", "noop"] = "LRU"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The vLLM server every arm of a plan shares.

    ``num_gpu_blocks`` includes vLLM's null block: usable blocks are one fewer.
    ``max_num_batched_tokens`` must be at least the longest prompt, so that prefill is one step and
    the host tier's eviction timer cannot fall inside a request.
    """

    build: Build
    model: str
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration compared; ``host`` None means vLLM alone, GPU prefix cache on.

    ``name`` is the journal's field ``config``.
    """

    name: str
    server: ServerSpec
    host: HostTier | None = None
