"""All that LMCache's server may hold when nobody knows when its eviction timer ticked.

A prompt of several prefill steps is stored in several parts, and ticks between them decide what is
evicted and what still fits. Every content they can lead to is followed, each once, however it came
about: exact where that is one, and the least and the most where it is not.
"""

from collections.abc import Sequence
from itertools import islice

from sim.tiers.host import HostRequest
from sim.tiers.lmcache_mp import HostChunks

Content = tuple[int, ...]
"""Chunks, the next to be evicted first."""

MOST_WORK = 50_000_000
"""Chunks looked at before it is given up: a few seconds."""


class TooManyMoments(Exception):  # noqa: N818 - a limit, not a fault
    """More contents than can be followed."""


class Moments:
    """A server's possible contents, request by request, and the tokens loaded on the way to each.

    ``rules``: an empty store. Each STORE is over before the next one begins.
    """

    def __init__(self, rules: HostChunks) -> None:
        self._rules = rules
        self._loaded: dict[Content, tuple[int, int]] = {(): (0, 0)}
        self._work = 0

    @property
    def loaded(self) -> tuple[int, int]:
        """The least and the most tokens that have been loaded since ``forget``, or the start."""
        ways = self._loaded.values()
        return min(least for least, _ in ways), max(most for _, most in ways)

    def forget(self) -> None:
        """Count loaded tokens from here on."""
        self._loaded = dict.fromkeys(self._loaded, (0, 0))

    def serve(self, request: HostRequest) -> None:
        """Take every content through ``request``. Raises TooManyMoments."""
        after: dict[Content, tuple[int, int]] = {}
        for content, (least, most) in self._loaded.items():
            _, share, _ = self._rules.plan(request, set(content))
            least, most = least + share.loaded_tokens, most + share.loaded_tokens
            for end in self._ends(content, request):
                known = after.get(end, (least, most))
                after[end] = (min(least, known[0]), max(most, known[1]))
        self._loaded = after

    def _ends(self, content: Content, request: HostRequest) -> set[Content]:
        hit, _, batches = self._rules.plan(request, set(content))
        now = {_touched(content, request.chunks[:hit])}
        for batch in batches:
            stored = {self._with(content, batch) for content in now}
            if len(batches) > 1:  # as in ``HostChunks.check``
                stored = {end for content in stored for end in self._ticked(content, batch)}
            now = stored
        return {self._settled(_touched(content, request.chunks)) for content in now}

    def _with(self, content: Content, batch: Sequence[int]) -> Content:
        resident = set(content)
        self._worked(content)
        missing = [key for key in batch if key not in resident]
        fits = len(missing) <= self._rules.capacity - len(content)
        return (*content, *reversed(missing)) if fits else content

    def _ticked(self, content: Content, batch: Sequence[int]) -> set[Content]:
        """After any number of ticks while ``batch`` is written, then any number behind that."""
        ends: set[Content] = set()
        written, last = content, None
        while written != last:
            behind = written
            while behind not in ends:
                ends.add(behind)
                behind = self._tick(behind)
            written, last = self._tick(written, batch), written
        return ends

    def _settled(self, content: Content) -> Content:
        while self._rules.is_above(len(content)):
            content = self._tick(content)
        return content

    def _tick(self, content: Content, writing: Sequence[int] = ()) -> Content:
        """One tick, which spares what is being written."""
        self._worked(content)
        if not self._rules.is_above(len(content)):
            return content
        n_gone = self._rules.n_evicted(len(content))
        oldest = content[:n_gone]
        if set(writing).isdisjoint(oldest):
            return content[n_gone:]
        spared = set(writing)
        gone = set(islice((key for key in content if key not in spared), n_gone))
        return tuple(key for key in content if key not in gone)

    def _worked(self, content: Content) -> None:
        self._work += 1 + len(content)
        if self._work > MOST_WORK:
            raise TooManyMoments


def _touched(content: Content, keys: Sequence[int]) -> Content:
    resident = set(content)
    found = [key for key in reversed(keys) if key in resident]
    moved = set(found)
    return (*(key for key in content if key not in moved), *found)
