"""Hits at every capacity of one tier, from the runs of every request."""

from sim.curves.kernels import Numbers
from sim.curves.kernels.fenwick import add, prefix
from sim.curves.kernels.runs import gather_runs, take_away


def count_run(hit: int, owner: int, total: int, forward: int, sums: Numbers, diff: Numbers) -> int:
    """Count the ``hit`` units of a run of ``owner``'s; returns the distance of the last of them."""
    if forward:
        # The run's first unit is the oldest its owner has: all of the owner's precede it.
        at = total - prefix(sums, owner)
        diff[at] += hit
        diff[at + 1] -= hit
        return at
    newer = total - prefix(sums, owner + 1)
    diff[newer + 1] += 1
    diff[newer + hit + 1] -= 1
    return newer + hit


def stack_curve(
    order: Numbers, last_edge: Numbers, parent: Numbers, head: Numbers, begin: Numbers,
    finish: Numbers, cap: Numbers, tail: Numbers, first_counted: int, forward: int, owner: Numbers,
    sums: Numbers, run_owner: Numbers, run_top: Numbers, run_bottom: Numbers, diff: Numbers,
) -> int:  # fmt: skip
    """Second-difference form of hits by capacity: cumulate ``diff`` twice for hits(C).

    ``begin``/``finish``: depth of each edge's ends, in units. ``cap[r]``: units of request r that
    can be hit at all. ``tail[r]``: units it owns below its path and nobody asks for again (decode).
    ``forward``: 1 for LMCache's own simulator, which touches a path's first unit first; there a
    whole run is hit from one capacity on. Requests before ``first_counted`` only warm the cache.
    Returns the largest stack distance of a hit: no capacity beyond it changes anything.
    """
    farthest = 0
    total = 0
    for now in range(len(order)):
        r = order[now]
        edge = last_edge[r]
        weight = tail[r]
        if edge >= 0:
            weight += finish[edge]
            n = gather_runs(edge, now, owner, parent, head, run_owner, run_top, run_bottom)
            for k in range(n):
                q = run_owner[k]
                hit = min(finish[run_bottom[k]], cap[r]) - begin[run_top[k]]
                if q >= 0 and hit > 0 and now >= first_counted:
                    farthest = max(farthest, count_run(hit, q, total, forward, sums, diff))
            total = take_away(n, begin, finish, run_owner, run_top, run_bottom, sums, total)
        add(sums, now + 1, weight)
        total += weight
    return farthest
