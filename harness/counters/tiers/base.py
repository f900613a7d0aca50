"""What every kind of host tier says of its counters: which they are, when at rest, what they mean.

Each tier counts something else: LMCache's server chunks found and written, vLLM's own offloading
bytes copied, its simple offload blocks loaded. LMCache inside vLLM counts nothing in time, but what
it loads follows from the tokens vLLM counts. What no counter tells stays None.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from harness.counters.errors import CounterError, ForeignTraffic
from harness.counters.pages import HostPages, Samples
from servers.metrics import Series
from sim.split import TokenSplit


@dataclass(frozen=True, slots=True)
class Measured:
    """What the counters say one request did. None: not measured (host fields: no host tier).

    ``loaded_bytes``: what moved host to GPU, whole chunks; ``loaded_source`` says from which
    counter. ``stored_tokens``: what became resident in the host tier. ``chunk_bytes``: bytes of
    one chunk, measured from the tier's state if it holds any. ``disagreement``: how vLLM's ledger
    and the tier's contradict each other; None if they agree.
    """

    split: TokenSplit
    loaded_bytes: int | None = None
    loaded_source: str | None = None
    stored_tokens: int | None = None
    chunk_bytes: int | None = None
    disagreement: str | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The tier's unit, a chunk: ``tokens``, and ``n_bytes`` where they are known."""

    tokens: int
    n_bytes: int | None

    def bytes_of(self, n_chunks: int) -> int | None:
        """Bytes of ``n_chunks``; no chunks have none, whatever the unit."""
        if n_chunks == 0:
            return 0
        return None if self.n_bytes is None else n_chunks * self.n_bytes


def require_one(count: int, what: str, unit: str) -> None:
    """Raise unless exactly one happened between the readings."""
    if count > 1:
        raise ForeignTraffic(
            f"{what} {count} {unit} where we sent 1",
            hint="another client uses this server; give the run a server of its own",
        )
    if count < 1:
        raise CounterError(f"{what} no {unit} between the readings, expected 1")


@dataclass(frozen=True, slots=True)
class Asked:
    """How many requests a settle waits for: ``least`` were answered in full, ``most`` were sent.

    One whose answer broke may have been counted or not.
    """

    least: int
    most: int

    def check(self, n: int, *, what: str, missing: str) -> None:
        """``n`` of them were counted: NotYetError with ``missing`` for too few, HopelessError with
        ``what`` for too many."""
        if n < 0 or n > self.most:
            raise HopelessError(f"{what} moved by {n} where we sent {self.most}")
        if n < self.least:
            raise NotYetError(missing if self.most == 1 else f"{missing}: {n} of {self.least}")


ONE_REQUEST = Asked(1, 1)


class HopelessError(Exception):
    """A condition that no further waiting can mend."""


class NotYetError(Exception):
    """A settle condition that does not hold yet."""


def wait_if(reason: str | None) -> None:
    """NotYetError with ``reason``, when there is one."""
    if reason is not None:
        raise NotYetError(reason)


@dataclass(frozen=True, slots=True)
class HostReading:
    """One reading of a tier's own page: counters by our names, and the samples they come from."""

    counters: dict[str, int]
    samples: Samples


class Rest(ABC):
    """The rest of one tier after what was asked; asked again and again until it holds."""

    @abstractmethod
    def check(
        self,
        vllm: Samples,
        counters: Mapping[str, int],
        pages: HostPages | None,
        before: Mapping[str, int],
    ) -> HostReading | None:
        """The settled reading of the tier's own page, None where vLLM's has everything.

        ``vllm``, ``counters``: vLLM's page and its counters. ``before``: the tier's counters before
        the request, empty for a fresh server. Raises NotYetError while it does not rest,
        HopelessError where waiting cannot help, MissingSeries for what is not exported.
        """


class CountedTier(ABC):
    """One kind of host tier in the counters.

    ``witness``: a name that its readings have from the first one on, and no other kind's.
    ``vllm_series``, ``host_series``: its counters on vLLM's page and on its own. ``gauges``: of
    either, read live and kept in no journal. ``state``: our names for live state kept beside the
    counters, which may go down. ``refused``: its counter of chunks there was no room for, where it
    has one. ``loaded_sources``: its words for what ``loaded_bytes`` follow from. ``has_pages``: it
    has a page of its own.
    """

    witness: str
    vllm_series: tuple[Series, ...] = ()
    host_series: tuple[Series, ...] = ()
    gauges: tuple[Series, ...] = ()
    state: tuple[str, ...] = ()
    refused: str | None = None
    loaded_sources: tuple[str, ...] = ()
    has_pages: bool = False

    def chunk_bytes(self, counters: Mapping[str, int]) -> int | None:
        """Bytes of one chunk by a reading's live state; None where that does not tell."""
        return None

    def read(self, pages: HostPages) -> HostReading:
        """One reading of the tier's own page, settled or not; only where ``has_pages``."""
        raise NotImplementedError(f"{type(self).__name__} has no page of its own")

    @abstractmethod
    def rest(self, model_name: str, asked: Asked) -> Rest:
        """What must hold before its counters are final, after ``asked``."""

    @abstractmethod
    def measured(self, gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
        """``gpu`` with what the tier did, from the differences ``moved`` of all counters."""
