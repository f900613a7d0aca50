"""Hits at every capacity at once, exactly, from a prefix tree.

Exact for vLLM 0.32's GPU pool served serially with prompts of whole blocks (usable capacity =
``num_gpu_blocks`` − 1, the null block), and for LMCache 0.5.6's MP order without its watermark.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sim.curves.jit import read_only, run, runs_compiled
from sim.curves.kernels.stack import stack_curve
from sim.curves.trace import MOST_TRACE_TOKENS, Ints, sized
from sim.curves.tree import PrefixTree
from sim.errors import SpecError


@dataclass(frozen=True, slots=True)
class Curve:
    """``hits[C]`` for every capacity C from 0 to the last one that changes anything.

    Hits and capacities in units of ``unit_tokens`` tokens; ``accesses`` is what was looked up, in
    the same units, by the ``requests`` counted (those after the warm-up), whose prompts have
    ``prompt_tokens`` in all.
    """

    hits: Ints
    accesses: int
    requests: int
    unit_tokens: int
    prompt_tokens: int

    def at(self, capacity: int) -> int:
        """Hits at ``capacity`` units; beyond the last entry nothing changes."""
        if capacity < 0:
            raise ValueError(f"a capacity of {capacity}; 0 is the smallest")
        return int(self.hits[min(capacity, len(self.hits) - 1)])

    @property
    def ideal(self) -> int:
        """Hits of a cache that never evicts."""
        return int(self.hits[-1])

    def share(self, hits: int) -> float | None:
        """The share of the prompt tokens that ``hits`` are; None where there are no tokens."""
        return hits * self.unit_tokens / self.prompt_tokens if self.prompt_tokens else None

    def capacity_for(self, share: float) -> int:
        """Smallest capacity with at least ``share`` of the ideal hits; 0 where there are none."""
        if not 0 < share <= 1:
            raise SpecError(f"a target of {share}; it must be a share in (0, 1]")
        needed = math.ceil(as_written(share) * self.ideal)
        return int(np.searchsorted(self.hits, needed))


def curve(
    tree: PrefixTree,
    *,
    order: Ints | None = None,
    unit_tokens: int | None = None,
    forward: bool = False,
    last_token: bool = False,
    decode: bool = False,
    warm_up: float = 0.0,
    compiled: bool | None = None,
) -> Curve:
    """The exact curve of ``tree``'s requests, served one after the other.

    ``order``: requests as served, each at most once (default: all, by arrival). ``unit_tokens``: the cache's block or chunk
    (default: the trace's). ``forward``: LMCache's simulator's order. ``last_token``: vLLM's rule.
    ``decode``: generated tokens take blocks too. ``warm_up``: the first share of the requests only
    warms the cache. Raises SpecError for values out of range.
    """
    order = order_of(tree, order)
    unit = unit_tokens or tree.requests.block_tokens
    begin, finish, blocks = in_units(tree, unit)
    n, first = len(order), first_counted(len(order), warm_up)
    tail = decode_units(tree, unit, blocks) if decode else np.zeros_like(blocks)
    # No distance exceeds all units there are; memory behind the farthest hit is never touched.
    diff = np.zeros(sized(int((finish - begin).sum() + tail.sum()) + 2), dtype=np.int64)
    n_runs = len(tree.parent) + 1
    farthest = run(
        stack_curve,
        *(read_only(order), read_only(tree.last_edge), read_only(tree.parent)),
        *(read_only(tree.head), read_only(begin), read_only(finish)),
        *(read_only(hit_caps(tree, unit, blocks, last_token=last_token)), read_only(tail)),
        *(first, int(forward), np.full(len(tree.parent), -1, dtype=np.int64)),
        *(np.zeros(n + 1, dtype=np.int64), *(np.zeros(n_runs, dtype=np.int64) for _ in range(3))),
        diff,
        compiled=runs_compiled(12 * n + n_runs, compiled),
    )
    # Once cumulated it counts the hits at each stack distance, twice those up to it.
    hits = diff[: farthest + 1]
    np.cumsum(np.cumsum(hits, out=hits), out=hits)
    counted = order[first:]
    accesses, tokens = (int(x[counted].sum()) for x in (blocks, tree.requests.input_tokens))
    return Curve(hits, accesses, n - first, unit, tokens)


def order_of(tree: PrefixTree, order: Ints | None) -> Ints:
    """``order``, or all requests by arrival. Raises ValueError for what no kernel may index by."""
    if order is None:
        return tree.requests.order()
    n = len(tree.requests)
    if order.ndim != 1 or not np.issubdtype(order.dtype, np.integer):
        raise ValueError(f"an order of {order.dtype}, {order.ndim} dimensions; numbers are needed")
    if len(order) and not 0 <= order.min() <= order.max() < n:
        raise ValueError(
            f"an order of requests {order.min()} to {order.max()}; the trace has 0 to {n - 1}"
        )
    if len(order) and (most := np.bincount(order)).max() > 1:
        raise ValueError(f"request {most.argmax()} comes {most.max()} times in the order")
    return order.astype(np.int64, copy=False)


def first_counted(n_requests: int, warm_up: float) -> int:
    """Requests that only warm the cache, for a share of ``n_requests`` in [0, 1)."""
    if not 0 <= warm_up < 1:
        raise SpecError(f"a warm-up of {warm_up}; it must be a share in [0, 1)")
    return math.floor(as_written(warm_up) * n_requests)


def as_written(share: float) -> Fraction:
    """The decimal a person wrote: 0.07 of 100 is 7, where binary 0.07 × 100 rounds up to 8."""
    return Fraction(repr(float(share)))


def in_units(tree: PrefixTree, unit_tokens: int) -> tuple[Ints, Ints, Ints]:
    """In whole units: depth of each edge's start and end, and size of each request's path.

    A unit belongs to the edge its last token is in.
    """
    if not 1 <= unit_tokens < MOST_TRACE_TOKENS:
        raise SpecError(f"a block of {unit_tokens} tokens; it holds at least 1, below 2**61")
    block = tree.requests.block_tokens
    begin, finish = tree.start, tree.end
    if unit_tokens != block:
        begin, finish = begin * block // unit_tokens, finish * block // unit_tokens
    return begin, finish, tree.at_path_ends(finish)


def hit_caps(tree: PrefixTree, unit_tokens: int, blocks: Ints, *, last_token: bool) -> Ints:
    """Units of each request that can be hit at all.

    ``last_token``: at most floor((prompt − 1) / unit), as ``KVCacheManager.get_computed_blocks``
    of vLLM 0.32 caps the lookup.
    """
    if not last_token:
        return blocks
    most: Ints = np.maximum(tree.requests.input_tokens - 1, 0) // unit_tokens
    return np.minimum(blocks, most)


def decode_units(tree: PrefixTree, unit_tokens: int, blocks: Ints) -> Ints:
    """Full units of each request behind its listed ones: the last token generated has no slot."""
    slots = tree.requests.input_tokens + np.maximum(tree.requests.output_tokens - 1, 0)
    tail: Ints = np.maximum(slots // unit_tokens - blocks, 0)
    return tail
