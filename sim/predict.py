"""What each request's KV will come from, to the token, before any server runs.

Exact for full-attention text models served one request at a time with quiescence in between,
``ignore_eos`` and one prefill step; the rules are those of ``sim.tiers``, vLLM's scheduler and
LMCache's MP connector (``lmcache/integration/vllm/lmcache_mp_connector.py``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.split import TokenSplit
from sim.tiers import GpuPool, HostChunks, PrefixKeys
from sim.workload import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """What the predictor needs to know of one server.

    ``num_gpu_blocks`` includes vLLM's null block. ``host_chunks`` None means no host tier.
    ``host_bytes`` (all of the store) and ``chunk_bytes`` (one chunk, before alignment) make the
    eviction watermark exact to the byte; they must agree with ``host_chunks``.
    """

    block_size: int
    num_gpu_blocks: int
    max_num_batched_tokens: int
    hashless_first: bool = True
    host_chunks: int | None = None
    chunk_tokens: int = 256
    watermark: float = 0.8
    evict_ratio: float = 0.2
    policy: str = "LRU"
    host_bytes: int | None = None
    chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One request's tokens by source, and its chunks at the host tier (0 without one).

    ``hit_chunks``: leading chunks LMCache's lookup finds. ``loaded_chunks``: chunks moved to the
    GPU, whole ones even where the GPU already holds their first blocks, so their tokens may exceed
    ``split.host_loaded``. ``stored_chunks``: chunks newly written.
    """

    split: TokenSplit
    hit_chunks: int
    loaded_chunks: int
    stored_chunks: int


class Predictor:
    """One server's tiers, request by request; ``request`` moves them on, nothing moves them back."""

    def __init__(self, tiers: TierSpec) -> None:
        """Start with both tiers empty. Raises ValueError for a spec no server could have."""
        self._tiers = tiers
        self._keys = PrefixKeys(tiers.block_size)
        self.gpu = GpuPool(tiers.num_gpu_blocks, hashless_first=tiers.hashless_first)
        self.host = _host_store(tiers)

    @property
    def resident_chunks(self) -> int:
        """Chunks in the host tier now."""
        return len(self.host) if self.host is not None else 0

    @property
    def evicted_chunks(self) -> int:
        """Chunks the host tier has dropped since the start."""
        return self.host.evicted if self.host is not None else 0

    def request(
        self, prompt: Sequence[int], output_tokens: int, *, output_ids: Sequence[int] | None = None
    ) -> Prediction:
        """Serve ``prompt`` to its last of ``output_tokens`` tokens and let the server settle.

        ``output_ids`` are the generated ids, when a later prompt repeats them; None means they
        never recur. Raises ValueError, and changes nothing, for a request that cannot be served
        exactly: too many blocks, or a prompt that takes more than one prefill step.
        """
        n_blocks = self._blocks_of(prompt, output_tokens, output_ids)
        block_size = self._tiers.block_size
        # The last generated token never gets a slot: blocks hold prompt + output - 1 tokens.
        known = (*prompt, *(output_ids[:-1] if output_ids is not None else ()))
        keys = self._keys.of(known)
        n_full = (len(prompt) + output_tokens - 1) // block_size
        unknown = [self._keys.fresh() for _ in range(n_full - len(keys))]

        hit_blocks = self.gpu.longest_hit(keys[: (len(prompt) - 1) // block_size])
        blocks = self.gpu.take(hit_blocks, n_blocks)
        self.gpu.name(blocks, [*keys, *unknown])
        self.gpu.free(blocks)
        return self._through_host(len(prompt), keys, gpu_hit=len(hit_blocks) * block_size)

    def _through_host(self, n_prompt: int, keys: list[int], *, gpu_hit: int) -> Prediction:
        if self.host is None:
            return Prediction(TokenSplit(n_prompt, n_prompt - gpu_hit, gpu_hit, 0), 0, 0, 0)
        chunk = self._tiers.chunk_tokens
        per_chunk = chunk // self._tiers.block_size
        # A chunk's key is that of its last block: both name the whole prefix up to that token.
        chunks = keys[per_chunk - 1 : n_prompt // chunk * per_chunk : per_chunk]
        hit = self.host.longest_hit(chunks)
        loaded = max(0, hit * chunk - gpu_hit)
        if hit * chunk == n_prompt:
            loaded = max(0, loaded - 1)  # the last prompt token is computed for its logits
        # Stored from the host's own hit on, so chunks only the GPU still had are written again.
        stored = self.host.store(chunks[hit:])
        self.host.touch(chunks)
        self.host.settle()
        return Prediction(
            TokenSplit(n_prompt, n_prompt - gpu_hit - loaded, gpu_hit, loaded),
            hit_chunks=hit,
            loaded_chunks=hit - gpu_hit // chunk if loaded else 0,
            stored_chunks=stored,
        )

    def _blocks_of(
        self, prompt: Sequence[int], output_tokens: int, output_ids: Sequence[int] | None
    ) -> int:
        """Blocks the request holds at its end, after every reason to refuse it."""
        if not prompt or output_tokens < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with {output_tokens} output tokens; "
                "each must be at least 1"
            )
        if output_ids is not None and len(output_ids) != output_tokens:
            raise ValueError(f"{len(output_ids)} output ids for {output_tokens} output tokens")
        if len(prompt) > self._tiers.max_num_batched_tokens:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_num_batched_tokens is "
                f"{self._tiers.max_num_batched_tokens}: with more than one prefill step the host "
                "tier's eviction timer can fall inside the request, and nothing is exact"
            )
        n_blocks = -(-(len(prompt) + output_tokens - 1) // self._tiers.block_size)
        if n_blocks > self.gpu.usable:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with {output_tokens} output tokens needs "
                f"{n_blocks} blocks of {self._tiers.block_size}; {self.gpu.usable} of "
                f"{self._tiers.num_gpu_blocks} GPU blocks are usable"
            )
        return n_blocks


def predict(requests: Iterable[Request], tiers: TierSpec) -> list[Prediction]:
    """One prediction per request, in order, from an empty server that settles in between.

    Raises ValueError for a request that cannot be served exactly (``Predictor.request``).
    """
    predictor = Predictor(tiers)
    return [predictor.request(r.prompt, r.output_tokens) for r in requests]


def _host_store(tiers: TierSpec) -> HostChunks | None:
    if tiers.host_chunks is None:
        return None
    if tiers.chunk_tokens < 1 or tiers.chunk_tokens % tiers.block_size:
        raise ValueError(
            f"chunks of {tiers.chunk_tokens} tokens are not whole blocks of {tiers.block_size}; "
            "LMCache refuses such a pair"
        )
    return HostChunks(
        tiers.host_chunks,
        watermark=tiers.watermark,
        evict_ratio=tiers.evict_ratio,
        policy=tiers.policy,
        total_bytes=tiers.host_bytes,
        chunk_bytes=tiers.chunk_bytes,
    )
