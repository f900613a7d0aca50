"""Tokens by their distance in both tiers, from the runs of every request."""

from sim.curves.kernels import Numbers
from sim.curves.kernels.fenwick import add, prefix
from sim.curves.kernels.runs import gather_runs, take_away

NEVER = -(1 << 60)
"""The shift of a run none of whose units was ever there."""


def bin_of(edges: Numbers, distance: int) -> int:
    """Index of the smallest of the sorted ``edges`` ≥ ``distance``; len(edges) when none is."""
    low = 0
    high = len(edges)
    while low < high:
        middle = (low + high) // 2
        if edges[middle] < distance:
            low = middle + 1
        else:
            high = middle
    return low


def spread(
    start: int, stop: int, gpu_tokens: int, gpu_shift: int, gpu_edges: Numbers, host_tokens: int,
    host_shift: int, host_edges: Numbers, table: Numbers,
) -> None:  # fmt: skip
    """Add the tokens [start, stop) to ``table`` by (bin of GPU distance, bin of host distance).

    A token's distance is its unit's index plus the tier's shift; NEVER puts it behind the last bin.
    """
    n_gpu = len(gpu_edges)
    n_host = len(host_edges)
    x = start
    g = bin_of(gpu_edges, x // gpu_tokens + gpu_shift) if gpu_shift > NEVER else n_gpu
    h = bin_of(host_edges, x // host_tokens + host_shift) if host_shift > NEVER else n_host
    while x < stop:
        g_end = (gpu_edges[g] - gpu_shift + 1) * gpu_tokens if g < n_gpu else stop
        h_end = (host_edges[h] - host_shift + 1) * host_tokens if h < n_host else stop
        until = min(stop, g_end, h_end)
        table[g * (n_host + 1) + h] += until - x
        x = until
        if x == g_end:
            g += 1
        if x == h_end:
            h += 1


def shifts(
    n: int, begin: Numbers, finish: Numbers, run_owner: Numbers, run_top: Numbers,
    run_bottom: Numbers, sums: Numbers, total: int, shift: Numbers, stop: Numbers,
) -> int:  # fmt: skip
    """For one tier: each run's distance minus unit index, and the unit its run stops at.

    Takes the runs' units away from their owners; returns the tier's total weight after that.
    """
    for k in range(n):
        shift[k] = NEVER
        stop[k] = finish[run_bottom[k]]
        if run_owner[k] >= 0:
            newer = total - prefix(sums, run_owner[k] + 1)
            shift[k] = newer + 1 - begin[run_top[k]]
    return take_away(n, begin, finish, run_owner, run_top, run_bottom, sums, total)


def overlay(
    n: int, end: int, gpu_tokens: int, gpu_shift: Numbers, gpu_stop: Numbers, gpu_cap: int,
    gpu_edges: Numbers, host_tokens: int, host_shift: Numbers, host_stop: Numbers, host_cap: int,
    host_edges: Numbers, table: Numbers,
) -> None:  # fmt: skip
    """Walk one prompt's tokens [0, end) over both tiers' runs at once, top run (n − 1) first."""
    x = 0
    i = n - 1
    j = n - 1
    while x < end:
        while i >= 0 and gpu_stop[i] * gpu_tokens <= x:
            i -= 1
        while j >= 0 and host_stop[j] * host_tokens <= x:
            j -= 1
        until = end
        gpu = NEVER
        host = NEVER
        if i >= 0 and x < gpu_cap:
            gpu = gpu_shift[i]
            until = min(until, min(gpu_stop[i] * gpu_tokens, gpu_cap))
        if j >= 0 and x < host_cap:
            host = host_shift[j]
            until = min(until, min(host_stop[j] * host_tokens, host_cap))
        if gpu > NEVER or host > NEVER:
            spread(x, until, gpu_tokens, gpu, gpu_edges, host_tokens, host, host_edges, table)
        x = until


def stack_surface(
    order: Numbers, last_edge: Numbers, parent: Numbers, head: Numbers, length: Numbers,
    first_counted: int, gpu_begin: Numbers, gpu_finish: Numbers, gpu_tokens: int, gpu_cap: Numbers,
    gpu_edges: Numbers, host_begin: Numbers, host_finish: Numbers, host_tokens: int,
    host_cap: Numbers, host_edges: Numbers, owner: Numbers, gpu_sums: Numbers, host_sums: Numbers,
    run_owner: Numbers, run_top: Numbers, run_bottom: Numbers, gpu_shift: Numbers,
    gpu_stop: Numbers, host_shift: Numbers, host_stop: Numbers, table: Numbers,
) -> None:  # fmt: skip
    """Tokens by (GPU distance bin, host distance bin), summed into ``table``, row-major.

    ``length[r]``: tokens of request r's path. ``*_cap[r]``: its tokens that the tier may serve.
    Tokens no tier has seen are left out. Both tiers see every request (LMCache 0.5.6 looks up and
    writes through whatever the GPU holds), so one walk serves both.
    """
    gpu_total = 0
    host_total = 0
    for now in range(len(order)):
        r = order[now]
        edge = last_edge[r]
        if edge < 0:
            continue
        n = gather_runs(edge, now, owner, parent, head, run_owner, run_top, run_bottom)
        gpu_total = shifts(
            n, gpu_begin, gpu_finish, run_owner, run_top, run_bottom, gpu_sums, gpu_total,
            gpu_shift, gpu_stop,
        )  # fmt: skip
        host_total = shifts(
            n, host_begin, host_finish, run_owner, run_top, run_bottom, host_sums, host_total,
            host_shift, host_stop,
        )  # fmt: skip
        add(gpu_sums, now + 1, gpu_finish[edge])
        gpu_total += gpu_finish[edge]
        add(host_sums, now + 1, host_finish[edge])
        host_total += host_finish[edge]
        if now >= first_counted:
            overlay(
                n, length[r], gpu_tokens, gpu_shift, gpu_stop, gpu_cap[r], gpu_edges,
                host_tokens, host_shift, host_stop, host_cap[r], host_edges, table,
            )  # fmt: skip
