"""Between which numbers a deployment's computed tokens lie, where they are not exact."""

from collections.abc import Iterable

from sim.tiers.host import HostRequest
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.moments import Moments, TooManyMoments

Bounds = dict[str, list[int]]
"""The least and the most prompt tokens computed, by pass."""

Asked = Iterable[tuple[str, HostRequest]]
"""Pass and prompt, in order; the first pass asks each document for the first time."""


def whenever_it_ticks(asked: Asked, store: HostChunks) -> Bounds | None:
    """Whenever the timer of ``store``, empty now, ticks; None where that takes too long to say."""
    moments = Moments(store)
    bounds: Bounds = {}
    missed: dict[str, int] = {}
    try:
        for name, request in asked:
            if name not in missed:
                moments.forget()
            missed[name] = missed.get(name, 0) + request.n_prompt - request.gpu_hit
            moments.serve(request)
            least, most = moments.loaded
            bounds[name] = [missed[name] - most, missed[name] - least]
    except TooManyMoments:
        return None
    return bounds


def whatever_is_kept(asked: Asked, reusable: int, *, is_gpu_known: bool) -> Bounds:
    """By sizes alone: a tier holds at most ``reusable`` tokens of a document, in whole units.

    ``is_gpu_known``: the GPU's hits are certain, and only the host's are not.
    """
    bounds: Bounds = {}
    for name, request in asked:
        sums = bounds.setdefault(name, [0, 0])
        is_first = len(bounds) == 1
        sure = request.gpu_hit if is_gpu_known else 0
        most = 0 if is_first else max(sure, min(reusable, request.n_prompt - 1))
        sums[0] += request.n_prompt - most
        sums[1] += request.n_prompt - sure
    return bounds
