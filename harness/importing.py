"""A foreign ``ttft.jsonl`` as a run folder, so that others' measurements get the report too.

What the file does not say stays unknown: no prediction, no residual, hence no verdict.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.decision import DecisionSection, decide
from harness.errors import InputError
from harness.files import describe_invalid, load_json, read_lines, write_json
from harness.findings import RECONCILE_SCHEMA
from harness.stats import source_class, summarize
from sim.workload import WARMUP_PASS

_DEFAULT_BLOCK = 16  # vLLM's default block size on CUDA; only tells full from partial GPU hits

# 2**53: what a JSON number holds exactly in every reader.
Tokens = Annotated[int, Field(ge=0, le=2**53)]
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class ForeignRow(BaseModel):
    """The six fields of the lab's format, and of ours what may be there; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    config: Name
    pass_name: Name = Field(alias="pass")
    doc: Tokens | Name
    doc_tokens: Tokens
    ttft_ms: Milliseconds | None
    total_ms: Milliseconds | None
    session: Name | None = None
    order: Annotated[int, Field(ge=1)] | None = None
    prompt_tokens: Tokens | None = None
    computed: Tokens | None = None
    gpu_hit: Tokens | None = None
    host_loaded: Tokens | None = None
    loaded_bytes: Tokens | None = None
    stored_tokens: Tokens | None = None
    settle_ms: Milliseconds | None = None
    complete: bool = True
    error: str | None = None
    sent_unix_ns: Tokens = 0


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """A foreign row with everything the statistics read; see ``harness.tally.Sample``."""

    config: str
    pass_name: str
    doc: int
    doc_tokens: int
    ttft_ms: float | None
    total_ms: float | None
    session: str
    order: int
    seq: int
    phase: str
    prompt_tokens: int | None
    computed: int | None
    gpu_hit: int | None
    host_loaded: int | None
    loaded_bytes: int | None
    stored_tokens: int | None
    settle_ms: float | None
    complete: bool
    error: str | None
    sent_unix_ns: int


def import_rows(source: Path, results: Path, *, block_size: int = _DEFAULT_BLOCK) -> Path:
    """Make ``results/<UTC>-import-<hash>/`` from ``source`` and return it.

    The folder holds a copy of the file, the manifest, ``summary.json`` and ``reconcile.json``.
    InputError with file, line and field for a row that cannot be used; nothing is written then.
    """
    content = _read(source)
    rows, assumed = _rows(source)
    digest = hashlib.sha256(content).hexdigest()
    plan_id = f"import-{digest[:8]}"
    folder = results / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{plan_id}"
    environment: dict[str, Any] = {
        "imported_from": source.name,
        "sha256": digest,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": None,
        "gpus": None,
    }
    # Before anything is written: a row these cannot take must leave no half-made folder.
    reconciliation = _reconciliation(folder.name, rows, assumed, block_size)
    summary = _summary(folder.name, plan_id, rows, environment, block_size)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder} exists already", hint="import again in a second") from None
    (folder / "ttft.jsonl").write_bytes(content)
    write_json(
        folder / "manifest.json",
        {
            "schema": 1,
            "run": folder.name,
            "plan_id": plan_id,
            "sealed": {"ttft.jsonl": digest},
            **environment,
            "sessions": {},
        },
    )
    write_json(folder / "reconcile.json", reconciliation)
    write_json(folder / "summary.json", summary)
    return folder


def _summary(
    run: str,
    plan_id: str,
    rows: Sequence[ImportedRow],
    environment: dict[str, Any],
    block_size: int,
) -> dict[str, Any]:
    summary = summarize(rows, run=run, plan_id=plan_id, block_size=block_size)
    summary["decision"] = decide(
        DecisionSection(),
        summary,
        checks=None,
        sizes=None,
        is_from_plan=False,
        environment=environment,
    )
    for session in summary["sessions"]:
        session["server"] = {}
    return {**summary, "cliff": None, "plan": None, "environment": environment}


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from None


def _rows(source: Path) -> tuple[list[ImportedRow], bool]:
    """Rows in file order, and whether the sessions had to be assumed.

    Without a session, the k-th row of the same arm, pass and document belongs to the k-th session
    of that arm: one server cannot have measured a document of a pass twice.
    """
    notes: list[str] = []
    rows: list[ImportedRow] = []
    names = _Names({}, {}, {})
    seqs: Counter[str] = Counter()
    seen: Counter[tuple[str, str, int | str]] = Counter()
    is_assumed = False
    kept = ForeignRow.model_fields.keys() - {"session", "order", "doc"}
    for number, line in read_lines(source, notes):
        where = f"{source}, line {number}"
        foreign = _foreign(line, where)
        key = (foreign.config, foreign.pass_name, foreign.doc)
        seen[key] += 1
        is_assumed = is_assumed or foreign.session is None
        session = foreign.session or f"{foreign.config}-{seen[key]}"
        first_seen = names.order(session, foreign.config, where)
        doc = names.document(foreign.doc, where)
        order = foreign.order or first_seen
        seqs[session] += 1
        values = {name: getattr(foreign, name) for name in kept}
        if foreign.ttft_ms is None:  # a failed request: counted, and in no median
            values |= {"complete": False, "error": foreign.error or "no ttft_ms"}
        rows.append(
            ImportedRow(
                **values, doc=doc, session=session, order=order, seq=seqs[session], phase="measure"
            )
        )
    if notes:
        raise InputError(notes[0], hint="end the last line, or take it away")
    if not rows:
        raise InputError(f"{source} has no row")
    return rows, is_assumed


@dataclass(frozen=True, slots=True)
class _Names:
    """What sessions and documents of a foreign file have been called so far."""

    sessions: dict[str, int]
    arms: dict[str, str]
    documents: dict[int | str, int]

    def order(self, session: str, arm: str, where: str) -> int:
        """The session's place by first appearance; InputError when two arms share its name."""
        if self.arms.setdefault(session, arm) != arm:
            raise InputError(
                f"{where}: session {session!r} is of arm {arm!r} here and of "
                f"{self.arms[session]!r} before",
                hint="a session is one server of one arm: give each its own name",
            )
        return self.sessions.setdefault(session, len(self.sessions) + 1)

    def document(self, doc: int | str, where: str) -> int:
        """A number for the document; InputError when numbers and texts are mixed."""
        if type(next(iter(self.documents), doc)) is not type(doc):
            raise InputError(
                f"{where}: doc is {doc!r}; name all documents by numbers, or all by texts"
            )
        known = self.documents.setdefault(doc, len(self.documents))
        return doc if isinstance(doc, int) else known


def _foreign(line: bytes, where: str) -> ForeignRow:
    try:
        row = ForeignRow.model_validate(load_json(line, where=where))
    except ValidationError as error:
        raise InputError(
            f"{where}: {describe_invalid(error)}",
            hint="each line needs config, pass, doc, doc_tokens, ttft_ms and total_ms",
        ) from None
    if row.ttft_ms is not None and row.total_ms is not None and row.ttft_ms > row.total_ms:
        raise InputError(f"{where}: ttft_ms {row.ttft_ms} is more than total_ms {row.total_ms}")
    if row.pass_name == WARMUP_PASS:
        raise InputError(f"{where}: a warm-up row; leave those out, they are no measurement")
    sources = [row.computed, row.gpu_hit, row.host_loaded]
    known = [tokens for tokens in sources if tokens is not None]
    if known and (len(known) < 3 or row.prompt_tokens != sum(known)):
        raise InputError(
            f"{where}: computed {row.computed} + gpu_hit {row.gpu_hit} + host_loaded "
            f"{row.host_loaded} must all be there and sum to prompt_tokens {row.prompt_tokens}",
            hint="leave all three out where the sources are not known",
        )
    return row


def _reconciliation(
    run: str, rows: Sequence[ImportedRow], is_assumed: bool, block_size: int
) -> dict[str, Any]:
    """``reconcile.json`` without a prediction: rows as they are, nothing reconciled."""
    groups = Counter((row.session, row.pass_name) for row in rows)
    findings = []
    if is_assumed:
        findings.append(
            {
                "code": "sessions-assumed",
                "severity": "warning",
                "message": "the rows name no session; the k-th row of a document was taken for "
                "the k-th session of its arm",
                "cause": "the file was not written by kvcliff",
                "remedy": "add the field session to every row",
            }
        )
    return {
        "schema": RECONCILE_SCHEMA,
        "run": run,
        "requests_planned": 0,
        "requests_recorded": len(rows),
        "requests_reconciled": 0,
        "findings": findings,
        "requests": [_request(row, block_size) for row in rows],
        "by_pass": [
            {
                "session": session, "pass": pass_name, "requests": n, "recorded": n,
                "reconciled": 0, "largest": None,
            }
            for (session, pass_name), n in groups.items()
        ],
    }  # fmt: skip


def _request(row: ImportedRow, block_size: int) -> dict[str, Any]:
    return {
        "session": row.session, "pass": row.pass_name, "doc": row.doc, "complete": row.complete,
        "measured": {
            "computed": row.computed, "gpu_hit": row.gpu_hit, "host_loaded": row.host_loaded
        },
        "predicted": None, "residual": None, "reconciled": False,
        "config": row.config, "order": row.order, "seq": row.seq, "phase": row.phase,
        "doc_tokens": row.doc_tokens, "prompt_tokens": row.prompt_tokens,
        "ttft_ms": row.ttft_ms, "total_ms": row.total_ms, "settle_ms": row.settle_ms,
        "loaded_bytes": row.loaded_bytes, "stored_tokens": row.stored_tokens,
        "error": row.error, "unattributed": None if row.computed is not None else "not measured",
        "source": source_class(row, block_size), "predicted_bytes": None,
    }  # fmt: skip
