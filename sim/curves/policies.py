"""Policies that are no stacks, replayed one capacity at a time, and the ceiling no policy beats.

A request looks up its longest run of leading blocks, then all its blocks come in, last block
first; its own blocks are never evicted to make room for it. One that is longer than the cache
keeps its first blocks only. A policy is told that a block came in (``admit``) or that a resident one
was used again (``touch``); ``evict`` chooses one outside ``mine`` to make room for ``coming``,
forgets it and returns it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

Paths = Sequence[Sequence[int]]


class Fifo:
    """First in, first out."""

    def __init__(self, _capacity: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def touch(self, key: int) -> None:
        """Nothing: being used again does not help a block."""

    def admit(self, key: int) -> None:
        """Behind all others."""
        self._queue[key] = None

    def evict(self, coming: int, mine: set[int]) -> int:
        """The oldest."""
        return _pop_first(self._queue, mine)


class Lru(Fifo):
    """Least recently used; equals the stack curve, so that the other policies can be compared."""

    def touch(self, key: int) -> None:
        """Behind all others again."""
        self._queue.move_to_end(key)


class Mru(Lru):
    """Most recently used leaves first."""

    def evict(self, coming: int, mine: set[int]) -> int:
        """The youngest outside ``mine``."""
        key = next(key for key in reversed(self._queue) if key not in mine)
        del self._queue[key]
        return key


class Lfu:
    """Least often used since it came in; of equals the least recently used."""

    def __init__(self, _capacity: int) -> None:
        self._uses: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._clock = 0

    def touch(self, key: int) -> None:
        """One use more; the first when it comes in."""
        uses = self._uses.get(key, (0, 0))[0] + 1
        self._clock += 1
        self._uses[key] = (uses, self._clock)
        heapq.heappush(self._heap, (uses, self._clock, key))

    admit = touch

    def evict(self, coming: int, mine: set[int]) -> int:
        """The fewest uses."""
        kept = []
        while True:
            uses, clock, key = heapq.heappop(self._heap)
            if self._uses.get(key) != (uses, clock):
                continue  # an older entry of a block that was used again or has left
            if key not in mine:
                break
            kept.append((uses, clock, key))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        del self._uses[key]
        return key


class Arc:
    """ARC (Megiddo and Modha, FAST 2003): recency and frequency lists with ghosts of both."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._ghost_once: OrderedDict[int, None] = OrderedDict()
        self._ghost_often: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def touch(self, key: int) -> None:
        """Seen twice: to the frequency list."""
        self._once.pop(key, None)
        self._often.pop(key, None)
        self._often[key] = None

    def admit(self, key: int) -> None:
        """A block that left not long ago comes back as frequent, one that is new as seen once."""
        is_ghost = key in self._ghost_once or key in self._ghost_often
        self._ghost_once.pop(key, None)
        self._ghost_often.pop(key, None)
        (self._often if is_ghost else self._once)[key] = None

    def evict(self, coming: int, mine: set[int]) -> int:
        """Cases II to IV of the paper for a full cache; a ghost moves the target to its list."""
        once, often = len(self._ghost_once), len(self._ghost_often)
        if coming in self._ghost_once:
            self._target = min(self._target + max(often / once, 1.0), self._capacity)
        elif coming in self._ghost_often:
            self._target = max(self._target - max(once / often, 1.0), 0.0)
        elif len(self._once) + once == self._capacity:
            if not once:
                return _pop_first(self._once, mine)
            self._ghost_once.popitem(last=False)
        elif self._capacity + once + often == 2 * self._capacity:
            self._ghost_often.popitem(last=False)
        return self._replace(mine, is_often=coming in self._ghost_often)

    def _replace(self, mine: set[int], *, is_often: bool) -> int:
        lists = [(self._once, self._ghost_once), (self._often, self._ghost_often)]
        n_once = len(self._once)
        if n_once < self._target or (n_once == self._target and not is_often):
            lists.reverse()
        blocks, ghosts = next(pair for pair in lists if not pair[0].keys() <= mine)
        key = _pop_first(blocks, mine)
        ghosts[key] = None
        return key


Policy = Fifo | Lfu | Arc

POLICIES: dict[str, Callable[[int], Policy]] = {
    "fifo": Fifo,
    "lru": Lru,
    "mru": Mru,
    "lfu": Lfu,
    "arc": Arc,
}
POLICY_NAMES = (*POLICIES, "belady")
"""All that can be asked for; belady knows what comes, so no server can do it."""


def count_hits(paths: Paths, capacity: int, policy: str) -> int:
    """Block hits of a serial replay of ``paths`` (prefix keys) at one capacity.

    Raises ValueError for a policy not in ``POLICY_NAMES`` or a capacity below 0.
    """
    if policy not in POLICY_NAMES:
        raise ValueError(f"policy {policy!r} is not known; known: {', '.join(POLICY_NAMES)}")
    if capacity < 0:
        raise ValueError(f"a capacity of {capacity}; 0 is the smallest")
    if policy == "belady":
        return _most_hits(paths, capacity)
    return _hits(paths, capacity, POLICIES[policy](capacity))


def _hits(paths: Paths, capacity: int, policy: Policy) -> int:
    resident: set[int] = set()
    hits = 0
    for path in paths:
        for key in path:
            if key not in resident:
                break
            hits += 1
        kept = path[:capacity]
        mine = set(kept)
        for key in reversed(kept):
            if key in resident:
                policy.touch(key)
                continue
            if len(resident) >= capacity:
                resident.remove(policy.evict(key, mine))
            policy.admit(key)
            resident.add(key)
    return hits


def _most_hits(paths: Paths, capacity: int) -> int:
    """Most block hits any policy can have at ``capacity``: keep what is asked for soonest.

    After each request the cache may hold any ``capacity`` of the blocks it had and those that
    came; the ones with the nearest next use are kept (optimal, as for intervals on machines). A
    block's ancestors are never asked for later than it is, so the prefix rule costs nothing: of
    equals the deepest could leave, and which one does changes no count.
    """
    next_use = _next_uses(paths)
    due: dict[int, int] = {}  # resident block → number of the request that asks for it next
    latest: list[tuple[int, int]] = []  # (−next use, block), entries of earlier uses included
    hits = 0
    for path, nexts in zip(paths, next_use, strict=True):
        for key, soon in zip(path, nexts, strict=True):
            hits += due.pop(key, None) is not None
            if soon is not None:
                due[key] = soon
                heapq.heappush(latest, (-soon, key))
        while len(due) > capacity:
            soon, key = heapq.heappop(latest)
            if due.get(key) == -soon:
                del due[key]
    return hits


def _next_uses(paths: Paths) -> list[list[int | None]]:
    """For each block of each path the number of the next request that has it, or None."""
    coming: dict[int, int] = {}
    rows: list[list[int | None]] = []
    for number in range(len(paths) - 1, -1, -1):
        rows.append([coming.get(key) for key in paths[number]])
        coming.update(dict.fromkeys(paths[number], number))
    return rows[::-1]


def _pop_first(blocks: OrderedDict[int, None], mine: set[int]) -> int:
    key = next(key for key in blocks if key not in mine)
    del blocks[key]
    return key
