"""vLLM's KVCacheManager and BlockPool, driven as its scheduler does; any version from 0.23 on."""

from collections.abc import Generator
from typing import Any

from tests.live.differential.engines import kv_cache_config, vllm_core
from tests.live.differential.workloads import Case, Outcome, Prefixes, Step


def serve(case: Case, *, window: int | None = None) -> Generator[Outcome, None, None]:
    """Every step of ``case`` through one manager. Early stops are the scheduler's business."""
    vllm = vllm_core()
    block_size = case.tiers.block_size
    manager = vllm.KVCacheManager(
        kv_cache_config(case.tiers, window),
        max_model_len=10**6,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=case.tiers.prefix_caching,
    )
    hasher = vllm.utils.get_request_block_hasher(block_size, vllm.sha256)
    names: dict[bytes, int] = {}
    prefixes = Prefixes(block_size)
    for number, step in enumerate(case.steps):
        request = vllm.Request(
            request_id=str(number),
            prompt_token_ids=list(step.prompt),
            sampling_params=vllm.SamplingParams(max_tokens=len(step.outputs), ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        hit = _serve(manager, request, step, case)
        names.update(
            zip(request.block_hashes, prefixes.of(step.prompt + step.outputs), strict=True)
        )
        free_order, hashed = pool_state(manager.block_pool, names)
        yield Outcome(len(step.prompt) - hit, hit, 0, 0, free_order, hashed)


def pool_state(
    pool: Any, names: dict[bytes, int]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(free block ids, the next to be reused first; (block id, name) of every hashed block).

    Without a prefix cache the free blocks come in the order of their ids: which of them is next
    matters to no token, and versions differ (0.27 appends what 0.24 and 0.31 prepend).
    """
    get_hash = vllm_core().utils.get_block_hash
    free = tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if not pool.enable_caching:
        free = tuple(sorted(free))
    hashed = [(b.block_id, names[get_hash(b.block_hash)]) for b in pool.blocks if b.block_hash]
    return free, tuple(sorted(hashed))


def _serve(manager: Any, request: Any, step: Step, case: Case) -> int:
    """Take ``request`` through the manager; returns its local hit."""
    blocks, local = manager.get_computed_blocks(request)[:2]
    # A connector that holds the whole prompt offers all but its last token.
    external = min(step.external_blocks * case.tiers.block_size, len(step.prompt) - 1 - local)
    first: dict[str, Any] = {"num_new_computed_tokens": local, "new_computed_blocks": blocks}
    if external > 0:
        # An asynchronous load: slots first, hashes when the data has arrived.
        assert manager.allocate_slots(
            request,
            0,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            **first,
        )
        request.num_computed_tokens = local + external
        manager.cache_blocks(request, request.num_computed_tokens)
        first = {}
    for output in step.outputs:
        while request.num_computed_tokens + first.get("num_new_computed_tokens", 0) < (
            request.num_tokens
        ):
            done = request.num_computed_tokens + first.get("num_new_computed_tokens", 0)
            n_new = min(case.tiers.max_num_batched_tokens, request.num_tokens - done)
            assert manager.allocate_slots(request, n_new, full_sequence_must_fit=True, **first)
            request.num_computed_tokens = done + n_new
            first = {}
        request.append_output_token_ids(output)
    manager.free(request)
    return int(local)
