"""What each request's KV will come from, to the token, before any server runs.

Exact for full-attention text models served one request at a time with quiescence in between and
token-id prompts; what is not exact is refused with a reason. The rules are those of ``sim.tiers.spec``
and vLLM's scheduler (``vllm/v1/core/sched/scheduler.py``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.errors import SpecError
from sim.split import TokenSplit
from sim.tiers.host import HostRequest, HostShare, NotPredictable
from sim.tiers.prefix_keys import PrefixKeys
from sim.tiers.registry import open_gpu, open_host
from sim.tiers.spec import TierSpec
from sim.workload import Request

__all__ = ["NotPredictable", "Prediction", "Predictor", "TierSpec", "predict"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One request's tokens by source, and its chunks at the host tier (0 without one).

    ``hit_chunks``: leading chunks the host's lookup finds. ``loaded_chunks``: chunks read for the
    GPU. ``stored_chunks``: chunks newly written. ``moved_tokens``: tokens of KV copied to the GPU;
    LMCache moves whole chunks even where the GPU already holds their first blocks, so it may
    exceed ``split.host_loaded``.
    """

    split: TokenSplit
    hit_chunks: int
    loaded_chunks: int
    stored_chunks: int
    moved_tokens: int = 0


class Predictor:
    """One server's tiers, request by request; ``request`` moves them on, nothing back."""

    def __init__(self, tiers: TierSpec) -> None:
        """Start with both tiers empty.

        Raises SpecError for a spec no server could have, NotPredictable for one not modelled.
        """
        if tiers.max_num_batched_tokens < 1:
            raise SpecError(
                f"max_num_batched_tokens is {tiers.max_num_batched_tokens}; it must be at least 1"
            )
        self.tiers = tiers
        self._keys = PrefixKeys(tiers.block_size)
        self.gpu = open_gpu(tiers)
        self.host = open_host(tiers)
        # Chunks of whole blocks are named by their last block; others by their own tokens.
        is_whole = self.host is None or tiers.chunk_tokens % tiers.block_size == 0
        self._chunk_keys = None if is_whole else PrefixKeys(tiers.chunk_tokens)

    @property
    def resident_chunks(self) -> int:
        """Chunks in the host tier now."""
        return len(self.host) if self.host is not None else 0

    @property
    def evicted_chunks(self) -> int:
        """Chunks the host tier has dropped since the start."""
        return self.host.evicted if self.host is not None else 0

    def request(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        *,
        output_ids: Sequence[int] | None = None,
        stopped: bool = False,
        ticks: Sequence[int] | None = None,
    ) -> Prediction:
        """Serve ``prompt`` to its last of ``output_tokens`` tokens and let the server settle.

        ``output_ids`` are the generated ids, when a later prompt repeats them; None means they
        never recur. ``stopped``: a stop token ended it before its max_tokens, not their number.
        ``ticks``: those of the host tier's timer while it is computed (``HostRequest``).
        Raises SpecError for a request the server could not serve and NotPredictable for one whose
        end is a matter of timing; neither changes anything.
        """
        if output_ids is not None and len(output_ids) != output_tokens:
            raise SpecError(f"{len(output_ids)} output ids for {output_tokens} output tokens")
        n_blocks = self._blocks_of(len(prompt), output_tokens, stopped=stopped)
        # The last generated token never gets a slot: blocks hold prompt + output - 1 tokens.
        known = prompt if output_ids is None else (*prompt, *output_ids[:-1])
        keys = self._keys.of(known)
        own = self._chunk_keys
        chunks = self._block_chunks(keys, len(prompt)) if own is None else own.of(prompt)
        return self._serve(keys, chunks, (len(prompt), output_tokens, n_blocks), ticks)

    def request_named(
        self,
        keys: Sequence[int],
        n_prompt: int,
        output_tokens: int,
        *,
        chunks: Sequence[int] = (),
        ticks: Sequence[int] | None = None,
    ) -> Prediction:
        """As ``request``, for a prompt of ``n_prompt`` tokens whose leading blocks have ``keys``.

        Two requests have as many leading keys in common as they have leading full blocks; a block
        without a key never comes again. Keys are below 0, so that none is one of ``request``'s.
        ``chunks`` are those of the leading chunks, which only matter where a chunk is no whole
        number of blocks.
        """
        n_blocks = self._blocks_of(n_prompt, output_tokens, stopped=False)
        n_full = n_prompt // self.tiers.block_size
        named = [*keys, *(self._keys.fresh() for _ in range(n_full - len(keys)))]
        own = self._chunk_keys
        if own is None:
            chunks = self._block_chunks(named, n_prompt)
        else:
            n_own = n_prompt // self.tiers.chunk_tokens - len(chunks)
            chunks = [*chunks, *(own.fresh() for _ in range(n_own))]
        return self._serve(named, chunks, (n_prompt, output_tokens, n_blocks), ticks)

    def _serve(
        self,
        keys: Sequence[int],
        chunks: Sequence[int],
        sizes: tuple[int, int, int],
        ticks: Sequence[int] | None,
    ) -> Prediction:
        """Serve a request of ``sizes``: prompt tokens, output tokens, blocks at its end.

        ``keys`` are those of its full blocks, as far as they are known.
        """
        n_prompt, output_tokens, n_blocks = sizes
        block_size = self.tiers.block_size
        hit_blocks = self.gpu.longest_hit(keys[: reusable_blocks(n_prompt, block_size)])
        seen_by_host = HostRequest(
            n_prompt,
            chunks,
            len(hit_blocks) * block_size,
            self.tiers.max_num_batched_tokens,
            ticks,
        )
        if self.host is not None:
            self.host.check(seen_by_host)

        blocks = self.gpu.take(hit_blocks, n_blocks)
        if self.tiers.prefix_caching:  # what has no name is never hit
            n_full = (n_prompt + output_tokens - 1) // block_size
            unknown = [self._keys.fresh() for _ in range(n_full - len(keys))]
            self.gpu.name(blocks, [*keys, *unknown])
        self.gpu.free(blocks)
        share = self.host.serve(seen_by_host) if self.host is not None else HostShare()
        return _prediction(seen_by_host, share)

    def _block_chunks(self, keys: Sequence[int], n_prompt: int) -> Sequence[int]:
        """A key per full prompt chunk: that of its last block, which names the same prefix."""
        if self.host is None:
            return ()
        chunk = self.tiers.chunk_tokens
        per_chunk = chunk // self.tiers.block_size
        return keys[per_chunk - 1 : n_prompt // chunk * per_chunk : per_chunk]

    def _blocks_of(self, n_prompt: int, output_tokens: int, *, stopped: bool) -> int:
        """Blocks the request holds at its end, after every reason to refuse it."""
        if n_prompt < 1 or output_tokens < 1:
            raise SpecError(
                f"a prompt of {n_prompt} tokens with {output_tokens} output tokens; "
                "each must be at least 1"
            )
        n_slots = n_prompt + output_tokens - 1
        n_blocks = -(-n_slots // self.tiers.block_size)
        if n_blocks > self.gpu.usable:
            raise SpecError(
                f"a prompt of {n_prompt} tokens with {output_tokens} output tokens needs "
                f"{n_blocks} blocks of {self.tiers.block_size}; {self.gpu.usable} of "
                f"{self.tiers.num_gpu_blocks} GPU blocks are usable"
            )
        if stopped and self.tiers.async_scheduling:
            # The step after the stop token is already scheduled when the token is seen.
            n_blocks = -(-(n_slots + 1) // self.tiers.block_size)
            if n_blocks > self.gpu.usable:
                raise NotPredictable(
                    f"the step scheduled beyond the stop token needs a block more than the "
                    f"{self.gpu.usable} usable GPU blocks: the request would be preempted"
                )
        return n_blocks


def reusable_blocks(n_prompt: int, block_size: int) -> int:
    """The most blocks of a prompt that a GPU hit may cover.

    The last prompt token is always computed, for its logits, so a fully cached prompt of whole
    blocks loses a block (``KVCacheManager.get_computed_blocks``: max_cache_hit_length).
    """
    return (n_prompt - 1) // block_size


def predict(requests: Iterable[Request], tiers: TierSpec) -> list[Prediction]:
    """One prediction per request, in order, from an empty server that settles in between.

    Raises what ``Predictor.request`` raises.
    """
    predictor = Predictor(tiers)
    return [predictor.request(r.prompt, r.output_tokens) for r in requests]


def _prediction(request: HostRequest, share: HostShare) -> Prediction:
    computed = request.n_prompt - request.gpu_hit - share.loaded_tokens
    return Prediction(
        TokenSplit(request.n_prompt, computed, request.gpu_hit, share.loaded_tokens),
        share.hit_chunks,
        share.loaded_chunks,
        share.stored_chunks,
        share.moved_tokens,
    )
