"""TCP ports on 127.0.0.1: really free before the start, really closed after the stop."""

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from servers.errors import LaunchError

HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on 127.0.0.1, all different; those of LMCache are None without it.

    LMCache in vLLM's process has ``lmcache_http`` alone. ``events``: where a reader of vLLM's KV
    events listens, to which vLLM connects; None where nobody reads them.
    """

    vllm: int
    lmcache: int | None = None
    lmcache_http: int | None = None
    events: int | None = None

    @property
    def connector(self) -> int:
        """Where vLLM's connector reaches LMCache's server; ValueError without such a port."""
        return self._given(self.lmcache)

    @property
    def http(self) -> int:
        """Where LMCache answers HTTP; ValueError without such a port."""
        return self._given(self.lmcache_http)

    def _given(self, port: int | None) -> int:
        if port is None:
            raise ValueError(f"the arm has a host tier but {self} has no ports for it")
        return port


def free_ports(*, with_connector: bool = False, with_http: bool = False) -> Ports:
    """Ports nobody uses now, outside the range the kernel gives clients: vLLM's and those asked for.

    Inside that range any outgoing connection could take the port before the server binds it, and
    a client polling a port nobody listens on can even connect to itself.
    """
    low, high = _client_port_range()
    candidates = [*range(max(10_000, low - 15_000), low)] or [*range(high + 1, 65_536)]
    random.SystemRandom().shuffle(candidates)
    wanted = 1 + with_connector + with_http
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
    vllm, *others = chosen
    http = others.pop() if with_http else None
    return Ports(vllm, others.pop() if with_connector else None, http)


def check_ports_free(ports: Ports) -> None:
    """LaunchError naming the first of these ports that somebody holds."""
    for port in used(ports):
        if not _is_free(port):
            raise LaunchError(
                f"TCP port {port} on {HOST} is taken before our server starts",
                hint="end the program that listens there, or let kvcliff choose ports",
            )


def used(ports: Ports) -> list[int]:
    """The port numbers in ``ports`` that our servers listen on."""
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


def accepts(port: int) -> bool:
    """Whether somebody accepts connections on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0
