"""What one tier of one size serves, request by request, by edges of the prefix tree.

A request touches its path last unit first, and eviction takes the least recent unit: so what a tier
holds of an edge is always its beginning, as recent as the last path through it. The tier is a list
of edges, linked from the least recent to the most, each with the units ``held`` of it; a request's
units behind its path, which nobody asks for again, are an edge of its own. The last node is no edge
but the list's two ends.
"""

from sim.curves.kernels import Numbers


def unlink(node: int, newer: Numbers, older: Numbers) -> None:
    """Take ``node`` out of the list."""
    newer[older[node]] = newer[node]
    older[newer[node]] = older[node]


def append(node: int, newer: Numbers, older: Numbers) -> None:
    """Make ``node`` the most recent one."""
    ends = len(newer) - 1
    last = older[ends]
    newer[last] = node
    older[node] = last
    newer[node] = ends
    older[ends] = node


def evict(n_units: int, held: Numbers, newer: Numbers, older: Numbers) -> int:
    """Drop the ``n_units`` least recent units, or all there are; returns how many were dropped."""
    ends = len(newer) - 1
    gone = 0
    while gone < n_units and newer[ends] != ends:
        node = newer[ends]
        part = min(held[node], n_units - gone)
        held[node] -= part
        gone += part
        if held[node] == 0:
            unlink(node, newer, older)
    return gone


def resident(edge: int, parent: Numbers, begin: Numbers, held: Numbers) -> int:
    """Leading units of the path ending in ``edge`` that are held."""
    while edge >= 0:
        if held[edge] > 0:
            depth: int = begin[edge] + held[edge]
            return depth
        edge = parent[edge]
    return 0


def take_out(
    edge: int, parent: Numbers, held: Numbers, newer: Numbers, older: Numbers,
) -> None:  # fmt: skip
    """Take a path's held edges out of the list, so that nothing of them is evicted."""
    while edge >= 0:
        if held[edge] > 0:
            unlink(edge, newer, older)
        edge = parent[edge]


def put_back(
    edge: int, tail: int, tail_units: int, is_stored: int, parent: Numbers, begin: Numbers,
    finish: Numbers, held: Numbers, newer: Numbers, older: Numbers,
) -> None:  # fmt: skip
    """Make a path that was taken out the most recent again, its last unit first.

    ``is_stored``: 1 where all of it is held from now on, ``tail_units`` behind it as node ``tail``.
    """
    if is_stored and tail_units > 0:
        held[tail] = tail_units
        append(tail, newer, older)
    while edge >= 0:
        if is_stored:
            held[edge] = finish[edge] - begin[edge]
        if held[edge] > 0:
            append(edge, newer, older)
        edge = parent[edge]


def watermark_tier(
    order: Numbers, last_edge: Numbers, parent: Numbers, begin: Numbers, finish: Numbers,
    units: Numbers, capacity: int, watermark: float, evict_ratio: float, held: Numbers,
    newer: Numbers, older: Numbers, hits: Numbers,
) -> None:  # fmt: skip
    """LMCache's server (``sim.tiers.lmcache_mp``) settled after each request of one prefill step.

    ``units[r]``: chunks of r's prompt, those behind its path included. ``hits`` gets the chunks
    each request of ``order`` finds. A store that does not fit is lost; at or above ``watermark``
    the share ``evict_ratio`` of the chunks is dropped until usage is below it.
    """
    n_edges = len(parent)
    total = 0
    for now in range(len(order)):
        r = order[now]
        edge = last_edge[r]
        hit = resident(edge, parent, begin, held)
        hits[now] = hit
        known = finish[edge] if edge >= 0 else 0
        is_stored = 1 if units[r] - hit <= capacity - total else 0
        take_out(edge, parent, held, newer, older)
        put_back(
            edge,
            n_edges + r,
            units[r] - known,
            is_stored,
            parent,
            begin,
            finish,
            held,
            newer,
            older,
        )
        if is_stored:
            total += units[r] - hit
        while total > 0 and total / capacity >= watermark:
            total -= evict(max(1, int(total * evict_ratio)), held, newer, older)


def lru_tier(
    order: Numbers, last_edge: Numbers, parent: Numbers, begin: Numbers, finish: Numbers,
    units: Numbers, room: Numbers, cap: Numbers, capacity: int, held: Numbers, newer: Numbers,
    older: Numbers, hits: Numbers,
) -> int:  # fmt: skip
    """vLLM's pool (``sim.tiers.gpu_pool``) of ``capacity`` usable blocks, but for second copies.

    ``units[r]``: full blocks of r's prompt. ``room[r]``: blocks it takes while it runs, a partial
    one included. ``cap[r]``: blocks that can be hit. ``hits`` gets the blocks each request of
    ``order`` finds; of one that does not fit the first blocks stay. Returns how often a block was held that
    could not be hit: where vLLM keeps a second copy.
    """
    n_edges = len(parent)
    total = 0
    copies = 0
    for now in range(len(order)):
        r = order[now]
        edge = last_edge[r]
        found = resident(edge, parent, begin, held)
        hits[now] = min(found, cap[r])
        copies += found - hits[now]
        known = finish[edge] if edge >= 0 else 0
        take_out(edge, parent, held, newer, older)
        total -= evict(max(0, total + room[r] - found - capacity), held, newer, older)
        put_back(edge, n_edges + r, units[r] - known, 1, parent, begin, finish, held, newer, older)
        total += units[r] - found
        total -= evict(max(0, total - capacity), held, newer, older)
    return copies
