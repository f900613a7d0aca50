"""``sim``'s GPU tier against the installed vLLM's own classes, request by request.

No model and no server: the classes that decide what is cached run in this process. A failure
prints the smallest part of its workload that still fails; regressions.py keeps such workloads.
"""

import pytest

import sim.predict
import sim.tiers.registry
from sim.tiers.gpu_pool import GpuPool
from tests.live.differential.claims import (
    NoNullBlock,
    assert_part_agrees,
    needs,
    share_caught,
    share_caught_by,
    with_engine,
    with_tiers,
)
from tests.live.differential.compare import by_sim, caught, difference
from tests.live.differential.engines import vllm_core
from tests.live.differential.kv_manager import serve
from tests.live.differential.parts import PARTS
from tests.live.differential.regressions import REGRESSIONS
from tests.live.differential.workloads import Case, random_case

pytestmark = needs("vllm")


def test_the_gpu_tier_equals_vllms_block_manager_after_every_request() -> None:
    assert_part_agrees("gpu", with_host=False)


def test_the_gpu_tier_equals_vllms_whole_scheduler_after_every_request() -> None:
    assert_part_agrees("scheduler", with_host=False)


def test_the_gpu_tier_equals_vllms_async_scheduler_after_every_request() -> None:
    assert_part_agrees("async-scheduler", with_host=False)


@pytest.mark.parametrize("case", REGRESSIONS["gpu"])
def test_a_workload_that_tells_two_rules_apart_agrees(case: Case) -> None:
    assert difference(case, PARTS["gpu"].driver) is None


def test_several_blocks_without_a_key_come_back_in_vllms_order() -> None:
    # A finished request has two such blocks at most, so the random workloads cannot show this.
    theirs = vllm_core().BlockPool(num_gpu_blocks=7, enable_caching=True, hash_block_size=1)
    theirs.free_blocks(reversed(theirs.get_new_blocks(4)))
    ours = GpuPool(7)
    ours.free(ours.take([], 4))
    order = [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
    assert list(ours.free_order()) == order == [4, 3, 2, 1, 5, 6]


@pytest.mark.parametrize("part", ["gpu", "scheduler", "async-scheduler"])
def test_a_server_without_a_prefix_cache_agrees(part: str) -> None:
    is_async = part == "async-scheduler"
    cases = [
        random_case(seed, prefix_caching=False, async_scheduling=is_async) for seed in range(10)
    ]
    differences = [difference(with_engine(case), PARTS[part].driver) for case in cases]
    assert differences == [None] * 10


def test_a_sliding_window_no_request_outgrows_is_full_attention() -> None:
    cases = [by_sim(with_engine(random_case(seed))).case for seed in range(60)]
    longest = [max(len(s.prompt) + len(s.outputs) for s in case.steps) for case in cases]
    whole = [list(serve(case)) for case in cases]
    pairs = list(zip(cases, longest, strict=True))
    assert [list(serve(case, window=n)) for case, n in pairs] == whole
    narrow = [list(serve(case, window=n // 4)) for case, n in pairs]
    assert sum(a != b for a, b in zip(narrow, whole, strict=True)) >= 30


# --- the same comparison must catch a wrong rule


def test_the_free_rule_of_older_vllm_is_caught() -> None:
    # SEMANTICS: 894 of 1,095 random workloads; half leaves room for the sizes here.
    assert share_caught("gpu", 40, hashless_first=False) >= 0.5


def test_a_pool_without_a_null_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.tiers.registry, "GpuPool", NoNullBlock)
    assert share_caught_by("gpu", 20) == 1.0


def test_a_prefix_cache_where_the_engine_has_none_is_caught() -> None:
    cases = [with_engine(random_case(seed, prefix_caching=False)) for seed in range(20)]
    seeds = caught(cases, PARTS["gpu"].driver, lambda case: with_tiers(case, prefix_caching=True))
    assert len(seeds) >= 10


def test_a_prompt_hit_to_its_last_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.predict, "reusable_blocks", lambda n_prompt, size: n_prompt // size)
    assert share_caught_by("gpu", 20) >= 0.5


def test_an_early_stop_taken_for_a_planned_end_is_caught() -> None:
    # A stop that costs no extra step is what the synchronous scheduler does.
    assert share_caught("async-scheduler", 20, async_scheduling=False) >= 0.2
