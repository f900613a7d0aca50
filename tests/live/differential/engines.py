"""The installed engines' classes, imported on use: it takes seconds and warns on the way."""

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sim.tiers.spec import TierSpec


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Import and set up engines in here: their logs, telemetry and warnings are theirs."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # read once, by the first import
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def vllm_core() -> SimpleNamespace:
    """What vLLM's block pool needs; the same names in every version from 0.23 to 0.33."""
    with quietly():
        import torch
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request
    kv_cache_utils.init_none_hash(sha256)
    return SimpleNamespace(
        version=vllm.__version__,
        float32=torch.float32,
        SamplingParams=SamplingParams,
        sha256=sha256,
        interface=kv_cache_interface,
        utils=kv_cache_utils,
        BlockPool=BlockPool,
        KVCacheManager=KVCacheManager,
        Request=Request,
    )


@cache
def vllm_scheduling() -> SimpleNamespace:
    """What a whole scheduler needs."""
    core = vllm_core()
    with quietly():
        from vllm import config
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.structured_output import StructuredOutputManager
    return SimpleNamespace(
        **vars(core),
        config=config,
        Scheduler=Scheduler,
        AsyncScheduler=AsyncScheduler,
        ModelRunnerOutput=ModelRunnerOutput,
        KVConnectorOutput=KVConnectorOutput,
        StructuredOutputManager=StructuredOutputManager,
    )


@cache
def lmcache_storage() -> SimpleNamespace:
    """LMCache's store and its eviction, whose clock ``tick_until_settled`` plays."""
    with quietly():
        import torch
        from lmcache.v1.distributed import api, config
        from lmcache.v1.distributed.error import L1Error
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.storage_controllers import eviction_controller
    eviction_controller.EvictionController.start = lambda _self: None
    eviction_controller.EvictionController.stop = lambda _self: None
    eviction_controller.time = SimpleNamespace(sleep=lambda _s: None, monotonic=time.monotonic)
    return SimpleNamespace(
        torch=torch,
        api=api,
        config=config,
        L1Error=L1Error,
        L1Manager=L1Manager,
        L1EvictionController=eviction_controller.L1EvictionController,
    )


class _OnePass:
    """A stop flag that lets one pass through the eviction loop, which asks before each."""

    def __init__(self) -> None:
        self._asked = 0

    def is_set(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def set(self) -> None:
        """The server's close asks for it."""


def tick(controller: Any) -> None:
    """The body of LMCache's eviction thread, once."""
    controller._stop_flag = _OnePass()
    controller.eviction_loop()


def tick_until_settled(controller: Any, l1: Any, *, policy: str, watermark: float) -> None:
    """The same as often as a settled server would have run it."""
    used, total = l1.get_memory_usage()
    while policy == "LRU" and used and used / total >= watermark:
        tick(controller)
        used, total = l1.get_memory_usage()


def kv_cache_config(tiers: TierSpec, window: int | None = None) -> Any:
    """One group of one layer over the blocks of ``tiers``: full attention, or of a ``window``."""
    vllm = vllm_core()
    sizes = {"block_size": tiers.block_size, "num_kv_heads": 1, "head_size": 64}
    if window is None:
        spec = vllm.interface.FullAttentionSpec(**sizes, dtype=vllm.float32)
    else:
        spec = vllm.interface.SlidingWindowSpec(**sizes, dtype=vllm.float32, sliding_window=window)
    return vllm.interface.KVCacheConfig(
        num_blocks=tiers.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[vllm.interface.KVCacheGroupSpec(["layer"], spec)],
    )


@cache
def _model_folder() -> str:
    """A folder with the config.json of a one-layer model; nothing reads any weights."""
    folder = tempfile.mkdtemp(prefix="kvcliff-differential-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 64,
        "vocab_size": 16,
        "max_position_embeddings": 10**6,
        "torch_dtype": "float32",
    }
    Path(folder, "config.json").write_text(json.dumps(model))
    return folder


@cache
def _model_config() -> Any:
    with quietly():
        return vllm_scheduling().config.ModelConfig(
            model=_model_folder(), skip_tokenizer_init=True, dtype="float32", max_model_len=10**6
        )


def vllm_config(tiers: TierSpec, *, kv_transfer: dict[str, Any] | None = None) -> Any:
    """The configuration of an engine with ``tiers`` and, if any, a KV connector."""
    config = vllm_scheduling().config
    with quietly():
        made = config.VllmConfig(
            model_config=_model_config(),
            device_config=config.DeviceConfig(device="cpu"),
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=1,
                max_num_batched_tokens=tiers.max_num_batched_tokens,
                max_model_len=10**6,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=tiers.async_scheduling,
            ),
            cache_config=config.CacheConfig(
                block_size=tiers.block_size, enable_prefix_caching=tiers.prefix_caching
            ),
            kv_transfer_config=config.KVTransferConfig(**kv_transfer) if kv_transfer else None,
        )
    made.cache_config.num_gpu_blocks = tiers.num_gpu_blocks
    return made
