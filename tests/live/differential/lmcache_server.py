"""vLLM's scheduler with LMCache's multi-process server: connector, transport and server, for real.

Scheduler half and worker half of ``LMCacheMPConnector`` talk over zmq to a cache server that runs
in this process, on 127.0.0.1. Only its clock is played: the eviction thread is not started, and
the body of its loop runs where a step's ``ticks`` say, once what the step stores is stored, and
between two requests as often as a settled server would have run it.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

from tests.live.differential.engines import (
    lmcache_storage,
    quietly,
    tick,
    tick_until_settled,
    vllm_scheduling,
)
from tests.live.differential.schedulers import Engine
from tests.live.differential.workloads import Case, Outcome, Prefixes, Step

SETTLED_S = 20.0
"""A server that is not at rest after this long never will be."""

IDLE_STEP_S = 0.0003
"""What a step without work takes: the server shares this process and must get a turn."""

_closers = ThreadPoolExecutor(max_workers=4)
"""A server takes a second to close, waiting; the next one starts meanwhile."""


@cache
def _lmcache() -> SimpleNamespace:
    with quietly():
        from lmcache.v1.mp_observability.config import ObservabilityConfig
        from lmcache.v1.multiprocess.config import MPServerConfig
        from lmcache.v1.multiprocess.server import run_cache_server
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    return SimpleNamespace(
        **vars(lmcache_storage()),
        Observability=ObservabilityConfig,
        ServerConfig=MPServerConfig,
        run_cache_server=run_cache_server,
        Factory=KVConnectorFactory,
        Role=KVConnectorRole,
    )


class CacheServer:
    """One LMCache server for one case."""

    def __init__(self, case: Case) -> None:
        lmcache = _lmcache()
        self.case = case
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        tiers = case.tiers
        memory = lmcache.config.L1MemoryManagerConfig(tiers.host_bytes, use_lazy=False, shm_name="")
        storage = lmcache.config.StorageManagerConfig(
            lmcache.config.L1ManagerConfig(memory),
            lmcache.config.EvictionConfig(tiers.policy, tiers.watermark, tiers.evict_ratio),
        )
        self._server, self.cache = lmcache.run_cache_server(
            lmcache.ServerConfig(
                host="127.0.0.1",
                port=self.port,
                chunk_size=tiers.chunk_tokens,
                supported_transfer_mode="auto",
            ),
            storage,
            lmcache.Observability(enabled=False),
            return_engine=True,
            start_prometheus_http_server=False,
        )
        self.controller = self.cache.storage_manager._eviction_controllers[0]
        self.l1: Any = self.controller._l1_manager

    def settle(self) -> None:
        """Tick until a tick would do nothing."""
        tiers = self.case.tiers
        tick_until_settled(self.controller, self.l1, policy=tiers.policy, watermark=tiers.watermark)

    def resident(self) -> int:
        """Chunks it holds, once nothing is being written or read."""
        locked = ("write_locked_count", "read_locked_count", "staging_object_count")
        deadline = time.monotonic() + SETTLED_S
        while any((status := self.l1.report_status())[name] for name in locked):
            assert time.monotonic() < deadline, f"never at rest: {self.cache.report_status()}"
            time.sleep(0.0005)
        return int(status["total_object_count"])

    def wait_for_sessions(self) -> None:
        """Wait until every request has ended here, too."""
        deadline = time.monotonic() + SETTLED_S
        while self.cache.report_status()["active_sessions"]:
            assert time.monotonic() < deadline, f"sessions stay: {self.cache.report_status()}"
            time.sleep(0.0005)

    def close(self) -> None:
        """End its threads and sockets."""
        self._server.close()
        self.cache.close()


class ServerWorker:
    """The worker half, and a look into the server's store."""

    def __init__(self, engine: Engine, server: CacheServer) -> None:
        lmcache = _lmcache()
        tiers = engine.case.tiers
        self._server = server
        engine.config.cache_config.kv_cache_layout = "LBHNC"
        self._connector = lmcache.Factory.create_connector(
            config=engine.config,
            role=lmcache.Role.WORKER,
            kv_cache_config=engine.kv_cache_config,
        )
        blocks = lmcache.torch.zeros(tiers.num_gpu_blocks, 1, tiers.block_size, 2 * 64)
        self._connector.register_kv_caches({"layer": blocks})
        self._hasher = server.cache.context.token_hasher
        self._prefixes = Prefixes(tiers.chunk_tokens)
        self._names: dict[bytes, int] = {}
        self._n_resident = 0
        self._n_stored = 0
        self._request: Any = None
        self._is_first = self._are_told = True
        self._ticks: Iterator[int] = iter(())

    def run(self, scheduled: Any) -> Any:
        """One step, in the order of vLLM's ``KVConnectorModelRunnerMixin``."""
        if not scheduled.total_num_scheduled_tokens:
            time.sleep(IDLE_STEP_S)
        connector = self._connector
        connector.handle_preemptions(scheduled.kv_connector_metadata)
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        self._tick(self._ticks_after(scheduled))
        moved = connector.get_transfer_results(scheduled.finished_req_ids)
        failed = connector.get_block_ids_with_load_errors()
        assert not failed, f"LMCache could not load what its lookup found: blocks {failed}"
        connector.clear_connector_metadata()
        return vllm_scheduling().KVConnectorOutput(
            finished_sending=moved.finished_sending,
            finished_recving=moved.finished_recving,
            failed_recving=moved.failed_recving,
        )

    def _ticks_after(self, scheduled: Any) -> int:
        """Ticks after a prefill step; of the only one of a prompt, if ``sim`` is told of them."""
        n_new, done = scheduled.total_num_scheduled_tokens, self._request.num_computed_tokens
        if not n_new or done - n_new >= self._request.num_prompt_tokens:
            return 0
        is_first, self._is_first = self._is_first, False
        is_only = is_first and done >= self._request.num_prompt_tokens
        return 0 if is_only and not self._are_told else next(self._ticks)

    def _tick(self, times: int) -> None:
        """Once this step's chunks are stored, the server's clock; what is new was stored now."""
        if not times:
            return
        for stored in self._connector.worker_adapter.store_futures.values():
            assert stored.wait(SETTLED_S), "a store never ended"
        self._n_stored += self._server.resident() - self._n_resident
        for _ in range(times):
            tick(self._server.controller)
        self._n_resident = self._server.resident()

    def settle(self) -> None:
        """Wait for the server and settle it; what is new before that was stored by this request."""
        self._server.wait_for_sessions()
        self._n_stored += self._server.resident() - self._n_resident
        self._server.settle()
        self._n_resident = self._server.resident()

    def chunks(self) -> tuple[int, ...]:
        """Names by recency; the noop policy keeps none, so then in the order of their numbers."""
        if self._server.case.tiers.policy == "noop":
            return tuple(sorted(self._names[key.chunk_hash] for key in self._server.l1._objects))
        keys = self._server.controller._eviction_policy.get_eviction_candidates(10**6)
        return tuple(self._names[key.chunk_hash] for key in keys)

    def stored(self) -> int:
        """Chunks written since the start."""
        return self._n_stored

    def name(self, request: Any, step: Step) -> None:
        """Learn the names of the chunks of ``step`` by the server's own hasher."""
        self._request, self._is_first, self._are_told = request, True, step.are_told
        self._ticks = chain(step.ticks, repeat(step.ticks[-1]))
        hashes = self._hasher.compute_chunk_hashes(list(step.prompt))
        self._names.update(zip(hashes, self._prefixes.of(step.prompt), strict=True))

    def close(self) -> None:
        """End the connector's threads and sockets."""
        self._connector.shutdown()


def serve(case: Case) -> Generator[Outcome, None, None]:
    """Every step of ``case`` through one scheduler and one cache server."""
    _lmcache()
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(0.0005)  # many short turns between client and server threads
        server = CacheServer(case)
        stack.callback(_closers.submit, server.close)
        engine = Engine(
            case,
            kv_transfer={
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": server.port,
                },
            },
        )
        stack.callback(engine.scheduler.connector.shutdown)
        engine.worker = stack.enter_context(contextlib.closing(ServerWorker(engine, server)))
        for step in case.steps:
            yield engine.serve(step)
