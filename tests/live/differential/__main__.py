"""Compare for long, and keep the record: ``python -m tests.live.differential --seconds 600``.

Prints one JSON line per part. With ``--out FILE``, writes the whole record there as well: engine
versions, date, and per part requests, seeds and mismatches. Exit code 1 on any mismatch.
"""

import argparse
import importlib.metadata
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.live.differential.engines import vllm_core, vllm_scheduling
from tests.live.differential.parts import PARTS

LONG_FIRST_SEED = 1_000_000
"""Far from the seeds the tests take, so that the long mode sees workloads they never do."""


def main() -> int:
    """Run the parts asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="over all parts, by share")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--first-seed", type=int, default=LONG_FIRST_SEED)
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="the fastest part, gpu, goes on until all together have compared this many",
    )
    parser.add_argument("--out", type=Path, help="file for the record")
    options = parser.parse_args()
    names = options.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    if names == ["gpu"]:
        vllm_core()  # an older vLLM may have nothing else that runs here
    else:
        vllm_scheduling()  # now, and not within the first part's time
    shares = sum(PARTS[name].share for name in names)
    records: list[dict[str, Any]] = []
    for name in sorted(names, key=lambda name: name == "gpu"):  # last, to make up the number
        missing = options.requests - sum(record["requests"] for record in records)
        tally = PARTS[name].run(
            seconds=options.seconds * PARTS[name].share / shares,
            first_seed=options.first_seed,
            min_requests=missing if name == "gpu" else 0,
        )
        records.append({"part": name, "first_seed": options.first_seed, **asdict(tally)})
        sys.stdout.write(json.dumps(records[-1]) + "\n")
        sys.stdout.flush()
    record = _record(records)
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if record["mismatches"] else 0


def _record(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "vllm": vllm_core().version,
        "lmcache": importlib.metadata.version("lmcache"),
        "requests": sum(part["requests"] for part in parts),
        "mismatches": sum(len(part["mismatched_seeds"]) for part in parts),
        "parts": parts,
    }


if __name__ == "__main__":
    sys.exit(main())
