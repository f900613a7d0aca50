"""Rows that say what one turn of a conversation adds to it, made whole prompts.

AIPerf replays a Mooncake row that names a ``session_id`` this way: a turn's prompt is the prompt
before it, the answer to that one, and what the row holds (its ``deltas_without_responses``). Read
as they stand, such rows have neither the tokens nor the hits of the requests they stand for.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from sim.curves.formats import (
    FORMATS,
    MOONCAKE_BLOCK_TOKENS,
    MOST_PROMPT_TOKENS,
    Format,
    TraceRow,
    count,
    moment,
    own_size,
)
from sim.curves.trace import IdArray, Ints, Requests, Trace, TraceError, offsets_of

SOURCE = "Mooncake JSONL by turns"
"""``Requests.source`` of a trace of whole prompts that were made from turns."""

_MS = 10**6


def _row(row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    """A turn without ids holds tokens that no other has."""
    size = own_size(row, "block_size", where, block) if "block_size" in row else None
    if row.get("context_mode") not in (None, "deltas_without_responses"):
        raise TraceError(f"{where}: field 'context_mode' is {row['context_mode']!r}: no turn")
    has_moment = row.get("timestamp") is not None
    name = row.get("session_id")
    if name is not None and type(name) not in (str, int):
        raise TraceError(f"{where}: field 'session_id' is {name!r}; a name is needed")
    ids = row.get("hash_ids")
    yield TraceRow(
        where,
        [] if ids is None else ids,
        moment(row, "timestamp" if has_moment else "delay", where, unit_ns=_MS, default=0),
        size or block or MOONCAKE_BLOCK_TOKENS,
        count(row, "input_length", where),
        count(row, "output_length", where, default=0),
        session=None if name is None else str(name),
        has_start=has_moment,
    )


_FORMAT = Format(SOURCE, frozenset({"input_length"}), "hash_ids", _row, may_be_turns=True)


def format_of(row: Any, where: str) -> Format:
    """The format of turns. Raises TraceError for a first row that cannot be one."""
    known = next((f for f in FORMATS if isinstance(row, dict) and f.needs <= row.keys()), None)
    if known is None or known.may_be_turns:
        return _FORMAT
    raise TraceError(f"{where}: {known.name} has whole prompts: leave out --deltas")


def moments(rows: list[TraceRow]) -> tuple[Ints, Ints, Ints, bool]:
    """(session of each row, start of each session, time since it, whether starts are known).

    A turn comes at its timestamp, or its delay after the turn before; the first turn's delay says
    nothing. Raises TraceError for turns that go back in time, and where only some sessions start.
    """
    numbers: dict[str | int, int] = {}
    session = np.empty(len(rows), dtype=np.int64)
    times = np.zeros(len(rows), dtype=np.int64)
    starts: list[int] = []
    last: list[int] = []
    is_known = rows[0].has_start
    for index, row in enumerate(rows):
        number = numbers.setdefault(index if row.session is None else row.session, len(numbers))
        session[index] = number
        if number == len(starts):
            if row.has_start != is_known:
                raise TraceError(
                    f"{row.where}: the first turn of its session {_has(row.has_start)}, the "
                    f"trace's first row {_has(is_known)}"
                )
            starts.append(row.time_ns if is_known else 0)
            last.append(0)
            continue
        time = row.time_ns - starts[number] if row.has_start else last[number] + row.time_ns
        if time < last[number] or (row.has_start and not is_known):
            raise TraceError(
                f"{row.where}: field 'timestamp' is before the turn before it, or that one has none"
            )
        times[index] = last[number] = time
    return session, np.array(starts, dtype=np.int64), times, is_known


def _has(has_start: bool) -> str:
    return "has a timestamp" if has_start else "has no timestamp"


def whole_prompts(trace: Trace, where: Callable[[int], str]) -> Trace:
    """Each prompt with all that its session held before, generated tokens included.

    Two blocks are equal when the same ids' tokens stand in the same places in them and in all
    before them; generated tokens and those without an id are equal to no others. ``where`` names a
    request for errors: the ids must tell where a prompt ends, its last block listed or not.
    """
    requests = trace.requests
    names: dict[Any, int] = {}
    talks: dict[int, _Conversation] = {}
    paths: list[IdArray] = []
    tokens = np.empty(len(requests), dtype=np.int64)
    for r, number in enumerate(requests.session.tolist()):
        talk = talks.setdefault(number, _Conversation(requests.block_tokens, names))
        said = [*talk.answer, *_said(trace, r, where)]
        tokens[r] = talk.n_tokens + sum(n_tokens for _, n_tokens in said)
        if tokens[r] > MOST_PROMPT_TOKENS:
            raise TraceError(
                f"{where(r)}: a prompt of {tokens[r]:,} tokens with its session before it; "
                f"{MOST_PROMPT_TOKENS:,} is the most"
            )
        for source, n_tokens in said:
            talk.say(source, n_tokens)
        paths.append(np.array(talk.blocks(), dtype=np.int64))
        talk.answer = [(("answer", r), int(requests.output_tokens[r]))]
    joined = replace(requests, input_tokens=tokens, source=SOURCE)
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    return Trace(joined, np.concatenate(paths), offsets_of(lengths))


def _said(trace: Trace, r: int, where: Callable[[int], str]) -> Iterator[tuple[Any, int]]:
    """(what it is, its tokens) of each part of what row ``r`` adds."""
    size = trace.requests.block_tokens
    n_tokens = int(trace.requests.input_tokens[r])
    ids = trace.path(r)
    if ids and len(ids) not in (n_tokens // size, -(-n_tokens // size)):
        raise TraceError(
            f"{where(r)}: {len(ids)} block ids for {n_tokens} tokens; at {size} tokens a block "
            f"{-(-n_tokens // size)} are needed to say where the next turn begins"
        )
    for block in ids:
        yield block, min(size, n_tokens)
        n_tokens -= min(size, n_tokens)
    yield ("row", r), n_tokens


class _Conversation:
    """A session's tokens so far, as names of its whole blocks and the parts of the last one.

    ``answer``: what was generated last, of which nobody has heard until the next turn.
    """

    def __init__(self, block_tokens: int, names: dict[Any, int]) -> None:
        self._size = block_tokens
        self._names = names
        self._whole: list[int] = []
        self._last: list[tuple[Any, int, int]] = []
        self._filled = 0
        self.answer: list[tuple[Any, int]] = []

    @property
    def n_tokens(self) -> int:
        return len(self._whole) * self._size + self._filled

    def say(self, source: Any, n_tokens: int) -> None:
        """Go on with the first ``n_tokens`` of ``source``."""
        start = 0
        while start < n_tokens:
            taken = min(n_tokens - start, self._size - self._filled)
            self._last.append((source, start, taken))
            self._filled += taken
            start += taken
            if self._filled == self._size:
                self._whole.append(self._name_of_last())
                self._last, self._filled = [], 0

    def blocks(self) -> list[int]:
        """Names of its blocks, the last one filled or not."""
        return [*self._whole, self._name_of_last()] if self._last else self._whole

    def _name_of_last(self) -> int:
        before = self._whole[-1] if self._whole else None
        return self._names.setdefault((before, *self._last), len(self._names))


def found_again(requests: Requests) -> int:
    """Blocks of answers that later turns repeat: what a cache that keeps them finds besides."""
    is_last = np.ones(len(requests), dtype=bool)
    if len(requests):
        order = np.argsort(requests.session, kind="stable")
        is_last[order[:-1]] = np.diff(requests.session[order]) != 0
    size = requests.block_tokens
    # The last token generated never gets a slot.
    slots = requests.input_tokens + np.maximum(requests.output_tokens - 1, 0)
    blocks: int = (slots // size - requests.input_tokens // size)[~is_last].sum().item()
    return blocks
