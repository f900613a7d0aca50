"""The journal: one JSON object a request, appended as it happens, and read back strictly.

A journal file belongs to one session. It is created exclusively, each row is one write of one line
followed by fsync, so a killed run keeps every row it finished. Reading needs no engine.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import InputError
from harness.files import load_json, read_lines, validated
from harness.record.audit import Derived, PassSums, contradiction, unlike_counters
from harness.record.row import NUMBERS, AnyRow, PredictedRow, Row
from harness.record.versions import current


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

    def append(self, *rows: Row) -> None:
        """Write rows durably, those of a pass in flight together: one write, then fsync."""
        lines = "".join(row.to_json() + "\n" for row in rows).encode("ascii")
        written = os.write(self._fd, lines)
        if written != len(lines):
            raise OSError(f"only {written} of {len(lines)} bytes of journal rows were written")
        os.fsync(self._fd)

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def read_journal(path: Path, notes: list[str] | None = None) -> list[Row]:
    """All rows of one journal, as ``walk_journal`` gives them."""
    return list(walk_journal(path, notes if notes is not None else []))


def walk_journal(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows of one journal, in order, one at a time: memory does not grow with their number.

    An unterminated last line (a killed writer's torn record) is left out and said in ``notes``, as
    is a last pass of requests in flight that lacks some of them.
    Anything else that is not a valid row, a key met twice, or sources that do not follow from the
    row's own raw counters raises InputError with file, line and field.
    """
    last: Row | None = None
    kept: dict[Any, Derived] = {}
    sums = PassSums()
    for number, row in _records(path, Row, notes):
        problem = contradiction(row, last) or unlike_counters(row, kept) or sums.add(row)
        if problem:
            raise InputError(f"{path}, line {number}: {problem}")
        yield row
        last = row
    if sums.is_cut_short:
        notes.append(f"{path}: the last pass lacks requests that its counters have")
    elif problem := sums.end():
        raise InputError(f"{path}: {problem}")


def walk_predictions(path: Path) -> Iterator[PredictedRow]:
    """The lines of a ``prediction.jsonl``, one at a time; InputError with file, line and field."""
    notes: list[str] = []
    for number, row in _records(path, PredictedRow, notes):
        missing = [name for name in NUMBERS if getattr(row, name) is None]
        if missing and (row.is_exact or len(missing) < len(NUMBERS)):
            raise InputError(
                f"{path}, line {number}: {', '.join(missing)} null; either all numbers are, "
                "and why_not says why, or none"
            )
        yield row
    if notes:
        raise InputError(notes[0])


def parse_record(line: bytes, kind: type[AnyRow], *, where: str) -> AnyRow:
    """One line of any version as a record of today's; InputError says what is wrong with it.

    pydantic's own parser takes a fifth of the time of ``load_json``, but keeps the last of two equal
    keys; so its answer counts only where there are as many keys as ``":`` in the line, and no blank
    before a colon. Everything else is read the strict way, an older version above all.
    """
    with suppress(ValidationError):
        record = kind.model_validate_json(line)
        is_plain = not any(spaced in line for spaced in (b" :", b"\t:", b"\r:"))
        if is_plain and line.count(b'":') == _n_keys(record):
            return record
    return validated(kind, current(load_json(line, where=where), kind, where=where), where=where)


def _records(path: Path, kind: type[AnyRow], notes: list[str]) -> Iterator[tuple[int, AnyRow]]:
    """Line number and record, each request once; a session walks pass by pass, so one is kept."""
    walk: tuple[str, str] | None = None
    left: set[tuple[str, str] | None] = set()
    docs: set[int] = set()
    for number, line in read_lines(path, notes):
        record = parse_record(line, kind, where=f"{path}, line {number}")
        session, name, doc = record.key
        if (session, name) != walk:
            left.add(walk)
            walk, docs = (session, name), set()
        if walk in left or doc in docs:
            raise InputError(f"{path}, line {number}: {_before(path, kind, number, record)}")
        docs.add(doc)
        yield number, record


def _before(path: Path, kind: type[AnyRow], number: int, record: AnyRow) -> str:
    """What is wrong with a record that is not new."""
    for earlier, line in read_lines(path, []):
        if earlier < number and parse_record(line, kind, where=str(path)).key == record.key:
            return f"request {record.key} was recorded before, in line {earlier}"
    session, name, _ = record.key
    return f"pass {name!r} of {session} goes on after another one began"


def _n_keys(record: Row | PredictedRow) -> int:
    n = len(record.model_fields_set)
    if isinstance(record, Row):
        n += len(record.counters_before or ()) + len(record.counters_after or ())
    return n
