"""One kvcliff run on the box, bounded in time, and what it measured: read from its files alone."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# kvcliff needs this long to stop its servers in order (servers/launch.py STOP_GRACE_S is 30).
STOP_S: Final = 35.0
# -P: from the kit, never from a checkout that happens to be the current folder.
_KVCLIFF: Final = (sys.executable, "-P", "-c", "from harness.cli import main; main()")
# kvcliff's exit codes for a run made to its end; 1 is also Python's for an unforeseen error.
_MADE: Final = (0, 1)
# Lines of a failed start that say why; the rest of a Python traceback is in the log.
_TELLING: Final = re.compile(r"\w+Error\b.*:|\berror: |^kvcliff: |^  → ")


def bounded(words: list[str], *, env: Mapping[str, str], log: Path, seconds: float) -> int | None:
    """The exit code of ``words``, output appended to ``log``; None: stopped after ``seconds``.

    SIGTERM first, which kvcliff takes as the wish to stop its servers and keep what it has; after
    ``STOP_S`` more the process and its group are killed.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            words,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(
    plan: Path, results: Path, *, env: Mapping[str, str], log: Path, seconds: float
) -> dict[str, Any]:
    """Run ``plan``, or go on with the run that is in ``results`` already.

    Returns the exit code (None: stopped at its time), rows by arm and, when it did not end well,
    the lines that say why.
    """
    run = newest_run(results)
    begun = ["--resume", str(run)] if run else [str(plan), "--results", str(results)]
    code = bounded([*_KVCLIFF, "run", *begun], env=env, log=log, seconds=seconds)
    found = {"exit_code": code, "rows": rows(results)}
    return found if is_whole(found) else {**found, "why": why(results, log)}


def is_whole(found: Mapping[str, Any]) -> bool:
    """Whether ``measure`` came to the run's end, with rows."""
    return found["exit_code"] in _MADE and bool(found["rows"])


def summarize(results: Path, *, env: Mapping[str, str], log: Path, seconds: float) -> None:
    """The tables of a run that was stopped: kvcliff makes them from its journals."""
    run = newest_run(results)
    if run is not None and not (run / "summary.json").exists():
        bounded([*_KVCLIFF, "summarize", str(run)], env=env, log=log, seconds=seconds)


def newest_run(results: Path) -> Path | None:
    """The run folder below ``results``; they are named by their time."""
    folders = sorted(path.parent for path in results.glob("*/manifest.json"))
    return folders[-1] if folders else None


def rows(results: Path) -> dict[str, int]:
    """Journalled requests by arm, warm-up included; an arm none of whose was served is missing."""
    counts: dict[str, int] = {}
    run = newest_run(results)
    for journal in sorted(run.glob("journal-*.jsonl")) if run else []:
        arm = journal.stem.split("-", 2)[2]
        n = sum(1 for line in journal.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n")
        if n:
            counts[arm] = counts.get(arm, 0) + n
    return counts


def why(results: Path, log: Path) -> list[str]:
    """The last telling lines of the servers' logs and of kvcliff's own output."""
    run = newest_run(results)
    logs = [log, *(sorted(run.glob("server-*.log")) if run else [])]
    lines = []
    for path in logs:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        telling = [line for line in text.splitlines() if _TELLING.search(line)]
        lines += [f"{path.name}: {line.strip()[:300]}" for line in telling[-3:]]
    return lines
