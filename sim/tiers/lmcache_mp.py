"""LMCache's server in multi-process mode: written through, evicted by a timer.

Read from LMCache 0.5.6: ``v1/distributed/l1_manager.py``, ``eviction_policy/lru.py``,
``storage_controllers/eviction_controller.py`` and ``integration/vllm/lmcache_mp_connector.py``.
Everything assumes quiescence: eviction ticks have run until the store is below its watermark
before the next request arrives. ``tests/live/test_tiers_match_lmcache.py`` drives the real server.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from sim.errors import SpecError
from sim.tiers.host import (
    HostCache,
    HostRequest,
    HostShare,
    NotPredictable,
    align_up,
    leading,
    lmcache_load,
)
from sim.tiers.settings import Policy
from sim.tiers.spec import TierModel, TierSpec

POLICIES = get_args(Policy)


class HostChunks(HostCache):
    """LMCache's host store: chunks of equal size, under watermark eviction.

    ``watermark`` and ``evict_ratio`` are shares in (0, 1]. ``total_bytes`` and ``chunk_bytes``
    make the usage ratio exact: LMCache divides used bytes by all bytes, and a store is rarely a
    whole number of chunks; without them the ratio is chunks over ``capacity``. Raises SpecError
    for values that contradict each other and NotPredictable for a policy that is not modelled.
    """

    def __init__(
        self,
        capacity: int,
        *,
        chunk_tokens: int = 256,
        watermark: float = 0.8,
        evict_ratio: float = 0.2,
        policy: str = "LRU",
        total_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__(capacity, chunk_tokens)
        for field, share in (("watermark", watermark), ("evict_ratio", evict_ratio)):
            if not 0 < share <= 1:
                raise SpecError(f"{field} is {share}; it must be a share in (0, 1]")
        if policy not in POLICIES:
            raise NotPredictable(f"eviction policy {policy!r} is not modelled; known: {POLICIES}")
        self._watermark = watermark
        self._evict_ratio = evict_ratio
        self._evicts = policy != "noop"
        self._unit, self._total = _usage_scale(capacity, total_bytes, chunk_bytes)

    @property
    def usage(self) -> float:
        """Used share of the store, as ``EvictionController`` computes it; 0 for an empty tier."""
        return len(self._chunks) * self._unit / self._total if self._total else 0.0

    def longest_hit(self, keys: Iterable[int]) -> int:
        """Chunks in the longest run of leading ``keys`` that are resident."""
        return leading(keys, self._chunks)

    def check(self, request: HostRequest) -> None:
        """Raise NotPredictable for several prefill steps during which the store may change.

        One STORE a step: with an eviction tick between two of them, or room for one but not the
        other, what is kept depends on timing.
        """
        hit = self.longest_hit(request.chunks)
        loaded = lmcache_load(request, hit, self._chunk_tokens).loaded_tokens
        n_steps = sum(1 for _ in request.prefill_ends(loaded))
        if n_steps == 1:
            return
        after = len(self._chunks) + sum(key not in self._chunks for key in request.chunks[hit:])
        # A store of 0 chunks has no usage: it keeps nothing and evicts nothing.
        usage = after * self._unit / self._total if self._total else 0.0
        if self.capacity and (after > self.capacity or (self._evicts and usage >= self._watermark)):
            raise NotPredictable(
                f"a prompt of {request.n_prompt} tokens is computed in {n_steps} steps of at most "
                f"{request.step_tokens} tokens (max_num_batched_tokens) while the host tier would "
                f"come to {after} of {self.capacity} chunks: its eviction timer can fall between "
                "the steps"
            )

    def serve(self, request: HostRequest) -> HostShare:
        """Lookup, load, store, end of session, and ticks until settled.

        Stored from the host's own hit on, so chunks only the GPU still had are written again
        (``GetStoreMetadata``). Every touch is in reverse, so that a prompt's tail goes before its
        head; the last one, END_SESSION's, covers all its chunks and alone decides the order.
        """
        hit = self.longest_hit(request.chunks)
        stored = self.store(request.chunks[hit:])
        self.touch(request.chunks)
        self.settle()
        return replace(lmcache_load(request, hit, self._chunk_tokens), stored_chunks=stored)

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
        raise SpecError(
            f"total_bytes={total_bytes} with chunk_bytes={chunk_bytes}: an exact usage ratio "
            "needs both, and chunks of at least 1 byte"
        )
    unit = align_up(chunk_bytes)
    if total_bytes // unit != capacity:
        raise SpecError(
            f"a store of {total_bytes} bytes holds {total_bytes // unit} chunks of {unit} aligned "
            f"bytes, not {capacity}"
        )
    return unit, total_bytes


def _open(spec: TierSpec) -> HostCache:
    if spec.block_size == 1:
        # The load is allotted blocks for all but the last token of a prompt found in full, and
        # LMCache 0.5.6 refuses to write a whole chunk into one block less.
        raise NotPredictable(
            "host 'lmcache-mp' with blocks of 1 token: LMCache cannot load a prompt that it "
            "holds in full"
        )
    return HostChunks(
        spec.host_chunks or 0,
        chunk_tokens=spec.chunk_tokens,
        watermark=spec.watermark,
        evict_ratio=spec.evict_ratio,
        policy=spec.policy,
        total_bytes=spec.host_bytes,
        chunk_bytes=spec.chunk_bytes,
    )


MODEL = TierModel(_open, has_watermark=True)
