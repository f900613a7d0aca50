"""How far the sessions' order and the control's server may have moved the times: with intervals."""

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean

from harness.plan.arms import CONTROL
from harness.plan.power import squares_within, student
from harness.verdict.measured import Estimate, Statistics
from harness.verdict.paired import CONFIDENCE, LEAST_MS
from harness.verdict.procedure import SessionPair


def order_effect(statistics: Statistics, pairs: Sequence[SessionPair]) -> Estimate | None:
    """The second session of a pair ÷ its first, whatever their arms; None without both orders.

    Each of the two orders has the effect of the treatment with its own sign, so that the mean of
    their means has none.
    """
    position = {session.session: session.order for session in statistics.sessions}
    by_order: tuple[list[float], list[float]] = [], []
    for pair in pairs:
        is_base_first = position[pair.base.session] < position[pair.treated.session]
        by_order[is_base_first].append(pair.log_ratio * (-1 if is_base_first else 1))
    if not all(by_order) or len(pairs) < 3:
        return None
    degrees = len(pairs) - 2
    error = sqrt(squares_within(by_order) / degrees * sum(1 / len(one) for one in by_order)) / 2
    return _estimate(fmean(map(fmean, by_order)), error, degrees)


def control_drift(statistics: Statistics, first: str) -> Estimate | None:
    """The control's median in the first pass ÷ the arms', with the spread of one arm's sessions.

    None without a control, or without two sessions of an arm.
    """
    arms = statistics.arms_in(first)
    logs = {
        arm: [
            log(cell.p50_ms)
            for cell in arms[arm].sessions.values()
            if cell.p50_ms and cell.p50_ms > LEAST_MS
        ]
        for arm in (CONTROL, *statistics.compared)
        if arm is not None and arm in arms
    }
    control = logs.pop(CONTROL, [])
    arms_logs = [values for values in logs.values() if values]
    others = [value for values in arms_logs for value in values]
    degrees = len(others) - len(arms_logs)
    if not control or degrees < 1:
        return None
    variance = squares_within(arms_logs) / degrees
    error = sqrt(variance * (1 / len(control) + 1 / len(others)))
    return _estimate(fmean(control) - fmean(others), error, degrees)


def _estimate(middle: float, error: float, degrees: int) -> Estimate:
    margin = student(degrees, (1 + CONFIDENCE) / 2) * error
    return Estimate(factor=exp(middle), low=exp(middle - margin), high=exp(middle + margin))
