"""Per pass, arm and token source: medians, spreads, paired ratios over A B B A blocks, outliers.

The unit of analysis is the session: requests inside one server are not independent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median, quantiles

from harness.plan.arms import compared
from harness.record.row import Sample
from harness.verdict import measured
from harness.verdict.paired import (
    Neighbours,
    compare_arms,
    compare_sessions,
    neighbours,
    price_of,
)
from harness.verdict.tally import PassRows, SessionRows, Tally, tally
from sim.split import SOURCE_CLASSES, Units

METHODS = {
    "median_method": "mean of the two middle values when n is even",
    "percentile_method": (
        "p90: linear between closest ranks (Hyndman and Fan, type 7); null when n < 20"
    ),
    "unit_of_analysis": "session (one server, launch to stop)",
    "interval_method": (
        "median of the per-block medians; the narrowest order statistics of the blocks that hold "
        "the median in 95 % of runs, their range where none do; coverage says in how many"
    ),
    "outlier_rule": (
        "farther from its group's median than 10 × 1.4826 × MAD, group = pass, session and token "
        "source with n ≥ 5, MAD at least 0.5 % of the median; flagged, never dropped"
    ),
}
MIN_N_FOR_P90 = 20  # below it, p90 is the second largest value or the largest
MIN_N_FOR_OUTLIERS = 5
# 1.4826 turns MAD into a standard deviation for normal data; 10 of them, because TTFT tails are
# long and we flag, never drop.
OUTLIER_DISTANCE = 10 * 1.4826
MAD_FLOOR = 0.005  # of the median: identical times would make every deviation infinite
MOST_LISTED = 100


def summarize(
    rows: Iterable[Sample], *, run: str, plan_id: str, units: Units, arms: Sequence[str] = ()
) -> measured.Statistics:
    """What the rows say: times in ms at full precision, tokens as integers.

    ``rows`` is walked once and not kept. Every cell carries its n; failed rows are counted and in
    no median; only what has a row has a cell. Warm-up rows appear in the sessions' spans only.
    ``arms``: the plan's order of sessions, measured or not; without a plan, the rows'.
    """
    total = tally(rows, units=units)
    order = dict(enumerate(arms, start=1)) or total.arms_by_position()
    base, treatment = compared(list(order.values()))
    pairs = neighbours(order, base, treatment)
    return measured.Statistics(
        schema_version=measured.SCHEMA,
        run=run,
        plan_id=plan_id,
        compared=(base, treatment),
        **METHODS,
        **_directions(base, treatment),
        passes={name: _pass(total, name, pairs) for name in total.passes},
        sources=_sources(total, pairs),
        sessions=[_session(name, session) for name, session in total.sessions.items()],
        outliers=_outliers(total),
    )


def _directions(base: str, treatment: str | None) -> dict[str, str]:
    if treatment is None:
        return dict.fromkeys(("ratio_direction", "difference_direction"), "no arm is compared")
    return {
        "ratio_direction": f"{base} / {treatment}: above 1 {treatment} is faster",
        "difference_direction": f"{base} − {treatment} in ms: above 0 {treatment} is faster",
    }


def _pass(total: Tally, name: str, pairs: Neighbours) -> measured.Pass:
    arms = total.arms(name)
    return measured.Pass(
        arms={arm: _arm(sessions) for arm, sessions in arms.items()},
        paired_ratio=compare_arms(total, name, pairs),
        order_effect={
            arm: compare_sessions(total, name, names[0], names[-1])
            for arm in arms
            if len(names := total.in_order(arm, name)) > 1
        },
    )


def _arm(sessions: Mapping[str, PassRows]) -> measured.ArmCell:
    cells = {name: cell_of(rows.ttft_ms) for name, rows in sessions.items()}
    medians = [cell.p50_ms for cell in cells.values() if cell.p50_ms is not None]
    tokens: Counter[str] = Counter()
    for rows in sessions.values():
        tokens.update(rows.tokens)
    return measured.ArmCell(
        **cell_of(chain.from_iterable(rows.ttft_ms for rows in sessions.values())).as_json(),
        failed=sum(rows.failed for rows in sessions.values()),
        tokens=measured.TokenSums(
            loaded_bytes=tokens.get("loaded_bytes"),
            stored=tokens.get("stored"),
            **{
                name: tokens[name] for name in ("n", "prompt", "computed", "gpu_hit", "host_loaded")
            },
        ),
        settle_p50_ms=_median(chain.from_iterable(rows.settle_ms for rows in sessions.values())),
        session_medians=_spread(medians),
        sessions=cells,
    )


def cell_of(times: Iterable[float]) -> measured.Cell:
    """Median, p90 and ends of TTFTs in ms; only ``n`` is given when it is 0."""
    values = sorted(times)
    if not values:
        return measured.Cell(n=0)
    has_p90 = len(values) >= MIN_N_FOR_P90
    return measured.Cell(
        n=len(values),
        p50_ms=median(values),
        p90_ms=quantiles(values, n=10, method="inclusive")[8] if has_p90 else None,
        min_ms=values[0],
        max_ms=values[-1],
    )


def _spread(medians: Sequence[float]) -> measured.Spread:
    if not medians:
        return measured.Spread(n=0)
    return measured.Spread(
        n=len(medians),
        median_ms=median(medians),
        low_ms=min(medians),
        high_ms=max(medians),
        spread_ratio=max(medians) / min(medians) if min(medians) > 0 else None,
    )


def _sources(total: Tally, pairs: Neighbours) -> dict[str, measured.SourceTimes]:
    """TTFT by where the document's KV came from: over all, by arm, and by pass and arm."""
    sources = {}
    for index, name in enumerate(SOURCE_CLASSES):
        by_pass: dict[str, dict[str, measured.Cell]] = {}
        by_arm: dict[str, list[float]] = {}
        for pass_name in total.passes:
            for arm, sessions in total.arms(pass_name).items():
                times = [t for rows in sessions.values() for t in rows.of_source(index)]
                if times:
                    by_pass.setdefault(pass_name, {})[arm] = cell_of(times)
                    by_arm.setdefault(arm, []).extend(times)
        if by_arm:
            sources[name] = measured.SourceTimes(
                **cell_of(chain.from_iterable(by_arm.values())).as_json(),
                by_arm={arm: cell_of(times) for arm, times in by_arm.items()},
                by_pass=by_pass,
                price_ms=price_of(total, index, pairs),
            )
    return sources


def _session(name: str, session: SessionRows) -> measured.SessionSummary:
    """Counts, spans (wall clock in ms since 1970, a label) and the first measured request."""
    passes = session.passes
    return measured.SessionSummary(
        session=name,
        arm=session.arm,
        order=session.order,
        n=sum(len(rows.ttft_ms) for rows in passes.values()),
        failed=sum(rows.failed for rows in passes.values()),
        settle_total_ms=sum(sum(rows.settle_ms) for rows in [session.warmup, *passes.values()]),
        first_request=_first_request(passes),
        spans=[
            measured.SessionSpan(
                phase=phase, began_unix_ms=rows.began_ns / 1e6, ended_unix_ms=rows.ended_ns / 1e6
            )
            for phase, rows in {"warmup": session.warmup, **passes}.items()
            if rows.began_ns and rows.ended_ns  # 0: the clock of an imported row is not known
        ],
        server={},  # the rows do not say
    )


def _first_request(passes: Mapping[str, PassRows]) -> measured.FirstRequest | None:
    """The first measured request beside its like: same pass, same source; None without any."""
    rows = next((rows for rows in passes.values() if rows.seq), None)
    if rows is None:
        return None
    first = min(range(len(rows.seq)), key=rows.seq.__getitem__)
    alike = [
        ttft
        for index, ttft in enumerate(rows.ttft_ms)
        if index != first and rows.source[index] == rows.source[first]
    ]
    if len(alike) < MIN_N_FOR_OUTLIERS:
        return None
    middle, limit = _limits(alike)
    ttft = rows.ttft_ms[first]
    return measured.FirstRequest(
        ttft_ms=ttft,
        others_p50_ms=middle,
        n_others=len(alike),
        is_slow=ttft - middle > limit,
    )


def _outliers(total: Tally) -> measured.Outliers:
    """Flagged rows, the farthest first; ``n_judged`` of ``n`` rows were in a large enough group."""
    listed: list[measured.Outlier] = []
    n = judged = 0
    for name, session in total.sessions.items():
        for pass_name, rows in session.passes.items():
            n += len(rows.ttft_ms)
            for source in set(rows.source):
                times = rows.of_source(source)
                if len(times) < MIN_N_FOR_OUTLIERS:
                    continue
                judged += len(times)
                listed += _far_from_median(name, pass_name, rows, source, times)
    listed.sort(key=lambda row: -row.distance)
    return measured.Outliers(n=n, n_judged=judged, n_flagged=len(listed), rows=listed[:MOST_LISTED])


def _far_from_median(
    session: str, pass_name: str, rows: PassRows, source: int, times: Sequence[float]
) -> Iterable[measured.Outlier]:
    middle, limit = _limits(times)
    for doc, ttft, its_source in zip(rows.doc, rows.ttft_ms, rows.source, strict=True):
        if its_source == source and abs(ttft - middle) > limit:
            yield measured.Outlier(
                session=session,
                pass_name=pass_name,
                doc=doc,
                ttft_ms=ttft,
                group_p50_ms=middle,
                distance=abs(ttft - middle) / limit,
            )


def _limits(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance from it beyond which a time is an outlier, in ms."""
    middle = median(times)
    mad = median(abs(t - middle) for t in times)
    # The smallest positive float keeps a group of zeros from dividing by its own limit.
    return middle, max(OUTLIER_DISTANCE * max(mad, MAD_FLOOR * middle), 5e-324)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
