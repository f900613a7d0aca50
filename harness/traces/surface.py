"""``kvcliff surface``: token sources at every pair of a GPU and a host capacity."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.traces.load import Loaded, head, input_errors, share_of
from harness.traces.serving import Serving, gpu_too_small, serial_curve, shared_assumptions
from harness.words_and_colours import SOURCES
from sim.curves.capacity import spaced
from sim.curves.stack import Curve
from sim.curves.tiers import Replay, Surface, most_served, tier_surface
from sim.curves.trace import MOST_TRACE_TOKENS
from sim.tiers.settings import DEFAULT_KIND, HostSettings, TierKind

KINDS: tuple[TierKind, ...] = ("lmcache-mp", "lmcache", "native")
"""Kinds of host tier that can be replayed."""

DEFAULT = HostSettings()

GRID = 60
"""Capacities a tier of a surface gets when none are given."""


@dataclass(frozen=True, slots=True)
class SurfaceRun:
    """A surface, what it was made from, and its JSON."""

    loaded: Loaded
    how: Serving
    surface: Surface
    json: dict[str, Any]

    def gpu_alone(self) -> Curve:
        """The curve of the GPU tier with no host tier behind it."""
        with input_errors():
            return serial_curve(self.loaded, self.how, self.surface.gpu_tokens)


def run_surface(
    loaded: Loaded,
    how: Serving,
    *,
    gpu: str | None = None,
    host: str | None = None,
    chunk_tokens: int | None = None,
    host_kind: str = DEFAULT_KIND,
    watermark: float = DEFAULT.watermark,
    evict_ratio: float = DEFAULT.evict_ratio,
    targets: Sequence[float] = (),
) -> SurfaceRun:
    """Token sources at every pair of the capacities ``gpu`` and ``host`` (see ``capacity.FORMS``).

    ``chunk_tokens``: size of the host tier's chunks (default: the trace's block; LMCache's own
    default is 256). Host capacities are given in the trace's blocks too and hold the whole chunks
    that fit. ``host_kind``: one of ``KINDS``; the watermark and ratio are of ``lmcache-mp`` alone.
    ``targets``: shares of what endless tiers serve, for which each GPU capacity's host is named.
    """
    kind = _kind(host_kind, watermark, evict_ratio)
    if how.decode or how.forward:
        raise InputError("a surface knows neither decode blocks nor the forward order")
    if wrong := [share for share in targets if not 0 < share <= 1]:
        raise InputError(f"a target of {wrong[0]}; it must be a share in (0, 1]")
    chunk = loaded.ruler.block_tokens if chunk_tokens is None else chunk_tokens
    if not 1 <= chunk < MOST_TRACE_TOKENS:
        raise InputError(f"chunks of {chunk} tokens; they hold at least 1, below 2**61")
    with input_errors():
        gpu_blocks = _tier_capacities(loaded, gpu)
        host_blocks = _tier_capacities(loaded, host)
        chunks = [blocks * loaded.ruler.block_tokens // chunk for blocks in host_blocks]
        replay = Replay.of(
            loaded.tree, order=loaded.order, last_token=how.last_token, warm_up=how.warm_up
        )
        settings = HostSettings(chunk_tokens=chunk, watermark=watermark, evict_ratio=evict_ratio)
        found = tier_surface(replay, gpu_blocks, chunks, kind=kind, settings=settings)
        most = most_served(replay, chunk)
    points = [
        _pair(loaded, found, g, h, c)
        for g in gpu_blocks
        for h, c in zip(host_blocks, chunks, strict=True)
    ]
    content = {
        **head(loaded.tree),
        "requests": found.requests,
        "accesses": found.accesses,
        "chunk_tokens": found.chunk_tokens,
        "prompt_tokens": found.prompt_tokens,
        "host_kind": kind,
        "ideal_served_tokens": most,
        "points": points,
        "targets": [row for share in targets for row in _reaching(points, most, share)],
        "assumptions": [
            *loaded.assumptions,
            *_surface_assumptions(kind, settings),
            *shared_assumptions(loaded, how),
        ],
        "warnings": [*loaded.warnings, *gpu_too_small(loaded, gpu_blocks), *_useless_host(points)],
    }
    return SurfaceRun(loaded, how, found, content)


def _kind(name: str, watermark: float, evict_ratio: float) -> TierKind:
    kind = next((kind for kind in KINDS if kind == name), None)
    if kind is None:
        raise InputError(f"host kind {name!r} is not replayed; known: {', '.join(KINDS)}")
    if kind != "lmcache-mp" and (watermark, evict_ratio) != (
        DEFAULT.watermark,
        DEFAULT.evict_ratio,
    ):
        raise InputError(f"a watermark and its ratio are of lmcache-mp alone, not of {kind}")
    return kind


def _reaching(
    points: Sequence[dict[str, Any]], most: int, share: float
) -> Iterator[dict[str, Any]]:
    """For each GPU capacity the smallest host capacity asked for that serves ``share`` of ``most``."""
    for gpu_blocks in dict.fromkeys(point["gpu_blocks"] for point in points):
        there = [
            point["host_blocks"]
            for point in points
            if point["gpu_blocks"] == gpu_blocks
            and point["gpu_hit_tokens"] + point["host_loaded_tokens"] >= share * most
        ]
        yield {
            "target": share,
            "gpu_blocks": gpu_blocks,
            "host_blocks": min(there, default=None),
        }


def _tier_capacities(loaded: Loaded, text: str | None) -> list[int]:
    n_blocks = max(loaded.tree.n_blocks, 1)
    return (
        spaced(max(n_blocks // 2000, 1), n_blocks, GRID) if text is None else loaded.ruler.all(text)
    )


def _pair(
    loaded: Loaded, found: Surface, gpu_blocks: int, host_blocks: int, chunks: int
) -> dict[str, Any]:
    i = int(np.searchsorted(found.gpu_blocks, gpu_blocks))
    j = int(np.searchsorted(found.host_chunks, chunks))
    hit, loaded_tokens = int(found.gpu_hit_tokens[i, j]), int(found.host_loaded_tokens[i, j])
    block = loaded.ruler.block_tokens
    loaded_blocks, rest = divmod(loaded_tokens, block)
    computed = found.prompt_tokens - hit - loaded_tokens
    return {
        "gpu_blocks": gpu_blocks,
        "host_blocks": host_blocks,
        "host_chunks": chunks,
        "hit_blocks": hit // block,
        "host_loaded_blocks": loaded_tokens / block if rest else loaded_blocks,
        "gpu_hit_tokens": hit,
        "host_loaded_tokens": loaded_tokens,
        "computed_tokens": computed,
        "gpu_gib": loaded.ruler.gib(gpu_blocks * block),
        "host_gib": loaded.ruler.gib(host_blocks * block),
        "computed_share": share_of(computed, found.prompt_tokens),
    }


def _surface_assumptions(kind: TierKind, settings: HostSettings) -> list[str]:
    chunk = settings.chunk_tokens
    said = [
        "GPU tier: vLLM 0.32's pool, replayed; usable capacity is num_gpu_blocks − 1, and of a "
        "request that does not fit the first blocks stay",
        f"host tier: {kind} in chunks of {chunk} tokens, replayed as kvcliff predict does: one "
        "request after the other, settled in between, each prompt computed in one step",
    ]
    if kind == "lmcache-mp":
        said.append(
            f"from {settings.watermark:.0%} of its size on it drops {settings.evict_ratio:.0%} of "
            "its chunks, and a prompt that does not fit beside the rest is not stored"
        )
    return said


def _useless_host(points: Sequence[dict[str, Any]]) -> list[str]:
    """Write-through: a host tier no larger than the GPU's holds what the GPU holds anyway."""
    small = [p for p in points if 0 < p["host_blocks"] <= p["gpu_blocks"]]
    if not small:
        return []
    total = sum(small[0][f"{source.field}_tokens"] for source in SOURCES)
    most = max(point["host_loaded_tokens"] for point in small)
    return [
        f"{len(small)} pairs have a host tier no larger than the GPU tier; under write-through it "
        f"loads at most {share_of(most, total) or 0:.2%} of the tokens there"
    ]
