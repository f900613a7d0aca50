"""A session under load: each pass with several requests in flight, attributed by KV events.

Between two passes the servers come to rest, and what the requests of the pass are said to have done
must add up to what the counters moved by, or none of it counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

from harness.counters.attribute import Snapshot
from harness.counters.errors import CounterError
from harness.counters.events import (
    KvEvents,
    LostEvents,
    Preempted,
    check_named,
    chunks_loaded,
    named_from,
    split_by_events,
)
from harness.counters.passes import PassRequest, check_pass
from harness.counters.tiers.base import Asked, Measured
from harness.counters.tiers.registry import BY_EVENTS
from harness.errors import MachineError
from harness.measure.in_flight import Sent, Target, Turn, send_all
from harness.measure.kv_events import EventSocket
from harness.measure.replay import (
    Doors,
    Outcome,
    SessionContext,
    ask,
    fresh,
    not_attributable,
    request_id,
    row_of,
)
from harness.measure.settle import Settled
from harness.plan.load import LoadSection
from harness.record.journal import JournalWriter
from harness.record.row import Loop, Row
from sim.split import TokenSplit
from sim.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a session under load has beyond every session. ``seed``: of the arrivals."""

    load: LoadSection
    seed: int
    base_url: str
    block_size: int
    is_caching: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of one request of a pass before the pass is checked as a whole."""

    split: TokenSplit | None
    named_from: int | None
    why_not: str | None  # why its row has no sources, though ``split`` may be known


@dataclass(slots=True)
class LoadedSession:
    """One session's requests: the warm-up alone, one by one, then pass by pass under load."""

    context: SessionContext
    load: LoadContext
    doors: Doors
    socket: EventSocket
    journal: JournalWriter
    on_row: Callable[[Row], None]
    check_alive: Callable[[], None]
    _events: KvEvents = field(init=False)
    _seq: int = 0

    def __post_init__(self) -> None:
        self._events = KvEvents(self.load.block_size)

    def run(self, workload: Workload) -> None:
        """Send every request and journal a row for each.

        MachineError where the counters cannot attribute a warm-up request, or the events say
        something else of it: then neither could be trusted in the passes.
        """
        before = self._warm_up([r for r in workload if r.phase == "warmup"])
        measured = (r for r in workload if r.phase == "measure")
        for name, requests in groupby(measured, key=attrgetter("pass_name")):
            before = self._pass(str(name), list(requests), before)

    def _warm_up(self, requests: Sequence[Request]) -> Snapshot | None:
        before, last = fresh(self.doors.scraper, self.context), None
        for request in requests:
            name = self._next_id()
            last = ask(request, self.context, doors=self.doors, before=before, last=last,
                       request_id=name)  # fmt: skip
            if last.result.complete and last.measured is None:
                raise not_attributable(self.context, last)
            last = self._as_events_say(last, request, name)
            self._write([row_of(request, self.context, seq=self._seq, outcome=last)])
            before = last.settled.after or self.doors.scraper.read_or_none()
        return before

    def _as_events_say(self, outcome: Outcome, request: Request, name: str) -> Outcome:
        """``outcome`` with what the events say; MachineError unless that is what the counters do."""
        self._drain()
        found = self._find(request, name, outcome.result.cached_tokens, outcome.result.complete)
        by_counters = outcome.measured.split if outcome.measured else None
        if by_counters is not None and found.split != by_counters:
            raise MachineError(
                f"{self.context.session}: a request sent alone is {by_counters} by the counters, "
                f"and by the KV events {found.split or found.why_not}",
                hint="sources under load would be wrong; take [load] out of the plan",
            )
        return replace(outcome, named_from=found.named_from)

    def _pass(
        self, name: str, requests: Sequence[Request], before: Snapshot | None
    ) -> Snapshot | None:
        ids = [self._next_id() for _ in requests]
        first_seq = self._seq - len(requests) + 1
        lost_before = self._events.lost
        sent = send_all(
            self._turns(name, requests, ids),
            Target(self.load.base_url, self.context.model_name, self.context.request_s),
            workers=min(self._most_in_flight, len(requests)),
            think_s=self.load.load.think_s,
            check_alive=self.check_alive,
        )
        settled = self._settle(before, sent)
        self._drain()
        found = [
            self._find(request, request_id, each.result.cached_tokens, each.result.complete)
            for request, request_id, each in zip(requests, ids, sent, strict=True)
        ]
        why_none = self._whole_pass(before, settled, requests, found, lost_before)
        outcomes = self._outcomes(before, settled, sent, found, why_none)
        self._write(
            [
                row_of(request, self.context, seq=seq, outcome=outcome)
                for seq, (request, outcome) in enumerate(
                    zip(requests, outcomes, strict=True), start=first_seq
                )
            ]
        )
        return settled.after or self.doors.scraper.read_or_none()

    def _turns(self, name: str, requests: Sequence[Request], ids: Sequence[str]) -> list[Turn]:
        load = self.load.load
        if load.rate is None:
            return [Turn(request, each) for request, each in zip(requests, ids, strict=True)]
        due = load.due_s(len(requests), seed=self.load.seed, pass_name=name)
        return [Turn(*turn) for turn in zip(requests, ids, due, strict=True)]

    @property
    def _most_in_flight(self) -> int:
        return self.load.load.concurrency or self.load.load.most_in_flight

    def _settle(self, before: Snapshot | None, sent: Sequence[Sent]) -> Settled:
        if before is None:
            return Settled(None, 0.0, "the counters could not be read before the pass")
        asked = Asked(least=sum(each.result.complete for each in sent), most=len(sent))
        return self.doors.scraper.settle(before, deadline_s=self.context.settle_s, asked=asked)

    def _drain(self) -> None:
        try:
            self.socket.drain(self._events)
        except CounterError as error:
            raise MachineError(f"{self.context.session}: {error}", hint=error.hint) from None

    def _find(self, request: Request, name: str, cached: int | None, is_complete: bool) -> _Found:
        """What the answer and the events say of one request."""
        positions = self._events.take(name)
        first = named_from(positions, self.load.block_size)
        if not is_complete:
            return _Found(None, first, "the answer is not complete, so what it cached is not known")
        split: TokenSplit | None = None
        try:
            # vLLM leaves the count out when it is 0 (prompt_tokens_details, PR #44475).
            split = split_by_events(len(request.prompt), cached or 0, first)
            if self.load.is_caching:
                check_named(split, positions, block_size=self.load.block_size,
                            unit_tokens=self.context.chunk_tokens)  # fmt: skip
        except Preempted as error:  # the counters keep what its first admission found, as it does
            return _Found(split, first, str(error))
        except CounterError as error:
            return _Found(None, first, str(error))
        return _Found(split, first, None)

    def _whole_pass(
        self,
        before: Snapshot | None,
        settled: Settled,
        requests: Sequence[Request],
        found: Sequence[_Found],
        lost_before: int,
    ) -> str | None:
        """Why nothing of the pass is attributed; None when its sources are what the counters say."""
        if before is None or settled.after is None or settled.unsettled:
            return f"not settled: {settled.unsettled}"
        if before.launch != settled.after.launch:
            return f"a server was restarted: {before.launch} became {settled.after.launch}"
        chunk_tokens = self.context.chunk_tokens
        asked = [
            PassRequest(
                len(request.prompt),
                each.split,
                chunks_loaded(each.split, chunk_tokens) if each.split and chunk_tokens else None,
            )
            for request, each in zip(requests, found, strict=True)
        ]
        try:
            if lost := self._events.lost - lost_before:
                raise LostEvents(f"{lost} batches of KV events were lost in the pass")
            check_pass(before.flat(), settled.after.flat(), asked)
        except CounterError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _outcomes(
        self,
        before: Snapshot | None,
        settled: Settled,
        sent: Sequence[Sent],
        found: Sequence[_Found],
        why_none: str | None,
    ) -> Iterator[Outcome]:
        loop: Loop = "closed" if self.load.load.rate is None else "open"
        for number, (each, known) in enumerate(zip(sent, found, strict=True), start=1):
            is_last = number == len(sent)
            why_not = why_none or known.why_not
            yield Outcome(
                result=each.result,
                before=before,
                settled=settled if is_last else replace(settled, settle_ms=None),
                measured=None if why_not or known.split is None else self._measured(known.split),
                why_not=why_not,
                loop=loop,
                late_ms=each.late_ms,
                named_from=known.named_from,
            )

    def _measured(self, split: TokenSplit) -> Measured:
        chunk_tokens, chunk_bytes = self.context.chunk_tokens, self.context.chunk_bytes
        if chunk_tokens is None or chunk_bytes is None:
            return Measured(split)
        loaded_bytes = chunks_loaded(split, chunk_tokens) * chunk_bytes
        return Measured(split, loaded_bytes, BY_EVENTS, chunk_bytes=chunk_bytes)

    def _next_id(self) -> str:
        self._seq += 1
        return request_id(self.context, self._seq)

    def _write(self, rows: Sequence[Row]) -> None:
        self.journal.append(*rows)
        for row in rows:
            self.on_row(row)
        self.check_alive()
