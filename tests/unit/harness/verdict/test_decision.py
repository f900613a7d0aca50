"""Golden decisions: journals whose truth is known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp

import pytest

from harness.plan.rule import DecisionSection, unknown_pass
from harness.record.row import Row
from harness.verdict.cost import Sizes
from harness.verdict.decision import decide
from harness.verdict.schema import Code, Decision, Finding, ReconcileFile, Replays
from harness.verdict.stats import summarize
from tests.factory import failed, make_plan, make_row

DOCS = 6
SIZES = Sizes(
    documents=DOCS, working_set_tokens=DOCS * 512, gpu_tokens=1_024, host_tokens=8_192, host_gib=0.5,
    passes=("pass1-cold", "pass2-replay"),
)  # fmt: skip
A_B_B_A = ("baseline", "lmcache", "lmcache", "baseline")

Ttft = Callable[[int, str, str, int], float | None]
"""(position 1 first, arm, pass, document) → ms, None for a failed request."""


def journal(ttft: Ttft, order: Sequence[str] = (*A_B_B_A, "control")) -> list[Row]:
    rows = []
    for position, arm in enumerate(order, start=1):
        seq = 0
        for pass_name in ("pass1-cold", "pass2-replay"):
            for doc in range(DOCS):
                seq += 1
                ms = ttft(position, arm, pass_name, doc)
                common = {
                    "session": f"{position:02d}-{arm}", "order": position, "config": arm,
                    "pass": pass_name, "doc": doc, "seq": seq,
                }  # fmt: skip
                rows.append(
                    Row.model_validate(failed(**common))
                    if ms is None
                    else make_row(**common, ttft_ms=ms, total_ms=ms)
                )
    return rows


def checked(planned: int, reconciled: int, **errors: str) -> ReconcileFile:
    """A reconciliation of these counts, with errors by code, in which ``_`` stands for a dash."""
    return ReconcileFile(
        schema_version=3, run="r", requests_planned=planned, requests_recorded=planned,
        requests_reconciled=reconciled, requests=[], every=1, by_pass=[], not_predicted=[],
        findings=[
            Finding(code=Code(code.replace("_", "-")), severity="error", message=message, cause="", remedy="")
            for code, message in errors.items()
        ],
    )  # fmt: skip


def decided(
    rows: list[Row],
    *,
    rule: DecisionSection | None = None,
    sizes: Sizes | None = SIZES,
    checks: ReconcileFile | None = None,
) -> Decision:
    summary = summarize(rows, run="r", plan_id="p", units=make_plan().units)
    return decide(
        rule or DecisionSection(),
        summary,
        checks=checks or checked(len(rows), len(rows)),
        sizes=sizes,
        is_from_plan=True,
        environment={"cpu": "a CPU", "gpus": None},
    )


def codes(decision: Decision) -> list[str]:
    return [reason.code for reason in decision.reasons]


def helps(_position: int, arm: str, pass_name: str, doc: int) -> float:
    """The tier answers replays in a tenth of the time, and costs 5 ms in the first pass."""
    if pass_name == "pass1-cold":
        return 105.0 if arm == "lmcache" else 100.0
    return 10.0 if arm == "lmcache" else 100.0 + doc


def flat(_position: int, _arm: str, _pass: str, doc: int) -> float:
    return 100.0 + doc


def test_a_tier_that_answers_replays_ten_times_faster_is_supported() -> None:
    decision = decided(journal(helps))
    assert (decision.verdict, decision.reasons) == ("supported", [])
    # Ratios 10.0 to 10.5 in steps of 0.1: the median of six is 10.25 in both blocks.
    assert decision.evidence.ratio == pytest.approx(10.25)
    assert decision.evidence.at_least == pytest.approx(10.25)  # no noise


def test_the_cost_of_storing_is_paid_back_by_a_fraction_of_a_replay() -> None:
    cost = decided(journal(helps)).cost
    assert cost.host_gib == 0.5
    assert cost.store_cost.median_ms == 5.0
    assert cost.replay_saving.median_ms == 92.5  # median of 90 … 95
    assert cost.break_even_replays.median == pytest.approx(5.0 / 92.5)


def test_a_tier_that_saves_nothing_never_breaks_even() -> None:
    decision = decided(journal(lambda p, a, s, d: 110.0 if a == "lmcache" else 100.0))
    assert decision.verdict == "not supported"
    assert decision.cost.break_even_replays == Replays(median=None, low=None, high=None)


def test_no_effect_is_not_supported() -> None:
    assert decided(journal(flat)).verdict == "not supported"


def renamed(rows: list[Row], name: str) -> list[Row]:
    return [
        row.model_copy(
            update={"config": name, "session": row.session.replace("lmcache", name)}
            if row.config == "lmcache"
            else {}
        )
        for row in rows
    ]


@pytest.mark.parametrize("name", ["native", "none", "my-own"])
def test_the_decision_is_about_the_treatment_by_its_own_name(name: str) -> None:
    decision = decided(renamed(journal(helps), name))
    assert decision.verdict == "supported"
    assert decision.claim == (
        f"{name} lowers TTFT in pass2-replay: baseline ÷ {name} is at least 1.1"
    )
    assert set(decision.cost.settle_after_store_ms) == {"baseline", name}


def test_a_treatment_without_a_host_tier_is_not_asked_about_one() -> None:
    # The prefix cache off is measured where the working set fits the GPU tier.
    sizes = replace(SIZES, gpu_tokens=6 * 512, host_tokens=None, host_gib=None)
    decision = decided(renamed(journal(flat), "none"), sizes=sizes)
    assert (decision.verdict, decision.cost.host_gib) == ("not supported", None)
    assert not [line for line in decision.not_established if "tier" in line]


def test_several_arms_beside_the_baseline_decide_nothing_and_say_so() -> None:
    decision = decided(journal(flat, ("baseline", "a", "b", "baseline")), sizes=None)
    assert codes(decision) == ["several-treatments"]
    assert "a, b were measured next to baseline" in decision.because
    assert decision.claim == "Nothing is compared with baseline"


def test_the_one_of_several_that_is_compared_is_named() -> None:
    rows = journal(helps, ("baseline", "lmcache", "other", "lmcache", "baseline"))
    decision = decided(rows, sizes=None)
    assert decision.verdict == "supported"
    assert "How other compares with the baseline: only lmcache is compared." in (
        decision.not_established
    )


WITH_CONTROL = replace(SIZES, has_control=True)


def test_a_control_that_the_plan_has_and_nobody_measured_decides_nothing() -> None:
    assert decided(journal(helps), sizes=WITH_CONTROL).verdict == "supported"
    decision = decided(journal(helps, A_B_B_A), sizes=WITH_CONTROL)
    assert (decision.verdict, codes(decision)) == ("not decided", ["missing-control"])


@pytest.mark.parametrize("failing", ["pass1-cold", "pass2-replay"])
def test_a_control_without_a_complete_request_in_a_pass_decides_nothing(failing: str) -> None:
    def broken(position: int, arm: str, pass_name: str, doc: int) -> float | None:
        is_lost = arm == "control" and pass_name == failing
        return None if is_lost else helps(position, arm, pass_name, doc)

    decision = decided(journal(broken), sizes=WITH_CONTROL)
    assert (decision.verdict, codes(decision)) == ("not decided", ["missing-control"])
    assert f"{failing}: all 6 failed" in decision.because


def test_an_effect_in_one_session_of_the_tier_only_is_not_decided() -> None:
    def once(position: int, arm: str, pass_name: str, doc: int) -> float:
        return 70.0 if position == 2 and pass_name == "pass2-replay" else 100.0

    decision = decided(journal(once))
    assert (decision.verdict, codes(decision)) == ("not decided", ["threshold-inside"])


def test_the_bounds_of_two_pairs_are_students_of_one_degree_of_freedom() -> None:
    # Baselines 100 and 130, tiers 80 and 100: ratios 1.25 and 1.3. Their logs are 0.2231 and 0.2624,
    # 0.2427 in the middle, 0.0277 / sqrt 2 = 0.0196 its error; t (1 degree, 2 %) is 15.895.
    times = {1: 100.0, 2: 80.0, 3: 100.0, 4: 130.0, 5: 100.0}

    def replays_only(position: int, _arm: str, pass_name: str, _doc: int) -> float:
        return 100.0 if pass_name == "pass1-cold" else times[position]

    decision = decided(journal(replays_only))
    assert (decision.verdict, codes(decision)) == ("not decided", ["threshold-inside"])
    assert decision.evidence.at_least == pytest.approx(exp(0.2427 - 0.3118), abs=0.001)
    assert decision.evidence.at_most == pytest.approx(exp(0.2427 + 0.3118), abs=0.001)
    assert (decision.evidence.first_pass_ratio, decision.evidence.allowance) == (1.0, 1.0)


def test_linear_drift_without_an_effect_is_never_supported() -> None:
    for drift_ms in (0.1, 1.0, 5.0, 30.0):
        rows = journal(lambda position, a, s, d, by=drift_ms: 100.0 + by * (position * DOCS + d))
        assert decided(rows).verdict != "supported", drift_ms


@pytest.mark.parametrize("faster", [1.2, 1.3, 1.4])
def test_a_host_that_is_faster_in_the_middle_is_seen_in_the_first_pass(faster: float) -> None:
    # Both tier sessions of A B B A are in the middle: no effect looks like `faster`, in every pass.
    rows = journal(lambda position, a, s, d: (100.0 + d) / (faster if position in (2, 3) else 1.0))
    decision = decided(rows)
    assert decision.verdict == "not decided"
    assert decision.evidence.ratio == pytest.approx(faster)
    assert decision.evidence.allowance == pytest.approx(faster)
    assert f"a factor {faster:.2f} is allowed for that" in decision.because


def slow(session: int, by: float, *, in_first_pass: bool = True) -> Ttft:
    """``helps``, with sessions that differ by a percent, and one of them ``by`` times slower."""

    def ttft(position: int, arm: str, pass_name: str, doc: int) -> float:
        is_slow = position == session and (in_first_pass or pass_name != "pass1-cold")
        return (
            helps(position, arm, pass_name, doc) * (1 + position % 3 / 100) * (by if is_slow else 1)
        )

    return ttft


def test_a_session_on_a_host_in_trouble_is_named_and_its_pair_set_aside() -> None:
    decision = decided(journal(slow(6, 3.0), A_B_B_A * 2))
    assert decision.verdict == "supported"
    aside = decision.evidence.set_aside
    assert (aside.session, round(aside.factor, 1), round(aside.first_factor, 1)) == (
        "06-lmcache",
        3.0,
        3.0,
    )
    assert aside.verdict_with_it == "supported"
    assert "06-lmcache is set aside with its pair: it took 2.9" in decision.because


def test_a_treatment_that_is_slow_where_it_should_be_fast_is_not_set_aside() -> None:
    decision = decided(journal(slow(6, 3.0, in_first_pass=False), A_B_B_A * 2))
    assert decision.evidence.set_aside is None
    assert decision.evidence.at_least < 10.25 / 2


def test_three_pairs_are_too_few_to_set_one_aside() -> None:
    assert decided(journal(slow(2, 3.0), (A_B_B_A * 2)[:6])).evidence.set_aside is None


def test_a_pass_that_one_session_lacks_pairs_no_others_instead() -> None:
    # Without 02-lmcache, 01-baseline has no neighbour; 03 and 04 are still one pair.
    rows = [row for row in journal(helps) if row.order != 2]
    summary = summarize(
        rows, run="r", plan_id="p", units=make_plan().units, arms=(*A_B_B_A, "control")
    )
    (block,) = summary.passes["pass2-replay"].paired_ratio.blocks
    assert block.sessions == ("04-baseline", "03-lmcache")


def test_what_is_not_decided_says_how_many_pairs_would_probably_do() -> None:
    # The bounds of 1.25 and 1.3 (above) leave 1.1: sd 0.0277, effect ln(1.2747 / 1.1) = 0.1474. Of
    # three pairs t (2 degrees, 2 %) = 4.849, and 0.1474 x sqrt 3 / 0.0277 = 9.2 clears it.
    times = {1: 100.0, 2: 80.0, 3: 100.0, 4: 130.0, 5: 100.0}
    decision = decided(journal(lambda p, a, s, d: 100.0 if s == "pass1-cold" else times[p]))
    assert decision.evidence.pairs_needed == 3
    assert decision.because.endswith("about 3 pairs would probably decide")


def test_one_unreconciled_request_decides_nothing() -> None:
    decision = decided(
        journal(helps),
        checks=checked(60, 59, residual="1 of 60 differ"),
    )
    assert (decision.verdict, codes(decision)) == ("not decided", ["unreconciled", "residual"])
    assert "1 of 60" in decision.because


def test_an_empty_plan_decides_nothing() -> None:
    decision = decided(journal(helps), checks=checked(0, 0))
    assert codes(decision) == ["unreconciled"]


@pytest.mark.parametrize("code", ["unattributed-requests", "cold-hits", "baseline-used-host"])
def test_contamination_decides_nothing(code: str) -> None:
    checks = checked(60, 60, **{code: "found"})
    assert codes(decided(journal(helps), checks=checks)) == ["contaminated"]


@pytest.mark.parametrize("order", [("baseline", "baseline"), ("lmcache", "lmcache"), ()])
def test_a_missing_arm_decides_nothing_and_has_no_number(order: tuple[str, ...]) -> None:
    decision = decided(journal(helps, order))
    assert decision.verdict == "not decided"
    assert {"missing-arm", "missing-pass"} & set(codes(decision))
    assert decision.evidence is None
    assert decision.cost.store_cost is None


def test_one_session_of_each_arm_is_too_few() -> None:
    decision = decided(journal(helps, ("baseline", "lmcache")))
    assert (decision.verdict, codes(decision)) == ("not decided", ["too-few-sessions"])


def test_all_requests_of_an_arm_failed_decides_nothing() -> None:
    rows = journal(lambda p, a, s, d: None if a == "lmcache" else 100.0)
    decision = decided(rows)
    assert "missing-arm" in codes(decision)
    assert decision.evidence is None


def test_one_failed_replay_leaves_a_pair_out_and_says_so() -> None:
    def once(position: int, arm: str, pass_name: str, doc: int) -> float | None:
        is_it = (position, pass_name, doc) == (2, "pass2-replay", 0)
        return None if is_it else helps(position, arm, pass_name, doc)

    decision = decided(journal(once))
    assert codes(decision) == ["incomplete-pairs"]
    assert "11 of 12" in decision.because


def test_a_control_that_ran_on_another_machine_as_it_were_decides_nothing() -> None:
    def slow_control(position: int, arm: str, pass_name: str, doc: int) -> float:
        return helps(position, arm, pass_name, doc) * (1.4 if arm == "control" else 1.0)

    assert codes(decided(journal(slow_control))) == ["control-moved"]


def test_a_control_that_loads_from_the_host_decides_nothing() -> None:
    rows = [
        make_row(**{**row.model_dump(by_alias=True), "computed": 8, "host_loaded": 512})
        if row.config == "control" and row.pass_name == "pass2-replay"
        else row
        for row in journal(helps)
    ]
    assert codes(decided(rows)) == ["control-moved"]


@pytest.mark.parametrize(
    ("gpu_tokens", "host_tokens", "code"),
    [(6 * 512, 8_192, "fits-in-gpu"), (1_024, 1_024, "host-too-small")],
)
def test_a_plan_that_cannot_show_an_effect_decides_nothing(
    gpu_tokens: int, host_tokens: int, code: str
) -> None:
    sizes = Sizes(
        documents=DOCS, working_set_tokens=DOCS * 512, gpu_tokens=gpu_tokens, host_tokens=host_tokens,
        host_gib=0.5, passes=SIZES.passes,
    )  # fmt: skip
    assert codes(decided(journal(helps), sizes=sizes)) == [code]


def test_rows_without_a_plan_decide_nothing() -> None:
    summary = summarize(journal(helps), run="r", plan_id="p", units=make_plan().units)
    decision = decide(
        DecisionSection(), summary, checks=None, sizes=None, is_from_plan=False, environment={}
    )
    assert (decision.verdict, codes(decision)) == ("not decided", ["no-prediction"])
    assert decision.rule_source == "kvcliff's default rule"


def test_the_rule_is_read_from_the_plan_and_obeyed() -> None:
    rule = DecisionSection.model_validate({"pass": "pass2-replay", "min_ratio": 11.0})
    assert decided(journal(helps), rule=rule).verdict == "not supported"


def test_a_rule_for_a_pass_the_plan_does_not_have_is_named_before_the_run() -> None:
    rule = DecisionSection.model_validate({"pass": "pass9-replay"})
    assert unknown_pass(rule, ("pass1-cold", "pass2-replay")) == (
        "decision.pass is 'pass9-replay'; this plan has pass1-cold, pass2-replay"
    )
    assert unknown_pass(DecisionSection(), ("pass1-cold",)) is None


def test_what_a_run_does_not_establish_follows_from_what_it_did() -> None:
    lines = "\n".join(decided(journal(helps, A_B_B_A)).not_established)
    assert "there is no control session" in lines
    assert "the range over 2 A B blocks holds it in 50% of runs" in lines
    assert "A host tier smaller than the working set" in lines  # 8,192 ≥ 3,072
    assert "there is no control" not in "\n".join(decided(journal(helps)).not_established)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("n_pairs", [2, 6])
def test_two_equal_arms_are_called_supported_in_at_most_2_percent_of_runs(
    noise: float, n_pairs: int
) -> None:
    # Sessions differ by `noise` (standard deviation of the logarithm), requests by 2 %. The whole
    # table of hosts and numbers of pairs is results/operating.json.
    random_ = random.Random(7)
    order = (A_B_B_A * 3)[: 2 * n_pairs]
    supported = 0
    for _ in range(100):
        levels = [100.0 * random_.lognormvariate(0.0, noise) for _ in order]
        rows = journal(
            lambda position, a, s, d, at=levels: at[position - 1] * random_.lognormvariate(0, 0.02),
            order,
        )
        supported += decided(rows).verdict == "supported"
    assert supported <= 2


def test_a_session_whose_median_is_0_ms_is_decided_on_its_other_documents() -> None:
    def mostly_zero(position: int, arm: str, pass_name: str, doc: int) -> float:
        return 0.0 if position == 2 and doc < 4 else helps(position, arm, pass_name, doc)

    decision = decided(journal(mostly_zero))
    assert decision.verdict == "not decided"
    assert "incomplete-pairs" in codes(decision)
