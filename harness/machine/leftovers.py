"""Servers that a killed run left behind: name them, and end exactly those when told to."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import console
from harness.errors import MachineError
from harness.machine.tables import show_leftovers
from harness.record.folder import LEDGER_FILE, RunFolder
from servers.processes import Recorded, end_leftovers, leftovers, sweep


def find_leftovers(results: Path) -> dict[Path, list[Recorded]]:
    """Living processes that runs under ``results`` started and never ended, by run folder."""
    runs = [ledger.parent for ledger in _ledgers(results)]
    found = {run: leftovers(run / LEDGER_FILE) for run in runs}
    return {run: processes for run, processes in found.items() if processes}


def end_or_refuse_leftovers(results: Path, *, end: bool) -> None:
    """End left-over servers when ``end`` or the user says so; MachineError when they stay.

    Shared memory and temporary folders of runs whose processes are all gone are removed.
    """
    found = find_leftovers(results)
    for run in found:
        if RunFolder(run).is_being_measured():
            raise MachineError(
                f"{run} is being measured by another process, and its servers would disturb this",
                hint="wait for it to end",
            )
    if found:
        n_processes = sum(len(processes) for processes in found.values())
        show_leftovers(found)
        if not end and sys.stdin.isatty():
            end = console.ask(f"end these {n_processes} processes?")
        if not end:
            raise MachineError(
                f"{n_processes} processes of an earlier run are still alive and would disturb this",
                hint="kvcliff run --end-leftovers ends exactly those",
            )
        _end(found)
    for ledger in _ledgers(results):
        sweep(ledger)


def _end(found: dict[Path, list[Recorded]]) -> None:
    survivors = end_leftovers(process for processes in found.values() for process in processes)
    if survivors:
        pids = ", ".join(str(left.identity.pid) for left in survivors)
        raise MachineError(
            f"left-over processes survived SIGKILL: pids {pids}",
            hint="a process stuck in the kernel needs a restart of the machine",
        )
    console.say("ended the left-over processes")


@contextmanager
def one_at_a_time(cache_dir: Path) -> Iterator[None]:
    """Hold this user's machine for one measurement; MachineError when another one is running."""
    with (cache_dir / "measuring.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                "another kvcliff run is measuring on this machine; each would disturb the other",
                hint="wait for it to end",
            ) from None
        yield


def _ledgers(results: Path) -> list[Path]:
    return sorted(results.glob(f"*/{LEDGER_FILE}"))
