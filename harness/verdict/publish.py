"""What a run publishes: ``reconcile.json`` and ``summary.json``, complete enough for any report.

Both are made again from the run folder alone, on any machine; a report renders them and computes
nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.files import write_json
from harness.forecast.cliff import Cliff, CliffPoint, cliff_of, gpu_tokens, working_set_tokens
from harness.plan.arms import CONTROL
from harness.plan.plan import Plan
from harness.plan.requests import Key, PlannedRequests
from harness.record.folder import RECONCILE_FILE, SUMMARY_FILE, RunFolder
from harness.record.manifest import SessionRecord
from harness.record.row import Row, Sample
from harness.verdict import schema
from harness.verdict.account import Account, PassAccount
from harness.verdict.cost import Sizes
from harness.verdict.decision import decide
from harness.verdict.findings import findings_of
from harness.verdict.measured import (
    SCHEMA,
    JsonObject,
    LoadCell,
    SessionSpan,
    SessionSummary,
    Statistics,
)
from harness.verdict.reconcile import Reconciled, Reconciliation, reconcile
from harness.verdict.stats import summarize
from harness.verdict.takeaways import takeaways_of
from harness.verdict.tally import source_class
from harness.verdict.under_load import UnderLoad
from sim.geometry import KvGeometry
from sim.split import Units
from sim.workload import WARMUP_PASS, pass_name

# Requests that reconcile.json lists: each takes 1 kB there, and a report draws 4,000 at most.
MOST_LISTED = 20_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """Contents of the two published files."""

    summary: schema.Summary
    reconciliation: schema.ReconcileFile


def publish(folder: RunFolder, *, write: Callable[[Path, Any], object] = write_json) -> Evidence:
    """Read a run folder, check it, decide, and write both files; InputError when unreadable.

    The requests are walked once and dropped: a million take about a minute and 250 MB.
    """
    run = reconcile(folder)
    account = Account(cold=(WARMUP_PASS, pass_name(0, run.plan.workload.passes[0])))
    listed = Listed(len(PlannedRequests(run.plan)), run.plan.units)
    load = UnderLoad(run.plan.load, run.plan.units) if run.plan.load else None
    statistics = summarize(
        _walked(run, account, listed, load),
        run=folder.name,
        plan_id=run.manifest.plan_id,
        units=run.plan.units,
        arms=run.plan.order,
    )
    reconciliation = schema.ReconcileFile(
        schema_version=SCHEMA,
        run=folder.name,
        requests_planned=account.planned,
        requests_recorded=account.recorded,
        requests_reconciled=account.reconciled,
        findings=findings_of(run, account),
        requests=listed.entries,
        every=listed.every,
        by_pass=by_pass(account.passes),
        not_predicted=_not_predicted(account),
    )
    summary = _summary(statistics, run, reconciliation, account.chunk_bytes, load)
    write(folder.path / RECONCILE_FILE, reconciliation.as_json())
    write(folder.path / SUMMARY_FILE, summary.as_json())
    return Evidence(summary, reconciliation)


class Listed:
    """The requests that ``reconcile.json`` lists: all ``n_planned``, or of a long run every k-th."""

    def __init__(self, n_planned: int, units: Units) -> None:
        self.every = max(1, -(-n_planned // MOST_LISTED))
        self.entries: list[schema.RequestEntry] = []
        self._units = units
        self._met = 0

    def add(self, key: Key, row: Sample | None, request: Reconciled | None = None) -> None:
        """List the request ``key`` if it is its turn; ``request`` None: it was imported."""
        self._met += 1
        if (self._met - 1) % self.every:
            return
        session, name, doc = key
        self.entries.append(
            schema.RequestEntry(
                session=session,
                pass_name=name,
                doc=doc,
                row=row.as_sample() if row else None,
                predicted=request.predicted if request else None,
                residual=request.residual if request else None,
                reconciled=request.is_reconciled if request else False,
                source=source_class(row, self._units) if row else None,
            )
        )


def by_pass(passes: Mapping[tuple[str, str], PassAccount]) -> list[schema.PassResidual]:
    """Per session and pass: requests, reconciled ones, and the largest residual of each kind."""
    return [
        schema.PassResidual(session=session, pass_name=name, **asdict(counted))
        for (session, name), counted in passes.items()
    ]


def _walked(
    run: Reconciliation, account: Account, listed: Listed, load: UnderLoad | None
) -> Iterator[Row]:
    """The rows of a run, everything about their requests counted on the way."""
    for request in run.requests:
        account.add(request)
        listed.add(request.key, request.row, request)
        if request.row is not None:
            if load is not None:
                load.add(request.row)
            yield request.row


def _not_predicted(account: Account) -> list[schema.NotPredicted]:
    """Requests without an exact prediction, by the reason for it."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for (session, _), counted in account.passes.items():
        if why := counted.why_not_predicted:
            found[why][session] += counted.requests
    return [
        schema.NotPredicted(why=why, sessions=list(requests), requests=requests.total())
        for why, requests in found.items()
    ]


def _summary(
    statistics: Statistics,
    run: Reconciliation,
    reconciliation: schema.ReconcileFile,
    chunk_bytes: int | None,
    load: UnderLoad | None,
) -> schema.Summary:
    plan = run.plan
    environment = {
        **run.manifest.environment,
        "build": plan.server.build,
        "dtype": plan.server.dtype,
        "model": plan.model.path,
    }
    if chunk_bytes is not None and chunk_bytes < plan.host.chunk_tokens:
        chunk_bytes = None  # of another tier than the plan's, which the findings say
    servers = run.manifest.sessions
    sessions = [
        _on_its_server(each, servers.get(each.session, SessionRecord()))
        for each in statistics.sessions
    ]
    decision = decide(
        plan.decision,
        statistics,
        checks=reconciliation,
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
        load=load.cells() if load else None,
    )


def complete(
    statistics: Statistics,
    decision: schema.Decision,
    *,
    cliff: Cliff | None,
    plan: JsonObject | None,
    environment: JsonObject,
    load: list[LoadCell] | None = None,
) -> schema.Summary:
    """``summary.json``; ``cliff``, ``plan`` and ``load`` are None for imported rows."""
    summary = schema.Summary(
        **dict(statistics),
        decision=decision,
        cliff=cliff,
        plan=plan,
        environment=environment,
        takeaways=takeaways_of(statistics, decision.pass_name, cliff),
    )
    return summary if load is None else summary.model_copy(update={"load": load})


def _measured_shares(plan: Plan, statistics: Statistics, pass_name: str) -> Iterator[CliffPoint]:
    """Each arm's measured share at its own capacity; an arm without known sources has none."""
    for arm, cell in statistics.arms_in(pass_name).items():
        tokens = cell.tokens
        if tokens.prompt:
            share = tokens.computed / tokens.prompt
            yield CliffPoint(arm=arm, gpu_tokens=gpu_tokens(plan, arm), share=share, n=tokens.n)


def _on_its_server(session: SessionSummary, server: SessionRecord) -> SessionSummary:
    """The session with what the manifest says of its server, start and stop included."""
    spans = list(session.spans)
    if server.ended is not None and spans:
        # The manifest has whole seconds, the rows nanoseconds.
        began, ended = spans[-1].ended_unix_ms, _unix_ms(server.ended)
        spans.append(
            SessionSpan(phase="stop", began_unix_ms=began, ended_unix_ms=max(began, ended))
        )
    if server.started is not None and server.start_s is not None:  # None: it never answered
        began = _unix_ms(server.started)
        ended = began + server.start_s * 1000
        spans.insert(0, SessionSpan(phase="start", began_unix_ms=began, ended_unix_ms=ended))
    return session.model_copy(update={"server": server.as_json(), "spans": spans})


def _unix_ms(time: str) -> float:
    return datetime.fromisoformat(time).timestamp() * 1000


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
