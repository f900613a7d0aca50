"""LMCache inside the vLLM process: ``LMCacheConnectorV1`` with its local CPU backend.

Read from LMCache 0.5.6: ``integration/vllm/vllm_v1_adapter.py``, ``v1/cache_engine.py``,
``v1/storage_backend/local_cpu_backend.py`` and ``cache_policy/lru.py``. Everything happens inside
the step that needs it, so no timer and no settling decides what survives.
``tests/live/test_tiers_match_lmcache.py`` drives the real engine against this class.
"""

from collections.abc import Sequence
from dataclasses import replace

from sim.tiers.host import HostCache, HostRequest, HostShare, leading, lmcache_load
from sim.tiers.spec import TierModel, TierSpec, refuse_policy


class InProcessChunks(HostCache):
    """A store that finds no room evicts one chunk at a time."""

    def serve(self, request: HostRequest) -> HostShare:
        """Lookup, load, and a store after each prefill step.

        The lookup is the only touch (``LMCacheEngine.lookup`` → ``touch_cache``), last chunk first.
        Its pins are released before the step's store (``start_load_kv``, ``wait_for_save``), so
        they protect nothing here.
        """
        hit = leading(request.chunks, self._chunks)
        self.touch(request.chunks[:hit])
        share = lmcache_load(request, hit, self._chunk_tokens)
        stored, saved = 0, hit
        for step, (n_new, done) in enumerate(request.prefill_ends(share.loaded_tokens)):
            if step > 0 and n_new == 1:
                continue  # taken for decode and never saved (``RequestTracker.update``)
            full = done // self._chunk_tokens
            if full > saved:
                stored += self._store(request.chunks[saved:full])
                saved = full
        return replace(share, stored_chunks=stored)

    def _store(self, keys: Sequence[int]) -> int:
        """Write ``keys`` in prefix order; returns how many are new.

        ``LMCacheEngine.store`` first takes a buffer for every key, resident or not, evicting the
        least recent chunk whenever none is free, and keeps the first ones when nothing is left to
        evict. Only then does it insert, so a prompt's *first* new chunk is its least recent.
        """
        n_buffers = 0
        for _ in keys:
            if len(self._chunks) + n_buffers >= self.capacity:
                if not self._chunks:
                    break
                self._chunks.popitem(last=False)
                self.evicted += 1
            n_buffers += 1
        missing = [key for key in keys[:n_buffers] if key not in self._chunks]
        self._chunks.update(dict.fromkeys(missing))
        return len(missing)


def _open(spec: TierSpec) -> HostCache:
    refuse_policy(spec)
    return InProcessChunks(spec.host_chunks or 0, spec.chunk_tokens)


# Its copies go token by token (``ReqMeta.slot_mapping``).
MODEL = TierModel(_open, takes_any_chunk=True)
