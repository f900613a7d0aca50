"""Fixtures for tests against the scripted loopback server, in this process or in its own."""

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from servers.fake.server import FakeServer

StartFake = Callable[..., FakeServer]


@pytest.fixture
def fake_server() -> Iterator[StartFake]:
    """Start ``FakeServer(spec, script=[...], ...)`` in this process; stopped after the test."""
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> FakeServer:
            return stack.enter_context(FakeServer(*args, **kwargs))

        yield start


@dataclass
class FakeProcess:
    """A fake in a process of its own; ``url`` is "" when it ended before it listened."""

    process: subprocess.Popen[str]
    url: str
    lmcache_url: str
    said: list[str]  # lines on stderr up to the one that names the ports
    ledger_file: Path

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ledger_file.read_text().splitlines()]


StartProcess = Callable[..., FakeProcess]


@pytest.fixture
def fake_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Start ``python -m servers.fake ARGS`` with a script; ends it after the test."""
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def start(*args: str, script: Any = ()) -> FakeProcess:
            n = next(numbers)
            rules, ledger = tmp_path / f"script-{n}.json", tmp_path / f"ledger-{n}.jsonl"
            rules.write_text(json.dumps(list(script)))
            files = ("--script", str(rules), "--ledger", str(ledger))
            process = subprocess.Popen(
                [sys.executable, "-m", "servers.fake", "--port", "0", *args, *files],
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            return _await_ports(process, ledger)

        yield start


def _await_ports(process: subprocess.Popen[str], ledger: Path) -> FakeProcess:
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:  # ends with the process; pytest-timeout is the deadline
        said.append(line)
        if line.startswith("INFO: fake server on "):
            url, _, lmcache_url = line.removeprefix("INFO: fake server on ").partition(", LMCache ")
            return FakeProcess(process, url, lmcache_url.strip(), said, ledger)
    return FakeProcess(process, "", "", said, ledger)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    assert process.stderr is not None
    process.stderr.close()
