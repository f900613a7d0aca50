"""What changed between runs that asked the same thing of the same machine; others are refused."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from harness.errors import InputError
from harness.verdict.measured import JsonObject, RatioRange, Result, Spread, Statistics
from harness.verdict.schema import Summary, Verdict, read_published

COMPARE_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)
_SAME_PLAN = ("model", "workload", "server", "host", "control", "arms")
_SAME_MACHINE = ("cpu", "cores", "gpus", "build", "dtype")
_SAME_SERVERS = ("vllm_version", "lmcache_version", "block_size", "num_gpu_blocks")
Says = Literal["changed", "no change shown", "too few sessions", "no sessions"]


class Change(Result):
    """One arm in one pass, a later run against the first; null where one side has no session.

    ``change`` is later ÷ first of the medians of session medians: above 1 it got slower. Its range
    is the lowest over the highest session to the highest over the lowest; ``says`` is ``changed``
    only where that range leaves out 1 and each side has two sessions or more.
    """

    run: str
    first: Spread
    later: Spread
    change: float | None
    low: float | None
    high: float | None
    says: Says


class Comparison(Result):
    """Every later run against the first; lists of runs are in the order given."""

    schema_version: int = Field(alias="schema")
    runs: list[str]
    direction: str
    passes: dict[str, dict[str, list[Change]]]
    ratios: dict[str, list[RatioRange | None]]
    verdicts: list[Verdict]


def compare(runs: Sequence[Path]) -> Comparison:
    """Every later run against the first, per pass and arm; InputError names what differs."""
    if len(runs) < 2:
        raise InputError(f"{len(runs)} run given; comparing needs two or more")
    summaries = [read_published(run)[0] for run in runs]
    names = [summary.run for summary in summaries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} is given twice; a run does not differ from itself")
    first, *others = summaries
    _refuse_unlike(first, others)
    return Comparison(
        schema_version=COMPARE_SCHEMA,
        runs=names,
        direction="later / first of TTFT: above 1 the later run is slower",
        passes={
            name: {
                arm: [_change(first, later, name, arm) for later in others] for arm in content.arms
            }
            for name, content in first.passes.items()
        },
        ratios={name: [_ratio(summary, name) for summary in summaries] for name in first.passes},
        verdicts=[summary.decision.verdict for summary in summaries],
    )


def _refuse_unlike(first: Summary, others: Sequence[Summary]) -> None:
    problems = [
        f"{path}: {first.run} has {before!r}, {later.run} has {after!r}"
        for later in others
        for path, before, after in _differences(_facts(first), _facts(later))
    ]
    if problems:
        raise InputError(
            "these runs must not be compared: " + "; ".join(problems),
            hint="measure both with one plan, one installation and on one machine",
        )


def _facts(summary: Summary) -> JsonObject:
    """Everything two runs must share, nested as in ``summary.json``."""
    plan = summary.plan
    if plan is None:
        raise InputError(
            f"{summary.run} was imported: nothing says on what it was measured",
            hint="only runs of kvcliff can be compared",
        )
    servers: JsonObject = {}
    for session in summary.sessions:
        facts = session.server.get("facts") or {}
        servers.setdefault(session.arm, {name: facts.get(name) for name in _SAME_SERVERS})
    return {
        "plan": {name: plan.get(name) for name in _SAME_PLAN},
        "environment": {name: summary.environment.get(name) for name in _SAME_MACHINE},
        "server": servers,
    }


def _differences(first: Any, later: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path and both values, for every leaf that differs."""
    if isinstance(first, Mapping) and isinstance(later, Mapping):
        for name in dict.fromkeys([*first, *later]):
            below = f"{path}.{name}" if path else str(name)
            yield from _differences(first.get(name), later.get(name), below)
    elif first != later:
        yield path, first, later


def _change(first: Summary, later: Summary, pass_name: str, arm: str) -> Change:
    before, after = (_spread(summary, pass_name, arm) for summary in (first, later))
    change, low, high = (
        over / under if over is not None and under is not None else None
        for over, under in (
            (after.median_ms, before.median_ms),
            (after.low_ms, before.high_ms),
            (after.high_ms, before.low_ms),
        )
    )
    says: Says
    if low is None or high is None:
        says = "no sessions"
    elif min(before.n, after.n) < 2:
        says = "too few sessions"
    else:
        says = "changed" if low > 1 or high < 1 else "no change shown"
    return Change(
        run=later.run, first=before, later=after, change=change, low=low, high=high, says=says
    )


def _spread(statistics: Statistics, pass_name: str, arm: str) -> Spread:
    """Session medians of an arm in a pass; an arm or pass that is absent has n 0."""
    cell = statistics.arms_in(pass_name).get(arm)
    spread = cell.session_medians if cell else None
    return spread if spread and spread.low_ms else Spread(n=0)


def _ratio(statistics: Statistics, pass_name: str) -> RatioRange | None:
    pairs = statistics.pairs_in(pass_name)
    return pairs and RatioRange(**pairs.model_dump(include=set(RatioRange.model_fields)))


def comparison_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Cells of the comparison: pass, arm, position of the run, first, later, change, range, says."""
    for name, arms in comparison.passes.items():
        for arm, changes in arms.items():
            for position, change in enumerate(changes, start=2):
                yield (name, arm, str(position), _ms(change.first), _ms(change.later),
                       *_span(change), change.says)  # fmt: skip


def _ms(side: Spread) -> str:
    return f"{side.median_ms:.1f} ({side.n})" if side.n else "–"


def _span(change: Change) -> tuple[str, str]:
    if change.change is None:
        return "–", "–"
    return f"{change.change:.3f}", f"{change.low:.3f}–{change.high:.3f}"
