"""A foreign ``ttft.jsonl`` as a run folder, so that others' measurements get the report too.

What the file does not say stays unknown: no prediction, no residual, hence no verdict.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.errors import InputError
from harness.files import load_json, numbered_lines, validated, write_json
from harness.plan.rule import DecisionSection
from harness.record.folder import RECONCILE_FILE, ROWS_FILE, SUMMARY_FILE, RunFolder
from harness.record.manifest import Manifest, utc_now
from harness.record.row import SCHEMA as RECORD_SCHEMA
from harness.record.row import Count, Milliseconds, Sample, UnixNanoseconds
from harness.record.seals import check_sealed, file_digest
from harness.verdict.account import PassAccount
from harness.verdict.decision import decide
from harness.verdict.import_checks import ImportAccount, refuse_misspelt
from harness.verdict.measured import SCHEMA, JsonObject
from harness.verdict.publish import Listed, by_pass, complete
from harness.verdict.schema import ReconcileFile, Summary
from harness.verdict.stats import summarize
from sim.split import USUAL_UNITS, Units
from sim.workload import WARMUP_PASS


def _plain(text: str) -> str:
    """Names stand in tables, charts and file names; a chart's SVG can hold no control character."""
    if not text.strip() or not text.isprintable():
        raise ValueError("a name must be printable characters, and not blank")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain)]
_LONGEST_ERROR = 500  # characters; the copied file has it whole


class ForeignRow(BaseModel):
    """The six fields of the lab's format, and of ours what may be there; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    config: Name
    pass_name: Name = Field(alias="pass")
    doc: Count | Name
    doc_tokens: Count
    ttft_ms: Milliseconds | None
    total_ms: Milliseconds | None
    session: Name | None = None
    order: Annotated[int, Field(ge=1, le=2**53)] | None = None
    phase: str | None = None
    prompt_tokens: Count | None = None
    computed: Count | None = None
    gpu_hit: Count | None = None
    host_loaded: Count | None = None
    loaded_bytes: Count | None = None
    stored_tokens: Count | None = None
    settle_ms: Milliseconds | None = None
    complete: bool = True
    error: str | None = None
    ok: Any = None
    run: Any = None
    sent_unix_ns: UnixNanoseconds = 0

    @property
    def has_failed(self) -> bool:
        """Whether it says so; some writers have ``ok`` where ours have ``complete``."""
        return not self.complete or self.ok is False


def import_rows(source: Path, results: Path, units: Units = USUAL_UNITS) -> Path:
    """Make ``results/<UTC>-import-<hash>/`` from ``source`` and return it.

    The folder holds a copy of the file, the manifest, ``summary.json`` and ``reconcile.json``.
    ``units`` tell whole documents from parts of them. InputError with file, line and field for a
    row that cannot be used; no folder is made then. The rows are walked once and not kept.
    """
    if source.exists() and not source.is_file():
        raise InputError(f"{source} is no regular file")
    with TemporaryDirectory() as folder:  # what is measured here must be what is kept
        copy = Path(folder) / source.name
        try:
            shutil.copyfile(source, copy)
        except OSError as error:
            raise InputError(f"cannot read {source}: {error.strerror}") from None
        return _import(copy, source, results, units)


def _import(copy: Path, source: Path, results: Path, units: Units) -> Path:
    walk = _Walk(copy, source, units)
    digest = file_digest(copy)
    plan_id = _plan_id(digest)
    folder = RunFolder.begun_now(results, plan_id)
    environment: JsonObject = {
        "imported_from": source.name,
        "sha256": digest,
        "created": utc_now(),
        "cpu": None,
        "gpus": None,
        "block_size": units.block,
        "chunk_tokens": units.chunk,
    }
    # Before anything is written: a row these cannot take must leave no half-made folder.
    files = _files(folder.name, plan_id, walk, environment)
    if not walk.account.recorded:
        raise InputError(f"{source} has no row")
    folder.create()
    shutil.copyfile(copy, folder.path / ROWS_FILE)
    Manifest(
        schema_version=RECORD_SCHEMA,
        run=folder.name,
        plan_id=plan_id,
        sealed={ROWS_FILE: digest},
        shape=None,
        sessions={},
        **environment,
    ).write(folder.path)
    _write(folder, files, write_json)
    return folder.path


def publish_imported(folder: RunFolder, *, write: Callable[[Path, Any], object]) -> None:
    """Make both files of an imported run anew; InputError when its rows are not what was imported.

    The run's name ends in its id, which is a digest of those rows.
    """
    manifest = folder.read_manifest()
    source = folder.path / ROWS_FILE
    if not manifest.sealed:
        raise InputError(f"{folder.path / 'manifest.json'} seals no file")
    check_sealed(folder.path, manifest, (ROWS_FILE,))
    plan_id = _plan_id(file_digest(source))
    if manifest.plan_id != plan_id or not manifest.run.endswith(f"-{plan_id}"):
        raise InputError(
            f"{folder.path} is called {manifest.run!r} and {manifest.plan_id!r}, but its "
            f"{ROWS_FILE} is {plan_id!r}",
            hint=f"import it again: kvcliff import {source}",
        )
    machine = manifest.machine
    units = Units(
        block=machine.block_size or USUAL_UNITS.block,
        chunk=machine.chunk_tokens or USUAL_UNITS.chunk,
    )
    environment = {"imported_from": manifest.imported_from, **manifest.environment}
    walk = _Walk(source, source, units)
    _write(folder, _files(folder.name, plan_id, walk, environment), write)


def _plan_id(digest: str) -> str:
    return f"import-{digest[:8]}"


def _files(
    run: str, plan_id: str, walk: "_Walk", environment: JsonObject
) -> tuple[ReconcileFile, Summary]:
    """Both files of one walk."""
    summary = _summary(run, plan_id, walk, environment)  # first: it is the walk
    return _reconciliation(run, walk), summary


def _write(
    folder: RunFolder, files: tuple[ReconcileFile, Summary], write: Callable[[Path, Any], object]
) -> None:
    for name, file in zip((RECONCILE_FILE, SUMMARY_FILE), files, strict=True):
        write(folder.path / name, file.as_json())


def _summary(run: str, plan_id: str, walk: "_Walk", environment: JsonObject) -> Summary:
    statistics = summarize(walk.rows(), run=run, plan_id=plan_id, units=walk.units)
    decision = decide(
        DecisionSection(),
        statistics,
        checks=None,
        sizes=None,
        is_from_plan=False,
        environment=environment,
    )
    return complete(statistics, decision, cliff=None, plan=None, environment=environment)


def _reconciliation(run: str, walk: "_Walk") -> ReconcileFile:
    """``reconcile.json`` without a prediction: rows as they are, nothing reconciled."""
    return ReconcileFile(
        schema_version=SCHEMA,
        run=run,
        requests_planned=0,
        requests_recorded=walk.account.recorded,
        requests_reconciled=0,
        findings=walk.account.findings(),
        requests=walk.listed.entries,
        every=walk.listed.every,
        by_pass=by_pass(
            {of: PassAccount(len(met), len(met)) for of, met in walk.account.documents.items()}
        ),
        not_predicted=[],
    )


class _Walk:
    """One walk over the ``copy`` of a foreign file, and what it met: rows counted, and listed.

    Without a session, the k-th row of the same arm, pass and document belongs to the k-th session of
    that arm: one server cannot have measured a document of a pass twice.
    """

    def __init__(self, copy: Path, source: Path, units: Units) -> None:
        self.account = ImportAccount()
        self.listed = Listed(sum(1 for _ in numbered_lines(copy)), units)
        self.units = units
        self._copy, self._source = copy, source
        self._seqs: Counter[str] = Counter()
        self._seen: dict[tuple[str, str], Counter[int | str]] = defaultdict(Counter)
        self._firsts: dict[str, tuple[int, ForeignRow]] = {}  # by session: its place, its first row
        self._documents: dict[int | str, int] = {}  # of numbers, the first alone

    def rows(self) -> Iterator[Sample]:
        """Every row in file order; InputError with file, line and field."""
        for number, line in numbered_lines(self._copy):
            if not line.strip():
                continue
            where = f"{self._source}, line {number}"
            foreign = _foreign(line, where)
            row = self._row(foreign, where)
            self.account.add(row, foreign.run)
            self.listed.add(row.key, row)
            yield row

    def _row(self, foreign: ForeignRow, where: str) -> Sample:
        session = foreign.session or self._assumed_session(foreign)
        first_seen = self._order(session, foreign, where)
        self._seqs[session] += 1
        return Sample(
            config=foreign.config,
            pass_name=foreign.pass_name,
            doc=self._document(session, foreign, where),
            doc_tokens=foreign.doc_tokens,
            ttft_ms=foreign.ttft_ms,
            total_ms=foreign.total_ms,
            session=session,
            order=foreign.order or first_seen,
            seq=self._seqs[session],
            phase="measure",
            prompt_tokens=foreign.prompt_tokens,
            computed=foreign.computed,
            gpu_hit=foreign.gpu_hit,
            host_loaded=foreign.host_loaded,
            loaded_bytes=foreign.loaded_bytes,
            stored_tokens=foreign.stored_tokens,
            settle_ms=foreign.settle_ms,
            complete=not foreign.has_failed and foreign.ttft_ms is not None,
            error=_error_of(foreign),
            unattributed=None if foreign.computed is not None else "not measured",
            sent_unix_ns=foreign.sent_unix_ns,
        )

    def _assumed_session(self, row: ForeignRow) -> str:
        self.account.is_assumed = True
        seen = self._seen[row.config, row.pass_name]
        seen[row.doc] += 1
        return f"{row.config}-{seen[row.doc]}"

    def _order(self, session: str, row: ForeignRow, where: str) -> int:
        """The session's place by first appearance; InputError when rows contradict each other."""
        _, first_of_all = next(iter(self._firsts.values()), (1, row))
        for name in ("session", "order"):
            if (getattr(row, name) is None) != (getattr(first_of_all, name) is None):
                raise InputError(
                    f"{where}: {name} is {getattr(row, name)!r} here and "
                    f"{getattr(first_of_all, name)!r} in the first row",
                    hint=f"give {name} in every row, or in none",
                )
        if session not in self._firsts:
            others = {first.config for _, first in self._firsts.values()}
            refuse_misspelt(row.config, others, where)
        place, first = self._firsts.setdefault(session, (len(self._firsts) + 1, row))
        if first.order != row.order:
            raise InputError(
                f"{where}: order of session {session!r} is {row.order} here and {first.order} before"
            )
        if first.config != row.config:
            raise InputError(
                f"{where}: session {session!r} is of arm {row.config!r} here and of "
                f"{first.config!r} before",
                hint="a session is one server of one arm: give each its own name",
            )
        return place

    def _document(self, session: str, row: ForeignRow, where: str) -> int:
        """The document's number; InputError when met before, or where others are named by texts."""
        doc = row.doc
        if type(next(iter(self._documents), doc)) is not type(doc):
            raise InputError(
                f"{where}: doc is {doc!r}; name all documents by numbers, or all by texts"
            )
        if isinstance(doc, str):
            number = self._documents.setdefault(doc, len(self._documents))
        else:
            number = doc
            self._documents = self._documents or {doc: doc}
        if number in self.account.documents.get((session, row.pass_name), ()):
            raise InputError(
                f"{where}: document {doc!r} comes twice in {row.pass_name!r} of session {session!r}",
                hint="one server measures a document once in a pass: name sessions and passes apart",
            )
        return number


def _error_of(row: ForeignRow) -> str | None:
    error = row.error or ("the file does not say why" if row.has_failed else None)
    if error is not None and len(error) > _LONGEST_ERROR:
        return error[:_LONGEST_ERROR] + "…"
    return error


def _foreign(line: bytes, where: str) -> ForeignRow:
    try:
        content = load_json(line, where=where)
    except InputError as error:
        if line.endswith(b"\n"):
            raise
        raise InputError(
            f"{error}; the last line has no line end: its writer was cut off",
            hint="take the torn line away",
        ) from None
    needed = "each line needs config, pass, doc, doc_tokens, ttft_ms and total_ms"
    row = validated(ForeignRow, content, where=where, hint=needed)
    if row.ttft_ms is not None and row.total_ms is not None and row.ttft_ms > row.total_ms:
        raise InputError(f"{where}: ttft_ms {row.ttft_ms} is more than total_ms {row.total_ms}")
    if row.ttft_ms is None and not row.has_failed and not row.error:
        raise InputError(
            f"{where}: ttft_ms is null in a row that does not say it failed",
            hint="say complete: false, or give the error",
        )
    if not row.has_failed and row.error and row.ttft_ms is not None:
        raise InputError(
            f"{where}: an error beside a complete answer: {row.error[:_LONGEST_ERROR]!r}",
            hint="say complete: false, or leave error out",
        )
    if WARMUP_PASS in (row.pass_name, row.phase):
        raise InputError(f"{where}: a warm-up row; leave those out, they are no measurement")
    if row.prompt_tokens is not None and row.prompt_tokens < row.doc_tokens:
        raise InputError(
            f"{where}: prompt_tokens {row.prompt_tokens} is less than doc_tokens {row.doc_tokens}"
        )
    sources = [row.computed, row.gpu_hit, row.host_loaded]
    known = [tokens for tokens in sources if tokens is not None]
    if known and (len(known) < 3 or row.prompt_tokens != sum(known)):
        raise InputError(
            f"{where}: computed {row.computed} + gpu_hit {row.gpu_hit} + host_loaded "
            f"{row.host_loaded} must all be there and sum to prompt_tokens {row.prompt_tokens}",
            hint="leave all three out where the sources are not known",
        )
    return row
