"""vLLM's scheduler with its own OffloadingConnector: the scheduler half and the CPU manager, real.

The copies need a CUDA device, so the worker half is played here: it reports each copy done after a
number of steps that a seeded generator picks, as a real one reports it whenever the copy is.
"""

import itertools
import os
import random
from collections.abc import Generator
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.live.differential.engines import quietly, vllm_scheduling
from tests.live.differential.schedulers import Engine
from tests.live.differential.workloads import BYTES_PER_TOKEN, Case, Outcome, Prefixes, Step

_numbers = itertools.count(1)


@cache
def _offloading() -> SimpleNamespace:
    with quietly():
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    return SimpleNamespace(
        WorkerMetadata=OffloadingWorkerMetadata,
        make_key=make_offload_key,
        alignment=CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT,
    )


class OffloadWorker:
    """A worker whose copies take 0 to 2 steps, and a look into the manager's LRU policy."""

    def __init__(self, engine: Engine) -> None:
        tiers = engine.case.tiers
        self._manager: Any = engine.scheduler.connector.connector_scheduler.manager
        assert self._manager._num_chunks == tiers.host_chunks
        self._rng = random.Random(f"copies/{engine.case.seed}")
        self._copies: dict[int, int] = {}  # job → steps left
        self._loads: dict[int, str] = {}  # job → request
        self._per_chunk = tiers.chunk_tokens // tiers.block_size
        self._prefixes = Prefixes(tiers.chunk_tokens)
        self._names: dict[bytes, int] = {}
        self._n_stored = 0
        self._count_inserts()

    def _count_inserts(self) -> None:
        policy = self._manager._policy
        insert = policy.insert

        def counted(*args: Any) -> None:
            self._n_stored += 1
            insert(*args)

        policy.insert = counted

    def run(self, scheduled: Any) -> Any:
        """Report what is done; loads start in the step that asks for them, stores in the next."""
        metadata = scheduled.kv_connector_metadata
        flushed = metadata.jobs_to_flush or set()
        for job, load in metadata.load_jobs.items():
            self._copies[job] = self._rng.randrange(3)
            self._loads[job] = load.req_id
        done = [job for job, left in self._copies.items() if left <= 0 or job in flushed]
        self._copies = {job: left - 1 for job, left in self._copies.items() if job not in done}
        for job in metadata.store_jobs:
            if job in flushed:
                done.append(job)
            else:
                self._copies[job] = self._rng.randrange(3)
        report = _offloading().WorkerMetadata()
        for job in done:
            report.mark_completed(job)
        received = {self._loads.pop(job) for job in done if job in self._loads}
        return vllm_scheduling().KVConnectorOutput(
            finished_recving=received, kv_connector_worker_meta=report if done else None
        )

    def settle(self) -> None:
        """The scheduler goes on stepping while a job is open, so none is."""
        assert not self._copies

    def chunks(self) -> tuple[int, ...]:
        """Names by rank, the least recent first."""
        policy = self._manager._policy
        return tuple(self._names[key] for key in sorted(policy.chunks, key=policy._ranks.get))

    def stored(self) -> int:
        """Chunks inserted since the start."""
        return self._n_stored

    def name(self, request: Any, step: Step) -> None:
        """A chunk's key is made of the hash of its last block."""
        last_hashes = request.block_hashes[self._per_chunk - 1 :: self._per_chunk]
        keys = [_offloading().make_key(block_hash, 0) for block_hash in last_hashes]
        self._names.update(zip(keys, self._prefixes.of(step.prompt), strict=True))


def serve(case: Case) -> Generator[Outcome, None, None]:
    """Every step of ``case`` through one scheduler and one CPU offloading manager."""
    tiers = case.tiers
    assert tiers.host_chunks is not None
    alignment = _offloading().alignment
    chunk_bytes = -(-tiers.chunk_tokens * BYTES_PER_TOKEN // alignment) * alignment
    engine = Engine(
        case,
        kv_transfer={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"kvcliff-{os.getpid()}-{next(_numbers)}",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": tiers.host_chunks * chunk_bytes,
                "blocks_per_chunk": tiers.chunk_tokens // tiers.block_size,
            },
        },
    )
    engine.worker = OffloadWorker(engine)
    for step in case.steps:
        yield engine.serve(step)
