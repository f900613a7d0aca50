"""The shape of ``summary.json`` and ``reconcile.json``: what a verdict is made of.

The statistics, the decision and the publishing construct these models; tables, charts, reports and
comparisons take them, and ``read_published`` reads them back. The JSON Schemas under ``results/``
are generated from here. Times in ms, tokens as integers, ``null`` where nothing was measured; a
field with a default is absent from the files where it was not given.
"""

from pathlib import Path
from typing import Literal, NewType, TypeVar

from pydantic import Field, field_serializer

from harness.errors import InputError
from harness.files import load_json, validated
from harness.forecast.cliff import Cliff
from harness.plan.rule import DecisionSection
from harness.record.folder import RECONCILE_FILE, ROWS_FILE, SUMMARY_FILE
from harness.record.row import Predicted, Sample
from harness.record.versions import check_version
from harness.verdict.measured import (
    SCHEMA,
    Estimate,
    JsonObject,
    LoadCell,
    RatioRange,
    Result,
    Statistics,
)
from harness.verdict.procedure import Verdict

Code = NewType("Code", str)
"""Of a row of ``finding_table``, where alone one is made; in a file, perhaps another kvcliff's."""
Severity = Literal["error", "warning"]


class Reason(Result):
    """Why nothing was decided."""

    code: str
    message: str


class SetAside(Result):
    """A session whose host was in trouble; medians ÷ those of its arm's other sessions."""

    session: str
    factor: float = Field(description="in the pass decided on")
    first_factor: float = Field(description="in the first pass")
    verdict_with_it: Verdict


class DecisionEvidence(RatioRange):
    """What the verdict was taken from."""

    coverage: float = Field(description="share of runs in which low to high holds the median")
    n_blocks: int
    n_documents: int
    n_pairs: int = Field(description="pairs of documents")
    at_least: float | None = Field(description="the ratio is at least this; null below two blocks")
    at_most: float | None = Field(description="and at most this")
    error: float | None = Field(description="share of runs in which at_least, or at_most, is wrong")
    noise: float | None = Field(description="standard deviation of the blocks' log ratios")
    first_pass_ratio: float | None = Field(
        description="baseline ÷ treatment in the first pass, mean of the logs; null without one"
    )
    allowance: float | None = Field(description="factor by which a bound gives way to that")
    set_aside: SetAside | None = Field(description="a bad session, whose pair is left out")
    pairs_needed: int | None = Field(
        description="pairs with which a ratio and a noise like these are decided in 80 % of runs; "
        "null above 1,000"
    )
    order_effect: Estimate | None = Field(
        description="a pair's second session ÷ its first; null below three blocks or in one order"
    )
    control_drift: Estimate | None = Field(description="the control's first pass ÷ the arms'")


class Price(Result):
    """Milliseconds a document, over the blocks."""

    median_ms: float
    low_ms: float
    high_ms: float
    interval: str


class Replays(Result):
    """Replays that pay for one store; null where a replay saves nothing."""

    median: float | None
    low: float | None
    high: float | None


class Cost(Result):
    """What the treatment costs and when it pays."""

    host_gib: float | None = Field(description="null: the treatment has no host tier, or no plan")
    first_pass: str | None
    store_cost: Price | None = Field(description="treatment − baseline in the first pass")
    replay_saving: Price | None = Field(description="baseline − treatment in the pass decided on")
    break_even_replays: Replays
    settle_after_store_ms: dict[str, float | None]
    stored_tokens: int | None
    loaded_bytes: int | None


class Decision(Result):
    """The rule and what it says of this run."""

    claim: str
    pass_name: str = Field(alias="pass")
    rule: DecisionSection
    rule_source: str
    verdict: Verdict
    because: str
    reasons: list[Reason]
    evidence: DecisionEvidence | None
    cost: Cost
    not_established: list[str]

    @field_serializer("rule")
    def _with_defaults(self, rule: DecisionSection) -> JsonObject:
        return rule.model_dump(by_alias=True)


class Summary(Statistics):
    """``summary.json``."""

    decision: Decision = Field(description="verdict, reasons, cost, what is not established")
    cliff: Cliff | None = Field(description="predicted curve; null for imported rows")
    plan: JsonObject | None = Field(description="the resolved plan; null for imported rows")
    environment: JsonObject = Field(description="machine, versions, build, model")
    takeaways: dict[str, str] = Field(description="a sentence for each kind of chart")
    load: list[LoadCell] | None = Field(
        None, description="by pass and arm; absent: one request was in flight at a time"
    )


class Finding(Result):
    """A check that said something."""

    code: Code
    severity: Severity
    message: str
    cause: str
    remedy: str


class RequestEntry(Result):
    """One planned or recorded request; ``row`` and ``predicted`` null where there is none."""

    session: str
    pass_name: str = Field(alias="pass")
    doc: int
    row: Sample | None = Field(description="as the journal has it")
    predicted: Predicted | None
    residual: dict[str, int] | None = Field(description="measured − predicted")
    reconciled: bool
    source: str | None = Field(description="where the document's KV came from")


class PassResidual(Result):
    """One pass of one session; ``largest``: the residual farthest from 0, by name."""

    session: str
    pass_name: str = Field(alias="pass")
    requests: int
    recorded: int
    reconciled: int
    largest: dict[str, int] | None
    why_not_predicted: str | None


class NotPredicted(Result):
    """An arm without an exact prediction: reconciled means that the sources sum to the prompt."""

    why: str
    sessions: list[str]
    requests: int = Field(description="warm-up included")


class ReconcileFile(Result):
    """``reconcile.json``."""

    schema_version: Literal[3] = Field(alias="schema", description="version of this file")
    run: str = Field(description="name of the run folder")
    requests_planned: int = Field(description="warm-up included")
    requests_recorded: int = Field(description="rows in the journals")
    requests_reconciled: int = Field(
        description="complete, sources sum to the prompt, every residual 0"
    )
    findings: list[Finding] = Field(description="failed checks first")
    requests: list[RequestEntry] = Field(description="in plan order, unplanned ones where found")
    every: int = Field(description="requests lists every such request; 1: all of them")
    by_pass: list[PassResidual] = Field(description="largest residuals per session and pass")
    not_predicted: list[NotPredicted] = Field(
        description="sessions without an exact prediction, and why"
    )


File = TypeVar("File", Summary, ReconcileFile)


def read_published(run: Path) -> tuple[Summary, ReconcileFile]:
    """``summary.json`` and ``reconcile.json`` of a run folder; InputError says how to make them."""
    if not run.is_dir():
        raise InputError(f"{run} is not a run folder")
    return _read(run, SUMMARY_FILE, Summary), _read(run, RECONCILE_FILE, ReconcileFile)


def _read(run: Path, name: str, shape: type[File]) -> File:
    path, again = run / name, f"kvcliff summarize {run}"
    try:
        content = load_json(path.read_bytes(), where=str(path))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", hint=f"{again} makes it"
        ) from None
    again += f"; of an imported run: kvcliff import {run}/{ROWS_FILE}"
    # Before anything else in the file is looked at: another version may mean anything by it.
    version = content.get("schema") if isinstance(content, dict) else None
    check_version(version, newest=SCHEMA, where=str(path))
    if version != SCHEMA:
        raise InputError(f"{path} is an older kvcliff's, schema {version}", hint=again)
    return validated(shape, content, where=f"{path} was changed", hint=again)
