"""The decision: a rule written before the run, applied to what the run measured.

Three verdicts. ``not decided`` always says why, and no number is made from an empty cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from harness.plan.arms import CONTROL, treatments
from harness.plan.rule import DecisionSection
from harness.verdict.cost import Sizes, cost_of, not_established
from harness.verdict.measured import ArmCell, Statistics
from harness.verdict.schema import Decision, DecisionEvidence, Reason, ReconcileFile, Verdict

# With two blocks, the low end must clear the run's own noise squared: whatever the noise between
# sessions is (normal to t with 1.5 degrees of freedom, 200,000 draws each), two equal arms then
# come out "supported" in at most 2.4 % of runs; with the noise to the power 1 in 6 %.
NOISE_POWER = 2


def decide(
    rule: DecisionSection,
    statistics: Statistics,
    *,
    checks: ReconcileFile | None,
    sizes: Sizes | None,
    is_from_plan: bool,
    environment: Mapping[str, Any],
) -> Decision:
    """Verdict, reasons, evidence, cost, and what is not established.

    ``checks`` and ``sizes`` are None for imported rows: no plan, no prediction, hence no verdict.
    ``is_from_plan``: the plan states the rule; otherwise it is kvcliff's default.
    """
    passes = sizes.passes if sizes else tuple(statistics.passes)
    name = rule.deciding_pass(passes)
    evidence = _evidence(rule, statistics, name)
    reasons = list(_obstacles(rule, statistics, name, evidence, checks, sizes))
    verdict: Verdict = "not decided"
    because = "; ".join(reason.message for reason in reasons)
    if not reasons and evidence is not None:
        verdict, code, because = _verdict(rule, evidence)
        reasons = [Reason(code=code, message=because)] if code else []
    return Decision(
        claim=_claim(rule, statistics, name),
        pass_name=name,
        rule=rule,
        rule_source="plan.toml, before the run" if is_from_plan else "kvcliff's default rule",
        verdict=verdict,
        because=because,
        reasons=reasons,
        evidence=evidence,
        cost=cost_of(statistics, name, host_gib=sizes.host_gib if sizes else None),
        not_established=list(not_established(statistics, evidence, sizes, environment)),
    )


def _claim(rule: DecisionSection, statistics: Statistics, name: str) -> str:
    base, treatment = statistics.compared
    if treatment is None:
        return f"Nothing is compared with {base}"
    return (
        f"{treatment} lowers TTFT in {name or 'a replay'}: {base} ÷ {treatment} is at least "
        f"{rule.min_ratio:g}"
    )


def _evidence(rule: DecisionSection, statistics: Statistics, name: str) -> DecisionEvidence | None:
    """Ratio, interval, noise and the threshold the low end has to reach; None without a pair."""
    arms, pairs = statistics.arms_in(name), statistics.pairs_in(name)
    if pairs is None:
        return None
    spreads = [arms[arm].session_medians.spread_ratio for arm in statistics.compared if arm in arms]
    noise = max((spread for spread in spreads if spread is not None), default=None)
    threshold = rule.min_ratio
    if pairs.interval_kind == "range" and noise is not None:
        threshold *= noise**NOISE_POWER
    return DecisionEvidence(
        **pairs.model_dump(include={"ratio", "low", "high", "interval", "interval_kind"}),
        n_blocks=len(pairs.blocks),
        n_documents=pairs.n_documents,
        n_pairs=sum(block.n for block in pairs.blocks),
        noise=noise,
        threshold=threshold,
    )


def _verdict(rule: DecisionSection, evidence: DecisionEvidence) -> tuple[Verdict, str, str]:
    low, high, threshold = evidence.low, evidence.high, evidence.threshold
    of_noise = (
        f" ({rule.min_ratio:g} × the run's own noise {evidence.noise:.3f}²)"
        if threshold != rule.min_ratio
        else ""
    )
    spread = f"{low:.3f} to {high:.3f} is the {evidence.interval}"
    if low >= threshold:
        because = f"The low end {low:.2f} reaches {threshold:.2f}{of_noise}; {spread}"
        return "supported", "", because
    least = f"{rule.min_ratio:g}"
    if high < rule.min_ratio:
        return "not supported", "", f"The high end {high:.3f} is below {least}; {spread}"
    if low < rule.min_ratio:
        return "not decided", "blocks-disagree", f"{least} lies inside the spread; {spread}"
    above = f"is above {least} but not above {threshold:.3f}{of_noise}"
    return "not decided", "within-noise", f"The low end {low:.3f} {above}; {spread}"


def _obstacles(
    rule: DecisionSection,
    statistics: Statistics,
    name: str,
    evidence: DecisionEvidence | None,
    checks: ReconcileFile | None,
    sizes: Sizes | None,
) -> Iterator[Reason]:
    """Why nothing may be decided, whatever the ratio is."""
    yield from _nothing_compared(statistics)
    yield from _empty_cells(statistics, name)
    yield from _failed_checks(checks)
    if sizes is not None and sizes.host_gib is not None:
        yield from _impossible(sizes)
    if evidence is not None:
        yield from _thin_evidence(rule, evidence, sizes)
    yield from _control(rule, statistics, sizes)


def _nothing_compared(statistics: Statistics) -> Iterator[Reason]:
    base, treatment = statistics.compared
    if treatment is not None:
        return
    others = treatments(session.arm for session in statistics.sessions)
    if others:
        yield Reason(
            code="several-treatments",
            message=f"{', '.join(others)} were measured next to {base}: which of them is compared "
            "is not said, and none is called lmcache",
        )
    else:
        yield Reason(
            code="missing-arm", message=f"no arm was measured that could be compared with {base}"
        )


def _empty_cells(statistics: Statistics, name: str) -> Iterator[Reason]:
    content = statistics.passes.get(name)
    if content is None:
        yield Reason(code="missing-pass", message=f"no request of the pass {name!r} was measured")
        return
    arms = [arm for arm in statistics.compared if arm is not None]
    for arm in arms:
        cell = content.arms.get(arm)
        if cell is None or cell.n == 0:
            failed = f": all {cell.failed} failed" if cell else ""
            yield Reason(
                code="missing-arm", message=f"{arm} has no complete request in {name}{failed}"
            )
    if content.paired_ratio is None and len(arms) > 1:
        yield Reason(code="no-pairs", message=f"no document is complete in both arms in {name}")


_CONTAMINATED = ("unattributed-requests", "cold-hits", "baseline-used-host")


def _failed_checks(checks: ReconcileFile | None) -> Iterator[Reason]:
    if checks is None:
        yield Reason(
            code="no-prediction",
            message="there is no plan and no prediction to check these rows against",
        )
        return
    planned, reconciled = checks.requests_planned, checks.requests_reconciled
    if reconciled < planned or planned == 0:
        yield Reason(
            code="unreconciled",
            message=f"{planned - reconciled} of {planned} planned requests are not reconciled",
        )
    for found in checks.findings:
        if found.severity == "error" and found.code in _CONTAMINATED:
            yield Reason(code="contaminated", message=f"{found.code}: {found.message}")
        elif found.severity == "error":
            yield Reason(code=found.code, message=found.message)


def _impossible(sizes: Sizes) -> Iterator[Reason]:
    if sizes.working_set_tokens <= sizes.gpu_tokens:
        yield Reason(
            code="fits-in-gpu",
            message=f"the working set of {sizes.working_set_tokens:,} tokens fits the GPU tier of "
            f"{sizes.gpu_tokens:,}: the host tier has nothing to do",
        )
    if sizes.host_tokens is not None and sizes.host_tokens <= sizes.gpu_tokens:
        yield Reason(
            code="host-too-small",
            message=f"the host tier of {sizes.host_tokens:,} tokens is no larger than the GPU tier "
            f"of {sizes.gpu_tokens:,}: what it keeps the GPU keeps too",
        )


def _thin_evidence(
    rule: DecisionSection, evidence: DecisionEvidence, sizes: Sizes | None
) -> Iterator[Reason]:
    if evidence.n_blocks < rule.min_blocks:
        yield Reason(
            code="too-few-sessions",
            message=f"{evidence.n_blocks} A B block of fresh servers, the rule needs "
            f"{rule.min_blocks}",
        )
    if sizes is not None and evidence.n_pairs < sizes.documents * evidence.n_blocks:
        yield Reason(
            code="incomplete-pairs",
            message=f"{evidence.n_pairs} of {sizes.documents * evidence.n_blocks} document pairs "
            "are complete",
        )
    noise = evidence.noise
    if noise is None or noise > rule.max_order_effect:
        by = "an unknown factor" if noise is None else f"a factor {noise:.2f}"
        yield Reason(
            code="order-effect",
            message=f"sessions of the same arm differ by {by}, the rule allows "
            f"{rule.max_order_effect:g}",
        )


def _control(
    rule: DecisionSection, statistics: Statistics, sizes: Sizes | None
) -> Iterator[Reason]:
    """The control must load nothing, and compute the first pass as fast as the arms do.

    A control that the plan has and that did not come to its end shows neither.
    """
    if sizes is not None and sizes.has_control:
        yield from _failed_control(statistics, sizes)
    loaded = sum(
        content.arms[CONTROL].tokens.host_loaded
        for content in statistics.passes.values()
        if CONTROL in content.arms
    )
    if loaded:
        yield Reason(
            code="control-moved",
            message=f"the control loaded {loaded:,} tokens from the host: a tier acted where none "
            "is due",
        )
    cold = statistics.arms_in(sizes.passes[0]) if sizes else {}
    drift = _control_drift(cold, statistics.compared)
    if drift is not None and not 1 / rule.max_control_drift <= drift <= rule.max_control_drift:
        yield Reason(
            code="control-moved",
            message=f"the control's first pass took {drift:.2f} times the arms'; the rule allows "
            f"{rule.max_control_drift:g}: the machine was not the same",
        )


def _failed_control(statistics: Statistics, sizes: Sizes) -> Iterator[Reason]:
    """The first pass in which the control has no complete request."""
    for name in sizes.passes:
        cell = statistics.arms_in(name).get(CONTROL)
        if cell is None or cell.n == 0:
            failed = f": all {cell.failed} failed" if cell and cell.failed else ""
            yield Reason(
                code="missing-control",
                message=f"the plan's control has no complete request in {name}{failed}; without it "
                "nothing shows that the machine was the same and the effect is the treatment's",
            )
            return


def _control_drift(cold: Mapping[str, ArmCell], compared: Sequence[str | None]) -> float | None:
    """Control ÷ the arms, of the medians of the session medians; None when one has none."""
    control = _session_medians(cold, (CONTROL,))
    others = _session_medians(cold, compared)
    if not control or not others or median(others) <= 0:
        return None
    return median(control) / median(others)


def _session_medians(arms: Mapping[str, ArmCell], names: Sequence[str | None]) -> list[float]:
    return [
        cell.p50_ms
        for name in names
        if name is not None and name in arms
        for cell in arms[name].sessions.values()
        if cell.p50_ms is not None
    ]
