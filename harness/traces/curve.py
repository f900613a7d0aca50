"""``kvcliff curve``: hits at every GPU capacity. numba makes it fast."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.traces.load import Loaded, head, input_errors, share_of
from harness.traces.serving import Serving, gpu_too_small, serial_curve, shared_assumptions
from sim.curves import bands, turns
from sim.curves.capacity import spaced
from sim.curves.concurrent import concurrent_curve, events_of, read_lifetimes
from sim.curves.policies import POLICY_NAMES, count_hits
from sim.curves.pool import pool_hits
from sim.curves.sources import csv_numbers
from sim.curves.stack import Curve, first_counted


@dataclass(frozen=True, slots=True)
class CurveRun:
    """A curve, what it was made from, and its JSON."""

    loaded: Loaded
    curve: Curve
    json: dict[str, Any]


def read_measured(file: Path) -> list[tuple[int, float]]:
    """Measured points to lay over a curve: (GPU blocks, hit share) of a CSV of these names."""
    points = []
    with input_errors():
        for where, (blocks, share) in csv_numbers(file, {"gpu_blocks": int, "hit_share": float}):
            if not (1 <= blocks < 2**40 and 0 <= share <= 1):
                raise InputError(
                    f"{where}: a share of {share} at {blocks} blocks; shares are 0 to 1, blocks "
                    "1 or more, below 2**40"
                )
            points.append((int(blocks), share))
    return points


def run_curve(
    loaded: Loaded,
    how: Serving,
    *,
    at: str | None = None,
    targets: Sequence[float] = (),
    policies: Sequence[str] = (),
    with_bands: bool = False,
    concurrency: Path | None = None,
) -> CurveRun:
    """Hits at the capacities ``at`` (see ``capacity.FORMS``; default: a few over the whole range).

    ``targets``: shares of the ideal whose capacity is looked for. ``policies``: replayed at each
    capacity. ``concurrency``: CSV of ``request,start_s,finish_s`` instead of the serial order.
    """
    if how.decode and loaded.tree.requests.source == turns.SOURCE:
        raise InputError(
            "--decode takes answers for blocks that nobody asks for again; here later turns do"
        )
    with input_errors():
        _check_policies(policies)
        exact_from = None
        if concurrency is None:
            found = serial_curve(loaded, how)
        else:
            found, exact_from = _overlapping(loaded, how, concurrency)
        n_blocks = max(loaded.tree.n_blocks, 1)
        capacities = spaced(1, n_blocks, 30) if at is None else loaded.ruler.all(at)
        wanted = [
            {"target": share, **_point(loaded, found, found.capacity_for(share))}
            for share in targets
        ]
    points = [_point(loaded, found, blocks) for blocks in capacities]
    if with_bands:
        _add_bands(loaded, found, how, points)
    _add_policies(loaded, how, points, policies)
    content = {
        **_curve_json(loaded, found),
        "exact_from_blocks": exact_from,
        "points": points,
        "targets": wanted,
        "assumptions": [
            *loaded.assumptions,
            *_curve_assumptions(loaded, how, exact_from, policies),
        ],
        "warnings": [*loaded.warnings, *gpu_too_small(loaded, capacities)],
    }
    return CurveRun(loaded, found, content)


VLLM = "vllm"
"""The policy that is vLLM's own pool, partial blocks and second copies included."""


def _check_policies(policies: Sequence[str]) -> None:
    """Before a long trace is replayed in vain."""
    known = (VLLM, *POLICY_NAMES)
    for policy in policies:
        if policy not in known:
            raise InputError(f"policy {policy!r} is not known; known: {', '.join(known)}")


def _curve_json(loaded: Loaded, found: Curve) -> dict[str, Any]:
    return {
        **head(loaded.tree),
        "requests": found.requests,
        "accesses": found.accesses,
        "ideal_hit_blocks": found.ideal,
        "prompt_tokens": found.prompt_tokens,
        "ideal_hit_share": found.share(found.ideal),
    }


def _overlapping(loaded: Loaded, how: Serving, file: Path) -> tuple[Curve, int]:
    if how.forward or how.warm_up:
        raise InputError("a given concurrency cannot be combined with forward order or warm-up")
    return concurrent_curve(
        loaded.tree,
        events_of(*read_lifetimes(file, len(loaded.tree.requests))),
        last_token=how.last_token,
        decode=how.decode,
    )


def _point(loaded: Loaded, found: Curve, blocks: int) -> dict[str, Any]:
    hits, tokens = found.at(blocks), blocks * loaded.ruler.block_tokens
    share = found.share(hits)
    return {
        "gpu_blocks": blocks,
        "hit_blocks": hits,
        "gpu_tokens": tokens,
        "gpu_gib": loaded.ruler.gib(tokens),
        "hit_share": share,
        "share_of_ideal": share_of(hits, found.ideal),
        "prefill_speedup_upper_bound": None if share in (None, 1.0) else 1 / (1 - share),
    }


def _add_bands(loaded: Loaded, found: Curve, how: Serving, points: list[dict[str, Any]]) -> None:
    other = serial_curve(loaded, replace(how, forward=not how.forward))
    forward, reverse = (found, other) if how.forward else (other, found)
    for point in points:
        capacity = point["gpu_blocks"]
        for name, band in (
            ("partial_tail", bands.partial_tail(reverse, capacity)),
            ("lmcache_mp_watermark", bands.watermark(reverse, capacity)),
            ("lmcache_in_process", bands.in_process(forward, reverse, capacity)),
        ):
            point[f"{name}_hit_blocks"] = [*band]


def _add_policies(
    loaded: Loaded, how: Serving, points: list[dict[str, Any]], policies: Sequence[str]
) -> None:
    if not policies:
        return
    plain = [policy for policy in policies if policy != VLLM]
    order = loaded.order
    paths = [loaded.tree.ids_of(r).tolist() for r in order.tolist()] if plain else []
    for point in points:
        capacity = point["gpu_blocks"]
        point["policies"] = {policy: count_hits(paths, capacity, policy) for policy in plain}
        if VLLM in policies:
            found = pool_hits(loaded.tree, capacity, order=order, decode=how.decode)
            counted = found[first_counted(len(order), how.warm_up) :]
            point["policies"][VLLM] = int(counted.sum())


def _curve_assumptions(
    loaded: Loaded, how: Serving, exact_from: int | None, policies: Sequence[str]
) -> list[str]:
    order = "first block first, as LMCache's own cache simulator" if how.forward else (
        "last block first, as vLLM 0.32 frees them"
    )  # fmt: skip
    said = [
        f"LRU, a request's blocks touched {order}; usable capacity is num_gpu_blocks − 1",
        *shared_assumptions(loaded, how),
    ]
    if how.decode:
        said.append("full blocks of generated tokens take room and are never asked for again")
    if VLLM in policies:
        said.append(
            "vllm: its own pool, replayed: the last prompt token always computed, partial blocks and "
            "second copies in their places; a request that does not fit is not served"
        )
    if exact_from is not None:
        said.append(f"overlapping requests as given; exact from {exact_from} blocks on, the most "
                    "held at one time")  # fmt: skip
    return said
