"""The checks: what a run's numbers say against it. Their codes and texts are in finding_table."""

from collections.abc import Iterable, Iterator

from harness.plan.arms import CONTROL
from harness.record.manifest import GpuRecord, ServerRecord
from harness.record.row import NO_CONNECTOR
from harness.verdict import finding_table as table
from harness.verdict.account import Account, Outputs, SessionAccount
from harness.verdict.reconcile import Reconciliation
from harness.verdict.schema import Finding
from servers.gpu.samples import session_changes
from servers.tiers.registry import SERVED
from sim.workload import pass_name

LATE_SHARE = 0.01
"""Of the measured requests of an open loop so many may be late."""


def findings_of(run: Reconciliation, account: Account) -> list[Finding]:
    """Every check over what was counted in a walk, errors first."""
    found = [
        *_requests(run, account),
        *_treatment(run, account),
        *_outputs(run, account.outputs),
        *_servers(run, account),
        *_gpus(run),
        *_no_effect_possible(run, account),
        *([table.ledgers_disagree(account.disagreeing)] if account.disagreeing.n else []),
        *(
            table.stores_dropped(session, chunks=seen.dropped_chunks)
            for session, seen in account.sessions.items()
            if seen.dropped_chunks
        ),
        *map(table.times_disagree, account.times.problems(run.manifest.sessions)),
        *_client(account),
        *map(table.torn_journal, run.notes),
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.severity == "error" for finding in findings)


def _requests(run: Reconciliation, account: Account) -> Iterator[Finding]:
    """What is off with single requests, each kind told by how many and the first."""
    if account.missing.n:
        yield table.missing_requests(account.missing, planned=account.planned, folder=run.folder)
    if account.unpredicted.n:
        yield table.missing_predictions(account.unpredicted, planned=account.planned)
    if account.unplanned.n:
        yield table.unplanned_requests(account.unplanned)
    if account.failed.n:
        failed = account.failed
        yield table.failed_requests(
            failed.n, first=failed.name, error=failed.row.error, recorded=account.recorded
        )
    if account.unattributed.n:
        yield table.unattributed_requests(account.unattributed, recorded=account.recorded)
    if off := account.residual.first:
        yield table.residual(account.residual, requests=account.requests, parts=off.residual or {})
    if account.cold_hits.n:
        yield table.cold_hits(account.cold_hits)


def _treatment(run: Reconciliation, account: Account) -> Iterator[Finding]:
    """The tier was on in the arms the plan gives it to and off in the others, by what it did."""
    for session, seen in account.sessions.items():
        if not seen.attributed or (has_host := run.has_host(session)) is None:
            continue
        is_off = seen.stored == 0 or (seen.due > 0 and seen.loaded == 0)
        if not has_host and (seen.stored or seen.loaded):
            yield table.baseline_used_host(session, seen)
        if has_host and is_off:
            yield table.tier_off(session, seen, is_idle=False)
        elif _is_idle(run, session, seen):
            yield table.tier_off(session, seen, is_idle=True)


def _is_idle(run: Reconciliation, session: str, seen: SessionAccount) -> bool:
    """Whether a tier nobody predicts did nothing all session where there was something to do.

    A connector of the plan's own may have another purpose.
    """
    arm, plan = run.arm_of(session), run.plan
    if arm is None or (tier := plan.arm(arm).tier) is None or seen.is_exact or seen.loaded:
        return False
    unit = plan.server.block_size if SERVED[tier].keeps_blocks else plan.host.chunk_tokens
    return plan.workload.document_tokens >= unit and seen.found_nowhere > 0


def _outputs(run: Reconciliation, outputs: Outputs) -> Iterator[Finding]:
    if run.plan.model.weights == "dummy":
        yield table.outputs_meaningless(outputs)
        return
    if outputs.first_differing:
        name, doc = outputs.first_differing
        differ = table.outputs_differ if run.plan.load is None else table.outputs_differ_in_batches
        yield differ(outputs, pass_name=name, doc=doc)
    if outputs.prompts > 1 and outputs.is_constant:
        yield table.outputs_constant(outputs)


def _servers(run: Reconciliation, account: Account) -> Iterator[Finding]:
    facts = {name: session.facts for name, session in run.manifest.sessions.items()}
    yield from _servers_unlike_the_plan(run, account, facts)
    for fact, values in _equal_facts(run, facts):
        if len(set(values.values())) > 1:
            yield table.servers_differ(fact, values)


def _equal_facts(
    run: Reconciliation, facts: dict[str, ServerRecord]
) -> Iterator[tuple[str, dict[str, object]]]:
    """What must be one in all sessions: name, and values by session."""
    for fact in ("vllm_version", "lmcache_version", "block_size"):
        known = {name: getattr(f, fact) for name, f in facts.items()}
        yield fact, {name: value for name, value in known.items() if value is not None}
    # Baseline and treatment have one capacity between them, every control session another.
    for is_control in (False, True):
        of_kind = [name for name in facts if (run.arm_of(name) == CONTROL) == is_control]
        yield "num_gpu_blocks", {name: facts[name].num_gpu_blocks for name in of_kind}
    gpus = _gpu_records(run).items()
    yield "the GPU", {name: "+".join(device.uuid for device in gpu.devices) for name, gpu in gpus}


def _gpus(run: Reconciliation) -> Iterator[Finding]:
    """What the cards did: sessions are not alike on a hot card, or over a link that changed."""
    records = _gpu_records(run)
    warnings = [f"{name}: {text}" for name, record in records.items() for text in record.warnings]
    changes = session_changes({name: record.model_dump() for name, record in records.items()})
    yield from map(table.gpu_throttled, [*warnings, *changes])
    for name, session in run.manifest.sessions.items():
        if session.unread_gpus:
            yield table.gpu_memory_unread(name, session.unread_gpus)


def _gpu_records(run: Reconciliation) -> dict[str, GpuRecord]:
    """What was sampled of the GPUs, by session; none on a CPU, nor in runs from before it was."""
    return {name: s.gpu for name, s in run.manifest.sessions.items() if s.gpu is not None}


def _servers_unlike_the_plan(
    run: Reconciliation, account: Account, facts: dict[str, ServerRecord]
) -> Iterator[Finding]:
    """What the servers of every measured session said they are, against what the plan asks."""
    for session, seen in account.sessions.items():
        if not seen.recorded:
            continue
        arm, known = run.arm_of(session), facts.get(session, ServerRecord())
        server, control = run.plan.server, run.plan.control
        blocks = control.num_gpu_blocks if arm == CONTROL and control else server.num_gpu_blocks
        asked = {"num_gpu_blocks": blocks, "block_size": server.block_size}
        wrong = [
            f"{name} {getattr(known, name)}, asked {value}"
            for name, value in asked.items()
            if getattr(known, name) != value
        ]
        if known.vllm_version != server.engine:
            wrong.append(
                f"vllm_version {known.vllm_version or 'unknown'}, predicted for {server.engine}"
            )
        connector = run.plan.arm(arm).connector_class if arm is not None else None
        if known.connector != connector:
            wrong.append(f"connector {known.connector}, asked {connector}")
        if seen.connector not in (None, connector or NO_CONNECTOR):
            wrong.append(f"connector {seen.connector} in the rows, asked {connector}")
        if seen.chunk_tokens is not None and connector is None:
            wrong.append(f"chunk_tokens {seen.chunk_tokens} in the rows, without a host tier")
        if wrong:
            yield table.servers_unlike_plan(session, wrong)


def _no_effect_possible(run: Reconciliation, account: Account) -> Iterator[Finding]:
    """Plans that cannot show an effect of the tier, whatever is measured."""
    passes = [pass_name(i, order) for i, order in enumerate(run.plan.workload.passes)]
    deciding = run.plan.decision.deciding_pass(passes)
    for session, seen in account.sessions.items():
        config, loads = run.arm_of(session), seen.predicted_loads
        is_tier = config != CONTROL and bool(run.has_host(session))
        is_idle = not account.due[session, deciding]
        if is_tier and seen.predicted and seen.is_exact and is_idle:
            yield table.no_effect_possible(session, pass_name=deciding)
        if config == CONTROL and loads > 0:
            yield table.control_too_small(session, loads=loads)


def _client(account: Account) -> Iterator[Finding]:
    if account.reconnected.n:
        yield table.reconnected(account.reconnected, measured=account.measured)
    if account.late.n > LATE_SHARE * account.measured:
        yield table.client_late(account.late, measured=account.measured)
    if account.too_fast.n:
        yield table.clocks_disagree(account.too_fast)
