"""Prove the sources of requests in flight: kvcliff's rows against what vLLM's own scheduler wrote down.

    python scripts/load_proof.py           # plans that have no run in results/load yet, then the table
    python scripts/load_proof.py --table   # measure nothing: compare the runs there are again

Each plan is one arm at one concurrency on the CPU engines, with a scheduler that logs (tests/live/recording.py);
its lines become ``recorded.jsonl`` in the run folder. Exit code 1 when an attributed request differs from the
scheduler's record, or fewer than 99 % are attributed.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.record.folder import RunFolder
from harness.record.row import Row

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "results" / "load"
RECORD = "recorded.jsonl"
LEAST_ATTRIBUTED = 0.99
SOURCES = ("computed", "gpu_hit", "host_loaded")
_KVCLIFF = (sys.executable, "-c", "from harness.cli import main; main()")

# 48 documents of 1,024 tokens: 1,536 blocks. The GPU tier holds 12 of them, so with eight in flight
# prompts wait for blocks; the host tier holds 24 and evicts all the time.
_PLAN = """
schema = 1
name = "{name}"
order = ["{arm}"]
[workload]
documents = 48
document_tokens = 1024
question_tokens = 20
output_tokens = 8
passes = ["fwd", "rev"]
warmup_documents = 1
[server]
build = "cpu"
block_size = 32
num_gpu_blocks = 400
max_num_batched_tokens = 2048
max_model_len = 2048
[host]
gib = 0.29
[load]
{load}
[arms.{arm}]
{tier}
flags = ["--scheduler-cls", "tests.live.recording.RecordingScheduler"]
"""
_TIERS = {"alone": "", "lmcache": 'tier = "lmcache-mp"'}
_LOADS = {
    **{f"closed-{n}": f"concurrency = {n}" for n in (1, 2, 4, 8)},
    "open-4": "rate = 4.0",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One run: its attributed rows against the scheduler's record."""

    requests: int
    attributed: int
    recorded: int
    differ: int
    preempted: int
    gpu_hit: int
    host_loaded: int
    evicted_chunks: int


def plans() -> dict[str, str]:
    """The text of every plan by its name."""
    return {
        f"load-{load}-{arm}": _PLAN.format(name=f"load-{load}-{arm}", arm=arm, load=text, tier=tier)
        for load, text in _LOADS.items()
        for arm, tier in _TIERS.items()
    }


def compare(run: Path) -> Compared:
    """Compare the rows of a run with the record in its folder."""
    recorded = {}
    for line in (run / RECORD).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        recorded[entry["session_id"]] = tuple(entry[name] for name in SOURCES)
    rows = list(RunFolder(run).rows())
    known = [row for row in rows if row.is_attributed]
    last = rows[-1].counters_after or {}
    return Compared(
        requests=len(rows),
        attributed=len(known),
        recorded=sum(f"{row.session}-{row.seq}" in recorded for row in rows),
        differ=sum(recorded.get(f"{row.session}-{row.seq}") != _sources(row) for row in known),
        preempted=last.get("preemptions", 0),
        gpu_hit=sum(row.gpu_hit or 0 for row in known),
        host_loaded=sum(row.host_loaded or 0 for row in known),
        evicted_chunks=last.get("host_evicted_chunks", 0),
    )


def _sources(row: Row) -> tuple[int | None, ...]:
    return tuple(getattr(row, name) for name in SOURCES)


def _measure(name: str, text: str) -> None:
    """Run one plan into results/load; its record goes into the run folder."""
    with TemporaryDirectory(prefix="kvcliff-load-") as folder:
        plan, record = Path(folder) / f"{name}.toml", Path(folder) / RECORD
        plan.write_text(text, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RECORDED_REQUESTS": str(record)}
        argv = [*_KVCLIFF, "run", str(plan), "--results", str(RUNS)]
        code = subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode
        if code > 1:
            sys.exit(code)
        run = sorted(RUNS.glob(f"*-{name}-*"))[-1]  # named by their time
        (run / RECORD).write_bytes(record.read_bytes())


def _table() -> Iterator[tuple[str, Compared]]:
    for run in sorted(RUNS.glob(f"*/{RECORD}")):
        yield RunFolder(run.parent).read_plan().name, compare(run.parent)


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, then compare and print; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="measure nothing")
    if not parser.parse_args(argv).table:
        for name, text in plans().items():
            if not list(RUNS.glob(f"*-{name}-*/{RECORD}")):
                _measure(name, text)
    found = list(_table())
    names = Compared.__dataclass_fields__
    print(f"| plan | {' | '.join(name.replace('_', ' ') for name in names)} |")
    print(f"|---|{'---:|' * len(names)}")
    for plan, compared in found:
        print(f"| {plan} | {' | '.join(f'{getattr(compared, name):,}' for name in names)} |")
    totals = {name: sum(getattr(each, name) for _, each in found) for name in names}
    print(f"| all | {' | '.join(f'{total:,}' for total in totals.values())} |")
    enough = totals["attributed"] >= LEAST_ATTRIBUTED * totals["requests"]
    return 0 if found and enough and not totals["differ"] else 1


if __name__ == "__main__":
    sys.exit(main())
