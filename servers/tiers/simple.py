"""vLLM's simple CPU offload (``SimpleCPUOffloadConnector``; vLLM 0.32)."""

from typing import Any, Final

from servers.ports import Ports
from servers.series import SIMPLE_INFO
from servers.tiers.base import Asked, HostTier
from servers.tiers.native import NativeOffload


class SimpleOffload(NativeOffload):
    """The same options as vLLM's own offloading; the environment decides between the two."""

    connector = "SimpleCPUOffloadConnector"
    not_on_cpu = "vLLM's CPU build fails to start with it: it needs CUDA streams with priorities"
    size_is = None
    lies_in_shm = False

    def env(self, host: HostTier, ports: Ports) -> dict[str, str]:
        """What makes vLLM take it (``VllmConfig._post_init_kv_transfer_config``)."""
        del host, ports
        return {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}

    def facts(self, asked: Asked) -> dict[str, Any]:
        """The GiB it was given and the blocks it made of them."""
        blocks = asked.infos.get(SIMPLE_INFO.name, {}).get("capacity_blocks")
        return super().facts(asked) | {"host_blocks": None if blocks is None else int(blocks)}


TIER: Final = SimpleOffload()
