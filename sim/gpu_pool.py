"""vLLM's GPU block pool, block by block, in the order ``vllm/v1/core`` keeps it.

The rules are read from block_pool.py, kv_cache_manager.py and single_type_kv_cache_manager.py;
``tests/live/test_tiers_match_vllm.py`` drives those classes against the one here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""The id vLLM's ``BlockPool.__init__`` takes out of the pool and never hands to a request."""


class GpuPool:
    """vLLM's GPU block pool: physical blocks in a queue, whose head is reused first.

    A request's life is ``longest_hit`` → ``take`` → ``name`` → ``free``, one request at a time.
    ``num_gpu_blocks`` includes the null block, as vLLM counts. ``hashless_first`` is the free rule
    of vLLM ≥ 0.24 (PR #42656); False is that of ≤ 0.23, which appends everything.
    """

    def __init__(self, num_gpu_blocks: int, *, hashless_first: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(
                f"{num_gpu_blocks} GPU blocks leave none usable; one of them is vLLM's null block"
            )
        self.usable = num_gpu_blocks - 1
        self._hashless_first = hashless_first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(NULL_BLOCK + 1, num_gpu_blocks)
        )
        self._key_of: dict[int, int] = {}
        # vLLM does not de-duplicate: a key may sit on several blocks, and the first named is the
        # one hit (BlockHashToBlockMap.get_one_block). The inner dict is an ordered set.
        self._blocks_of: dict[int, dict[int, None]] = {}

    @property
    def n_free(self) -> int:
        """Blocks no request holds, cached ones included."""
        return len(self._free)

    def free_order(self) -> tuple[int, ...]:
        """Ids of the free blocks, the next one to be reused first."""
        return tuple(self._free)

    def hashed(self) -> dict[int, int]:
        """Key of every block that has one, by block id."""
        return dict(self._key_of)

    def longest_hit(self, keys: Iterable[int]) -> list[int]:
        """Blocks of the longest run of leading ``keys`` that are cached, in prefix order.

        The caller caps ``keys`` at floor((prompt - 1) / block): the last prompt token is always
        computed, so a fully cached aligned prompt loses a whole block
        (``KVCacheManager.get_computed_blocks``).
        """
        blocks: list[int] = []
        for key in keys:
            holders = self._blocks_of.get(key)
            if holders is None:
                break
            blocks.append(next(iter(holders)))
        return blocks

    def take(self, hit: Sequence[int], n_blocks: int) -> list[int]:
        """The ``n_blocks`` blocks a request holds: ``hit`` first, then blocks from the queue's head.

        A block taken from the head forgets its key. Raises ValueError, and changes nothing, when
        the pool cannot supply them.
        """
        n_new = n_blocks - len(hit)
        if not 0 <= n_new <= self.n_free - len(hit):
            raise ValueError(
                f"a request of {n_blocks} blocks, {len(hit)} of them cached, does not fit: "
                f"{self.n_free} of {self.usable} usable GPU blocks are free"
            )
        # Hits leave the queue before anything is popped, so a request cannot evict its own prefix.
        for block in hit:
            del self._free[block]
        new = [self._free.popitem(last=False)[0] for _ in range(n_new)]
        for block in new:
            self._forget(block)
        return [*hit, *new]

    def name(self, blocks: Iterable[int], keys: Iterable[int]) -> None:
        """Give ``blocks``, now full, their ``keys``; pairs up to the shorter of the two."""
        for block, key in zip(blocks, keys, strict=False):
            if block not in self._key_of:
                self._key_of[block] = key
                self._blocks_of.setdefault(key, {})[block] = None

    def free(self, blocks: Sequence[int]) -> None:
        """Give back a request's ``blocks``, in prefix order: the tail will be evicted first.

        Blocks without a key can never be hit, so vLLM ≥ 0.24 puts them at the head
        (``BlockPool.free_blocks``: prepend the un-hashed, append the hashed).
        """
        backwards = list(reversed(blocks))
        if self._hashless_first:
            for block in reversed([b for b in backwards if b not in self._key_of]):
                self._free[block] = None
                self._free.move_to_end(block, last=False)
            backwards = [b for b in backwards if b in self._key_of]
        for block in backwards:
            self._free[block] = None

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is None:
            return
        holders = self._blocks_of[key]
        del holders[block]
        if not holders:
            del self._blocks_of[key]
