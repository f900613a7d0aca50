"""A small run folder on disk: the factory's plan, measured, as a real run leaves it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.plan.files import parse_plan
from harness.plan.plan import plan_id_of
from harness.plan.requests import PlannedRequests
from harness.record.row import SCHEMA
from servers.tinymodel import tiny_shape
from tests.factory import PLAN_TOML, make_prediction, make_record, make_row

Ttft = Callable[[int, str, str, int], float]
"""(position 1 first, arm, pass, document) → ms."""

_CHUNK_TOKENS, _CHUNK_BYTES = 256, 256 * 4_096


def helps(_position: int, arm: str, pass_name: str, _doc: int) -> float:
    """The tier answers replays in a tenth of the time."""
    return 10.0 if arm == "lmcache" and pass_name == "pass2-replay" else 100.0


def write_run(
    results: Path,
    name: str = "20260101T000000Z-two-docs",
    ttft: Ttft = helps,
    *,
    toml: str = PLAN_TOML,
) -> Path:
    """The folder ``results/name``: 4 sessions of 2 documents, 2 passes and 1 warm-up request.

    Or as many as the plan ``toml`` asks for, of the same shape.
    """
    folder = results / name
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(toml, encoding="utf-8")
    sessions: dict[str, list[dict[str, Any]]] = {}
    predictions = []
    plan = parse_plan(toml.encode(), where="plan.toml")
    plan_id = plan_id_of(plan, tiny_shape())
    run = f"{name.partition('-')[0]}-{plan_id}"
    for session, pass_name, doc in PlannedRequests(plan):
        rows = sessions.setdefault(session, [])
        record = _record(run, session, pass_name, doc, seq=len(rows) + 1, ttft=ttft)
        record = _following(rows[-1] if rows else None, record)
        rows.append(record)
        predictions.append(make_prediction(make_row(**record)).to_json() + "\n")
    for session, rows in sessions.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"journal-{session}.jsonl").write_text(text, encoding="utf-8")
    (folder / "prediction.jsonl").write_text("".join(predictions), encoding="utf-8")
    manifest = {
        "schema": SCHEMA, "run": run, "created": "2026-01-01T00:00:00+00:00", "plan_id": plan_id,
        "shape": tiny_shape().decode(),
        "kvcliff": "0.1.0", "cpu": "a CPU", "cores": 2, "gpus": None,
        "sessions": {session: _server(session) for session in sessions},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    """Write the digests of plan and predictions into the manifest, as at the start of a run."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["sealed"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("plan.toml", "prediction.jsonl")
    }
    path.write_text(json.dumps(manifest), encoding="utf-8")


def _record(
    run: str, session: str, pass_name: str, doc: int, *, seq: int, ttft: Ttft
) -> dict[str, Any]:
    number, _, arm = session.partition("-")
    position = int(number)
    ms = ttft(position, arm, pass_name, doc)
    is_loaded = arm == "lmcache" and pass_name == "pass2-replay"
    record = make_record(
        **{
            "run": run, "session": session, "order": position, "seq": seq, "config": arm,
            "pass": pass_name, "doc": doc, "ttft_ms": ms, "total_ms": ms + 2.0,
            "phase": "warmup" if pass_name == "warmup" else "measure",
            "computed": 8 if is_loaded else 520, "host_loaded": 512 if is_loaded else 0,
            "server_ttft_ms": ms / 2, "output_sha256": f"{pass_name}{doc}",
            "sent_unix_ns": 1_767_225_600_000_000_000 + position * 100 * 1_000_000_000,
        }
    )  # fmt: skip
    return {**record, **_host(record, is_loaded=is_loaded)} if arm == "lmcache" else record


def _following(last: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with a server's counters and clock: they go on from one request to the next."""
    moved = {
        name: value - record["counters_before"][name]
        for name, value in record["counters_after"].items()
    }
    before = last["counters_after"] if last else dict.fromkeys(moved, 0)
    after = {name: before[name] + value for name, value in moved.items()}
    sent = record["sent_unix_ns"]
    if last:  # 5 ms after the one before had settled
        sent = last["sent_unix_ns"] + round(1e6 * (last["total_ms"] + last["settle_ms"] + 5))
    return {**record, "counters_before": before, "counters_after": after, "sent_unix_ns": sent}


def _host(record: dict[str, Any], *, is_loaded: bool) -> dict[str, Any]:
    """What LMCache's counters add: two chunks stored, or the same two loaded."""
    moved = {
        "host_lookups": 1, "host_hit_tokens": 512 if is_loaded else 0,
        "host_written_chunks": 0 if is_loaded else 2, "host_loaded_chunks": 2 if is_loaded else 0,
        "host_alloc_failed_chunks": 0, "host_read_failed_chunks": 0, "host_evicted_chunks": 0,
        "external_hits": 512 if is_loaded else 0,
    }  # fmt: skip
    return {
        "chunk_tokens": _CHUNK_TOKENS, "chunk_bytes": _CHUNK_BYTES,
        "loaded_bytes": 2 * _CHUNK_BYTES if is_loaded else 0,
        "loaded_source": "chunks_loaded_counter", "stored_tokens": 0 if is_loaded else 512,
        "counters_before": {**record["counters_before"], **dict.fromkeys(moved, 0)},
        "counters_after": {**record["counters_after"], **moved},
    }  # fmt: skip


def _server(session: str) -> dict[str, Any]:
    is_tier = session.endswith("lmcache")
    return {
        "started": "2026-01-01T00:00:00+00:00", "start_s": 3.5,
        "ended": "2026-01-01T00:30:00+00:00",
        "facts": {
            "vllm_version": "0.32.0", "lmcache_version": "0.5.6" if is_tier else None,
            "num_gpu_blocks": 18, "block_size": 32,
            "connector": "LMCacheMPConnector" if is_tier else None,
        },
        "commands": [{"role": "vllm", "argv": ["vllm", "serve"], "env_diff": {"A": "1", "B": None}}],
    }  # fmt: skip
