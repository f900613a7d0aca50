"""Where every prompt token comes from, for every pair of GPU and host capacity, exactly.

Holds for LMCache 0.5.6: the host tier is looked up for every request and written through whatever
the GPU holds, so each tier keeps what its own size allows and one walk serves both. Not for lazy
offload, L2 prefetch, quotas or TTL; the MP server's watermark is a band around a capacity
(``bands.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.curves.jit import read_only, run, runs_compiled
from sim.curves.kernels.surface import stack_surface
from sim.curves.stack import first_counted, hit_caps, in_units, order_of
from sim.curves.trace import Ints
from sim.curves.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Surface:
    """Token counts of shape (GPU capacities, host capacities), out of ``prompt_tokens``.

    Capacities in GPU blocks of ``gpu_tokens`` and host chunks of ``chunk_tokens``, ascending.
    Computed tokens are the rest, partial blocks and chunks included. ``prompt_tokens``, and
    ``accesses``, the blocks of the trace looked up, are of the ``requests`` counted.
    """

    gpu_blocks: Ints
    host_chunks: Ints
    gpu_tokens: int
    chunk_tokens: int
    gpu_hit_tokens: Ints
    host_loaded_tokens: Ints
    prompt_tokens: int
    accesses: int
    requests: int


def surface(
    tree: PrefixTree,
    gpu_blocks: Sequence[int],
    host_chunks: Sequence[int],
    *,
    order: Ints | None = None,
    gpu_tokens: int | None = None,
    chunk_tokens: int | None = None,
    last_token: bool = False,
    warm_up: float = 0.0,
    compiled: bool | None = None,
) -> Surface:
    """The exact split at every pair of the capacities given, of a serial replay.

    ``gpu_tokens`` and ``chunk_tokens`` (default: the trace's block) need not divide each other.
    Capacities are sorted and made unique. Raises ValueError for values out of range.
    """
    order = order_of(tree, order)
    gpu = gpu_tokens or tree.requests.block_tokens
    chunk = chunk_tokens or tree.requests.block_tokens
    gpu_edges, host_edges = capacities_of(gpu_blocks, "GPU"), capacities_of(host_chunks, "host")
    first = first_counted(len(order), warm_up)
    table = np.zeros((len(gpu_edges) + 1) * (len(host_edges) + 1), dtype=np.int64)
    blocks = tree.blocks_of_requests()
    length = np.minimum(blocks * tree.requests.block_tokens, tree.requests.input_tokens)
    fenwicks = [np.zeros(len(order) + 1, dtype=np.int64) for _ in range(2)]
    buffers = [np.zeros(len(tree.parent) + 1, dtype=np.int64) for _ in range(7)]
    run(
        stack_surface,
        *(read_only(order), read_only(tree.last_edge), read_only(tree.parent)),
        *(read_only(tree.head), read_only(length), first),
        *_tier(tree, gpu, gpu_edges, last_token=last_token, whole=True),
        *_tier(tree, chunk, host_edges, last_token=last_token, whole=False),
        *(np.full(len(tree.parent), -1, dtype=np.int64), *fenwicks, *buffers, table),
        compiled=runs_compiled(20 * len(order) + len(tree.parent), compiled),
    )
    counted = order[first:]
    prompt, accesses = (int(x[counted].sum()) for x in (tree.requests.input_tokens, blocks))
    on_gpu, loaded = _split(table.reshape(len(gpu_edges) + 1, len(host_edges) + 1))
    return Surface(gpu_edges, host_edges, gpu, chunk, on_gpu, loaded, prompt_tokens=prompt,
                   accesses=accesses, requests=len(counted))  # fmt: skip


def capacities_of(values: Sequence[int], tier: str) -> Ints:
    """``values`` sorted, each once. Raises ValueError for none, or one below 0."""
    edges = np.unique(np.asarray(values, dtype=np.int64))
    if not len(edges) or edges[0] < 0:
        raise ValueError(f"{tier} capacities {list(values)[:5]}; give at least one, none below 0")
    return edges


def _tier(
    tree: PrefixTree, unit: int, edges: Ints, *, last_token: bool, whole: bool
) -> tuple[Ints, Ints, int, Ints, Ints]:
    """One tier's arguments: unit depths of the edges, unit size, tokens it may serve, capacities.

    At a full hit the GPU tier loses a whole block, the host tier one token
    (``LMCacheMPConnector.get_num_new_matched_tokens`` of LMCache 0.5.6).
    """
    begin, finish, blocks = in_units(tree, unit)
    cap = hit_caps(tree, unit, blocks, last_token=last_token and whole) * unit
    if last_token and not whole:
        cap = np.minimum(cap, np.maximum(tree.requests.input_tokens - 1, 0))
    return (read_only(begin), read_only(finish), unit, read_only(cap), read_only(edges))


def _split(table: Ints) -> tuple[Ints, Ints]:
    """(GPU hits, host loads) at each pair: a token is on the GPU iff its distance fits there."""
    up_to = np.cumsum(np.cumsum(table, axis=0), axis=1)
    on_gpu = np.repeat(up_to[:-1, -1:], table.shape[1] - 1, axis=1)
    loaded = up_to[-1:, :-1] - up_to[:-1, :-1]
    return on_gpu, loaded
