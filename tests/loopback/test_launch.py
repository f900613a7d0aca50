"""Starting and stopping servers, against the scripted loopback server and small stub programs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from servers import processes
from servers.arms import Arm, ServerSpec
from servers.child import ServerLog
from servers.command import Command
from servers.errors import LaunchError, ServerDied
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec
from servers.launch import STOP_GRACE_S, Running, launch, serve
from servers.memory import transfer_for
from servers.ports import Ports, free_ports
from servers.probe import probe
from servers.processes import (
    Identity,
    Ledger,
    end_leftovers,
    identify,
    is_alive,
    leftovers,
    sweep,
    wait_gone,
)
from servers.tiers.base import HostTier
from sim.units import GIB
from tests.places import ROOT

SPEC = ServerSpec("fake", "tiny", 16, 64, 2048, 4096, "float32")
BASELINE = Arm("baseline", SPEC)
# 40 chunks of 256 tokens x 4096 bytes
TIER = Arm("lmcache", SPEC, HostTier(gib=40 / 1024))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``launch`` with a script for the fake and folders of the test's own."""

    def start(arm: Arm = BASELINE, *always: Mapping[str, Any], **options: Any) -> Any:
        script = tmp_path / "script.json"
        script.write_text(json.dumps([{"match": {"all": True}, "do": list(always)}]))
        monkeypatch.setenv("KVCLIFF_FAKE_SCRIPT", str(script))
        return launch(arm, **(common(tmp_path) | options))

    return start


def common(folder: Path) -> dict[str, Any]:
    return {
        "log_stem": folder / "server-01",
        "ledger": folder / "processes.jsonl",
        "cache_dir": folder / "cache",
        "deadline_s": 30.0,
        "session": "01-baseline",
    }


def recorded(folder: Path) -> list[Identity]:
    lines = (folder / "processes.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    found = {Identity(r["pid"], r["create_time"], r["boot_id"]) for r in records}
    assert found
    return list(found)


@contextlib.contextmanager
def stub(
    folder: Path, code: str, *, deadline_s: float = 10.0, seed: str = "0"
) -> Iterator[Running]:
    """``serve`` with a program of the test's own in vLLM's place; {port} is its port."""
    ports = free_ports()
    program = folder / "stub.py"
    program.write_text(textwrap.dedent(code).replace("{port}", str(ports.vllm)))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    env |= {"PYTHONHASHSEED": seed} if seed else {}
    with serve(
        [Command("vllm", (sys.executable, str(program)), env, {})],
        ports=ports,
        model_name="m",
        log_stem=folder / "server-01",
        ledger=Ledger(folder / "processes.jsonl", session="01", work="kvc-test"),
        work_dir=folder,
        deadline_s=deadline_s,
    ) as running:
        yield running


SERVING = """
    import os, signal, subprocess, sys, threading, time
    from servers.fake.server import FakeServer
    from servers.fake.spec import FakeSpec
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = FakeServer(FakeSpec(model_name="m"), port={port})
    server.__enter__()
"""


def test_a_launch_serves_under_its_own_name_and_leaves_nothing(run, tmp_path: Path):
    # A51
    with run(TIER) as running:
        models = httpx.get(f"{running.base_url}/v1/models", trust_env=False).json()
        assert [entry["id"] for entry in models["data"]] == [running.model_name]
        assert running.lmcache_url
        running.check_alive()
        assert all(is_alive(identity) for identity in recorded(tmp_path))
        port = httpx.URL(running.base_url).port
    assert not any(is_alive(identity) for identity in recorded(tmp_path))
    assert leftovers(tmp_path / "processes.jsonl") == []
    with socket.socket() as check:
        assert check.connect_ex(("127.0.0.1", port)) != 0


def test_two_launches_have_different_model_names(run):
    with run() as first:
        pass
    with run() as second:
        assert first.model_name != second.model_name


def test_the_own_environment_is_as_before(run, monkeypatch: pytest.MonkeyPatch):
    # A60
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "7")
    with run() as running:
        during = dict(os.environ)
        (command,) = running.commands
        assert command.env_diff["LMCACHE_CHUNK_SIZE"] is None
        assert "LMCACHE_CHUNK_SIZE" not in command.env
    assert dict(os.environ) == during
    assert os.environ["LMCACHE_CHUNK_SIZE"] == "7"


def test_an_exception_in_the_block_ends_the_servers(run, tmp_path: Path):
    # A51
    with pytest.raises(ZeroDivisionError), run():
        raise ZeroDivisionError
    assert not any(is_alive(identity) for identity in recorded(tmp_path))


HARNESS = """
import sys
from pathlib import Path
from servers.arms import Arm, ServerSpec
from servers.launch import launch
folder = Path(sys.argv[1])
arm = Arm("baseline", ServerSpec("fake", "tiny", 16, 64, 2048, 4096, "float32"))
with launch(arm, log_stem=folder / "server-01", ledger=folder / "processes.jsonl",
            cache_dir=folder, deadline_s=30, session="01"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def harness(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that holds a launch open."""
    with subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_killing_the_harness_ends_its_servers(tmp_path: Path):
    # A51: SIGKILL leaves no code of ours running; the kernel passes it on.
    with harness(tmp_path) as process:
        servers = recorded(tmp_path)
        assert all(is_alive(identity) for identity in servers)
        process.kill()
        process.wait(timeout=10)
        assert wait_gone(servers, timeout_s=5) == []
    # What only code could have removed goes at the next start.
    (work,) = {line["work"] for line in ledger_lines(tmp_path)}
    assert Path(tempfile.gettempdir(), work).is_dir()
    assert sweep(tmp_path / "processes.jsonl") == [work]
    assert not Path(tempfile.gettempdir(), work).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_harness_ends_its_servers_first(tmp_path: Path, number: signal.Signals):
    # A51: by default SIGTERM would end Python without any finally.
    with harness(tmp_path) as process:
        servers = recorded(tmp_path)
        process.send_signal(number)
        assert process.wait(timeout=20) != 0
        assert not any(is_alive(identity) for identity in servers)
    ended = [line for line in ledger_lines(tmp_path) if line["event"] == "ended"]
    assert {line["pid"] for line in ended} == {identity.pid for identity in servers}


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "processes.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


STUBBORN = [
    sys.executable,
    "-c",
    "import signal,time;signal.signal(15,1);print(1,flush=1);time.sleep(99)",
]


@contextlib.contextmanager
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores SIGTERM (handler 1 is SIG_IGN) and says when it does."""
    with subprocess.Popen(STUBBORN, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def write_ledger(path: Path, *identities: Identity | None) -> None:
    ledger = Ledger(path, session="02-lmcache", work="kvc-gone")
    for identity in identities:
        assert identity is not None
        ledger.started(identity, "vllm")


def test_leftovers_are_named_and_only_they_are_ended(tmp_path: Path):
    # A53: the decoy has the same command line.
    with stubborn() as ours, stubborn() as decoy:
        write_ledger(tmp_path / "p.jsonl", identify(ours.pid))
        (found,) = leftovers(tmp_path / "p.jsonl")
        assert (found.session, found.role, found.identity.pid) == ("02-lmcache", "vllm", ours.pid)
        assert "signal.signal(15,1)" in found.command
        assert end_leftovers([found], grace_s=0.3) == []
        assert leftovers(tmp_path / "p.jsonl") == []
        assert ours.wait(timeout=5) == -signal.SIGKILL
        assert decoy.poll() is None


def test_a_reused_pid_is_not_ours(tmp_path: Path):
    # A53
    with stubborn() as stranger:
        now = identify(stranger.pid)
        assert now is not None
        before = Identity(now.pid, now.create_time - 1, now.boot_id)
        other_boot = Identity(now.pid, now.create_time, "another boot")
        write_ledger(tmp_path / "p.jsonl", before, other_boot)
        assert leftovers(tmp_path / "p.jsonl") == []
        assert processes.kill([before, other_boot]) == []
        assert stranger.poll() is None


def test_a_zombie_is_not_alive():
    # A53
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert identify(process.pid) is None


def test_a_process_whose_name_holds_brackets_is_identified(tmp_path: Path):
    # comm comes in brackets and may hold some: "a) S 1" would shift every field after it.
    program = tmp_path / "a) S 1"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "99"]) as process:
        try:
            found = identify(process.pid)
            ticks = os.sysconf("SC_CLK_TCK")
            started = psutil.boot_time() + (found.create_time if found else 0) / ticks
            assert abs(started - time.time()) < 30
        finally:
            process.kill()


def test_a_torn_ledger_line_hides_no_other(tmp_path: Path):
    # A61
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"session": "01", "ro\xff')
    with stubborn() as ours:
        write_ledger(path, identify(ours.pid))
        assert [found.identity.pid for found in leftovers(path)] == [ours.pid]


def test_no_ledger_names_nothing(tmp_path: Path):
    assert leftovers(tmp_path / "none.jsonl") == []


def test_shared_memory_of_ended_processes_is_swept_and_of_living_ones_kept(tmp_path: Path):
    # A51: LMCache's CPU segment outlives SIGTERM, and a killed harness cannot remove it.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dead:
        write_ledger(tmp_path / "p.jsonl", identify(dead.pid))
    ours = Path(f"/dev/shm/lmcache_kv_{dead.pid}_0")
    living = Path(f"/dev/shm/lmcache_kv_{os.getpid()}_7")
    for path in (ours, living):
        path.touch()
    try:
        assert sweep(tmp_path / "p.jsonl") == [ours.name]
        assert not ours.exists()
        assert living.exists()
    finally:
        living.unlink()


def test_a_server_gets_the_time_it_needs_to_stop_and_one_signal(tmp_path: Path):
    # A52: 4 s here; the limit is what vLLM's engine core may need.
    assert STOP_GRACE_S >= 30
    code = """
    n = 0
    def again(*_):
        global n
        n += 1
        stop.set()
    signal.signal(signal.SIGTERM, again)
    stop.wait()
    time.sleep(4)
    open("stopped", "w").write(str(n))
    """
    with stub(tmp_path, SERVING + code):
        pass
    assert (tmp_path / "stopped").read_text() == "1"


def test_a_child_that_outlives_its_server_is_ended_too(tmp_path: Path):
    # A51: as vLLM's engine core does; its parent is gone, so only the record knows it.
    code = """
    child = subprocess.Popen([sys.executable, "-c", "import signal,time;signal.signal(15,1);time.sleep(99)"])
    open("child", "w").write(str(child.pid))
    stop.wait()
    os._exit(0)
    """
    with stub(tmp_path, SERVING + code):
        child = identify(int((tmp_path / "child").read_text()))
        assert child is not None
    assert not is_alive(child)
    assert child in recorded(tmp_path)


def test_a_grandchild_that_forked_twice_and_left_the_session_is_found_at_the_stop(tmp_path: Path):
    # A51: after readiness, so no scan of the running tree has seen it.
    code = """
    daemon = "import os,sys,time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n"
    daemon += "open('daemon','w').write(str(os.getpid()))\\ntime.sleep(99)"
    time.sleep(1.5)
    subprocess.run([sys.executable, "-c", daemon])
    stop.wait()
    os._exit(0)
    """
    with stub(tmp_path, SERVING + code):
        until = time.monotonic() + 20
        while not (tmp_path / "daemon").exists() or not (tmp_path / "daemon").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        daemon = identify(int((tmp_path / "daemon").read_text()))
        assert daemon is not None
    assert not is_alive(daemon)
    assert daemon in recorded(tmp_path)


def test_ten_mebibytes_of_log_before_ready_do_not_stop_a_server(run, tmp_path: Path):
    # A54
    with run(BASELINE, {"stderr_bytes": 10 * 2**20}):
        assert (tmp_path / "server-01-vllm.log").stat().st_size > 10 * 2**20


def test_an_earlier_log_is_kept_and_not_taken_for_this_launchs(run, tmp_path: Path):
    log = tmp_path / "server-01-vllm.log"
    log.write_text("Engine core initialization failed\n")
    with run() as running:
        running.check_alive()
        assert "Engine core" not in running.logs["vllm"].text()
    assert log.read_text().startswith("Engine core initialization failed\n")


def test_a_healthy_stranger_on_the_port_is_refused_before_the_start(run, tmp_path: Path):
    # A55
    with FakeServer(FakeSpec(model_name="old")) as stranger:
        port = httpx.URL(stranger.base_url).port
        assert port is not None
        began = time.monotonic()
        with pytest.raises(LaunchError, match=f"port {port}"), run(ports=Ports(vllm=port)):
            pass
        assert time.monotonic() - began < 2
    assert not (tmp_path / "server-01-vllm.log").exists()


def test_a_stranger_that_takes_the_port_later_is_not_taken_for_ours(tmp_path: Path):
    # A55: healthy, completes, even has our model's name; but no process of ours listens.
    port_of_stranger: list[FakeServer] = []

    def take_port() -> None:
        log = tmp_path / "server-01-vllm.log"
        until = time.monotonic() + 10
        while time.monotonic() < until and not (log.exists() and log.stat().st_size):
            time.sleep(0.02)
        stranger = FakeServer(FakeSpec(model_name="m"), port=int(log.read_text()))
        stranger.__enter__()
        port_of_stranger.append(stranger)

    thread = threading.Thread(target=take_port)
    thread.start()
    began = time.monotonic()
    code = "import time; print({port}, flush=True); time.sleep(99)"
    try:
        with pytest.raises(LaunchError, match="another server answers"), stub(tmp_path, code):
            pass
        assert time.monotonic() - began < 5
    finally:
        thread.join(timeout=15)
        for stranger in port_of_stranger:
            stranger.__exit__(None, None, None)


def test_chosen_ports_are_free_different_and_outside_the_clients_range():
    # A55: inside it, any outgoing connection may take the port before the server does.
    ports = free_ports(with_connector=True, with_http=True)
    chosen = {ports.vllm, ports.lmcache, ports.lmcache_http}
    assert len(chosen) == 3
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for port in chosen:
        assert port is not None
        assert not int(low) <= port <= int(high)
        with socket.socket() as check:
            check.bind(("127.0.0.1", port))


def test_a_server_that_dies_at_two_seconds_is_reported_by_five(run):
    # A56
    began = time.monotonic()
    dying = {"startup_s": 60, "die_after_s": 2, "die_code": 7}
    with pytest.raises(LaunchError, match="exit code 7"), run(BASELINE, dying):
        pass
    assert time.monotonic() - began < 5


def test_health_before_the_model_serves_is_not_ready(run):
    # A56
    with run(BASELINE, {"startup_s": 2, "health_early": True}) as running:
        assert running.start_s >= 2


def test_a_launcher_that_outlives_its_engine_is_not_waited_for(tmp_path: Path):
    # A56: the process lives on and says nothing more.
    code = """
    import time
    print("x" * 100)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    time.sleep(99)
    """
    began = time.monotonic()
    with pytest.raises(LaunchError, match="reports 'Engine core init"), stub(tmp_path, code):
        pass
    assert time.monotonic() - began < 5


def test_a_server_not_ready_in_time_is_stopped(run, tmp_path: Path):
    began = time.monotonic()
    late = run(BASELINE, {"startup_s": 60}, deadline_s=1.0)
    with pytest.raises(LaunchError, match=r"not ready .*deadline 1 s"), late:
        pass
    assert time.monotonic() - began < 5
    assert not any(is_alive(identity) for identity in recorded(tmp_path))


def test_a_server_that_ignores_sigterm_while_it_starts_is_killed_soon(tmp_path: Path):
    # A52: as vLLM does while its engine core starts; it has nothing to save yet.
    code = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(99)
    """
    began = time.monotonic()
    with pytest.raises(LaunchError, match="not ready"), stub(tmp_path, code, deadline_s=1.0):
        pass
    assert time.monotonic() - began < 10
    assert not any(is_alive(identity) for identity in recorded(tmp_path))


def test_readiness_leaves_nothing_in_a_cache(run):
    # One prompt token and two output tokens fill no block: the counters know the request, no tier.
    with run(TIER) as running:
        text = httpx.get(f"{running.lmcache_url}/status", trust_env=False).json()
        assert text["storage_manager"]["l1_managers"]["_default"]["total_object_count"] == 0
        metrics = httpx.get(f"{running.base_url}/metrics", trust_env=False).text
        (usage,) = [line for line in metrics.splitlines() if line.startswith("vllm:kv_cache_usage")]
        assert usage.endswith((" 0", " 0.0"))


@pytest.mark.parametrize("seed", ["", "random"])
def test_a_command_without_a_fixed_hash_seed_is_refused(tmp_path: Path, seed: str):
    # A39
    with pytest.raises(LaunchError, match="PYTHONHASHSEED"), stub(tmp_path, "", seed=seed):
        pass
    assert not (tmp_path / "processes.jsonl").exists()


def test_a_mistyped_option_is_a_failed_launch(tmp_path: Path, run):
    # A40
    code = """
    from servers.fake.__main__ import main
    main(["--port", "{port}", "--chunk-tokenz", "7"])
    """
    with pytest.raises(LaunchError, match="unrecognized arguments") as caught, stub(tmp_path, code):
        pass
    assert "pinned versions" in caught.value.hint


def fake_running(server: FakeServer, folder: Path) -> Running:
    log = folder / "vllm.log"
    log.touch()
    return Running(
        base_url=server.base_url,
        lmcache_url=server.lmcache_url,
        model_name=server.spec.model_name,
        commands=(),
        logs={"vllm": ServerLog(log, start=0)},
        start_s=1.0,
    )


def served(**sizes: Any) -> FakeServer:
    as_asked = {"block_size": 16, "num_gpu_blocks": 64, "host_chunks": 40}
    return FakeServer(FakeSpec(**(as_asked | sizes)))


def test_the_probe_passes_servers_that_are_as_asked(tmp_path: Path):
    with served() as server:
        facts = probe(fake_running(server, tmp_path), TIER)
    assert (facts.vllm_version, facts.num_gpu_blocks, facts.block_size) == ("0.32.0", 64, 16)
    assert (facts.host_bytes, facts.chunk_tokens) == (40 * 2**20, 256)
    assert (facts.policy, facts.watermark, facts.evict_ratio) == ("LRU", 0.8, 0.2)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_gpu_blocks": 63}, "num_gpu_blocks is 63, asked 64"),
        ({"block_size": 32}, "block_size is 32, asked 16"),
        ({"chunk_tokens": 128}, "chunk_tokens is 128, asked 256"),
        ({"watermark": 0.9}, "watermark is 0.9, asked 0.8"),
        ({"evict_ratio": 0.1}, "evict_ratio is 0.1, asked 0.2"),
        ({"policy": "noop"}, "policy is 'noop', asked 'LRU'"),
        ({"host_chunks": 39}, "host_bytes is 40894464, asked 41943040"),
    ],
)
def test_a_setting_the_server_did_not_take_is_refused(
    tmp_path: Path, sizes: dict[str, Any], named: str
):
    # A40, A43
    with served(**sizes) as server, pytest.raises(LaunchError, match=named):
        probe(fake_running(server, tmp_path), TIER)


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("", "connector is None"),
        ("Creating v1 connector with name: LMCacheMPConnector\n", "of unknown origin"),
        (
            "External LMCacheMPConnector is not available (x), falling back\n"
            "Creating v1 connector with name: LMCacheMPConnector\n",
            "LMCacheMPConnectorUpstream",
        ),
    ],
)
def test_a_connector_that_is_not_lmcaches_own_is_refused(tmp_path: Path, log: str, named: str):
    # A42
    arm = Arm("lmcache", ServerSpec("cpu", "owner/m", 16, 64, 2048, 4096, "float32"), TIER.host)
    with served() as server:
        running = fake_running(server, tmp_path)
        running.logs["vllm"].path.write_text(log)
        with pytest.raises(LaunchError, match=named):
            probe(running, arm)


def test_a_host_tier_beyond_free_memory_is_refused_before_the_start(run, tmp_path: Path):
    # A41
    too_much = psutil.virtual_memory().total / GIB + 1
    arm = Arm("lmcache", SPEC, HostTier(gib=too_much))
    with pytest.raises(LaunchError, match="GiB of memory are free"), run(arm):
        pass
    assert not (tmp_path / "processes.jsonl").exists()


def test_kv_moves_by_lmcache_where_shared_memory_can_hold_the_pool():
    # The choice follows the size of /dev/shm; what is free in it only decides whether it works.
    assert transfer_for(100, shm_bytes=110, shm_free_bytes=110) == "lmcache_driven"
    assert transfer_for(100, shm_bytes=109, shm_free_bytes=109) == "engine_driven"
    with pytest.raises(LaunchError, match="/dev/shm"):
        transfer_for(100, shm_bytes=110, shm_free_bytes=109)


def test_a_server_that_dies_while_measured_is_reported(run, tmp_path: Path):
    with run() as running:
        (server, *_) = recorded(tmp_path)
        processes.kill([server])
        with pytest.raises(ServerDied, match=r"exit code -9; last \d+ lines") as caught:
            running.check_alive()
        assert "killed from outside" in caught.value.hint


def test_servers_are_started_on_the_main_thread_only(tmp_path: Path):
    # The kernel's parent-death signal follows the thread that forked.
    caught: list[BaseException] = []

    def start() -> None:
        try:
            with stub(tmp_path, ""):
                pass
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(timeout=10)
    assert [str(error)[:33] for error in caught] == ["servers must be started on the ma"]
