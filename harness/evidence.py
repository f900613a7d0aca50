"""What a run publishes: ``reconcile.json`` and ``summary.json``, complete enough for any report.

Both are made again from the run folder alone, on any machine; a report renders them and computes
nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.cliff import cliff, working_set_tokens
from harness.decision import Checks, DecisionSection, Sizes, decide
from harness.files import write_json
from harness.findings import Finding, find, reconcile_json
from harness.plan import Plan, read_plan
from harness.reconcile import Reconciled, Reconciliation, reconcile
from harness.runfolder import PLAN_FILE, RunFolder
from harness.stats import source_class, summarize
from harness.watch import Tail
from sim.geometry import KvGeometry
from sim.workload import pass_name

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
    """What ``publish`` writes, without writing it."""
    run = reconcile(folder)
    findings = find(run)
    content = reconcile_json(run, findings)
    block_size = run.plan.server.block_size
    for entry, request in zip(content["requests"], run.requests, strict=True):
        entry.update(_request_details(request, block_size))
    content["by_pass"] = _by_pass(run)
    summary = summarize(
        run.rows, run=folder.name, plan_id=run.manifest["plan_id"], block_size=block_size
    )
    _complete(summary, run, content, findings)
    return Evidence(summary, content, findings)


def summarize_stream(folder: RunFolder) -> dict[str, Any]:
    """The measured part of ``summary.json`` for runs too long to hold: rows are read and dropped.

    A million rows take 20 s and 130 MB. No prediction is joined, so there is no decision.
    """
    manifest = folder.read_manifest()
    rows = (row for path in folder.journals() for row in Tail(path).rows())
    return summarize(
        rows,
        run=folder.name,
        plan_id=manifest["plan_id"],
        block_size=read_plan(folder.path / PLAN_FILE).server.block_size,
    )


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


def _by_pass(run: Reconciliation) -> list[dict[str, Any]]:
    """Per session and pass: requests, reconciled ones, and the largest residual of each kind.

    ``largest`` holds, by name, the residual farthest from 0 with its sign; null: none comparable.
    """
    groups: dict[tuple[str, str], list[Reconciled]] = defaultdict(list)
    for request in run.requests:
        groups[request.key[:2]].append(request)
    return [
        {
            "session": session,
            "pass": pass_,
            "requests": len(requests),
            "recorded": sum(r.row is not None for r in requests),
            "reconciled": sum(r.is_reconciled for r in requests),
            "largest": _largest([r.residual for r in requests if r.residual is not None]),
        }
        for (session, pass_), requests in groups.items()
    ]


def _largest(residuals: list[dict[str, int]]) -> dict[str, int] | None:
    if not residuals:
        return None
    names = dict.fromkeys(name for residual in residuals for name in residual)
    return {name: max((r.get(name, 0) for r in residuals), key=abs) for name in names}


def _complete(
    summary: dict[str, Any],
    run: Reconciliation,
    reconciliation: Mapping[str, Any],
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
    chunk_bytes = next((row.chunk_bytes for row in run.rows if row.chunk_bytes), None)
    rule = getattr(plan, "decision", None)
    summary["decision"] = decide(
        rule or DecisionSection(),
        summary,
        checks=Checks(
            planned=reconciliation["requests_planned"],
            reconciled=reconciliation["requests_reconciled"],
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
    if chunk_bytes:
        geometry = KvGeometry(chunk_bytes // host.chunk_tokens)
        chunks = geometry.host_chunks(host.gib, host.chunk_tokens)
    return Sizes(
        documents=plan.workload.documents,
        working_set_tokens=working_set_tokens(plan),
        gpu_tokens=(plan.server.num_gpu_blocks - 1) * plan.server.block_size,
        host_tokens=chunks * host.chunk_tokens if chunks is not None else None,
        host_gib=host.gib,
        passes=tuple(pass_name(i, order) for i, order in enumerate(plan.workload.passes)),
    )
