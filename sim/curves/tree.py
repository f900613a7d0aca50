"""A trace as a prefix tree: a few numbers per request instead of one per block.

An edge is a stretch of blocks that every request walks as a whole: edges end where prompts branch
and where prompts end. All that depends on capacities, order or block size is computed from it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.curves.jit import read_only, run, runs_compiled
from sim.curves.kernels import build
from sim.curves.trace import Ints, Requests, Trace, TraceError

Edges = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """E edges, parents before children, each heaviest child right behind its parent.

    ``parent[e]``: −1 at the root. ``length[e]``: blocks. ``last_edge[r]``: where request r's path
    ends, −1 for an empty prompt. ``start``/``end``: the edge's range of depths, in blocks.
    ``head[e]``: first edge of e's chain of heaviest children; ``head[e]..e`` is part of a path.
    """

    requests: Requests
    parent: Edges
    length: Ints
    last_edge: Edges
    start: Ints
    end: Ints
    head: Edges

    @classmethod
    def from_edges(
        cls, requests: Requests, parent: Edges, length: Ints, last_edge: Edges
    ) -> "PrefixTree":
        """Derive depths and chains; raises TraceError where the numbers are no such tree."""
        n = len(parent)
        number = np.arange(n, dtype=np.int32)
        if len(length) != n or len(last_edge) != len(requests):
            raise TraceError(
                f"{n} edges with {len(length)} lengths, {len(requests)} requests with "
                f"{len(last_edge)} path ends"
            )
        if n and (parent.min() < -1 or (parent >= number).any() or length.min() < 1):
            raise TraceError("an edge lies before its parent or has no block")
        if len(last_edge) and (last_edge.min() < -1 or last_edge.max() >= n):
            raise TraceError(f"a path ends at an edge that is not among the {n}")
        is_head = parent != number - 1
        is_head[:1] = True
        head = np.maximum.accumulate(np.where(is_head, number, 0).astype(np.int32))
        end = _depths(parent, length, is_head)
        return cls(requests, parent, length, last_edge, end - length, end, head)

    @property
    def n_accesses(self) -> int:
        """Blocks of all prompts together."""
        return int(self.blocks_of_requests().sum())

    @property
    def n_blocks(self) -> int:
        """Distinct blocks."""
        return int(self.length.sum())

    def blocks_of_requests(self) -> Ints:
        """Blocks of each request."""
        return self.at_path_ends(self.end)

    def at_path_ends(self, depth: Ints) -> Ints:
        """For each request what ``depth`` is at its last edge; 0 for an empty prompt."""
        return np.append(depth, 0)[self.last_edge]

    def ids_of(self, r: int) -> Ints:
        """Block ids of request ``r``, numbered afresh: equal prefixes have equal ids."""
        first = np.cumsum(self.length) - self.length
        parts = []
        edge = int(self.last_edge[r])
        while edge >= 0:
            parts.append(np.arange(first[edge], first[edge] + self.length[edge]))
            edge = int(self.parent[edge])
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, dtype=np.int64)


def _depths(parent: Edges, length: Ints, is_head: NDArray[np.bool_]) -> Ints:
    """Depth of each edge's end: chain by chain, for a chain's edges are neighbours."""
    running = np.cumsum(length)
    end = running.copy()
    heads = np.flatnonzero(is_head)
    stops = np.append(heads, len(parent))[1:]
    for head, stop in zip(heads.tolist(), stops.tolist(), strict=True):
        above = int(end[parent[head]]) if parent[head] >= 0 else 0
        end[head:stop] += above - (int(running[head]) - int(length[head]))
    return end


def build_tree(trace: Trace, *, compiled: bool | None = None) -> PrefixTree:
    """The prefix tree of ``trace``; the same, compiled or not (None: whatever is faster)."""
    n_requests = len(trace.requests)
    compiled = runs_compiled(n_requests * 40 + len(trace.ids) // 100, compiled)
    parent, start, end, last_edge = (_build_compiled if compiled else _build_plain)(trace)
    n = len(parent)
    by_depth = np.argsort(start, kind="stable")
    ended = np.bincount(last_edge[last_edge >= 0], minlength=n).astype(np.int64)
    place, below, edges_below = (np.zeros(n, dtype=np.int64) for _ in range(3))
    heavy = np.full(n, -1, dtype=np.int64)
    run(
        build.lay_out,
        *(read_only(by_depth), read_only(parent), ended, below, edges_below, heavy, place),
        compiled=compiled,
    )
    moved_parent = np.empty(n, dtype=np.int32)
    moved_parent[place] = np.where(parent >= 0, place[parent], -1)
    length = np.empty(n, dtype=np.int64)
    length[place] = end - start
    # Index −1, the empty path, stays −1.
    moved_last = np.append(place, -1)[last_edge].astype(np.int32)
    return PrefixTree.from_edges(trace.requests, moved_parent, length, moved_last)


def _build_compiled(trace: Trace) -> tuple[Ints, Ints, Ints, Ints]:
    n_requests = len(trace.requests)
    room = max(2 * n_requests, 1)  # a request adds at most a cut and a new end
    slots = 1 << (2 * room - 1).bit_length()
    parent, start, end, last = (np.zeros(room, dtype=np.int64) for _ in range(4))
    last_edge = np.full(n_requests, -1, dtype=np.int64)
    key_node, key_block = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
    key_edge = np.full(slots, -1, dtype=np.int64)
    n = run(
        build.build,
        *(trace.ids, trace.offsets, parent, start, end, last, last_edge),
        *(key_node, key_block, key_edge),
        compiled=True,
    )
    return parent[:n], start[:n], end[:n], last_edge


def _build_plain(trace: Trace) -> tuple[Ints, Ints, Ints, Ints]:
    """As ``build.build``, with numpy comparing the ids and a dict finding the children."""
    ids, offsets = trace.ids, trace.offsets.tolist()
    columns: tuple[list[int], ...] = ([], [], [], [])
    parent, start, end, last = columns
    last_edge: list[int] = []
    child: dict[tuple[int, int], int] = {}

    def add(up: int, begin: int, stop: int) -> int:
        for column, value in zip(columns, (up, begin, stop, r), strict=True):
            column.append(value)
        return len(parent) - 1

    for r in range(len(trace.requests)):
        base, n = offsets[r], offsets[r + 1] - offsets[r]
        node, x = -1, 0
        while x < n:
            block = int(ids[base + x])
            e = child.get((node, block))
            if e is None:
                child[node, block] = e = add(node, x, n)
                node = e
                break
            q, last[e] = last[e], r
            other = offsets[q]
            room = min(n, offsets[q + 1] - other)
            x += _common_length(ids[base + x : base + room], ids[other + x : other + room])
            f = last_edge[q]
            while start[f] >= x:
                f = parent[f]
            node = f
            if x < end[f]:
                node = add(parent[f], start[f], x)
                child[parent[f], int(ids[other + start[f]])] = node
                child[node, int(ids[other + x])] = f
                parent[f], start[f], last[f] = node, x, q
        last_edge.append(node)
    arrays = (np.array(column, dtype=np.int64) for column in (parent, start, end, last_edge))
    return tuple(arrays)  # type: ignore[return-value]


def _common_length(a: NDArray[np.signedinteger], b: NDArray[np.signedinteger]) -> int:
    """Length of the equal beginning of two equally long arrays."""
    differs = a != b
    at = int(differs.argmax()) if len(differs) else 0
    return at if len(differs) and differs[at] else len(differs)
