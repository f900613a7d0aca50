"""vLLM's whole Scheduler and AsyncScheduler, driven as its engine core does, with fake outputs.

No model runs: ``_model_output`` hands out the ids a step planned. A KV connector's worker half,
where there is one, is a ``Worker``; the scheduler half is the one vLLM builds from its config.
"""

from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

from tests.live.differential.engines import kv_cache_config, vllm_config, vllm_scheduling
from tests.live.differential.kv_manager import pool_state
from tests.live.differential.workloads import STOP_ID, Case, Outcome, Prefixes, Step

MAX_STEPS = 10_000
"""More engine steps than any request here takes: beyond it, a request hangs."""

DEEP_ENOUGH = 20
"""max_tokens beyond the planned outputs of a request that a stop token ends."""


class Worker(Protocol):
    """The worker half of a KV connector, and the view of its store."""

    def run(self, scheduled: Any) -> Any:
        """What the worker does in one step: a KVConnectorOutput, or None."""

    def settle(self) -> None:
        """Called when the scheduler has nothing left to do."""

    def chunks(self) -> tuple[int, ...]:
        """Names of the resident chunks, the next to be evicted first."""

    def stored(self) -> int:
        """Chunks written since the start."""

    def name(self, request: Any, step: Step) -> None:
        """Learn the names of the chunks of ``step``."""


class NoWorker:
    """No host tier."""

    def run(self, scheduled: Any) -> Any:
        """Nothing."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def chunks(self) -> tuple[int, ...]:
        """No chunks."""
        return ()

    def stored(self) -> int:
        """None."""
        return 0

    def name(self, request: Any, step: Step) -> None:
        """Nothing to name."""


class Engine:
    """One scheduler, its connector and its worker; ``serve`` takes one request to its end."""

    def __init__(self, case: Case, *, kv_transfer: dict[str, Any] | None = None) -> None:
        vllm = vllm_scheduling()
        tiers = case.tiers
        self.case = case
        self.config = vllm_config(tiers, kv_transfer=kv_transfer)
        self.kv_cache_config = kv_cache_config(tiers)
        scheduler = vllm.AsyncScheduler if tiers.async_scheduling else vllm.Scheduler
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=vllm.StructuredOutputManager(self.config),
            block_size=tiers.block_size,
            log_stats=True,
        )
        self.worker: Worker = NoWorker()
        # AsyncScheduler schedules a step before the one before it has come back.
        self._depth = 2 if tiers.async_scheduling else 1
        self._hasher = vllm.utils.get_request_block_hasher(tiers.block_size, vllm.sha256)
        self._prefixes = Prefixes(tiers.block_size)
        self._names: dict[bytes, int] = {}
        self._n_requests = 0

    def serve(self, step: Step) -> Outcome:
        """Take one request to its end and the engine to rest."""
        request = self._request(step)
        stored_before = self.worker.stored()
        self.worker.name(request, step)
        self.scheduler.add_request(request)
        stats = self._run(request, deque(step.outputs))
        self.worker.settle()
        tokens = step.prompt + step.outputs
        self._names.update(zip(request.block_hashes, self._prefixes.of(tokens), strict=True))
        free_order, hashed = pool_state(self.scheduler.kv_cache_manager.block_pool, self._names)
        return Outcome(
            stats.num_computed_tokens,
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens,
            self.worker.stored() - stored_before,
            free_order,
            hashed,
            self.worker.chunks(),
        )

    def _request(self, step: Step) -> Any:
        vllm = vllm_scheduling()
        self._n_requests += 1
        spare = DEEP_ENOUGH if step.stopped else 0
        params = vllm.SamplingParams(
            max_tokens=len(step.outputs) + spare,
            ignore_eos=True,
            stop_token_ids=[STOP_ID] if step.stopped else None,
        )
        return vllm.Request(
            request_id=f"r{self._n_requests}",
            prompt_token_ids=list(step.prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _run(self, request: Any, outputs: deque[int]) -> Any:
        """Step until the scheduler is idle; returns the request's published PrefillStats."""
        stats = None
        in_flight: deque[tuple[Any, Any]] = deque()
        for _ in range(MAX_STEPS):
            if self.scheduler.has_requests():
                scheduled = self.scheduler.schedule()
                in_flight.append((scheduled, self._model_output(request, scheduled, outputs)))
                if len(in_flight) < self._depth and (
                    scheduled.total_num_scheduled_tokens or self.scheduler.has_requests()
                ):
                    continue
            elif not in_flight:
                assert stats is not None, "the request ended without a first output"
                return stats
            published = self.scheduler.update_from_output(*in_flight.popleft())
            for output in (o for client in published.values() for o in client.outputs):
                stats = output.prefill_stats or stats
        raise AssertionError(f"a request took more than {MAX_STEPS} steps")

    def _model_output(self, request: Any, scheduled: Any, outputs: deque[int]) -> Any:
        """What a model that was to generate ``outputs`` returns for this step."""
        req_ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        if req_ids:
            has_logits = request.num_computed_tokens >= request.num_prompt_tokens
            # Past a stop token the model has no planned id: what it says there is thrown away.
            sampled = [[outputs.popleft() if outputs else 0]] if has_logits else [[]]
        return vllm_scheduling().ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self.worker.run(scheduled),
        )


def serve(case: Case) -> Generator[Outcome, None, None]:
    """Every step of ``case`` through one scheduler without a connector."""
    engine = Engine(case)
    for step in case.steps:
        yield engine.serve(step)
