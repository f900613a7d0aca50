"""Start the servers of one arm, prove that they serve, watch them, and leave nothing behind.

Linux only: children are told to end with this process through PR_SET_PDEATHSIG. The kernel sends
that signal when the *thread* that started them ends, so launches happen on the main thread.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from servers import processes
from servers.arms import Arm
from servers.child import Child, ServerLog, hint_for, record_tree, trouble
from servers.command import Command, render
from servers.errors import LaunchError, ServerDied
from servers.gpu import memory as gpu_memory
from servers.gpu.devices import devices_of
from servers.memory import check_host_memory, choose_transfer
from servers.ports import HOST, Ports, accepts, check_ports_free, free_ports, used
from servers.processes import Ledger
from servers.ready import await_ready

# A server may need this long to free what it holds; a second SIGTERM in that time orphans vLLM's
# engine core (vllm PR #50529), so there is one.
STOP_GRACE_S: Final = 30.0
# A server that never came up has nothing to save, and vLLM 0.32 does not obey SIGTERM while its
# engine core starts.
_EARLY_GRACE_S: Final = 5.0
# The group outlives its leader by a moment: Python's resource tracker unlinks shared memory last.
_GROUP_GRACE_S: Final = 5.0
# In every server's environment, with a value of this launch's own: what a server's descendants keep
# when they leave its session and its process group.
_MARK: Final = "KVCLIFF_LAUNCH"
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


@dataclass(frozen=True, slots=True)
class Running:
    """Servers that are up. ``start_s``: seconds from the first process to the first completion.

    ``model_name`` is unique to this launch. ``logs``: by role. ``unread_gpus``: filled once the
    servers have ended, with the devices whose memory could not be read then.
    """

    base_url: str
    lmcache_url: str | None
    model_name: str
    commands: tuple[Command, ...]
    logs: Mapping[str, ServerLog]
    start_s: float
    unread_gpus: list[str] = field(default_factory=list)
    _children: tuple[Child, ...] = field(repr=False, default=())

    def check_alive(self) -> None:
        """Raise ServerDied, with exit code and last log lines, when a server is gone or broken.

        An exit code proves nothing: vLLM exits with 0 when its engine core was killed.
        """
        for child in self._children:
            if reason := trouble(child):
                raise ServerDied(reason, hint=hint_for(child))


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
    events_port: int | None = None,
) -> Iterator[Running]:
    """Run the servers of ``arm`` for the length of the block; call it on the main thread.

    Logs are appended to ``{log_stem}-vllm.log`` and ``{log_stem}-lmcache.log``; every process is
    written to ``ledger`` while it lives. ``deadline_s`` bounds the start; stopping takes at most
    about 30 s a server. ``ports`` are chosen unless given. ``events_port``: where the caller listens
    for vLLM's KV events, if it does.

    Raises LaunchError when the host tier does not fit the machine's free memory, when
    CUDA_VISIBLE_DEVICES shows no GPU to run on, when a port is taken, when a server dies or is not
    ready in time, and when a process, a port or GPU memory outlives the stop.
    """
    check_host_memory(arm)
    transfer = choose_transfer(arm)
    devices = devices_of(arm, os.environ)
    processes.sweep(ledger)
    tier = arm.tier
    ports = ports or free_ports(
        with_connector=tier is not None and tier.has_server,
        with_http=tier is not None and tier.has_lmcache,
    )
    ports = replace(ports, events=events_port)
    model_name = f"kvcliff-{session}-{secrets.token_hex(4)}"
    # For sockets and temporary files; its name is short, see ``render``.
    with TemporaryDirectory(prefix="kvc-", ignore_cleanup_errors=True) as folder:
        work_dir = Path(folder)
        commands = render(
            arm, ports=ports, model_name=model_name, work_dir=work_dir,
            cache_dir=cache_dir.resolve(), inherited=os.environ, transfer=transfer,
        )  # fmt: skip
        # On a GPU the memory must be back before the caller may start the next server.
        with gpu_memory.freed_afterwards(devices) as unread, serve(
            commands, ports=ports, model_name=model_name, log_stem=log_stem,
            ledger=Ledger(ledger, session=session, work=work_dir.name),
            work_dir=work_dir, deadline_s=deadline_s,
        ) as running:  # fmt: skip
            yield replace(running, unread_gpus=unread)


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
    check_ports_free(ports)
    children: list[Child] = []
    mark = secrets.token_hex(8)
    grace_s = _EARLY_GRACE_S
    with _ended_by_signals():
        try:
            began = time.monotonic()
            for command in commands:
                with _signals_deferred():
                    children.append(_start(command, log_stem, ledger, work_dir, mark=mark))
            start_s = await_ready(
                children, ports, model_name, ledger, began=began, deadline_s=deadline_s
            )
            grace_s = STOP_GRACE_S
            yield _running(children, ports, model_name, start_s)
        except BaseException as error:
            # What went wrong first is what the user must read; the stop only adds to it.
            if remains := _stop(children, ports, ledger, mark=mark, grace_s=grace_s):
                error.add_note(remains)
            raise
        if remains := _stop(children, ports, ledger, mark=mark, grace_s=grace_s):
            hint = "kvcliff doctor names them; what survives SIGKILL hangs in the kernel"
            raise LaunchError(remains, hint=hint)


def _running(children: Sequence[Child], ports: Ports, model_name: str, start_s: float) -> Running:
    return Running(
        base_url=f"http://{HOST}:{ports.vllm}",
        lmcache_url=f"http://{HOST}:{ports.lmcache_http}" if ports.lmcache_http else None,
        model_name=model_name,
        commands=tuple(child.command for child in children),
        logs={child.command.role: child.log for child in children},
        start_s=start_s,
        _children=tuple(children),
    )


def _check_commands(commands: Sequence[Command]) -> None:
    for command in commands:
        seed = command.env.get("PYTHONHASHSEED", "")
        if not seed.isdigit():
            raise LaunchError(
                f"the {command.role} command has PYTHONHASHSEED={seed!r}",
                hint="set a fixed number: with random seeds the processes' cache keys differ, "
                "and nothing is ever reused, without an error",
            )


def _start(command: Command, log_stem: Path, ledger: Ledger, work_dir: Path, *, mark: str) -> Child:
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
                env={**command.env, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=work_dir,
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
    return Child(command, process, identity, log)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, where nobody handles them, raise SystemExit, so that servers stop."""
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
                stack.callback(signal.signal, number, signal.SIG_DFL)
        yield


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


@_signals_deferred()
def _stop(
    children: Sequence[Child], ports: Ports, ledger: Ledger, *, mark: str, grace_s: float
) -> str | None:
    """End vLLM, then LMCache, then whatever they left; says what survives, None if nothing does.

    vLLM goes first: it tells LMCache goodbye. Processes that carry this launch's ``mark`` are the
    servers' too, wherever they moved to. Bounded by ``grace_s`` and some seconds for each.
    """
    record_tree(children, ledger)
    for child in children:
        _stop_one(child, ledger, grace_s=grace_s)
    for stray in processes.carrying(_MARK, mark):
        ledger.started(stray, "stray")
    survivors = processes.kill(ledger.known)
    processes.unlink_segments(identity.pid for identity in ledger.known)
    for identity in ledger.known:
        if identity not in survivors:
            ledger.ended(identity)
    held = [port for port in used(ports) if children and accepts(port)]
    if not survivors and not held:
        return None
    return (
        f"after the stop {len(survivors)} processes of ours still run "
        f"(pids {[s.pid for s in survivors]}) and ports {held} still answer"
    )


def _stop_one(child: Child, ledger: Ledger, *, grace_s: float) -> None:
    if child.process.poll() is None:
        child.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=grace_s)
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
