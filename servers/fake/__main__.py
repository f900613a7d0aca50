"""The loopback server as a process: ``python -m servers.fake --port P --model-name NAME …``."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from servers.fake.script import Script, ScriptError, read_script
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec
from servers.ports import HOST
from servers.tiers.registry import SERVED
from sim.tiers.settings import TIER_KINDS

SCRIPT_VARIABLE = "KVCLIFF_FAKE_SCRIPT"
LEDGER_VARIABLE = "KVCLIFF_FAKE_LEDGER"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the script says die; returns the exit code."""
    started = time.monotonic()
    stop = _StopSign()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    args = _arguments(argv)
    try:
        script = read_script(args.script) if args.script else Script()
    except ScriptError as error:
        sys.stderr.write(f"ERROR: script {args.script}: {error}\n")
        return 2
    faults = script.always()
    _fill_stderr(int(faults.get("stderr_bytes", 0)))
    startup_s = float(faults.get("startup_s", 0))
    die_at = started + float(faults["die_after_s"]) if "die_after_s" in faults else None
    is_early = bool(faults.get("health_early"))
    if not is_early and _stopped(stop, min(started + startup_s, die_at or started + startup_s)):
        return _end(faults)
    if die_at is not None and time.monotonic() >= die_at:
        return _die(faults)
    try:
        server = _server(args, script)
    except OSError as error:
        sys.stderr.write(f"ERROR: [Errno {error.errno}] {error.strerror} ({HOST}:{args.port})\n")
        return 1
    with server:
        if is_early:
            server.not_ready_for(startup_s)
        sys.stderr.write(f"INFO: fake server on {server.base_url}, LMCache {server.lmcache_url}\n")
        sys.stderr.flush()
        if not _stopped(stop, die_at):
            return _die(faults)
    return _end(faults)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m servers.fake", allow_abbrev=False)
    default = FakeSpec()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lmcache-http-port", type=int)
    parser.add_argument("--events-port", type=int)
    parser.add_argument("--script", type=Path, default=os.environ.get(SCRIPT_VARIABLE))
    parser.add_argument("--ledger", type=Path, default=os.environ.get(LEDGER_VARIABLE))
    for field in fields(FakeSpec):
        value = getattr(default, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
            continue
        choices = TIER_KINDS if field.name == "host_kind" else None
        kind = int if value is None else type(value)
        parser.add_argument(option, type=kind, default=value, choices=choices)
    args = parser.parse_args(argv)
    if (args.lmcache_http_port is not None) != _spec(args).has_lmcache_port:
        kinds = " or ".join(kind for kind, tier in SERVED.items() if tier.has_lmcache)
        parser.error(f"--lmcache-http-port goes with --host-chunks of {kinds}, and nothing else")
    return args


def _spec(args: argparse.Namespace) -> FakeSpec:
    return FakeSpec(**{field.name: getattr(args, field.name) for field in fields(FakeSpec)})


def _server(args: argparse.Namespace, script: Script) -> FakeServer:
    return FakeServer(
        _spec(args),
        script=script,
        port=args.port,
        lmcache_http_port=args.lmcache_http_port or 0,
        ledger=args.ledger,
        events_port=args.events_port,
    )


class _StopSign:
    """Set by a signal handler. A threading.Event may deadlock there: its wait holds the lock that
    its set takes, and both are then in the main thread.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def set(self) -> None:
        """Raise the sign for good."""
        os.write(self._write_end, b"x")

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the sign is up within ``timeout_s`` (None: wait for ever)."""
        return bool(select.select([self._read_end], [], [], timeout_s)[0])


def _stopped(stop: _StopSign, until: float | None) -> bool:
    """Whether a signal came before ``until`` (monotonic seconds; None: wait for ever)."""
    return stop.wait(None if until is None else max(0.0, until - time.monotonic()))


def _fill_stderr(n_bytes: int) -> None:
    line = "x" * 99 + "\n"
    for _ in range(-(-n_bytes // len(line))):
        sys.stderr.write(line)


def _die(faults: Mapping[str, Any]) -> int:
    sys.stderr.write("ERROR: EngineCore encountered a fatal error (scripted)\n")
    return int(faults.get("die_code", 1))


def _end(faults: Mapping[str, Any]) -> int:
    # Not interruptible on purpose: this is the server that needs its time after SIGTERM.
    time.sleep(float(faults.get("sigterm_s", 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
