"""The journal: one JSON object a request, appended as it happens, and read back strictly.

A journal file belongs to one session. It is created exclusively, each row is one write of one line
followed by fsync, so a killed run keeps every row it finished. Reading needs no engine.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.counters import CounterError, derive
from harness.errors import InputError
from harness.files import describe_invalid, dump_json, load_json, read_lines

SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)

Tokens = Annotated[int, Field(ge=0)]
# 1e9 ms are eleven days: beyond that it is no duration, and sums of such overflow.
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Row(BaseModel):
    """One request. ``None`` means not measured, never zero; times are client-side unless said."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    config: str = Field(min_length=1, description="arm: baseline, lmcache or control")
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
        description="bytes moved host → GPU, whole chunks; null: no host tier"
    )
    loaded_source: str | None = Field(
        description="how loaded_bytes was measured: chunks_loaded_counter or lookup_hits"
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


class PredictedRow(BaseModel):
    """What one request should show, written to ``prediction.jsonl`` before anything is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    session: str = Field(description="as in the journal")
    pass_name: str = Field(alias="pass", description="as in the journal")
    doc: Tokens = Field(description="as in the journal")
    computed: Tokens = Field(description="prompt tokens to be prefilled")
    gpu_hit: Tokens = Field(description="prompt tokens from the GPU tier")
    host_loaded: Tokens = Field(description="prompt tokens from the host tier")
    stored_tokens: Tokens = Field(description="prompt tokens newly stored in the host tier")
    transferred_bytes: Tokens = Field(description="bytes moved host → GPU, whole chunks")

    @property
    def key(self) -> tuple[str, str, int]:
        """Request key ``(session, pass, doc)``."""
        return (self.session, self.pass_name, self.doc)

    def to_json(self) -> str:
        """The prediction as one line of JSON."""
        return dump_json(self.model_dump(by_alias=True))


class JournalWriter:
    """Appends rows to a new file; a second writer, or an existing file, is refused (InputError)."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self._fd = os.open(path, flags, 0o644)
        except FileExistsError:
            raise InputError(
                f"{path} exists already; a journal is never written twice",
                hint="use a new run folder, or --resume the run this journal belongs to",
            ) from None

    def append(self, row: Row) -> None:
        """Write one row durably: one write, then fsync."""
        line = (row.to_json() + "\n").encode("ascii")
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a journal row were written")
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path, notes: list[str] | None = None) -> list[Row]:
    """All rows of one journal, in order.

    An unterminated last line (a killed writer's torn record) is left out and said in ``notes``.
    Anything else that is not a valid row, a key met twice, or sources that do not follow from the
    row's own raw counters raises InputError with file, line and field.
    """
    rows: list[Row] = []
    for number, row in _records(path, Row, notes if notes is not None else []):
        if row.schema_version != SCHEMA:
            raise InputError(
                f"{path}, line {number}: schema is {row.schema_version}; this kvcliff reads "
                f"{SCHEMA}",
                hint="read it with the kvcliff version that wrote it (manifest.json names it)",
            )
        if problem := contradiction(row, rows[-1] if rows else None):
            raise InputError(f"{path}, line {number}: {problem}")
        _check_sources(path, number, row)
        rows.append(row)
    return rows


def contradiction(row: Row, last: Row | None) -> str | None:
    """What in ``row`` contradicts itself or ``last``, the row before it; None when nothing does."""
    times = (row.ttft_ms, row.total_ms, row.output_tokens, row.output_sha256)
    if row.complete and (row.error is not None or None in times):
        return "complete is true beside an error, or without times, output tokens or output digest"
    if not row.complete and (row.error is None or row.ttft_ms is not None):
        return "complete is false without an error, or beside a ttft_ms"
    if row.ttft_ms is not None and row.total_ms is not None and row.ttft_ms > row.total_ms:
        return f"ttft_ms {row.ttft_ms} is more than total_ms {row.total_ms}"
    if row.is_attributed != (row.unattributed is None):
        return "unattributed must say why exactly when the token sources are null"
    if last is None:
        return None if row.seq == 1 else f"seq is {row.seq} in the first row"
    if (row.seq, row.order) != (last.seq + 1, last.order):
        return f"seq {row.seq}, order {row.order} after seq {last.seq}, order {last.order}"
    if None not in (last.counters_after, row.counters_before) and (
        last.counters_after != row.counters_before
    ):
        return "counters_before are not the counters_after of the row before"
    return None


def read_predictions(path: Path) -> list[PredictedRow]:
    """All lines of a ``prediction.jsonl``; InputError with file, line and field."""
    notes: list[str] = []
    rows = [row for _, row in _records(path, PredictedRow, notes)]
    if notes:
        raise InputError(notes[0])
    return rows


Record = TypeVar("Record", Row, PredictedRow)


def _records(path: Path, kind: type[Record], notes: list[str]) -> Iterator[tuple[int, Record]]:
    """Line number and record, each request key once."""
    first_line: dict[tuple[str, str, int], int] = {}
    for number, line in read_lines(path, notes):
        record = load_json(line, where=f"{path}, line {number}")
        try:
            row = kind.model_validate(record)
        except ValidationError as error:
            raise InputError(f"{path}, line {number}: {describe_invalid(error)}") from None
        if row.key in first_line:
            raise InputError(
                f"{path}, line {number}: request {row.key} was recorded before, "
                f"in line {first_line[row.key]}"
            )
        first_line[row.key] = number
        yield number, row


def _check_sources(path: Path, number: int, row: Row) -> None:
    """Refuse a row whose sources do not follow from its raw counters."""
    if not row.is_attributed:
        return
    if row.counters_before is None or row.counters_after is None:
        raise InputError(f"{path}, line {number}: token sources without the counters they are from")
    try:
        measured = derive(
            row.counters_before,
            row.counters_after,
            prompt_tokens=row.prompt_tokens,
            chunk_tokens=row.chunk_tokens,
            chunk_bytes=row.chunk_bytes,
        )
    except (CounterError, ValueError) as error:
        raise InputError(f"{path}, line {number}: {error}") from None
    counted = {
        "computed": measured.split.computed,
        "gpu_hit": measured.split.gpu_hit,
        "host_loaded": measured.split.host_loaded,
        "stored_tokens": measured.stored_tokens,
        "loaded_bytes": measured.loaded_bytes,
    }
    for field, value in counted.items():
        if getattr(row, field) != value:
            raise InputError(
                f"{path}, line {number}: {field} is {getattr(row, field)}, but the row's own "
                f"counters say {value}"
            )
