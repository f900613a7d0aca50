"""Every finding there is: its code, its severity, what it means, and its texts.

A finding is made by calling its row below, and in no other way; the documents' table is written
from ``TABLE``. An ``error`` is a failed check: the run does not establish what it was made for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, ParamSpec

from harness.verdict.account import LATE_MS, Found, Outputs, SessionAccount
from harness.verdict.schema import Code, Finding, Severity

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table; ``says`` is what such a finding means, whatever the run's numbers."""

    code: Code
    severity: Severity
    says: str


TABLE: list[Kind] = []
"""The rows below, as the documents list them."""


class Texts(NamedTuple):
    """What one finding says; ``message`` holds the numbers."""

    message: str
    cause: str
    remedy: str


def _row(code: str, severity: Severity) -> Callable[[Callable[P, Texts]], Callable[P, Finding]]:
    """Make a row of the function below: it is called for the finding, its docstring begins with ``says``."""

    def entered(texts: Callable[P, Texts]) -> Callable[P, Finding]:
        says = " ".join((texts.__doc__ or "").partition("\n\n")[0].split())
        kind = Kind(Code(code), severity, says)
        assert kind.code not in {other.code for other in TABLE}
        TABLE.append(kind)

        def finding(*args: P.args, **kwargs: P.kwargs) -> Finding:
            said = texts(*args, **kwargs)._asdict()
            return Finding(code=kind.code, severity=kind.severity, **said)

        return finding

    return entered


@_row("missing-requests", "error")
def missing_requests(missing: Found, *, planned: int, folder: Path) -> Texts:
    """A planned request has no row."""
    return Texts(
        f"{missing.n} of {planned} planned requests have no row, first {missing.name}",
        "the run was interrupted, or a journal was removed",
        f"kvcliff run --resume {folder} measures the sessions that are not complete, whole",
    )


@_row("missing-predictions", "error")
def missing_predictions(unpredicted: Found, *, planned: int) -> Texts:
    """A planned request has no prediction."""
    return Texts(
        f"{unpredicted.n} of {planned} planned requests have no prediction, "
        f"first {unpredicted.name}",
        "prediction.jsonl was changed after the run began, or is another run's",
        "restore it: a prediction made after the measurement proves nothing",
    )


@_row("unplanned-requests", "error")
def unplanned_requests(unplanned: Found) -> Texts:
    """A row or prediction belongs to no planned request."""
    return Texts(
        f"{unplanned.n} rows or predictions belong to no planned request, first {unplanned.name}",
        "journals, predictions or plan.toml of another run in this folder",
        "keep only the files this run wrote",
    )


@_row("failed-requests", "error")
def failed_requests(n: int, *, first: str, error: str | None, recorded: int) -> Texts:
    """An answer was incomplete; its row is kept and in no median."""
    return Texts(
        f"{n} of {recorded} requests are incomplete, first {first}: {error}",
        "the server answered with an error, too few tokens or not at all",
        "read the session's server log; failed rows count in no median",
    )


@_row("unattributed-requests", "error")
def unattributed_requests(unattributed: Found, *, recorded: int) -> Texts:
    """Token sources unknown: other traffic, missing counters, never settled."""
    return Texts(
        f"{unattributed.n} of {recorded} requests have unknown token sources, "
        f"first {unattributed.name}: {unattributed.row.unattributed}",
        "other traffic on the server, a counter that is missing, or a server that never settled",
        "give the servers to this run alone; raise deadlines.settle_s if the machine is slow",
    )


@_row("residual", "error")
def residual(off: Found, *, requests: int, parts: Mapping[str, int]) -> Texts:
    """Measured tokens or bytes differ from the prediction."""
    differing = ", ".join(f"{name} {value:+d}" for name, value in parts.items() if value)
    return Texts(
        f"{off.n} of {requests} requests differ from their prediction, "
        f"first {off.name}: {differing} (measured − predicted)",
        "the engines cached or moved something else than sim/tiers/spec.py models of these versions",
        "compare the versions in manifest.json with the supported ones in the README",
    )


@_row("cold-hits", "error")
def cold_hits(hits: Found) -> Texts:
    """A first-time prompt hit a cache."""
    return Texts(
        f"{hits.n} first-time prompts hit a cache, first {hits.name}: "
        f"{hits.row.gpu_hit} GPU + {hits.row.host_loaded} host tokens",
        "the caches were not empty, or two documents share a first block",
        "start from fresh servers (kvcliff does) and change workload.seed",
    )


@_row("tier-off", "error")
def tier_off(session: str, seen: SessionAccount, *, is_idle: bool) -> Texts:
    """The tier arm stored or loaded nothing where it should have.

    ``is_idle``: no prediction says what was due, but prompts came again and were found nowhere.
    """
    if is_idle:
        return Texts(
            f"{session} loaded nothing from its host tier, and {seen.found_nowhere} prompts that "
            "came again were recomputed whole",
            "the host tier was not working, or is too small to keep a document until it comes again",
            "read the session's vLLM and LMCache logs, or raise host.gib",
        )
    known = "an unknown number of" if seen.stored is None else seen.stored
    return Texts(
        f"{session} stored {known} tokens in the host tier and loaded {seen.loaded}; {seen.due} "
        "were due",
        "the host tier was not working: vLLM answers all the same, by recomputing",
        "read the session's vLLM and LMCache logs for 'unhealthy', 'degraded' or 'Failed'",
    )


@_row("baseline-used-host", "error")
def baseline_used_host(session: str, seen: SessionAccount) -> Texts:
    """The baseline had a host tier."""
    return Texts(
        f"{session} stored {seen.stored or 0} and loaded {seen.loaded} tokens in a host tier it "
        "must not have",
        "a connector came in through the environment or the plan",
        "look at the session's argv and env_diff in manifest.json",
    )


@_row("outputs-differ", "error")
def outputs_differ(outputs: Outputs, *, pass_name: str, doc: int) -> Texts:
    """The same prompt got different greedy outputs in different sessions."""
    return Texts(
        f"{outputs.differing} of {outputs.prompts} prompts got different greedy outputs in "
        f"different sessions, first {pass_name} document {doc}",
        "cached KV that is not the KV of the prompt, or numerics that depend on the batch",
        "a tier that is fast and wrong is not a result: compare the arms' engine versions and "
        "dtype before using these numbers",
    )


@_row("outputs-differ-in-batches", "warning")
def outputs_differ_in_batches(outputs: Outputs, *, pass_name: str, doc: int) -> Texts:
    """As outputs-differ, of requests that were in flight with others."""
    return Texts(
        f"{outputs.differing} of {outputs.prompts} prompts got different greedy outputs in "
        f"different sessions, first {pass_name} document {doc}",
        "numerics that depend on which requests share a step, or cached KV that is not the prompt's",
        "run the plan without [load]: there the outputs must be the same",
    )


@_row("outputs-constant", "error")
def outputs_constant(outputs: Outputs) -> Texts:
    """All prompts got the same output, so equality proves nothing."""
    return Texts(
        f"all {outputs.prompts} prompts got the same output, so equal outputs prove nothing",
        "dummy weights",
        "use seeded or real weights",
    )


@_row("outputs-meaningless", "warning")
def outputs_meaningless(outputs: Outputs) -> Texts:
    """Dummy weights; whether the arms answer alike was not checked."""
    return Texts(
        f"the weights are dummy, so the outputs of {outputs.prompts} prompts say nothing; "
        "whether the arms answer alike was not checked",
        "model.weights is dummy: vLLM makes up small numbers, and every token is as likely",
        "take times and token sources from this run; check outputs in one with real weights",
    )


@_row("servers-unlike-plan", "error")
def servers_unlike_plan(session: str, wrong: list[str]) -> Texts:
    """A session's servers are unknown, or not what the plan asks for."""
    return Texts(
        f"{session}: {'; '.join(wrong)}",
        "manifest.json or the journal was changed, or the servers were others",
        "restore what was changed, or measure the session again",
    )


@_row("servers-differ", "error")
def servers_differ(fact: str, of_sessions: Mapping[str, object]) -> Texts:
    """Versions or KV capacity differ between sessions."""
    listed = ", ".join(f"{session} {value}" for session, value in of_sessions.items())
    return Texts(
        f"{fact} is not the same in all sessions: {listed}",
        "the arms differ in more than the host tier",
        "measure all sessions with one installation and one plan",
    )


@_row("ledgers-disagree", "error")
def ledgers_disagree(disagreeing: Found) -> Texts:
    """The counters of vLLM, of LMCache and the answer's own count contradict each other."""
    return Texts(
        f"{disagreeing.n} requests are told differently by the servers' own accounts, "
        f"first {disagreeing.name}: {disagreeing.row.disagreement}",
        "a load that failed, or a counter of one of them that means something else",
        "read both server logs around that request; the versions are in manifest.json",
    )


@_row("times-disagree", "error")
def times_disagree(what: str) -> Texts:
    """Times contradict: a request was sent 50 ms or more before the one before it had settled, a
    TTFT is below half the server's own or above twice that and a second more (with others in flight,
    above it by twice the longest step of the pass and a second more), a session's
    requests took less than the time between them and that is over 250 ms each, or some lie more
    than 2 s outside the time in which its servers ran.
    """
    return Texts(
        what,
        "a journal or manifest.json was changed, or while the session was measured the clock was "
        "set or the machine slept",
        "restore the files, or measure the session again",
    )


@_row("stores-dropped", "warning")
def stores_dropped(session: str, *, chunks: int) -> Texts:
    """LMCache found no room and stored nothing of a prompt."""
    return Texts(
        f"{session}: LMCache found no room for {chunks} chunks and stored none of their prompts",
        "the host tier is full and evicts on a timer, never to make room; it may stay frozen on "
        "the first documents",
        "raise host.gib until (1 - watermark) x the tier holds one prompt or more",
    )


@_row("no-effect-possible", "warning")
def no_effect_possible(session: str, *, pass_name: str) -> Texts:
    """By prediction the tier has nothing to load in the pass that is decided on."""
    return Texts(
        f"{session} is predicted to load nothing from the host tier in {pass_name}, the pass that "
        "is decided on",
        "the working set fits the GPU tier, or the host tier is too small to keep it",
        "raise workload.documents, lower server.num_gpu_blocks or raise host.gib",
    )


@_row("control-too-small", "warning")
def control_too_small(session: str, *, loads: int) -> Texts:
    """By prediction the control loads from the host."""
    return Texts(
        f"{session} is predicted to load {loads} tokens from the host tier",
        "the control's GPU tier does not hold the working set",
        "raise control.num_gpu_blocks",
    )


@_row("reconnected", "warning")
def reconnected(opened: Found, *, measured: int) -> Texts:
    """A TTFT includes a connection set-up."""
    return Texts(
        f"{opened.n} of {measured} measured requests opened a new connection",
        "the server closed idle connections between requests",
        "their TTFT includes the connection set-up; the rows are marked conn_reused false",
    )


@_row("client-late", "error")
def client_late(late: Found, *, measured: int) -> Texts:
    """The client of an open loop could not send its requests when they were due.

    What it asked was then no longer the plan's load, but one that waits for the server.
    """
    return Texts(
        f"{late.n} of {measured} measured requests were sent more than {LATE_MS:.0f} ms after they "
        f"were due, first {late.name}, {late.row.late_ms:,.0f} ms",
        "load.most_in_flight requests were in flight already, or the client's machine is too busy",
        "raise load.most_in_flight, lower load.rate, or give the client more cores",
    )


@_row("clocks-disagree", "warning")
def clocks_disagree(too_fast: Found) -> Texts:
    """The client's TTFT is below the server's own."""
    row = too_fast.row
    return Texts(
        f"{too_fast.n} requests have a client TTFT below the server's own, first "
        f"{too_fast.name}: {row.ttft_ms:.1f} < {row.server_ttft_ms:.1f} ms",
        "the server's clock covers more than the request, or a timer is wrong",
        "do not use server_ttft_ms of this engine version",
    )


@_row("gpu-throttled", "warning")
def gpu_throttled(what: str) -> Texts:
    """The GPU was slowed by heat or power, or its PCIe link is not what it can be, or changed."""
    return Texts(
        what,
        "heat, power supply, or a PCIe link that trained below what card and slot can do",
        "kvcliff doctor shows the card; cool it, reseat it, and measure again",
    )


@_row("gpu-memory-unread", "warning")
def gpu_memory_unread(session: str, gpus: list[str]) -> Texts:
    """The memory of a GPU could not be read after a session, so nobody knows that it was free."""
    return Texts(
        f"after {session} the memory of {', '.join(gpus)} could not be read",
        "the driver did not answer; the next session may have started on a GPU that was not free",
        "kvcliff doctor shows what the driver says; compare num_gpu_blocks between the sessions",
    )


@_row("torn-journal", "warning")
def torn_journal(note: str) -> Texts:
    """The last record of a journal was cut short."""
    return Texts(
        note,
        "the writer was killed, or the disk was full, in the middle of a record",
        "kvcliff run --resume measures that session again",
    )


@_row("unequal-sessions", "error")
def unequal_sessions(missing: int, *, of: int, first: str) -> Texts:
    """A session of an imported file lacks requests that its other sessions have."""
    return Texts(
        f"{missing} of {of} documents that other sessions have are missing, first {first}",
        "rows were lost, or the sessions were not asked the same requests",
        "import a file with every request of every session, failed ones too (complete: false)",
    )


@_row("nothing-compared", "error")
def nothing_compared(arms: list[str]) -> Texts:
    """An imported file lacks the baseline or an arm to compare with it."""
    return Texts(
        f"the file has rows of {', '.join(arms)}; a comparison needs baseline and one other arm",
        "rows of an arm are missing, or config calls the arms by other names",
        "name the arm without a host tier baseline, and the other one anything else",
    )


@_row("times-of-zero", "warning")
def times_of_zero(first: str) -> Texts:
    """An imported row has a time of 0 ms."""
    return Texts(
        f"a time of 0 ms, first {first}",
        "the writer put 0 where it measured nothing, or rounded to another unit",
        "write null and complete: false for a request without an answer; times are in ms",
    )


@_row("several-runs", "warning")
def several_runs(runs: list[str]) -> Texts:
    """An imported file holds rows of several runs."""
    return Texts(
        f"rows of {len(runs)} runs: {', '.join(runs[:5])}" + (", …" if len(runs) > 5 else ""),
        "files of several runs were joined; they may be of other machines or versions",
        "import each run on its own, and compare what they say",
    )


@_row("sessions-assumed", "warning")
def sessions_assumed() -> Texts:
    """An imported file names no session; how its rows form them was assumed."""
    return Texts(
        "the rows name no session; the k-th row of a document was taken for the k-th session of "
        "its arm",
        "the file was not written by kvcliff",
        "add the field session to every row",
    )
