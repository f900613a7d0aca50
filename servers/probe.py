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

from servers.arms import CONNECTORS, Arm, HostTier, ServerSpec
from servers.command import is_local
from servers.errors import LaunchError
from servers.launch import Running
from sim.geometry import KvGeometry, host_bytes
from sim.tiers.spec import align_up

_TIMEOUT_S: Final = 10.0
_MP: Final = CONNECTORS["lmcache-mp"]
_CACHE_INFO: Final = "vllm:cache_config_info"
_SIMPLE_INFO: Final = "vllm:simple_kv_offload_info"
_INFOS: Final = (_CACHE_INFO, _SIMPLE_INFO)
# Log lines of vLLM 0.32 and LMCache 0.5.6. The class with the Upstream suffix is vLLM's own copy,
# taken silently when lmcache's module does not import; it stores and rounds differently.
_CREATED: Final = re.compile(r"Creating v1 connector with name: (\w+)")
_EXTERNAL: Final = "Using external LMCacheMPConnector"
_UPSTREAM: Final = re.compile(
    r"LMCacheMPConnectorUpstream|External LMCacheMPConnector is not avail"
)
# The same for LMCache inside vLLM (``LMCacheConnectorV1.__init__``, option use_native).
_VLLMS_COPY: Final = "Initializing native LMCache connector"
# Its manager says so and goes on: every request is recomputed (LMCache ``LMCacheManager``; on a CPU
# because of the first line, from ``CreateGPUConnector``).
_DEGRADED: Final = re.compile(
    r"No supported \w+ connector found|System will operate in degraded mode"
)
_IN_PROCESS_KEYS: Final = (
    "chunk_size", "local_cpu", "max_local_cpu_size", "cache_policy", "save_unfull_chunk",
    "use_layerwise", "enable_async_loading", "local_disk", "remote_url",
)  # fmt: skip
_TRANSFER: Final = re.compile(r"Creating transfer context \(device_type=\w+, mode=(\w+)\)")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the servers say they are. None: there is no host tier, or it does not say.

    ``num_gpu_blocks`` includes vLLM's null block. ``host_bytes``: capacity of the host tier; what
    vLLM's own offloading was given, for it does not say what it made of it. ``host_blocks``: the
    same in blocks, where the simple offload says it. ``transfer``: who copies KV,
    ``lmcache_driven`` or ``engine_driven``. ``unlike_modelled``: settings of LMCache inside vLLM
    that change what it keeps, and are not those the predictor knows.
    """

    vllm_version: str
    lmcache_version: str | None
    num_gpu_blocks: int
    block_size: int
    prefix_caching: bool | None
    connector: str | None = None
    transfer: str | None = None
    chunk_tokens: int | None = None
    host_bytes: int | None = None
    policy: str | None = None
    watermark: float | None = None
    evict_ratio: float | None = None
    host_blocks: int | None = None
    unlike_modelled: tuple[str, ...] = ()


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
    is_real = arm.server.build != "fake"
    log = running.logs["vllm"].text() if is_real else ""
    if degraded := _DEGRADED.search(log):
        raise LaunchError(
            f"LMCache inside vLLM does not work: its log says {degraded[0]!r}",
            hint="it needs a device LMCache has a connector for; every request would be recomputed",
        )
    page = _page(client, running.base_url)
    cache = _cache_config(page)
    facts: dict[str, Any] = {
        "vllm_version": str(_json(client, f"{running.base_url}/version")["version"]),
        "lmcache_version": None,
        "num_gpu_blocks": int(cache["num_gpu_blocks"]),
        "block_size": int(cache["block_size"]),
        "prefix_caching": _as_bool(cache.get("enable_prefix_caching")),
        # The fake has no log line to prove it by.
        "connector": _connector(log) if is_real else arm.connector_class,
    }
    match arm.host.kind if arm.host else None:
        case "lmcache-mp":
            facts |= _server_facts(client, _lmcache_url(running))
            facts["transfer"] = match[1] if (match := _TRANSFER.search(log)) else None
        case "lmcache":
            facts |= _in_process_facts(client, _lmcache_url(running))
        case "native" | "simple":
            facts |= _offload_facts(page, cache)
    return ServerFacts(**facts)


def _as_bool(text: str | None) -> bool | None:
    """A label that is Python's text of a bool."""
    return {"True": True, "False": False}.get(text or "")


def _lmcache_url(running: Running) -> str:
    if running.lmcache_url is None:
        raise ValueError("the arm has LMCache but the servers have no URL to ask it at")
    return running.lmcache_url


def _page(client: httpx.Client, base_url: str) -> Mapping[str, Mapping[str, str]]:
    """Labels of each of vLLM's info metrics, by name."""
    response = client.get(f"{base_url}/metrics")
    response.raise_for_status()
    lines = [line for line in response.text.split("\n") if line.startswith(_INFOS)]
    return {
        sample.name: sample.labels
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
    }


def _cache_config(page: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Labels of vLLM's info metric on its KV cache: every field of its CacheConfig."""
    if _CACHE_INFO not in page:
        raise LaunchError(
            f"vLLM publishes no {_CACHE_INFO}, so its KV capacity is unknown",
            hint="install the supported vLLM version (make setup): README.md names it",
        )
    return page[_CACHE_INFO]


def _offload_facts(
    page: Mapping[str, Mapping[str, str]], cache: Mapping[str, str]
) -> dict[str, Any]:
    """What vLLM says of its own offloading: the GiB it was given, and the simple one's blocks.

    vLLM 0.32 publishes no more (0.33 has ``vllm:kv_offload_config_info``).
    """
    size = cache.get("kv_offloading_size", "None")
    blocks = page.get(_SIMPLE_INFO, {}).get("capacity_blocks")
    return {
        "host_bytes": None if size == "None" else host_bytes(float(size)),
        "host_blocks": None if blocks is None else int(blocks),
    }


def _connector(log: str) -> str | None:
    """The connector class vLLM's log shows, None when it created none."""
    if _UPSTREAM.search(log):
        return f"{_MP}Upstream"
    match = _CREATED.search(log)
    if match is None:
        return None
    name = match[1]
    if name == CONNECTORS["lmcache"] and _VLLMS_COPY in log:
        return f"{name} of vLLM's own copy"
    return name if name != _MP or _EXTERNAL in log else f"{name} of unknown origin"


def _in_process_facts(client: httpx.Client, lmcache_url: str) -> dict[str, Any]:
    """LMCache inside vLLM by its internal API (``v1/internal_api_server/vllm/conf_api.py``)."""
    config = _json(client, f"{lmcache_url}/conf?names={','.join(_IN_PROCESS_KEYS)}")
    if missing := sorted(set(_IN_PROCESS_KEYS) - set(config)):
        raise LaunchError(
            f"LMCache's /conf lacks {', '.join(missing)}: its effective settings are unknown",
            hint="kvcliff knows LMCache 0.5.6; install the pinned versions (make setup)",
        )
    modelled = {"local_cpu": True} | dict.fromkeys(
        ("save_unfull_chunk", "use_layerwise", "enable_async_loading", "local_disk", "remote_url")
    )
    return {
        "lmcache_version": _lmcache_version(client, lmcache_url),
        "chunk_tokens": int(config["chunk_size"]),
        "host_bytes": host_bytes(float(config["max_local_cpu_size"])),
        "policy": str(config["cache_policy"]),
        "unlike_modelled": tuple(
            f"{name} is {config[name]!r}, asked {value or False!r}"
            for name, value in modelled.items()
            if bool(config[name]) != bool(value)
        ),
    }


def _server_facts(client: httpx.Client, lmcache_url: str) -> dict[str, Any]:
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
    wanted = {
        "num_gpu_blocks": arm.server.num_gpu_blocks,
        "block_size": arm.server.block_size,
        "prefix_caching": arm.prefix_caching,
        "connector": arm.connector_class,
        **_wanted_of_tier(arm.host),
    }
    wrong = [
        f"{name} is {getattr(facts, name)!r}, asked {value!r}"
        for name, value in wanted.items()
        if getattr(facts, name) != value
    ]
    if arm.host is not None and not _holds_as_much(facts, arm.host, arm.server):
        wrong.append(f"host_bytes is {facts.host_bytes}, asked {host_bytes(arm.host.gib)}")
    return [*wrong, *facts.unlike_modelled]


def _wanted_of_tier(host: HostTier | None) -> dict[str, object]:
    """What the tier itself can be asked for; vLLM's own offloading tells no more than its size."""
    if host is None or host.kind in ("native", "simple"):
        return {}
    wanted: dict[str, object] = {"chunk_tokens": host.chunk_tokens, "policy": host.policy}
    if host.kind == "lmcache-mp":
        wanted |= {"watermark": host.watermark, "evict_ratio": host.evict_ratio}
    return wanted


def _holds_as_much(facts: ServerFacts, host: HostTier, server: ServerSpec) -> bool:
    """Whether the tier holds exactly as many chunks as asked; without a model file: bytes."""
    asked, got = host_bytes(host.gib), facts.host_bytes or 0
    if not is_local(server.model):
        return got == asked
    geometry = KvGeometry.from_config(Path(server.model), kv_dtype=server.dtype)
    chunk = align_up(geometry.chunk_bytes(host.chunk_tokens))
    return got // chunk == asked // chunk
