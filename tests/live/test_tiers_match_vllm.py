"""``sim.tiers.GpuPool`` against the installed vLLM's own KVCacheManager, request by request.

No model and no server: the classes that decide what is cached run in this process. A failure names
the seed of its workload; ``_mismatch(seed)`` alone reproduces it.
"""

import importlib.util
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from sim.tiers import GpuPool, PrefixKeys

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="no vLLM here: `make setup` installs an engine build",
    ),
]

N_WORKLOADS = 600
MIN_REQUESTS = 10_000
MIN_WITH_HITS = 4_000  # a comparison of misses alone proves nothing


@cache
def _vllm() -> SimpleNamespace:
    """The classes under comparison; imported on use, for it takes seconds and warns on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request
    kv_cache_utils.init_none_hash(sha256)
    return SimpleNamespace(
        float32=torch.float32,
        SamplingParams=SamplingParams,
        sha256=sha256,
        interface=kv_cache_interface,
        utils=kv_cache_utils,
        BlockPool=BlockPool,
        KVCacheManager=KVCacheManager,
        Request=Request,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One request: its tokens, and how the engine happens to cut its prefill."""

    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    budget: int  # prefill tokens a step
    external_blocks: int  # blocks beyond the local hit that a connector loads


@dataclass(frozen=True, slots=True)
class Case:
    block_size: int
    num_blocks: int
    steps: tuple[Step, ...]


def _case(seed: int) -> Case:
    """A random workload: shared prefixes, exact block multiples, multi-turn, near capacity."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 32])
    num_blocks = rng.choice([3, 5, 8, 13, 24, 40, 80])
    room = (num_blocks - 1) * block_size
    history: list[tuple[int, ...]] = [()]
    steps = []
    for _ in range(rng.randint(10, 30)):
        n_out = rng.randint(1, min(room, 3 * block_size))
        base = rng.choice(history)
        cut = rng.choice(
            [len(base), rng.randint(0, len(base)), len(base) // block_size * block_size]
        )
        size = rng.choice(
            [rng.randint(1, room), room + 1 - n_out, rng.randint(1, num_blocks - 1) * block_size]
        )
        size = max(1, min(size, room + 1 - n_out))
        # A vocabulary of 2 makes prefixes collide by chance too, not only by construction.
        fresh = tuple(rng.randrange(2) for _ in range(size))
        prompt = (base[:cut] + fresh)[:size]
        outputs = tuple(rng.randrange(2) for _ in range(n_out))
        steps.append(
            Step(prompt, outputs, rng.choice([1, 7, block_size, 10**6]), rng.choice([0, 0, 1, 99]))
        )
        history.append(rng.choice([prompt, prompt + outputs]))
    return Case(block_size, num_blocks, tuple(steps))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's hit and everything the pool remembers after it."""

    hit_tokens: int
    free_order: tuple[int, ...]
    key_of_block: dict[int, int]


def _by_vllm(case: Case) -> Iterator[Outcome]:
    vllm = _vllm()
    spec = vllm.interface.FullAttentionSpec(
        block_size=case.block_size, num_kv_heads=1, head_size=1, dtype=vllm.float32
    )
    config = vllm.interface.KVCacheConfig(
        num_blocks=case.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[vllm.interface.KVCacheGroupSpec(["layer"], spec)],
    )
    manager = vllm.KVCacheManager(
        config,
        max_model_len=10**6,
        scheduler_block_size=case.block_size,
        hash_block_size=case.block_size,
    )
    hasher = vllm.utils.get_request_block_hasher(case.block_size, vllm.sha256)
    int_of_hash: dict[bytes, int] = {}
    for number, step in enumerate(case.steps):
        request = vllm.Request(
            request_id=str(number),
            prompt_token_ids=list(step.prompt),
            sampling_params=vllm.SamplingParams(max_tokens=len(step.outputs), ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        hit = _serve(manager, request, step, case.block_size)
        pool = manager.block_pool
        yield Outcome(
            hit,
            tuple(b.block_id for b in pool.free_block_queue.get_all_free_blocks()),
            {
                b.block_id: int_of_hash.setdefault(b.block_hash, len(int_of_hash))
                for b in pool.blocks
                if b.block_hash is not None
            },
        )


def _serve(manager: Any, request: Any, step: Step, block_size: int) -> int:
    """Take ``request`` through the manager as vLLM's scheduler does; returns its local hit."""
    blocks, local, _ = manager.get_computed_blocks(request)
    # A connector that holds the whole prompt offers all but its last token.
    external = min(step.external_blocks * block_size, len(step.prompt) - 1 - local)
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
            n_new = min(step.budget, request.num_tokens - done)
            assert manager.allocate_slots(request, n_new, full_sequence_must_fit=True, **first)
            request.num_computed_tokens = done + n_new
            first = {}
        request.append_output_token_ids(output)
    manager.free(request)
    return local


def _by_sim(case: Case, *, hashless_first: bool) -> Iterator[Outcome]:
    pool = GpuPool(case.num_blocks, hashless_first=hashless_first)
    names = PrefixKeys(case.block_size)
    for step in case.steps:
        n_slots = len(step.prompt) + len(step.outputs) - 1
        keys = names.of((step.prompt + step.outputs)[:n_slots])
        hit = pool.longest_hit(keys[: (len(step.prompt) - 1) // case.block_size])
        blocks = pool.take(hit, -(-n_slots // case.block_size))
        pool.name(blocks, keys)
        pool.free(blocks)
        yield Outcome(len(hit) * case.block_size, pool.free_order(), pool.hashed())


def _mismatch(seed: int, *, hashless_first: bool = True) -> tuple[str | None, int, int]:
    """(first difference or None, requests compared, of them with a hit) of one workload."""
    case = _case(seed)
    n_with_hit = 0
    real_to_sim: dict[int, int] = {}
    sides = zip(_by_vllm(case), _by_sim(case, hashless_first=hashless_first), strict=True)
    for number, (real, sim) in enumerate(sides):
        where = f"seed {seed}, request {number} of {len(case.steps)}, {case.num_blocks} blocks"
        if real.hit_tokens != sim.hit_tokens:
            return f"{where}: vLLM hit {real.hit_tokens}, sim {sim.hit_tokens}", number, n_with_hit
        if real.free_order != sim.free_order:
            return f"{where}: free {real.free_order} != {sim.free_order}", number, n_with_hit
        if not _same_names(real.key_of_block, sim.key_of_block, real_to_sim):
            return f"{where}: hashed blocks differ", number, n_with_hit
        n_with_hit += real.hit_tokens > 0
    return None, len(case.steps), n_with_hit


def _same_names(real: dict[int, int], sim: dict[int, int], real_to_sim: dict[int, int]) -> bool:
    """The same blocks have a name, and one name on one side is one name on the other, for good."""
    if real.keys() != sim.keys():
        return False
    if any(real_to_sim.setdefault(real[b], sim[b]) != sim[b] for b in real):
        return False
    return len(set(real_to_sim.values())) == len(real_to_sim)


def test_gpu_pool_equals_vllm_after_every_request_of_random_workloads() -> None:
    results = [_mismatch(seed) for seed in range(N_WORKLOADS)]
    assert [difference for difference, _, _ in results if difference] == []
    assert sum(n for _, n, _ in results) >= MIN_REQUESTS
    assert sum(hits for _, _, hits in results) >= MIN_WITH_HITS


def test_several_blocks_without_a_key_come_back_in_vllms_order() -> None:
    # A finished request has one such block at most, so the random workloads cannot show this.
    theirs = _vllm().BlockPool(num_gpu_blocks=7, enable_caching=True, hash_block_size=1)
    theirs.free_blocks(reversed(theirs.get_new_blocks(4)))
    ours = GpuPool(7)
    ours.free(ours.take([], 4))
    order = [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
    assert list(ours.free_order()) == order == [4, 3, 2, 1, 5, 6]


def test_the_free_rule_of_older_vllm_is_caught_by_the_same_comparison() -> None:
    caught = [seed for seed in range(30) if _mismatch(seed, hashless_first=False)[0]]
    # 894 of 1,095 random workloads differed when this was first measured; half of 30 leaves room for the sizes here.
    assert len(caught) >= 15
