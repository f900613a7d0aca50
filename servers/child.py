"""One server process of ours: its log, what is wrong with it, and what runs below it."""

import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from servers import processes
from servers.command import Command
from servers.processes import Identity, Ledger

_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 64 * 1024

# Lines after which waiting is pointless, although the process may linger.
_FATAL: Final = re.compile(
    rb"Engine core initialization failed|EngineCore failed to start|\[Errno 98\]"
    rb"|ZMQError: Address already in use|EngineDeadError|entering degraded mode"
    rb"|No supported cpu connector found"
)
# What vLLM 0.32 and LMCache 0.5.6 say for known faults, and what helps. First match counts.
_HINTS: Final[tuple[tuple[str, str], ...]] = (
    (
        r"\[Errno 98\]|Address already in use",
        "another program took the port between our check and the server's start: start again",
    ),
    (
        r"estimated maximum model length|No available memory for the cache blocks"
        r"|larger than the available KV cache memory",
        "the KV cache is too small for one longest request: raise num_gpu_blocks or lower "
        "max_model_len",
    ),
    (
        r"Cannot reach the LMCache MP server",
        "the LMCache server did not answer vLLM: read its log beside vLLM's",
    ),
    (
        r"No common block size",
        "this build's attention does not take that block_size: use a multiple of 32 on a CPU",
    ),
    (
        r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|bad_alloc|Bus error",
        "the machine ran out of memory: lower host gib or num_gpu_blocks, or end other programs",
    ),
    (
        r"unrecognized arguments|invalid choice",
        "this engine version does not know an option: take it out of [arms], or install the pinned "
        "versions (make setup)",
    ),
    (r"No module named", "the engines are not installed in this environment: run make setup"),
    (
        r"entering degraded mode|EngineDeadError",
        "a server lost its peer: read both logs; what was measured after that does not count",
    ),
)


class ServerLog:
    """What one server wrote in this launch: ``path``, which is appended to, from ``start`` on."""

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        self._start = self._read_to = start

    def text(self) -> str:
        """Everything so far."""
        return self._bytes_from(self._start).decode(errors="replace")

    def tail(self) -> str:
        """The last 64 KiB at most."""
        size = self.path.stat().st_size
        return self._bytes_from(max(size - _TAIL_BYTES, self._start)).decode(errors="replace")

    def last_lines(self) -> str:
        """The last lines, worded to follow a sentence about the server."""
        lines = self.tail().splitlines()[-_TAIL_LINES:]
        if not lines:
            return "; its log is empty"
        return f"; last {len(lines)} lines of {self.path.name}:\n" + "\n".join(lines)

    def new_fatal_words(self) -> str | None:
        """Words of no return in whole lines written since the last call."""
        text = self._bytes_from(self._read_to)
        whole = text.rfind(b"\n") + 1
        self._read_to += whole
        match = _FATAL.search(text[:whole])
        return match[0].decode() if match else None

    def _bytes_from(self, offset: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read()


@dataclass(frozen=True, slots=True)
class Child:
    command: Command
    process: subprocess.Popen[bytes]
    identity: Identity
    log: ServerLog


def trouble(child: Child) -> str | None:
    """What is wrong with this server, with exit code and last log lines; None when nothing is."""
    fatal = child.log.new_fatal_words()
    code = child.process.poll()
    if fatal is not None and code is None:
        # It usually ends by itself right away; its exit code belongs into the message.
        with suppress(subprocess.TimeoutExpired):
            code = child.process.wait(timeout=1.0)
    role = child.command.role
    if code is not None:
        return f"the {role} server ended with exit code {code}{child.log.last_lines()}"
    if fatal is not None:
        return f"the {role} server reports {fatal!r}{child.log.last_lines()}"
    return None


def hint_for(child: Child) -> str:
    """What helps against what this server's log or exit code shows."""
    tail = child.log.tail()
    for pattern, hint in _HINTS:
        if re.search(pattern, tail):
            return hint
    if child.process.returncode == -signal.SIGKILL:
        return "it was killed from outside: often the kernel, short of memory (see dmesg)"
    return f"read {child.log.path}"


def tree(child: Child) -> list[Identity]:
    """Live processes of this child: below it, and in its group even if their parent is gone."""
    pid = child.identity.pid
    return list(dict.fromkeys([*processes.descendants(pid), *processes.group_members(pid)]))


def record_tree(children: Sequence[Child], ledger: Ledger) -> None:
    """Write every process of these servers to the ledger, each once."""
    for child in children:
        for identity in tree(child):
            ledger.started(identity, f"{child.command.role}-child")
