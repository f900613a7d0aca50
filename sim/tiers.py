"""The two KV tiers as vLLM 0.24 or newer and LMCache 0.5.6's MP server keep them, at concurrency 1.

The rules are read from ``vllm/v1/core`` (block_pool.py, kv_cache_manager.py,
single_type_kv_cache_manager.py) and ``lmcache/v1/distributed`` (l1_manager.py,
eviction_policy/lru.py, storage_controllers/eviction_controller.py);
``tests/live/test_tiers_match_vllm.py`` drives those classes against the ones here.
Everything assumes quiescence: the server has finished one request before the next one arrives.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ALIGN_BYTES = 4096
"""What LMCache rounds every stored object up to (``AddressManager.ALIGN_BYTES``)."""

NULL_BLOCK = 0
"""The id vLLM's ``BlockPool.__init__`` takes out of the pool and never hands to a request."""

POLICIES = ("LRU", "noop")


def align_up(n_bytes: int) -> int:
    """``n_bytes`` rounded up to LMCache's allocation unit."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


class PrefixKeys:
    """Names whole prefixes by one int each: two equal keys mean two equal prefixes, always.

    Exact (a table, not a digest) and one pass over the tokens. The table holds every distinct
    block of tokens seen, so its memory grows with the workload's distinct tokens, not its requests.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block of {block_tokens} tokens; it must hold at least 1")
        self._block_tokens = block_tokens
        self._table: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next = 1  # 0 names the empty prefix

    def of(self, tokens: Sequence[int]) -> list[int]:
        """One key per full block of ``tokens``, in order; a partial last block has none."""
        step, table = self._block_tokens, self._table
        tokens = tuple(tokens)
        keys: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - step + 1, step):
            entry = (parent, tokens[start : start + step])
            key = table.get(entry)
            if key is None:
                key = table[entry] = self.fresh()
            keys.append(key)
            parent = key
        return keys

    def fresh(self) -> int:
        """A key equal to no other: for a block that ends in tokens nobody will ask for again."""
        self._next += 1
        return self._next - 1


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


class HostChunks:
    """LMCache's host store: chunks of equal size in recency order, under watermark eviction.

    ``capacity`` in chunks, 0 = stores nothing. ``watermark`` and ``evict_ratio`` are shares in
    (0, 1]. ``total_bytes`` and ``chunk_bytes`` make the usage ratio exact: LMCache divides used
    bytes by all bytes, and a store is rarely a whole number of chunks; without them the ratio is
    chunks over ``capacity``. Raises ValueError for values that contradict each other.
    """

    def __init__(
        self,
        capacity: int,
        *,
        watermark: float = 0.8,
        evict_ratio: float = 0.2,
        policy: str = "LRU",
        total_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        if capacity < 0:
            raise ValueError(f"a host store of {capacity} chunks; 0 is the smallest")
        for field, share in (("watermark", watermark), ("evict_ratio", evict_ratio)):
            if not 0 < share <= 1:
                raise ValueError(f"{field} is {share}; it must be a share in (0, 1]")
        if policy not in POLICIES:
            raise ValueError(f"eviction policy {policy!r} is not modelled; known: {POLICIES}")
        self.capacity = capacity
        self.evicted = 0
        self._watermark = watermark
        self._evict_ratio = evict_ratio
        self._evicts = policy != "noop"
        self._unit, self._total = _usage_scale(capacity, total_bytes, chunk_bytes)
        self._chunks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def usage(self) -> float:
        """Used share of the store, as ``EvictionController`` computes it; 0 for an empty tier."""
        return len(self._chunks) * self._unit / self._total if self._total else 0.0

    def __len__(self) -> int:
        return len(self._chunks)

    def recency(self) -> tuple[int, ...]:
        """Resident keys, the next to be evicted first."""
        return tuple(self._chunks)

    def longest_hit(self, keys: Iterable[int]) -> int:
        """Chunks in the longest run of leading ``keys`` that are resident."""
        hit = 0
        for key in keys:
            if key not in self._chunks:
                break
            hit += 1
        return hit

    def store(self, keys: Iterable[int]) -> int:
        """Write those of ``keys`` that are not resident; returns how many were written.

        All or nothing, and nothing is evicted to make room (``L1Manager.reserve_write``): a batch
        that does not fit is lost.
        """
        missing = [key for key in keys if key not in self._chunks]
        if len(missing) > self.capacity - len(self._chunks):
            return 0
        for key in missing:
            self._chunks[key] = None
        return len(missing)

    def touch(self, keys: Sequence[int]) -> None:
        """Make the resident ones of ``keys`` the most recent, the first of them most of all.

        LMCache touches in reverse so that a prompt's tail goes before its head; the END_SESSION
        touch comes last and covers every prompt chunk, so it alone decides the order.
        """
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def settle(self) -> int:
        """Run eviction ticks until usage is below the watermark; returns the chunks evicted.

        One tick drops int(objects * ratio), at least 1, from the least recent end
        (``LRUEvictionPolicy.get_eviction_actions``). LMCache ticks once a second; a settled
        server has had all the ticks it needs.
        """
        before = len(self._chunks)
        while self._evicts and self._chunks and self.usage >= self._watermark:
            for _ in range(max(1, int(len(self._chunks) * self._evict_ratio))):
                self._chunks.popitem(last=False)
        gone = before - len(self._chunks)
        self.evicted += gone
        return gone


def _usage_scale(
    capacity: int, total_bytes: int | None, chunk_bytes: int | None
) -> tuple[int, int]:
    """(size of one chunk, size of the store), in bytes, or in chunks when bytes are not known."""
    if total_bytes is None and chunk_bytes is None:
        return 1, capacity
    if total_bytes is None or chunk_bytes is None or chunk_bytes < 1:
        raise ValueError(
            f"total_bytes={total_bytes} with chunk_bytes={chunk_bytes}: an exact usage ratio "
            "needs both, and chunks of at least 1 byte"
        )
    unit = align_up(chunk_bytes)
    if total_bytes // unit != capacity:
        raise ValueError(
            f"a store of {total_bytes} bytes holds {total_bytes // unit} chunks of {unit} aligned "
            f"bytes, not {capacity}"
        )
    return unit, total_bytes
