"""A compiled trace on disk: ``NAME.kvtrace.npz``, a zip of numpy arrays that says what it is.

Version 2, members: ``about`` (UTF-8 JSON: format, version, source, block_tokens, counts, and how
it was made), the tree (``is_next``: whether an edge continues the one before it, packed bits;
``parents`` of the others; ``length``; ``last_edge``) and the requests (``time``,
``session``, ``session_start``, ``input_tokens``, ``output_tokens``). Times are whole multiples of
``time_unit_ns`` nanoseconds; sequences that grow slowly are stored as differences. Version 1 had
rounded times to microseconds.
"""

import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.curves.trace import MOST_NS, MOST_TRACE_TOKENS, Ints, Requests, TraceError, check_totals
from sim.curves.tree import PrefixTree

SUFFIX = ".kvtrace.npz"
FORMAT = "kvcliff compiled trace"
VERSION = 2
_MEMBERS = (
    "about", "is_next", "parents", "length", "last_edge",
    "time", "session", "session_start", "input_tokens", "output_tokens",
)  # fmt: skip
_AS_THEY_ARE = ("length", "output_tokens")
"""Columns that are not stored as differences."""
_LEAST = {"requests": 1, "accesses": 0, "block_tokens": 1, "time_unit_ns": 1}
"""The smallest each count of ``about`` can be."""


def save(tree: PrefixTree, path: Path, *, notes: dict[str, Any] | None = None) -> None:
    """Write ``tree`` to ``path``; ``notes`` (JSON) are kept in its ``about``."""
    requests = tree.requests
    is_next = tree.parent == np.arange(len(tree.parent)) - 1
    times = np.concatenate([requests.time_ns, requests.session_start_ns])
    unit_ns = int(np.gcd.reduce(times)) or 1
    about = {
        "format": FORMAT,
        "version": VERSION,
        "source": requests.source,
        "block_tokens": requests.block_tokens,
        "requests": len(requests),
        "accesses": tree.n_accesses,
        "distinct_blocks": tree.n_blocks,
        "edges": len(tree.parent),
        "starts_known": requests.starts_known,
        "time_unit_ns": unit_ns,
        "kv_bytes_per_token": requests.kv_bytes_per_token,
        "notes": notes or {},
    }
    members = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "is_next": np.packbits(is_next),
        "parents": _small(np.diff(tree.parent[~is_next].astype(np.int64), prepend=0)),
        "length": _small(tree.length),
        "last_edge": _small(np.diff(tree.last_edge.astype(np.int64), prepend=0)),
        "time": _small(np.diff(requests.time_ns // unit_ns, prepend=0)),
        "session": _small(np.diff(requests.session, prepend=0)),
        "session_start": _small(np.diff(requests.session_start_ns // unit_ns, prepend=0)),
        "input_tokens": _small(np.diff(requests.input_tokens, prepend=0)),
        "output_tokens": _small(requests.output_tokens),
    }
    with path.open("wb") as file:  # by its path numpy would add an ending
        np.savez_compressed(file, **members)  # type: ignore[arg-type]


def is_compiled(path: Path) -> bool:
    """Whether ``path`` looks like a compiled trace: a zip whose first member says what it is."""
    try:
        with path.open("rb") as file:
            header = file.read(39)
            return header.startswith(b"PK\x03\x04") and header.endswith(b"about.npy")
    except OSError:
        return False


def load(path: Path) -> PrefixTree:
    """Read a compiled trace. Raises TraceError for a damaged file or another version."""
    members = _members(path)
    try:
        said = json.loads(members.pop("about").tobytes())
        is_ours = isinstance(said, dict) and said.get("format") == FORMAT
        if is_ours and said.get("version") == VERSION:
            _check_types(members, said)
            return _tree(members, said)
    except (TraceError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: damaged compiled trace: {error}") from None
    if not is_ours:
        raise TraceError(f"{path}: not a {FORMAT}")
    raise TraceError(
        f"{path}: version {said.get('version')} of the format, but {VERSION} is read here: "
        "compile the trace again"
    )


def _members(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # Opened here: numpy leaves a file it opened open when it turns out to be damaged.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in _MEMBERS if name in archive.files}
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError) as error:
        # ValueError: numpy's. RuntimeError: the header asks for a password or another compression.
        raise TraceError(f"{path}: damaged compiled trace: {error}") from None
    if missing := [name for name in _MEMBERS if name not in found]:
        raise TraceError(f"{path}: no compiled trace: it lacks {', '.join(missing)}")
    return found


def _check_types(members: dict[str, NDArray[Any]], said: dict[str, Any]) -> None:
    """TraceError where a trace cannot be made from these; a JSON true is no number."""
    for name, values in members.items():
        kinds = np.uint8 if name == "is_next" else np.signedinteger
        if values.ndim != 1 or not np.issubdtype(values.dtype, kinds):
            raise TraceError(f"{name} is an array of {values.dtype} with {values.ndim} dimensions")
    kv_bytes = said.get("kv_bytes_per_token")
    is_right = {
        "source": isinstance(said.get("source"), str),
        "starts_known": isinstance(said.get("starts_known"), bool),
        "kv_bytes_per_token": kv_bytes is None
        or (type(kv_bytes) in (int, float) and 0 < kv_bytes < math.inf),
    }
    for field, least in _LEAST.items():
        value = said.get(field)
        is_right[field] = type(value) is int and least <= value < MOST_TRACE_TOKENS
    if unusable := [field for field, is_usable in is_right.items() if not is_usable]:
        raise TraceError(f"it says no usable {', '.join(unusable)}")


def _tree(members: dict[str, NDArray[Any]], said: dict[str, Any]) -> PrefixTree:
    is_next = np.unpackbits(members.pop("is_next"))
    wide = {
        name: values.astype(np.int64) if name in _AS_THEY_ARE else np.cumsum(values, dtype=np.int64)
        for name, values in members.items()
    }
    length = wide["length"]
    is_next = is_next[: len(length)].astype(bool)
    if len(is_next) != len(length) or len(wide["parents"]) != (~is_next).sum():
        raise TraceError("its columns differ in length")
    parent = np.arange(len(length), dtype=np.int64) - 1
    parent[~is_next] = wide["parents"]
    _check_columns(wide, said)
    requests = Requests(
        time_ns=wide["time"] * said["time_unit_ns"],
        session=wide["session"],
        session_start_ns=wide["session_start"] * said["time_unit_ns"],
        input_tokens=wide["input_tokens"],
        output_tokens=wide["output_tokens"],
        block_tokens=said["block_tokens"],
        source=said["source"],
        starts_known=said["starts_known"],
        kv_bytes_per_token=said["kv_bytes_per_token"],
    )
    last_edge = wide["last_edge"].astype(np.int32)
    tree = PrefixTree.from_edges(requests, parent.astype(np.int32), length, last_edge)
    check_totals(requests, tree.blocks_of_requests(), lambda r: f"request {r}")
    if tree.n_accesses != said["accesses"]:
        raise TraceError(f"{tree.n_accesses} accesses, but it says {said['accesses']}")
    return tree


def _check_columns(columns: dict[str, Ints], said: dict[str, Any]) -> None:
    latest, n_sessions = MOST_NS // said["time_unit_ns"], len(columns["session_start"])
    for name, size, stop in (
        ("time", said["requests"], latest),
        ("session", said["requests"], n_sessions),
        ("session_start", n_sessions, latest),
        ("input_tokens", said["requests"], MOST_TRACE_TOKENS),
        ("output_tokens", said["requests"], MOST_TRACE_TOKENS),
    ):
        values = columns[name]
        if len(values) != size:
            raise TraceError("its columns differ in length")
        if size and not 0 <= values.min() <= values.max() < stop:
            raise TraceError(f"{name} {values.min()} to {values.max()} is not in [0, {stop})")


def _small(values: NDArray[Any]) -> NDArray[np.signedinteger]:
    """``values`` in the smallest integer type that holds them all."""
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if not len(values) or (limits.min <= values.min() and values.max() <= limits.max):
            return values.astype(kind)
    return values.astype(np.int64)
