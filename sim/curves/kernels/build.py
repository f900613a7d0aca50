"""The prefix tree of raw block ids, and the numbering of its edges."""

from sim.curves.kernels import Numbers


def child_of(
    node: int, block: int, key_node: Numbers, key_block: Numbers, key_edge: Numbers,
) -> int:  # fmt: skip
    """Slot of (node, block) in the open hash table, or of the free slot where it belongs."""
    mask = len(key_edge) - 1
    slot = (block * 0x9E3779B97F4A7C1 + node * 0x632BE59BD9B4E019) & 0x7FFFFFFFFFFFFFFF
    slot = (slot ^ (slot >> 29)) & mask
    while key_edge[slot] >= 0 and (key_node[slot] != node or key_block[slot] != block):
        slot = (slot + 1) & mask
    return slot


def common_length(ids: Numbers, a: int, b: int, n: int) -> int:
    """How many of the ``n`` ids from ``a`` and from ``b`` on are equal before the first that differs.

    Sixteen at a time without a branch, which the compiler turns into vector instructions.
    """
    i = 0
    while i + 16 <= n:
        differs = 0
        for k in range(16):
            differs |= ids[a + i + k] ^ ids[b + i + k]
        if differs:
            break
        i += 16
    while i < n and ids[a + i] == ids[b + i]:
        i += 1
    return i


def grow(
    edge: int, node: int, begin: int, stop: int, r: int, parent: Numbers, start: Numbers,
    end: Numbers, last: Numbers,
) -> None:  # fmt: skip
    """Make ``edge`` the blocks [begin, stop) of request r below ``node``."""
    parent[edge] = node
    start[edge] = begin
    end[edge] = stop
    last[edge] = r


def cut(
    f: int, at: int, q: int, base: int, upper: int, ids: Numbers, parent: Numbers, start: Numbers,
    last: Numbers, key_node: Numbers, key_block: Numbers, key_edge: Numbers,
) -> None:  # fmt: skip
    """Leave edge ``f``, of request q's path at ``base``, what is below depth ``at``."""
    slot = child_of(parent[f], ids[base + start[f]], key_node, key_block, key_edge)
    key_edge[slot] = upper
    slot = child_of(upper, ids[base + at], key_node, key_block, key_edge)
    key_node[slot] = upper
    key_block[slot] = ids[base + at]
    key_edge[slot] = f
    parent[f] = upper
    start[f] = at
    last[f] = q


def insert(
    r: int, ids: Numbers, offsets: Numbers, n_edges: int, parent: Numbers, start: Numbers,
    end: Numbers, last: Numbers, last_edge: Numbers, key_node: Numbers, key_block: Numbers,
    key_edge: Numbers,
) -> int:  # fmt: skip
    """Add request ``r`` to the prefix tree; returns the number of edges then.

    Instead of walking edges it compares with the latest request through the same child, so a
    growing conversation costs one comparison a request, however often its path is cut.
    """
    base = offsets[r]
    n = offsets[r + 1] - base
    node = -1
    x = 0
    while x < n:
        slot = child_of(node, ids[base + x], key_node, key_block, key_edge)
        e = key_edge[slot]
        if e < 0:
            key_node[slot] = node
            key_block[slot] = ids[base + x]
            key_edge[slot] = n_edges
            grow(n_edges, node, x, n, r, parent, start, end, last)
            node = n_edges
            n_edges += 1
            break
        q = last[e]
        last[e] = r
        other = offsets[q]
        x += common_length(ids, base + x, other + x, min(n, offsets[q + 1] - other) - x)
        f = last_edge[q]
        while start[f] >= x:
            f = parent[f]
        node = f
        if x < end[f]:
            grow(n_edges, parent[f], start[f], x, r, parent, start, end, last)
            cut(f, x, q, other, n_edges, ids, parent, start, last, key_node, key_block, key_edge)
            node = n_edges
            n_edges += 1
    last_edge[r] = node
    return n_edges


def build(
    ids: Numbers, offsets: Numbers, parent: Numbers, start: Numbers, end: Numbers, last: Numbers,
    last_edge: Numbers, key_node: Numbers, key_block: Numbers, key_edge: Numbers,
) -> int:  # fmt: skip
    """Prefix tree of all requests, in order; returns its number of edges (≤ 2 R)."""
    n_edges = 0
    for r in range(len(offsets) - 1):
        n_edges = insert(
            r, ids, offsets, n_edges, parent, start, end, last, last_edge,
            key_node, key_block, key_edge,
        )  # fmt: skip
    return n_edges


def lay_out(
    by_depth: Numbers, parent: Numbers, ended: Numbers, below: Numbers, edges_below: Numbers,
    heavy: Numbers, place: Numbers,
) -> None:  # fmt: skip
    """Number the edges parents first, each heaviest child right behind its parent.

    ``by_depth``: edges, parents before children. ``ended``: requests whose path ends there.
    ``place[e]`` becomes e's new number, ``heavy[e]`` its heaviest child or −1.
    """
    for k in range(len(by_depth) - 1, -1, -1):
        e = by_depth[k]
        below[e] += ended[e]
        ended[e] = 0
        edges_below[e] += 1
        p = parent[e]
        if p >= 0:
            below[p] += below[e]
            edges_below[p] += edges_below[e]
            # Ties go to the child listed first, hence ≥: this walk is backwards.
            if heavy[p] < 0 or below[e] >= below[heavy[p]]:
                heavy[p] = e
    free = 0
    for e in by_depth:
        p = parent[e]
        if p < 0:
            place[e] = free
            free += edges_below[e]
        elif heavy[p] == e:
            place[e] = place[p] + 1
        else:
            # ``ended`` is used up; from here on it counts the room given away below p.
            place[e] = place[p] + 1 + edges_below[heavy[p]] + ended[p]
            ended[p] += edges_below[e]
