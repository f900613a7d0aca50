"""Measures what starting the command line costs, beside what its libraries cost alone.

    python scripts/bench_startup.py [--rounds 15] [--out results/bench_startup.json]

CPU seconds (user and system) of fresh processes. Every round runs each of them once, one after the
other, and a ratio is within a round: a machine that is slow for a while is slow for both. Exit code
1 when ``kvcliff --version`` takes more than its bar.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from harness.files import write_json
from harness.machine.facts import machine_facts

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = "import typer, pydantic"
KVCLIFF = "from harness.cli import main; main()"
COMMANDS = {"--version": ["--version"], "--help": ["--help"], "plan": ["plan", "demo"]}
VERSION_BAR_S = 0.25
_FACTS = ("cpu", "cores", "python", "load_average_at_start", "kvcliff", "git_revision", "git_dirty")


def cpu_s(code: str, *words: str) -> float:
    """CPU seconds of a fresh Python that runs ``code`` on the tree this script is in."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """CPU seconds of the libraries and of each command, by round; one more round goes first."""
    libraries: list[float] = []
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        libraries.append(cpu_s(LIBRARIES))
        for name, words in COMMANDS.items():
            commands[name].append(cpu_s(KVCLIFF, *words))
    return libraries[1:], {name: times[1:] for name, times in commands.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median and ends."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def result(rounds: int) -> dict[str, Any]:
    """What the file holds."""
    libraries, commands = measure(rounds)
    facts = machine_facts()
    return {
        "schema": 1,
        "machine": {name: facts[name] for name in _FACTS},
        "rounds": rounds,
        "libraries": {"code": LIBRARIES, "cpu_s": spread(libraries)},
        "commands": {
            name: {
                "cpu_s": spread(times),
                "ratio": spread([a / b for a, b in zip(times, libraries, strict=True)]),
            }
            for name, times in commands.items()
        },
        "version_bar_s": VERSION_BAR_S,
    }


def main() -> int:
    """Measure, print, write; 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=15, choices=range(10, 101), metavar="N")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    content = result(given.rounds)
    if given.out:
        write_json(given.out, content)
    print(json.dumps(content, indent=1))
    return int(content["commands"]["--version"]["cpu_s"]["median"] > VERSION_BAR_S)


if __name__ == "__main__":
    sys.exit(main())
