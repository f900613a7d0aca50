"""The slow, obvious cache the fast paths are tested against: one ordered dict per capacity."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

Path = Sequence[Hashable]


def prefix_keys(paths: Iterable[Sequence[int]]) -> list[list[int]]:
    """Each path with its ids replaced by numbers that are equal only for equal whole prefixes."""
    names: dict[tuple[int, int], int] = {}
    named = []
    for path in paths:
        keys, node = [], -1
        for block in path:
            node = names.setdefault((node, block), len(names))
            keys.append(node)
        named.append(keys)
    return named


class ReferenceLru:
    """An LRU of ``capacity`` units under the prefix rule; 0 holds nothing.

    ``forward`` touches a path's first unit first (LMCache's own simulator); otherwise its last
    unit first, as vLLM frees and LMCache's MP server touches.
    """

    def __init__(self, capacity: int, *, forward: bool = False) -> None:
        self._capacity = capacity
        self._forward = forward
        self._units: OrderedDict[Hashable, None] = OrderedDict()

    def serve(self, path: Path) -> int:
        """Hits of one request: its longest run of leading units that are here. Then touch all."""
        hits = 0
        while hits < len(path) and path[hits] in self._units:
            hits += 1
        for unit in path if self._forward else reversed(path):
            self._units.pop(unit, None)
            self._units[unit] = None
            while len(self._units) > self._capacity:
                self._units.popitem(last=False)
        return hits


def hits_at(paths: Iterable[Path], capacity: int, *, forward: bool = False) -> int:
    """Hits of a serial replay of ``paths`` at one capacity."""
    cache = ReferenceLru(capacity, forward=forward)
    return sum(cache.serve(path) for path in paths)
