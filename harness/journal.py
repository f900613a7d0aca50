"""The journal: one JSON object a request, appended as it happens, and read back strictly.

A journal file belongs to one session. It is created exclusively, each row is one write of one line
followed by fsync, so a killed run keeps every row it finished. Reading needs no engine.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.counter_pages import STATE_NAMES
from harness.counters import CounterError, derive
from harness.errors import InputError
from harness.files import describe_invalid, dump_json, load_json, read_lines
from harness.plan import session_name
from sim.workload import WARMUP_PASS

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
    """All rows of one journal, as ``walk_journal`` gives them."""
    return list(walk_journal(path, notes if notes is not None else []))


def walk_journal(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows of one journal, in order, one at a time: memory does not grow with their number.

    An unterminated last line (a killed writer's torn record) is left out and said in ``notes``.
    Anything else that is not a valid row, a key met twice, or sources that do not follow from the
    row's own raw counters raises InputError with file, line and field.
    """
    last: Row | None = None
    kept: dict[Any, _Derived] = {}
    for number, row in _records(path, Row, notes):
        if row.schema_version != SCHEMA:
            raise InputError(
                f"{path}, line {number}: schema is {row.schema_version}; this kvcliff reads "
                f"{SCHEMA}",
                hint="read it with the kvcliff version that wrote it (manifest.json names it)",
            )
        if problem := contradiction(row, last):
            raise InputError(f"{path}, line {number}: {problem}")
        _check_sources(path, number, row, kept)
        yield row
        last = row


def contradiction(row: Row, last: Row | None) -> str | None:
    """What in ``row`` contradicts itself or ``last``, the row before it; None when nothing does."""
    if problem := _in_answer(row) or _in_sources(row) or _in_place(row, last):
        return problem
    if last is None:
        return _in_server(row)
    if None not in (last.counters_after, row.counters_before) and (
        last.counters_after != row.counters_before
    ):
        return "counters_before are not the counters_after of the row before"
    if row.connector != last.connector:  # of the server, which is one, as is its tier's unit
        return f"connector is {row.connector!r} after {last.connector!r}"
    if row.chunk_tokens != last.chunk_tokens or row.chunk_bytes != last.chunk_bytes:
        return (
            f"chunk_tokens {row.chunk_tokens}, chunk_bytes {row.chunk_bytes} after "
            f"{last.chunk_tokens}, {last.chunk_bytes}"
        )
    return None


def _in_place(row: Row, last: Row | None) -> str | None:
    """A row counts for the session, arm, phase and place it names."""
    if last is None:
        if row.seq != 1:
            return f"seq is {row.seq} in the first row"
    elif (row.seq, row.order) != (last.seq + 1, last.order):
        return f"seq {row.seq}, order {row.order} after seq {last.seq}, order {last.order}"
    is_checked = last is not None and (row.session, row.config) == (last.session, last.config)
    if not is_checked and row.session != session_name(row.order, row.config):
        return f"session {row.session!r} is not that of order {row.order}, config {row.config!r}"
    if (row.phase == "warmup") != (row.pass_name == WARMUP_PASS):
        return f"phase is {row.phase!r} in pass {row.pass_name!r}"
    if row.doc_tokens > row.prompt_tokens:
        return f"doc_tokens {row.doc_tokens} is more than prompt_tokens {row.prompt_tokens}"
    return None


def _in_server(row: Row) -> str | None:
    """What the tier's unit contradicts."""
    unit, n_bytes = row.chunk_tokens, row.chunk_bytes
    if n_bytes is not None and (not unit or n_bytes < unit or n_bytes % unit):
        return f"chunk_bytes {n_bytes} is no whole number of bytes for each of {unit} tokens"
    return None


def _in_answer(row: Row) -> str | None:
    """What the answer's own fields contradict."""
    needed = (row.ttft_ms, row.total_ms, row.finish_reason)
    if row.complete and (
        row.error is not None or None in needed or not row.output_tokens or not row.output_sha256
    ):
        return (
            "complete is true beside an error, or without times, finish_reason, output tokens or "
            "output digest"
        )
    if not row.complete and (row.error is None or row.ttft_ms is not None):
        return "complete is false without an error, or beside a ttft_ms"
    if row.ttft_ms is None:
        return None
    if row.total_ms is not None and row.ttft_ms > row.total_ms:
        return f"ttft_ms {row.ttft_ms} is more than total_ms {row.total_ms}"
    if row.first_byte_ms is not None and row.first_byte_ms > row.ttft_ms:
        return f"first_byte_ms {row.first_byte_ms} is more than ttft_ms {row.ttft_ms}"
    return None


def _in_sources(row: Row) -> str | None:
    """What the token sources contradict."""
    if row.is_attributed != (row.unattributed is None):
        return "unattributed must say why exactly when the token sources are null"
    if row.loaded_bytes is not None and row.loaded_source is None:
        return "loaded_bytes without a loaded_source"
    cached = row.cached_tokens
    from_caches = (row.gpu_hit or 0) + (row.host_loaded or 0)
    if row.is_attributed and row.disagreement is None and cached not in (None, from_caches):
        return f"cached_tokens is {cached} beside {from_caches} tokens from caches, unexplained"
    return None


def walk_predictions(path: Path) -> Iterator[PredictedRow]:
    """The lines of a ``prediction.jsonl``, one at a time; InputError with file, line and field."""
    notes: list[str] = []
    for number, row in _records(path, PredictedRow, notes):
        missing = [name for name in PREDICTED_NUMBERS if getattr(row, name) is None]
        if missing and (row.is_exact or len(missing) < len(PREDICTED_NUMBERS)):
            raise InputError(
                f"{path}, line {number}: {', '.join(missing)} null; either all numbers are, "
                "and why_not says why, or none"
            )
        yield row
    if notes:
        raise InputError(notes[0])


Record = TypeVar("Record", Row, PredictedRow)


def _records(path: Path, kind: type[Record], notes: list[str]) -> Iterator[tuple[int, Record]]:
    """Line number and record, each request key once."""
    once = _Once()
    for number, line in read_lines(path, notes):
        record = _parsed(line, kind, where=f"{path}, line {number}")
        if not once.is_new(record.key):
            raise InputError(f"{path}, line {number}: {_before(path, kind, number, record)}")
        yield number, record


class _Once:
    """Tells a request met before. One pass is remembered at a time: a session walks pass by pass."""

    def __init__(self) -> None:
        self._walk: tuple[str, str] | None = None
        self._docs: set[int] = set()
        self._left: set[tuple[str, str]] = set()

    def is_new(self, key: tuple[str, str, int]) -> bool:
        """False too for a pass that goes on after another one began."""
        walk = key[:2]
        if walk != self._walk:
            if self._walk is not None:
                self._left.add(self._walk)
            if walk in self._left:
                return False
            self._walk, self._docs = walk, set()
        n = len(self._docs)
        self._docs.add(key[2])
        return len(self._docs) > n


def _before(path: Path, kind: type[Record], number: int, record: Record) -> str:
    """What is wrong with a record that is not new."""
    for earlier, line in read_lines(path, []):
        if earlier < number and _parsed(line, kind, where=str(path)).key == record.key:
            return f"request {record.key} was recorded before, in line {earlier}"
    session, name, _ = record.key
    return f"pass {name!r} of {session} goes on after another one began"


def _parsed(line: bytes, kind: type[Record], *, where: str) -> Record:
    """One line as a record.

    pydantic's own parser takes a fifth of the time of ``load_json``, but keeps the last of two equal
    keys; so its answer counts only where there are as many keys as ``":`` in the line, and
    everything else is read, and refused, the strict way.
    """
    try:
        record = kind.model_validate_json(line)
        if line.count(b'":') == _n_keys(record):
            return record
    except ValidationError:
        pass
    try:
        return kind.model_validate(load_json(line, where=where))
    except ValidationError as error:
        raise InputError(f"{where}: {describe_invalid(error)}") from None


def _n_keys(record: Row | PredictedRow) -> int:
    n = len(record.model_fields_set)
    if isinstance(record, Row):
        n += len(record.counters_before or ()) + len(record.counters_after or ())
    return n


_DERIVED = ("computed", "gpu_hit", "host_loaded", "stored_tokens", "loaded_bytes")
_Derived = tuple[int | None, ...]
_MOST_KEPT = 10_000


def _check_sources(path: Path, number: int, row: Row, kept: dict[Any, _Derived]) -> None:
    """Refuse a row whose sources do not follow from its raw counters.

    ``kept``: what was derived for earlier rows. ``derive`` reads how far each counter moved, and
    states as they are, so rows that agree in these are derived once: it takes 15 µs a row.
    """
    if not row.is_attributed:
        return
    before, after = row.counters_before, row.counters_after
    if before is None or after is None:
        raise InputError(f"{path}, line {number}: token sources without the counters they are from")
    alike: Any = None
    derived: _Derived | None = None
    if before.keys() == after.keys():
        moved = [v if n in STATE_NAMES else v - before[n] for n, v in after.items()]
        alike = (*moved, *after, row.prompt_tokens, row.chunk_tokens, row.chunk_bytes)
        derived = kept.get(alike)
    if derived is None:
        try:
            derived = _derived(row, before, after)
        except (CounterError, ValueError) as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        if alike is not None and len(kept) < _MOST_KEPT:
            kept[alike] = derived
    counted = (row.computed, row.gpu_hit, row.host_loaded, row.stored_tokens, row.loaded_bytes)
    if counted != derived:
        name, said, found = next(
            triple for triple in zip(_DERIVED, counted, derived, strict=True)
            if triple[1] != triple[2]
        )  # fmt: skip
        raise InputError(
            f"{path}, line {number}: {name} is {said}, but the row's own counters say {found}"
        )


def _derived(row: Row, before: Mapping[str, int], after: Mapping[str, int]) -> _Derived:
    """The row's ``_DERIVED`` fields by its raw counters; raises as ``derive``."""
    measured = derive(
        before,
        after,
        prompt_tokens=row.prompt_tokens,
        chunk_tokens=row.chunk_tokens,
        chunk_bytes=row.chunk_bytes,
    )
    split = measured.split
    return (
        split.computed,
        split.gpu_hit,
        split.host_loaded,
        measured.stored_tokens,
        measured.loaded_bytes,
    )
