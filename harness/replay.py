"""Replay one session's requests, one at a time, each bracketed by two counter scrapes."""

from collections.abc import Callable
from dataclasses import dataclass

import httpx

from harness.counters import CounterError, Measured, Snapshot, delta
from harness.errors import MachineError
from harness.journal import SCHEMA, JournalWriter, Row
from harness.settle import Scraper, Settled
from harness.stream import StreamResult, complete_prompt
from sim.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What every row of a session repeats, and the deadlines of its waits in seconds.

    ``chunk_tokens`` and ``chunk_bytes`` are None in an arm without a host tier.
    """

    run: str
    session: str
    order: int
    config: str
    model_name: str
    chunk_tokens: int | None
    chunk_bytes: int | None
    request_s: float
    settle_s: float


def replay(
    workload: Workload,
    context: SessionContext,
    *,
    client: httpx.Client,
    scraper: Scraper,
    journal: JournalWriter,
    on_row: Callable[[Row], None],
    check_alive: Callable[[], None],
) -> None:
    """Send every request of ``workload`` in order and journal a row for each.

    The counters must be able to attribute the first complete warm-up request: otherwise the whole
    session could not be, and MachineError says why. ``check_alive`` raises when a server died.
    """
    fresh = scraper.settle(None, deadline_s=context.settle_s)
    if fresh.unsettled:
        raise MachineError(
            f"{context.session}: the servers are not fresh and idle: {fresh.unsettled}",
            hint="read the session's server logs; raise deadlines.settle_s on a slow machine",
        )
    before: Snapshot | None = fresh.after
    unsettled: str | None = None
    attributable = False
    for seq, request in enumerate(workload.requests, start=1):
        result = complete_prompt(
            client,
            model=context.model_name,
            prompt=request.prompt,
            output_tokens=request.output_tokens,
            deadline_s=context.request_s,
            request_id=f"{context.session}-{seq}",
        )
        settled = (
            scraper.settle(before, deadline_s=context.settle_s)
            if before
            else Settled(None, 0.0, "the counters could not be read before the request")
        )
        measured, why_not = _attribute(request, context, before, settled, unsettled)
        row = _row(request, context, seq=seq, result=result, before=before, settled=settled,
                   measured=measured, why_not=why_not)  # fmt: skip
        journal.append(row)
        on_row(row)
        check_alive()
        attributable = attributable or row.is_attributed
        if request.phase == "warmup" and result.complete and not attributable:
            raise MachineError(
                f"{context.session}: the servers' counters cannot attribute a request: {why_not}",
                hint="`kvcliff doctor` lists the counters this vLLM and LMCache publish",
            )
        before, unsettled = settled.after or _read_or_none(scraper), settled.unsettled


def _read_or_none(scraper: Scraper) -> Snapshot | None:
    try:
        return scraper.read()
    except CounterError:
        return None  # the row after this one says so; its latency counts all the same


def _attribute(
    request: Request,
    context: SessionContext,
    before: Snapshot | None,
    settled: Settled,
    unsettled_before: str | None,
) -> tuple[Measured | None, str | None]:
    """The request's sources, or why they cannot be known."""
    if unsettled_before:
        return None, f"the request before had not settled: {unsettled_before}"
    if before is None or settled.after is None or settled.unsettled:
        return None, f"not settled: {settled.unsettled}"
    try:
        return (
            delta(
                before,
                settled.after,
                prompt_tokens=len(request.prompt),
                chunk_tokens=context.chunk_tokens,
                chunk_bytes=context.chunk_bytes,
            ),
            None,
        )
    except CounterError as error:
        return None, f"{type(error).__name__}: {error}"


def _row(
    request: Request,
    context: SessionContext,
    *,
    seq: int,
    result: StreamResult,
    before: Snapshot | None,
    settled: Settled,
    measured: Measured | None,
    why_not: str | None,
) -> Row:
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
        disagreement=measured.disagreement if measured else None,
        server_ttft_ms=result.server_ttft_ms,
        first_byte_ms=result.first_byte_ms,
        settle_ms=settled.settle_ms,
        conn_reused=result.conn_reused,
        finish_reason=result.finish_reason,
        complete=result.complete,
        error=result.error,
        unattributed=why_not,
        output_sha256=result.output_sha256,
        counters_before=before.flat() if before else None,
        counters_after=settled.after.flat() if settled.after else None,
        sent_unix_ns=result.sent_unix_ns,
    )
