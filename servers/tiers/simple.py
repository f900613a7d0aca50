"""vLLM's simple CPU offload (``SimpleCPUOffloadConnector``; vLLM 0.32)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from servers.metrics import Series
from servers.ports import Ports
from servers.tiers.base import Asked, HostTier
from servers.tiers.native import NativeOffload
from servers.tiers.play import Play, PlayedTier, Sample, TierNow
from sim.predict import Prediction
from sim.split import TokenSplit
from sim.tiers.settings import TierKind

_INFO: Final = Series("simple_offload", "vllm:simple_kv_offload_info", "optional", kind="info")


class SimpleOffload(NativeOffload):
    """The same options as vLLM's own offloading; the environment decides between the two."""

    connector = "SimpleCPUOffloadConnector"
    not_on_cpu = "vLLM's CPU build fails to start with it: it needs CUDA streams with priorities"
    size_is = None
    lies_in_shm = False
    infos = (_INFO,)

    def env(self, host: HostTier, ports: Ports) -> dict[str, str]:
        """What makes vLLM take it (``VllmConfig._post_init_kv_transfer_config``)."""
        return {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}

    def facts(self, asked: Asked) -> dict[str, Any]:
        """The GiB it was given and the blocks it made of them."""
        blocks = asked.infos.get(_INFO.name, {}).get("capacity_blocks")
        return super().facts(asked) | {"host_blocks": None if blocks is None else int(blocks)}

    def play(self) -> Play:
        return SimplePlay()


class SimplePlay(Play):
    """Blocks of loads, none of stores; played as ``native``: exact while nothing is evicted."""

    simulated_as: TierKind | None = "native"
    cached_source = "host"

    def counted(self, spec: PlayedTier, served: Prediction) -> Prediction:
        """It never loads a prompt's last block.

        (``SimpleCPUOffloadScheduler.get_num_new_matched_tokens``: max_hit_len.)
        """
        split, block = served.split, spec.block_size
        if split.computed > 0:
            return served
        return replace(
            served,
            split=TokenSplit(split.prompt_tokens, block, split.gpu_hit, split.host_loaded - block),
            loaded_chunks=served.loaded_chunks - 1,
            moved_tokens=served.moved_tokens - block,
        )

    def loaded(self, spec: PlayedTier, served: Prediction, *, evicted: int) -> Iterator[Sample]:
        if served.moved_tokens:
            blocks = served.moved_tokens // spec.block_size
            yield "vllm:simple_kv_offload_load_blocks_total", (), blocks

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        yield "vllm:simple_kv_offload_pending_store_blocks", (), now.open_chunks
        # And the pool's null block.
        yield "vllm:simple_kv_offload_used_blocks", (), now.open_chunks + 1
        capacity = ("capacity_blocks", str(now.spec.host_chunks))
        others = (("backend", "cpu"), ("lazy_offload", "false"), ("page_cache", "false"))
        yield "vllm:simple_kv_offload_info", (*others, capacity), 1.0


TIER: Final = SimpleOffload()
