"""Waiting until what was asked has left no work behind in the servers, and reading their counters.

Settle on counters, never on a sleep: only a quiescent server makes the next request predictable,
and only final counters belong to the request before. vLLM's conditions are here, as in 0.32.0; those of
the host tiers in ``harness.counters.tiers``.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import httpx

from harness.counters import pages
from harness.counters.attribute import Snapshot
from harness.counters.errors import CounterError, MissingSeries, ScrapeError, UnreachableError
from harness.counters.tiers.base import (
    ONE_REQUEST,
    Asked,
    HopelessError,
    HostReading,
    NotYetError,
    Rest,
)
from harness.counters.tiers.registry import COUNTED
from harness.measure.bounded_http import BoundedTransport
from servers.metrics import KV_USAGE, PROCESS_START, VLLM_GAUGES, VLLM_SERIES
from sim.tiers.settings import TierKind

POLL_S = 0.015
"""Pause between two looks while settling. A look that finds all settled takes 7 ms (vLLM alone) or
17 ms (with LMCache), nearly all of it the servers rendering their pages (medians, 2 CPU cores)."""

SCRAPE_TIMEOUT_S = 5.0
"""One GET; a healthy server answers in under 10 ms, so longer means it is stuck."""

LAST_GET_TIMEOUT_S = 0.5
"""Least patience with one GET near a settle's deadline: a slow page is not an unsettled server."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The reading after a request. ``unsettled`` None: every condition held; else which did not.

    ``after`` is None only when the servers could not be read at all; ``unsettled`` then says why.
    ``settle_ms`` None: the wait is that of another request of the pass.
    """

    after: Snapshot | None
    settle_ms: float | None
    unsettled: str | None


@dataclass(slots=True)
class _Progress:
    """What one settle has seen so far."""

    asked: Asked
    rest: Rest | None
    blocks_freed: bool = False


class Scraper:
    """Reads one launch's counters over HTTP. Never follows proxies or redirects.

    ``model_name`` is unique to the launch.
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
        kind: TierKind | None = None,
    ) -> None:
        self._tier = None if kind is None else COUNTED[kind]
        if (lmcache_url is None) == (self._tier is not None and self._tier.has_pages):
            raise ValueError(f"a host tier {kind!r} with lmcache_url {lmcache_url!r}")
        self._vllm_counters = VLLM_SERIES + (self._tier.vllm_series if self._tier else ())
        gauges = self._tier.gauges if self._tier and not self._tier.has_pages else ()
        self._vllm_wanted = (*self._vllm_counters, *VLLM_GAUGES, *gauges, PROCESS_START)
        self._vllm_url = base_url.rstrip("/") + "/metrics"
        self._host_url = None if lmcache_url is None else lmcache_url.rstrip("/")
        self._model_name = model_name
        self._client = httpx.Client(
            trust_env=False,
            headers={"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"},
            transport=BoundedTransport(
                # Loopback http only: an empty trust store refuses TLS and is loaded at once.
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
                trust_env=False,
                # uvicorn closes idle connections after 5 s; drop ours first, or a GET races that.
                limits=httpx.Limits(keepalive_expiry=2.0),
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> Snapshot:
        """One reading of all counters, settled or not. Raises ScrapeError or MissingSeries."""
        vllm, counters = self._of_vllm(timeout_s)
        of_host = self._pages(timeout_s)
        host = None if of_host is None or self._tier is None else self._tier.read(of_host)
        return self._snapshot(vllm, counters, host)

    def read_or_none(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> Snapshot | None:
        """``read``; None where the counters cannot be read."""
        try:
            return self.read(timeout_s)
        except CounterError:
            return None

    def settle(
        self, before: Snapshot | None, *, deadline_s: float, asked: Asked = ONE_REQUEST
    ) -> Settled:
        """Wait until the requests ``asked`` since ``before`` have left no work in the servers.

        ``before`` None: since their start, in which a fresh server has answered exactly one
        request, the launcher's readiness completion. More means the counters are not fresh.

        Then the next request meets a state that does not depend on timing, and the counters are
        final. Never raises for a server's state: what did not hold within ``deadline_s`` seconds is
        ``unsettled``, with one last reading (a second more at most) if the servers still answer.
        ``settle_ms`` is the time until the conditions held or were given up.
        """
        start = time.monotonic()
        end = start + deadline_s
        rest = self._tier.rest(self._model_name, asked) if self._tier else None
        progress = _Progress(asked, rest)
        while True:
            remaining = end - time.monotonic()
            try:
                after = self._settled(
                    before, progress, timeout_s=max(remaining, LAST_GET_TIMEOUT_S)
                )
                return Settled(after, (time.monotonic() - start) * 1e3, None)
            except (UnreachableError, HopelessError, MissingSeries) as error:
                reason = str(error)
                break
            except (CounterError, NotYetError) as error:
                reason = str(error)
            if time.monotonic() + POLL_S >= end:
                break
            time.sleep(POLL_S)
        settle_ms = (time.monotonic() - start) * 1e3
        return Settled(self.read_or_none(LAST_GET_TIMEOUT_S), settle_ms, reason)

    def _pages(self, timeout_s: float) -> pages.HostPages | None:
        if self._host_url is None or self._tier is None:
            return None
        wanted = (*self._tier.host_series, *self._tier.gauges, PROCESS_START)
        get = partial(self._get, timeout_s=timeout_s)
        return pages.HostPages(self._host_url, wanted, self._model_name, get)

    def _settled(
        self, before: Snapshot | None, progress: "_Progress", *, timeout_s: float
    ) -> Snapshot:
        """The settled reading, or NotYetError with the first condition that does not hold."""
        vllm, counters = self._of_vllm(timeout_s)
        self._check_vllm(vllm, counters, before, progress)
        host = None
        if progress.rest is not None:
            known = (before and before.host) or {}
            host = progress.rest.check(vllm, counters, self._pages(timeout_s), known)
        after = self._snapshot(vllm, counters, host)
        if before and before.launch != after.launch:
            raise HopelessError(f"a server was restarted: {before.launch} became {after.launch}")
        return after

    def _check_vllm(
        self,
        samples: pages.Samples,
        counters: Mapping[str, int],
        before: Snapshot | None,
        progress: "_Progress",
    ) -> None:
        finished = counters["finished"]
        finished -= before.vllm["finished"] if before else 0
        progress.asked.check(
            finished,
            what="vLLM's finished requests",
            missing="vLLM has not counted the request as finished",
        )
        where = {"where": self._vllm_url, "model_name": self._model_name}
        running, waiting, usage = (pages.gauge_value(samples, s, **where) for s in VLLM_GAUGES)
        # The gauge is published with step statistics and may lag: zero once after success will do.
        progress.blocks_freed = progress.blocks_freed or usage == 0
        if running or waiting:
            raise NotYetError(f"vLLM has {running:.0f} requests running and {waiting:.0f} waiting")
        if not progress.blocks_freed:
            raise NotYetError(
                f"{KV_USAGE.sample} is {usage:.4f} and was never 0 since the request finished"
            )

    def _snapshot(
        self, vllm: pages.Samples, counters: dict[str, int], host: HostReading | None
    ) -> Snapshot:
        read = {"vllm": vllm, "lmcache": host.samples if host else {}}
        started = [
            f"{who}@{samples[PROCESS_START.sample][0][1]:.2f}"
            for who, samples in read.items()
            if samples.get(PROCESS_START.sample)
        ]
        launch = " ".join([self._model_name, *started])
        return Snapshot(counters, host.counters if host else None, launch)

    def _of_vllm(self, timeout_s: float) -> tuple[pages.Samples, dict[str, int]]:
        """The samples of vLLM's page, and its counters by our names."""
        where, text = self._vllm_url, self._get(self._vllm_url, timeout_s).text
        samples = pages.parse(text, wanted=self._vllm_wanted, where=where)
        found = pages.counts(samples, self._vllm_counters, model_name=self._model_name, where=where)
        found |= pages.others_finished(samples, self._model_name)
        pages.require_split(found, with_host=self._tier is not None, page=text)
        return samples, found

    def _get(self, url: str, timeout_s: float) -> httpx.Response:
        try:
            response = self._client.get(url, timeout=min(timeout_s, SCRAPE_TIMEOUT_S))
        except httpx.ConnectError as error:
            raise UnreachableError(f"GET {url}: {error}") from error
        except httpx.HTTPError as error:
            raise ScrapeError(f"GET {url}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_redirect:
            raise ScrapeError(
                f"GET {url} is redirected to {response.headers.get('location', 'nowhere')!r}: "
                "counters are read from the server itself, never from where it points"
            )
        if response.status_code != 200:
            raise ScrapeError(f"GET {url} answered HTTP {response.status_code}, expected 200")
        if not response.content.strip():
            raise ScrapeError(f"GET {url} answered 200 with an empty page")
        return response
