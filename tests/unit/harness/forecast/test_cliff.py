import pytest

from harness.forecast.cliff import Cliff, cliff_of
from harness.plan.plan import Plan
from tests.factory import make_plan

CHUNK_BYTES = 256 * 4_096


def plan_of(treatment: str, **replaced: str) -> Plan:
    """The factory's plan with another treatment: 2 documents of 512 + 8 tokens, blocks of 32."""
    order = f'order = ["baseline", "{treatment}", "{treatment}", "baseline"]'
    chunk = 'build = "fake"'
    return make_plan(order=order, build=chunk, **replaced).model_copy(update={"arms": {}})


def shares(curve: Cliff, arm: str) -> list[float]:
    return [point.share for point in curve.points if point.arm == arm]


def curve_of(plan: Plan, chunk_bytes: int | None = CHUNK_BYTES) -> Cliff:
    return cliff_of(plan, "pass2-replay", chunk_bytes=chunk_bytes, measured=[])


def test_without_the_prefix_cache_everything_is_recomputed_at_every_size() -> None:
    curve = curve_of(plan_of("none"), chunk_bytes=None)
    assert set(shares(curve, "none")) == {1.0}
    assert shares(curve, "baseline")[0] == 1.0
    assert shares(curve, "baseline")[-1] == 8 / 520
    assert curve.why_not is None


def test_an_arm_without_an_exact_prediction_has_no_line_and_says_why() -> None:
    curve = curve_of(plan_of("simple"))
    assert (len(shares(curve, "simple")), len(shares(curve, "baseline")) > 10) == (0, True)
    assert curve.why_not.startswith("simple: vLLM's simple CPU offload evicts")


@pytest.mark.parametrize("treatment", ["lmcache", "lmcache-mp"])
def test_a_tier_of_an_unknown_chunk_size_has_no_line_and_says_so(treatment: str) -> None:
    curve = curve_of(plan_of(treatment), chunk_bytes=None)
    assert shares(curve, treatment) == []
    assert curve.why_not == f"{treatment}: no row tells the size of a host chunk"


def test_a_prompt_that_the_tier_cannot_hold_leaves_its_line_out() -> None:
    # 17 blocks of a prompt do not fit a store of 4 MiB in blocks of 32 tokens and 1 MiB.
    plan = plan_of("native", gib="gib = 0.004")
    plan = plan.model_copy(update={"host": plan.host.model_copy(update={"chunk_tokens": 32})})
    curve = curve_of(plan, chunk_bytes=2**20)
    assert shares(curve, "native") == []
    assert curve.why_not.startswith("native: ")
    assert len(shares(curve, "baseline")) > 10


def test_a_workload_too_long_to_predict_is_not_built() -> None:
    vocab = "vocab = [64, 100000]"
    plan = plan_of("none", documents="documents = 90000", vocab=vocab)
    curve = curve_of(plan)
    assert curve.points == []
    assert "93,600,520 prompt tokens a session" in curve.why_not  # 520 × (2 × 90,000 + 1)
