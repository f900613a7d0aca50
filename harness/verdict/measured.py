"""What the rows of a run say: the part of ``summary.json`` that needs no plan and no prediction.

Times in ms, tokens as integers, ``null`` where nothing was measured; a field with a default is
absent from the file where it was not given.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

# Of summary.json and reconcile.json, which are made again from a run folder and so never migrated.
# History: 1 = first published (kvcliff 0.1). 2: a request of reconcile.json has its row and its
# prediction as the journal and prediction.jsonl have them. 3: the evidence has bounds with an error,
# intervals have their coverage.
SCHEMA: Final = 3

JsonObject = dict[str, Any]
"""A copy of what another file says; that file's own module knows its shape."""


class Result(BaseModel):
    """Something a run is found to have; never changed once it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    def as_json(self) -> JsonObject:
        """The content of the file; fields nobody gave are left out."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Cell(Result):
    """TTFT of the complete rows of a group; only ``n`` when there are none."""

    n: int = Field(description="complete rows")
    p50_ms: float | None = Field(None, description="median")
    p90_ms: float | None = Field(None, description="90th percentile; null below n 20")
    min_ms: float | None = None
    max_ms: float | None = None


class TokenSums(Result):
    """Prompt tokens by source over the rows whose sources are known."""

    n: int = Field(description="rows with known sources")
    prompt: int
    computed: int
    gpu_hit: int
    host_loaded: int
    loaded_bytes: int | None = Field(description="bytes moved host → GPU; null: no row knows")
    stored: int | None = Field(description="tokens newly stored in the host tier; null: as above")


class Spread(Result):
    """Over the session medians of one arm; only ``n`` when there are none."""

    n: int = Field(description="sessions")
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    spread_ratio: float | None = Field(None, description="highest ÷ lowest session median")


class Times(Result):
    """Times of a group in ms."""

    n: int
    p50: float
    p90: float | None = Field(description="null below n 20")
    p99: float | None = Field(description="null below n 200")
    max: float


class LoadSource(Result):
    """Complete requests under load; a time is null where no row has it."""

    n: int
    ttft_ms: Times | None = Field(description="from when a request was due, or was sent")
    queue_ms: Times | None = Field(description="vLLM's own queue time")
    tpot_ms: Times | None = Field(description="from the first output token to the last, per token")
    total_ms: Times | None = Field(description="as ttft_ms, to the last output token")


class LoadCell(Result):
    """One arm in one pass under load, its sessions together."""

    pass_name: str = Field(alias="pass")
    arm: str
    n: int = Field(description="requests, failed ones too")
    failed: int
    offered_per_s: float | None = Field(description="requests due per second; null: a closed loop")
    done_per_s: float | None = Field(description="complete answers per second, to the last one")
    output_tokens_per_s: float | None
    mean_in_flight: float | None = Field(description="complete requests in flight, on average")
    late_ms: Times | None = Field(description="sent after due; null: a closed loop")
    good: int | None = Field(description="answers within the plan's slo; null: it has none")
    good_per_s: float | None = Field(description="goodput; null: as above")
    all: LoadSource
    sources: dict[str, LoadSource] = Field(description="by where the document's KV came from")


class ArmCell(Cell):
    """One arm in one pass."""

    failed: int
    tokens: TokenSums
    settle_p50_ms: float | None = Field(description="median wait for the counters")
    session_medians: Spread
    sessions: dict[str, Cell]


class Interval(Result):
    """A median over blocks and where it may lie."""

    median: float
    low: float
    high: float
    interval: str = Field(description="what low and high are, in words")
    coverage: float = Field(description="share of runs in which low to high holds the median")


class Block(Result):
    """A baseline session and the treatment session it is paired with."""

    sessions: tuple[str, str] = Field(strict=False)
    n: int = Field(description="documents complete in both")
    ratio: float = Field(description="median over the documents of baseline ÷ treatment")
    difference_ms: float = Field(description="median over the documents of baseline − treatment")


class DocumentRatio(Result):
    """One document over the blocks; low and high are the range."""

    doc: int
    n_blocks: int
    ratio: float
    low: float
    high: float
    difference_ms: float


class RatioRange(Result):
    """Baseline ÷ treatment, and where it may lie."""

    ratio: float = Field(description="median of the blocks' ratios")
    low: float
    high: float
    interval: str = Field(description="what low and high are, in words")


class Paired(RatioRange):
    """Baseline against treatment, paired by document inside each block."""

    coverage: float = Field(description="share of runs in which low to high holds the median")
    difference_ms: Interval
    blocks: list[Block]
    n_documents: int
    documents: list[DocumentRatio] | None = Field(description="null above 1,000 documents")


class OrderEffect(Result):
    """The first and the last session of one arm, paired by document."""

    sessions: tuple[str, str] = Field(strict=False)
    n: int
    last_over_first: float = Field(description="above 1 the later session was slower")


class Estimate(Result):
    """A factor between sessions with its 95 % interval (Student's, of the logs)."""

    factor: float
    low: float
    high: float


class Pass(Result):
    """One walk over the documents."""

    arms: dict[str, ArmCell]
    paired_ratio: Paired | None
    order_effect: dict[str, OrderEffect | None]


class SourceTimes(Cell):
    """All rows whose document came from one place, and the same by arm, and by pass and arm."""

    by_arm: dict[str, Cell]
    by_pass: dict[str, dict[str, Cell]]
    price_ms: Interval | None = Field(
        description="treatment − baseline, paired by document and pass where both had this source; "
        "null where none did"
    )


class SessionSpan(Result):
    """A phase of a session on the wall clock, a label; ms since 1970."""

    phase: str
    began_unix_ms: float
    ended_unix_ms: float


class FirstRequest(Result):
    """The first measured request beside its like."""

    ttft_ms: float
    others_p50_ms: float
    n_others: int
    is_slow: bool


class SessionSummary(Result):
    """One server's life."""

    session: str
    arm: str = Field(alias="config")
    order: int
    n: int
    failed: int
    settle_total_ms: float
    first_request: FirstRequest | None
    spans: list[SessionSpan]
    server: JsonObject = Field(description="facts and commands, from manifest.json")


class Outlier(Result):
    """A flagged row; it counts like any other."""

    session: str
    pass_name: str = Field(alias="pass")
    doc: int
    ttft_ms: float
    group_p50_ms: float
    distance: float = Field(description="distance from the group's median ÷ the limit")


class Outliers(Result):
    """Flagged rows, the farthest 100 first."""

    n: int
    n_judged: int
    n_flagged: int
    rows: list[Outlier]


class Statistics(Result):
    """What the rows of a run say by themselves, whether it is complete or not."""

    schema_version: Literal[3] = Field(alias="schema", description="version of this file")
    run: str = Field(description="name of the run folder")
    plan_id: str = Field(description="name and content hash of the plan")
    compared: tuple[str, str | None] = Field(
        strict=False,
        description="baseline and treatment; the treatment is null where none is compared",
    )
    median_method: str = Field(description="how medians are taken, in words")
    percentile_method: str = Field(description="how percentiles are taken, in words")
    unit_of_analysis: str = Field(description="what counts as one observation")
    interval_method: str = Field(description="what low and high are, in words")
    outlier_rule: str = Field(description="when a row is flagged, in words")
    ratio_direction: str = Field(description="which arm is on top")
    difference_direction: str = Field(description="which arm is subtracted")
    passes: dict[str, Pass] = Field(description="per pass: arms, paired ratio, order effect")
    sources: dict[str, SourceTimes] = Field(description="TTFT by where the document's KV came from")
    sessions: list[SessionSummary] = Field(description="per session: counts, phases, servers")
    outliers: Outliers = Field(description="flagged rows, never dropped")

    def arms_in(self, pass_name: str) -> dict[str, ArmCell]:
        """The arms measured in a pass; none in a pass without a row."""
        content = self.passes.get(pass_name)
        return content.arms if content else {}

    def pairs_in(self, pass_name: str) -> Paired | None:
        """The compared arms, paired, in a pass; None in a pass without a row, too."""
        content = self.passes.get(pass_name)
        return content.paired_ratio if content else None
