"""The shape of ``summary.json`` and ``reconcile.json``: what other programs may rely on.

Written by ``harness.verdict.publish`` and ``harness.verdict.importing``; the JSON Schemas under ``results/`` are
generated from here. Times in ms, tokens as integers, ``null`` where nothing was measured.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import InputError
from harness.files import describe_invalid, load_json


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Cell(_Part):
    """TTFT of the complete rows of a group; only ``n`` when there are none."""

    n: int = Field(description="complete rows")
    p50_ms: float | None = Field(None, description="median")
    p90_ms: float | None = Field(None, description="90th percentile; null below n 20")
    min_ms: float | None = None
    max_ms: float | None = None


class Tokens(_Part):
    """Prompt tokens by source over the rows whose sources are known."""

    n: int = Field(description="rows with known sources")
    prompt: int
    computed: int
    gpu_hit: int
    host_loaded: int
    loaded_bytes: int | None = Field(description="bytes moved host → GPU; null: no row knows")
    stored: int | None = Field(description="tokens newly stored in the host tier; null: as above")


class Spread(_Part):
    """Over the session medians of one arm; only ``n`` when there are none."""

    n: int = Field(description="sessions")
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    spread_ratio: float | None = Field(None, description="highest ÷ lowest session median")


class ArmCell(Cell):
    """One arm in one pass."""

    failed: int
    tokens: Tokens
    settle_p50_ms: float | None = Field(description="median wait for the counters")
    session_medians: Spread
    sessions: dict[str, Cell]


class Interval(_Part):
    """A median over blocks and where it may lie."""

    median: float
    low: float
    high: float
    interval: str = Field(description="what low and high are, in words")
    interval_kind: Literal["range", "bootstrap"]


class Block(_Part):
    """A baseline session and the treatment session it is paired with."""

    sessions: tuple[str, str] = Field(strict=False)
    n: int = Field(description="documents complete in both")
    ratio: float = Field(description="median over the documents of baseline ÷ treatment")
    difference_ms: float = Field(description="median over the documents of baseline − treatment")


class DocumentRatio(_Part):
    """One document over the blocks; low and high are the range."""

    doc: int
    n_blocks: int
    ratio: float
    low: float
    high: float
    difference_ms: float


class Paired(_Part):
    """Baseline against treatment, paired by document inside each block."""

    ratio: float = Field(description="median of the blocks' ratios")
    low: float
    high: float
    interval: str
    interval_kind: Literal["range", "bootstrap"]
    difference_ms: Interval
    blocks: list[Block]
    n_documents: int
    documents: list[DocumentRatio] | None = Field(description="null above 1,000 documents")


class OrderEffect(_Part):
    """The first and the last session of one arm, paired by document."""

    sessions: tuple[str, str] = Field(strict=False)
    n: int
    last_over_first: float = Field(description="above 1 the later session was slower")


class Pass(_Part):
    """One walk over the documents."""

    arms: dict[str, ArmCell]
    paired_ratio: Paired | None
    order_effect: dict[str, OrderEffect | None]


class Source(Cell):
    """All rows whose document came from one place, and the same by pass and arm."""

    by_pass: dict[str, dict[str, Cell]]


class Span(_Part):
    """A phase of a session on the wall clock, a label; ms since 1970."""

    phase: str
    began_unix_ms: float
    ended_unix_ms: float


class FirstRequest(_Part):
    """The first measured request beside its like."""

    ttft_ms: float
    others_p50_ms: float
    n_others: int
    is_slow: bool


class SessionSummary(_Part):
    """One server's life."""

    session: str
    config: str
    order: int
    n: int
    failed: int
    settle_total_ms: float
    first_request: FirstRequest | None
    spans: list[Span]
    server: dict[str, Any] = Field(description="facts and commands, from manifest.json")


class Outlier(_Part):
    """A flagged row; it counts like any other."""

    session: str
    pass_name: str = Field(alias="pass")
    doc: int
    ttft_ms: float
    group_p50_ms: float
    distance: float = Field(description="distance from the group's median ÷ the limit")


class Outliers(_Part):
    """Flagged rows, the farthest 100 first."""

    n: int
    n_judged: int
    n_flagged: int
    rows: list[Outlier]


class Reason(_Part):
    """Why nothing was decided."""

    code: str
    message: str


class DecisionEvidence(_Part):
    """What the verdict was taken from."""

    ratio: float
    low: float
    high: float
    interval: str
    interval_kind: Literal["range", "bootstrap"]
    n_blocks: int
    n_documents: int
    n_pairs: int
    noise: float | None = Field(description="largest ratio between session medians of one arm")
    threshold: float = Field(description="what low must reach to be supported")


class Price(_Part):
    """Milliseconds a document, over the blocks."""

    median_ms: float
    low_ms: float
    high_ms: float
    interval: str


class Replays(_Part):
    """Replays that pay for one store; null where a replay saves nothing."""

    median: float | None
    low: float | None
    high: float | None


class Cost(_Part):
    """What the treatment costs and when it pays."""

    host_gib: float | None = Field(description="null: the treatment has no host tier, or no plan")
    first_pass: str | None
    store_cost: Price | None = Field(description="treatment − baseline in the first pass")
    replay_saving: Price | None = Field(description="baseline − treatment in the pass decided on")
    break_even_replays: Replays
    settle_after_store_ms: dict[str, float | None]
    stored_tokens: int | None
    loaded_bytes: int | None


class Decision(_Part):
    """The rule and what it says of this run."""

    claim: str
    pass_name: str = Field(alias="pass")
    rule: dict[str, Any]
    rule_source: str
    verdict: Literal["supported", "not supported", "not decided"]
    because: str
    reasons: list[Reason]
    evidence: DecisionEvidence | None
    cost: Cost
    not_established: list[str]


class CliffPoint(_Part):
    """A predicted or measured share of recomputed tokens."""

    arm: str
    gpu_tokens: int
    share: float
    n: int | None = None


class Cliff(_Part):
    """The predicted curve this plan sits on."""

    pass_name: str = Field(alias="pass")
    working_set_tokens: int
    gpu_tokens: int
    points: list[CliffPoint]
    why_not: str | None
    measured: list[CliffPoint]


class Summary(_Part):
    """``summary.json``."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file")
    run: str = Field(description="name of the run folder")
    plan_id: str = Field(description="name and content hash of the plan")
    compared: tuple[str, str | None] = Field(
        strict=False,
        description="baseline and treatment; the treatment is null where none is compared",
    )
    median_method: str = Field(description="how medians are taken, in words")
    percentile_method: str = Field(description="how percentiles are taken, in words")
    ratio_direction: str = Field(description="which arm is on top")
    difference_direction: str = Field(description="which arm is subtracted")
    unit_of_analysis: str = Field(description="what counts as one observation")
    interval_method: str = Field(description="what low and high are, in words")
    outlier_rule: str = Field(description="when a row is flagged, in words")
    passes: dict[str, Pass] = Field(description="per pass: arms, paired ratio, order effect")
    sources: dict[str, Source] = Field(description="TTFT by where the document's KV came from")
    sessions: list[SessionSummary] = Field(description="per session: counts, phases, servers")
    outliers: Outliers = Field(description="flagged rows, never dropped")
    decision: Decision = Field(description="verdict, reasons, cost, what is not established")
    cliff: Cliff | None = Field(description="predicted curve; null for imported rows")
    plan: dict[str, Any] | None = Field(description="the resolved plan; null for imported rows")
    environment: dict[str, Any] = Field(description="machine, versions, build, model")
    takeaways: dict[str, str] = Field(description="a sentence for each kind of chart")


class Split(_Part):
    """Prompt tokens by source; null where unknown."""

    computed: int | None
    gpu_hit: int | None
    host_loaded: int | None


class PublishedFinding(_Part):
    """A check that said something."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    cause: str
    remedy: str


class RequestEntry(_Part):
    """One planned or recorded request."""

    session: str
    pass_name: str = Field(alias="pass")
    doc: int
    complete: bool | None
    measured: Split | None
    predicted: Split | None
    why_not_predicted: str | None = Field(description="why predicted holds no number")
    residual: dict[str, int] | None = Field(description="measured − predicted")
    reconciled: bool
    config: str | None
    order: int | None
    seq: int | None
    phase: str | None
    doc_tokens: int | None
    prompt_tokens: int | None
    ttft_ms: float | None
    total_ms: float | None
    settle_ms: float | None
    loaded_bytes: int | None
    stored_tokens: int | None
    error: str | None
    unattributed: str | None
    source: str | None
    predicted_bytes: int | None


class PassResidual(_Part):
    """One pass of one session; ``largest``: the residual farthest from 0, by name."""

    session: str
    pass_name: str = Field(alias="pass")
    requests: int
    recorded: int
    reconciled: int
    largest: dict[str, int] | None
    why_not_predicted: str | None


class NotPredicted(_Part):
    """An arm without an exact prediction: reconciled means that the sources sum to the prompt."""

    why: str
    sessions: list[str]
    requests: int = Field(description="warm-up included")


class ReconcileFile(_Part):
    """``reconcile.json``."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file")
    run: str = Field(description="name of the run folder")
    requests_planned: int = Field(description="warm-up included")
    requests_recorded: int = Field(description="rows in the journals")
    requests_reconciled: int = Field(
        description="complete, sources sum to the prompt, every residual 0"
    )
    not_predicted: list[NotPredicted] = Field(
        description="sessions without an exact prediction, and why"
    )
    findings: list[PublishedFinding] = Field(description="failed checks first")
    every: int = Field(description="requests lists every such request; 1: all of them")
    requests: list[RequestEntry] = Field(description="in plan order, unplanned ones where found")
    by_pass: list[PassResidual] = Field(description="largest residuals per session and pass")


def read_published(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``summary.json`` and ``reconcile.json`` of a run folder; InputError says how to make them."""
    if not run.is_dir():
        raise InputError(f"{run} is not a run folder")
    contents = []
    for name in ("summary.json", "reconcile.json"):
        path = run / name
        try:
            content = load_json(path.read_bytes(), where=str(path))
        except OSError as error:
            raise InputError(
                f"cannot read {path}: {error.strerror}", hint=f"kvcliff summarize {run} makes it"
            ) from None
        if not isinstance(content, dict) or content.get("schema") != 1:
            raise InputError(f"{path}: schema is not 1", hint=f"kvcliff summarize {run}")
        contents.append(content)
    summary, reconciliation = contents
    if "takeaways" not in summary or "not_predicted" not in reconciliation:
        raise InputError(
            f"{run}: its summary.json or reconcile.json is an older kvcliff's",
            hint=f"kvcliff summarize {run}; of an imported run: kvcliff import {run}/ttft.jsonl",
        )
    for name, shape, content in (
        ("summary.json", Summary, summary),
        ("reconcile.json", ReconcileFile, reconciliation),
    ):
        try:
            shape.model_validate(content)
        except ValidationError as error:
            raise InputError(
                f"{run / name} was changed: {describe_invalid(error)}",
                hint=f"kvcliff summarize {run}; of an imported run: kvcliff import {run}/ttft.jsonl",
            ) from None
    return summary, reconciliation
