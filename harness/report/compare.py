"""What changed between runs that asked the same thing of the same machine; others are refused.

Two runs may differ in one factor that is named. Sessions are the observations, as everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import Field

from harness.errors import InputError
from harness.plan.power import student
from harness.verdict.measured import JsonObject, RatioRange, Result, Statistics
from harness.verdict.paired import LEAST_MS
from harness.verdict.procedure import Verdict
from harness.verdict.schema import Summary, read_published

# History: 1 = first published (kvcliff 0.1). 2: Welch's intervals in place of ranges; a factor.
COMPARE_SCHEMA: Final = 2
ERROR = 0.05
"""Share of tables of unchanged runs in which any cell is called changed."""
_SAME_PLAN = ("model", "workload", "server", "host", "control", "arms")
_SAME_MACHINE = ("cpu", "cores", "gpus", "build", "dtype")
_SAME_SERVERS = ("vllm_version", "lmcache_version", "block_size", "num_gpu_blocks")
Says = Literal["changed", "no change shown", "too few sessions", "no sessions"]
Factor = Literal["engines", "machine", "host-size", "gpu-size"]
_OF_FACTOR: Mapping[Factor, tuple[str, ...]] = {
    "engines": ("plan.server.engine", "vllm_version", "lmcache_version"),
    "machine": tuple(f"environment.{name}" for name in ("cpu", "cores", "gpus")),
    "host-size": ("plan.host.gib",),
    "gpu-size": ("plan.server.num_gpu_blocks", "plan.control.num_gpu_blocks", "num_gpu_blocks"),
}


class Sessions(Result):
    """The sessions of one arm in one pass; ``p50_ms``: geometric mean of their medians."""

    n: int
    p50_ms: float | None


class Change(Result):
    """One arm in one pass, a later run against the first.

    ``change`` is later ÷ first: above 1 it got slower; null where one side has no session. From
    ``low`` to ``high`` is Welch's 95 % interval of it, ``p`` its p value by Holm over all cells of
    the comparison; null below two sessions on a side. ``changed`` is said where p is 5 % or less,
    so that of 20 comparisons of unchanged runs one says it anywhere.
    """

    run: str
    first: Sessions
    later: Sessions
    change: float | None
    low: float | None
    high: float | None
    p: float | None
    says: Says


class Comparison(Result):
    """Every later run against the first; lists of runs are in the order given."""

    schema_version: int = Field(alias="schema")
    runs: list[str]
    across: dict[str, list[Any]] = Field(
        description="what differs by leave, by dotted path; by run"
    )
    direction: str
    passes: dict[str, dict[str, list[Change]]]
    ratios: dict[str, list[RatioRange | None]]
    verdicts: list[Verdict]

    def is_worse(self, factor: float) -> bool:
        """Whether any arm in any pass has changed, and is ``factor`` times slower or more."""
        return any(
            change.says == "changed" and (change.change or 0) >= factor
            for arms in self.passes.values()
            for changes in arms.values()
            for change in changes
        )


def compare(runs: Sequence[Path], *, across: Factor | None = None) -> Comparison:
    """Every later run against the first, per pass and arm; InputError names what differs.

    ``across``: the one factor in which they may differ.
    """
    if len(runs) < 2:
        raise InputError(f"{len(runs)} run given; comparing needs two or more")
    summaries = [read_published(run)[0] for run in runs]
    names = [summary.run for summary in summaries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} is given twice; a run does not differ from itself")
    first, *others = summaries
    differing = _refuse_unlike(first, others, across)
    judged = changes(
        {
            (name, arm): [
                Samples(later.run, _medians(first, name, arm), _medians(later, name, arm))
                for later in others
            ]
            for name, content in first.passes.items()
            for arm in content.arms
        }
    )
    return Comparison(
        schema_version=COMPARE_SCHEMA,
        runs=names,
        across=differing,
        direction="later / first of TTFT: above 1 the later run is slower",
        passes={
            name: {arm: judged[name, arm] for arm in content.arms}
            for name, content in first.passes.items()
        },
        ratios={name: [_ratio(summary, name) for summary in summaries] for name in first.passes},
        verdicts=[summary.decision.verdict for summary in summaries],
    )


def _refuse_unlike(
    first: Summary, others: Sequence[Summary], across: Factor | None
) -> dict[str, list[Any]]:
    """The values by run of what differs and may; InputError for anything else that differs."""
    allowed: dict[str, list[Any]] = {}
    problems = []
    for position, later in enumerate(others, start=1):
        for path, before, after in _differences(_facts(first), _facts(later)):
            if across is not None and path.endswith(_OF_FACTOR[across]):
                allowed.setdefault(path, [before] * (len(others) + 1))[position] = after
            else:
                problems.append(f"{path}: {first.run} has {before!r}, {later.run} has {after!r}")
    if problems:
        raise InputError(
            "these runs must not be compared: " + "; ".join(problems),
            hint="measure both with one plan, one installation and on one machine; or name the one "
            f"factor they differ in: --across {'|'.join(get_args(Factor))}",
        )
    if across is not None and not allowed:
        raise InputError(f"these runs do not differ in {across}", hint="leave out --across")
    return allowed


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


class Samples(NamedTuple):
    """The logs of the session medians of one cell, of the first run and of ``run``."""

    run: str
    before: list[float]
    after: list[float]


Cell = tuple[str, str]
"""Pass and arm."""


def changes(cells: Mapping[Cell, Sequence[Samples]]) -> dict[Cell, list[Change]]:
    """What has changed in each of ``cells``, judged together: by Holm, the smallest p value first."""
    judged = {cell: [_change(*samples) for samples in by_run] for cell, by_run in cells.items()}
    ordered = sorted(
        (change.p, cell, i)
        for cell, by_run in judged.items()
        for i, change in enumerate(by_run)
        if change.p is not None
    )
    least = 0.0
    for rank, (p, cell, i) in enumerate(ordered):
        least = min(1.0, max(least, p * (len(ordered) - rank)))
        says: Says = "changed" if least <= ERROR else "no change shown"
        judged[cell][i] = judged[cell][i].model_copy(update={"p": least, "says": says})
    return judged


def _change(run: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Welch's two samples; what it says waits for the other cells."""
    sides = [
        Sessions(n=len(logs), p50_ms=exp(fmean(logs)) if logs else None) for logs in (before, after)
    ]
    change = low = high = p = None
    says: Says = "no sessions" if not before or not after else "too few sessions"
    if before and after:
        change = exp(fmean(after) - fmean(before))
    if min(len(before), len(after)) > 1:
        low, high, p = _welch(before, after)
        says = "no change shown"
    return Change(
        run=run, first=sides[0], later=sides[1], change=change, low=low, high=high, p=p,
        says=says,
    )  # fmt: skip


def _welch(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """The 95 % interval of the factor between two samples of logs, and the p value of none."""
    from scipy.special import stdtr

    middle = fmean(after) - fmean(before)
    parts = [variance(logs) / len(logs) for logs in (before, after)]
    error = sqrt(sum(parts))
    if error == 0:
        return exp(middle), exp(middle), float(middle == 0)
    squares = sum(
        part**2 / (len(logs) - 1) for part, logs in zip(parts, (before, after), strict=True)
    )
    degrees = error**4 / squares
    margin = student(degrees, 1 - ERROR / 2) * error
    return (
        exp(middle - margin),
        exp(middle + margin),
        2 * float(stdtr(degrees, -abs(middle) / error)),
    )


def _medians(statistics: Statistics, pass_name: str, arm: str) -> list[float]:
    """Logs of an arm's session medians in a pass; none of an arm or pass that is absent."""
    cell = statistics.arms_in(pass_name).get(arm)
    return (
        [
            log(each.p50_ms)
            for each in cell.sessions.values()
            if each.p50_ms and each.p50_ms > LEAST_MS
        ]
        if cell
        else []
    )


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


def _ms(side: Sessions) -> str:
    return "–" if side.p50_ms is None else f"{side.p50_ms:.1f} ({side.n})"


def _span(change: Change) -> tuple[str, str]:
    if change.change is None:
        return "–", "–"
    ends = "–" if change.low is None else f"{change.low:.3f}–{change.high:.3f}"
    return f"{change.change:.3f}", ends
