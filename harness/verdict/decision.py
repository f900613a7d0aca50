"""The decision: a rule written before the run, applied to what the run measured.

Three verdicts. ``not decided`` always says why, and no number is made from an empty cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from harness.plan.labels import CONTROL, treatments
from harness.plan.rule import DecisionSection
from harness.verdict.cost import cost, not_established

Verdict = Literal["supported", "not supported", "not decided"]

# With two blocks, the low end must clear the run's own noise squared: whatever the noise between
# sessions is (normal to t with 1.5 degrees of freedom, 200,000 draws each), two equal arms then
# come out "supported" in at most 2.4 % of runs; with the noise to the power 1 in 6 %.
NOISE_POWER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the plan put where, in tokens; ``host_tokens`` None when the chunk size is unknown.

    ``working_set_tokens``: all documents, without their questions. ``host_gib`` None: the
    treatment has no host tier. ``has_control``: the plan measures one.
    """

    documents: int
    working_set_tokens: int
    gpu_tokens: int
    host_tokens: int | None
    host_gib: float | None
    passes: tuple[str, ...]
    has_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What reconciliation found: counts of requests, and the failed checks as (code, message)."""

    planned: int
    reconciled: int
    errors: tuple[tuple[str, str], ...]


def decide(
    rule: DecisionSection,
    summary: Mapping[str, Any],
    *,
    checks: Checks | None,
    sizes: Sizes | None,
    is_from_plan: bool,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """``decision`` of ``summary.json``: verdict, reasons, evidence, cost, what is not established.

    ``checks`` and ``sizes`` are None for imported rows: no plan, no prediction, hence no verdict.
    ``is_from_plan``: the plan states the rule; otherwise it is kvcliff's default.
    """
    passes = sizes.passes if sizes else tuple(summary["passes"])
    name = rule.pass_name or (passes[1] if len(passes) > 1 else passes[0] if passes else "")
    evidence = _evidence(rule, summary, name)
    reasons = [
        {"code": code, "message": message}
        for code, message in _obstacles(rule, summary, name, evidence, checks, sizes)
    ]
    verdict: Verdict = "not decided"
    because = "; ".join(reason["message"] for reason in reasons)
    if not reasons and evidence is not None:
        verdict, code, because = _verdict(rule, evidence)
        if verdict == "not decided":
            reasons = [{"code": code, "message": because}]
    return {
        "claim": _claim(rule, summary, name),
        "pass": name,
        "rule": rule.model_dump(by_alias=True),
        "rule_source": "plan.toml, before the run" if is_from_plan else "kvcliff's default rule",
        "verdict": verdict,
        "because": because,
        "reasons": reasons,
        "evidence": evidence,
        "cost": cost(summary, name, host_gib=sizes.host_gib if sizes else None),
        "not_established": list(not_established(summary, evidence, sizes, environment)),
    }


def _claim(rule: DecisionSection, summary: Mapping[str, Any], name: str) -> str:
    base, treatment = summary["compared"]
    if treatment is None:
        return f"Nothing is compared with {base}"
    return (
        f"{treatment} lowers TTFT in {name or 'a replay'}: {base} ÷ {treatment} is at least "
        f"{rule.min_ratio:g}"
    )


def _evidence(
    rule: DecisionSection, summary: Mapping[str, Any], name: str
) -> dict[str, Any] | None:
    """Ratio, interval, noise and the threshold the low end has to reach; None without a pair."""
    content = summary["passes"].get(name)
    pairs = content["paired_ratio"] if content else None
    if content is None or pairs is None:
        return None
    spreads = [
        content["arms"][arm]["session_medians"].get("spread_ratio")
        for arm in summary["compared"]
        if arm in content["arms"]
    ]
    known = [spread for spread in spreads if spread is not None]
    noise = max(known, default=None)
    is_range = pairs["interval_kind"] == "range"
    threshold = rule.min_ratio
    if is_range and noise is not None:
        threshold *= noise**NOISE_POWER
    return {
        **{key: pairs[key] for key in ("ratio", "low", "high", "interval", "interval_kind")},
        "n_blocks": len(pairs["blocks"]),
        "n_documents": pairs["n_documents"],
        "n_pairs": sum(block["n"] for block in pairs["blocks"]),
        "noise": noise,
        "threshold": threshold,
    }


def _verdict(rule: DecisionSection, evidence: Mapping[str, Any]) -> tuple[Verdict, str, str]:
    low, high, threshold = evidence["low"], evidence["high"], evidence["threshold"]
    of_noise = (
        f" ({rule.min_ratio:g} × the run's own noise {evidence['noise']:.3f}²)"
        if threshold != rule.min_ratio
        else ""
    )
    spread = f"{low:.3f} to {high:.3f} is the {evidence['interval']}"
    if low >= threshold:
        return (
            "supported",
            "",
            f"The low end {low:.2f} reaches {threshold:.2f}{of_noise}; {spread}",
        )
    if high < rule.min_ratio:
        return "not supported", "", f"The high end {high:.3f} is below {rule.min_ratio:g}; {spread}"
    if low < rule.min_ratio:
        return (
            "not decided",
            "blocks-disagree",
            f"{rule.min_ratio:g} lies inside the spread; {spread}",
        )
    return (
        "not decided",
        "within-noise",
        f"The low end {low:.3f} is above {rule.min_ratio:g} but not above {threshold:.3f}"
        f"{of_noise}; {spread}",
    )


def _obstacles(
    rule: DecisionSection,
    summary: Mapping[str, Any],
    name: str,
    evidence: Mapping[str, Any] | None,
    checks: Checks | None,
    sizes: Sizes | None,
) -> Iterator[tuple[str, str]]:
    """Why nothing may be decided, whatever the ratio is."""
    yield from _nothing_compared(summary)
    yield from _empty_cells(summary, name)
    yield from _failed_checks(checks)
    if sizes is not None and sizes.host_gib is not None:
        yield from _impossible(sizes)
    if evidence is not None:
        yield from _thin_evidence(rule, evidence, sizes)
    yield from _control(rule, summary, sizes)


def _nothing_compared(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    base, treatment = summary["compared"]
    if treatment is not None:
        return
    others = treatments(session["config"] for session in summary["sessions"])
    if others:
        yield (
            "several-treatments",
            f"{', '.join(others)} were measured next to {base}: which of them is compared is not "
            "said, and none is called lmcache",
        )
    else:
        yield "missing-arm", f"no arm was measured that could be compared with {base}"


def _empty_cells(summary: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    content = summary["passes"].get(name)
    if content is None:
        yield "missing-pass", f"no request of the pass {name!r} was measured"
        return
    arms = [arm for arm in summary["compared"] if arm is not None]
    for arm in arms:
        cell = content["arms"].get(arm)
        if cell is None or cell["n"] == 0:
            failed = f": all {cell['failed']} failed" if cell else ""
            yield "missing-arm", f"{arm} has no complete request in {name}{failed}"
    if content["paired_ratio"] is None and len(arms) > 1:
        yield "no-pairs", f"no document is complete in both arms in {name}"


_CONTAMINATED = ("unattributed-requests", "cold-hits", "baseline-used-host")


def _failed_checks(checks: Checks | None) -> Iterator[tuple[str, str]]:
    if checks is None:
        yield "no-prediction", "there is no plan and no prediction to check these rows against"
        return
    if checks.reconciled < checks.planned or checks.planned == 0:
        yield (
            "unreconciled",
            f"{checks.planned - checks.reconciled} of {checks.planned} planned requests are not "
            "reconciled",
        )
    for code, message in checks.errors:
        if code in _CONTAMINATED:
            yield "contaminated", f"{code}: {message}"
        else:
            yield code, message


def _impossible(sizes: Sizes) -> Iterator[tuple[str, str]]:
    if sizes.working_set_tokens <= sizes.gpu_tokens:
        yield (
            "fits-in-gpu",
            f"the working set of {sizes.working_set_tokens:,} tokens fits the GPU tier of "
            f"{sizes.gpu_tokens:,}: the host tier has nothing to do",
        )
    if sizes.host_tokens is not None and sizes.host_tokens <= sizes.gpu_tokens:
        yield (
            "host-too-small",
            f"the host tier of {sizes.host_tokens:,} tokens is no larger than the GPU tier of "
            f"{sizes.gpu_tokens:,}: what it keeps the GPU keeps too",
        )


def _thin_evidence(
    rule: DecisionSection, evidence: Mapping[str, Any], sizes: Sizes | None
) -> Iterator[tuple[str, str]]:
    if evidence["n_blocks"] < rule.min_blocks:
        yield (
            "too-few-sessions",
            f"{evidence['n_blocks']} A B block of fresh servers, the rule needs {rule.min_blocks}",
        )
    if sizes is not None and evidence["n_pairs"] < sizes.documents * evidence["n_blocks"]:
        yield (
            "incomplete-pairs",
            f"{evidence['n_pairs']} of {sizes.documents * evidence['n_blocks']} document pairs are "
            "complete",
        )
    noise = evidence["noise"]
    if noise is None or noise > rule.max_order_effect:
        by = "an unknown factor" if noise is None else f"a factor {noise:.2f}"
        yield (
            "order-effect",
            f"sessions of the same arm differ by {by}, the rule allows {rule.max_order_effect:g}",
        )


def _control(
    rule: DecisionSection, summary: Mapping[str, Any], sizes: Sizes | None
) -> Iterator[tuple[str, str]]:
    """The control must load nothing, and compute the first pass as fast as the arms do.

    A control that the plan has and that did not come to its end shows neither.
    """
    if sizes is not None and sizes.has_control:
        yield from _failed_control(summary, sizes)
    loaded = sum(
        content["arms"][CONTROL]["tokens"]["host_loaded"]
        for content in summary["passes"].values()
        if CONTROL in content["arms"]
    )
    if loaded:
        yield (
            "control-moved",
            f"the control loaded {loaded:,} tokens from the host: a tier acted where none is due",
        )
    cold = summary["passes"].get(sizes.passes[0]) if sizes else None
    drift = _control_drift(cold, summary["compared"]) if cold else None
    if drift is not None and not 1 / rule.max_control_drift <= drift <= rule.max_control_drift:
        yield (
            "control-moved",
            f"the control's first pass took {drift:.2f} times the arms'; the rule allows "
            f"{rule.max_control_drift:g}: the machine was not the same",
        )


def _failed_control(summary: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[str, str]]:
    """The first pass in which the control has no complete request."""
    for name in sizes.passes:
        cell = summary["passes"].get(name, {}).get("arms", {}).get(CONTROL)
        if cell is None or cell["n"] == 0:
            failed = f": all {cell['failed']} failed" if cell and cell["failed"] else ""
            yield (
                "missing-control",
                f"the plan's control has no complete request in {name}{failed}; without it nothing "
                "shows that the machine was the same and the effect is the treatment's",
            )
            return


def _control_drift(cold: Mapping[str, Any], compared: Sequence[str | None]) -> float | None:
    """Control ÷ the arms, of the medians of the session medians; None when one has none."""
    arms = cold["arms"]
    control = _session_medians(arms, (CONTROL,))
    others = _session_medians(arms, compared)
    if not control or not others or median(others) <= 0:
        return None
    return median(control) / median(others)


def _session_medians(arms: Mapping[str, Any], names: Sequence[str | None]) -> list[float]:
    return [
        cell["p50_ms"]
        for name in names
        if name is not None and name in arms
        for cell in arms[name]["sessions"].values()
        if cell["n"]
    ]
