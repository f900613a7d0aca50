"""Which processes are ours, by identity and never by name; ending them; what they leave behind.

A process is identified by pid, kernel start time and boot id. A pid alone may have been given to
someone else since; a command line may be anybody's.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import psutil

# LMCache's CPU workers share their KV pool under this name and never unlink it when vLLM kills
# the engine core at SIGTERM (LMCache 0.5.6 platform/devices/cpu/shm.py, vLLM 0.32).
_SEGMENT: Final = re.compile(r"lmcache_kv_(\d+)_\d+")
_SHM: Final = Path("/dev/shm")
_WORK_DIR: Final = re.compile(r"kvc-[a-z0-9_]+")
_POLL_S: Final = 0.05
# After SIGKILL only a process stuck in the kernel remains; it will not get better by waiting.
_KILL_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one boot. ``create_time``: kernel clock ticks between boot and its start."""

    pid: int
    create_time: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """A process as a ledger names it; ``work``: name of its launch's temporary folder."""

    session: str
    role: str
    identity: Identity
    work: str

    @property
    def command(self) -> str:
        """Its command line as of now; empty once it has ended."""
        with suppress(psutil.Error):
            return " ".join(psutil.Process(self.identity.pid).cmdline())
        return ""


def identify(pid: int) -> Identity | None:
    """The identity of the live process ``pid``; None when there is none or it is a zombie.

    A zombie has ended: it holds no memory and no port, and only its parent can remove it. But one
    with threads left is a main thread that ended first: the process keeps its memory and ports,
    and wait() does not return it yet.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the name in brackets, may itself hold spaces and brackets (proc(5)).
    fields = text.rpartition(")")[2].split()
    state, n_threads, ticks = fields[0], int(fields[17]), int(fields[19])
    if state == "X" or (state == "Z" and n_threads <= 1):
        return None
    return Identity(pid, ticks, boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def boot_id() -> str:
    """The kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def descendants(pid: int) -> list[Identity]:
    """Live processes below ``pid``, itself included, children before grandchildren."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [identity for process in tree if (identity := identify(process.pid)) is not None]


def group_members(group: int) -> list[Identity]:
    """Live processes of process group ``group``: also those whose parent is gone already."""
    members = []
    for pid in psutil.pids():
        try:
            is_member = os.getpgid(pid) == group
        except (ProcessLookupError, PermissionError):
            continue
        if is_member and (identity := identify(pid)) is not None:
            members.append(identity)
    return members


def carrying(name: str, value: str) -> list[Identity]:
    """Live processes started with the environment variable ``name`` set to ``value``.

    A process that forked twice and left its session has no parent and no group of ours any more;
    what it inherited it still has. Other users' environments cannot be read and are not ours.
    """
    entry = f"{name}={value}".encode()
    found = []
    for pid in psutil.pids():
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if entry in entries and (identity := identify(pid)) is not None:
            found.append(identity)
    return found


def wait_gone(identities: Iterable[Identity], *, timeout_s: float) -> list[Identity]:
    """Those still alive after at most ``timeout_s``."""
    until = time.monotonic() + timeout_s
    remaining = [identity for identity in identities if is_alive(identity)]
    while remaining and time.monotonic() < until:
        time.sleep(_POLL_S)
        remaining = [identity for identity in remaining if is_alive(identity)]
    return remaining


def send(identity: Identity, number: signal.Signals) -> None:
    """Signal exactly this process; nothing happens when it is gone, whoever has its pid now."""
    # A pid cannot change hands between this check and the kill unless the whole pid space wraps.
    if is_alive(identity):
        with suppress(ProcessLookupError):
            os.kill(identity.pid, number)


def kill(identities: Iterable[Identity]) -> list[Identity]:
    """SIGKILL these and wait for their end; returns those that still run after some seconds."""
    known = list(identities)
    for identity in known:
        send(identity, signal.SIGKILL)
    return wait_gone(known, timeout_s=_KILL_WAIT_S)


class Ledger:
    """RUN/processes.jsonl: every process of ours, written down while it lives.

    One JSON object a line: session, role, pid, create_time, boot_id, event (started | ended), at
    (UTC), work (name of the launch's folder in the temporary folder).
    """

    def __init__(self, path: Path, *, session: str, work: str) -> None:
        self._path = path
        self._session = session
        self._work = work
        self.known: dict[Identity, str] = {}
        """Every process this launch has recorded, with its role."""

    def started(self, identity: Identity, role: str) -> None:
        """Record a process once; again is not an error."""
        if identity not in self.known:
            self.known[identity] = role
            self._append(identity, role, "started")

    def ended(self, identity: Identity) -> None:
        """Record that a process is verified gone."""
        self._append(identity, self.known[identity], "ended")

    def _append(self, identity: Identity, role: str, event: Literal["started", "ended"]) -> None:
        line = {
            "session": self._session,
            "role": role,
            **asdict(identity),
            "event": event,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "work": self._work,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            # A crash may have cut the last line: its rest would swallow ours.
            file.seek(max(file.tell() - 1, 0))
            end = b"" if file.read() in (b"", b"\n") else b"\n"
            file.write(end + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def leftovers(ledger: Path) -> list[Recorded]:
    """Processes named by ``ledger`` that still run, in the order they were recorded.

    A missing ledger names none, and a line that a crash cut short is passed over: the process it
    would have named is found as a descendant of the ones before, or not at all.
    """
    return list(
        {line.identity: line for line in _lines(ledger) if is_alive(line.identity)}.values()
    )


def end_leftovers(found: Iterable[Recorded], *, grace_s: float = 30.0) -> list[Recorded]:
    """End exactly these processes: SIGTERM, ``grace_s`` to obey, SIGKILL; returns survivors.

    Everything below them counts as them. Shared memory they leave is removed.
    """
    asked = list(found)
    targets = {item.identity for item in asked if is_alive(item.identity)}
    for identity in tuple(targets):
        targets.update(descendants(identity.pid))
    for identity in targets:
        send(identity, signal.SIGTERM)
    kill(wait_gone(targets, timeout_s=grace_s))
    unlink_segments(identity.pid for identity in targets)
    return [item for item in asked if is_alive(item.identity)]


def sweep(ledger: Path) -> list[str]:
    """Remove shared memory and folders of ended processes in ``ledger``; names of what went.

    A harness killed with SIGKILL cannot do it, and its servers do not. Does nothing while one of
    the ledger's processes still runs.
    """
    lines = [line for line in _lines(ledger) if line.identity.boot_id == boot_id()]
    if leftovers(ledger):
        return []
    removed = unlink_segments(line.identity.pid for line in lines)
    for name in sorted({line.work for line in lines if _WORK_DIR.fullmatch(line.work)}):
        folder = Path(tempfile.gettempdir(), name)
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(name)
    return removed


def unlink_segments(pids: Iterable[int]) -> list[str]:
    """Unlink LMCache's shared-memory segments of these processes once ended; their names."""
    gone = {pid for pid in pids if identify(pid) is None}
    removed = []
    for path in _SHM.glob("lmcache_kv_*"):
        match = _SEGMENT.fullmatch(path.name)
        if match and int(match[1]) in gone:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _lines(ledger: Path) -> list[Recorded]:
    """Whole records of ``ledger``; fragments left by a crash are passed over."""
    if not ledger.exists():
        return []
    lines = []
    for text in ledger.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, LookupError, TypeError):
            record = json.loads(text)
            identity = Identity(record["pid"], record["create_time"], record["boot_id"])
            lines.append(Recorded(record["session"], record["role"], identity, record["work"]))
    return lines
