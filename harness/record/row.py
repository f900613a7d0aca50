"""What one request measured, and what it was predicted to: one line each.

A column is added here. The type checker then names who must say what becomes of it: the replay,
which fills it; the import, which may not have it; the report, which shows it or not.
"""

from typing import Annotated, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from harness.counters.tiers.registry import LOADED_SOURCES
from harness.files import dump_json
from harness.plan.requests import Key

# Of journals and predictions; harness.record.versions has the history and reads the older ones.
SCHEMA: Final = 3

# No Literal, which would take 2.0 for 2.
Version = Annotated[int, Field(ge=SCHEMA, le=SCHEMA)]

# 2**53: what a JSON number holds exactly in every reader.
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Of tokens, bytes, documents or other whole things."""

UnixNanoseconds = Annotated[int, Field(ge=0, lt=2**63)]

# 1e9 ms are eleven days: beyond that it is no duration, and sums of such overflow.
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

Loop = Literal["serial", "closed", "open"]
"""How requests were sent: one at a time; so many in flight; each when it was due."""

NO_CONNECTOR = "none"
"""``Row.connector`` of a server that runs without a KV connector."""


class Record(BaseModel):
    """One line of a file; a field that is not known is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    def to_json(self) -> str:
        """The record as one line of JSON without the line end; floats keep full precision."""
        return dump_json(self.model_dump(by_alias=True))


class Sample(Record):
    """What the statistics and the published files read of a request: measured here or imported.

    ``None`` means not measured, never zero; times are client-side.
    """

    config: str = Field(min_length=1, description="arm: baseline, control, or the treatment")
    pass_name: str = Field(alias="pass", min_length=1, description="walk over the documents")
    doc: Count = Field(description="document number, 0 first")
    doc_tokens: Count = Field(description="tokens of the document, without the question")
    ttft_ms: Milliseconds | None = Field(
        description="TTFT: request written on an open connection → first token event received"
    )
    total_ms: Milliseconds | None = Field(description="same start → last token event received")
    session: str = Field(description="one server's life, e.g. 02-lmcache")
    order: int = Field(ge=1, description="position of the session in the run, 1 first")
    seq: int = Field(ge=1, description="position of the request in its session, 1 first")
    phase: Literal["warmup", "measure"] = Field(description="warm-up rows are never summarized")
    prompt_tokens: Count | None = Field(
        description="tokens sent; null in imported rows that do not say"
    )
    computed: Count | None = Field(description="prompt tokens prefilled (local_compute)")
    gpu_hit: Count | None = Field(description="prompt tokens from the GPU tier (local_cache_hit)")
    host_loaded: Count | None = Field(
        description="prompt tokens from the host tier (external_kv_transfer)"
    )
    loaded_bytes: Count | None = Field(
        description="bytes moved host → GPU, whole chunks; null: no host tier, or no way to know"
    )
    stored_tokens: Count | None = Field(description="prompt tokens newly stored in the host tier")
    settle_ms: Milliseconds | None = Field(description="wait until every counter was final")
    complete: bool = Field(description="all asked-for tokens, finish_reason and [DONE] arrived")
    error: str | None = Field(description="why the answer is incomplete")
    unattributed: str | None = Field(description="why the token sources are null")
    sent_unix_ns: UnixNanoseconds = Field(
        description="wall clock when sent; a label, never subtracted"
    )

    @property
    def key(self) -> Key:
        """The request this is of."""
        return (self.session, self.pass_name, self.doc)

    @property
    def is_attributed(self) -> bool:
        """Whether the prompt's token sources were measured."""
        return self.computed is not None

    def as_sample(self) -> "Sample":
        """What of it is published: without a row's counters, which take most of its memory."""
        return Sample.model_construct(**{name: getattr(self, name) for name in Sample.model_fields})


class Row(Sample):
    """One request of a run, with what a check needs to derive every number of it again."""

    schema_version: Version = Field(alias="schema", description="version of this record")
    run: str = Field(description="name of the run folder this row was measured in")
    connector: str | None = Field(
        description="KV connector that ran, as vLLM's log names it; none: the server had none; "
        "null: not recorded (schema 1)"
    )
    prompt_tokens: Count = Field(description="tokens sent; the server's count must agree")
    output_tokens: Count | None = Field(description="tokens the server says it generated")
    loaded_source: str | None = Field(
        description=f"how loaded_bytes was measured: {', '.join(LOADED_SOURCES)}"
    )
    chunk_tokens: Count | None = Field(description="host chunk size in tokens; null: no tier")
    chunk_bytes: Count | None = Field(description="host chunk size in bytes by the model's shape")
    cached_tokens: Count | None = Field(
        description="the answer's own count of prompt tokens not computed; null: not said"
    )
    disagreement: str | None = Field(
        description="where vLLM's counters, LMCache's and the answer's own count contradict"
    )
    server_ttft_ms: Milliseconds | None = Field(
        description="vLLM's own queue time + time to first token"
    )
    queue_ms: Milliseconds | None = Field(
        description="vLLM's own queue time, from when the engine took the request in, between two "
        "steps; null: not said"
    )
    loop: Loop = Field(
        description="serial: sent alone; closed: with so many others in flight; open: when it was due"
    )
    late_ms: Milliseconds | None = Field(
        description="sent so long after it was due; null: not due at any time"
    )
    attributed_by: Literal["counters", "events"] | None = Field(
        description="what the token sources are from: counters around this request alone, or vLLM's "
        "KV events; null: they are null"
    )
    named_from: Count | None = Field(
        description="prompt tokens before the first block that the KV events say the request named; "
        "null: it named none, or nobody listened"
    )
    first_byte_ms: Milliseconds | None = Field(description="first byte of the response body")
    conn_reused: bool = Field(description="the request went out on a connection already open")
    finish_reason: str | None = Field(description="as the server gave it")
    output_sha256: str | None = Field(description="SHA-256 of the output token ids")
    counters_before: dict[str, int] | None = Field(
        description="raw counters before the request, or before its pass where others are in flight"
    )
    counters_after: dict[str, int] | None = Field(
        description="raw counters once the request, or its pass, has settled"
    )


SampleColumn = Literal[
    "config", "pass_name", "doc", "doc_tokens", "ttft_ms", "total_ms", "session", "order", "seq",
    "phase", "prompt_tokens", "computed", "gpu_hit", "host_loaded", "loaded_bytes",
    "stored_tokens", "settle_ms", "complete", "error", "unattributed", "sent_unix_ns",
]  # fmt: skip


assert set(get_args(SampleColumn)) == Sample.model_fields.keys(), "SampleColumn names all fields"


NUMBERS = ("computed", "gpu_hit", "host_loaded", "stored_tokens", "loaded_bytes")
"""What is predicted, and what a residual is of; the same names in a row."""


class Predicted(Record):
    """What one request should show; the five numbers are null where ``why_not`` is not."""

    computed: Count | None = Field(
        description="prompt tokens to be prefilled; null, like the next four: no exact prediction"
    )
    gpu_hit: Count | None = Field(description="prompt tokens from the GPU tier")
    host_loaded: Count | None = Field(description="prompt tokens from the host tier")
    stored_tokens: Count | None = Field(description="prompt tokens newly stored in the host tier")
    loaded_bytes: Count | None = Field(description="bytes moved host → GPU, whole chunks")
    why_not: str | None = Field(
        description="why there is no exact prediction; null where there is one"
    )

    @property
    def is_exact(self) -> bool:
        return self.why_not is None


class PredictedRow(Predicted):
    """One line of ``prediction.jsonl``, written before anything is measured."""

    schema_version: Version = Field(alias="schema", description="version of this record")
    session: str = Field(description="as in the journal")
    pass_name: str = Field(alias="pass", description="as in the journal")
    doc: Count = Field(description="as in the journal")

    @property
    def key(self) -> Key:
        """The request this is of."""
        return (self.session, self.pass_name, self.doc)


AnyRow = TypeVar("AnyRow", Row, PredictedRow)
"""One of the two, where what is done with them is the same."""
