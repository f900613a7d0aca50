"""What changed between runs that asked the same thing of the same machine; others are refused."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.verdict.schema import read_published

COMPARE_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)
_SAME_PLAN = ("model", "workload", "server", "host", "control", "arms")
_SAME_MACHINE = ("cpu", "cores", "gpus", "build", "dtype")
_SAME_SERVERS = ("vllm_version", "lmcache_version", "block_size", "num_gpu_blocks")


def compare(runs: Sequence[Path]) -> dict[str, Any]:
    """Every later run against the first, per pass and arm; InputError names what differs.

    ``change`` is later ÷ first of the medians of session medians: above 1 it got slower. Its range
    is the lowest over the highest session to the highest over the lowest; ``says`` is ``changed``
    only where that range leaves out 1 and each side has two sessions or more.
    """
    if len(runs) < 2:
        raise InputError(f"{len(runs)} run given; comparing needs two or more")
    summaries = [read_published(run)[0] for run in runs]
    names = [summary["run"] for summary in summaries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} is given twice; a run does not differ from itself")
    problems = [
        f"{path}: {summaries[0]['run']} has {before!r}, {later['run']} has {after!r}"
        for later in summaries[1:]
        for path, before, after in _differences(_facts(summaries[0]), _facts(later))
    ]
    if problems:
        raise InputError(
            "these runs must not be compared: " + "; ".join(problems),
            hint="measure both with one plan, one installation and on one machine",
        )
    first = summaries[0]
    return {
        "schema": COMPARE_SCHEMA,
        "runs": names,
        "direction": "later / first of TTFT: above 1 the later run is slower",
        "passes": {
            name: {
                arm: [_change(first, later, name, arm) for later in summaries[1:]]
                for arm in content["arms"]
            }
            for name, content in first["passes"].items()
        },
        "ratios": {
            name: [_ratio(summary, name) for summary in summaries] for name in first["passes"]
        },
        "verdicts": [summary["decision"]["verdict"] for summary in summaries],
    }


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Everything two runs must share, nested as in ``summary.json``."""
    plan = summary["plan"]
    if plan is None:
        raise InputError(
            f"{summary['run']} was imported: nothing says on what it was measured",
            hint="only runs of kvcliff can be compared",
        )
    servers: dict[str, Any] = {}
    for session in summary["sessions"]:
        facts = (session["server"] or {}).get("facts") or {}
        servers.setdefault(session["config"], {name: facts.get(name) for name in _SAME_SERVERS})
    return {
        "plan": {name: plan.get(name) for name in _SAME_PLAN},
        "environment": {name: summary["environment"].get(name) for name in _SAME_MACHINE},
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


def _change(
    first: Mapping[str, Any], later: Mapping[str, Any], name: str, arm: str
) -> dict[str, Any]:
    sides = [_spread(summary, name, arm) for summary in (first, later)]
    found: dict[str, Any] = {"run": later["run"], "first": sides[0], "later": sides[1]}
    if not all(side["n"] for side in sides):
        return {**found, "change": None, "low": None, "high": None, "says": "no sessions"}
    before, after = sides
    low, high = after["low_ms"] / before["high_ms"], after["high_ms"] / before["low_ms"]
    says = "no change shown"
    if min(before["n"], after["n"]) < 2:
        says = "too few sessions"
    elif low > 1 or high < 1:
        says = "changed"
    return {
        **found,
        "change": after["median_ms"] / before["median_ms"],
        "low": low,
        "high": high,
        "says": says,
    }


def _spread(summary: Mapping[str, Any], name: str, arm: str) -> dict[str, Any]:
    """Session medians of an arm in a pass; an arm or pass that is absent has n 0."""
    arms = summary["passes"].get(name, {}).get("arms", {})
    spread: dict[str, Any] = arms[arm]["session_medians"] if arm in arms else {"n": 0}
    return spread if spread["n"] and spread["low_ms"] > 0 else {"n": 0}


def _ratio(summary: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    pair = summary["passes"].get(name, {}).get("paired_ratio")
    if pair is None:
        return None
    return {key: pair[key] for key in ("ratio", "low", "high", "interval")}


def comparison_rows(content: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Cells of the comparison: pass, arm, position of the run, first, later, change, range, says."""
    for name, arms in content["passes"].items():
        for arm, changes in arms.items():
            for position, change in enumerate(changes, start=2):
                yield (name, arm, str(position), _ms(change["first"]), _ms(change["later"]),
                       *_span(change), change["says"])  # fmt: skip


def _ms(side: Mapping[str, Any]) -> str:
    return f"{side['median_ms']:.1f} ({side['n']})" if side["n"] else "–"


def _span(change: Mapping[str, Any]) -> tuple[str, str]:
    if change["change"] is None:
        return "–", "–"
    return f"{change['change']:.3f}", f"{change['low']:.3f}–{change['high']:.3f}"
