"""When servers are ready: one real completion, by a server that is ours, in time."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import httpx
import psutil

from servers.child import Child, hint_for, record_tree, tree, trouble
from servers.errors import LaunchError
from servers.ports import HOST, Ports
from servers.processes import Ledger

_POLL_S: Final = 0.1
_SCAN_S: Final = 0.5
_HTTP_S: Final = 5.0
# First completions compile kernels on some builds.
_COMPLETION_S: Final = 60.0


def await_ready(
    children: Sequence[Child],
    ports: Ports,
    model_name: str,
    ledger: Ledger,
    *,
    began: float,
    deadline_s: float,
) -> float:
    """Seconds from ``began`` until a completion was answered; LaunchError in all other cases."""
    scanned = began
    base = f"http://{HOST}:{ports.vllm}"
    with httpx.Client(base_url=base, trust_env=False, timeout=_HTTP_S) as client:
        while True:
            for child in children:
                if reason := trouble(child):
                    raise LaunchError(reason, hint=hint_for(child))
            missing = _missing(client, children, ports, model_name)
            elapsed = time.monotonic() - began
            if missing is None:
                record_tree(children, ledger)
                return elapsed
            if elapsed > deadline_s:
                raise LaunchError(
                    f"servers not ready after {elapsed:.0f} s (deadline {deadline_s:g} s): "
                    f"{missing}{children[0].log.last_lines()}",
                    hint="raise the plan's start deadline if the log shows progress",
                )
            if time.monotonic() - scanned > _SCAN_S:
                record_tree(children, ledger)
                scanned = time.monotonic()
            time.sleep(_POLL_S)


def _missing(
    client: httpx.Client, children: Sequence[Child], ports: Ports, model_name: str
) -> str | None:
    """What readiness still lacks, None when nothing does; LaunchError for a foreign server."""
    try:
        if client.get("/health").status_code != httpx.codes.OK:
            return "vLLM's /health is not 200"
        _check_ours(client, children[0], ports, model_name)
        if ports.lmcache_http is not None and ports.lmcache is not None:
            health = client.get(f"http://{HOST}:{ports.lmcache_http}/healthcheck")
            if health.status_code != httpx.codes.OK:
                return "LMCache's /healthcheck is not 200"
        return _completion_fails(client, model_name)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def _check_ours(client: httpx.Client, vllm: Child, ports: Ports, model_name: str) -> None:
    """A healthy answer proves nothing: it may come from an old server that holds the port."""
    response = client.get("/v1/models")
    names = []
    if response.status_code == httpx.codes.OK:
        with suppress(ValueError, LookupError, TypeError):
            names = [str(entry["id"]) for entry in response.json()["data"]]
    listens = any(_listens(identity.pid, ports.vllm) for identity in tree(vllm))
    if names != [model_name] or not listens:
        raise LaunchError(
            f"another server answers on port {ports.vllm}: it serves {names}, ours would serve "
            f"{model_name!r}; a process of ours listens there: {listens}",
            hint="end the other server, or start again to get another port",
        )


def _listens(pid: int, port: int) -> bool:
    with suppress(psutil.Error):
        connections = psutil.Process(pid).net_connections("tcp4")
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return False


def _completion_fails(client: httpx.Client, model_name: str) -> str | None:
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
    response = client.post("/v1/completions", json=body, timeout=_COMPLETION_S)
    if response.status_code != httpx.codes.OK:
        return f"a completion got HTTP {response.status_code}: {response.text[:200]}"
    try:
        answer = response.json()
        generated = answer["usage"]["completion_tokens"]
        finish = answer["choices"][0]["finish_reason"]
    except (ValueError, LookupError, TypeError):
        return f"a completion's answer has no usage or choice: {response.text[:200]}"
    return None if generated == 2 and finish else f"a completion gave {generated} of 2 tokens"
