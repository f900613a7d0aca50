"""Do a run's times agree: with each other, with the servers' own, with when the servers ran?

The bounds leave room for what the 1,048 requests of the committed runs show: 2.8 to 85 ms idle
between requests, a client's TTFT 3.4 to 90 ms and at most 1.53 times above the server's own, and
sessions in whole seconds.

With others in flight a request also waits until the engine's loop takes it in, which it does between
two steps: no time of the server's has that wait, and it is at most the longest step of the pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from harness.record.manifest import SessionRecord
from harness.record.row import Row

OVERLAP_MS = 50.0  # a wall clock is set while a run is measured: smoothly, and by less
FACTOR = 2.0
ABOVE_SERVER_MS = 1_000.0  # a stall of the client, which a short TTFT shows as a large factor
IDLE_MS = 250.0
SPAN_S = 2.0  # the manifest has whole seconds


@dataclass(slots=True)
class PassTimes:
    """A pass of requests in flight: ``above``, each request's TTFT less the server's own account;
    ``longest_ms``, the longest time from scheduled to first token, which no step exceeds."""

    name: str
    above: list[tuple[Row, float]] = field(default_factory=list)
    longest_ms: float = 0.0

    def add(self, row: Row) -> None:
        if None in (row.ttft_ms, row.server_ttft_ms, row.queue_ms):
            return
        assert row.ttft_ms is not None
        assert row.server_ttft_ms is not None
        assert row.queue_ms is not None
        self.above.append((row, row.ttft_ms - row.server_ttft_ms))
        self.longest_ms = max(self.longest_ms, row.server_ttft_ms - row.queue_ms)

    def problems(self) -> Iterator[tuple[Row, str]]:
        """The requests that waited longer than any step of the pass took."""
        most_ms = FACTOR * self.longest_ms + ABOVE_SERVER_MS
        for row, above_ms in self.above:
            if above_ms > most_ms:
                yield (
                    row,
                    (
                        f"TTFT {row.ttft_ms:,.1f} ms, {above_ms:,.1f} ms above the server's own account; "
                        f"no step of the pass took more than {self.longest_ms:,.1f} ms"
                    ),
                )


@dataclass(slots=True)
class SessionTimes:
    """One session: when it was busy. ``idle_ms``, ``busy_ms``: summed over ``n`` requests."""

    began_ns: int
    last: Row
    ended_ns: int = 0
    idle_ms: float = 0.0
    busy_ms: float = 0.0
    n: int = 0
    in_flight: PassTimes | None = None


@dataclass(slots=True)
class Times:
    """What was met in a walk over the rows: ``n`` that contradict something, and why the first."""

    n: int = 0
    first: str = ""
    _sessions: dict[str, SessionTimes] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take the next row of its session."""
        seen = self._sessions.get(row.session)
        problem = _against_server(row)
        if seen is None:
            seen = self._sessions[row.session] = SessionTimes(row.sent_unix_ns, row)
        elif row.loop == "serial":
            problem = problem or _against_last(row, seen)
        if row.loop != "serial":
            self._add_in_flight(row, seen)
        seen.last = row
        seen.ended_ns = max(seen.ended_ns, row.sent_unix_ns + round(1e6 * (row.total_ms or 0)))
        if problem:
            self._note(row, problem)

    def _add_in_flight(self, row: Row, seen: SessionTimes) -> None:
        if seen.in_flight is None or seen.in_flight.name != row.pass_name:
            self._end_pass(seen)
            seen.in_flight = PassTimes(row.pass_name)
        seen.in_flight.add(row)

    def _end_pass(self, seen: SessionTimes) -> None:
        for row, problem in seen.in_flight.problems() if seen.in_flight else ():
            self._note(row, problem)
        seen.in_flight = None

    def _note(self, row: Row, problem: str) -> None:
        self.n += 1
        session, name, doc = row.key
        self.first = self.first or f"{session}/{name}/{doc}: {problem}"

    def problems(self, sessions: Mapping[str, SessionRecord]) -> Iterator[str]:
        """Everything that contradicts; ``sessions``: the manifest's."""
        for seen in self._sessions.values():
            self._end_pass(seen)
        if self.n:
            yield f"the times of {self.n} requests contradict others, first {self.first}"
        for name, seen in self._sessions.items():
            if seen.n and seen.idle_ms > max(seen.busy_ms, IDLE_MS * seen.n):
                yield (
                    f"{name}: {seen.n} requests and their settling took {seen.busy_ms:,.0f} ms, and "
                    f"nothing was asked for {seen.idle_ms:,.0f} ms between them"
                )
            if problem := _against_span(seen, sessions.get(name, SessionRecord())):
                yield f"{name}: {problem}"


def _against_server(row: Row) -> str | None:
    ours, servers = row.ttft_ms, row.server_ttft_ms
    if ours is None or servers is None:
        return None
    is_above = ours > FACTOR * servers and ours > servers + ABOVE_SERVER_MS
    is_above = is_above and row.loop == "serial"
    if is_above or ours < servers / FACTOR:
        return f"TTFT {ours:,.1f} ms, by the server's own account {servers:,.1f} ms"
    return None


def _against_last(row: Row, seen: SessionTimes) -> str | None:
    """What contradicts the request before; the time between them is counted."""
    last = seen.last
    if row.seq != last.seq + 1 or last.total_ms is None:
        return None
    took_ms = last.total_ms + (last.settle_ms or 0)
    idle_ms = (row.sent_unix_ns - last.sent_unix_ns) / 1e6 - took_ms
    seen.busy_ms += took_ms
    seen.idle_ms += max(idle_ms, 0)
    seen.n += 1
    if idle_ms < -OVERLAP_MS:
        return f"sent {-idle_ms:,.0f} ms before the request before it had settled"
    return None


def _against_span(seen: SessionTimes, record: SessionRecord) -> str | None:
    """What lies outside the time in which the session's servers ran."""
    if record.started is not None:
        ready_s = datetime.fromisoformat(record.started).timestamp() + (record.start_s or 0)
        if (early_s := ready_s - seen.began_ns / 1e9) > SPAN_S:
            return f"the first request was sent {early_s:,.0f} s before its servers were ready"
    if record.ended is not None:
        ended_s = datetime.fromisoformat(record.ended).timestamp()
        if (late_s := seen.ended_ns / 1e9 - ended_s) > SPAN_S:
            return f"the last answer came {late_s:,.0f} s after its servers had ended"
    return None
