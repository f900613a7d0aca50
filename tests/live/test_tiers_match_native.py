"""``sim.tiers.native`` against the installed vLLM's OffloadingConnector and its CPU manager."""

import pytest

import sim.tiers.native
from tests.live.differential.claims import (
    PrefixFirstNative,
    assert_part_agrees,
    needs,
    share_caught,
    share_caught_by,
    with_engine,
)
from tests.live.differential.compare import difference
from tests.live.differential.parts import PARTS
from tests.live.differential.regressions import REGRESSIONS
from tests.live.differential.workloads import Case

pytestmark = needs("vllm")


def test_the_native_tier_equals_vllms_offloading_after_every_request() -> None:
    assert_part_agrees("native", with_host=True)


@pytest.mark.parametrize("case", REGRESSIONS["native"])
def test_a_workload_that_tells_two_rules_apart_agrees(case: Case) -> None:
    assert difference(with_engine(case), PARTS["native"].driver) is None


def test_the_other_recency_rule_is_caught() -> None:
    # vLLM 0.33 against the rule of 0.32: 119 of 377 random workloads.
    assert share_caught("native", 60, native_recency="access") >= 0.1


def test_a_store_that_evicts_a_prompts_head_first_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sim.tiers.native, "NativeChunks", PrefixFirstNative)
    assert share_caught_by("native", 20) >= 0.5
