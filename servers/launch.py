"""Start the servers of one arm, prove that they serve, watch them, and leave nothing behind.

Linux only: children are told to end with this process through PR_SET_PDEATHSIG. The kernel sends
that signal when the *thread* that started them ends, so launches happen on the main thread.
"""

import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import httpx
import psutil

from servers import processes
from servers.arms import GIB, Arm
from servers.command import HOST, Command, Ports, Transfer, is_local, render
from servers.processes import Identity, Ledger, LeftOver, end_leftovers, leftovers
from sim.geometry import KvGeometry

__all__ = [
    "LaunchError",
    "LeftOver",
    "Running",
    "ServerDied",
    "ServerError",
    "ServerLog",
    "end_leftovers",
    "free_ports",
    "launch",
    "leftovers",
    "serve",
]

# A server may need this long to free what it holds; a second SIGTERM in that time orphans vLLM's
# engine core (vllm PR #50529), so there is one.
STOP_GRACE_S: Final = 30.0
# The group outlives its leader by a moment: Python's resource tracker unlinks shared memory last.
_GROUP_GRACE_S: Final = 5.0
_POLL_S: Final = 0.1
_SCAN_S: Final = 0.5
_HTTP_S: Final = 5.0
# First completions compile kernels on some builds.
_COMPLETION_S: Final = 60.0
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 64 * 1024
_SEGMENT_HEADROOM: Final = 1.1

# Becomes the server by exec, which keeps pid and parent-death signal. Not a preexec_fn: that would
# run Python between fork and exec, unsafe beside other threads. SIGTERM, not SIGKILL: vLLM's API
# server must take its engine core down with it. 1 is PR_SET_PDEATHSIG (prctl(2)); the parent may
# have ended before the request, and then nobody would end the server.
_END_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starter of this server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""

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
        "this engine version does not know an option: install the pinned versions (make setup)",
    ),
    (r"No module named", "the engines are not installed in this environment: run make setup"),
    (
        r"entering degraded mode|EngineDeadError",
        "a server lost its peer: read both logs; what was measured after that does not count",
    ),
)


class ServerError(Exception):
    """A server could not do its part; ``hint`` says what helps."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class LaunchError(ServerError):
    """The servers of an arm did not come up as asked, or could not be stopped."""


class ServerDied(ServerError):  # noqa: N818 - what happened, as LaunchError says what failed
    """A server ended, or declared itself broken, while it was needed."""


@dataclass(slots=True)
class ServerLog:
    """What one server wrote in this launch: ``path`` from byte ``start`` on.

    The file is appended to, so an earlier launch's lines may stand before ``start``.
    """

    path: Path
    start: int
    _read_to: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._read_to = self.start

    def text(self) -> str:
        """Everything so far."""
        return self._bytes_from(self.start).decode(errors="replace")

    def tail(self) -> str:
        """The last 64 KiB at most."""
        size = self.path.stat().st_size
        return self._bytes_from(max(size - _TAIL_BYTES, self.start)).decode(errors="replace")

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
class _Child:
    command: Command
    process: subprocess.Popen[bytes]
    identity: Identity
    log: ServerLog


@dataclass(frozen=True, slots=True)
class Running:
    """Servers that are up. ``start_s``: seconds from the first process to the first completion.

    ``model_name`` is unique to this launch. ``logs``: by role.
    """

    base_url: str
    lmcache_url: str | None
    model_name: str
    commands: tuple[Command, ...]
    logs: Mapping[str, ServerLog]
    start_s: float
    _children: tuple[_Child, ...] = field(repr=False, default=())

    def check_alive(self) -> None:
        """Raise ServerDied, with exit code and last log lines, when a server is gone or broken.

        An exit code proves nothing: vLLM exits with 0 when its engine core was killed.
        """
        for child in self._children:
            if trouble := _trouble(child):
                raise ServerDied(trouble, hint=_hint(child))


@contextmanager
def launch(
    arm: Arm,
    *,
    log_stem: Path,
    ledger: Path,
    cache_dir: Path,
    deadline_s: float,
    session: str,
    ports: Ports | None = None,
) -> Iterator[Running]:
    """Run the servers of ``arm`` for the length of the block.

    Logs are appended to ``{log_stem}-vllm.log`` and ``{log_stem}-lmcache.log``; every process is
    written to ``ledger`` while it lives. ``deadline_s`` bounds the start; stopping takes at most
    about 30 s a server. ``ports`` are chosen unless given. Must be called on the main thread.

    Raises LaunchError when the host tier does not fit the machine's free memory, when a port is
    taken, when a server dies or is not ready in time, and when a process or port outlives the stop.
    """
    _check_host_memory(arm)
    transfer = _transfer(arm)
    processes.sweep(ledger)
    work_dir = Path(tempfile.mkdtemp(prefix="kvc-"))
    try:
        ports = ports or free_ports(with_tier=arm.host is not None)
        model_name = f"kvcliff-{session}-{secrets.token_hex(4)}"
        commands = render(
            arm,
            ports=ports,
            model_name=model_name,
            work_dir=work_dir,
            cache_dir=cache_dir.resolve(),
            inherited=os.environ,
            transfer=transfer,
        )
        with serve(
            commands,
            ports=ports,
            model_name=model_name,
            log_stem=log_stem,
            ledger=Ledger(ledger, session=session, work=work_dir.name),
            work_dir=work_dir,
            deadline_s=deadline_s,
        ) as running:
            yield running
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


@contextmanager
def serve(
    commands: Sequence[Command],
    *,
    ports: Ports,
    model_name: str,
    log_stem: Path,
    ledger: Ledger,
    work_dir: Path,
    deadline_s: float,
) -> Iterator[Running]:
    """``launch`` for commands already rendered; ``work_dir`` becomes their working folder."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("servers must be started on the main thread: they end with the starter")
    _check_commands(commands)
    _check_ports_free(ports)
    began = time.monotonic()
    children: list[_Child] = []
    with _ended_by_signals():
        try:
            for command in commands:
                with _signals_deferred():
                    children.append(_start(command, log_stem, ledger, work_dir))
            running = Running(
                base_url=f"http://{HOST}:{ports.vllm}",
                lmcache_url=f"http://{HOST}:{ports.lmcache_http}" if ports.lmcache_http else None,
                model_name=model_name,
                commands=tuple(commands),
                logs={child.command.role: child.log for child in children},
                start_s=_await_ready(
                    children, ports, model_name, ledger, began=began, deadline_s=deadline_s
                ),
                _children=tuple(children),
            )
            yield running
        except BaseException as error:
            # What went wrong first is what the user must read; the stop only adds to it.
            with _signals_deferred():
                if remains := _stop(children, ports, ledger):
                    error.add_note(remains)
            raise
        with _signals_deferred():
            if remains := _stop(children, ports, ledger):
                raise LaunchError(
                    remains,
                    hint="kvcliff doctor names them; what survives SIGKILL hangs in the kernel",
                )


def free_ports(*, with_tier: bool) -> Ports:
    """Ports on 127.0.0.1 nobody uses now, outside the range the kernel gives to clients.

    Inside that range any outgoing connection could take the port before the server binds it, and
    a client polling a port nobody listens on can even connect to itself.
    """
    low, high = _client_port_range()
    candidates = [*range(max(10_000, low - 15_000), low)] or [*range(high + 1, 65_536)]
    random.SystemRandom().shuffle(candidates)
    wanted = 3 if with_tier else 1
    chosen: list[int] = []
    for port in candidates:
        if len(chosen) == wanted:
            break
        if _is_free(port):
            chosen.append(port)
    if len(chosen) < wanted:
        raise LaunchError(
            f"no {wanted} free TCP ports among {len(candidates)} tried on {HOST}",
            hint="end programs that hold ports, or widen what lies outside ip_local_port_range",
        )
    return Ports(*chosen)


# --- before the start ---


def _check_host_memory(arm: Arm) -> None:
    if arm.host is None:
        return
    free = _free_memory_bytes()
    if arm.host.gib * GIB > free:
        raise LaunchError(
            f"arm {arm.name} asks for a host tier of {arm.host.gib:g} GiB, but "
            f"{free / GIB:.1f} GiB of memory are free",
            hint="lower host gib, or end other programs; LMCache would come up and drop stores",
        )


def _free_memory_bytes() -> int:
    """Memory a new process can get: the machine's, or the control group's where that is less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def _transfer(arm: Arm) -> Transfer:
    """How KV moves in this arm: by LMCache, unless /dev/shm is too small for the KV pool.

    Decided by the size of /dev/shm, not by what is free in it, so that all sessions of a run on
    one machine decide alike (containers often have 64 MiB; writing past it is a bus error).
    """
    server = arm.server
    if arm.host is None or server.build != "cpu" or not is_local(server.model):
        return "lmcache_driven"
    geometry = KvGeometry.from_config(Path(server.model), kv_dtype=server.dtype)
    pool = server.num_gpu_blocks * server.block_size * geometry.bytes_per_token
    needed = int(pool * _SEGMENT_HEADROOM)
    shm = shutil.disk_usage("/dev/shm")
    if shm.total < needed:
        return "engine_driven"
    if shm.free < needed:
        raise LaunchError(
            f"the KV pool needs {needed / 2**20:.0f} MiB of /dev/shm, {shm.free / 2**20:.0f} MiB "
            "are free",
            hint="remove left-over segments (kvcliff doctor names them) or lower num_gpu_blocks",
        )
    return "lmcache_driven"


def _check_commands(commands: Sequence[Command]) -> None:
    for command in commands:
        seed = command.env.get("PYTHONHASHSEED", "")
        if not seed.isdigit():
            raise LaunchError(
                f"the {command.role} command has PYTHONHASHSEED={seed!r}",
                hint="set a fixed number: with random seeds the processes' cache keys differ, "
                "and nothing is ever reused, without an error",
            )


def _check_ports_free(ports: Ports) -> None:
    for port in _used(ports):
        if not _is_free(port):
            raise LaunchError(
                f"TCP port {port} on {HOST} is taken before our server starts",
                hint="end the program that listens there, or let kvcliff choose ports",
            )


def _used(ports: Ports) -> list[int]:
    return [port for port in (ports.vllm, ports.lmcache, ports.lmcache_http) if port]


def _is_free(port: int) -> bool:
    # Without SO_REUSEADDR a bind also fails while old connections linger in TIME_WAIT: servers
    # without that option would fail too.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _client_port_range() -> tuple[int, int]:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    low, high = text.split()
    return int(low), int(high)


# --- start ---


def _start(command: Command, log_stem: Path, ledger: Ledger, work_dir: Path) -> _Child:
    path = log_stem.with_name(f"{log_stem.name}-{command.role}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as output:
        log = ServerLog(path, start=output.tell())
        try:
            # A file, never a pipe: an unread pipe freezes the server after 64 KiB of log. A
            # session of its own, so that a Ctrl-C reaches us alone and we stop it in order.
            # The folder is empty: with -m, Python would import from the current one first.
            process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _END_WITH_PARENT, str(os.getpid()), *command.argv],
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=work_dir,
                close_fds=True,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"the {command.role} server cannot be started: {error}",
                hint="run make setup; the program is the first word of the command",
            ) from error
    identity = processes.identify(process.pid)
    if identity is None:
        process.wait()
        raise LaunchError(
            f"the {command.role} server ended at once with exit code {process.returncode}"
            f"{log.last_lines()}",
            hint=f"read {path}",
        )
    ledger.started(identity, command.role)
    return _Child(command, process, identity, log)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process by an exception, so that servers are stopped.

    A handler somebody else installed stays.
    """
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit_on_signal)
                stack.callback(signal.signal, number, signal.SIG_DFL)
        yield


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the end of the block, which must be bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    held: list[int] = []
    previous = {n: signal.signal(n, lambda number, frame: held.append(number)) for n in numbers}
    try:
        yield
    finally:
        for restored, handler in previous.items():
            signal.signal(restored, handler)
        for number in held:
            signal.raise_signal(number)


# --- ready ---


def _await_ready(
    children: Sequence[_Child],
    ports: Ports,
    model_name: str,
    ledger: Ledger,
    *,
    began: float,
    deadline_s: float,
) -> float:
    """Seconds from ``began`` until a completion was answered; LaunchError in all other cases."""
    scanned = began
    with httpx.Client(trust_env=False, timeout=_HTTP_S) as client:
        while True:
            for child in children:
                if trouble := _trouble(child):
                    raise LaunchError(trouble, hint=_hint(child))
            missing = _missing(client, children, ports, model_name)
            elapsed = time.monotonic() - began
            if missing is None:
                _record_tree(children, ledger)
                return elapsed
            if elapsed > deadline_s:
                raise LaunchError(
                    f"servers not ready after {elapsed:.0f} s (deadline {deadline_s:g} s): "
                    f"{missing}{children[0].log.last_lines()}",
                    hint="raise the plan's start deadline if the log shows progress",
                )
            if time.monotonic() - scanned > _SCAN_S:
                _record_tree(children, ledger)
                scanned = time.monotonic()
            time.sleep(_POLL_S)


def _missing(
    client: httpx.Client, children: Sequence[_Child], ports: Ports, model_name: str
) -> str | None:
    """What readiness still lacks, None when nothing does; LaunchError for a foreign server."""
    base = f"http://{HOST}:{ports.vllm}"
    try:
        if client.get(f"{base}/health").status_code != httpx.codes.OK:
            return "vLLM's /health is not 200"
        _check_ours(client, children[0], ports, model_name)
        if ports.lmcache_http is not None:
            health = client.get(f"http://{HOST}:{ports.lmcache_http}/healthcheck")
            if health.status_code != httpx.codes.OK:
                return "LMCache's /healthcheck is not 200"
        return _completion_fails(client, base, model_name)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def _check_ours(client: httpx.Client, vllm: _Child, ports: Ports, model_name: str) -> None:
    """A healthy answer proves nothing: it may come from an old server that holds the port."""
    response = client.get(f"http://{HOST}:{ports.vllm}/v1/models")
    names = _model_names(response)
    listens = any(_listens(identity.pid, ports.vllm) for identity in _tree(vllm))
    if names != [model_name] or not listens:
        raise LaunchError(
            f"another server answers on port {ports.vllm}: it serves {names}, ours would serve "
            f"{model_name!r}; a process of ours listens there: {listens}",
            hint="end the other server, or start again to get another port",
        )


def _model_names(response: httpx.Response) -> list[str]:
    if response.status_code != httpx.codes.OK:
        return []
    try:
        return [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def _listens(pid: int, port: int) -> bool:
    with suppress(psutil.Error):
        connections = psutil.Process(pid).net_connections("tcp4")
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return False


def _completion_fails(client: httpx.Client, base: str, model_name: str) -> str | None:
    # /health is 200 before a model can serve. One prompt token and two output tokens fill no KV
    # block and no chunk, so neither tier keeps anything; one output token could leave a session
    # open in LMCache 0.5.6 (END_SESSION may overtake STORE).
    body = {
        "model": model_name,
        "prompt": [1],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = client.post(f"{base}/v1/completions", json=body, timeout=_COMPLETION_S)
    if response.status_code != httpx.codes.OK:
        return f"a completion got HTTP {response.status_code}: {response.text[:200]}"
    try:
        answer = response.json()
        generated = answer["usage"]["completion_tokens"]
        finish = answer["choices"][0]["finish_reason"]
    except (ValueError, LookupError, TypeError):
        return f"a completion's answer has no usage or choice: {response.text[:200]}"
    return None if generated == 2 and finish else f"a completion gave {generated} of 2 tokens"


def _tree(child: _Child) -> list[Identity]:
    """Live processes of this child: below it, and in its group even if their parent is gone."""
    found = dict.fromkeys(processes.descendants(child.identity.pid))
    found |= dict.fromkeys(processes.group_members(child.identity.pid))
    return list(found)


def _record_tree(children: Sequence[_Child], ledger: Ledger) -> None:
    for child in children:
        for identity in _tree(child):
            ledger.started(identity, f"{child.command.role}-child")


# --- trouble ---


def _trouble(child: _Child) -> str | None:
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


def _hint(child: _Child) -> str:
    tail = child.log.tail()
    for pattern, hint in _HINTS:
        if re.search(pattern, tail):
            return hint
    if child.process.returncode == -signal.SIGKILL:
        return "it was killed from outside: often the kernel, short of memory (see dmesg)"
    return f"read {child.log.path}"


# --- stop ---


def _stop(children: Sequence[_Child], ports: Ports, ledger: Ledger) -> str | None:
    """End vLLM, then LMCache, then whatever they left; says what survives, None if nothing does.

    vLLM goes first: it tells LMCache goodbye.
    """
    _record_tree(children, ledger)
    for child in children:
        _stop_one(child, ledger)
    survivors = processes.kill(ledger.known)
    processes.unlink_segments(identity.pid for identity in ledger.known)
    for identity in ledger.known:
        if identity not in survivors:
            ledger.ended(identity)
    held = [port for port in _used(ports) if children and _accepts(port)]
    if not survivors and not held:
        return None
    return (
        f"after the stop {len(survivors)} processes of ours still run "
        f"(pids {[s.pid for s in survivors]}) and ports {held} still answer"
    )


def _stop_one(child: _Child, ledger: Ledger) -> None:
    if child.process.poll() is None:
        child.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=STOP_GRACE_S)
    # Its group may have grown since the tree was recorded.
    rest = processes.group_members(child.identity.pid)
    for identity in rest:
        ledger.started(identity, f"{child.command.role}-child")
    if child.process.poll() is not None:
        rest = processes.wait_gone(rest, timeout_s=_GROUP_GRACE_S)
    processes.kill(rest)
    # Reap it: until then it stays a zombie and keeps its pid.
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=_GROUP_GRACE_S)


def _accepts(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0
