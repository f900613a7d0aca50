"""Per pass and arm: medians, spreads, and the paired ratio with its range over A B B A blocks.

The unit of analysis is the session: requests inside one server are not independent.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from harness.journal import Row

SUMMARY_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)
BASE, TIER = "baseline", "lmcache"
SOURCE_CLASSES = ("recomputed", "gpu+recomputed", "gpu+host", "host", "gpu")


def summarize(rows: Iterable[Row], *, run: str, plan_id: str, block_size: int) -> dict[str, Any]:
    """Content of ``summary.json``: times in ms at full precision, tokens as integers.

    Every cell carries its n; failed rows are counted and in no median; what has no row is absent.
    """
    measured = [row for row in rows if row.phase == "measure"]
    passes = list(dict.fromkeys(row.pass_name for row in measured))
    return {
        "schema": SUMMARY_SCHEMA,
        "run": run,
        "plan_id": plan_id,
        "median_method": "mean of the two middle values when n is even",
        "ratio_direction": f"{BASE} / {TIER}: above 1 the tier is faster",
        "passes": {name: _pass([r for r in measured if r.pass_name == name]) for name in passes},
        "sources": _sources(measured, block_size),
    }


def _pass(rows: Sequence[Row]) -> dict[str, Any]:
    configs = list(dict.fromkeys(row.config for row in rows))
    return {
        "arms": {config: _arm([r for r in rows if r.config == config]) for config in configs},
        "paired_ratio": _paired_ratio(rows),
    }


def _arm(rows: Sequence[Row]) -> dict[str, Any]:
    sessions: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sessions[row.session].append(row)
    return {
        **ttft_cell(rows),
        "failed": sum(not row.complete for row in rows),
        "tokens": token_sums(rows),
        "sessions": {name: ttft_cell(part) for name, part in sessions.items()},
    }


def ttft_cell(rows: Iterable[Row]) -> dict[str, Any]:
    """``{"n", "p50_ms", "min_ms", "max_ms"}`` of the complete rows; only ``n`` when it is 0."""
    times = [row.ttft_ms for row in rows if row.complete and row.ttft_ms is not None]
    if not times:
        return {"n": 0}
    return {"n": len(times), "p50_ms": median(times), "min_ms": min(times), "max_ms": max(times)}


def token_sums(rows: Iterable[Row]) -> dict[str, int]:
    """Prompt tokens by source over the attributed rows, and how many rows those are."""
    known = [row for row in rows if row.is_attributed]
    return {
        "n": len(known),
        "prompt": sum(row.prompt_tokens for row in known),
        "computed": sum(row.computed or 0 for row in known),
        "gpu_hit": sum(row.gpu_hit or 0 for row in known),
        "host_loaded": sum(row.host_loaded or 0 for row in known),
    }


def _paired_ratio(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Median over documents of baseline ÷ tier inside each block; range over the blocks.

    A block pairs the k-th session of each arm, so that in A B B A its two sessions are neighbours
    and drift enters the two blocks with opposite sign. None when no pair is complete.
    """
    blocks: list[dict[str, Any]] = []
    for base, tier in zip(_sessions(rows, BASE), _sessions(rows, TIER), strict=False):
        ratios = _document_ratios(rows, base, tier)
        if ratios:
            blocks.append({"sessions": [base, tier], "n": len(ratios), "ratio": median(ratios)})
    if not blocks:
        return None
    values = [block["ratio"] for block in blocks]
    return {
        "ratio": median(values),
        "low": min(values),
        "high": max(values),
        "interval": f"range over {len(blocks)} A B blocks; too few for a confidence interval"
        if len(blocks) < 6
        else f"range over {len(blocks)} A B blocks",
        "blocks": blocks,
    }


def _sessions(rows: Iterable[Row], config: str) -> list[str]:
    orders = {row.session: row.order for row in rows if row.config == config}
    return sorted(orders, key=lambda session: orders[session])


def _document_ratios(rows: Iterable[Row], base: str, tier: str) -> list[float]:
    times: dict[str, dict[int, float]] = {base: {}, tier: {}}
    for row in rows:
        if row.session in times and row.complete and row.ttft_ms:
            times[row.session][row.doc] = row.ttft_ms
    return [times[base][doc] / times[tier][doc] for doc in times[base] if doc in times[tier]]


def source_class(row: Row, block_size: int) -> str | None:
    """Where the document's KV came from; one of ``SOURCE_CLASSES``, None when unknown.

    A GPU hit ends at a block boundary, so a whole document found in the GPU tier leaves at most
    the question and one block to compute; a partial hit leaves or loads more.
    """
    if row.computed is None or row.gpu_hit is None or row.host_loaded is None:
        return None
    if row.gpu_hit == 0:
        return "host" if row.host_loaded else "recomputed"
    if row.host_loaded:
        return "gpu+host"
    question = row.prompt_tokens - row.doc_tokens
    return "gpu" if row.computed <= question + block_size else "gpu+recomputed"


def _sources(rows: Sequence[Row], block_size: int) -> dict[str, Any]:
    classes: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        name = source_class(row, block_size)
        if name is not None:
            classes[name].append(row)
    return {name: ttft_cell(classes[name]) for name in SOURCE_CLASSES if classes[name]}
