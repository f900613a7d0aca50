"""A trace written for other tools, so that they can cross-check ours."""

import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from sim.curves.trace import MOST_TRACE_TOKENS, Ints, sized
from sim.curves.tree import PrefixTree
from sim.errors import SpecError

TARGETS = ("lmcache", "mooncake")


def convert(
    tree: PrefixTree,
    target: str,
    path: Path,
    *,
    order: Ints | None = None,
    chunk_tokens: int | None = None,
    kv_bytes_per_token: int = 2,
    compress: bool = False,
) -> int:
    """Write the requests of ``tree`` by arrival; returns how many.

    "lmcache": lookup-hash JSONL as LMCache 0.5.6's MP server logs it and its cache simulator
    reads it, in chunks of ``chunk_tokens`` (default: the trace's block). "mooncake": block ids
    numbered afresh. ``compress``: with gzip. Raises SpecError for an unknown target or a chunk
    out of range, before anything is written.
    """
    if target not in TARGETS:
        raise SpecError(f"target {target!r} is not known; known: {', '.join(TARGETS)}")
    if chunk_tokens is not None and not 1 <= chunk_tokens < MOST_TRACE_TOKENS:
        raise SpecError(f"chunks of {chunk_tokens} tokens; they hold at least 1, below 2**61")
    order = tree.requests.order() if order is None else order
    if target == "lmcache":
        chunk = chunk_tokens or tree.requests.block_tokens
        rows = lookup_events(tree, order, chunk, kv_bytes_per_token)
    else:
        rows = _mooncake(tree, order)
    with path.open("wb") as file:
        # No name and no time: the same trace gives the same bytes.
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if compress else nullcontext(file)
        with packed as stream:
            stream.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    return len(order)


def lookup_events(
    tree: PrefixTree, order: Ints, chunk_tokens: int, kv_bytes_per_token: int = 2
) -> Iterator[dict[str, Any]]:
    """The lookup events of ``convert``'s "lmcache", as LMCache's ``simulate`` takes them."""
    block = tree.requests.block_tokens
    arrivals = tree.requests.arrivals_ns() / 1e9
    for r in order.tolist():
        ids = tree.ids_of(r)
        n_chunks = sized(len(ids) * block // chunk_tokens)
        ends = np.arange(1, n_chunks + 1) * chunk_tokens
        # A chunk's name: the block its last token is in, and where in it.
        names = ids[(ends - 1) // block] * block + (ends - 1) % block
        yield {
            "timestamp": float(arrivals[r]),
            "request_id": f"request-{r}",
            "model_name": "trace",
            "chunk_size": chunk_tokens,
            "seq_len": max(int(tree.requests.input_tokens[r]), len(ids) * block),
            "dtypes": ["int8"],
            "shapes": [[chunk_tokens, kv_bytes_per_token]],
            "chunk_hashes": [f"0x{name:016x}" for name in names.tolist()],
        }


def _mooncake(tree: PrefixTree, order: Ints) -> Iterator[dict[str, Any]]:
    # Rounded to Mooncake's milliseconds; the rows' order says who came first within one.
    arrivals = (tree.requests.arrivals_ns() + 500_000) // 1_000_000
    for r in order.tolist():
        yield {
            "timestamp": int(arrivals[r]),
            "input_length": int(tree.requests.input_tokens[r]),
            "output_length": int(tree.requests.output_tokens[r]),
            "hash_ids": tree.ids_of(r).tolist(),
        }
