"""A request trace in memory: which KV blocks each prompt consists of, and when it arrives."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SpecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
IdArray = NDArray[np.signedinteger[Any]]

MOST_NS = 2**62
"""Times stay below this (146 years; since 1970: until 2116), so that two can be added."""

MOST_TRACE_TOKENS = 2**61
"""The tokens of a trace stay below this, so that sums and differences fit 64 bits."""


class TraceError(SpecError):
    """A trace that cannot be used: what is wrong, and in which file, line and field."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What is known about R requests besides their blocks, in the order of the trace.

    A request arrives ``time_ns`` nanoseconds after its session starts. Formats without sessions
    make each request its own. Lengths are tokens; ``input_tokens`` may end in a partial block.
    ``starts_known``: False where the format has no session starts (all are 0 until given one).
    ``kv_bytes_per_token``: where the trace itself says it.
    """

    time_ns: Ints
    session: Ints
    session_start_ns: Ints
    input_tokens: Ints
    output_tokens: Ints
    block_tokens: int
    source: str
    starts_known: bool = True
    kv_bytes_per_token: float | None = None

    def __len__(self) -> int:
        return len(self.time_ns)

    def arrivals_ns(self, time_scale: float = 1.0) -> Ints:
        """Arrival of each request; ``time_scale`` stretches the sessions' starts, not their pace.

        The first session starts when it did. Raises SpecError where 64 bits do not hold the times.
        """
        starts = self.session_start_ns
        if time_scale != 1 and len(starts):
            first = starts.min()
            with np.errstate(over="ignore"):
                stretched = (starts - first) * time_scale
            if not stretched.max() < MOST_NS:
                raise SpecError(
                    f"a time scale of {time_scale:g} puts sessions {stretched.max() / 1e9:g} s "
                    f"after the first; {MOST_NS / 1e9:g} s is the most"
                )
            starts = first + np.rint(stretched).astype(np.int64)
        return starts[self.session] + self.time_ns

    def order(self, time_scale: float = 1.0) -> Ints:
        """Request numbers by arrival; requests of the same nanosecond keep the trace's order."""
        return np.argsort(self.arrivals_ns(time_scale), kind="stable")

    def started_over(self, spread_s: float, seed: int) -> "Requests":
        """The same sessions, each starting at a random moment of ``[0, spread_s)``.

        The moments come from Python's ``random.Random(seed)``, one per session in their order, so
        they are the same on every machine and version. Raises SpecError for a spread too long.
        """
        if not spread_s * 1e9 < MOST_NS:
            raise SpecError(f"a spread of {spread_s:g} s; {MOST_NS / 1e9:g} s is the most")
        draw = random.Random(seed)
        starts = [int(draw.random() * spread_s * 1e9) for _ in self.session_start_ns]
        return replace(self, session_start_ns=np.array(starts, dtype=np.int64), starts_known=True)


@dataclass(frozen=True, slots=True)
class Trace:
    """R requests as block ids: request r has ``ids[offsets[r]:offsets[r + 1]]``, first block first.

    Two requests share a block when they share it and everything before it; an id alone means
    nothing (vLLM and LMCache hash a block together with its prefix).
    """

    requests: Requests
    ids: IdArray
    offsets: Ints

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


def check_totals(requests: Requests, blocks: Ints, where: Callable[[int], str]) -> None:
    """Raise TraceError if sums of tokens might not fit 64 bits; ``where`` names a request.

    In floats, whose rounding is nothing beside the factor of 4 that is left.
    """
    for name, tokens in (
        ("prompt", requests.input_tokens.astype(np.float64)),
        ("generated", requests.output_tokens.astype(np.float64)),
        ("listed block", blocks * float(requests.block_tokens)),
    ):
        if tokens.sum() >= MOST_TRACE_TOKENS:
            raise TraceError(
                f"{where(int(tokens.argmax()))}: {tokens.max():.3g} {name} tokens, of "
                f"{tokens.sum():.3g} in the trace; it must stay below {float(MOST_TRACE_TOKENS):.3g}"
            )


def sized(n: int) -> int:
    """``n``, the length of an array; MemoryError where numpy, having none so long, says ValueError."""
    if n >= 2**60:
        raise MemoryError(f"an array of {n:.3g} numbers")
    return n


def offsets_of(counts: Ints) -> Ints:
    """Where each of consecutive runs of ``counts`` items starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
