"""vLLM's GPU block pool, block by block, in the order ``vllm/v1/core`` keeps it.

The rules are read from block_pool.py, kv_cache_manager.py and single_type_kv_cache_manager.py;
``tests/live/test_tiers_match_vllm.py`` drives those classes against the one here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sim.errors import SpecError

NULL_BLOCK = 0
"""The id vLLM's ``BlockPool.__init__`` takes out of the pool and never hands to a request."""


def usable_tokens(num_gpu_blocks: int, block_size: int) -> int:
    """Tokens that a GPU tier of so many blocks holds: one of them is the null block."""
    return (num_gpu_blocks - 1) * block_size


class GpuPool:
    """vLLM's GPU block pool: physical blocks in a queue, whose head is reused first.

    A request's life is ``longest_hit`` → ``take`` → ``name`` → ``free``, one request at a time.
    ``num_gpu_blocks`` includes the null block, as vLLM counts; time and memory go with the blocks
    used, however many there are. ``hashless_first`` is the free rule of vLLM ≥ 0.24 (PR #42656);
    False is that of ≤ 0.23, which appends everything.
    """

    def __init__(self, num_gpu_blocks: int, *, hashless_first: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise SpecError(
                f"{num_gpu_blocks} GPU blocks leave none usable; one of them is vLLM's null block"
            )
        self.usable = num_gpu_blocks - 1
        self._hashless_first = hashless_first
        # The queue from its head: blocks put back in front (a stack, its last is the head), those
        # never used, in id order, and those put back at the end.
        self._prepended: list[int] = []
        self._never_used = range(NULL_BLOCK + 1, num_gpu_blocks)
        self._appended: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, int] = {}
        # vLLM does not de-duplicate: a key may sit on several blocks, and the first named is the
        # one hit (BlockHashToBlockMap). Few do, so the later ones are kept apart, as ordered sets.
        self._block_of: dict[int, int] = {}
        self._later_blocks_of: dict[int, dict[int, None]] = {}

    @property
    def n_free(self) -> int:
        """Blocks no request holds, cached ones included."""
        return len(self._prepended) + len(self._never_used) + len(self._appended)

    def free_order(self) -> tuple[int, ...]:
        """Ids of the free blocks, the next one to be reused first."""
        return (*reversed(self._prepended), *self._never_used, *self._appended)

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
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, hit: Sequence[int], n_blocks: int) -> list[int]:
        """The ``n_blocks`` blocks a request holds: ``hit`` first, then from the queue's head.

        A block taken from the head forgets its key. Raises SpecError, and changes nothing, when
        the pool cannot supply them.
        """
        n_new = n_blocks - len(hit)
        if not 0 <= n_new <= self.n_free - len(hit):
            raise SpecError(
                f"a request of {n_blocks} blocks, {len(hit)} of them cached, does not fit: "
                f"{self.n_free} of {self.usable} usable GPU blocks are free"
            )
        # Hits leave the queue before anything is popped, so a request cannot evict its own prefix.
        for block in hit:  # they have a key, and such blocks are only ever put back at the end
            del self._appended[block]
        return [*hit, *self._pop(n_new)]

    def name(self, blocks: Iterable[int], keys: Iterable[int]) -> None:
        """Give ``blocks``, now full, their ``keys``; pairs up to the shorter of the two."""
        for block, key in zip(blocks, keys, strict=False):
            if block not in self._key_of:
                self._key_of[block] = key
                if self._block_of.setdefault(key, block) != block:
                    self._later_blocks_of.setdefault(key, {})[block] = None

    def free(self, blocks: Sequence[int]) -> None:
        """Give back a request's ``blocks``, in prefix order: the tail will be evicted first.

        Blocks without a key can never be hit, so vLLM ≥ 0.24 puts them at the head
        (``BlockPool.free_blocks``: prepend the un-hashed, append the hashed).
        """
        appended = blocks
        if self._hashless_first:
            self._prepended += [block for block in blocks if block not in self._key_of]
            appended = [block for block in blocks if block in self._key_of]
        for block in reversed(appended):
            self._appended[block] = None

    def _pop(self, n: int) -> list[int]:
        """``n`` blocks from the queue's head, their keys forgotten; there must be as many."""
        popped = [self._prepended.pop() for _ in range(min(n, len(self._prepended)))]
        n_unused = n - len(popped)
        popped += self._never_used[:n_unused]
        self._never_used = self._never_used[n_unused:]
        for _ in range(n - len(popped)):
            block, _ = self._appended.popitem(last=False)
            self._forget(block)
            popped.append(block)
        return popped

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is None:
            return
        later = self._later_blocks_of.get(key)
        if later is None:
            del self._block_of[key]
            return
        if self._block_of[key] == block:
            block = self._block_of[key] = next(iter(later))
        del later[block]
        if not later:
            del self._later_blocks_of[key]
