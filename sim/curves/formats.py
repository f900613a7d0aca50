"""What the rows of each trace format mean, field by field, and which format a row is.

Mooncake JSONL (FAST'25; ms, 512-token blocks) · WEKA agentic JSON (kv-cache-tester; s, ids local
to a session) · LMCache 0.5.6 lookup-hash JSONL (s) · kvcache-simulator 0.1.3 JSONL (block_size in
each row) · Qwen-Bailian JSONL (s, 16-token blocks) · kvcliff's own journals.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sim.curves.trace import MOST_NS, TraceError

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
_MS = 10**6

MOST_PROMPT_TOKENS = 10**9
"""Where blocks are named one by one, as of a journal or a conversation: more is no prompt any engine has served."""

_DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


@dataclass(slots=True)  # not frozen: that triples the cost of making one
class TraceRow:
    """One request. ``ids`` is its list of block ids, or the number of its extracted array.

    ``scope``: ids of different scopes never mean the same block. ``session``: name of the session,
    None when the request stands alone. ``has_start``: whether the format says when sessions start;
    if not, ``time_ns`` counts from the session's start.
    """

    where: str
    ids: Any
    time_ns: int
    block_tokens: int
    input_tokens: int
    output_tokens: int = 0
    scope: str = ""
    session: str | None = None
    has_start: bool = True
    kv_bytes_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """``name``; the fields that give it away; the field of the ids; and its row reader.
    ``may_be_turns``: AIPerf takes such rows for turns of a conversation where they name one.
    """

    name: str
    needs: frozenset[str]
    ids_field: str
    rows: Callable[[dict[str, Any], str, int | None], Iterator[TraceRow]]
    may_be_turns: bool = False
    block_tokens: int | None = None


def format_of(row: Any, where: str) -> Format:
    """The format a first row belongs to. Raises TraceError that lists the formats known."""
    if not isinstance(row, dict):
        raise TraceError(f"{where}: a {type(row).__name__} where a JSON object should be")
    for known in FORMATS:
        if known.needs <= row.keys():
            return known
    check_prompt(row, where)
    expected = "; ".join(f"{f.name}: {', '.join(sorted(f.needs))}" for f in FORMATS)
    fields = ", ".join(sorted(row)[:12]) or "none"
    raise TraceError(f"{where}: not a trace format known here. It has the fields {fields}; "
                     f"needed are {expected}")  # fmt: skip


_TEXTS = ("messages", "payload", "text_input")
_OF_TURNS = ("session_id", "delay")
_CHANGE_MEANING = frozenset((*_TEXTS, *_OF_TURNS))


def check_prompt(row: dict[str, Any], where: str, *, deltas: bool | None = None) -> None:
    """Refuse a row whose prompt is a text, or that may be a turn and was not called one or none.

    ``deltas``: whether rows of sessions are turns; None: nobody has said.
    """
    if _CHANGE_MEANING.isdisjoint(row):
        return
    for field in _TEXTS:
        if row.get(field) is not None:
            raise TraceError(
                f"{where}: field {field!r} holds the prompt as text, which has no blocks: a trace "
                "names its blocks in 'hash_ids'"
            )
    if deltas is not None or row.get("context_mode") == "message_array_with_responses":
        return
    for field in _OF_TURNS:
        if row.get(field) is not None:
            raise TraceError(
                f"{where}: field {field!r}: rows of a session may hold what each turn adds to it, "
                "as AIPerf replays them, or whole prompts: say --deltas or --no-deltas"
            )


def _mooncake(row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    time_ns, prompt = (
        moment(row, "timestamp", where, unit_ns=_MS),
        count(row, "input_length", where),
    )
    answer = count(row, "output_length", where, default=0)
    yield TraceRow(where, row["hash_ids"], time_ns, block or MOONCAKE_BLOCK_TOKENS, prompt, answer)


def _bailian(row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    time_ns, prompt = moment(row, "timestamp", where), count(row, "input_length", where)
    answer, size = count(row, "output_length", where, default=0), block or BAILIAN_BLOCK_TOKENS
    turn = f"{whole(row, 'chat_id', where)} {whole(row, 'parent_chat_id', where)}"
    yield TraceRow(where, row["hash_ids"], time_ns, size, prompt, answer, session=turn)


def _kvcache_simulator(row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    yield from _mooncake({"timestamp": 0, **row}, where, own_size(row, "block_size", where, block))


def _lmcache(row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    size = own_size(row, "chunk_size", where, block)
    yield TraceRow(
        where,
        row["chunk_hashes"],
        moment(row, "timestamp", where),
        size,
        count(row, "seq_len", where),
        scope=str(row.get("model_name", "")),
        kv_bytes_per_token=_bytes_of(row, size, where),
    )


def _bytes_of(row: dict[str, Any], chunk_tokens: int, where: str) -> float | None:
    """KV bytes a token by the row's tensors; None without them or with a dtype not known here."""
    shapes, dtypes = row.get("shapes"), row.get("dtypes")
    if not shapes or not dtypes:
        return None
    is_list = isinstance(shapes, list) and isinstance(dtypes, list) and len(shapes) == len(dtypes)
    if not is_list or not all(
        isinstance(shape, list) and all(type(n) is int and 1 <= n <= 2**31 for n in shape)
        for shape in shapes
    ):
        raise TraceError(
            f"{where}: fields 'shapes' and 'dtypes' are {_short(shapes)} and {_short(dtypes)}; "
            "lists of one length are needed, shapes of whole numbers from 1 to 2**31"
        )
    sizes = [_DTYPE_BYTES.get(str(dtype)) for dtype in dtypes]
    numbers: list[int] = [math.prod(shape) for shape in shapes]
    if None in sizes or sum(numbers) >= 2**62:
        return None
    return sum(n * (size or 0) for n, size in zip(numbers, sizes, strict=True)) / chunk_tokens


class _Journal:
    """A kvcliff journal: documents share nothing, and each server's blocks are nobody else's.

    A block is named by what its last token belongs to: the document, or the question of a pass. A
    question that a later ``doc_tokens`` includes has become part of its document and keeps its
    name. ``asked_again``: each document is asked one question, every time.
    """

    def __init__(self, *, asked_again: bool = False) -> None:
        self._asked_again = asked_again
        self._asked: dict[tuple[str, str, int], dict[str, tuple[int, int]]] = {}

    def __call__(self, row: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
        if block is None:
            raise TraceError(f"{where}: a journal does not say the block size: give --block-tokens")
        document, session = whole(row, "doc", where), str(row["session"])
        prompt = count(row, "prompt_tokens", where)
        own = count(row, "doc_tokens", where)
        if not own <= prompt <= MOST_PROMPT_TOKENS:
            raise TraceError(
                f"{where}: fields 'doc_tokens' and 'prompt_tokens' are {own} and {prompt}; a document "
                f"is no longer than its prompt, a prompt than {MOST_PROMPT_TOKENS:,}"
            )
        kind = "warmup" if row.get("phase") == "warmup" else "measure"
        asked = self._asked.setdefault((session, kind, document), {})
        name = "again" if self._asked_again else str(row["pass"])
        asked[name] = own, prompt
        parts = {n: span for n, span in asked.items() if n == name or span[1] <= own}

        def part_of(token: int) -> str:
            return next((f"{n} " for n, (a, b) in parts.items() if a <= token < b), "")

        ends = range(block, prompt + 1, block)
        yield TraceRow(
            where,
            [f"{part_of(end - 1)}{kind}/{document}/{end}" for end in ends],
            count(row, "sent_unix_ns", where),
            block,
            prompt,
            count(row, "output_tokens", where, default=0),
            scope=session,
        )


def _weka(session: dict[str, Any], where: str, block: int | None) -> Iterator[TraceRow]:
    size = own_size(session, "block_size", where, block)
    name = session.get("id")
    if not isinstance(name, str) or not name:
        raise TraceError(f"{where}: field 'id' is {name!r}; a name is needed")
    scope = session.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise TraceError(f"{where}: field 'hash_id_scope' is {scope!r}; known: local, global")
    local = name if scope == "local" else ""
    yield from _weka_requests(session["requests"], where, 0, size, (name, local))


def _weka_requests(
    requests: Any, where: str, start_ns: int, size: int, names: tuple[str, str]
) -> Iterator[TraceRow]:
    """Requests of a session or of a sub-agent, whose times count from its own start."""
    if not isinstance(requests, list):
        raise TraceError(f"{where}: field 'requests' is a {type(requests).__name__}, not a list")
    for index, request in enumerate(requests):
        at = f"{where}: requests[{index}]"
        if not isinstance(request, dict):
            raise TraceError(f"{at}: a {type(request).__name__} where an object should be")
        time_ns = moment(request, "t", at, since_ns=start_ns)
        if "requests" in request:
            yield from _weka_requests(request["requests"], at, time_ns, size, names)
            continue
        if "hash_ids" not in request:
            raise TraceError(f"{at}: field 'hash_ids' is missing")
        yield TraceRow(
            at,
            request["hash_ids"],
            time_ns,
            size,
            count(request, "in", at),
            count(request, "out", at, default=0),
            scope=names[1],
            session=names[0],
            has_start=False,
        )


JOURNAL = "kvcliff journal"


def journal_format(*, asked_again: bool = False) -> Format:
    """A reader for one trace: what a row means depends on those before it (see ``_Journal``)."""
    needs = frozenset({"session", "pass", "doc", "doc_tokens", "prompt_tokens"})
    return Format(JOURNAL, needs, "doc", _Journal(asked_again=asked_again))


FORMATS = (
    journal_format(),
    Format("WEKA agentic JSON", frozenset({"id", "block_size", "requests"}), "hash_ids", _weka),
    Format("LMCache lookup-hash JSONL", frozenset({"chunk_hashes", "chunk_size", "seq_len"}),
           "chunk_hashes", _lmcache),
    Format("Qwen-Bailian JSONL", frozenset({"hash_ids", "chat_id", "parent_chat_id"}),
           "hash_ids", _bailian, block_tokens=BAILIAN_BLOCK_TOKENS),
    Format("kvcache-simulator JSONL", frozenset({"hash_ids", "block_size", "input_length"}),
           "hash_ids", _kvcache_simulator, may_be_turns=True),
    Format("Mooncake JSONL", frozenset({"hash_ids", "timestamp", "input_length"}),
           "hash_ids", _mooncake, may_be_turns=True, block_tokens=MOONCAKE_BLOCK_TOKENS),
)  # fmt: skip


def moment(
    row: dict[str, Any],
    field: str,
    where: str,
    *,
    unit_ns: int = 10**9,
    since_ns: int = 0,
    default: int | None = None,
) -> int:
    """Nanoseconds: ``since_ns`` plus a finite number ≥ 0 of units of ``unit_ns`` from ``row``.

    A 64-bit float is taken apart first: multiplied, one of 1.7e9 s would lose the last of its
    digits, and with it who came first. TraceError where it is no such number.
    """
    value: Any = row.get(field, default)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        value = _value(row, field, where, default)
        raise TraceError(f"{where}: field {field!r} is {_short(value)}; a number ≥ 0 is needed")
    units = int(value)
    time_ns: int = since_ns + units * unit_ns + round((value - units) * unit_ns)
    if time_ns >= MOST_NS:
        raise TraceError(
            f"{where}: field {field!r} is {_short(value)}: a moment {MOST_NS // 10**9:,} s or more "
            "after 0 cannot be kept; is it in the format's unit?"
        )
    return time_ns


def count(
    row: dict[str, Any], field: str, where: str, *, least: int = 0, default: int | None = None
) -> int:
    """A whole number ≥ ``least`` below 2**62 from ``row``; TraceError otherwise."""
    value = row.get(field)
    if type(value) is int and least <= value < 2**62:
        return value
    value = whole(row, field, where, default=default)
    if not least <= value < 2**62:
        raise TraceError(f"{where}: field {field!r} is {value}; a whole number ≥ {least} is needed")
    return value


def own_size(row: dict[str, Any], field: str, where: str, asked: int | None) -> int:
    """The block size ``row`` itself gives; TraceError where another one was ``asked`` for."""
    size = count(row, field, where, least=1)
    if asked not in (None, size):
        raise TraceError(f"{where}: field {field!r} is {size}, but {asked} was asked for")
    return size


def whole(row: dict[str, Any], field: str, where: str, *, default: int | None = None) -> int:
    """A whole number, of any sign, from ``row``; TraceError otherwise."""
    value = _value(row, field, where, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TraceError(f"{where}: field {field!r} is {_short(value)}; a whole number is needed")
    return value


def _value(row: dict[str, Any], field: str, where: str, default: Any) -> Any:
    if field not in row and default is None:
        raise TraceError(f"{where}: field {field!r} is missing")
    return row.get(field, default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
