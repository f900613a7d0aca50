"""What one request measured, and what it was predicted to: one line each."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.files import dump_json

SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)


Tokens = Annotated[int, Field(ge=0)]


# 1e9 ms are eleven days: beyond that it is no duration, and sums of such overflow.
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Row(BaseModel):
    """One request. ``None`` means not measured, never zero; times are client-side unless said."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    config: str = Field(min_length=1, description="arm: baseline, control, or the treatment")
    pass_name: str = Field(alias="pass", min_length=1, description="walk over the documents")
    doc: Tokens = Field(description="document number, 0 first")
    doc_tokens: Tokens = Field(description="tokens of the document, without the question")
    ttft_ms: Milliseconds | None = Field(
        description="TTFT: request written on an open connection → first token event received"
    )
    total_ms: Milliseconds | None = Field(description="same start → last token event received")
    schema_version: int = Field(alias="schema", description="version of this record")
    run: str = Field(description="name of the run folder this row was measured in")
    session: str = Field(description="one server's life, e.g. 02-lmcache")
    order: int = Field(ge=1, description="position of the session in the run, 1 first")
    connector: str | None = Field(
        description="KV connector that ran, as vLLM's log names it; null: none"
    )
    seq: int = Field(ge=1, description="position of the request in its session, 1 first")
    phase: Literal["warmup", "measure"] = Field(description="warm-up rows are never summarized")
    prompt_tokens: Tokens = Field(description="tokens sent; the server's count must agree")
    output_tokens: Tokens | None = Field(description="tokens the server says it generated")
    computed: Tokens | None = Field(description="prompt tokens prefilled (local_compute)")
    gpu_hit: Tokens | None = Field(description="prompt tokens from the GPU tier (local_cache_hit)")
    host_loaded: Tokens | None = Field(
        description="prompt tokens from the host tier (external_kv_transfer)"
    )
    loaded_bytes: Tokens | None = Field(
        description="bytes moved host → GPU, whole chunks; null: no host tier, or no way to know"
    )
    loaded_source: str | None = Field(
        description="how loaded_bytes was measured: chunks_loaded_counter, lookup_hits, "
        "chunks_times_bytes, kv_offload_load_bytes or load_blocks_times_bytes"
    )
    stored_tokens: Tokens | None = Field(description="prompt tokens newly stored in the host tier")
    chunk_tokens: Tokens | None = Field(description="host chunk size in tokens; null: no tier")
    chunk_bytes: Tokens | None = Field(description="host chunk size in bytes by the model's shape")
    cached_tokens: Tokens | None = Field(
        description="the answer's own count of prompt tokens not computed; null: not said"
    )
    disagreement: str | None = Field(
        description="where vLLM's counters, LMCache's and the answer's own count contradict"
    )
    server_ttft_ms: Milliseconds | None = Field(
        description="vLLM's own queue time + time to first token"
    )
    first_byte_ms: Milliseconds | None = Field(description="first byte of the response body")
    settle_ms: Milliseconds | None = Field(description="wait until every counter was final")
    conn_reused: bool = Field(description="the request went out on a connection already open")
    finish_reason: str | None = Field(description="as the server gave it")
    complete: bool = Field(description="all asked-for tokens, finish_reason and [DONE] arrived")
    error: str | None = Field(description="why the answer is incomplete")
    unattributed: str | None = Field(description="why the token sources are null")
    output_sha256: str | None = Field(description="SHA-256 of the output token ids")
    counters_before: dict[str, int] | None = Field(description="raw counters before the request")
    counters_after: dict[str, int] | None = Field(description="raw counters once settled")
    sent_unix_ns: Tokens = Field(description="wall clock when sent; a label, never subtracted")

    @property
    def key(self) -> tuple[str, str, int]:
        """Request key ``(session, pass, doc)``, unique in a run."""
        return (self.session, self.pass_name, self.doc)

    @property
    def is_attributed(self) -> bool:
        """Whether the prompt's token sources were measured."""
        return self.computed is not None

    def to_json(self) -> str:
        """The row as one line of JSON without the line end; floats keep full precision."""
        return dump_json(self.model_dump(by_alias=True))


PREDICTED_NUMBERS = ("computed", "gpu_hit", "host_loaded", "stored_tokens", "transferred_bytes")


class PredictedRow(BaseModel):
    """What one request should show, written to ``prediction.jsonl`` before anything is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    session: str = Field(description="as in the journal")
    pass_name: str = Field(alias="pass", description="as in the journal")
    doc: Tokens = Field(description="as in the journal")
    computed: Tokens | None = Field(
        description="prompt tokens to be prefilled; null, like the next four: no exact prediction"
    )
    gpu_hit: Tokens | None = Field(description="prompt tokens from the GPU tier")
    host_loaded: Tokens | None = Field(description="prompt tokens from the host tier")
    stored_tokens: Tokens | None = Field(description="prompt tokens newly stored in the host tier")
    transferred_bytes: Tokens | None = Field(description="bytes moved host → GPU, whole chunks")
    why_not: str | None = Field(
        default=None, description="why there is no exact prediction; null where there is one"
    )

    @property
    def is_exact(self) -> bool:
        """Whether the numbers are there."""
        return self.why_not is None

    @property
    def key(self) -> tuple[str, str, int]:
        """Request key ``(session, pass, doc)``."""
        return (self.session, self.pass_name, self.doc)

    def to_json(self) -> str:
        """The prediction as one line of JSON."""
        return dump_json(self.model_dump(by_alias=True))
