"""Where a workload's cliff is: the smallest GPU and host tier that serve its replays in full.

Found by predicting the whole workload at one size after another: exact for this workload in this
order, the host's watermark and partial blocks included. A GPU tier's size is vLLM's number of
blocks, null block included; a host tier's is in chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from sim.predict import NotPredictable, Predictor
from sim.tiers.host import HostRequest, align_up
from sim.tiers.prefix_keys import PrefixKeys
from sim.tiers.registry import model_of, open_host
from sim.tiers.spec import TierSpec
from sim.workload import Request

_STEPS = 12  # sizes tried on an axis before the edge between two of them is looked for
_REPLAYS = 40  # at the most on the GPU axis: the steps, then halving
# An access costs about 3 µs, so half a minute for millions of tokens; the demo needs 0.1 M.
_MOST_BLOCK_ACCESSES = 10_000_000
_ENDLESS_CHUNKS = 2**62  # a share of it can still be told from 0


@dataclass(frozen=True, slots=True)
class Served:
    """Prompt tokens of the measured requests by source; ``is_full``: no request fell short."""

    computed: int
    gpu_hit: int
    host_loaded: int
    is_full: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """``smallest``: the first size that is full, as full as a tier without end.

    ``endless`` is what such a tier serves. ``sizes`` are those tried, ascending, each with what it
    serves. ``is_steady``: every larger one of them is full too; a host tier under a watermark need
    not be.
    """

    smallest: int
    endless: Served
    sizes: dict[int, Served]
    is_steady: bool


def why_too_large(requests: Sequence[Request], block_size: int) -> str | None:
    """Why the edges of ``requests`` are too much to look for; None when they are not."""
    blocks = _most_blocks(requests, block_size)
    if is_affordable(blocks):
        return None
    return f"{blocks:,} blocks a session, at up to {_REPLAYS} sizes, are too many to predict here"


def is_affordable(n_touched: int) -> bool:
    """Whether an edge may be looked for where one size touches ``n_touched`` blocks or chunks."""
    return n_touched * _REPLAYS <= _MOST_BLOCK_ACCESSES


def gpu_edge(requests: Sequence[Request], tiers: TierSpec, *, least_blocks: int) -> Edge:
    """The smallest GPU tier in which every prompt hits what an endless one would, without a host.

    A host tier does not change what the GPU tier holds, so this is the edge beside one, too.
    ``least_blocks`` is what the server needs to start. Raises SpecError where a prompt does not
    fit that.
    """
    alone = replace(tiers, host=None, host_chunks=None, host_bytes=None, chunk_bytes=None)
    prompts, nothing = [len(r.prompt) for r in requests], [0] * len(requests)
    measured = _measured(requests)

    def hits(blocks: int) -> list[int]:
        predictor = Predictor(replace(alone, num_gpu_blocks=blocks))
        return [predictor.request(r.prompt, r.output_tokens).split.gpu_hit for r in requests]

    largest = max(least_blocks, 1 + _most_blocks(requests, tiers.block_size))
    best = hits(largest)

    def serve(blocks: int) -> Served:
        found = hits(blocks)
        is_full = _reaches(measured, found, best)
        return _served(measured, prompts, found, nothing, is_full=is_full)

    return edge_between(serve, least_blocks, largest)


def host_edge(requests: Sequence[Request], tiers: TierSpec, gpu_hits: Sequence[int]) -> Edge:
    """The smallest host tier that loads for every prompt what an endless one would.

    ``gpu_hits`` are the prompts' GPU hits in tokens at the GPU tier beside it. Sizes are whole
    chunks, but for that of ``tiers``: bytes beyond its last chunk keep it below its watermark.
    """
    keys = PrefixKeys(tiers.chunk_tokens)
    seen = [
        HostRequest(len(r.prompt), keys.of(r.prompt), hit, tiers.max_num_batched_tokens)
        for r, hit in zip(requests, gpu_hits, strict=True)
    ]
    return host_edge_of(seen, tiers, _measured(requests))


def host_edge_of(
    seen: Sequence[HostRequest], tiers: TierSpec, measured: Sequence[bool] | None = None
) -> Edge:
    """``host_edge`` of prompts whose chunks have names; ``measured`` None: all of them count."""
    measured = [True] * len(seen) if measured is None else measured
    prompts, hits = [r.n_prompt for r in seen], [r.gpu_hit for r in seen]
    n_chunks = len({key for request in seen for key in request.chunks})
    largest = n_chunks + 2
    model = model_of(tiers.host_kind)
    if model is not None and model.evicts_early(tiers.policy):
        # Never reaches the watermark, where there is a size that does not.
        largest = int(min(n_chunks / tiers.watermark, _ENDLESS_CHUNKS)) + 2
    best = _loads(seen, tiers, largest)

    def serve(chunks: int) -> Served:
        found = _loads(seen, tiers, chunks)
        is_full = _reaches(measured, found, best)
        return _served(measured, prompts, hits, found, is_full=is_full)

    return edge_between(serve, 0, largest)


def least_from(works: Callable[[int], bool], *, guess: int, lowest: int) -> int:
    """The smallest size from ``lowest`` on that works, near ``guess``; one less does not.

    A larger size must work where a smaller one does. Two calls when ``guess`` is right; otherwise
    steps from it, each twice as long as the last, then halving.
    """
    short, enough, step = lowest - 1, guess, 1
    if works(guess):
        while enough - step > short:
            if not works(enough - step):
                short = enough - step
                break
            enough, step = enough - step, 2 * step
    else:
        short, enough = guess, guess + step
        while not works(enough):
            short, enough, step = enough, enough + 2 * step, 2 * step
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if works(middle) else (middle, enough)
    return enough


def edge_between(serve: Callable[[int], Served], least: int, largest: int) -> Edge:
    """Evenly spaced sizes of [least, largest], whose last is full, then halving down to the edge.

    One less than the edge is not full. A smaller full size may hide between two steps only where
    sizes above a full one are not all full.
    """
    steps = {least + (largest - least) * i // _STEPS for i in range(_STEPS + 1)}
    tried = {size: serve(size) for size in sorted(steps)}
    smallest = next(size for size, served in tried.items() if served.is_full)
    short = max((size for size in tried if size < smallest), default=smallest - 1)
    while smallest - short > 1:
        middle = (short + smallest) // 2
        tried[middle] = serve(middle)
        short, smallest = (short, middle) if tried[middle].is_full else (middle, smallest)
    sizes = dict(sorted(tried.items()))
    is_steady = all(served.is_full for size, served in sizes.items() if size >= smallest)
    return Edge(smallest, sizes[largest], sizes, is_steady)


def _loads(seen: Sequence[HostRequest], tiers: TierSpec, chunks: int) -> list[int]:
    """Tokens each request loads from a host tier of ``chunks``; none where timing would decide."""
    unit, host_bytes = tiers.chunk_bytes, tiers.host_bytes
    if unit is not None and chunks != tiers.host_chunks:
        host_bytes = chunks * align_up(unit)  # the tier described keeps its odd bytes
    host = open_host(replace(tiers, host_chunks=chunks, host_bytes=host_bytes))
    assert host is not None, "only a server with a host tier has this edge"
    loads = []
    for request in seen:
        try:
            host.check(request)
        except NotPredictable:
            return [0] * len(seen)
        loads.append(host.serve(request).loaded_tokens)
    return loads


def _measured(requests: Sequence[Request]) -> list[bool]:
    return [request.phase == "measure" for request in requests]


def _served(
    measured: Sequence[bool],
    prompts: Sequence[int],
    hits: Sequence[int],
    loads: Sequence[int],
    *,
    is_full: bool,
) -> Served:
    prompt, hit, loaded = (sum(compress(each, measured)) for each in (prompts, hits, loads))
    return Served(prompt - hit - loaded, hit, loaded, is_full)


def _reaches(measured: Sequence[bool], found: Sequence[int], best: Sequence[int]) -> bool:
    both = zip(found, best, strict=True)
    return all(got >= most for got, most in compress(both, measured))


def _most_blocks(requests: Sequence[Request], block_size: int) -> int:
    """Blocks of a GPU tier that reuses none: every request's own."""
    return sum(-(-(len(r.prompt) + r.output_tokens) // block_size) for r in requests)
