"""A request trace in memory: which KV blocks each prompt consists of, and when it arrives."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
IdArray = NDArray[np.signedinteger[Any]]


class TraceError(ValueError):
    """A trace that cannot be used: what is wrong, and in which file, line and field."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What is known about R requests besides their blocks, in the order of the trace.

    A request arrives ``time_s`` seconds after its session starts. Formats without sessions make
    each request its own. Lengths are tokens; ``input_tokens`` may end in a partial block.
    ``starts_known``: False where the format has no session starts (all are 0 until given one).
    ``kv_bytes_per_token``: where the trace itself says it.
    """

    time_s: Floats
    session: Ints
    session_start_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    block_tokens: int
    source: str
    starts_known: bool = True
    kv_bytes_per_token: float | None = None

    def __len__(self) -> int:
        return len(self.time_s)

    def arrivals_s(self, time_scale: float = 1.0) -> Floats:
        """Arrival of each request; ``time_scale`` stretches the sessions' starts, not their pace."""
        return self.session_start_s[self.session] * time_scale + self.time_s

    def order(self, time_scale: float = 1.0) -> Ints:
        """Request numbers by arrival; requests of the same microsecond keep the trace's order.

        In whole microseconds, which is what a compiled trace keeps: its order is the same.
        """
        starts = whole_us(self.session_start_s * time_scale)
        return np.argsort(starts[self.session] + whole_us(self.time_s), kind="stable")

    def started_over(self, spread_s: float, seed: int) -> "Requests":
        """The same sessions, each starting at a random moment of ``[0, spread_s)``.

        The moments come from Python's ``random.Random(seed)``, one per session in their order, so
        they are the same on every machine and version.
        """
        draw = random.Random(seed)
        starts = [draw.random() * spread_s for _ in self.session_start_s]
        return replace(self, session_start_s=np.array(starts, dtype=np.float64), starts_known=True)


@dataclass(frozen=True, slots=True)
class Trace:
    """R requests as block ids: request r has ``ids[offsets[r]:offsets[r + 1]]``, first block first.

    Two requests share a block when they share it and everything before it; an id alone means
    nothing (vLLM and LMCache hash a block together with its prefix).
    """

    requests: Requests
    ids: IdArray
    offsets: Ints

    @property
    def n_accesses(self) -> int:
        """Blocks of all prompts together."""
        return len(self.ids)

    def path(self, r: int) -> list[int]:
        """Block ids of request ``r``."""
        ids: list[int] = self.ids[self.offsets[r] : self.offsets[r + 1]].tolist()
        return ids

    def without_partial_blocks(self) -> "Trace":
        """The same requests without their last block where the prompt does not fill it.

        vLLM never caches such a block. Traces differ: Mooncake lists it, WEKA does not.
        """
        full = self.requests.input_tokens // self.requests.block_tokens
        counts = np.minimum(np.diff(self.offsets), full)
        keep = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        kept = self.ids[keep < np.repeat(counts, np.diff(self.offsets))]
        return Trace(self.requests, kept, offsets_of(counts))


def whole_us(seconds: Floats) -> Ints:
    """``seconds`` in whole microseconds; ValueError where 64 bits do not hold them."""
    if len(seconds) and not np.abs(seconds).max() < 2**62 / 1e6:
        raise ValueError(
            f"a time of {np.abs(seconds).max():g} s is too large: is the timestamp's unit right?"
        )
    return np.rint(seconds * 1e6).astype(np.int64)


def offsets_of(counts: Ints) -> Ints:
    """Where each of consecutive runs of ``counts`` items starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
