"""Do a run's times agree: with each other, with the servers' own, with when the servers ran?

The bounds leave room for what the 1,048 requests of the committed runs show: 2.8 to 85 ms idle
between requests, a client's TTFT 3.4 to 90 ms and at most 1.53 times above the server's own, and
sessions in whole seconds.
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
class SessionTimes:
    """One session: when it was busy. ``idle_ms``, ``busy_ms``: summed over ``n`` requests."""

    began_ns: int
    last: Row
    ended_ns: int = 0
    idle_ms: float = 0.0
    busy_ms: float = 0.0
    n: int = 0


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
        else:
            problem = problem or _against_last(row, seen)
        seen.last = row
        seen.ended_ns = max(seen.ended_ns, row.sent_unix_ns + round(1e6 * (row.total_ms or 0)))
        if problem:
            self.n += 1
            session, name, doc = row.key
            self.first = self.first or f"{session}/{name}/{doc}: {problem}"

    def problems(self, sessions: Mapping[str, SessionRecord]) -> Iterator[str]:
        """Everything that contradicts; ``sessions``: the manifest's."""
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
