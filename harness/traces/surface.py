"""``kvcliff surface``: token sources at every pair of a GPU and a host capacity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.traces.load import Loaded, head, input_errors, share_of
from harness.traces.serving import Serving, gpu_too_small, serial_curve, shared_assumptions
from harness.words_and_colours import SOURCES
from sim.curves.capacity import spaced
from sim.curves.stack import Curve
from sim.curves.surface import Surface, surface
from sim.curves.trace import MOST_TRACE_TOKENS

GRID = 60
"""Capacities a tier of a surface gets when none are given."""


@dataclass(frozen=True, slots=True)
class SurfaceRun:
    """A surface, what it was made from, and its JSON."""

    loaded: Loaded
    how: Serving
    surface: Surface
    json: dict[str, Any]

    def alone(self) -> tuple[Curve, Curve]:
        """The curve of the GPU tier with no host tier behind it, and of the host tier alone."""
        with input_errors():
            return (
                serial_curve(self.loaded, self.how, self.surface.gpu_tokens),
                serial_curve(self.loaded, self.how, self.surface.chunk_tokens),
            )


def run_surface(
    loaded: Loaded,
    how: Serving,
    *,
    gpu: str | None = None,
    host: str | None = None,
    chunk_tokens: int | None = None,
) -> SurfaceRun:
    """Token sources at every pair of the capacities ``gpu`` and ``host`` (see ``capacity.FORMS``).

    ``chunk_tokens``: size of the host tier's chunks (default: the trace's block; LMCache's own
    default is 256). Host capacities are given in the trace's blocks too and hold the whole chunks
    that fit.
    """
    if how.decode or how.forward:
        raise InputError("a surface knows neither decode blocks nor the forward order")
    chunk = loaded.ruler.block_tokens if chunk_tokens is None else chunk_tokens
    if not 1 <= chunk < MOST_TRACE_TOKENS:
        raise InputError(f"chunks of {chunk} tokens; they hold at least 1, below 2**61")
    with input_errors():
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
        )
    points = [
        _pair(loaded, found, g, h, c)
        for g in gpu_blocks
        for h, c in zip(host_blocks, chunks, strict=True)
    ]
    return SurfaceRun(loaded, how, found, _surface_json(loaded, how, found, points, gpu_blocks))


def _surface_json(
    loaded: Loaded,
    how: Serving,
    found: Surface,
    points: list[dict[str, Any]],
    gpu_blocks: Sequence[int],
) -> dict[str, Any]:
    return {
        **head(loaded.tree),
        "requests": found.requests,
        "accesses": found.accesses,
        "chunk_tokens": found.chunk_tokens,
        "prompt_tokens": found.prompt_tokens,
        "points": points,
        "assumptions": [*loaded.assumptions, *_surface_assumptions(loaded, how, found)],
        "warnings": [*loaded.warnings, *gpu_too_small(loaded, gpu_blocks), *_useless_host(points)],
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


def _surface_assumptions(loaded: Loaded, how: Serving, found: Surface) -> list[str]:
    chunk = found.chunk_tokens
    return [
        "GPU tier: LRU, last block first (vLLM 0.32); usable capacity is num_gpu_blocks − 1",
        f"host tier: LRU of {chunk}-token chunks, asked about every prompt and written through "
        "whatever the GPU holds (LMCache 0.5.6): no victim cache",
        "the host tier's watermark is not applied: LMCache's MP server of C chunks lies between "
        "0.64 C and 0.8 C here",
        *shared_assumptions(loaded, how),
    ]


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
