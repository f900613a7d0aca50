"""Hits at every capacity for requests that overlap in time."""

from sim.curves.kernels import Numbers
from sim.curves.kernels.fenwick import add, prefix


def look_up(
    n: int, limit: int, held: int, free: int, begin: Numbers, finish: Numbers, owner: Numbers,
    holders: Numbers, sums: Numbers, path: Numbers, diff: Numbers,
) -> None:  # fmt: skip
    """Count the hits of a starting request, whose path, deepest edge first, is ``path[:n]``."""
    for k in range(n):
        edge = path[k]
        hit = min(finish[edge], limit) - begin[edge]
        if hit <= 0:
            continue
        if holders[edge] > 0:
            diff[1] += hit
            diff[2] -= hit
        elif owner[edge] >= 0:
            at = held + free - prefix(sums, owner[edge] + 1) + 1
            # The rest of the path up to another owner stands before it.
            m = k + 1
            while m < n and holders[path[m]] == 0 and owner[path[m]] == owner[edge]:
                at += finish[path[m]] - begin[path[m]]
                m += 1
            diff[at] += 1
            diff[at + hit] -= 1


def hold(
    n: int, begin: Numbers, finish: Numbers, owner: Numbers, holders: Numbers, sums: Numbers,
    path: Numbers, moved: Numbers,
) -> None:  # fmt: skip
    """Hold a path. ``moved``[0] gains the units newly held, [1] loses those that were free."""
    for k in range(n):
        edge = path[k]
        size = finish[edge] - begin[edge]
        if holders[edge] == 0:
            moved[0] += size
            if owner[edge] >= 0:
                add(sums, owner[edge] + 1, -size)
                moved[1] -= size
        holders[edge] += 1


def let_go(
    now: int, edge: int, parent: Numbers, begin: Numbers, finish: Numbers, owner: Numbers,
    holders: Numbers,
) -> int:  # fmt: skip
    """End a request's hold on its path; returns the units nobody holds any more."""
    released = 0
    while edge >= 0:
        holders[edge] -= 1
        if holders[edge] == 0:
            owner[edge] = now
            released += finish[edge] - begin[edge]
        edge = parent[edge]
    return released


def concurrent_curve(
    events: Numbers, last_edge: Numbers, parent: Numbers, begin: Numbers, finish: Numbers,
    cap: Numbers, tail: Numbers, owner: Numbers, holders: Numbers, sums: Numbers, path: Numbers,
    moved: Numbers, diff: Numbers,
) -> int:  # fmt: skip
    """As ``stack_curve``, for requests that overlap; returns the most units held at once.

    ``events``: r for "request r starts", −1 − r for "it finishes", in order. A held block is in
    the pool at any capacity that can hold the running requests at all; a free one stands behind
    all held ones, in order of the event that freed it, newest first. ``moved``: held and free
    units, both 0 at first.
    """
    peak = 0
    for now in range(len(events)):
        if events[now] >= 0:
            r = events[now]
            n = 0
            edge = last_edge[r]
            while edge >= 0:
                path[n] = edge
                n += 1
                edge = parent[edge]
            look_up(n, cap[r], moved[0], moved[1], begin, finish, owner, holders, sums, path, diff)
            hold(n, begin, finish, owner, holders, sums, path, moved)
            moved[0] += tail[r]
            peak = max(peak, moved[0])
        else:
            r = -1 - events[now]
            released = let_go(now, last_edge[r], parent, begin, finish, owner, holders) + tail[r]
            add(sums, now + 1, released)
            moved[1] += released
            moved[0] -= released
    return peak
