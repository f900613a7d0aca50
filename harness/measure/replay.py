"""Replay one session's requests, one at a time, each bracketed by two counter scrapes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import httpx

from harness.counters.attribute import Snapshot, delta
from harness.counters.errors import CounterError
from harness.counters.tiers.base import Measured
from harness.errors import MachineError
from harness.measure.answer import StreamResult
from harness.measure.settle import Scraper, Settled
from harness.measure.stream import complete_prompt
from harness.record.journal import JournalWriter
from harness.record.row import NO_CONNECTOR, SCHEMA, Loop, Row
from sim.tiers.settings import TierKind
from sim.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What every row of a session repeats, and the deadlines of its waits in seconds.

    ``kind``, ``chunk_tokens`` and ``chunk_bytes`` are None in an arm without a host tier.
    ``has_events``: somebody listens to vLLM's KV events.
    """

    run: str
    session: str
    order: int
    config: str
    kind: TierKind | None
    connector: str | None
    model_name: str
    chunk_tokens: int | None
    chunk_bytes: int | None
    request_s: float
    settle_s: float
    has_events: bool = False


@dataclass(frozen=True, slots=True)
class Doors:
    """The two ways into a session's servers."""

    client: httpx.Client
    scraper: Scraper


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything known of one request once the servers have settled, or were given up on.

    ``why_not``: why ``measured`` is None. ``named_from``: as in ``harness.counters.events``.
    """

    result: StreamResult
    before: Snapshot | None
    settled: Settled
    measured: Measured | None
    why_not: str | None
    loop: Loop = "serial"
    late_ms: float | None = None
    named_from: int | None = None


def replay(
    workload: Workload,
    context: SessionContext,
    *,
    doors: Doors,
    journal: JournalWriter,
    on_row: Callable[[Row], None],
    check_alive: Callable[[], None],
) -> None:
    """Send every request of ``workload`` in order and journal a row for each.

    The counters must be able to attribute the first complete warm-up request: otherwise the whole
    session could not be, and MachineError says why. ``check_alive`` raises when a server died.
    """
    before: Snapshot | None = fresh(doors.scraper, context)
    last: Outcome | None = None
    attributable = False
    for seq, request in enumerate(workload, start=1):
        outcome = ask(request, context, doors=doors, before=before, last=last,
                      request_id=request_id(context, seq))  # fmt: skip
        row = row_of(request, context, seq=seq, outcome=outcome)
        journal.append(row)
        on_row(row)
        check_alive()
        attributable = attributable or row.is_attributed
        if request.phase == "warmup" and row.complete and not attributable:
            raise not_attributable(context, outcome)
        # None: the row after this one says so; its latency counts all the same.
        before, last = outcome.settled.after or doors.scraper.read_or_none(), outcome


def request_id(context: SessionContext, seq: int) -> str:
    """What our request is called in the server's log and in its KV events."""
    return f"{context.session}-{seq}"


def not_attributable(context: SessionContext, outcome: Outcome) -> MachineError:
    """A session whose first requests cannot be attributed ends here."""
    return MachineError(
        f"{context.session}: the servers' counters cannot attribute a request: {outcome.why_not}",
        hint="install the supported engine versions (make setup): README.md names them",
    )


def fresh(scraper: Scraper, context: SessionContext) -> Snapshot | None:
    """The counters of servers that have answered nothing but the launcher's readiness request."""
    found = scraper.settle(None, deadline_s=context.settle_s)
    if found.unsettled:
        raise MachineError(
            f"{context.session}: the servers are not fresh and idle: {found.unsettled}",
            hint="read the session's server logs; raise deadlines.settle_s on a slow machine",
        )
    return found.after


def ask(
    request: Request,
    context: SessionContext,
    *,
    doors: Doors,
    before: Snapshot | None,
    last: Outcome | None,
    request_id: str,
) -> Outcome:
    """Send one request alone, settle, and attribute it by the counters around it.

    ``last``: what became of the request before. ``request_id``: it is also the ``session_id``.
    """
    result = complete_prompt(
        doors.client,
        model=context.model_name,
        prompt=request.prompt,
        output_tokens=request.output_tokens,
        deadline_s=context.request_s,
        request_id=request_id,
        session_id=request_id if context.has_events else None,
    )
    settled = (
        doors.scraper.settle(before, deadline_s=context.settle_s)
        if before
        else Settled(None, 0.0, "the counters could not be read before the request")
    )
    if last and last.settled.unsettled:
        if not last.result.complete:
            # A server still busy with the request that failed bills its rest to this one.
            error = "the server was not idle when this was sent: the request before had failed"
            result = replace(result, complete=False, error=result.error or error)
        reason = f"the request before had not settled: {last.settled.unsettled}"
        return Outcome(result, before, settled, None, reason)
    measured, why_not = _attribute(request, context, before=before, settled=settled)
    return Outcome(result, before, settled, measured, why_not)


def _attribute(
    request: Request, context: SessionContext, *, before: Snapshot | None, settled: Settled
) -> tuple[Measured | None, str | None]:
    """The request's sources, or why they cannot be known."""
    if before is None or settled.after is None or settled.unsettled:
        return None, f"not settled: {settled.unsettled}"
    try:
        measured = delta(
            before,
            settled.after,
            prompt_tokens=len(request.prompt),
            chunk_tokens=context.chunk_tokens,
            chunk_bytes=context.chunk_bytes,
        )
    except CounterError as error:
        return None, f"{type(error).__name__}: {error}"
    return measured, None


def row_of(request: Request, context: SessionContext, *, seq: int, outcome: Outcome) -> Row:
    """The journal's line of one request."""
    result, settled, measured = outcome.result, outcome.settled, outcome.measured
    split = measured.split if measured else None
    return Row(
        config=context.config,
        pass_name=request.pass_name,
        doc=request.doc,
        doc_tokens=request.doc_tokens,
        ttft_ms=result.ttft_ms if result.complete else None,
        total_ms=result.total_ms if result.complete else None,
        schema_version=SCHEMA,
        run=context.run,
        session=context.session,
        order=context.order,
        connector=context.connector or NO_CONNECTOR,
        seq=seq,
        phase=request.phase,
        prompt_tokens=len(request.prompt),
        output_tokens=result.output_tokens,
        computed=split.computed if split else None,
        gpu_hit=split.gpu_hit if split else None,
        host_loaded=split.host_loaded if split else None,
        loaded_bytes=measured.loaded_bytes if measured else None,
        loaded_source=measured.loaded_source if measured else None,
        stored_tokens=measured.stored_tokens if measured else None,
        chunk_tokens=context.chunk_tokens,
        chunk_bytes=context.chunk_bytes,
        cached_tokens=result.cached_tokens,
        disagreement=_disagreement(measured, result.cached_tokens) if measured else None,
        server_ttft_ms=result.server_ttft_ms,
        queue_ms=result.queue_ms,
        loop=outcome.loop,
        late_ms=outcome.late_ms,
        attributed_by=_attributed_by(outcome),
        named_from=outcome.named_from,
        first_byte_ms=result.first_byte_ms,
        settle_ms=settled.settle_ms,
        conn_reused=result.conn_reused,
        finish_reason=result.finish_reason,
        complete=result.complete,
        error=result.error,
        unattributed=outcome.why_not,
        output_sha256=result.output_sha256,
        counters_before=outcome.before.flat() if outcome.before else None,
        counters_after=settled.after.flat() if settled.after else None,
        sent_unix_ns=result.sent_unix_ns,
    )


def _attributed_by(outcome: Outcome) -> Literal["counters", "events"] | None:
    if outcome.measured is None:
        return None
    return "counters" if outcome.loop == "serial" else "events"


def _disagreement(measured: Measured, cached_tokens: int | None) -> str | None:
    """Where the counters contradict each other, or the answer's own count of cached tokens."""
    from_caches = measured.split.gpu_hit + measured.split.host_loaded
    # vLLM leaves the answer's count out when it is 0 (prompt_tokens_details, PR #44475).
    if measured.disagreement is None and cached_tokens not in (None, from_caches):
        return f"the answer says {cached_tokens} cached prompt tokens, the counters {from_caches}"
    return measured.disagreement
