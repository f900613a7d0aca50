"""A request's path as runs of one owner.

An edge's owner is the position, in the order served, of the last request whose path held it; −1
before the first. A request's blocks become the most recent ones, its first block most of all, so
the LRU stack is a list of requests, newest first, each owning a suffix of its path, in path order
(vLLM 0.32 ``BlockPool``, serial). Hence along a path owners never increase with depth, and the
blocks of one run (consecutive, one owner) stand at consecutive stack distances.
"""

from sim.curves.kernels import Numbers
from sim.curves.kernels.fenwick import add


def top_of_run(owner: Numbers, low: int, i: int) -> int:
    """Smallest j in [low, i] such that edges j..i of one chain have one owner.

    Owners do not increase along a chain, so doubling steps and bisection find it.
    """
    mine = owner[i]
    if owner[low] == mine:
        return low
    step = 1
    while i - step > low and owner[i - step] == mine:
        step *= 2
    bad = max(i - step, low)  # not ours
    good = i - step // 2  # ours
    while good - bad > 1:
        middle = (good + bad) // 2
        if owner[middle] == mine:
            good = middle
        else:
            bad = middle
    return good


def gather_runs(
    edge: int, now: int, owner: Numbers, parent: Numbers, head: Numbers, run_owner: Numbers,
    run_top: Numbers, run_bottom: Numbers,
) -> int:  # fmt: skip
    """Split the path ending in ``edge`` into runs, deepest first, and give it to request ``now``.

    Writes each run's owner and its top and bottom edge; returns the number of runs. Edges of one
    heavy chain are neighbours, so a path is a few ranges of edge numbers.
    """
    n = 0
    while edge >= 0:
        low = head[edge]
        i = edge
        while i >= low:
            j = top_of_run(owner, low, i)
            if n > 0 and run_owner[n - 1] == owner[i]:
                run_top[n - 1] = j
            else:
                run_owner[n] = owner[i]
                run_top[n] = j
                run_bottom[n] = i
                n += 1
            i = j - 1
        for i in range(low, edge + 1):
            owner[i] = now
        edge = parent[low]
    return n


def take_away(
    n: int, begin: Numbers, finish: Numbers, run_owner: Numbers, run_top: Numbers,
    run_bottom: Numbers, sums: Numbers, total: int,
) -> int:  # fmt: skip
    """Take the runs' units from their owners; returns what of ``total`` is left."""
    for k in range(n):
        if run_owner[k] >= 0:
            gone = finish[run_bottom[k]] - begin[run_top[k]]
            add(sums, run_owner[k] + 1, -gone)
            total -= gone
    return total
