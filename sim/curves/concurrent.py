"""Hits by GPU capacity when requests overlap, for a given order of starts and finishes.

Exact for vLLM 0.32's pool at capacities that hold the running requests at all: blocks in use are
in the pool, free ones stand behind them in the order they were freed. Smaller capacities would
have made vLLM wait or preempt, which changes the order itself.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.curves.jit import read_only, run, runs_compiled
from sim.curves.kernels import overlap
from sim.curves.sources import csv_numbers
from sim.curves.stack import Curve, decode_units, hit_caps, in_units
from sim.curves.trace import Floats, Ints, TraceError, sized
from sim.curves.tree import PrefixTree


def read_lifetimes(file: Path, n_requests: int) -> tuple[Floats, Floats]:
    """Start and finish of every request by a CSV of ``request,start_s,finish_s``, or TraceError."""
    times = np.full((2, n_requests), np.nan)
    columns = {"request": int, "start_s": float, "finish_s": float}
    for where, (request, start, finish) in csv_numbers(file, columns):
        number = int(request)
        if not 0 <= number < n_requests or not 0 <= start <= finish < float("inf"):
            raise TraceError(
                f"{where}: request {number} from {start} to {finish} s; requests are 0 to "
                f"{n_requests - 1}, start at 0 s or later and end after they start"
            )
        if times[0, number] == times[0, number]:
            raise TraceError(f"{where}: request {number} is there twice")
        times[:, number] = start, finish
    missing = np.flatnonzero(np.isnan(times[0]))
    if len(missing):
        raise TraceError(
            f"{file}: {len(missing)} of {n_requests} requests are missing, first {missing[0]}"
        )
    return times[0], times[1]


def events_of(starts_s: Floats, finishes_s: Floats) -> Ints:
    """Start (r) and finish (−1 − r) events by time; at one instant finishes come first."""
    numbers = np.arange(len(starts_s), dtype=np.int64)
    event = np.concatenate([-1 - numbers, numbers])
    # A request without duration must start before it finishes: it finishes last of all.
    is_instant = finishes_s == starts_s
    rank = np.concatenate([np.where(is_instant, 2, 0), np.ones_like(numbers)])
    ordered: Ints = event[np.lexsort((rank, np.concatenate([finishes_s, starts_s])))]
    return ordered


def concurrent_curve(
    tree: PrefixTree,
    events: Sequence[int] | Ints,
    *,
    last_token: bool = False,
    decode: bool = False,
    compiled: bool | None = None,
) -> tuple[Curve, int]:
    """The curve of requests that start and finish in the order of ``events`` (``events_of``).

    With it the capacity from which on it holds: the most blocks held at one time. A block is
    visible to others once its request has started. ``decode``: blocks of generated tokens are held
    from the start on. Raises ValueError unless every request starts once and then finishes once.
    """
    ordered = np.asarray(events, dtype=np.int64)
    _check(ordered, len(tree.requests))
    unit = tree.requests.block_tokens
    begin, finish, blocks = in_units(tree, unit)
    n_edges = len(tree.parent)
    tail = decode_units(tree, unit, blocks) if decode else np.zeros_like(blocks)
    diff = np.zeros(sized(int((finish - begin).sum() + tail.sum()) + 3), dtype=np.int64)
    peak = run(
        overlap.concurrent_curve,
        *(read_only(ordered), read_only(tree.last_edge), read_only(tree.parent)),
        *(read_only(begin), read_only(finish)),
        *(read_only(hit_caps(tree, unit, blocks, last_token=last_token)), read_only(tail)),
        *(np.full(n_edges, -1, dtype=np.int64), np.zeros(n_edges, dtype=np.int64)),
        *(np.zeros(len(ordered) + 1, dtype=np.int64), np.zeros(n_edges + 1, dtype=np.int64)),
        *(np.zeros(2, dtype=np.int64), diff),
        compiled=runs_compiled(len(ordered) * 60, compiled),
    )
    hits = np.cumsum(np.cumsum(diff, out=diff), out=diff)
    n, tokens = len(tree.requests), int(tree.requests.input_tokens.sum())
    return Curve(hits[:-1], int(blocks.sum()), n, unit, tokens), int(peak)


def _check(events: Ints, n_requests: int) -> None:
    starts, finishes = np.flatnonzero(events >= 0), np.flatnonzero(events < 0)
    started, finished = events[starts], -1 - events[finishes]
    everyone = np.arange(n_requests)
    if not all(np.array_equal(np.sort(some), everyone) for some in (started, finished)):
        raise ValueError(f"each of {n_requests} requests must start once and finish once")
    began = starts[np.argsort(started)]
    ended = finishes[np.argsort(finished)]
    if (ended < began).any():
        raise ValueError(f"request {int((ended < began).argmax())} finishes before it starts")
