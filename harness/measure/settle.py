"""Waiting until one request has left no work behind in the servers, and reading their counters.

Settle on counters, never on a sleep: only a quiescent server makes the next request predictable,
and only final counters belong to the request before. vLLM's conditions are here, as in 0.32.0; those of
the host tiers in ``harness.counters.tiers.settle_tiers_old``.
"""

import ssl
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from harness.counters.attribute import Snapshot
from harness.counters.pages import (
    HOST_SERIES,
    OLD_SAMPLES,
    RESIDENT_IN_PROCESS,
    TIER_SERIES_OF_VLLM,
    VLLM_SERIES,
    CounterError,
    MissingSeries,
    Samples,
    ScrapeError,
    UnreachableError,
    counts,
    parse,
    require_split,
)
from harness.counters.tiers.settle_tiers_old import (
    IN_PROCESS_GAUGES,
    OFFLOAD_GAUGES,
    RESIDENT_CHUNKS,
    HopelessError,
    NotYetError,
    OffloadRest,
    ServerState,
    check_in_process,
    check_server,
    of_worker,
    offload_gauges,
    server_state,
    wait_if,
)
from harness.measure.bounded_http import BoundedHeadTransport
from servers.arms import TierKind

POLL_S = 0.015
"""Pause between two looks while settling. A look that finds all settled takes 7 ms (vLLM alone) or
17 ms (with LMCache), nearly all of it the servers rendering their pages (medians, 2 CPU cores)."""

SCRAPE_TIMEOUT_S = 5.0
"""One GET; a healthy server answers in under 10 ms, so longer means it is stuck."""

LAST_GET_TIMEOUT_S = 0.5
"""Least patience with one GET near a settle's deadline: a slow page is not an unsettled server."""

SESSIONS_GRACE_S = 0.25
"""How long leaked LMCache sessions may hold up a settle whose other conditions all hold.

Sessions leak when END_SESSION overtakes STORE and then live for 600 s, so waiting for zero is best
effort. A live session otherwise ends within milliseconds of the response.
"""


_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_BUS_DEPTH = "lmcache_mp_event_bus_queue_depth"
_PROCESS_START = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Settled:
    """The reading after a request. ``unsettled`` None: every condition held; else which did not.

    ``after`` is None only when the servers could not be read at all; ``unsettled`` then says why.
    """

    after: Snapshot | None
    settle_ms: float
    unsettled: str | None


@dataclass(slots=True)
class _Progress:
    """What one settle has seen so far."""

    blocks_freed: bool = False
    sessions_until: float | None = None
    offload: OffloadRest = field(default_factory=OffloadRest)


class Scraper:
    """Reads one launch's counters over HTTP. Never follows proxies or redirects.

    ``kind`` is the host tier's, None without one; with an ``lmcache_url`` alone it is LMCache's
    server. ``lmcache_url`` is that server's HTTP side or, for LMCache inside vLLM, the internal API
    of its first worker; ValueError where ``kind`` needs one and has none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        lmcache_url: str | None,
        model_name: str,
        launch_id: str,
        kind: TierKind | None = None,
    ) -> None:
        self._kind = kind or ("lmcache-mp" if lmcache_url else None)
        if (lmcache_url is None) != (self._kind not in ("lmcache-mp", "lmcache")):
            raise ValueError(f"a host tier {self._kind!r} with lmcache_url {lmcache_url!r}")
        self._vllm_series = VLLM_SERIES + (
            TIER_SERIES_OF_VLLM.get(self._kind, ()) if self._kind else ()
        )
        self._vllm_url = base_url.rstrip("/") + "/metrics"
        self._host_url = None if lmcache_url is None else lmcache_url.rstrip("/")
        self._model_name = model_name
        self._launch_id = launch_id
        self._client = httpx.Client(
            trust_env=False,
            headers={"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"},
            transport=BoundedHeadTransport(
                # Loopback http only: an empty trust store refuses TLS and is loaded at once.
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
                trust_env=False,
                # uvicorn closes idle connections after 5 s; drop ours first, or a GET races that.
                limits=httpx.Limits(keepalive_expiry=2.0),
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read(self) -> Snapshot:
        """One reading of all counters, settled or not. Raises ScrapeError or MissingSeries."""
        return self._read(SCRAPE_TIMEOUT_S)

    def settle(self, before: Snapshot | None, *, deadline_s: float) -> Settled:
        """Wait until the one request sent since ``before`` has left no work behind in the servers.

        ``before`` None: since their start, in which a fresh server has answered exactly one
        request, the launcher's readiness completion. More means the counters are not fresh.

        Then the next request meets a state that does not depend on timing, and the counters are
        final. Never raises for a server's state: what did not hold within ``deadline_s`` seconds is
        ``unsettled``, with one last reading (a second more at most) if the servers still answer.
        ``settle_ms`` is the time until the conditions held or were given up.
        """
        start = time.monotonic()
        end = start + deadline_s
        progress = _Progress()
        after: Snapshot | None = None
        while True:
            remaining = end - time.monotonic()
            try:
                after = self._look(before, progress, timeout_s=max(remaining, LAST_GET_TIMEOUT_S))
                reason = None
                break
            except (UnreachableError, HopelessError) as error:
                reason = str(error)
                break
            except (CounterError, NotYetError) as error:
                reason = str(error)
            if time.monotonic() + POLL_S >= end:
                break
            time.sleep(POLL_S)
        settle_ms = (time.monotonic() - start) * 1e3
        if reason is not None:
            after = self._read_if_possible()
        return Settled(after, settle_ms, reason)

    def _read(self, timeout_s: float) -> Snapshot:
        vllm = self._vllm_samples(timeout_s)
        if self._host_url is None:
            return self._snapshot(vllm)
        state = self._host_status(timeout_s) if self._kind == "lmcache-mp" else None
        return self._snapshot(vllm, self._host_samples(timeout_s), state)

    def _read_if_possible(self) -> Snapshot | None:
        try:
            return self._read(LAST_GET_TIMEOUT_S)
        except CounterError:
            return None

    def _look(self, before: Snapshot | None, progress: _Progress, *, timeout_s: float) -> Snapshot:
        """The settled reading, or NotYetError with the first condition that does not hold."""
        vllm = self._vllm_samples(timeout_s)
        self._check_vllm(vllm, before, progress)
        match self._kind:
            case "lmcache-mp":
                return self._look_at_server(vllm, before, progress, timeout_s=timeout_s)
            case "lmcache":
                host = self._host_samples(timeout_s)
                where = f"{self._host_url}/metrics"
                check_in_process(host, model_name=self._model_name, where=where)
                return self._same_launch(before, self._snapshot(vllm, host))
            case "native" | "simple":
                self._check_offload(vllm, progress)
        return self._same_launch(before, self._snapshot(vllm))

    def _look_at_server(
        self, vllm: Samples, before: Snapshot | None, progress: _Progress, *, timeout_s: float
    ) -> Snapshot:
        """The order proves that the counters are final without a pause.

        State first, then an empty event bus, then the counters. Every event of a session is queued
        before the session ends, and one thread handles them in order, so an empty bus after that
        means all were counted.
        """
        state = self._host_status(timeout_s)
        wait_if(state.reason())
        self._wait_for_sessions(state, progress)
        depth = self._gauge(self._host_samples(timeout_s), _BUS_DEPTH, ours=False)
        wait_if(f"LMCache's event bus still holds {depth:.0f} events" if depth else None)
        samples = self._host_samples(timeout_s)
        after = self._same_launch(before, self._snapshot(vllm, samples, state))
        check_server((before and before.host) or {}, after.host or {})
        return after

    def _check_offload(self, samples: Samples, progress: _Progress) -> None:
        gauges = offload_gauges(samples, self._kind, model_name=self._model_name)
        counters = self._counts_of_vllm(samples)
        progress.offload.check(gauges, counters, now=time.monotonic())

    def _check_vllm(self, samples: Samples, before: Snapshot | None, progress: _Progress) -> None:
        finished = self._counts_of_vllm(samples)["finished"]
        finished -= before.vllm["finished"] if before else 0
        if finished < 0 or finished > 1:
            raise HopelessError(f"vLLM's finished requests moved by {finished} where we sent 1")
        wait_if("vLLM has not counted the request as finished" if finished == 0 else None)
        running = self._gauge(samples, _RUNNING)
        waiting = self._gauge(samples, _WAITING)
        usage = self._gauge(samples, _KV_USAGE)
        # The gauge is published with step statistics and may lag: zero once after success will do.
        progress.blocks_freed = progress.blocks_freed or usage == 0
        if running or waiting:
            raise NotYetError(f"vLLM has {running:.0f} requests running and {waiting:.0f} waiting")
        if not progress.blocks_freed:
            raise NotYetError(
                f"{_KV_USAGE} is {usage:.4f} and was never 0 since the request finished"
            )

    def _wait_for_sessions(self, state: ServerState, progress: _Progress) -> None:
        if not state.sessions:
            return
        now = time.monotonic()
        if progress.sessions_until is None:
            progress.sessions_until = now + SESSIONS_GRACE_S
        if now < progress.sessions_until:
            raise NotYetError(f"LMCache's active_sessions is {state.sessions}")

    def _same_launch(self, before: Snapshot | None, after: Snapshot) -> Snapshot:
        if before and before.launch != after.launch:
            raise HopelessError(f"a server was restarted: {before.launch} became {after.launch}")
        return after

    def _snapshot(
        self, vllm: Samples, host: Samples | None = None, state: ServerState | None = None
    ) -> Snapshot:
        started = [
            f"{who}@{samples[_PROCESS_START][0][1]:.2f}"
            for who, samples in (("vllm", vllm), ("lmcache", host or {}))
            if samples.get(_PROCESS_START)
        ]
        return Snapshot(
            self._counts_of_vllm(vllm),
            None if host is None else self._counts_of_host(host, state),
            " ".join([self._launch_id, *started]),
        )

    def _counts_of_host(self, samples: Samples, state: ServerState | None) -> dict[str, int]:
        where = f"{self._host_url}/metrics"
        if state is None:
            resident = of_worker(samples, RESIDENT_CHUNKS, model_name=self._model_name, where=where)
            return {RESIDENT_IN_PROCESS: int(resident)}
        self._gauge(samples, _BUS_DEPTH, ours=False)  # absent: LMCache's metrics are switched off
        return counts(samples, HOST_SERIES, model_name=None, where=where) | {
            "host_resident_chunks": state.resident,
            "host_used_bytes": state.used_bytes,
        }

    def _counts_of_vllm(self, samples: Samples) -> dict[str, int]:
        found = counts(
            samples, self._vllm_series, model_name=self._model_name, where=self._vllm_url
        )
        old = [name for name in OLD_SAMPLES if name in samples]
        require_split(found, with_host=self._kind is not None, old=old)
        return found

    def _gauge(self, samples: Samples, name: str, *, ours: bool = True) -> float:
        values = [
            value
            for labels, value in samples.get(name, ())
            if not ours or labels.get("model_name") == self._model_name
        ]
        if not values:
            raise MissingSeries(
                f"no {name} is exported", hint="the server's metrics are switched off"
            )
        return sum(values)

    def _vllm_samples(self, timeout_s: float) -> Samples:
        text = self._get(self._vllm_url, timeout_s).text
        wanted = [s.sample for s in self._vllm_series]
        wanted += OFFLOAD_GAUGES.get(self._kind, ()) if self._kind else ()
        wanted += [_RUNNING, _WAITING, _KV_USAGE, _PROCESS_START, *OLD_SAMPLES]
        return parse(text, wanted=wanted, where=self._vllm_url)

    def _host_samples(self, timeout_s: float) -> Samples:
        url = f"{self._host_url}/metrics"
        wanted = [*(s.sample for s in HOST_SERIES), _BUS_DEPTH, _PROCESS_START]
        if self._kind == "lmcache":
            wanted = [*IN_PROCESS_GAUGES, _PROCESS_START]
        return parse(self._get(url, timeout_s).text, wanted=wanted, where=url)

    def _host_status(self, timeout_s: float) -> ServerState:
        url = f"{self._host_url}/status"
        try:
            return server_state(self._get(url, timeout_s).json())
        except ValueError as error:
            raise ScrapeError(f"{url} is not JSON: {error}") from error

    def _page(self, url: str, timeout_s: float) -> httpx.Response:
        """One page within ``timeout_s`` in all: httpx bounds each read, not the sum of them."""
        until = time.monotonic() + timeout_s
        with self._client.stream("GET", url, timeout=timeout_s) as response:
            body = bytearray()
            for packet in response.iter_raw():
                body += packet
                if time.monotonic() > until:
                    raise httpx.ReadTimeout(f"the page was not whole after {timeout_s:.1f} s")
        return httpx.Response(response.status_code, content=bytes(body))

    def _get(self, url: str, timeout_s: float) -> httpx.Response:
        timeout_s = min(timeout_s, SCRAPE_TIMEOUT_S)
        try:
            response = self._page(url, timeout_s)
        except httpx.ConnectError as error:
            raise UnreachableError(f"GET {url}: {error}") from error
        except httpx.HTTPError as error:
            raise ScrapeError(f"GET {url}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise ScrapeError(f"GET {url} answered HTTP {response.status_code}, expected 200")
        if not response.content.strip():
            raise ScrapeError(f"GET {url} answered 200 with an empty page")
        return response
