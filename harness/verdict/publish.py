"""What a run publishes: ``reconcile.json`` and ``summary.json``, complete enough for any report.

Both are made again from the run folder alone, on any machine; a report renders them and computes
nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.files import write_json
from harness.forecast.cliff import cliff, working_set_tokens
from harness.plan.labels import CONTROL
from harness.plan.plan import Plan
from harness.plan.rule import DecisionSection
from harness.record.folder import RunFolder
from harness.record.row import Row
from harness.verdict.account import Account
from harness.verdict.decision import Checks, Sizes, decide
from harness.verdict.findings import Finding, findings_of, first_pass, reconcile_json
from harness.verdict.reconcile import Reconciled, Reconciliation, places, reconcile, request_json
from harness.verdict.stats import source_class, summarize
from harness.verdict.takeaways import takeaways
from sim.geometry import KvGeometry
from sim.workload import WARMUP_PASS, pass_name

# Requests that reconcile.json lists: each takes 1 kB there, and a report draws 4,000 at most.
MOST_LISTED = 20_000
# Of the manifest; the rest describes the machine and the installation.
_NOT_ENVIRONMENT = ("schema", "run", "plan_id", "sealed", "sessions")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Contents of the two published files, and the findings in them."""

    summary: dict[str, Any]
    reconciliation: dict[str, Any]
    findings: list[Finding]


def publish(folder: RunFolder, *, write: Callable[[Path, Any], None] = write_json) -> Evidence:
    """Read a run folder, check it, decide, and write both files; InputError when unreadable."""
    evidence = gather(folder)
    write(folder.path / "reconcile.json", evidence.reconciliation)
    write(folder.path / "summary.json", evidence.summary)
    return evidence


def gather(folder: RunFolder) -> Evidence:
    """What ``publish`` writes, without writing it.

    The requests are walked once and dropped: a million take about a minute and 250 MB.
    """
    run = reconcile(folder)
    account = Account(cold=(WARMUP_PASS, first_pass(run)))
    listed = _Listed(run.plan)
    summary = summarize(
        _walked(run, account, listed),
        run=folder.name,
        plan_id=run.manifest["plan_id"],
        block_size=run.plan.server.block_size,
        arms=run.plan.order,
    )
    findings = findings_of(run, account)
    content = reconcile_json(run, account, findings, listed.entries)
    content["every"] = listed.every
    content["by_pass"] = _by_pass(account)
    content["not_predicted"] = _not_predicted(account)
    _complete(summary, run, account, findings)
    return Evidence(summary, content, findings)


class _Listed:
    """The requests that ``reconcile.json`` lists: all, or of a long run every k-th of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.every = max(1, -(-places(plan)[1] // MOST_LISTED))
        self.entries: list[dict[str, Any]] = []
        self._block_size = plan.server.block_size
        self._met = 0

    def add(self, request: Reconciled) -> None:
        """List it if it is its turn."""
        if self._met % self.every == 0:
            details = _request_details(request, self._block_size)
            self.entries.append({**request_json(request), **details})
        self._met += 1


def _walked(run: Reconciliation, account: Account, listed: _Listed) -> Iterator[Row]:
    """The rows of a run, everything about their requests counted on the way."""
    for request in run.requests:
        account.add(request)
        listed.add(request)
        if request.row is not None:
            yield request.row


def _request_details(request: Reconciled, block_size: int) -> dict[str, Any]:
    """What a report shows of one request beside its split; null where nothing was measured."""
    row = request.row
    names = (
        "config", "order", "seq", "phase", "doc_tokens", "prompt_tokens", "ttft_ms", "total_ms",
        "settle_ms", "loaded_bytes", "stored_tokens", "error", "unattributed",
    )  # fmt: skip
    return {
        **{name: getattr(row, name) if row else None for name in names},
        "source": source_class(row, block_size) if row else None,
        "predicted_bytes": request.predicted.transferred_bytes if request.predicted else None,
    }


def _by_pass(account: Account) -> list[dict[str, Any]]:
    """Per session and pass: requests, reconciled ones, and the largest residual of each kind."""
    return [
        {"session": session, "pass": name, **asdict(counted)}
        for (session, name), counted in account.passes.items()
    ]


def _not_predicted(account: Account) -> list[dict[str, Any]]:
    """Requests without an exact prediction, by the reason for it."""
    groups: dict[str, dict[str, Any]] = {}
    for (session, _), counted in account.passes.items():
        if why := counted.why_not_predicted:
            group = groups.setdefault(why, {"why": why, "sessions": [], "requests": 0})
            group["requests"] += counted.requests
            if session not in group["sessions"]:
                group["sessions"].append(session)
    return list(groups.values())


def _complete(
    summary: dict[str, Any],
    run: Reconciliation,
    account: Account,
    findings: list[Finding],
) -> None:
    """Add decision, cliff, environment, plan and servers to the measured part of the summary."""
    plan = run.plan
    environment = {
        **{name: value for name, value in run.manifest.items() if name not in _NOT_ENVIRONMENT},
        "build": plan.server.build,
        "dtype": plan.server.dtype,
        "model": plan.model.path,
    }
    chunk_bytes = account.chunk_bytes
    if chunk_bytes is not None and chunk_bytes < plan.host.chunk_tokens:
        chunk_bytes = None  # of another tier than the plan's, which the findings say
    rule = getattr(plan, "decision", None)
    summary["decision"] = decide(
        rule or DecisionSection(),
        summary,
        checks=Checks(
            planned=account.planned,
            reconciled=account.reconciled,
            errors=tuple((f.code, f.message) for f in findings if f.severity == "error"),
        ),
        sizes=sizes(plan, chunk_bytes),
        is_from_plan="decision" in plan.model_fields_set,
        environment=environment,
    )
    summary["cliff"] = cliff(plan, summary, summary["decision"]["pass"], chunk_bytes=chunk_bytes)
    summary["plan"] = plan.model_dump(mode="json", by_alias=True)
    summary["environment"] = environment
    servers = run.manifest.get("sessions", {})
    for session in summary["sessions"]:
        server = servers.get(session["session"], {})
        session["server"] = server
        session["spans"] = [*_starting(server), *session["spans"], *_stopping(server, session)]
    summary["takeaways"] = takeaways(summary)


def _starting(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    """From the launch to the first answer, as a span; nothing for a server that never answered."""
    if "started" not in server or "start_s" not in server:
        return []
    began = datetime.fromisoformat(server["started"]).timestamp() * 1000
    ended = began + server["start_s"] * 1000
    return [{"phase": "start", "began_unix_ms": began, "ended_unix_ms": ended}]


def _stopping(server: Mapping[str, Any], session: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "ended" not in server or not session["spans"]:
        return []
    began = session["spans"][-1]["ended_unix_ms"]
    ended = datetime.fromisoformat(server["ended"]).timestamp() * 1000
    # The manifest has whole seconds, the rows nanoseconds.
    return [{"phase": "stop", "began_unix_ms": began, "ended_unix_ms": max(began, ended)}]


def sizes(plan: Plan, chunk_bytes: int | None) -> Sizes:
    """The plan's tiers and working set in tokens."""
    host, chunks = plan.host, None
    has_host = plan.arm(plan.treatment).tier is not None
    if chunk_bytes and has_host:
        geometry = KvGeometry(chunk_bytes // host.chunk_tokens)
        chunks = geometry.host_chunks(host.gib, host.chunk_tokens)
    return Sizes(
        documents=plan.workload.documents,
        working_set_tokens=working_set_tokens(plan),
        gpu_tokens=(plan.server.num_gpu_blocks - 1) * plan.server.block_size,
        host_tokens=chunks * host.chunk_tokens if chunks is not None else None,
        host_gib=host.gib if has_host else None,
        has_control=CONTROL in plan.order,
        passes=tuple(pass_name(i, order) for i, order in enumerate(plan.workload.passes)),
    )
