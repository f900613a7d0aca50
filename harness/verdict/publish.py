"""What a run publishes: ``reconcile.json`` and ``summary.json``, complete enough for any report.

Both are made again from the run folder alone, on any machine; a report renders them and computes
nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.files import write_json
from harness.forecast.cliff import Cliff, CliffPoint, cliff_of, gpu_tokens, working_set_tokens
from harness.plan.labels import CONTROL
from harness.plan.plan import Plan
from harness.plan.requests import PlannedRequests
from harness.record.folder import RunFolder
from harness.record.manifest import Session
from harness.record.row import Row
from harness.verdict.account import Account
from harness.verdict.decision import Checks, Sizes, decide
from harness.verdict.findings import findings_of, first_pass
from harness.verdict.measured import SCHEMA, JsonObject, SessionSummary, Span, Statistics
from harness.verdict.reconcile import Reconciled, Reconciliation, reconcile
from harness.verdict.schema import (
    Decision,
    Finding,
    NotPredicted,
    PassResidual,
    ReconcileFile,
    RequestEntry,
    Summary,
)
from harness.verdict.stats import source_class, summarize
from harness.verdict.takeaways import takeaways_of
from sim.geometry import KvGeometry
from sim.workload import WARMUP_PASS, pass_name

# Requests that reconcile.json lists: each takes 1 kB there, and a report draws 4,000 at most.
MOST_LISTED = 20_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """Contents of the two published files, and the findings in them."""

    summary: Summary
    reconciliation: ReconcileFile
    findings: list[Finding]


def publish(folder: RunFolder, *, write: Callable[[Path, Any], None] = write_json) -> Evidence:
    """Read a run folder, check it, decide, and write both files; InputError when unreadable."""
    evidence = evidence_of(folder)
    write(folder.path / "reconcile.json", evidence.reconciliation.as_json())
    write(folder.path / "summary.json", evidence.summary.as_json())
    return evidence


def evidence_of(folder: RunFolder) -> Evidence:
    """What ``publish`` writes, without writing it.

    The requests are walked once and dropped: a million take about a minute and 250 MB.
    """
    run = reconcile(folder)
    account = Account(cold=(WARMUP_PASS, first_pass(run)))
    listed = _Listed(run.plan)
    statistics = summarize(
        _walked(run, account, listed),
        run=folder.name,
        plan_id=run.manifest.plan_id,
        block_size=run.plan.server.block_size,
        arms=run.plan.order,
    )
    findings = findings_of(run, account)
    reconciliation = ReconcileFile(
        schema_version=SCHEMA,
        run=run.run,
        requests_planned=account.planned,
        requests_recorded=account.recorded,
        requests_reconciled=account.reconciled,
        findings=findings,
        requests=listed.entries,
        every=listed.every,
        by_pass=_by_pass(account),
        not_predicted=_not_predicted(account),
    )
    return Evidence(_summary(statistics, run, account, findings), reconciliation, findings)


class _Listed:
    """The requests that ``reconcile.json`` lists: all, or of a long run every k-th of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.every = max(1, -(-len(PlannedRequests(plan)) // MOST_LISTED))
        self.entries: list[RequestEntry] = []
        self._block_size = plan.server.block_size
        self._met = 0

    def add(self, request: Reconciled) -> None:
        """List it if it is its turn."""
        if self._met % self.every == 0:
            self.entries.append(_entry(request, self._block_size))
        self._met += 1


def _walked(run: Reconciliation, account: Account, listed: _Listed) -> Iterator[Row]:
    """The rows of a run, everything about their requests counted on the way."""
    for request in run.requests:
        account.add(request)
        listed.add(request)
        if request.row is not None:
            yield request.row


def _entry(request: Reconciled, block_size: int) -> RequestEntry:
    session, name, doc = request.key
    row = request.row
    return RequestEntry(
        session=session,
        pass_name=name,
        doc=doc,
        row=row.as_sample() if row else None,
        predicted=request.predicted,
        residual=request.residual,
        reconciled=request.is_reconciled,
        source=source_class(row, block_size) if row else None,
    )


def _by_pass(account: Account) -> list[PassResidual]:
    """Per session and pass: requests, reconciled ones, and the largest residual of each kind."""
    return [
        PassResidual(
            session=session,
            pass_name=name,
            requests=counted.requests,
            recorded=counted.recorded,
            reconciled=counted.reconciled,
            largest=counted.largest,
            why_not_predicted=counted.why_not_predicted,
        )
        for (session, name), counted in account.passes.items()
    ]


def _not_predicted(account: Account) -> list[NotPredicted]:
    """Requests without an exact prediction, by the reason for it."""
    sessions: dict[str, dict[str, None]] = {}
    requests: Counter[str] = Counter()
    for (session, _), counted in account.passes.items():
        if why := counted.why_not_predicted:
            sessions.setdefault(why, {})[session] = None
            requests[why] += counted.requests
    return [
        NotPredicted(why=why, sessions=list(names), requests=requests[why])
        for why, names in sessions.items()
    ]


def _summary(
    statistics: Statistics, run: Reconciliation, account: Account, findings: list[Finding]
) -> Summary:
    """The statistics with servers, decision, cliff, environment and plan."""
    plan = run.plan
    environment = {
        **run.manifest.environment,
        "build": plan.server.build,
        "dtype": plan.server.dtype,
        "model": plan.model.path,
    }
    chunk_bytes = account.chunk_bytes
    if chunk_bytes is not None and chunk_bytes < plan.host.chunk_tokens:
        chunk_bytes = None  # of another tier than the plan's, which the findings say
    servers = run.manifest.sessions
    sessions = [
        _on_its_server(each, servers.get(each.session, Session())) for each in statistics.sessions
    ]
    decision = decide(
        plan.decision,
        statistics,
        checks=Checks(
            planned=account.planned,
            reconciled=account.reconciled,
            errors=tuple((f.code, f.message) for f in findings if f.severity == "error"),
        ),
        sizes=sizes_of(plan, chunk_bytes),
        is_from_plan="decision" in plan.model_fields_set,
        environment=environment,
    )
    name = decision.pass_name
    measured = list(_measured_shares(plan, statistics, name))
    return complete(
        statistics.model_copy(update={"sessions": sessions}),
        decision,
        cliff=cliff_of(plan, name, chunk_bytes=chunk_bytes, measured=measured),
        plan=plan.model_dump(mode="json", by_alias=True),
        environment=environment,
    )


def complete(
    statistics: Statistics,
    decision: Decision,
    *,
    cliff: Cliff | None,
    plan: JsonObject | None,
    environment: JsonObject,
) -> Summary:
    """``summary.json``; ``cliff`` and ``plan`` are None for imported rows."""
    return Summary(
        **dict(statistics),
        decision=decision,
        cliff=cliff,
        plan=plan,
        environment=environment,
        takeaways=takeaways_of(statistics, decision.pass_name, cliff),
    )


def _measured_shares(plan: Plan, statistics: Statistics, pass_name: str) -> Iterator[CliffPoint]:
    """Each arm's measured share at its own capacity; an arm without known sources has none."""
    for arm, cell in statistics.arms_in(pass_name).items():
        tokens = cell.tokens
        if tokens.prompt:
            share = tokens.computed / tokens.prompt
            yield CliffPoint(arm=arm, gpu_tokens=gpu_tokens(plan, arm), share=share, n=tokens.n)


def _on_its_server(session: SessionSummary, server: Session) -> SessionSummary:
    """The session with what the manifest says of its server, start and stop included."""
    spans = [*_starting(server), *session.spans, *_stopping(server, session)]
    return session.model_copy(update={"server": server.as_json(), "spans": spans})


def _starting(server: Session) -> list[Span]:
    """From the launch to the first answer, as a span; nothing for a server that never answered."""
    if server.started is None or server.start_s is None:
        return []
    began = datetime.fromisoformat(server.started).timestamp() * 1000
    ended = began + server.start_s * 1000
    return [Span(phase="start", began_unix_ms=began, ended_unix_ms=ended)]


def _stopping(server: Session, session: SessionSummary) -> list[Span]:
    if server.ended is None or not session.spans:
        return []
    began = session.spans[-1].ended_unix_ms
    ended = datetime.fromisoformat(server.ended).timestamp() * 1000
    # The manifest has whole seconds, the rows nanoseconds.
    return [Span(phase="stop", began_unix_ms=began, ended_unix_ms=max(began, ended))]


def sizes_of(plan: Plan, chunk_bytes: int | None) -> Sizes:
    """The plan's tiers and working set in tokens."""
    host, chunks = plan.host, None
    has_host = plan.arm(plan.treatment).tier is not None
    if chunk_bytes and has_host:
        geometry = KvGeometry(chunk_bytes // host.chunk_tokens)
        chunks = geometry.host_chunks(host.gib, host.chunk_tokens)
    return Sizes(
        documents=plan.workload.documents,
        working_set_tokens=working_set_tokens(plan),
        gpu_tokens=gpu_tokens(plan),
        host_tokens=chunks * host.chunk_tokens if chunks is not None else None,
        host_gib=host.gib if has_host else None,
        has_control=CONTROL in plan.order,
        passes=tuple(pass_name(i, order) for i, order in enumerate(plan.workload.passes)),
    )
