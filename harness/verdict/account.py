"""One walk over the requests of a run: what the checks and the published files need, counted.

No request is kept but the first of each kind that something is off with, so a run may be of any
length; a million requests take about 50 MB, for the digests of their outputs.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from harness.counters.tiers.registry import refused_chunks
from harness.record.row import Row
from harness.verdict.reconcile import Reconciled
from harness.verdict.times import Times

LATE_MS = 50.0
"""A request that is sent so long after it was due is late; a client that keeps up needs under 2 ms."""


@dataclass(slots=True)
class Found:
    """Requests with one thing off: how many, and the first of them."""

    n: int = 0
    first: Reconciled | None = None

    def add(self, request: Reconciled) -> None:
        self.n += 1
        if self.first is None:
            self.first = request

    @property
    def name(self) -> str:
        """The first one, as messages name it."""
        assert self.first is not None
        session, pass_name, doc = self.first.key
        return f"{session}/{pass_name}/{doc}"

    @property
    def row(self) -> Row:
        """The first one's row; only where what is off is in a row."""
        assert self.first is not None
        assert self.first.row is not None
        return self.first.row


@dataclass(slots=True)
class SessionAccount:
    """One session: rows, and tokens summed over the attributed ones.

    ``stored`` None: no row knows. ``due``: predicted to be loaded by requests that have a row.
    ``connector``, ``chunk_tokens``: as its rows have them, all alike.
    ``predicted_loads``: by all planned ones; ``is_exact``: every prediction there is holds numbers.
    ``counted_from``: the counters before the last row that was met.
    ``found_nowhere``: prompts after the first pass of which no tier had anything.
    """

    recorded: int = 0
    attributed: int = 0
    stored: int | None = None
    loaded: int = 0
    found_nowhere: int = 0
    due: int = 0
    predicted: int = 0
    predicted_loads: int = 0
    is_exact: bool = True
    dropped_chunks: int = 0
    counted_from: dict[str, int] | None = None
    connector: str | None = None
    chunk_tokens: int | None = None


@dataclass(slots=True)
class PassAccount:
    """One pass of one session; ``largest``: by name the residual farthest from 0, None without any."""

    requests: int = 0
    recorded: int = 0
    reconciled: int = 0
    largest: dict[str, int] | None = None
    why_not_predicted: str | None = None

    def add(self, request: Reconciled, residual: dict[str, int] | None) -> None:
        self.requests += 1
        self.recorded += request.row is not None
        self.reconciled += request.is_reconciled
        if request.predicted is not None:
            self.why_not_predicted = self.why_not_predicted or request.predicted.why_not
        if residual is None:
            return
        if self.largest is None:
            self.largest = dict.fromkeys(residual, 0)
        if any(residual.values()) or residual.keys() != self.largest.keys():
            for name, value in residual.items():
                self.largest[name] = max(self.largest.get(name, 0), value, key=abs)


@dataclass(slots=True)
class Outputs:
    """What each prompt was answered with, over the sessions; a prompt is a pass and a document."""

    differing: int = 0
    first_differing: tuple[str, int] | None = None
    is_constant: bool = True
    _digests: dict[str, dict[int, int]] = field(default_factory=dict)
    _differing: set[tuple[str, int]] = field(default_factory=set)
    _first: int | None = None

    @property
    def prompts(self) -> int:
        return sum(len(documents) for documents in self._digests.values())

    def add(self, row: Row) -> None:
        """Compare a complete row's output with those the same prompt had before."""
        if not row.complete or not row.output_sha256:
            return
        output = hash(row.output_sha256)  # 36 bytes instead of 113
        documents = self._digests.setdefault(row.pass_name, {})
        known = documents.setdefault(row.doc, output)
        if self._first is None:
            self._first = known
        self.is_constant = self.is_constant and known == self._first
        prompt = (row.pass_name, row.doc)
        if known != output and prompt not in self._differing:
            self._differing.add(prompt)
            self.differing += 1
            self.first_differing = self.first_differing or prompt


@dataclass(slots=True)
class Account:
    """The whole run. ``cold``: passes that meet every prompt for the first time.

    ``due``: by session and pass, tokens predicted to be loaded from the host tier.
    """

    cold: tuple[str, ...]
    requests: int = 0
    planned: int = 0
    recorded: int = 0
    reconciled: int = 0
    measured: int = 0
    missing: Found = field(default_factory=Found)
    unpredicted: Found = field(default_factory=Found)
    unplanned: Found = field(default_factory=Found)
    failed: Found = field(default_factory=Found)
    unattributed: Found = field(default_factory=Found)
    residual: Found = field(default_factory=Found)
    cold_hits: Found = field(default_factory=Found)
    disagreeing: Found = field(default_factory=Found)
    reconnected: Found = field(default_factory=Found)
    too_fast: Found = field(default_factory=Found)
    late: Found = field(default_factory=Found)
    outputs: Outputs = field(default_factory=Outputs)
    times: Times = field(default_factory=Times)
    sessions: dict[str, SessionAccount] = field(default_factory=lambda: defaultdict(SessionAccount))
    passes: dict[tuple[str, str], PassAccount] = field(
        default_factory=lambda: defaultdict(PassAccount)
    )
    due: Counter[tuple[str, str]] = field(default_factory=Counter)
    chunk_bytes: int | None = None

    def add(self, request: Reconciled) -> None:
        residual = request.residual
        self.requests += 1
        self.planned += request.is_planned
        self.reconciled += request.is_reconciled
        self.passes[request.key[:2]].add(request, residual)
        if request.predicted is not None:
            self.due[request.key[:2]] += request.predicted.host_loaded or 0
        session = self.sessions[request.key[0]]
        _add_prediction(session, request)
        self._add_absences(request)
        if residual is not None and any(residual.values()):
            self.residual.add(request)
        if request.row is not None:
            self.recorded += 1
            _add_row(session, request.row)
            session.found_nowhere += _is_found_nowhere(request.row, self.cold)
            self._add_row(request, request.row)

    def _add_absences(self, request: Reconciled) -> None:
        if not request.is_planned:
            self.unplanned.add(request)
            return
        if request.row is None:
            self.missing.add(request)
        if request.predicted is None:
            self.unpredicted.add(request)

    def _add_row(self, request: Reconciled, row: Row) -> None:
        self.chunk_bytes = self.chunk_bytes or row.chunk_bytes
        self.outputs.add(row)
        self.times.add(row)
        if not row.complete:
            self.failed.add(request)
        if not row.is_attributed:
            self.unattributed.add(request)
        if (row.gpu_hit or row.host_loaded) and row.pass_name in self.cold:
            self.cold_hits.add(request)
        if row.disagreement:
            self.disagreeing.add(request)
        if row.phase == "measure":
            self.measured += 1
            if not row.conn_reused:
                self.reconnected.add(request)
            if _is_client_faster(row):
                self.too_fast.add(request)
            if row.late_ms is not None and row.late_ms > LATE_MS:
                self.late.add(request)


def _add_prediction(session: SessionAccount, request: Reconciled) -> None:
    predicted, row = request.predicted, request.row
    if predicted is None:
        return
    loads = predicted.host_loaded or 0
    session.predicted += 1
    session.predicted_loads += loads
    session.is_exact = session.is_exact and predicted.is_exact
    if row is not None and row.is_attributed:
        session.due += loads


def _add_row(session: SessionAccount, row: Row) -> None:
    session.recorded += 1
    session.connector, session.chunk_tokens = row.connector, row.chunk_tokens
    if row.counters_before != session.counted_from:  # requests in flight share their pass's
        session.counted_from = row.counters_before
        session.dropped_chunks += refused_chunks(
            row.counters_before or {}, row.counters_after or {}
        )
    if not row.is_attributed:
        return
    session.attributed += 1
    session.loaded += row.host_loaded or 0
    if row.stored_tokens is not None:
        session.stored = (session.stored or 0) + row.stored_tokens


def _is_found_nowhere(row: Row, cold: tuple[str, ...]) -> bool:
    return row.is_attributed and row.pass_name not in cold and row.gpu_hit == row.host_loaded == 0


def _is_client_faster(row: Row) -> bool:
    # 1 ms: vLLM stamps arrival before it has read the whole body on some versions.
    return (
        row.ttft_ms is not None
        and row.server_ttft_ms is not None
        and row.ttft_ms + 1.0 < row.server_ttft_ms
    )
