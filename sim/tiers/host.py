"""What passes between the predictor and a host tier, and what every host tier does alike.

A host tier sees one request at a time: which prompt chunks it has, how much the GPU already
holds, and in which prefill steps the rest is computed. Nothing here depends on an engine's version.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sim.errors import SpecError

ALIGN_BYTES = 4096
"""What LMCache rounds every stored object up to (``AddressManager.ALIGN_BYTES``)."""


class NotPredictable(SpecError):  # noqa: N818 - a verdict on a request, not an accident
    """The server can do this, but not in a way that is the same every time; says why."""


class TicksMatter(NotPredictable):
    """It depends on when a host tier's timer ticks during the request, which nobody can say."""


def align_up(n_bytes: int) -> int:
    """``n_bytes`` rounded up to LMCache's allocation unit."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class HostRequest:
    """One prompt as a host tier sees it.

    ``chunks``: a key per full chunk of the prompt, in order. ``gpu_hit``: prompt tokens the GPU
    holds, whole blocks. ``step_tokens``: the most tokens one prefill step computes
    (``max_num_batched_tokens``). ``ticks``: how often the timer of a host that has one ticks after
    each step and before the next, the last number for all that follow; None: nobody knows.
    """

    n_prompt: int
    chunks: Sequence[int]
    gpu_hit: int
    step_tokens: int
    ticks: Sequence[int] | None = None

    def prefill_ends(self, loaded: int) -> Iterator[tuple[int, int]]:
        """(tokens computed, prompt tokens done) after each prefill step, ``loaded`` from the host.

        A prompt that is there in full still computes its last token.
        """
        done = min(self.gpu_hit + loaded, self.n_prompt - 1)
        while done < self.n_prompt:
            n_new = min(self.step_tokens, self.n_prompt - done)
            done += n_new
            yield n_new, done


@dataclass(frozen=True, slots=True)
class HostShare:
    """What a host tier did for one request.

    ``loaded_tokens``: counted by the scheduler as loaded. ``hit_chunks``: chunks its lookup found.
    ``loaded_chunks`` and ``moved_tokens``: read for the load; LMCache moves whole chunks, so their
    tokens may exceed ``loaded_tokens``. ``stored_chunks``: newly written.
    """

    loaded_tokens: int = 0
    hit_chunks: int = 0
    loaded_chunks: int = 0
    moved_tokens: int = 0
    stored_chunks: int = 0


class HostCache(ABC):
    """A host tier between two requests, settled: its resident chunks in recency order.

    ``capacity`` in chunks, 0 = stores nothing; SpecError for a negative one. ``evicted``: chunks
    dropped since the start.
    """

    def __init__(self, capacity: int, chunk_tokens: int) -> None:
        if capacity < 0:
            raise SpecError(f"a host store of {capacity} chunks; 0 is the smallest")
        self.capacity = capacity
        self.evicted = 0
        self._chunk_tokens = chunk_tokens
        self._chunks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._chunks)

    def recency(self) -> tuple[int, ...]:
        """Resident keys, the next to be evicted first."""
        return tuple(self._chunks)

    def check(self, request: HostRequest) -> None:  # noqa: B027 - most serve every request exactly
        """Raise NotPredictable, and change nothing, where ``serve`` could not be exact."""

    @abstractmethod
    def serve(self, request: HostRequest) -> HostShare:
        """Take ``request`` through lookup, load, store and settling."""

    def touch(self, keys: Sequence[int]) -> None:
        """Make the resident ones of ``keys`` the most recent, the first of them most of all."""
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)


def leading(keys: Iterable[int], resident: Container[int]) -> int:
    """How many of ``keys`` are in ``resident`` before the first one that is not."""
    hit = 0
    for key in keys:
        if key not in resident:
            break
        hit += 1
    return hit


def lmcache_load(request: HostRequest, hit: int, chunk_tokens: int) -> HostShare:
    """What both LMCache connectors load when the lookup found ``hit`` chunks.

    The scheduler counts what the GPU lacks, less the last prompt token, which is computed for its
    logits; whole chunks move, from the one the GPU hit ends in (``get_num_new_matched_tokens``
    and ``start_load_kv`` of vllm_v1_adapter.py, ``GetRetrieveMetadata`` of lmcache_mp_metadata.py).
    """
    missing = hit * chunk_tokens - request.gpu_hit
    if hit * chunk_tokens == request.n_prompt:
        missing -= 1
    if missing <= 0:
        return HostShare(hit_chunks=hit)
    loaded_chunks = hit - request.gpu_hit // chunk_tokens
    return HostShare(missing, hit, loaded_chunks, loaded_chunks * chunk_tokens)
