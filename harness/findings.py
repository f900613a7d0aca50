"""What a run's numbers say against it: each finding with its numbers, its cause and a remedy.

An ``error`` is a failed check: the run does not establish what it was made for (exit code 1).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness.journal import Row
from harness.reconcile import Reconciled, Reconciliation, request_json
from sim.workload import WARMUP_PASS, pass_name

RECONCILE_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)


@dataclass(frozen=True, slots=True)
class Finding:
    """``code`` is stable and listed in the README; ``message`` holds the numbers."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    cause: str
    remedy: str


def find(run: Reconciliation) -> list[Finding]:
    """Every check over a reconciled run, errors first."""
    found = [
        *_missing(run),
        *_failed(run),
        *_unattributed(run),
        *_residuals(run),
        *_cold_hits(run),
        *_treatment(run),
        *_outputs(run),
        *_servers(run),
        *_no_effect_possible(run),
        *_ledgers(run),
        *_dropped_stores(run),
        *_client(run),
        *_torn(run),
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.severity == "error" for finding in findings)


def reconcile_json(run: Reconciliation, findings: list[Finding]) -> dict[str, Any]:
    """Content of ``reconcile.json``: what was planned, recorded, reconciled, found."""
    return {
        "schema": RECONCILE_SCHEMA,
        "run": run.run,
        "requests_planned": sum(r.is_planned for r in run.requests),
        "requests_recorded": len(run.rows),
        "requests_reconciled": sum(r.is_reconciled for r in run.requests),
        "findings": [asdict(finding) for finding in findings],
        "requests": [request_json(request) for request in run.requests],
    }


def _missing(run: Reconciliation) -> Iterator[Finding]:
    planned = [r for r in run.requests if r.is_planned]
    missing = [r.key for r in planned if r.row is None]
    if missing:
        yield Finding(
            "missing-requests",
            "error",
            f"{len(missing)} of {len(planned)} planned requests have no row, first {_name(missing[0])}",
            "the run was interrupted, or a journal was removed",
            f"kvcliff run --resume {run.folder} measures the sessions that are not complete, whole",
        )
    unpredicted = [r.key for r in planned if r.predicted is None]
    if unpredicted:
        yield Finding(
            "missing-predictions",
            "error",
            f"{len(unpredicted)} of {len(planned)} planned requests have no prediction, first "
            f"{_name(unpredicted[0])}",
            "prediction.jsonl was changed after the run began, or is another run's",
            "restore it: a prediction made after the measurement proves nothing",
        )
    unplanned = [r.key for r in run.requests if not r.is_planned]
    if unplanned:
        yield Finding(
            "unplanned-requests",
            "error",
            f"{len(unplanned)} rows or predictions belong to no planned request, first "
            f"{_name(unplanned[0])}",
            "journals, predictions or plan.toml of another run in this folder",
            "keep only the files this run wrote",
        )


def _failed(run: Reconciliation) -> Iterator[Finding]:
    failed = [row for row in run.rows if not row.complete]
    if failed:
        yield Finding(
            "failed-requests",
            "error",
            f"{len(failed)} of {len(run.rows)} requests are incomplete, first "
            f"{_name(failed[0].key)}: {failed[0].error}",
            "the server answered with an error, too few tokens or not at all",
            "read the session's server log; failed rows count in no median",
        )


def _unattributed(run: Reconciliation) -> Iterator[Finding]:
    rows = [row for row in run.rows if not row.is_attributed]
    if rows:
        yield Finding(
            "unattributed-requests",
            "error",
            f"{len(rows)} of {len(run.rows)} requests have unknown token sources, first "
            f"{_name(rows[0].key)}: {rows[0].unattributed}",
            "other traffic on the server, a counter that is missing, or a server that never settled",
            "give the servers to this run alone; raise deadlines.settle_s if the machine is slow",
        )


def _residuals(run: Reconciliation) -> Iterator[Finding]:
    off = [
        (r, residual) for r in run.requests if (residual := r.residual) and any(residual.values())
    ]
    if off:
        request, residual = off[0]
        parts = ", ".join(f"{name} {value:+d}" for name, value in residual.items() if value)
        yield Finding(
            "residual",
            "error",
            f"{len(off)} of {len(run.requests)} requests differ from their prediction, first "
            f"{_name(request.key)}: {parts} (measured − predicted)",
            "the engines cached or moved something else than sim/tiers.py models of these versions",
            "compare the versions in manifest.json with the supported ones in the README",
        )


def _cold_hits(run: Reconciliation) -> Iterator[Finding]:
    first_passes = (WARMUP_PASS, pass_name(0, run.plan.workload.passes[0]))
    hits = [
        row
        for row in run.rows
        if row.pass_name in first_passes and ((row.gpu_hit or 0) + (row.host_loaded or 0))
    ]
    if hits:
        yield Finding(
            "cold-hits",
            "error",
            f"{len(hits)} first-time prompts hit a cache, first {_name(hits[0].key)}: "
            f"{hits[0].gpu_hit} GPU + {hits[0].host_loaded} host tokens",
            "the caches were not empty, or two documents share a first block",
            "start from fresh servers (kvcliff does) and change workload.seed",
        )


def _treatment(run: Reconciliation) -> Iterator[Finding]:
    """The tier was on in the arms the plan gives it to and off in the others, by what it did."""
    for session, requests in _by_session(run).items():
        rows = [r.row for r in requests if r.row is not None and r.row.is_attributed]
        if not rows:
            continue
        stored = sum(row.stored_tokens or 0 for row in rows)
        loaded = sum(row.host_loaded or 0 for row in rows)
        due = sum(
            r.predicted.host_loaded
            for r in requests
            if r.predicted and r.row is not None and r.row.is_attributed
        )
        if run.arm_of(session) == "baseline" and (stored or loaded):
            yield _baseline_used_host(session, stored, loaded)
        if run.arm_of(session) != "baseline" and (stored == 0 or (due > 0 and loaded == 0)):
            yield _tier_off(session, stored, loaded, due)


def _baseline_used_host(session: str, stored: int, loaded: int) -> Finding:
    return Finding(
        "baseline-used-host",
        "error",
        f"{session} stored {stored} and loaded {loaded} tokens in a host tier it must not have",
        "a connector came in through the environment or the plan",
        "look at the session's argv and env_diff in manifest.json",
    )


def _tier_off(session: str, stored: int, loaded: int, due: int) -> Finding:
    return Finding(
        "tier-off",
        "error",
        f"{session} stored {stored} tokens in the host tier and loaded {loaded}; {due} were due",
        "the host tier was not working: vLLM answers all the same, by recomputing",
        "read the session's vLLM and LMCache logs for 'unhealthy', 'degraded' or 'Failed'",
    )


def _outputs(run: Reconciliation) -> Iterator[Finding]:
    seen: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for row in run.rows:
        if row.complete and row.output_sha256:
            seen[(row.pass_name, row.doc)][row.output_sha256] += 1
    differing = [key for key, outputs in seen.items() if len(outputs) > 1]
    if differing:
        name, doc = differing[0]
        yield Finding(
            "outputs-differ",
            "error",
            f"{len(differing)} of {len(seen)} prompts got different greedy outputs in different "
            f"sessions, first {name} document {doc}",
            "cached KV that is not the KV of the prompt, or numerics that depend on the batch",
            "a tier that is fast and wrong is not a result: compare the arms' engine versions and "
            "dtype before using these numbers",
        )
    if len(seen) > 1 and len({next(iter(outputs)) for outputs in seen.values()}) == 1:
        yield Finding(
            "outputs-constant",
            "error",
            f"all {len(seen)} prompts got the same output, so equal outputs prove nothing",
            "dummy weights",
            "use seeded or real weights",
        )


_EQUAL_FACTS = ("vllm_version", "lmcache_version", "block_size")


def _servers(run: Reconciliation) -> Iterator[Finding]:
    sessions = run.manifest["sessions"]
    facts = {name: _facts_of(session) for name, session in sessions.items()}
    yield from _servers_unlike_the_plan(run, facts)
    for fact in _EQUAL_FACTS:
        values = {name: f.get(fact) for name, f in facts.items() if f.get(fact) is not None}
        if len(set(values.values())) > 1:
            yield _differs(fact, values)
    capacity = {
        name: f.get("num_gpu_blocks") for name, f in facts.items() if run.arm_of(name) != "control"
    }
    if len(set(capacity.values())) > 1:
        yield _differs("num_gpu_blocks", capacity)


def _facts_of(session: dict[str, Any]) -> dict[str, Any]:
    facts = session.get("facts")
    return facts if isinstance(facts, dict) else {}


def _servers_unlike_the_plan(
    run: Reconciliation, facts: dict[str, dict[str, Any]]
) -> Iterator[Finding]:
    """What the servers of every measured session said they are, against what the plan asks."""
    for session in dict.fromkeys(row.session for row in run.rows):
        arm, known = run.arm_of(session), facts.get(session, {})
        server, control = run.plan.server, run.plan.control
        blocks = control.num_gpu_blocks if arm == "control" and control else server.num_gpu_blocks
        asked = {"num_gpu_blocks": blocks, "block_size": server.block_size}
        wrong = [
            f"{name} {known.get(name)}, asked {value}"
            for name, value in asked.items()
            if known.get(name) != value
        ]
        if not known.get("vllm_version"):
            wrong.append("vllm_version unknown")
        if (known.get("connector") is None) != (arm == "baseline"):
            wrong.append(f"connector {known.get('connector')}")
        if wrong:
            yield Finding(
                "servers-unlike-plan",
                "error",
                f"{session}: {'; '.join(wrong)}",
                "manifest.json was changed, or the session was measured with other servers",
                "restore manifest.json, or measure the session again",
            )


def _differs(fact: str, values: dict[str, Any]) -> Finding:
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    return Finding(
        "servers-differ",
        "error",
        f"{fact} is not the same in all sessions: {listed}",
        "the arms differ in more than the host tier",
        "measure all sessions with one installation and one plan",
    )


def _no_effect_possible(run: Reconciliation) -> Iterator[Finding]:
    """Plans that cannot show an effect of the tier, whatever is measured."""
    for session, requests in _by_session(run).items():
        predicted = [r.predicted for r in requests if r.predicted]
        config = run.arm_of(session)
        loads = sum(p.host_loaded for p in predicted)
        if config == "lmcache" and predicted and loads == 0:
            yield Finding(
                "no-effect-possible",
                "warning",
                f"{session} is predicted to load nothing from the host tier",
                "the working set fits the GPU tier, or the host tier is too small to keep it",
                "raise workload.documents, lower server.num_gpu_blocks or raise host.gib",
            )
        if config == "control" and loads > 0:
            yield Finding(
                "control-too-small",
                "warning",
                f"{session} is predicted to load {loads} tokens from the host tier",
                "the control's GPU tier does not hold the working set",
                "raise control.num_gpu_blocks",
            )


def _ledgers(run: Reconciliation) -> Iterator[Finding]:
    rows = [row for row in run.rows if row.disagreement]
    if rows:
        yield Finding(
            "ledgers-disagree",
            "error",
            f"{len(rows)} requests are told differently by the servers' own accounts, first "
            f"{_name(rows[0].key)}: {rows[0].disagreement}",
            "a load that failed, or a counter of one of them that means something else",
            "read both server logs around that request; the versions are in manifest.json",
        )


def _dropped_stores(run: Reconciliation) -> Iterator[Finding]:
    for session, requests in _by_session(run).items():
        rows = [r.row for r in requests if r.row is not None]
        n_chunks = sum(_moved(row, "host_alloc_failed_chunks") for row in rows)
        if n_chunks:
            yield Finding(
                "stores-dropped",
                "warning",
                f"{session}: LMCache found no room for {n_chunks} chunks and stored none of their "
                "prompts",
                "the host tier is full and evicts on a timer, never to make room; it may stay "
                "frozen on the first documents",
                "raise host.gib until (1 - watermark) x the tier holds one prompt or more",
            )


def _moved(row: Row, counter: str) -> int:
    before, after = row.counters_before or {}, row.counters_after or {}
    return after.get(counter, 0) - before.get(counter, 0)


def _client(run: Reconciliation) -> Iterator[Finding]:
    measured = [row for row in run.rows if row.phase == "measure"]
    reconnected = [row for row in measured if not row.conn_reused]
    if reconnected:
        yield Finding(
            "reconnected",
            "warning",
            f"{len(reconnected)} of {len(measured)} measured requests opened a new connection",
            "the server closed idle connections between requests",
            "their TTFT includes the connection set-up; the rows are marked conn_reused false",
        )
    impossible = [row for row in measured if _is_client_faster(row)]
    if impossible:
        row = impossible[0]
        yield Finding(
            "clocks-disagree",
            "warning",
            f"{len(impossible)} requests have a client TTFT below the server's own, first "
            f"{_name(row.key)}: {row.ttft_ms:.1f} < {row.server_ttft_ms:.1f} ms",
            "the server's clock covers more than the request, or a timer is wrong",
            "do not use server_ttft_ms of this engine version",
        )


def _is_client_faster(row: Row) -> bool:
    # 1 ms: vLLM stamps arrival before it has read the whole body on some versions.
    return (
        row.ttft_ms is not None
        and row.server_ttft_ms is not None
        and row.ttft_ms + 1.0 < row.server_ttft_ms
    )


def _torn(run: Reconciliation) -> Iterator[Finding]:
    for note in run.notes:
        yield Finding(
            "torn-journal",
            "warning",
            note,
            "the writer was killed, or the disk was full, in the middle of a record",
            "kvcliff run --resume measures that session again",
        )


def _by_session(run: Reconciliation) -> dict[str, list[Reconciled]]:
    sessions: dict[str, list[Reconciled]] = defaultdict(list)
    for request in run.requests:
        sessions[request.key[0]].append(request)
    return dict(sessions)


def _name(key: tuple[str, str, int]) -> str:
    return f"{key[0]}/{key[1]}/{key[2]}"
