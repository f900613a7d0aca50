"""The series and log lines of host tiers inside vLLM, from the installed classes that make them.

The connectors need a GPU to copy; everything that counts runs here: vLLM's scheduler with the
scheduler half of its offloading and the classes that publish its stats, LMCache's whole engine
with its internal API over HTTP.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness.counters.pages import counts, gauge_values, parse
from harness.counters.tiers.lmcache import RESIDENT
from harness.counters.tiers.registry import COUNTED
from harness.measure.settle import Scraper
from servers.arms import Arm, ServerSpec
from servers.child import ServerLog
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec
from servers.launch import Running
from servers.metrics import Series
from servers.probe import probe
from servers.tiers.base import HostTier
from sim.tiers.host import align_up
from sim.tiers.spec import TierSpec
from tests.live.differential import lmcache_inprocess, native_offload
from tests.live.differential.engines import vllm_scheduling
from tests.live.differential.schedulers import Engine
from tests.live.differential.workloads import BYTES_PER_TOKEN, Case, Step, random_case

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "lmcache")),
        reason="no vLLM with LMCache here: `make setup` installs an engine build",
    ),
    # The engines' own warnings, raised whenever they import something, are theirs.
    pytest.mark.filterwarnings("ignore"),
]

NATIVE_SERIES = COUNTED["native"].vllm_series
SIMPLE_SERIES = COUNTED["simple"].vllm_series
LABELS = ["model_name", "engine"]


class Published:
    """One connector's Prometheus classes on a registry of their own, and the page they give."""

    def __init__(self, metrics_class: Any) -> None:
        self._registry = CollectorRegistry()
        kinds = {
            kind: functools.partial(kind, registry=self._registry)
            for kind in (Gauge, Counter, Histogram)
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 1})
        )
        self._metrics = metrics_class(config, kinds, LABELS, {0: ["m", "0"]})

    def observe(self, stats: dict[str, Any] | None) -> None:
        """What a step published, as ``PrometheusStatLogger.record`` passes it on."""
        if stats is not None:
            self._metrics.observe(stats, 0)

    def page(self) -> str:
        return generate_latest(self._registry).decode()

    def counted(self, series: tuple[Series, ...]) -> dict[str, int]:
        samples = parse(self.page(), wanted=series, where="page")
        return counts(samples, series, model_name="m", where="page")

    def gauges(self, kind: Any) -> dict[str, float]:
        gauges = COUNTED[kind].gauges
        return gauge_values(parse(self.page(), wanted=gauges, where="page"), gauges, "m")


class CountedCopies(native_offload.OffloadWorker):
    """The played worker, reporting bytes and seconds of each copy as a real one does."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._jobs: Any = engine.scheduler.connector.connector_scheduler
        self._chunk_bytes = engine.case.tiers.chunk_tokens * BYTES_PER_TOKEN
        self.n_loaded_chunks = 0

    def run(self, scheduled: Any) -> Any:
        output = super().run(scheduled)
        report = output.kv_connector_worker_meta
        for job in report.completed_jobs if report else ():
            # A job that is stored in the step that opened it is known after this step only.
            status = self._jobs._jobs[job]
            stats = report.transfer_stats
            (stats.store if status.is_store else stats.load).record(
                len(status.keys) * self._chunk_bytes, 0.002
            )
            self.n_loaded_chunks += 0 if status.is_store else len(status.keys)
        return output


def native_engine(case: Case) -> tuple[Engine, CountedCopies, Published]:
    """vLLM's scheduler with its OffloadingConnector, each step's stats on a page."""
    metrics = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
    )
    vllm_scheduling()
    published = Published(metrics.OffloadPromMetrics)
    assert case.tiers.host_chunks is not None
    chunk_bytes = -(-case.tiers.chunk_tokens * BYTES_PER_TOKEN // 4096) * 4096
    engine = Engine(
        case,
        kv_transfer={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"kvcliff-series-{os.getpid()}-{case.seed}",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": case.tiers.host_chunks * chunk_bytes,
                "blocks_per_chunk": case.tiers.chunk_tokens // case.tiers.block_size,
            },
        },
    )
    worker = CountedCopies(engine)
    engine.worker = worker
    made = engine.scheduler.make_stats

    def make_stats(*args: Any, **named: Any) -> Any:
        stats = made(*args, **named)
        published.observe(stats.kv_connector_stats)
        return stats

    engine.scheduler.make_stats = make_stats
    return engine, worker, published


def test_vllm_publishes_all_of_a_requests_copies_before_it_goes_idle() -> None:
    # So a settle that waits for the gauges waits for milliseconds, not for the next request.
    loads = stores = 0
    for seed in range(12):
        engine, worker, published = native_engine(random_case(seed, "native"))
        for step in engine.case.steps:
            before, loaded_before = published.counted(NATIVE_SERIES), worker.n_loaded_chunks
            outcome = engine.serve(step)
            after = published.counted(NATIVE_SERIES)
            unit = engine.case.tiers.chunk_tokens * BYTES_PER_TOKEN
            loaded = worker.n_loaded_chunks - loaded_before
            assert after["native_load_bytes"] - before["native_load_bytes"] == loaded * unit
            assert (after["native_load_ns"] > before["native_load_ns"]) == (loaded > 0)
            assert (outcome.host_loaded > 0) == (loaded > 0)
            stored = after["native_store_bytes"] - before["native_store_bytes"]
            if after["native_alloc_failures"] == 0:
                assert stored == outcome.stored_chunks * unit
            assert set(published.gauges("native").values()) == {0.0}
            loads, stores = loads + (loaded > 0), stores + (stored > 0)
    assert (loads > 20, stores > 100) == (True, True)


def test_vllms_native_series_appear_with_their_first_value() -> None:
    metrics = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
    )
    published = Published(metrics.OffloadPromMetrics)
    for series in NATIVE_SERIES:
        assert f"\n{series.sample}{{" not in published.page()
    assert "\nvllm:kv_offload_total_bytes_total{" in published.page()
    stats = metrics.OffloadingConnectorStats()
    for series in NATIVE_SERIES:
        stats.increase_counter(series.sample.removesuffix("_total"), 2)
    published.observe(stats.data)
    assert published.counted(NATIVE_SERIES) == {
        "native_load_bytes": 2,
        "native_load_ns": 2 * 10**9,
        "native_store_bytes": 2,
        "native_alloc_failures": 2,
    }


def test_vllms_simple_offload_counts_blocks_under_the_names_we_read() -> None:
    metrics = importlib.import_module("vllm.v1.simple_kv_offload.metrics")
    published = Published(metrics.SimpleCPUOffloadPromMetrics)
    assert published.counted(SIMPLE_SERIES) == {"simple_load_blocks": 0}
    stats, names = metrics.SimpleCPUOffloadStats(), metrics.MetricName
    stats.increase_counter(names.LOAD_BLOCKS, 3)
    stats.set_gauge(names.PENDING_STORE_BLOCKS, 5)
    stats.set_gauge(names.INFO, 1, ("cpu", "false", "false", "96"))
    published.observe(stats.data)
    assert published.counted(SIMPLE_SERIES) == {"simple_load_blocks": 3}
    assert published.gauges("simple") == {"vllm:simple_kv_offload_pending_store_blocks": 5.0}
    assert 'vllm:simple_kv_offload_info{backend="cpu",capacity_blocks="96"' in published.page()


@pytest.mark.parametrize("kind", ["native", "simple"])
def test_the_loopback_server_has_no_series_the_real_classes_have_not(kind: Any) -> None:
    names = {
        "native": ("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics", "Offload"),
        "simple": ("vllm.v1.simple_kv_offload.metrics", "SimpleCPUOffload"),
    }
    module, prefix = names[kind]
    real = Published(getattr(importlib.import_module(module), f"{prefix}PromMetrics"))
    families = {metric.name for metric in real._registry.collect()}
    spec = FakeSpec(model_name="m", num_gpu_blocks=6, host_kind=kind, host_chunks=40,
                    chunk_tokens=32)  # fmt: skip
    with FakeServer(spec) as fake:
        for first in (100, 300, 100):
            body = {"model": "m", "prompt": list(range(first, first + 150)), "max_tokens": 2}
            httpx.post(f"{fake.base_url}/v1/completions", json=body, trust_env=False)
        lines = httpx.get(f"{fake.base_url}/metrics", trust_env=False).text.split("\n")
    ours = {line.partition("{")[0] for line in lines if line.startswith(("vllm:kv_offload",
            "vllm:simple_"))}  # fmt: skip
    ours = {name for name in ours if not name.endswith("_created")}
    assert len(ours) >= 4
    assert {name.removesuffix("_total") for name in ours} <= families


# --- LMCache inside vLLM

CHUNK, CAPACITY = 8, 6
TIERS = TierSpec(
    block_size=4, num_gpu_blocks=10, max_num_batched_tokens=10**6, host="lmcache",
    host_chunks=CAPACITY, chunk_tokens=CHUNK,
)  # fmt: skip
FIRST, SECOND = tuple(range(20)), tuple(range(100, 130))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, str]]:
    """An engine with LMCache in it, and where the worker's internal API answers."""
    lmcache_inprocess._lmcache()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As servers are started: by environment. The worker's port is one above the first.
    for name, value in {
        "CHUNK_SIZE": CHUNK,
        "LOCAL_CPU": True,
        "MAX_LOCAL_CPU_SIZE": CAPACITY * align_up(CHUNK * BYTES_PER_TOKEN) / 2**30,
        "CACHE_POLICY": "LRU",
        "INTERNAL_API_SERVER_ENABLED": True,
        "INTERNAL_API_SERVER_PORT_START": port - 1,
        "INTERNAL_API_SERVER_INCLUDE_INDEX_LIST": 1,
    }.items():
        monkeypatch.setenv(f"LMCACHE_{name}", str(value))
    with ExitStack() as stack:
        engine = Engine(
            Case(1, TIERS, ()),
            kv_transfer={
                "kv_connector": "LMCacheConnectorV1",
                "kv_role": "kv_both",
                "engine_id": f"kvcliff-api-{os.getpid()}",
            },
        )
        stack.callback(engine.scheduler.connector._lmcache_engine.shutdown)
        worker = stack.enter_context(closing(lmcache_inprocess.InProcessWorker(engine)))
        engine.worker = worker
        url = f"http://127.0.0.1:{port}"
        await_answer(f"{url}/version")
        yield engine, url


def await_answer(url: str) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            assert httpx.get(url, trust_env=False).status_code == 200
        except httpx.ConnectError:
            assert time.monotonic() < until, "the internal API never answered"
        else:
            return


def test_lmcache_in_process_is_read_over_its_internal_api_right_after_each_request(
    in_process: tuple[Engine, str], tmp_path: Path
) -> None:
    engine, url = in_process
    name = engine.config.model_config.served_model_name
    gib = CAPACITY * align_up(CHUNK * BYTES_PER_TOKEN) / 2**30
    spec = FakeSpec(
        model_name=name, block_size=4, num_gpu_blocks=10, host_kind="lmcache",
        host_chunks=CAPACITY, chunk_tokens=CHUNK, chunk_bytes=CHUNK * BYTES_PER_TOKEN,
    )  # fmt: skip
    # vLLM's own pages are the loopback server's here; LMCache's are the real ones.
    with (
        FakeServer(spec) as fake,
        Scraper(fake.base_url, lmcache_url=url, model_name=name, kind="lmcache")
        as scraper,
    ):  # fmt: skip
        resident = []
        for prompt in (FIRST, FIRST, SECOND, FIRST):
            engine.serve(Step(prompt, (0, 1)))
            snapshot = scraper.read()
            resident.append((snapshot.host, len(engine.worker.chunks())))
        (tmp_path / "vllm.log").touch()
        running = Running(
            base_url=fake.base_url, lmcache_url=url, model_name=name, commands=(),
            logs={"vllm": ServerLog(tmp_path / "vllm.log", start=0)}, start_s=1.0,
        )  # fmt: skip
        server = ServerSpec("fake", "owner/m", 4, 10, 2048, 4096, "float32")
        facts = probe(running, Arm("lmcache", server, HostTier(gib, "lmcache", chunk_tokens=CHUNK)))
    # 20 tokens are 2 chunks, 30 are 3; nothing is evicted from 6.
    assert resident == [({RESIDENT: n}, n) for n in (2, 2, 5, 5)]
    assert (facts.chunk_tokens, facts.policy) == (CHUNK, "LRU")
    assert facts.host_bytes == CAPACITY * align_up(CHUNK * BYTES_PER_TOKEN)
    assert facts.unlike_modelled == ()
    assert facts.lmcache_version is not None


# --- log lines


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "Creating v1 connector with name: %s",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector",
            "Initializing native LMCache connector",
        ),
        ("lmcache.v1.manager", "System will operate in degraded mode"),
        ("lmcache.v1.gpu_connector", "No supported {torch_device_type} connector found"),
    ],
)
def test_the_log_lines_the_probe_looks_for_are_in_the_installed_engines(
    module: str, line: str
) -> None:
    assert line in inspect.getsource(importlib.import_module(module))
