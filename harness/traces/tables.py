"""The points of a curve or surface as a CSV file and as the rows a terminal shows."""

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from harness.console import say
from harness.files import replacing
from harness.terminal import err, out, table_of
from harness.traces.load import Progress, share_of
from harness.words_and_colours import SOURCES

_MOST_PAIRS = 100
"""Pairs of a surface that are printed as text."""


def write_csv(content: dict[str, Any], output: Path) -> None:
    """The points of a curve or surface as CSV, one a line, plain columns only."""
    points = content["points"]
    columns = [name for name, value in points[0].items() if not isinstance(value, dict | list)]
    with (
        replacing(output) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)


def readable(content: dict[str, Any]) -> dict[str, Any]:
    """A curve's or surface's JSON with its points as the rows of a table of at most 80 columns."""
    points = content["points"]
    is_surface = bool(points) and "host_blocks" in points[0]
    shown = _thinned(points) if is_surface and len(points) > _MOST_PAIRS else points
    row = _pair_row if is_surface else _point_row
    content = content | {"points": [row(point) for point in shown]}
    if "targets" in content:
        targets = content["targets"]
        found = _reached_row if is_surface else _point_row
        content["targets"] = [{"target": _percent(t["target"]), **found(t)} for t in targets]
    if len(shown) < len(points):
        content["pairs_shown"] = f"{len(shown)} of {len(points):,}; --json or --csv FILE has all"
    return content


def _thinned(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pairs of about every k-th capacity of each tier, the ends included."""
    kept = []
    for field in ("gpu_blocks", "host_blocks"):
        capacities = sorted({point[field] for point in points})
        n = min(len(capacities), math.isqrt(_MOST_PAIRS))
        kept.append({capacities[i * (len(capacities) - 1) // max(n - 1, 1)] for i in range(n)})
    return [p for p in points if p["gpu_blocks"] in kept[0] and p["host_blocks"] in kept[1]]


def _pair_row(point: dict[str, Any]) -> dict[str, Any]:
    total = sum(point[f"{source.field}_tokens"] for source in SOURCES)
    row = {"GPU blocks": point["gpu_blocks"], "host blocks": point["host_blocks"]}
    if point["gpu_gib"] is not None:
        row |= {"GPU GiB": point["gpu_gib"], "host GiB": point["host_gib"]}
    for source in SOURCES:
        row[source.word] = _percent(share_of(point[f"{source.field}_tokens"], total))
    return row


def _reached_row(target: dict[str, Any]) -> dict[str, Any]:
    return {"GPU blocks": target["gpu_blocks"], "host blocks": target["host_blocks"]}


def _point_row(point: dict[str, Any]) -> dict[str, Any]:
    row = {"GPU blocks": point["gpu_blocks"], "tokens": point["gpu_tokens"]}
    if point["gpu_gib"] is not None:
        row["GiB"] = point["gpu_gib"]
    row |= {"hit blocks": point["hit_blocks"], "hits": _percent(point["hit_share"])}
    bands = {name: value for name, value in point.items() if isinstance(value, list)}
    for name, (low, high) in bands.items():
        row[name.removesuffix("_hit_blocks")] = f"{low:,}–{high:,}"
    row |= point.get("policies", {})
    if not bands and "policies" not in point:
        row["of the ideal"] = _percent(point["share_of_ideal"])
        row["speed-up at most"] = point["prefill_speedup_upper_bound"]
    return row


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


@contextmanager
def read_progress() -> Iterator[Progress]:
    """How far a trace has been read, with the time left; on a terminal only, gone when done."""
    with rich.progress.Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bars:
        task = bars.add_task("reading", total=None)
        yield lambda done, total, name: bars.update(
            task, completed=done, total=total, description=f"reading {name}"
        )


def show_trace(content: dict[str, Any]) -> None:
    """What a trace command found: what is known, points and targets as tables, assumptions last."""
    lists = {name: rows for name, rows in content.items() if isinstance(rows, list)}
    for name, value in content.items():
        if name in ("schema", *lists) or value is None or isinstance(value, dict):
            continue
        label = f"{name[:-2]}, s" if name.endswith("_s") else name
        out.print(f"{label.replace('_', ' ')}: {_plain(value)}", soft_wrap=True)
    for name in ("points", "targets"):
        rows = lists.get(name)
        if rows:
            columns = [k for k, v in rows[0].items() if not isinstance(v, dict | list)]
            table = table_of(name, *(column.replace("_", " ") for column in columns))
            for row in rows:
                table.add_row(*(_plain(row[column]) for column in columns))
            out.print(table)
    for text in lists.get("assumptions", []):
        out.print(f"assumed: {text}", soft_wrap=True)
    for text in lists.get("warnings", []):
        say(f"warning: {text}")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else "–" if value is None else str(value)
