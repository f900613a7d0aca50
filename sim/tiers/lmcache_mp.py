"""LMCache's server in multi-process mode: written through, evicted by a timer.

Read from LMCache 0.5.6: ``v1/distributed/l1_manager.py``, ``eviction_policy/lru.py``,
``storage_controllers/eviction_controller.py`` and ``integration/vllm/lmcache_mp_connector.py``.
Everything assumes quiescence: eviction ticks have run until the store is below its watermark
before the next request arrives. ``tests/live/test_tiers_match_lmcache.py`` drives the real server.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import get_args

from sim.errors import SpecError
from sim.tiers.host import (
    HostCache,
    HostRequest,
    HostShare,
    NotPredictable,
    TicksMatter,
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
        """Raise TicksMatter for several prefill steps where it matters when a tick comes.

        Ticks do nothing below the watermark. Above it, one between two STOREs changes what the
        next one finds; one behind the last, while END_SESSION has yet to touch the prompt, matters
        where it reaches chunks of the prompt itself. A prompt of one step is taken to end at once.
        """
        hit, _, batches = self.plan(request, self._chunks)
        if request.ticks is not None or len(batches) == 1:
            return
        n = len(self._chunks)
        for step, batch in enumerate(batches):
            n_new = sum(key not in self._chunks for key in batch)
            if step and n_new and self.is_above(n):
                raise self._timing(request, n)
            n += n_new if n_new <= self.capacity - n else 0
        if self.is_above(n) and not self._takes_others(request.chunks, hit, n):
            raise self._timing(request, n)

    def serve(self, request: HostRequest) -> HostShare:
        """Lookup, load, a STORE a prefill step, end of session, and ticks until settled.

        Stored from the host's own hit on, so chunks only the GPU still had are written again
        (``GetStoreMetadata``). Every touch is in reverse, so that a prompt's tail goes before its
        head: the hit's at the lookup, each batch's when it is written, and END_SESSION's of all.
        """
        hit, share, batches = self.plan(request, self._chunks)
        self.touch(request.chunks[:hit])
        stored = 0
        for step, batch in enumerate(batches):
            stored += self.store(batch)
            if request.ticks:
                self.tick(request.ticks[min(step, len(request.ticks) - 1)])
        self.touch(request.chunks)
        self.settle()
        return replace(share, stored_chunks=stored)

    def plan(
        self, request: HostRequest, resident: Container[int]
    ) -> tuple[int, HostShare, list[Sequence[int]]]:
        """(chunks hit, the load, what each prefill step stores) with ``resident`` chunks."""
        hit = leading(request.chunks, resident)
        share = lmcache_load(request, hit, self._chunk_tokens)
        ends = [hit]
        for _, done in request.prefill_ends(share.loaded_tokens):
            ends.append(max(hit, done // self._chunk_tokens))
        return hit, share, [request.chunks[a:b] for a, b in pairwise(ends)]

    def store(self, keys: Iterable[int]) -> int:
        """Write those of ``keys`` that are not resident; returns how many were written.

        All or nothing, and nothing is evicted to make room (``L1Manager.reserve_write``): a batch
        that does not fit is lost.
        """
        missing = [key for key in keys if key not in self._chunks]
        if len(missing) > self.capacity - len(self._chunks):
            return 0
        for key in reversed(missing):
            self._chunks[key] = None
        return len(missing)

    def settle(self) -> int:
        """Ticks until usage is below the watermark; returns the chunks evicted.

        LMCache ticks once a second; a settled server has had all the ticks it needs.
        """
        return self.tick(len(self._chunks))

    def tick(self, times: int = 1) -> int:
        """The eviction loop ``times`` over; returns the chunks evicted.

        At or above the watermark it drops int(objects * ratio), at least 1, from the least recent
        end (``LRUEvictionPolicy.get_eviction_actions``).
        """
        before = len(self._chunks)
        while times and self.is_above(len(self._chunks)):
            for _ in range(self.n_evicted(len(self._chunks))):
                self._chunks.popitem(last=False)
            times -= 1
        gone = before - len(self._chunks)
        self.evicted += gone
        return gone

    def is_above(self, n_chunks: int) -> bool:
        """Whether a tick evicts from a store of ``n_chunks``; a store of no size has no usage."""
        usage = n_chunks * self._unit / self._total if self._total else 0.0
        return self._evicts and n_chunks > 0 and usage >= self._watermark

    def n_evicted(self, n_chunks: int) -> int:
        """Chunks that a tick drops of ``n_chunks``."""
        return max(1, int(n_chunks * self._evict_ratio))

    def _takes_others(self, prompt: Sequence[int], hit: int, n_chunks: int) -> bool:
        """Whether settling from ``n_chunks`` leaves alone what ``prompt`` has, touched or not."""
        n_gone = 0
        while self.is_above(n_chunks - n_gone):
            n_gone += self.n_evicted(n_chunks - n_gone)
        touched = set(prompt[:hit])
        oldest = list(islice((key for key in self._chunks if key not in touched), n_gone))
        return len(oldest) == n_gone and set(prompt).isdisjoint(oldest)

    def _timing(self, request: HostRequest, n_chunks: int) -> TicksMatter:
        return TicksMatter(
            f"a prompt of {request.n_prompt} tokens, computed in steps of at most "
            f"{request.step_tokens} (max_num_batched_tokens), brings the host tier to {n_chunks} of "
            f"{self.capacity} chunks before it has ended: what is then kept depends on when the "
            "eviction timer ticks"
        )


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
