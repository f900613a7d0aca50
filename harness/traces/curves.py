"""What `kvcliff curve` and `kvcliff surface` do, without the command line.

Each takes plain values and returns a dict ready for JSON, or writes files whole. Wrong input is an
InputError that says what is wrong and what is accepted. Needs numpy; numba makes it fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.traces.load import SCHEMA, Loaded, head, input_errors, share_of
from sim.curves import bands
from sim.curves.capacity import spaced
from sim.curves.concurrent import concurrent_curve, events_of, read_lifetimes
from sim.curves.policies import POLICY_NAMES, count_hits
from sim.curves.sources import csv_numbers
from sim.curves.stack import Curve, curve
from sim.curves.surface import Surface, surface
from sim.curves.trace import MOST_TRACE_TOKENS

SAMPLES = 400
"""Capacities a plot of a whole curve is drawn from."""

GRID = 60
"""Capacities a tier of a surface gets when none are given."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How requests are served and counted (see ``sim.curves.stack.curve``)."""

    last_token: bool = False
    decode: bool = False
    warm_up: float = 0.0
    forward: bool = False


@dataclass(frozen=True, slots=True)
class CurveRun:
    """A curve, what it was made from, and its JSON."""

    loaded: Loaded
    curve: Curve
    json: dict[str, Any]

    def samples(self) -> list[int]:
        """Capacities to draw the whole curve from: evenly spaced by ratio, in blocks."""
        n_blocks = self.loaded.tree.n_blocks
        return spaced(max(n_blocks // 5000, 1), max(n_blocks, 1), SAMPLES)


def read_measured(file: Path) -> list[tuple[int, float]]:
    """Measured points to lay over a curve: (GPU blocks, hit share) of a CSV of these names."""
    points = []
    with input_errors():
        for where, (blocks, share) in csv_numbers(file, {"gpu_blocks": int, "hit_share": float}):
            if not (1 <= blocks < 2**40 and 0 <= share <= 1):
                raise ValueError(
                    f"{where}: a share of {share} at {blocks} blocks; shares are 0 to 1, blocks "
                    "1 or more, below 2**40"
                )
            points.append((int(blocks), share))
    return points


@dataclass(frozen=True, slots=True)
class SurfaceRun:
    """A surface, what it was made from, and its JSON."""

    loaded: Loaded
    how: Replay
    surface: Surface
    json: dict[str, Any]

    def alone(self) -> tuple[Curve, Curve]:
        """The curve of the GPU tier with no host tier behind it, and of the host tier alone."""
        gpu, host = (
            _serial(self.loaded, self.how, "auto", unit_tokens=unit)
            for unit in (self.surface.gpu_tokens, self.surface.chunk_tokens)
        )
        return gpu, host


def run_curve(
    loaded: Loaded,
    how: Replay,
    *,
    at: str | None = None,
    targets: Sequence[float] = (),
    policies: Sequence[str] = (),
    with_bands: bool = False,
    concurrency: Path | None = None,
    engine: str = "auto",
) -> CurveRun:
    """Hits at the capacities ``at`` (see ``capacity.FORMS``; default: a few over the whole range).

    ``targets``: shares of the ideal whose capacity is looked for. ``policies``: replayed at each
    capacity. ``concurrency``: CSV of ``request,start_s,finish_s`` instead of the serial order.
    """
    with input_errors():
        for policy in policies:
            if policy not in POLICY_NAMES:
                raise ValueError(
                    f"policy {policy!r} is not known; known: {', '.join(POLICY_NAMES)}"
                )
        exact_from = None
        if concurrency is None:
            found = _serial(loaded, how, engine)
        else:
            found, exact_from = _overlapping(loaded, how, concurrency, engine)
        capacities = _capacities(loaded, at)
        wanted = [_target(loaded, found, share) for share in targets]
    points = [_point(loaded, found, blocks) for blocks in capacities]
    if with_bands:
        _add_bands(loaded, found, how, points, engine)
    _add_policies(loaded, points, policies)
    content = {
        **_curve_json(loaded, found),
        "exact_from_blocks": exact_from,
        "points": points,
        "targets": wanted,
        "assumptions": [*loaded.said, *_curve_assumptions(loaded, how, exact_from)],
        "warnings": [*loaded.notes, *_too_small(loaded, capacities)],
    }
    return CurveRun(loaded, found, content)


def _curve_json(loaded: Loaded, found: Curve) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        **head(loaded.tree),
        "requests": found.requests,
        "accesses": found.accesses,
        "ideal_hit_blocks": found.ideal,
        "ideal_hit_share": share_of(found.ideal, found.accesses),
    }


def _serial(loaded: Loaded, how: Replay, engine: str, unit_tokens: int | None = None) -> Curve:
    return curve(
        loaded.tree,
        order=loaded.order,
        unit_tokens=unit_tokens,
        forward=how.forward,
        last_token=how.last_token,
        decode=how.decode,
        warm_up=how.warm_up,
        engine=engine,
    )


def _overlapping(loaded: Loaded, how: Replay, file: Path, engine: str) -> tuple[Curve, int]:
    if how.forward or how.warm_up:
        raise ValueError("a given concurrency cannot be combined with forward order or warm-up")
    found = concurrent_curve(
        loaded.tree,
        events_of(*read_lifetimes(file, len(loaded.tree.requests))),
        last_token=how.last_token,
        decode=how.decode,
        engine=engine,
    )
    return found.curve, found.exact_from


def _capacities(loaded: Loaded, at: str | None) -> list[int]:
    if at is not None:
        return loaded.ruler.all(at)
    return spaced(1, max(loaded.tree.n_blocks, 1), 30)


def _point(loaded: Loaded, found: Curve, blocks: int) -> dict[str, Any]:
    hits = found.at(blocks)
    share = share_of(hits, found.accesses)
    return {
        "gpu_blocks": blocks,
        "hit_blocks": hits,
        "gpu_tokens": blocks * loaded.ruler.block_tokens,
        "gpu_gib": loaded.ruler.gib(blocks),
        "hit_share": share,
        "share_of_ideal": share_of(hits, found.ideal),
        "prefill_speedup_upper_bound": None if share in (None, 1.0) else 1 / (1 - share),
    }


def _target(loaded: Loaded, found: Curve, share: float) -> dict[str, Any]:
    blocks = found.capacity_for(share)
    return {"target": share, **_point(loaded, found, blocks)}


def _add_bands(
    loaded: Loaded, found: Curve, how: Replay, points: list[dict[str, Any]], engine: str
) -> None:
    other = _serial(loaded, replace(how, forward=not how.forward), engine)
    forward, reverse = (found, other) if how.forward else (other, found)
    for point in points:
        capacity = point["gpu_blocks"]
        for name, band in (
            ("partial_tail", bands.partial_tail(reverse, capacity)),
            ("lmcache_mp_watermark", bands.watermark(reverse, capacity)),
            ("lmcache_in_process", bands.in_process(forward, reverse, capacity)),
        ):
            point[f"{name}_hit_blocks"] = [band.low, band.high]


def _add_policies(loaded: Loaded, points: list[dict[str, Any]], policies: Sequence[str]) -> None:
    if not policies:
        return
    paths = [loaded.tree.ids_of(r).tolist() for r in loaded.order.tolist()]
    for point in points:
        capacity = point["gpu_blocks"]
        point["policies"] = {policy: count_hits(paths, capacity, policy) for policy in policies}


def _curve_assumptions(loaded: Loaded, how: Replay, exact_from: int | None) -> list[str]:
    order = "first block first, as LMCache's own cache simulator" if how.forward else (
        "last block first, as vLLM 0.32 frees them"
    )  # fmt: skip
    said = [
        f"LRU, a request's blocks touched {order}; usable capacity is num_gpu_blocks − 1",
        *_shared_assumptions(loaded, how),
    ]
    if how.decode:
        said.append("full blocks of generated tokens take room and are never asked for again")
    if exact_from is not None:
        said.append(f"overlapping requests as given; exact from {exact_from} blocks on, the most "
                    "held at one time")  # fmt: skip
    return said


def _shared_assumptions(loaded: Loaded, how: Replay) -> list[str]:
    last = (
        "the last prompt token is always computed: a prompt found whole loses its last block (the "
        "second copy of that block which vLLM then keeps takes no room here)"
        if how.last_token
        else "no last-token rule: a prompt found whole is a hit to its last block"
    )
    said = [
        "every id of a request is one whole block; tokens behind the last id are always computed",
        last,
        "prefill_speedup_upper_bound = 1 / (1 − hit share): a bound, decode and queueing gain less",
    ]
    if how.warm_up:
        said.append(f"the first {how.warm_up:.0%} of the requests warm the cache and do not count")
    if loaded.ruler.bytes_per_token is not None:
        said.append(f"{loaded.ruler.bytes_per_token:,g} bytes of KV a token")
    return said


def _too_small(loaded: Loaded, capacities: Sequence[int]) -> list[str]:
    small = [c for c in capacities if c < loaded.longest_blocks]
    if not small:
        return []
    return [
        f"{len(small)} of the GPU capacities are below the longest request's "
        f"{loaded.longest_blocks} blocks: vLLM could not run it there"
    ]


def run_surface(
    loaded: Loaded,
    how: Replay,
    *,
    gpu: str | None = None,
    host: str | None = None,
    chunk_tokens: int | None = None,
    engine: str = "auto",
) -> SurfaceRun:
    """Token sources at every pair of the capacities ``gpu`` and ``host`` (see ``capacity.FORMS``).

    ``chunk_tokens``: size of the host tier's chunks (default: the trace's block; LMCache's own
    default is 256). Host capacities are given in the trace's blocks too and hold the whole chunks
    that fit.
    """
    if how.decode or how.forward:
        raise InputError("a surface knows neither decode blocks nor the forward order")
    chunk = loaded.ruler.block_tokens if chunk_tokens is None else chunk_tokens
    with input_errors():
        if not 1 <= chunk < MOST_TRACE_TOKENS:
            raise ValueError(f"chunks of {chunk} tokens; they hold at least 1, below 2**61")
        gpu_blocks = _tier_capacities(loaded, gpu)
        host_blocks = _tier_capacities(loaded, host)
        chunks = [blocks * loaded.ruler.block_tokens // chunk for blocks in host_blocks]
        found = surface(
            loaded.tree,
            gpu_blocks,
            chunks,
            order=loaded.order,
            chunk_tokens=chunk,
            last_token=how.last_token,
            warm_up=how.warm_up,
            engine=engine,
        )
    points = [
        _pair(loaded, found, g, h, c)
        for g in gpu_blocks
        for h, c in zip(host_blocks, chunks, strict=True)
    ]
    return SurfaceRun(loaded, how, found, _surface_json(loaded, how, found, points, gpu_blocks))


def _surface_json(
    loaded: Loaded,
    how: Replay,
    found: Surface,
    points: list[dict[str, Any]],
    gpu_blocks: Sequence[int],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        **head(loaded.tree),
        "requests": found.requests,
        "accesses": found.accesses,
        "chunk_tokens": found.chunk_tokens,
        "prompt_tokens": found.prompt_tokens,
        "counted_tokens": found.counted_tokens,
        "points": points,
        "assumptions": [*loaded.said, *_surface_assumptions(loaded, how, found)],
        "warnings": [*loaded.notes, *_too_small(loaded, gpu_blocks), *_useless_host(points)],
    }


def _tier_capacities(loaded: Loaded, text: str | None) -> list[int]:
    if text is not None:
        return loaded.ruler.all(text)
    return spaced(max(loaded.tree.n_blocks // 2000, 1), max(loaded.tree.n_blocks, 1), GRID)


def _pair(
    loaded: Loaded, found: Surface, gpu_blocks: int, host_blocks: int, chunks: int
) -> dict[str, Any]:
    i = int(np.searchsorted(found.gpu_blocks, gpu_blocks))
    j = int(np.searchsorted(found.host_chunks, chunks))
    hit, loaded_tokens = int(found.gpu_hit_tokens[i, j]), int(found.host_loaded_tokens[i, j])
    block = loaded.ruler.block_tokens
    computed = found.counted_tokens - hit - loaded_tokens
    return {
        "gpu_blocks": gpu_blocks,
        "host_blocks": host_blocks,
        "host_chunks": chunks,
        "hit_blocks": hit // block,
        "host_loaded_blocks": _whole_if_possible(loaded_tokens, block),
        "gpu_hit_tokens": hit,
        "host_loaded_tokens": loaded_tokens,
        "computed_tokens": computed,
        "gpu_gib": loaded.ruler.gib(gpu_blocks),
        "host_gib": loaded.ruler.gib(host_blocks),
        "computed_share": share_of(computed, found.counted_tokens),
    }


def _whole_if_possible(tokens: int, block: int) -> int | float:
    return tokens // block if tokens % block == 0 else tokens / block


def _surface_assumptions(loaded: Loaded, how: Replay, found: Surface) -> list[str]:
    chunk = found.chunk_tokens
    return [
        "GPU tier: LRU, last block first (vLLM 0.32); usable capacity is num_gpu_blocks − 1",
        f"host tier: LRU of {chunk}-token chunks, asked about every prompt and written through "
        "whatever the GPU holds (LMCache 0.5.6): no victim cache",
        "the host tier's watermark is not applied: LMCache's MP server of C chunks lies between "
        "0.64 C and 0.8 C here",
        "the sources sum to counted_tokens, where a listed block counts whole; prompt_tokens is "
        "what the prompts say they have",
        *_shared_assumptions(loaded, how),
    ]


def _useless_host(points: Sequence[dict[str, Any]]) -> list[str]:
    """Write-through: a host tier no larger than the GPU's holds what the GPU holds anyway."""
    small = [p for p in points if 0 < p["host_blocks"] <= p["gpu_blocks"]]
    if not small:
        return []
    total = sum(small[0][f"{source}_tokens"] for source in ("gpu_hit", "host_loaded", "computed"))
    most = max(point["host_loaded_tokens"] for point in small)
    return [
        f"{len(small)} pairs have a host tier no larger than the GPU tier; under write-through it "
        f"loads at most {share_of(most, total) or 0:.2%} of the tokens there"
    ]
