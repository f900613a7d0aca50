"""Where a request's prompt tokens came from by vLLM's KV events, with any number in flight.

A request names its full blocks once: those it computed or loaded, as soon as they are its own, and
none that it found on the GPU. So the tokens before the first block it names are its GPU hit, and
the answer's own count of cached tokens has the rest (vLLM 0.32 ``BlockPool.cache_full_blocks``; the
events name the request by its ``session_id`` since 0.30).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from harness.counters.errors import CounterError
from sim.split import TokenSplit


class LostEvents(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """Events are missing, so what a request named is not known."""


class Preempted(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """The request was put back into the queue after it had named blocks."""


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(_Batch)


@dataclass(slots=True)
class KvEvents:
    """What one server published so far; ``lost``: how many batches never came.

    ``block_size`` in tokens. Batches are numbered from 0 at the server's start.
    """

    block_size: int
    lost: int = 0
    _next_seq: int = 0
    _positions: dict[bytes | int, int] = field(default_factory=dict)
    _named: dict[str, list[int | None]] = field(default_factory=dict)

    def add(self, seq: bytes, payload: bytes) -> None:
        """Take the next batch: its number, 8 bytes, and its events in MessagePack.

        Raises CounterError for what is no batch of a server with one kind of layers.
        """
        number = int.from_bytes(seq, "big")
        if number < self._next_seq:
            raise CounterError(
                f"KV events {number} came after {self._next_seq - 1}: a second server publishes",
                hint="data parallel ranks publish each for itself; use one",
            )
        self.lost += number - self._next_seq
        self._next_seq = number + 1
        try:
            batch = _DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            raise CounterError(
                f"KV events {number} are not as vLLM 0.32 writes them: {error}"
            ) from None
        for event in batch.events:
            if isinstance(event, _Stored) and event.medium in (None, "GPU"):
                self._store(event)

    def _store(self, event: _Stored) -> None:
        if event.group_idx:
            raise CounterError(
                f"KV events of layer group {event.group_idx}: requests of hybrid models are not "
                "attributed under load"
            )
        if event.block_size != self.block_size:
            raise CounterError(
                f"KV events of blocks of {event.block_size} tokens, not {self.block_size}"
            )
        parent = event.parent_block_hash
        before = -1 if parent is None else self._positions.get(parent)
        named = self._named.setdefault(event.session_id or "", [])
        if before is None:  # the parent was named in a batch that is lost
            named.append(None)
            return
        for position, block in enumerate(event.block_hashes, start=before + 1):
            self._positions[block] = position
            named.append(position)

    def take(self, session_id: str) -> list[int | None]:
        """Positions of the blocks the request named, in order; None: not known. Once only."""
        return self._named.pop(session_id, [])


def named_from(positions: Sequence[int | None], block_size: int) -> int | None:
    """Tokens before the first block that was named; None where none was, or it is not known."""
    first = positions[0] if positions else None
    return None if first is None else first * block_size


def split_by_events(prompt_tokens: int, cached_tokens: int, named_from: int | None) -> TokenSplit:
    """The rule. ``cached_tokens``: the answer's own count; ``named_from``: of this module.

    Raises CounterError where the count is more than the prompt.
    """
    if cached_tokens > prompt_tokens:
        raise CounterError(
            f"the answer counts {cached_tokens} cached tokens of a prompt of {prompt_tokens}"
        )
    gpu_hit = cached_tokens if named_from is None else min(cached_tokens, named_from)
    return TokenSplit(
        prompt_tokens, prompt_tokens - cached_tokens, gpu_hit, cached_tokens - gpu_hit
    )


def check_named(
    split: TokenSplit, positions: Sequence[int | None], *, block_size: int, unit_tokens: int | None
) -> None:
    """Raise unless the blocks a request named are exactly those that ``split`` leaves to it.

    ``unit_tokens``: what the host tier keeps as one; None without a tier. Blocks behind the prompt
    are the answer's. Raises Preempted, LostEvents or CounterError.
    """
    known = [position for position in positions if position is not None]
    n_blocks = split.prompt_tokens // block_size
    in_prompt = [position for position in known if position < n_blocks]
    if len(set(known)) < len(known):
        raise Preempted(
            "the request named its blocks twice: it was preempted and admitted anew",
            hint="give the server more KV blocks, or fewer requests at once",
        )
    expected = list(range(split.gpu_hit // block_size, n_blocks))
    if len(known) < len(positions) or sorted(in_prompt) != expected:
        raise LostEvents(
            f"the KV events name {len(in_prompt)} of the {len(expected)} blocks the request must "
            f"have named, of {n_blocks} in its prompt"
        )
    if not split.host_loaded:
        return
    if unit_tokens is None:
        raise CounterError(
            f"{split.host_loaded} cached tokens that were not on the GPU, and no host tier"
        )
    end = split.gpu_hit + split.host_loaded
    if end % unit_tokens and end != split.prompt_tokens - 1:
        raise CounterError(
            f"the load ends at token {end}, which is no end of a unit of {unit_tokens} tokens"
        )


def chunks_loaded(split: TokenSplit, unit_tokens: int) -> int:
    """Units a load moved: whole ones, from the one in which the GPU hit ends.

    LMCache's ``GetRetrieveMetadata``; of vLLM's own tiers a unit is a block.
    """
    if not split.host_loaded:
        return 0
    end = split.gpu_hit + split.host_loaded
    return -(-end // unit_tokens) - split.gpu_hit // unit_tokens
