"""Ask running servers what they really are, and refuse those that are not what the arm asked for.

A setting that was not applied shows up nowhere else: LMCache warns about an unknown key, and vLLM
serves on, recomputing everything, when its connector does not work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from servers.arms import Arm, ServerSpec
from servers.command import is_local
from servers.errors import LaunchError
from servers.launch import Running
from servers.metrics import CACHE_INFO
from servers.tiers.base import Asked, HostTier, answer_of
from servers.tiers.registry import INFOS, SERVED
from sim.geometry import host_bytes
from sim.tiers.host import align_up

_TIMEOUT_S: Final = 10.0
# Log lines of vLLM 0.32 and LMCache 0.5.6.
_CREATED: Final = re.compile(r"Creating v1 connector with name: (\w+)")
# Its manager says so and goes on: every request is recomputed (LMCache ``LMCacheManager``; on a CPU
# because of the first line, from ``CreateGPUConnector``).
_DEGRADED: Final = re.compile(
    r"No supported \w+ connector found|System will operate in degraded mode"
)


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
    infos = _infos(client, running.base_url)
    cache = _cache_config(infos)
    facts: dict[str, Any] = {
        "vllm_version": str(answer_of(client, f"{running.base_url}/version")["version"]),
        "lmcache_version": None,
        "num_gpu_blocks": int(cache["num_gpu_blocks"]),
        "block_size": int(cache["block_size"]),
        "prefix_caching": _as_bool(cache.get("enable_prefix_caching")),
        # The fake has no log line to prove it by.
        "connector": _connector(log) if is_real else arm.connector_class,
    }
    if arm.tier is not None:
        facts |= arm.tier.facts(Asked(client, running.lmcache_url, infos, cache, log))
    return ServerFacts(**facts)


def _as_bool(text: str | None) -> bool | None:
    """A label that is Python's text of a bool."""
    return {"True": True, "False": False}.get(text or "")


def _infos(client: httpx.Client, base_url: str) -> dict[str, Mapping[str, str]]:
    """Labels of each of vLLM's info metrics that it publishes, by our name."""
    response = client.get(f"{base_url}/metrics")
    response.raise_for_status()
    wanted = {sample: series.name for series in INFOS for sample in series.samples}
    lines = [line for line in response.text.split("\n") if line.startswith(tuple(wanted))]
    return {
        wanted[sample.name]: sample.labels
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
        if sample.name in wanted
    }


def _cache_config(infos: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Labels of vLLM's info metric on its KV cache: every field of its CacheConfig."""
    if CACHE_INFO.name not in infos:
        raise LaunchError(
            f"vLLM publishes no {CACHE_INFO.named}, so its KV capacity is unknown",
            hint="install the supported vLLM version (make setup): README.md names it",
        )
    return infos[CACHE_INFO.name]


def _connector(log: str) -> str | None:
    """The connector class vLLM's log shows, None when it created none."""
    match = _CREATED.search(log)
    if match is None:
        return None
    tiers = (tier for tier in SERVED.values() if tier.connector == match[1])
    tier = next(tiers, None)
    return match[1] if tier is None else tier.seen_connector(match[1], log)


def _differences(facts: ServerFacts, arm: Arm) -> list[str]:
    wanted = {
        "num_gpu_blocks": arm.server.num_gpu_blocks,
        "block_size": arm.server.block_size,
        "prefix_caching": arm.prefix_caching,
        "connector": arm.connector_class,
        **(arm.tier.wanted(arm.host) if arm.host and arm.tier else {}),
    }
    wrong = [
        f"{name} is {getattr(facts, name)!r}, asked {value!r}"
        for name, value in wanted.items()
        if getattr(facts, name) != value
    ]
    if arm.host is not None and not _holds_as_much(facts, arm.host, arm.server):
        wrong.append(f"host_bytes is {facts.host_bytes}, asked {host_bytes(arm.host.gib)}")
    return [*wrong, *facts.unlike_modelled]


def _holds_as_much(facts: ServerFacts, host: HostTier, server: ServerSpec) -> bool:
    """Whether the tier holds exactly as many chunks as asked; without a model file: bytes."""
    asked, got = host_bytes(host.gib), facts.host_bytes or 0
    if not is_local(server.model):
        return got == asked
    geometry = server.geometry()
    chunk = align_up(geometry.chunk_bytes(host.chunk_tokens))
    return got // chunk == asked // chunk
