"""vLLM's own ``OffloadingConnector`` with its CPU manager and LRU policy.

Read from vLLM 0.31 to 0.33: ``v1/kv_offload/cpu/manager.py``, ``cpu/policies/lru.py`` and
``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``. A chunk is a whole number of
blocks. ``tests/live/test_tiers_match_native.py`` drives the real classes against this one.
"""

from collections.abc import Sequence
from itertools import islice

from sim.tiers.host import HostCache, HostRequest, HostShare, NotPredictable, leading
from sim.tiers.spec import Recency, TierModel, TierSpec, engine_rules, refuse_policy


class NativeChunks(HostCache):
    """A store evicts what it needs, at once and all or nothing.

    ``recency`` says when a request's chunks become the most recent: ``finish`` once, when the
    request has finished (vLLM 0.31 and 0.32, ``LRUCachePolicy.on_request_finished``); ``access``
    at every load and offer, too (≥ 0.33, ``on_request_access``).
    """

    def __init__(self, capacity: int, chunk_tokens: int, *, recency: Recency) -> None:
        super().__init__(capacity, chunk_tokens)
        self._at_access = recency == "access"

    def check(self, request: HostRequest) -> None:
        """Raise NotPredictable for a prompt that does not fit the store as a whole.

        Its later chunks would have to evict its own earlier ones, which are unevictable until a
        worker reports them written: timing decides.
        """
        if len(request.chunks) > self.capacity:
            raise NotPredictable(
                f"the prompt has {len(request.chunks)} full chunks and the native host tier holds "
                f"{self.capacity}: what it keeps of a prompt larger than itself depends on when "
                "the copies end"
            )
        if request.n_prompt == self._chunk_tokens == 1 and request.chunks[0] in self._chunks:
            # Loaded in full and less its last token it has 0 computed tokens, which vLLM's
            # scheduler takes for a new request (seen with 0.32): it looks up and loads for ever.
            raise NotPredictable("a prompt of 1 token in chunks of 1 token is loaded without end")

    def serve(self, request: HostRequest) -> HostShare:
        """Lookup, load, an offer after each prefill step, and the request's end.

        A load starts the offers behind itself; without one they start at chunk 0, so chunks only
        the GPU still had are written again (``OffloadingConnectorScheduler._build_store_jobs``).
        """
        share = self._load(request)
        first = request.gpu_hit // self._chunk_tokens
        seen = list(request.chunks[first : first + share.loaded_chunks])
        if self._at_access:
            self.touch(seen)
        offered = first + share.loaded_chunks if share.loaded_chunks else 0
        stored = 0
        for _, done in request.prefill_ends(share.loaded_tokens):
            full = done // self._chunk_tokens
            if full > offered:
                offer = request.chunks[offered:full]
                seen += offer
                if self._at_access:
                    self.touch(seen)
                stored += self._store(offer)
                offered = full
        self.touch(seen)
        return HostShare(
            share.loaded_tokens, share.hit_chunks, share.loaded_chunks, share.moved_tokens, stored
        )

    def _load(self, request: HostRequest) -> HostShare:
        """``_lookup_complete_chunks``: asked from the chunk the GPU hit ends in.

        Less than a chunk's worth is not loaded. A prompt found in full counts as loaded to its
        last token, although that one is computed again: the scheduler reports 0 computed.
        """
        size = self._chunk_tokens
        first = request.gpu_hit // size
        hit = leading(request.chunks[first:], self._chunks)
        tokens = (first + hit) * size - request.gpu_hit
        if tokens < size:
            return HostShare(hit_chunks=hit)
        return HostShare(tokens, hit, loaded_chunks=hit, moved_tokens=tokens)

    def _store(self, offer: Sequence[int]) -> int:
        """``CPUOffloadingManager.prepare_store``: what was offered is not evicted for it."""
        missing = [key for key in offer if key not in self._chunks]
        n_evict = len(missing) + len(self._chunks) - self.capacity
        if n_evict > 0:
            kept = set(offer)
            # ``check`` has made sure that there are enough.
            victims = list(islice((key for key in self._chunks if key not in kept), n_evict))
            for key in victims:
                del self._chunks[key]
            self.evicted += len(victims)
        self._chunks.update(dict.fromkeys(missing))
        return len(missing)


def _open(spec: TierSpec) -> HostCache:
    refuse_policy(spec)
    recency = spec.native_recency or engine_rules(spec.engine).native_recency
    if recency is None:
        raise NotPredictable(
            f"host 'native' of vLLM {spec.engine} is not modelled; 0.31 is the oldest that is"
        )
    return NativeChunks(spec.host_chunks or 0, spec.chunk_tokens, recency=recency)


MODEL = TierModel(_open)
