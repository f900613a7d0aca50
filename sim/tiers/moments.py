"""All that LMCache's server may hold when nobody knows when its eviction timer ticked.

A prompt of several prefill steps is stored in several parts, and ticks between them decide what is
evicted and what still fits. Every content they can lead to is followed, each once, however it came
about: exact where that is one, and the least and the most where it is not.
"""

from collections.abc import Sequence
from itertools import islice

from sim.tiers.host import HostRequest, HostShare
from sim.tiers.lmcache_mp import HostChunks

Content = tuple[int, ...]
"""Chunks, the next to be evicted first."""

MOST_WORK = 50_000_000
"""Chunks looked at before it is given up: some seconds."""


class TooManyMoments(Exception):  # noqa: N818 - a limit, not a fault
    """More contents than can be followed."""


class Moments:
    """A server's possible contents, request by request, and the tokens loaded on the way to each.

    ``rules``: an empty store. Each STORE is over before the next one begins. While ticks evict
    other prompts' chunks only and every STORE fits, what is held are the most recent chunks of all
    ever asked for: such a content is followed as their number, any other by itself.
    """

    def __init__(self, rules: HostChunks) -> None:
        self._rules = rules
        self._asked: Content = ()  # all chunks ever asked for, the most recent last
        self._loaded: dict[int | Content, tuple[int, int]] = {0: (0, 0)}
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
        own = set(request.chunks)
        place = {key: i for i, key in enumerate(self._asked) if key in own}
        asked = (*(k for k in self._asked if k not in own), *reversed(request.chunks))
        after: dict[int | Content, tuple[int, int]] = {}
        for held, (least, most) in self._loaded.items():
            ends: set[int | Content] = set()
            if isinstance(held, int):
                share, numbers = self._ends_of_most_recent(held, request, place)
                ends |= numbers
                held = self._asked[len(self._asked) - held :]
            if not ends:
                share, contents = self._ends(held, request)
                ends |= {len(c) if asked[len(asked) - len(c) :] == c else c for c in contents}
            least, most = least + share.loaded_tokens, most + share.loaded_tokens
            for end in ends:
                known = after.get(end, (least, most))
                after[end] = (min(least, known[0]), max(most, known[1]))
        self._asked, self._loaded = asked, after

    def _ends_of_most_recent(
        self, n_held: int, request: HostRequest, place: dict[int, int]
    ) -> tuple[HostShare, set[int]]:
        """As ``_ends``, in numbers; none where a prompt would lose a STORE or chunks of its own.

        ``place``: where in all chunks asked for its own are.
        """
        first = len(self._asked) - n_held
        resident = {key for key, i in place.items() if i >= first}
        hit, share, batches = self._rules.plan(request, resident)
        n_own, others = hit, {n_held - hit}
        if len(resident) > hit:
            return share, set()
        for batch in batches:
            self._worked(10 * len(others))
            n_own += len(batch)
            if n_own + max(others) > self._rules.capacity:
                return share, set()
            if len(batches) > 1:  # as in ``HostChunks.check``
                others = {left for n in others for left in self._left_of_others(n, n_own)}
            if min(others) < 0:
                return share, set()
        return share, {self._settled_number(n + n_own) for n in others}

    def _left_of_others(self, n_others: int, n_own: int) -> set[int]:
        """Chunks of others left beside ``n_own`` after any number of ticks; below 0: too few."""
        left = {n_others}
        while n_others >= 0 and self._rules.is_above(n_others + n_own):
            n_others -= self._rules.n_evicted(n_others + n_own)
            left.add(n_others)
        return left

    def _settled_number(self, n_chunks: int) -> int:
        while self._rules.is_above(n_chunks):
            n_chunks -= self._rules.n_evicted(n_chunks)
        return n_chunks

    def _ends(self, content: Content, request: HostRequest) -> tuple[HostShare, set[Content]]:
        """What is loaded from ``content``, and what it may be when the request has ended."""
        hit, share, batches = self._rules.plan(request, set(content))
        now = {_touched(content, request.chunks[:hit])}
        for batch in batches:
            stored = {self._with(content, batch) for content in now}
            if len(batches) > 1:
                stored = {end for content in stored for end in self._ticked(content, batch)}
            now = stored
        ended = {_touched(content, request.chunks) for content in now}
        return share, {c[len(c) - self._settled_number(len(c)) :] for c in ended}

    def _with(self, content: Content, batch: Sequence[int]) -> Content:
        resident = set(content)
        self._worked(len(content))
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

    def _tick(self, content: Content, writing: Sequence[int] = ()) -> Content:
        """One tick, which spares what is being written."""
        self._worked(len(content))
        if not self._rules.is_above(len(content)):
            return content
        n_gone = self._rules.n_evicted(len(content))
        spared = set(writing)
        if spared.isdisjoint(content[:n_gone]):
            return content[n_gone:]
        gone = set(islice((key for key in content if key not in spared), n_gone))
        return tuple(key for key in content if key not in gone)

    def _worked(self, n_chunks: int) -> None:
        self._work += 1 + n_chunks
        if self._work > MOST_WORK:
            raise TooManyMoments


def _touched(content: Content, keys: Sequence[int]) -> Content:
    resident = set(content)
    found = [key for key in reversed(keys) if key in resident]
    moved = set(found)
    return (*(key for key in content if key not in moved), *found)
