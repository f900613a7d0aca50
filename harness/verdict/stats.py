"""Per pass, arm and token source: medians, spreads, paired ratios over A B B A blocks, outliers.

The unit of analysis is the session: requests inside one server are not independent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median, quantiles
from typing import Any

from harness.plan.labels import compared
from harness.verdict.paired import MIN_BLOCKS_FOR_INTERVAL, compare_sessions, paired
from harness.verdict.tally import Cell, Sample, Session, Tally, source_class, tally
from sim.split import SOURCE_CLASSES

__all__ = ["SOURCE_CLASSES", "SUMMARY_SCHEMA", "source_class", "summarize"]

# history: 1 = first published (kvcliff 0.1); still 1 after sessions, paired documents, outliers,
# decision, timeline, provenance, compared and takeaways were added: no key was removed or changed
# its meaning.
SUMMARY_SCHEMA = 1
METHODS = {
    "median_method": "mean of the two middle values when n is even",
    "percentile_method": (
        "p90: linear between closest ranks (Hyndman and Fan, type 7); null when n < 20"
    ),
    "unit_of_analysis": "session (one server, launch to stop)",
    "interval_method": (
        "median of the per-block medians; range over blocks below "
        f"{MIN_BLOCKS_FOR_INTERVAL} blocks, else 95 % percentile bootstrap over blocks"
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
    rows: Iterable[Sample], *, run: str, plan_id: str, block_size: int, arms: Sequence[str] = ()
) -> dict[str, Any]:
    """The measured part of ``summary.json``: times in ms at full precision, tokens as integers.

    ``rows`` is walked once and not kept. Every cell carries its n; failed rows are counted and in
    no median; what has no row is absent. Warm-up rows appear in the sessions' spans only.
    ``arms``: those of the plan, measured or not; without a plan, the rows'.
    """
    total = tally(rows, block_size=block_size)
    base, treatment = compared(arms or [session.config for session in total.sessions.values()])
    return {
        "schema": SUMMARY_SCHEMA,
        "run": run,
        "plan_id": plan_id,
        "compared": [base, treatment],
        **METHODS,
        **_directions(base, treatment),
        "passes": {name: _pass(total, name, treatment) for name in total.passes},
        "sources": _sources(total),
        "sessions": [_session(name, session) for name, session in total.sessions.items()],
        "outliers": _outliers(total),
    }


def _directions(base: str, treatment: str | None) -> dict[str, str]:
    """Which arm is on top, in words."""
    if treatment is None:
        return dict.fromkeys(("ratio_direction", "difference_direction"), "no arm is compared")
    return {
        "ratio_direction": f"{base} / {treatment}: above 1 {treatment} is faster",
        "difference_direction": f"{base} − {treatment} in ms: above 0 {treatment} is faster",
    }


def _pass(total: Tally, name: str, treatment: str | None) -> dict[str, Any]:
    arms = total.arms(name)
    return {
        "arms": {config: _arm(cells) for config, cells in arms.items()},
        "paired_ratio": paired(total, name, treatment),
        "order_effect": {
            config: compare_sessions(total, name, names[0], names[-1])
            for config in arms
            if len(names := total.in_order(config, name)) > 1
        },
    }


def _arm(sessions: Mapping[str, Cell]) -> dict[str, Any]:
    cells = {name: ttft_cell(cell.ttft_ms) for name, cell in sessions.items()}
    medians = [cell["p50_ms"] for cell in cells.values() if cell["n"]]
    return {
        **ttft_cell(chain.from_iterable(cell.ttft_ms for cell in sessions.values())),
        "failed": sum(cell.failed for cell in sessions.values()),
        "tokens": token_sums(sessions.values()),
        "settle_p50_ms": _median(chain.from_iterable(c.settle_ms for c in sessions.values())),
        "session_medians": _spread(medians),
        "sessions": cells,
    }


def ttft_cell(times: Iterable[float]) -> dict[str, Any]:
    """``{"n", "p50_ms", "p90_ms", "min_ms", "max_ms"}`` of TTFTs; only ``n`` when it is 0."""
    values = sorted(times)
    if not values:
        return {"n": 0}
    has_p90 = len(values) >= MIN_N_FOR_P90
    return {
        "n": len(values),
        "p50_ms": median(values),
        "p90_ms": quantiles(values, n=10, method="inclusive")[8] if has_p90 else None,
        "min_ms": values[0],
        "max_ms": values[-1],
    }


def token_sums(cells: Iterable[Cell]) -> dict[str, int | None]:
    """Prompt tokens by source over the attributed rows, and how many rows those are.

    ``loaded_bytes`` and ``stored`` are None where no row knows them.
    """
    total: Counter[str] = Counter()
    for cell in cells:
        total.update(cell.tokens)
    return {
        **{name: total[name] for name in ("n", "prompt", "computed", "gpu_hit", "host_loaded")},
        **{name: total.get(name) for name in ("loaded_bytes", "stored")},
    }


def _spread(medians: Sequence[float]) -> dict[str, Any]:
    """Over the sessions of one arm: the unit of analysis is the session."""
    if not medians:
        return {"n": 0}
    return {
        "n": len(medians),
        "median_ms": median(medians),
        "low_ms": min(medians),
        "high_ms": max(medians),
        "spread_ratio": max(medians) / min(medians) if min(medians) > 0 else None,
    }


def _sources(total: Tally) -> dict[str, Any]:
    """TTFT by where the document's KV came from: over all arms, and by pass and arm."""
    sources: dict[str, Any] = {}
    for index, name in enumerate(SOURCE_CLASSES):
        by_pass: dict[str, dict[str, Any]] = {}
        everything: list[float] = []
        for pass_name in total.passes:
            for config, sessions in total.arms(pass_name).items():
                times = [t for cell in sessions.values() for t in cell.of_source(index)]
                if times:
                    by_pass.setdefault(pass_name, {})[config] = ttft_cell(times)
                    everything += times
        if everything:
            sources[name] = {**ttft_cell(everything), "by_pass": by_pass}
    return sources


def _session(name: str, session: Session) -> dict[str, Any]:
    """Counts, spans (wall clock in ms since 1970, a label) and the first measured request."""
    cells = session.cells
    return {
        "session": name,
        "config": session.config,
        "order": session.order,
        "n": sum(len(cell.ttft_ms) for cell in cells.values()),
        "failed": sum(cell.failed for cell in cells.values()),
        "settle_total_ms": sum(sum(cell.settle_ms) for cell in [session.warmup, *cells.values()]),
        "first_request": _first_request(cells),
        "spans": [
            {
                "phase": phase,
                "began_unix_ms": cell.began_ns / 1e6,
                "ended_unix_ms": cell.ended_ns / 1e6,
            }
            for phase, cell in {"warmup": session.warmup, **cells}.items()
            if cell.began_ns and cell.ended_ns  # 0: the clock of an imported row is not known
        ],
    }


def _first_request(cells: Mapping[str, Cell]) -> dict[str, Any] | None:
    """The first measured request beside its like: same pass, same source; None without any."""
    cell = next((cell for cell in cells.values() if cell.seq), None)
    if cell is None:
        return None
    first = min(range(len(cell.seq)), key=cell.seq.__getitem__)
    alike = [
        ttft
        for index, ttft in enumerate(cell.ttft_ms)
        if index != first and cell.source[index] == cell.source[first]
    ]
    if len(alike) < MIN_N_FOR_OUTLIERS:
        return None
    middle, limit = _limits(alike)
    ttft = cell.ttft_ms[first]
    return {
        "ttft_ms": ttft,
        "others_p50_ms": middle,
        "n_others": len(alike),
        "is_slow": ttft - middle > limit,
    }


def _outliers(total: Tally) -> dict[str, Any]:
    """Flagged rows, the farthest first; ``n_judged`` of ``n`` rows were in a large enough group."""
    listed: list[dict[str, Any]] = []
    n = judged = 0
    for name, session in total.sessions.items():
        for pass_name, cell in session.cells.items():
            n += len(cell.ttft_ms)
            for source in set(cell.source):
                times = cell.of_source(source)
                if len(times) < MIN_N_FOR_OUTLIERS:
                    continue
                judged += len(times)
                listed += [
                    {"session": name, "pass": pass_name, **found}
                    for found in _far_from_median(cell, source, times)
                ]
    listed.sort(key=lambda row: -row["distance"])
    return {"n": n, "n_judged": judged, "n_flagged": len(listed), "rows": listed[:MOST_LISTED]}


def _far_from_median(cell: Cell, source: int, times: Sequence[float]) -> Iterable[dict[str, Any]]:
    middle, limit = _limits(times)
    for doc, ttft, its_source in zip(cell.doc, cell.ttft_ms, cell.source, strict=True):
        if its_source == source and abs(ttft - middle) > limit:
            yield {
                "doc": doc,
                "ttft_ms": ttft,
                "group_p50_ms": middle,
                "distance": abs(ttft - middle) / limit,
            }


def _limits(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance from it beyond which a time is an outlier, in ms."""
    middle = median(times)
    mad = median(abs(t - middle) for t in times)
    # The smallest positive float keeps a group of zeros from dividing by its own limit.
    return middle, max(OUTLIER_DISTANCE * max(mad, MAD_FLOOR * middle), 5e-324)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
