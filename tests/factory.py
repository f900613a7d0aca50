"""Rows, predictions and run folders for tests, valid unless a test says otherwise."""

import json
from pathlib import Path
from typing import Any

from harness.plan.files import parse_plan
from harness.plan.plan import Plan
from harness.record.manifest import Manifest
from harness.record.row import NO_CONNECTOR, SCHEMA, PredictedRow, Row
from harness.verdict.account import Account
from harness.verdict.findings import findings_of
from harness.verdict.reconcile import Reconciled, Reconciliation, join
from harness.verdict.schema import Finding
from sim.workload import WARMUP_PASS, pass_name

PLAN_TOML = """
schema = 1
name = "two-docs"
order = ["baseline", "lmcache", "lmcache", "baseline"]
[workload]
documents = 2
document_tokens = 512
question_tokens = 8
output_tokens = 2
passes = ["fwd", "fwd"]
warmup_documents = 1
seed = 1
vocab = [64, 448]
[server]
engine = "0.32.0"
build = "fake"
dtype = "float32"
block_size = 32
num_gpu_blocks = 18
max_num_batched_tokens = 1024
max_model_len = 544
[arms.lmcache]
tier = "lmcache-mp"
[host]
gib = 0.1
"""


def make_plan(*, more: str = "", **replaced: str) -> Plan:
    """The plan above with lines replaced (``key="key = value"``) and ``more`` TOML at its end."""
    lines = [
        replaced.get(line.split(" = ")[0].strip(), line) for line in PLAN_TOML.strip().splitlines()
    ]
    return parse_plan("\n".join([*lines, more]).encode(), where="plan.toml")


def make_record(**changed: Any) -> dict[str, Any]:
    """A valid journal record: a complete, attributed baseline request of 520 prompt tokens.

    Document d is request d + 1 of its session, and the requests before it were like it.
    """
    doc = changed.get("doc", 0)
    seq = doc + 1 if type(doc) is int else 2
    computed = changed.get("computed", 520)
    gpu_hit = changed.get("gpu_hit", 0)
    host_loaded = changed.get("host_loaded", 0)
    moved = {
        "finished": 1,
        "preemptions": 0,
        "prompt_computed": computed or 0,
        "prompt_gpu_hit": gpu_hit or 0,
        "prompt_host_loaded": host_loaded or 0,
    }
    has_tier = changed.get("config") in ("lmcache", "control")  # as the plan above has them
    connector = "LMCacheMPConnector" if has_tier else NO_CONNECTOR
    ttft = changed.get("ttft_ms")
    first_byte = min(99.5, ttft) if isinstance(ttft, float) else 99.5
    record = {
        "config": "baseline", "connector": connector, "pass": "pass1-cold", "doc": 0, "doc_tokens": 512,
        "ttft_ms": 100.0, "total_ms": 110.0, "schema": SCHEMA, "run": "r", "session": "01-baseline",
        "order": 1, "seq": seq, "phase": "measure", "prompt_tokens": 520, "output_tokens": 2,
        "computed": computed, "gpu_hit": gpu_hit, "host_loaded": host_loaded,
        "loaded_bytes": None, "loaded_source": None, "stored_tokens": None,
        "chunk_tokens": None, "chunk_bytes": None, "cached_tokens": None, "disagreement": None,
        "server_ttft_ms": 99.0, "queue_ms": 0.5, "loop": "serial", "late_ms": None,
        "attributed_by": None if computed is None else "counters", "named_from": None,
        "first_byte_ms": first_byte, "settle_ms": 20.0, "conn_reused": True,
        "finish_reason": "length", "complete": True, "error": None, "unattributed": None,
        "output_sha256": "aa", "counters_before": {name: (seq - 1) * value for name, value in moved.items()},
        "counters_after": {name: seq * value for name, value in moved.items()}, "sent_unix_ns": seq * 150_000_000,
    }  # fmt: skip
    return {**record, **changed}


def make_row(**changed: Any) -> Row:
    """``make_record`` as a Row."""
    return Row.model_validate(make_record(**changed))


def failed(**changed: Any) -> dict[str, Any]:
    """A failed request's record: kept, with null times."""
    return make_record(
        **{"ttft_ms": None, "total_ms": None, "complete": False, "error": "boom", **changed}
    )


def make_prediction(row: Row, **changed: Any) -> PredictedRow:
    """A prediction that ``row`` meets exactly, unless changed."""
    return PredictedRow.model_validate(
        {
            "schema": SCHEMA,
            "session": row.session,
            "pass": row.pass_name,
            "doc": row.doc,
            "computed": row.computed or 0,
            "gpu_hit": row.gpu_hit or 0,
            "host_loaded": row.host_loaded or 0,
            "stored_tokens": row.stored_tokens or 0,
            "loaded_bytes": row.loaded_bytes or 0,
            "why_not": None,
            **changed,
        }
    )


def write_journal(path: Path, *records: dict[str, Any]) -> Path:
    """A journal file of ``records`` as they are, valid or not."""
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    return path


PLAN = make_plan(
    order='order = ["baseline", "lmcache", "lmcache", "baseline", "control"]',
    more="[control]\nnum_gpu_blocks = 99",
)


FACTS = {
    "vllm_version": "0.32.0",
    "lmcache_version": None,
    "block_size": 32,
    "num_gpu_blocks": 18,
    "connector": None,
}


TIER_FACTS = {**FACTS, "lmcache_version": "0.5.6", "connector": "LMCacheMPConnector"}


SERVERS: dict[str, dict[str, Any]] = {
    "01-baseline": {"facts": FACTS},
    "02-lmcache": {"facts": TIER_FACTS},
    "05-control": {"facts": {**TIER_FACTS, "num_gpu_blocks": 99}},
}


def sound_rows() -> list[Row]:
    return [
        make_row(),
        make_row(**{"pass": "pass2-replay"}, output_sha256="bb"),
        tier_row(output_sha256="bb"),
    ]


def run_of(
    rows: list[Row],
    *,
    predictions: list[PredictedRow] | None = None,
    facts: dict[str, dict[str, Any]] | None = None,
    notes: tuple[str, ...] = (),
    planned: list[tuple[str, str, int]] | None = None,
) -> Reconciliation:
    expected = predictions or [make_prediction(row) for row in rows]
    sessions = SERVERS if facts is None else {**SERVERS, **facts}
    keys = [p.key for p in expected] if planned is None else planned
    requests = joined(keys, rows, expected)
    folder = Path("results/run")
    return Reconciliation(folder, PLAN, manifest_of(sessions), requests, notes)


def account_of(run: Reconciliation) -> Account:
    """Everything counted over the run's requests."""
    account = Account(cold=(WARMUP_PASS, pass_name(0, run.plan.workload.passes[0])))
    for request in run.requests:
        account.add(request)
    return account


def find(run: Reconciliation) -> list[Finding]:
    """Every check over the run."""
    return findings_of(run, account_of(run))


def manifest_of(sessions: dict[str, Any]) -> Manifest:
    """A manifest with these sessions, as the file has them."""
    content = {"schema": SCHEMA, "run": "run", "plan_id": "two-docs-1", "sealed": {}, "shape": None}
    return Manifest.model_validate({**content, "sessions": sessions})


def tier_row(**changed: Any) -> Row:
    """A row of session 02-lmcache: 512 tokens loaded from the host."""
    common = {"session": "02-lmcache", "order": 2, "config": "lmcache", "pass": "pass2-replay"}
    return make_row(
        **{
            **common, "computed": 8, "host_loaded": 512, "loaded_bytes": 512, "stored_tokens": 512,
            **changed,
        }
    )  # fmt: skip


def joined(
    keys: list[tuple[str, str, int]], rows: list[Row], predictions: list[PredictedRow]
) -> tuple[Reconciled, ...]:
    return tuple(join(keys, rows, predictions))
