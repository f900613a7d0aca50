"""Ask running servers what they really are, and refuse those that are not what the arm asked for.

A setting that was not applied shows up nowhere else: LMCache warns about an unknown key, and vLLM
serves on, recomputing everything, when its connector does not work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from servers.arms import Arm, HostTier, ServerSpec
from servers.command import CONNECTOR, is_local
from servers.errors import LaunchError
from servers.launch import Running
from sim.geometry import KvGeometry, host_bytes
from sim.tiers import align_up

_TIMEOUT_S: Final = 10.0
# Log lines of vLLM 0.32 and LMCache 0.5.6. The class with the Upstream suffix is vLLM's own copy,
# taken silently when lmcache's module does not import; it stores and rounds differently.
_CREATED: Final = re.compile(r"Creating v1 connector with name: (\w+)")
_EXTERNAL: Final = "Using external LMCacheMPConnector"
_UPSTREAM: Final = re.compile(
    r"LMCacheMPConnectorUpstream|External LMCacheMPConnector is not avail"
)
_TRANSFER: Final = re.compile(r"Creating transfer context \(device_type=\w+, mode=(\w+)\)")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the servers say they are. None: there is no host tier, or it does not say.

    ``num_gpu_blocks`` includes vLLM's null block. ``host_bytes``: capacity of the host tier.
    ``transfer``: who copies KV, ``lmcache_driven`` or ``engine_driven``.
    """

    vllm_version: str
    lmcache_version: str | None
    num_gpu_blocks: int
    block_size: int
    connector: str | None = None
    transfer: str | None = None
    chunk_tokens: int | None = None
    host_bytes: int | None = None
    policy: str | None = None
    watermark: float | None = None
    evict_ratio: float | None = None


def probe(running: Running, arm: Arm) -> ServerFacts:
    """Facts of the servers behind ``running``; read-only, moves no request counter.

    Raises LaunchError naming every fact that differs from what ``arm`` asks for, and when a
    server does not answer.
    """
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        try:
            facts = _facts(client, running, arm)
        except httpx.HTTPError as error:
            raise LaunchError(
                f"a server stopped answering while it was asked what it is: {error!r}",
                hint="read its log beside the run's journals",
            ) from error
    if wrong := _differences(facts, arm):
        raise LaunchError(
            f"the servers of arm {arm.name} are not what it asks for: {'; '.join(wrong)}",
            hint="the engines took a setting differently: see their logs for the reason",
        )
    return facts


def _facts(client: httpx.Client, running: Running, arm: Arm) -> ServerFacts:
    cache = _cache_config(client, running.base_url)
    is_real = arm.server.build != "fake"
    log = running.logs["vllm"].text() if is_real else ""
    facts: dict[str, Any] = {
        "vllm_version": str(_json(client, f"{running.base_url}/version")["version"]),
        "lmcache_version": None,
        "num_gpu_blocks": int(cache["num_gpu_blocks"]),
        "block_size": int(cache["block_size"]),
        "connector": _connector(log),
    }
    if running.lmcache_url is not None:
        facts |= _tier_facts(client, running.lmcache_url)
        facts["transfer"] = match[1] if (match := _TRANSFER.search(log)) else None
        if not is_real:
            facts["connector"] = CONNECTOR  # the fake has no log line to prove it by
    return ServerFacts(**facts)


def _cache_config(client: httpx.Client, base_url: str) -> Mapping[str, str]:
    """Labels of vLLM's info metric on its KV cache."""
    response = client.get(f"{base_url}/metrics")
    response.raise_for_status()
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                return sample.labels
    raise LaunchError(
        "vLLM publishes no vllm:cache_config_info, so its KV capacity is unknown",
        hint="install the supported vLLM version (make setup): README.md names it",
    )


def _connector(log: str) -> str | None:
    """The connector class vLLM's log shows, None when it created none."""
    if _UPSTREAM.search(log):
        return f"{CONNECTOR}Upstream"
    match = _CREATED.search(log)
    if match is None:
        return None
    name = match[1]
    return name if name != CONNECTOR or _EXTERNAL in log else f"{name} of unknown origin"


def _tier_facts(client: httpx.Client, lmcache_url: str) -> dict[str, Any]:
    config = _json(client, f"{lmcache_url}/config")
    try:
        manager = config["storage_manager"]["l1_manager_config"]
        eviction = manager["eviction"]
        return {
            "lmcache_version": _lmcache_version(client, lmcache_url),
            "chunk_tokens": int(config["mp"]["chunk_size"]),
            "host_bytes": int(manager["memory_config"]["size_in_bytes"]),
            "policy": str(eviction["eviction_policy"]),
            "watermark": float(eviction["trigger_watermark"]),
            "evict_ratio": float(eviction["eviction_ratio"]),
        }
    except (LookupError, TypeError) as error:
        raise LaunchError(
            f"LMCache's /config lacks {error}: its effective settings are unknown",
            hint="kvcliff knows LMCache 0.5.6; install the pinned versions (make setup)",
        ) from error


def _lmcache_version(client: httpx.Client, lmcache_url: str) -> str | None:
    response = client.get(f"{lmcache_url}/lmc_version")
    if response.status_code == httpx.codes.OK:
        return str(response.json())
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return None


def _json(client: httpx.Client, url: str) -> dict[str, Any]:
    response = client.get(url)
    response.raise_for_status()
    try:
        answer = response.json()
    except ValueError as error:
        raise LaunchError(
            f"{url} answers with no JSON: {response.text[:100]!r}", hint="another server may run"
        ) from error
    if not isinstance(answer, dict):
        raise LaunchError(f"{url} answers {answer!r}, not an object", hint="see the server's log")
    return answer


def _differences(facts: ServerFacts, arm: Arm) -> list[str]:
    wanted: dict[str, object] = {
        "num_gpu_blocks": arm.server.num_gpu_blocks,
        "block_size": arm.server.block_size,
        "connector": CONNECTOR if arm.host else None,
    }
    if arm.host is not None:
        wanted |= {
            "chunk_tokens": arm.host.chunk_tokens,
            "policy": arm.host.policy,
            "watermark": arm.host.watermark,
            "evict_ratio": arm.host.evict_ratio,
        }
    wrong = [
        f"{name} is {getattr(facts, name)!r}, asked {value!r}"
        for name, value in wanted.items()
        if getattr(facts, name) != value
    ]
    if arm.host is not None and not _holds_as_much(facts, arm.host, arm.server):
        wrong.append(f"host_bytes is {facts.host_bytes}, asked {host_bytes(arm.host.gib)}")
    return wrong


def _holds_as_much(facts: ServerFacts, host: HostTier, server: ServerSpec) -> bool:
    """Whether the tier holds exactly as many chunks as asked; without a model file: bytes."""
    asked, got = host_bytes(host.gib), facts.host_bytes or 0
    if not is_local(server.model):
        return got == asked
    geometry = KvGeometry.from_config(Path(server.model), kv_dtype=server.dtype)
    chunk = align_up(geometry.chunk_bytes(host.chunk_tokens))
    return got // chunk == asked // chunk
