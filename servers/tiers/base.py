"""What every kind of host tier says of itself to the launcher and to the probe."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from servers.errors import LaunchError
from servers.metrics import Series
from servers.ports import Ports
from servers.tiers.play import Play
from sim.tiers.settings import DEFAULT_KIND, HostSettings, TierKind

if TYPE_CHECKING:  # a plan knows tiers and talks to nobody
    import httpx

Transfer = Literal["lmcache_driven", "engine_driven"]
"""Who copies KV between the engine and the host tier. ``lmcache_driven`` is what CUDA workers use;
on a CPU it is three times faster than ``engine_driven`` and the only one whose LMCache server
counts what it loaded, but it keeps the whole KV pool in /dev/shm."""


@dataclass(frozen=True, slots=True)
class HostTier(HostSettings):
    """A tier of KV in host memory; ``gib`` in GiB."""

    gib: float
    kind: TierKind = DEFAULT_KIND


@dataclass(frozen=True, slots=True)
class Asked:
    """What a running server with a tier can be asked.

    ``lmcache_url``: where LMCache answers; None where it does not. ``infos``: labels of vLLM's info
    metrics by name. ``cache``: labels of the one on its KV cache. ``log``: vLLM's log so far.
    """

    client: "httpx.Client"
    lmcache_url: str | None
    infos: Mapping[str, Mapping[str, str]]
    cache: Mapping[str, str]
    log: str


class ServedTier(ABC):
    """One kind of host tier as its servers are started and asked.

    ``connector``: the class in vLLM's log ("Creating v1 connector with name"). ``not_on_cpu``: why
    it cannot be measured without a GPU; None where it can. ``keeps_blocks``: its chunk is vLLM's
    block. ``has_lmcache``: LMCache answers HTTP on a port of its own. ``has_server``: in a process
    of its own beside vLLM, on one more port. ``takes_policy``: LMCache's policies other than LRU.
    ``size_is``: what its configured size is the size of, for people. ``is_per_worker``: each worker
    has a tier of that size. ``lies_in_shm``: on a GPU it is a file in /dev/shm, where there is room.
    ``infos``: vLLM's info metrics about it.
    ``prior_chunk_s``: seconds to find, pin and scatter a chunk besides its bytes, not measured.
    """

    connector: str
    not_on_cpu: str | None = None
    keeps_blocks: bool = False
    has_lmcache: bool = False
    has_server: bool = False
    takes_policy: bool = False
    size_is: str | None = None
    is_per_worker: bool = False
    lies_in_shm: bool = False
    infos: tuple[Series, ...] = ()
    prior_chunk_s: float = 0.5e-3

    def env(self, host: HostTier, ports: Ports) -> dict[str, str]:
        """What vLLM's process reads about the tier from its environment."""
        return {}

    @abstractmethod
    def flags(self, host: HostTier, ports: Ports, transfer: Transfer) -> list[str]:
        """The options that give vLLM this tier."""

    def server_argv(self, host: HostTier, ports: Ports, transfer: Transfer) -> tuple[str, ...]:
        """Arguments of Python for the server beside vLLM; only where ``has_server``."""
        raise NotImplementedError(f"{self.connector} has no server beside vLLM")

    @abstractmethod
    def facts(self, asked: Asked) -> dict[str, Any]:
        """Fields of ``servers.probe.ServerFacts`` that the servers say of the tier."""

    def wanted(self, host: HostTier) -> dict[str, object]:
        """What those facts must be beside the size."""
        return {}

    @abstractmethod
    def play(self) -> Play:
        """How the scripted server shows it."""

    def seen_connector(self, name: str, log: str) -> str:
        """``name``, or what else ``log`` shows to have run under it."""
        return name


def transfer_config(connector: str, **more: object) -> list[str]:
    """vLLM's option for a KV connector that stores and loads."""
    config = {"kv_connector": connector, "kv_role": "kv_both", **more}
    return ["--kv-transfer-config", json.dumps(config)]


def flat(options: Mapping[str, object]) -> list[str]:
    """``options`` as words of a command line."""
    return [text for name, value in options.items() for text in (name, str(value))]


def needed_url(asked: Asked) -> str:
    """Where LMCache answers."""
    assert asked.lmcache_url is not None, "the launcher gives LMCache a port wherever it answers"
    return asked.lmcache_url


def answer_of(client: "httpx.Client", url: str) -> dict[str, Any]:
    """The JSON object at ``url``; LaunchError where there is none."""
    response = client.get(url)
    response.raise_for_status()
    try:
        answer = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"{url} answers with no JSON: {response.text[:100]!r}", hint="another server may run"
        ) from error
    if not isinstance(answer, dict):
        raise LaunchError(f"{url} answers {answer!r}, not an object", hint="see the server's log")
    return answer


def lmcache_version(client: "httpx.Client", lmcache_url: str) -> str | None:
    """LMCache's version by its own word, else the installed one; None where neither is known."""
    response = client.get(f"{lmcache_url}/lmc_version")
    if response.status_code == HTTPStatus.OK:
        return str(response.json())
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return None


UNKNOWN_SETTINGS = "kvcliff knows LMCache 0.5.6; install the pinned versions (make setup)"
"""What helps where LMCache does not tell its settings the way 0.5.6 does."""
