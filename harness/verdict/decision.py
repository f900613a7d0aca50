"""The decision: a rule written before the run, applied to what the run measured.

Three verdicts. ``not decided`` always says why, and no number is made from an empty cell.
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

from harness.plan.power import ERROR
from harness.plan.rule import DecisionSection
from harness.verdict.cost import Sizes, cost_of, not_established
from harness.verdict.estimates import control_drift, order_effect
from harness.verdict.measured import Block, Statistics
from harness.verdict.obstacles import obstacles
from harness.verdict.paired import LEAST_MS
from harness.verdict.procedure import (
    BadSession,
    Conclusion,
    Level,
    SessionPair,
    Verdict,
    conclude,
    pairs_needed,
)
from harness.verdict.schema import (
    Decision,
    DecisionEvidence,
    Reason,
    ReconcileFile,
    SetAside,
)
from harness.words_and_colours import at_least, at_most

# Of results/operating.json, which a test holds them to: two pairs, the worst host without an effect,
# and a ratio of 1.5 between sessions that differ by 5 %.
TWO_PAIRS_FALSE = 0.0205
TWO_PAIRS_POWER = 0.28
TWO_PAIRS_RULE = 1.1


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
    name, first = rule.deciding_pass(passes), next(iter(passes), "")
    pairs = session_pairs(statistics, name, first=first)
    found = conclude(pairs, min_ratio=rule.min_ratio) if len(pairs) > 1 else None
    evidence = _evidence(rule, statistics, name, pairs, found, first=first)
    reasons = list(obstacles(rule, statistics, name, evidence, checks, sizes))
    verdict: Verdict = "not decided"
    because = "; ".join(reason.message for reason in reasons)
    if not reasons and found is not None and evidence is not None:
        verdict, because = found.verdict, _because(rule, found, evidence)
        if verdict == "not decided":
            reasons = [Reason(code="threshold-inside", message=because)]
    return Decision(
        claim=_claim(rule, statistics, name, verdict),
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


def session_pairs(statistics: Statistics, name: str, *, first: str) -> list[SessionPair]:
    """The pairs of neighbouring sessions in pass ``name``, with what they took in pass ``first``."""
    pairs, cold = statistics.pairs_in(name), statistics.pairs_in(first)
    if pairs is None:
        return []
    colds = {block.sessions: block.ratio for block in cold.blocks} if cold and first != name else {}
    return [
        SessionPair(
            base=_level(statistics, block, 0, name, first if block.sessions in colds else None),
            treated=_level(statistics, block, 1, name, first if block.sessions in colds else None),
            log_ratio=log(block.ratio),
            log_first=log(colds[block.sessions]) if block.sessions in colds else None,
        )
        for block in pairs.blocks
    ]


def _level(statistics: Statistics, block: Block, side: int, name: str, first: str | None) -> Level:
    session, arm = block.sessions[side], statistics.compared[side]

    def median_of(pass_name: str) -> float | None:
        p50_ms = statistics.arms_in(pass_name)[arm or ""].sessions[session].p50_ms
        assert p50_ms is not None, "a pair has complete requests"
        return log(p50_ms) if p50_ms > LEAST_MS else None

    return Level(session, median_of(name), median_of(first) if first else None)


def _evidence(
    rule: DecisionSection,
    statistics: Statistics,
    name: str,
    pairs: Sequence[SessionPair],
    found: Conclusion | None,
    *,
    first: str,
) -> DecisionEvidence | None:
    """None without a pair; no bounds with one."""
    paired = statistics.pairs_in(name)
    if paired is None:
        return None
    bad = found.set_aside if found else None
    return DecisionEvidence(
        **paired.model_dump(include={"ratio", "low", "high", "interval", "coverage"}),
        n_blocks=len(paired.blocks),
        n_documents=paired.n_documents,
        n_pairs=sum(block.n for block in paired.blocks),
        at_least=found.low if found else None,
        at_most=found.high if found else None,
        error=ERROR if found else None,
        noise=found.noise if found else None,
        first_pass_ratio=found.host if found else None,
        allowance=found.allowance if found else None,
        set_aside=_aside(bad, pairs, rule) if bad else None,
        pairs_needed=pairs_needed(found, min_ratio=rule.min_ratio) if found else None,
        order_effect=order_effect(statistics, pairs),
        control_drift=control_drift(statistics, first),
    )


def _aside(bad: BadSession, pairs: Sequence[SessionPair], rule: DecisionSection) -> SetAside:
    with_it = conclude(pairs, min_ratio=rule.min_ratio, may_set_aside=False)
    return SetAside(
        session=bad.session,
        factor=bad.factor,
        first_factor=bad.first_factor,
        verdict_with_it=with_it.verdict,
    )


def _claim(rule: DecisionSection, statistics: Statistics, name: str, verdict: Verdict) -> str:
    """A question until the answer is yes."""
    base, treatment = statistics.compared
    if treatment is None:
        return f"Nothing is compared with {base}"
    where, ratio, least = name or "a replay", f"{base} ÷ {treatment}", f"{rule.min_ratio:g}"
    if verdict == "supported":
        return f"{treatment} lowers TTFT in {where}: {ratio} is at least {least}"
    return f"Does {treatment} lower TTFT in {where}: is {ratio} at least {least}?"


def _because(rule: DecisionSection, found: Conclusion, evidence: DecisionEvidence) -> str:
    """The bounds beside what was asked, what was taken off them, and what would change it."""
    asked, wrong = f"{rule.min_ratio:g}", f"{ERROR:.0%}"
    says = {
        "supported": f"The ratio is at least {at_least(found.low)} (wrong in {wrong} of runs); "
        f"{asked} was asked for",
        "not supported": f"The ratio is at most {at_most(found.high)} (wrong in {wrong} of runs); "
        f"{asked} was asked for",
        "not decided": f"{found.n_pairs} pairs of sessions leave ratios from {at_least(found.low)} to "
        f"{at_most(found.high)} possible; {asked} lies between",
    }
    parts = [says[found.verdict]]
    if found.host is not None and found.allowance > 1.005 and _moved(found):
        parts.append(
            f"the first pass, where both arms compute everything, had a ratio of {found.host:.2f}: "
            f"a factor {found.allowance:.2f} is allowed for that"
        )
    if (aside := evidence.set_aside) is not None:
        parts.append(
            f"{aside.session} is set aside with its pair: it took {aside.factor:.2f} times its arm's "
            f"other sessions, and {aside.first_factor:.2f} times in the first pass, so its host was "
            f"in trouble; with it: {aside.verdict_with_it}"
        )
    if found.verdict == "not decided":
        more = evidence.pairs_needed
        parts.append(
            f"about {more} pairs would probably decide"
            if more
            else "not even 1,000 pairs would probably decide"
        )
    elif found.n_pairs == 2 and rule.min_ratio == TWO_PAIRS_RULE:
        parts.append(
            f"two pairs find a ratio of 1.5 in {TWO_PAIRS_POWER:.0%} of runs where sessions differ "
            f"by 5 %, and equal arms on an unsteady host pass in up to {TWO_PAIRS_FALSE:.1%}"
        )
    return "; ".join(parts)


def _moved(found: Conclusion) -> bool:
    """Whether the first pass says that the bound which decides may have been moved by the host."""
    host = found.host or 1.0
    return {"supported": host > 1, "not supported": host < 1, "not decided": True}[found.verdict]
