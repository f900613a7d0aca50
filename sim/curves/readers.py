"""Any known trace as a ``Trace``; the format is found by content.

A file is read the fast way where its ids are plain whole numbers (``ingest.py``), else the plain
way; both give the same trace, and only the plain way reports errors.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.curves import turns
from sim.curves.formats import JOURNAL, Format, TraceRow, check_prompt, format_of, journal_format
from sim.curves.ingest import ArrayScanner, load_json
from sim.curves.sources import STDIN, expected_bytes, sources
from sim.curves.trace import (
    MOST_NS,
    MOST_TRACE_TOKENS,
    IdArray,
    Ints,
    Requests,
    Trace,
    TraceError,
    check_totals,
    offsets_of,
)

PIECE_BYTES = 64 * 2**20
"""JSONL is read in pieces of about this size, so that memory stays a few times as large."""

Progress = Callable[[int, str], None]


def read_trace(
    path: str,
    *,
    block_tokens: int | None = None,
    deltas: bool | None = None,
    asked_again: bool = False,
    compiled: bool | None = None,
    progress: Progress | None = None,
    files: Sequence[tuple[str, bytes]] | None = None,
) -> Trace:
    """Read the trace at ``path`` (see ``sources``): every request, in the order of the files.

    ``block_tokens`` overrides the block size where the format does not carry one. ``deltas`` says
    whether Mooncake rows of a session are turns of it (``turns``); None refuses them. ``asked_again``: in a journal
    of ours each document has one question, which comes again in every pass. ``progress`` is
    told the bytes read so far and the file's name. ``files``: what ``sources`` gives, where that is
    in memory already. Raises TraceError with file, line and field.
    """
    if block_tokens is not None and not 1 <= block_tokens < MOST_TRACE_TOKENS:
        raise TraceError(f"blocks of {block_tokens} tokens; they hold at least 1, below 2**61")
    if path == STDIN:  # can be read only once, and some traces must be read twice
        files = list(sources(path))
    scanner = ArrayScanner("hash_ids", compiled=compiled, expected_bytes=expected_bytes(path) or 0)
    try:
        got = _Collected(False, deltas, asked_again, scanner)
        return _read(files or sources(path), got, block_tokens, progress)
    except _NamesNeededError:
        got = _Collected(True, deltas, asked_again, scanner)
        return _read(files or sources(path), got, block_tokens, progress)


class _NamesNeededError(Exception):
    """Some ids are no small whole numbers: all must be replaced by numbers of ours."""


class _GrowingIds:
    """Block ids one after the other, in 4 bytes each while they fit; grows in place."""

    def __init__(self) -> None:
        self._ids: IdArray = np.empty(1 << 16, dtype=np.int32)
        self._n = 0

    def add(self, ids: Ints, base: int, low: int, high: int) -> None:
        """Append ``ids`` + ``base``, all in [low, high]."""
        if self._ids.dtype == np.int32 and not (low >= -(2**31) and high < 2**31):
            self._ids = self._ids.astype(np.int64)
        needed = self._n + len(ids)
        if needed > len(self._ids):
            self._ids.resize(max(needed, len(self._ids) * 3 // 2), refcheck=False)
        np.add(ids, base, out=self._ids[self._n : needed], casting="unsafe")
        self._n = needed

    def all(self) -> IdArray:
        """Everything added."""
        return self._ids[: self._n]


@dataclass(slots=True)
class _Collected:
    """Columns of the trace so far."""

    named: bool
    deltas: bool | None
    asked_again: bool
    scanner: ArrayScanner
    ids: _GrowingIds = field(default_factory=_GrowingIds)
    counts: list[IdArray] = field(default_factory=list)
    rows: list[TraceRow] = field(default_factory=list)
    format: Format | None = None
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    scopes: dict[str, tuple[int, int]] = field(default_factory=dict)  # its base and its span
    next_base: int = 0


def _read(
    files: Iterable[tuple[str, bytes]],
    got: _Collected,
    block_tokens: int | None,
    progress: Progress | None,
) -> Trace:
    done = 0
    name = "nothing"
    for name, content in files:
        for piece, first_line in _pieces(content):
            _take(got, name, piece, first_line, block_tokens)
        done += len(content)
        if progress:
            progress(done, name)
    if not got.rows:
        raise TraceError(f"{name}: the trace is empty: it has no request")
    return _assemble(got)


def _pieces(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Parts of ``content`` that end at line ends, each with the number of its first line."""
    start, line = 0, 1
    is_one = _is_one_document(content)
    while start < len(content):
        stop = len(content)
        if start + PIECE_BYTES < len(content) and not is_one:
            stop = content.find(b"\n", start + PIECE_BYTES) + 1 or len(content)
        piece = content[start:stop]
        yield piece, line
        line += piece.count(b"\n") if stop < len(content) else 0
        start = stop


def _take(got: _Collected, name: str, piece: bytes, line: int, block: int | None) -> None:
    """Add one piece, the fast way if it can be read so without an error."""
    may_be_fast = not got.named and (got.format is None or got.format.ids_field == "hash_ids")
    found = got.scanner.extract(piece) if may_be_fast else None
    if found is not None:
        rest, ids, counts = found
        try:
            rows = list(_rows(got, name, rest, line, block))
        except TraceError:
            rows = []  # the plain way says what is wrong, with the right line
        if rows and [row.ids for row in rows] == list(range(len(counts))):
            got.rows += rows
            _add_ids(got, rows, ids, counts, may_be_negative=False)
            return
    rows = list(_rows(got, name, piece, line, block))
    lists = [_checked_ids(got, row) for row in rows]
    got.rows += rows
    counts = np.array([len(ids) for ids in lists], dtype=np.int64)
    _add_ids(got, rows, np.concatenate([*lists, np.zeros(0, dtype=np.int64)]), counts)


def _rows(
    got: _Collected, name: str, text: bytes, line: int, block: int | None
) -> Iterator[TraceRow]:
    for where, content in _documents(text, name, line):
        if got.format is None:
            got.format = (
                format_of(content, where) if not got.deltas else turns.format_of(content, where)
            )
            if got.format.name == JOURNAL:
                got.format = journal_format(asked_again=got.asked_again)
        if not isinstance(content, dict) or not got.format.needs <= content.keys():
            missing = sorted(got.format.needs - set(content if isinstance(content, dict) else ()))
            raise TraceError(f"{where}: not {got.format.name} as the rest of the trace: "
                             f"field {', '.join(map(repr, missing))} is missing")  # fmt: skip
        if got.format.may_be_turns:
            check_prompt(content, where, deltas=got.deltas)
        yield from got.format.rows(content, where, block)


def _is_one_document(text: bytes) -> bool:
    """Whether the JSON goes over several lines; JSONL rows are objects that end on their line."""
    first = re.search(rb"\S", text)
    start = first.start() if first else 0
    stop = text.find(b"\n", start)
    stop = len(text) if stop < 0 else stop
    return not text[max(start, stop - 4096) : stop].rstrip().endswith(b"}")


def _documents(text: bytes, name: str, line: int) -> Iterator[tuple[str, Any]]:
    """The JSON documents of a piece: one a line, or a whole file that is one."""
    if line == 1 and _is_one_document(text) and text.strip():
        opening = text.lstrip().split(b"\n", 1)[0].strip()
        try:
            yield name, load_json(text, name)
        except TraceError:
            if opening != b"{":  # more likely a broken first row than a broken document
                at = 1 + text[: text.index(opening)].count(b"\n")
                load_json(opening, f"{name}:{at}")
            raise
        return
    lines = text.split(b"\n")
    is_single = line == 1 and not any(map(bytes.strip, lines[1:]))
    for number, row in enumerate(lines, start=line):
        if row and not row.isspace():
            where = name if is_single else f"{name}:{number}"
            yield where, load_json(row, where)


def _checked_ids(got: _Collected, row: TraceRow) -> Ints:
    ids = row.ids
    assert got.format is not None
    if not isinstance(ids, list):
        kind = type(ids).__name__
        raise TraceError(
            f"{row.where}: field {got.format.ids_field!r} is of type {kind}; a list is needed"
        )
    kinds = set(map(type, ids))
    if not kinds <= {int, str}:
        index, block = next((i, b) for i, b in enumerate(ids) if type(b) not in (int, str))
        raise TraceError(
            f"{row.where}: {got.format.ids_field}[{index}] is {block!r}; a whole number or a "
            "string is needed"
        )
    if got.named:
        ids = [got.names.setdefault((row.scope, str(i)), len(got.names)) for i in ids]
    elif str in kinds or (ids and (max(ids) >= 2**62 or min(ids) <= -(2**62))):
        raise _NamesNeededError
    return np.array(ids, dtype=np.int64)


def _add_ids(
    got: _Collected, rows: list[TraceRow], flat: Ints, counts: Ints, *, may_be_negative: bool = True
) -> None:
    """Ids of different scopes must differ: each scope's are moved behind all before it."""
    offsets = offsets_of(counts).tolist()
    first = 0
    while first < len(rows):
        scope = rows[first].scope
        stop = next((i for i in range(first, len(rows)) if rows[i].scope != scope), len(rows))
        part = flat[offsets[first] : offsets[stop]]
        high = int(part.max()) if len(part) else 0
        low = int(part.min()) if may_be_negative and len(part) else 0
        base = 0 if got.named else _base(got, scope, low, high)
        got.ids.add(part, base, low + base, high + base)
        first = stop
    got.counts.append(counts.copy())


def _base(got: _Collected, scope: str, low: int, high: int) -> int:
    """What to add to a scope's ids, which lie in [low, high]; nothing where all share one."""
    if "" in {scope, *got.scopes}:
        if {scope, *got.scopes} != {""}:
            raise _NamesNeededError
        got.scopes[""] = (0, 0)
        return 0
    base, known = got.scopes.setdefault(scope, (got.next_base, high))
    # A scope that comes back with ids it did not have would run into the next one's.
    if low < 0 or high > known or base + high >= 2**62:
        raise _NamesNeededError
    got.next_base = max(got.next_base, base + high + 1)
    return base


def _assemble(got: _Collected) -> Trace:
    rows = got.rows
    assert got.format is not None
    block = rows[0].block_tokens
    for row in rows:
        if row.block_tokens != block:
            raise TraceError(
                f"{row.where}: blocks of {row.block_tokens} tokens, but {block} in the rows before"
            )
    session, starts, times, is_known = turns.moments(rows) if got.deltas else _sessions(rows)
    known = {row.kv_bytes_per_token for row in rows}
    requests = Requests(
        time_ns=times,
        session=session,
        session_start_ns=starts,
        input_tokens=np.array([row.input_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array([row.output_tokens for row in rows], dtype=np.int64),
        block_tokens=block,
        source=got.format.name,
        starts_known=is_known,
        kv_bytes_per_token=known.pop() if len(known) == 1 else None,
    )
    counts = np.concatenate(got.counts)
    check_totals(requests, counts, lambda r: rows[r].where)
    _check_size(got.format, requests, counts, lambda r: rows[r].where)
    trace = Trace(requests, got.ids.all(), offsets_of(counts))
    if not got.deltas:
        return trace
    joined = turns.whole_prompts(trace, lambda r: rows[r].where)
    check_totals(joined.requests, np.diff(joined.offsets), lambda r: rows[r].where)
    return joined


def _check_size(
    known: Format, requests: Requests, counts: Ints, where: Callable[[int], str]
) -> None:
    """Refuse a block size asked for where the ids fit the format's own: it would only relabel them."""
    own, asked = known.block_tokens, requests.block_tokens
    if own in (None, asked):
        return
    tokens = requests.input_tokens
    fits_own, fits_asked = (
        (counts == tokens // size) | (counts == -(-tokens // size)) for size in (own, asked)
    )
    contradict = np.flatnonzero(fits_own & ~fits_asked)
    if len(contradict):
        r = int(contradict[0])
        raise TraceError(
            f"{where(r)}: {counts[r]} ids for {tokens[r]:,} tokens are blocks of {own} tokens, as "
            f"{known.name} has them; {asked} was asked for: leave out --block-tokens"
        )


def _sessions(rows: list[TraceRow]) -> tuple[Ints, Ints, Ints, bool]:
    """(session of each row, start of each session, time since it, whether starts are known)."""
    names = _roots(rows)
    numbers: dict[str | int, int] = {}
    session = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
    times = np.array([row.time_ns for row in rows], dtype=np.int64)
    starts = np.zeros(len(numbers), dtype=np.int64)
    if rows[0].has_start:
        starts[:] = MOST_NS
        np.minimum.at(starts, session, times)
        times = times - starts[session]
    return session, starts, times, rows[0].has_start


def _roots(rows: list[TraceRow]) -> list[str | int]:
    """The session of each row; Bailian rows name their parent turn, whose session is theirs."""
    root: dict[str, str] = {}
    names: list[str | int] = []
    for index, row in enumerate(rows):
        if row.session is None:
            names.append(index)
        elif row.has_start:
            chat, parent = row.session.split()
            root[chat] = root.get(parent, chat)
            names.append(root[chat])
        else:
            names.append(row.session)
    return names
