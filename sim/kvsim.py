"""Document-level cache models: what a GPU and a host tier still hold when a document comes again.

The lab's contract; standard library only, importable as ``kvsim`` and as ``sim.kvsim``.
One entry is one whole document, so partial hits do not exist here: ``sim.predict`` has those.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal


class LRUCache:
    """Least-recently-used entries whose sizes sum to at most ``capacity``, in one unit (tokens).

    ``used``: sum of the stored sizes, at most ``capacity`` after every access. Capacity 0 is a
    tier that is off: it stores nothing, not even an entry of size 0. Raises ValueError for a
    negative capacity.
    """

    def __init__(self, capacity: int) -> None:
        if not capacity >= 0:  # written so that NaN fails too
            raise ValueError(f"capacity is {capacity!r}; it must be at least 0 (0 = tier off)")
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()  # oldest first

    def access(self, key: Hashable, size: int) -> bool:
        """Read ``key``: True on a hit, which makes it the most recent; a miss stores it, if it can.

        A miss evicts the oldest entries until ``size`` fits; filling the capacity exactly fits. An
        entry larger than the capacity is not stored and evicts nothing. On a hit the stored size
        stays, whatever ``size`` says. Raises ValueError for a negative size, changing nothing.
        """
        if not size >= 0:
            raise ValueError(f"size of {key!r} is {size!r}; it must be at least 0")
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        if self.capacity > 0 and size <= self.capacity:
            while self.used + size > self.capacity:
                _, evicted = self._sizes.popitem(last=False)
                # A caller's fractional sizes leave rounding dust; an empty cache uses exactly 0.
                self.used = self.used - evicted if self._sizes else 0
            self._sizes[key] = size
            self.used += size
        return False

    def __contains__(self, key: Hashable) -> bool:
        """Whether ``key`` is stored; unlike ``access``, asking changes no order."""
        return key in self._sizes

    def keys(self) -> list[Hashable]:
        """Stored keys, oldest (next to be evicted) first."""
        return list(self._sizes)


class TwoTierCache:
    """A GPU tier and, behind it, a CPU tier that is written through: not a victim cache.

    Capacities in one unit (tokens). A CPU capacity of 0 makes it a one-tier cache.
    """

    def __init__(self, gpu_capacity: int, cpu_capacity: int) -> None:
        self.gpu = LRUCache(gpu_capacity)
        self.cpu = LRUCache(cpu_capacity)

    def access(self, key: Hashable, size: int) -> Literal["gpu", "cpu", "miss"]:
        """Read ``key`` and say where it was found; what was not in a tier read is stored there.

        A GPU hit leaves the CPU tier untouched, its order included. A CPU hit makes the CPU copy
        the most recent and loads the entry into the GPU as well. A miss stores it in both.
        """
        if self.gpu.access(key, size):
            return "gpu"
        return "cpu" if self.cpu.access(key, size) else "miss"
