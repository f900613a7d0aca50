"""Waiting until one request has left no work behind in the servers, and reading their counters.

Settle on counters, never on a sleep: only a quiescent server makes the next request predictable,
and only final counters belong to the request before. Conditions as in vLLM 0.32.0 and LMCache 0.5.6.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from harness.counters import (
    HOST_SERIES,
    OLD_SAMPLES,
    VLLM_SERIES,
    CounterError,
    MissingSeries,
    Samples,
    ScrapeError,
    Snapshot,
    UnreachableError,
    counts,
    parse,
    require_split,
)

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


@dataclass(frozen=True, slots=True)
class _HostState:
    """LMCache's /status: live, not behind its event bus. Counts are chunks; ratios in [0, 1]."""

    resident: int
    used_bytes: int
    busy: Mapping[str, int]
    usage_ratio: float
    watermark: float | None
    sessions: int

    def reason(self) -> str | None:
        for name, count in self.busy.items():
            if count:
                return f"LMCache's {name} is {count}"
        if self.watermark is not None and self.usage_ratio >= self.watermark:
            return (
                f"LMCache is {self.usage_ratio:.3f} full, at or above its watermark "
                f"{self.watermark}: eviction is due"
            )
        return None


def _host_state(status: Any) -> _HostState:
    """Read /status of 0.5.6 (one entry per L1 manager) or older (a single ``l1_manager``)."""
    try:
        storage = status["storage_manager"]
        l1 = _default_or(storage, "l1_managers", "l1_manager")
        eviction = _default_or(storage, "l1_eviction_controllers", "l1_eviction_controller")
        busy = {n: int(l1[n]) for n in ("read_locked_count", "write_locked_count")}
        busy["staging_object_count"] = int(l1.get("staging_object_count", 0))
        busy["active_prefetch_jobs"] = int(status["active_prefetch_jobs"])
        return _HostState(
            resident=int(l1["total_object_count"]),
            used_bytes=int(l1["memory_used_bytes"]),
            busy=busy,
            usage_ratio=float(l1["memory_usage_ratio"]),
            # noop never evicts: full is then a lasting state, not a pending one.
            watermark=None
            if eviction["eviction_policy"] == "noop"
            else float(eviction["trigger_watermark"]),
            sessions=int(status["active_sessions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MissingSeries(f"LMCache's /status has no usable {error}") from error


def _default_or(storage: Any, plural: str, singular: str) -> Any:
    if plural in storage:
        return storage[plural]["_default"]
    return storage[singular]


@dataclass(slots=True)
class _Progress:
    """What one settle has seen so far."""

    blocks_freed: bool = False
    sessions_until: float | None = None


class _HopelessError(Exception):
    """A condition that no further waiting can mend."""


class _NotYetError(Exception):
    """A settle condition that does not hold yet."""


class Scraper:
    """Reads one launch's counters over HTTP. Never follows proxies or redirects."""

    def __init__(
        self, base_url: str, *, lmcache_url: str | None, model_name: str, launch_id: str
    ) -> None:
        self._vllm_url = base_url.rstrip("/") + "/metrics"
        self._host_url = None if lmcache_url is None else lmcache_url.rstrip("/")
        self._model_name = model_name
        self._launch_id = launch_id
        self._client = httpx.Client(
            trust_env=False,
            # Loopback http only: an empty trust store refuses TLS and saves loading the system's.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            headers={"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"},
            # uvicorn closes idle connections after 5 s; drop ours first, or a GET races the close.
            limits=httpx.Limits(keepalive_expiry=2.0),
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
            except (UnreachableError, _HopelessError) as error:
                reason = str(error)
                break
            except (CounterError, _NotYetError) as error:
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
            return self._snapshot(vllm, None, None)
        state = self._host_status(timeout_s)
        return self._snapshot(vllm, self._host_samples(timeout_s), state)

    def _read_if_possible(self) -> Snapshot | None:
        try:
            return self._read(LAST_GET_TIMEOUT_S)
        except CounterError:
            return None

    def _look(self, before: Snapshot | None, progress: _Progress, *, timeout_s: float) -> Snapshot:
        """The settled reading, or _NotYetError with the first condition that does not hold."""
        vllm = self._vllm_samples(timeout_s)
        self._check_vllm(vllm, before, progress)
        if self._host_url is None:
            return self._same_launch(before, self._snapshot(vllm, None, None))
        # The order proves that the counters are final without a pause: state first, then an empty
        # event bus, then the counters. Every event of a session is queued before the session ends,
        # and one thread handles them in order, so an empty bus after that means all were counted.
        state = self._host_status(timeout_s)
        _wait_if(state.reason())
        self._wait_for_sessions(state, progress)
        depth = self._gauge(self._host_samples(timeout_s), _BUS_DEPTH, ours=False)
        _wait_if(f"LMCache's event bus still holds {depth:.0f} events" if depth else None)
        samples = self._host_samples(timeout_s)
        after = self._same_launch(before, self._snapshot(vllm, samples, state))
        _check_host((before and before.host) or {}, after.host or {})
        return after

    def _check_vllm(self, samples: Samples, before: Snapshot | None, progress: _Progress) -> None:
        finished = self._counts_of_vllm(samples)["finished"]
        finished -= before.vllm["finished"] if before else 0
        if finished < 0 or finished > 1:
            raise _HopelessError(f"vLLM's finished requests moved by {finished} where we sent 1")
        _wait_if("vLLM has not counted the request as finished" if finished == 0 else None)
        running = self._gauge(samples, _RUNNING)
        waiting = self._gauge(samples, _WAITING)
        usage = self._gauge(samples, _KV_USAGE)
        # The gauge is published with step statistics and may lag: zero once after success will do.
        progress.blocks_freed = progress.blocks_freed or usage == 0
        if running or waiting:
            raise _NotYetError(f"vLLM has {running:.0f} requests running and {waiting:.0f} waiting")
        if not progress.blocks_freed:
            raise _NotYetError(
                f"{_KV_USAGE} is {usage:.4f} and was never 0 since the request finished"
            )

    def _wait_for_sessions(self, state: _HostState, progress: _Progress) -> None:
        if not state.sessions:
            return
        now = time.monotonic()
        if progress.sessions_until is None:
            progress.sessions_until = now + SESSIONS_GRACE_S
        if now < progress.sessions_until:
            raise _NotYetError(f"LMCache's active_sessions is {state.sessions}")

    def _same_launch(self, before: Snapshot | None, after: Snapshot) -> Snapshot:
        if before and before.launch != after.launch:
            raise _HopelessError(f"a server was restarted: {before.launch} became {after.launch}")
        return after

    def _snapshot(self, vllm: Samples, host: Samples | None, state: _HostState | None) -> Snapshot:
        host_counts: dict[str, int] | None = None
        if host is not None and state is not None:
            self._gauge(host, _BUS_DEPTH, ours=False)  # absent: LMCache's metrics are switched off
            host_counts = counts(
                host, HOST_SERIES, model_name=None, where=f"{self._host_url}/metrics"
            )
            host_counts |= {
                "host_resident_chunks": state.resident,
                "host_used_bytes": state.used_bytes,
            }
        started = [
            f"{who}@{samples[_PROCESS_START][0][1]:.2f}"
            for who, samples in (("vllm", vllm), ("lmcache", host or {}))
            if samples.get(_PROCESS_START)
        ]
        return Snapshot(
            self._counts_of_vllm(vllm), host_counts, " ".join([self._launch_id, *started])
        )

    def _counts_of_vllm(self, samples: Samples) -> dict[str, int]:
        found = counts(samples, VLLM_SERIES, model_name=self._model_name, where=self._vllm_url)
        old = [name for name in OLD_SAMPLES if name in samples]
        require_split(found, with_host=self._host_url is not None, old=old)
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
        wanted = [s.sample for s in VLLM_SERIES]
        wanted += [_RUNNING, _WAITING, _KV_USAGE, _PROCESS_START, *OLD_SAMPLES]
        return parse(text, wanted=wanted, where=self._vllm_url)

    def _host_samples(self, timeout_s: float) -> Samples:
        url = f"{self._host_url}/metrics"
        wanted = [s.sample for s in HOST_SERIES] + [_BUS_DEPTH, _PROCESS_START]
        return parse(self._get(url, timeout_s).text, wanted=wanted, where=url)

    def _host_status(self, timeout_s: float) -> _HostState:
        url = f"{self._host_url}/status"
        try:
            return _host_state(self._get(url, timeout_s).json())
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


def _wait_if(reason: str | None) -> None:
    if reason is not None:
        raise _NotYetError(reason)


def _check_host(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """LMCache's counters must have caught up with its live state.

    ``written - evicted == resident`` is exact while nothing is loaded from an L2: writes, evictions
    and clears are queued as events under the same lock that changes the resident objects
    (``L1Manager.finish_write``, ``delete``, ``clear``).
    """
    lookups = after["host_lookups"] - before.get("host_lookups", 0)
    if lookups not in (0, 1):
        raise _HopelessError(f"LMCache's lookups moved by {lookups} where we sent 1 request")
    _wait_if("LMCache has counted no lookup for the request" if lookups == 0 else None)
    kept = after["host_written_chunks"] - after["host_evicted_chunks"]
    if kept != after["host_resident_chunks"]:
        raise _NotYetError(
            f"LMCache's counters say {kept} chunks are resident, its state "
            f"{after['host_resident_chunks']}"
        )
    for kind in ("stores", "retrieves"):
        open_copies = after.get(f"host_submitted_{kind}", 0) - after.get(f"host_finished_{kind}", 0)
        _wait_if(f"LMCache has {open_copies} {kind} in flight" if open_copies else None)
