"""What stands in the way of a verdict, whatever the ratio is."""

from collections.abc import Iterator

from harness.plan.arms import CONTROL, treatments
from harness.plan.rule import DecisionSection
from harness.verdict.cost import Sizes
from harness.verdict.measured import Statistics
from harness.verdict.schema import DecisionEvidence, Reason, ReconcileFile


def obstacles(
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
    yield from _control(rule, statistics, evidence, sizes)


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
    judged = evidence.n_blocks - (evidence.set_aside is not None)
    if judged < rule.min_blocks:
        yield Reason(
            code="too-few-sessions",
            message=f"{judged} pair{'s' * (judged != 1)} of sessions to judge by, the rule needs "
            f"{rule.min_blocks}",
        )
    if sizes is not None and evidence.n_pairs < sizes.documents * evidence.n_blocks:
        yield Reason(
            code="incomplete-pairs",
            message=f"{evidence.n_pairs} of {sizes.documents * evidence.n_blocks} document pairs "
            "are complete",
        )


def _control(
    rule: DecisionSection,
    statistics: Statistics,
    evidence: DecisionEvidence | None,
    sizes: Sizes | None,
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
    drift = evidence.control_drift if evidence and sizes else None
    most = rule.max_control_drift
    if drift is not None and (drift.low > most or drift.high < 1 / most):
        yield Reason(
            code="control-moved",
            message=f"the control's first pass took {drift.factor:.2f} [{drift.low:.2f}–"
            f"{drift.high:.2f}] times the arms'; the rule allows {most:g}: the machine was not the "
            "same",
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
