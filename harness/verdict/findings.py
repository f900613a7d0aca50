"""What a run's numbers say against it: each finding with its numbers, its cause and a remedy.

An ``error`` is a failed check: the run does not establish what it was made for (exit code 1).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from harness.plan.labels import CONTROL
from harness.verdict.account import Account, Outputs, SessionAccount, account_of
from harness.verdict.reconcile import Reconciliation
from servers.gpu.samples import session_changes, used_uuids
from servers.tiers.registry import SERVED
from sim.workload import pass_name


@dataclass(frozen=True, slots=True)
class Finding:
    """``code`` is stable and listed in the README; ``message`` holds the numbers."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    cause: str
    remedy: str


def find(run: Reconciliation) -> list[Finding]:
    """Every check over a reconciled run, errors first; walks its requests once."""
    return findings_of(run, account_of(run.requests, first_pass=first_pass(run)))


def first_pass(run: Reconciliation) -> str:
    """Name of the plan's first pass."""
    return pass_name(0, run.plan.workload.passes[0])


def findings_of(run: Reconciliation, account: Account) -> list[Finding]:
    """Every check over what was counted in a walk, errors first."""
    found = [
        *_missing(run, account),
        *_failed(account),
        *_unattributed(account),
        *_residuals(account),
        *_cold_hits(account),
        *_treatment(run, account),
        *_outputs(run, account.outputs),
        *_servers(run, account),
        *_gpus(run),
        *_no_effect_possible(run, account),
        *_ledgers(account),
        *_dropped_stores(account),
        *_client(account),
        *_torn(run),
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.severity == "error" for finding in findings)


def _missing(run: Reconciliation, account: Account) -> Iterator[Finding]:
    if missing := account.missing.first:
        yield Finding(
            "missing-requests",
            "error",
            f"{account.missing.n} of {account.planned} planned requests have no row, first "
            f"{_name(missing.key)}",
            "the run was interrupted, or a journal was removed",
            f"kvcliff run --resume {run.folder} measures the sessions that are not complete, whole",
        )
    if unpredicted := account.unpredicted.first:
        yield Finding(
            "missing-predictions",
            "error",
            f"{account.unpredicted.n} of {account.planned} planned requests have no prediction, "
            f"first {_name(unpredicted.key)}",
            "prediction.jsonl was changed after the run began, or is another run's",
            "restore it: a prediction made after the measurement proves nothing",
        )
    if unplanned := account.unplanned.first:
        yield Finding(
            "unplanned-requests",
            "error",
            f"{account.unplanned.n} rows or predictions belong to no planned request, first "
            f"{_name(unplanned.key)}",
            "journals, predictions or plan.toml of another run in this folder",
            "keep only the files this run wrote",
        )


def _failed(account: Account) -> Iterator[Finding]:
    if account.failed.n:
        row = account.failed.row
        yield Finding(
            "failed-requests",
            "error",
            f"{account.failed.n} of {account.recorded} requests are incomplete, first "
            f"{_name(row.key)}: {row.error}",
            "the server answered with an error, too few tokens or not at all",
            "read the session's server log; failed rows count in no median",
        )


def _unattributed(account: Account) -> Iterator[Finding]:
    if account.unattributed.n:
        row = account.unattributed.row
        yield Finding(
            "unattributed-requests",
            "error",
            f"{account.unattributed.n} of {account.recorded} requests have unknown token sources, "
            f"first {_name(row.key)}: {row.unattributed}",
            "other traffic on the server, a counter that is missing, or a server that never settled",
            "give the servers to this run alone; raise deadlines.settle_s if the machine is slow",
        )


def _residuals(account: Account) -> Iterator[Finding]:
    if off := account.residual.first:
        residual = off.residual or {}
        parts = ", ".join(f"{name} {value:+d}" for name, value in residual.items() if value)
        yield Finding(
            "residual",
            "error",
            f"{account.residual.n} of {account.requests} requests differ from their prediction, "
            f"first {_name(off.key)}: {parts} (measured − predicted)",
            "the engines cached or moved something else than sim/tiers/spec.py models of these versions",
            "compare the versions in manifest.json with the supported ones in the README",
        )


def _cold_hits(account: Account) -> Iterator[Finding]:
    if account.cold_hits.n:
        row = account.cold_hits.row
        yield Finding(
            "cold-hits",
            "error",
            f"{account.cold_hits.n} first-time prompts hit a cache, first {_name(row.key)}: "
            f"{row.gpu_hit} GPU + {row.host_loaded} host tokens",
            "the caches were not empty, or two documents share a first block",
            "start from fresh servers (kvcliff does) and change workload.seed",
        )


def _treatment(run: Reconciliation, account: Account) -> Iterator[Finding]:
    """The tier was on in the arms the plan gives it to and off in the others, by what it did."""
    for session, seen in account.sessions.items():
        if not seen.attributed or (has_host := run.has_host(session)) is None:
            continue
        is_off = seen.stored == 0 or (seen.due > 0 and seen.loaded == 0)
        if not has_host and (seen.stored or seen.loaded):
            yield _used_host(session, seen.stored, seen.loaded)
        if has_host and is_off:
            yield _tier_off(session, seen.stored, seen.loaded, seen.due)
        elif _is_idle(run, session, seen):
            yield _tier_idle(session, seen.found_nowhere)


def _is_idle(run: Reconciliation, session: str, seen: SessionAccount) -> bool:
    """Whether a tier nobody predicts did nothing all session where there was something to do.

    A connector of the plan's own may have another purpose.
    """
    label, plan = run.arm_of(session), run.plan
    if label is None or (tier := plan.arm(label).tier) is None or seen.is_exact or seen.loaded:
        return False
    unit = plan.server.block_size if SERVED[tier].keeps_blocks else plan.host.chunk_tokens
    return plan.workload.document_tokens >= unit and seen.found_nowhere > 0


def _tier_idle(session: str, found_nowhere: int) -> Finding:
    return Finding(
        "tier-off",
        "error",
        f"{session} loaded nothing from its host tier, and {found_nowhere} prompts that came again "
        "were recomputed whole",
        "the host tier was not working, or is too small to keep a document until it comes again",
        "read the session's vLLM and LMCache logs, or raise host.gib",
    )


def _used_host(session: str, stored: int | None, loaded: int) -> Finding:
    return Finding(
        "baseline-used-host",
        "error",
        f"{session} stored {stored or 0} and loaded {loaded} tokens in a host tier it must not have",
        "a connector came in through the environment or the plan",
        "look at the session's argv and env_diff in manifest.json",
    )


def _tier_off(session: str, stored: int | None, loaded: int, due: int) -> Finding:
    known = "an unknown number of" if stored is None else stored
    return Finding(
        "tier-off",
        "error",
        f"{session} stored {known} tokens in the host tier and loaded {loaded}; {due} were due",
        "the host tier was not working: vLLM answers all the same, by recomputing",
        "read the session's vLLM and LMCache logs for 'unhealthy', 'degraded' or 'Failed'",
    )


def _outputs(run: Reconciliation, outputs: Outputs) -> Iterator[Finding]:
    if run.plan.model.weights == "dummy":
        yield Finding(
            "outputs-meaningless",
            "warning",
            f"the weights are dummy, so the outputs of {outputs.prompts} prompts say nothing; "
            "whether the arms answer alike was not checked",
            "model.weights is dummy: vLLM makes up small numbers, and every token is as likely",
            "take times and token sources from this run; check outputs in one with real weights",
        )
        return
    if outputs.first_differing:
        name, doc = outputs.first_differing
        yield Finding(
            "outputs-differ",
            "error",
            f"{outputs.differing} of {outputs.prompts} prompts got different greedy outputs in "
            f"different sessions, first {name} document {doc}",
            "cached KV that is not the KV of the prompt, or numerics that depend on the batch",
            "a tier that is fast and wrong is not a result: compare the arms' engine versions and "
            "dtype before using these numbers",
        )
    if outputs.prompts > 1 and outputs.is_constant:
        yield Finding(
            "outputs-constant",
            "error",
            f"all {outputs.prompts} prompts got the same output, so equal outputs prove nothing",
            "dummy weights",
            "use seeded or real weights",
        )


_EQUAL_FACTS = ("vllm_version", "lmcache_version", "block_size")


def _servers(run: Reconciliation, account: Account) -> Iterator[Finding]:
    sessions = run.manifest["sessions"]
    facts = {name: _facts_of(session) for name, session in sessions.items()}
    yield from _servers_unlike_the_plan(run, account, facts)
    for fact in _EQUAL_FACTS:
        values = {name: f.get(fact) for name, f in facts.items() if f.get(fact) is not None}
        if len(set(values.values())) > 1:
            yield _differs(fact, values)
    # Baseline and treatment have one capacity between them, every control session another.
    for is_control in (False, True):
        capacity = {
            name: f.get("num_gpu_blocks")
            for name, f in facts.items()
            if (run.arm_of(name) == CONTROL) == is_control
        }
        if len(set(capacity.values())) > 1:
            yield _differs("num_gpu_blocks", capacity)
    gpus = {name: used_uuids(record) for name, record in _gpu_records(run).items()}
    if len(set(gpus.values())) > 1:
        yield _differs("the GPU", {name: "+".join(uuids) for name, uuids in gpus.items()})


def _gpus(run: Reconciliation) -> Iterator[Finding]:
    """What the cards did: sessions are not alike on a hot card, or over a link that changed."""
    records = _gpu_records(run)
    texts = [f"{name}: {text}" for name, record in records.items() for text in record["warnings"]]
    for text in [*texts, *session_changes(records)]:
        yield Finding(
            "gpu-throttled",
            "warning",
            text,
            "heat, power supply, or a PCIe link that trained below what card and slot can do",
            "kvcliff doctor shows the card; cool it, reseat it, and measure again",
        )


def _gpu_records(run: Reconciliation) -> dict[str, dict[str, Any]]:
    """What was sampled of the GPUs, by session; none on a CPU, nor in runs from before it was."""
    sessions = run.manifest["sessions"]
    return {name: s["gpu"] for name, s in sessions.items() if isinstance(s.get("gpu"), dict)}


def _facts_of(session: dict[str, Any]) -> dict[str, Any]:
    facts = session.get("facts")
    return facts if isinstance(facts, dict) else {}


def _servers_unlike_the_plan(
    run: Reconciliation, account: Account, facts: dict[str, dict[str, Any]]
) -> Iterator[Finding]:
    """What the servers of every measured session said they are, against what the plan asks."""
    for session, seen in account.sessions.items():
        if not seen.recorded:
            continue
        arm, known = run.arm_of(session), facts.get(session, {})
        server, control = run.plan.server, run.plan.control
        blocks = control.num_gpu_blocks if arm == CONTROL and control else server.num_gpu_blocks
        asked = {"num_gpu_blocks": blocks, "block_size": server.block_size}
        wrong = [
            f"{name} {known.get(name)}, asked {value}"
            for name, value in asked.items()
            if known.get(name) != value
        ]
        if known.get("vllm_version") != server.engine:
            wrong.append(
                f"vllm_version {known.get('vllm_version') or 'unknown'}, predicted for "
                f"{server.engine}"
            )
        connector = run.plan.arm(arm).connector_class if arm is not None else None
        if known.get("connector") != connector:
            wrong.append(f"connector {known.get('connector')}, asked {connector}")
        if seen.connector != connector:
            wrong.append(f"connector {seen.connector} in the rows, asked {connector}")
        if seen.chunk_tokens is not None and connector is None:
            wrong.append(f"chunk_tokens {seen.chunk_tokens} in the rows, without a host tier")
        if wrong:
            yield Finding(
                "servers-unlike-plan",
                "error",
                f"{session}: {'; '.join(wrong)}",
                "manifest.json or the journal was changed, or the servers were others",
                "restore what was changed, or measure the session again",
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


def _no_effect_possible(run: Reconciliation, account: Account) -> Iterator[Finding]:
    """Plans that cannot show an effect of the tier, whatever is measured."""
    for session, seen in account.sessions.items():
        config, loads = run.arm_of(session), seen.predicted_loads
        is_tier = config != CONTROL and bool(run.has_host(session))
        if is_tier and seen.predicted and seen.is_exact and loads == 0:
            yield Finding(
                "no-effect-possible",
                "warning",
                f"{session} is predicted to load nothing from the host tier",
                "the working set fits the GPU tier, or the host tier is too small to keep it",
                "raise workload.documents, lower server.num_gpu_blocks or raise host.gib",
            )
        if config == CONTROL and loads > 0:
            yield Finding(
                "control-too-small",
                "warning",
                f"{session} is predicted to load {loads} tokens from the host tier",
                "the control's GPU tier does not hold the working set",
                "raise control.num_gpu_blocks",
            )


def _ledgers(account: Account) -> Iterator[Finding]:
    if account.disagreeing.n:
        row = account.disagreeing.row
        yield Finding(
            "ledgers-disagree",
            "error",
            f"{account.disagreeing.n} requests are told differently by the servers' own accounts, "
            f"first {_name(row.key)}: {row.disagreement}",
            "a load that failed, or a counter of one of them that means something else",
            "read both server logs around that request; the versions are in manifest.json",
        )


def _dropped_stores(account: Account) -> Iterator[Finding]:
    for session, seen in account.sessions.items():
        if seen.dropped_chunks:
            yield Finding(
                "stores-dropped",
                "warning",
                f"{session}: LMCache found no room for {seen.dropped_chunks} chunks and stored none "
                "of their prompts",
                "the host tier is full and evicts on a timer, never to make room; it may stay "
                "frozen on the first documents",
                "raise host.gib until (1 - watermark) x the tier holds one prompt or more",
            )


def _client(account: Account) -> Iterator[Finding]:
    if account.reconnected.n:
        yield Finding(
            "reconnected",
            "warning",
            f"{account.reconnected.n} of {account.measured} measured requests opened a new "
            "connection",
            "the server closed idle connections between requests",
            "their TTFT includes the connection set-up; the rows are marked conn_reused false",
        )
    if account.too_fast.n:
        row = account.too_fast.row
        yield Finding(
            "clocks-disagree",
            "warning",
            f"{account.too_fast.n} requests have a client TTFT below the server's own, first "
            f"{_name(row.key)}: {row.ttft_ms:.1f} < {row.server_ttft_ms:.1f} ms",
            "the server's clock covers more than the request, or a timer is wrong",
            "do not use server_ttft_ms of this engine version",
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


def _name(key: tuple[str, str, int]) -> str:
    return f"{key[0]}/{key[1]}/{key[2]}"
