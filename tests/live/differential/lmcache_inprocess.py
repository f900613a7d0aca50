"""vLLM's scheduler with LMCache in its process: both halves of ``LMCacheConnectorV1``, for real.

LMCache's engine, its local CPU backend, its lookup over zmq and its adapter run as they do in a
server; the copies to and from a device are LMCache's own ``MockGPUConnector``, which does none.
"""

import contextlib
import gc
import itertools
import os
from collections.abc import Generator
from functools import cache
from types import SimpleNamespace
from typing import Any

from sim.tiers.host import align_up
from tests.live.differential.engines import quietly, vllm_scheduling
from tests.live.differential.schedulers import Engine
from tests.live.differential.workloads import BYTES_PER_TOKEN, Case, Outcome, Prefixes, Step

_numbers = itertools.count(1)


@cache
def _lmcache() -> SimpleNamespace:
    """LMCache's connector on a machine without a device: one rank, and the mock in its place."""
    with quietly():
        import torch
        from lmcache.integration.vllm import utils, vllm_service_factory, vllm_v1_adapter
        from lmcache.v1 import gpu_connector
        from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
        from lmcache.v1.rpc.zmq_transport import ZmqRouterServerTransport
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    one_rank = SimpleNamespace(
        broadcast=lambda tensor, _source: tensor,
        broadcast_object=lambda value, _source: value,
        is_last_rank=True,
    )
    gpu_connector.CreateGPUConnector = lambda _config, metadata, *_rest, **_named: MockGPUConnector(
        metadata.kv_shape
    )
    utils.vllm_layout_hints = lambda _config: {}
    vllm_v1_adapter.get_pp_group = lambda: one_rank
    parallel_state.get_tp_group = lambda: one_rank
    parallel_state.get_tensor_model_parallel_rank = lambda: 0
    # Its close() closes a socket another thread is reading, which zmq answers with an abort.
    vllm_service_factory.VllmServiceFactory.maybe_create_offload_server = lambda _self: None
    # The lookup server's close() waits for one read to time out: 1 s by default.
    ZmqRouterServerTransport.__init__.__defaults__ = (5,)
    return SimpleNamespace(torch=torch, Factory=KVConnectorFactory, Role=KVConnectorRole)


class InProcessWorker:
    """The worker half, and a look into the backend it writes to."""

    def __init__(self, engine: Engine) -> None:
        lmcache = _lmcache()
        self._connector = lmcache.Factory.create_connector(
            config=engine.config,
            role=lmcache.Role.WORKER,
            kv_cache_config=engine.kv_cache_config,
        )
        self._connector.register_kv_caches({"layer": lmcache.torch.zeros(1)})
        self._cache: Any = self._connector._lmcache_engine.lmcache_engine
        assert self._cache is not None, "LMCache did not start; its error is in the log"
        self._backend = self._cache.storage_manager.storage_backends["LocalCPUBackend"]
        self._prefixes = Prefixes(engine.case.tiers.chunk_tokens)
        self._names: dict[Any, int] = {}
        self._n_stored = 0
        self._count_puts()

    def _count_puts(self) -> None:
        """Count what the backend inserts: it tells its policy of each new chunk, once."""
        policy = self._backend.cache_policy
        tell = policy.update_on_put

        def told(key: Any) -> None:
            self._n_stored += 1
            tell(key)

        policy.update_on_put = told

    def run(self, scheduled: Any) -> Any:
        """One step, in the order of vLLM's ``KVConnectorModelRunnerMixin``."""
        connector = self._connector
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        connector.start_load_kv(SimpleNamespace(attn_metadata=object()))
        connector.wait_for_save()
        sent, received = connector.get_finished(scheduled.finished_req_ids)
        failed = connector.get_block_ids_with_load_errors()
        assert not failed, f"LMCache could not load what its lookup found: blocks {failed}"
        connector.clear_connector_metadata()
        return vllm_scheduling().KVConnectorOutput(finished_sending=sent, finished_recving=received)

    def settle(self) -> None:
        """Nothing runs between steps."""

    def chunks(self) -> tuple[int, ...]:
        """Names in the order of the backend's cache, the least recent first."""
        return tuple(self._names[key.chunk_hash] for key in self._backend.hot_cache)

    def stored(self) -> int:
        """Chunks inserted since the start."""
        return self._n_stored

    def name(self, request: Any, step: Step) -> None:
        """Learn the names of the chunks of ``step`` by LMCache's own token database."""
        del request
        hashed = self._cache.token_database.process_tokens(tokens=list(step.prompt))
        self._names.update(
            zip(
                (key.chunk_hash for _, _, key in hashed),
                self._prefixes.of(step.prompt),
                strict=True,
            )
        )

    def close(self) -> None:
        """End LMCache's threads and sockets."""
        self._connector._lmcache_engine.shutdown()


def serve(case: Case) -> Generator[Outcome, None, None]:
    """Every step of ``case`` through one scheduler and one LMCache engine."""
    _lmcache()
    tiers = case.tiers
    assert tiers.host_chunks is not None
    store_bytes = tiers.host_chunks * align_up(tiers.chunk_tokens * BYTES_PER_TOKEN)
    with contextlib.ExitStack() as stack:
        # Every engine collects garbage when it starts: 0.7 s with torch loaded, unless frozen.
        gc.freeze()
        stack.callback(gc.unfreeze)
        engine = Engine(
            case,
            kv_transfer={
                "kv_connector": "LMCacheConnectorV1",
                "kv_role": "kv_both",
                "engine_id": f"kvcliff-{os.getpid()}-{next(_numbers)}",
                "kv_connector_extra_config": {
                    "lmcache.chunk_size": tiers.chunk_tokens,
                    "lmcache.max_local_cpu_size": store_bytes / 2**30,
                    "lmcache.local_cpu": True,
                    "lmcache.save_unfull_chunk": False,
                },
            },
        )
        stack.callback(engine.scheduler.connector._lmcache_engine.shutdown)
        engine.worker = stack.enter_context(contextlib.closing(InProcessWorker(engine)))
        for step in case.steps:
            yield engine.serve(step)
