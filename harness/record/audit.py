"""What in a row contradicts itself, the row before it or its own raw counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.counters.attribute import derive
from harness.counters.errors import CounterError
from harness.counters.events import chunks_loaded, split_by_events
from harness.counters.passes import PassRequest, check_pass
from harness.counters.tiers.registry import STATE_NAMES, tier_of
from harness.plan.plan import session_name
from harness.record.row import NUMBERS, Row
from sim.split import TokenSplit
from sim.workload import WARMUP_PASS


def contradiction(row: Row, last: Row | None) -> str | None:
    """What in ``row`` contradicts itself or ``last``, the row before it; None when nothing does."""
    if problem := _in_answer(row) or _in_sources(row) or _in_place(row, last):
        return problem
    if last is None:
        unit, n_bytes = row.chunk_tokens, row.chunk_bytes
        if n_bytes is not None and (not unit or n_bytes < unit or n_bytes % unit):
            return f"chunk_bytes {n_bytes} is no whole number of bytes for each of {unit} tokens"
        return None
    if problem := _in_counters(row, last):
        return problem
    if row.connector != last.connector:  # of the server, which is one, as is its tier's unit
        return f"connector is {row.connector!r} after {last.connector!r}"
    if row.chunk_tokens != last.chunk_tokens or row.chunk_bytes != last.chunk_bytes:
        return (
            f"chunk_tokens {row.chunk_tokens}, chunk_bytes {row.chunk_bytes} after "
            f"{last.chunk_tokens}, {last.chunk_bytes}"
        )
    return None


def _in_counters(row: Row, last: Row) -> str | None:
    """The counters go on where those of the row before ended; a pass in flight shares them."""
    if row.loop != "serial" and row.pass_name == last.pass_name:
        if (row.counters_before, row.counters_after) != (last.counters_before, last.counters_after):
            return "the counters are not those of the row before, which was in flight in its pass"
        return None
    if None not in (last.counters_after, row.counters_before) and (
        last.counters_after != row.counters_before
    ):
        return "counters_before are not the counters_after of the row before"
    return None


def _in_place(row: Row, last: Row | None) -> str | None:
    """A row counts for the session, arm, phase and place it names."""
    if last is None:
        if row.seq != 1:
            return f"seq is {row.seq} in the first row"
    elif (row.seq, row.order) != (last.seq + 1, last.order):
        return f"seq {row.seq}, order {row.order} after seq {last.seq}, order {last.order}"
    is_checked = last is not None and (row.session, row.config) == (last.session, last.config)
    if not is_checked and row.session != session_name(row.order, row.config):
        return f"session {row.session!r} is not that of order {row.order}, config {row.config!r}"
    if (row.phase == "warmup") != (row.pass_name == WARMUP_PASS):
        return f"phase is {row.phase!r} in pass {row.pass_name!r}"
    if row.doc_tokens > row.prompt_tokens:
        return f"doc_tokens {row.doc_tokens} is more than prompt_tokens {row.prompt_tokens}"
    return None


def _in_answer(row: Row) -> str | None:
    """What the answer's own fields contradict."""
    needed = (row.ttft_ms, row.total_ms, row.finish_reason)
    if row.complete and (
        row.error is not None or None in needed or not row.output_tokens or not row.output_sha256
    ):
        return (
            "complete is true beside an error, or without times, finish_reason, output tokens or "
            "output digest"
        )
    if not row.complete and (row.error is None or row.ttft_ms is not None):
        return "complete is false without an error, or beside a ttft_ms"
    if row.ttft_ms is None:
        return None
    if row.total_ms is not None and row.ttft_ms > row.total_ms:
        return f"ttft_ms {row.ttft_ms} is more than total_ms {row.total_ms}"
    if row.first_byte_ms is not None and row.first_byte_ms > row.ttft_ms:
        return f"first_byte_ms {row.first_byte_ms} is more than ttft_ms {row.ttft_ms}"
    return None


def _in_sources(row: Row) -> str | None:
    """What the token sources contradict."""
    if row.is_attributed != (row.unattributed is None):
        return "unattributed must say why exactly when the token sources are null"
    if row.is_attributed != (row.attributed_by is not None):
        return "attributed_by must be given exactly when the token sources are"
    if row.attributed_by == "counters" and row.loop != "serial":
        return "attributed_by is 'counters', which cannot tell requests in flight apart"
    if row.loop == "serial" and row.late_ms is not None:
        return f"late_ms is {row.late_ms} of a request that was due at no time"
    if row.loaded_bytes is not None and row.loaded_source is None:
        return "loaded_bytes without a loaded_source"
    cached = row.cached_tokens
    from_caches = (row.gpu_hit or 0) + (row.host_loaded or 0)
    if row.is_attributed and row.disagreement is None and cached not in (None, from_caches):
        return f"cached_tokens is {cached} beside {from_caches} tokens from caches, unexplained"
    return None


Derived = tuple[int | None, ...]
"""The ``NUMBERS`` of a row by its raw counters."""

_MOST_KEPT = 10_000


def unlike_counters(row: Row, kept: dict[Any, Derived]) -> str | None:
    """What in ``row`` does not follow from its own raw counters; None when everything does.

    ``kept``: what was derived for earlier rows. ``derive`` reads how far each counter moved, and
    states as they are, so rows that agree in these are derived once: it takes 15 µs a row.
    """
    if not row.is_attributed:
        return None
    if row.attributed_by == "events":
        return _unlike_events(row)
    before, after = row.counters_before, row.counters_after
    if before is None or after is None:
        return "token sources without the counters they are from"
    alike: Any = None
    if before.keys() == after.keys():
        moved = [v if n in STATE_NAMES else v - before[n] for n, v in after.items()]
        alike = (*moved, *after, row.prompt_tokens, row.chunk_tokens, row.chunk_bytes)
    derived = kept.get(alike)
    if derived is None:
        try:
            derived = _derived(row, before, after)
        except CounterError as error:
            return str(error)
        if alike is not None and len(kept) < _MOST_KEPT:
            kept[alike] = derived
    for name, found in zip(NUMBERS, derived, strict=True):
        if (said := getattr(row, name)) != found:
            return f"{name} is {said}, but the row's own counters say {found}"
    return None


def _unlike_events(row: Row) -> str | None:
    """As ``unlike_counters`` for sources by events; what they add up to is for ``PassSums``."""
    try:
        split = split_by_events(row.prompt_tokens, row.cached_tokens or 0, row.named_from)
    except CounterError as error:
        return str(error)
    unit, n_bytes = row.chunk_tokens, row.chunk_bytes
    if split.host_loaded and not unit:
        return f"host_loaded is {split.host_loaded} without a host tier"
    loaded = chunks_loaded(split, unit) * n_bytes if unit and n_bytes else None
    derived = (split.computed, split.gpu_hit, split.host_loaded, None, loaded)
    for name, found in zip(NUMBERS, derived, strict=True):
        if (said := getattr(row, name)) != found:
            return f"{name} is {said}, but cached_tokens and named_from say {found}"
    return None


@dataclass(slots=True)
class PassSums:
    """The rows of a pass in flight, until it is over and must add up to its counters."""

    _last: Row | None = None
    _requests: list[PassRequest] = field(default_factory=list)

    def add(self, row: Row) -> str | None:
        """Take the next row of the journal; what is wrong with the pass that it ends, if any."""
        last = self._last
        is_next = last is not None and last.pass_name != row.pass_name
        problem = self.end() if is_next else None
        if row.loop != "serial":
            self._last = row
            self._requests.append(as_pass_request(row))
        return problem

    @property
    def is_cut_short(self) -> bool:
        """Whether the counters of the pass have more requests than it has rows."""
        row = self._last
        if row is None or row.counters_before is None or row.counters_after is None:
            return False
        finished = [
            counters.get("finished", 0) for counters in (row.counters_before, row.counters_after)
        ]
        return finished[1] - finished[0] > len(self._requests)

    def end(self) -> str | None:
        """What is wrong with the pass that ends here, if there was one."""
        last, requests = self._last, self._requests
        self._last, self._requests = None, []
        if last is None or all(request.split is None for request in requests):
            return None
        if last.counters_before is None or last.counters_after is None:
            return f"pass {last.pass_name}: token sources without the counters they add up to"
        try:
            check_pass(last.counters_before, last.counters_after, requests)
        except CounterError as error:
            return f"pass {last.pass_name}: {error}"
        return None


def as_pass_request(row: Row) -> PassRequest:
    """What of a row its pass must add up."""
    if row.computed is None or row.gpu_hit is None or row.host_loaded is None:
        return PassRequest(row.prompt_tokens, None)
    split = TokenSplit(row.prompt_tokens, row.computed, row.gpu_hit, row.host_loaded)
    loaded = chunks_loaded(split, row.chunk_tokens) if row.chunk_tokens else None
    return PassRequest(row.prompt_tokens, split, loaded)


def _derived(row: Row, before: Mapping[str, int], after: Mapping[str, int]) -> Derived:
    if row.chunk_tokens is None and tier_of(after) is not None:
        raise CounterError("chunk_tokens is None but the counters include a host tier")
    measured = derive(
        before,
        after,
        prompt_tokens=row.prompt_tokens,
        chunk_tokens=row.chunk_tokens,
        chunk_bytes=row.chunk_bytes,
    )
    split = measured.split
    return (
        split.computed,
        split.gpu_hit,
        split.host_loaded,
        measured.stored_tokens,
        measured.loaded_bytes,
    )
