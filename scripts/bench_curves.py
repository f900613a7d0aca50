"""Measures the exact curves against their bars and against other simulators, in one run.

    python -m scripts.bench_curves [--traces DIR] [--sweep-points 30] [--out results/bench_curves.json]
    python -m scripts.bench_curves [--traces DIR] --figures results

Times are CPU seconds of one thread, the best of several; where a whole process is timed, wall
seconds. The real trace is the agentic sessions in DIR, started over 24 h by a seeded spread; parts
whose trace or peer is absent are left out and said so. libcachesim (GPLv3) is never used.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.charting import save
from harness.traces.curve import run_curve
from harness.traces.load import TraceOptions, load
from harness.traces.plots import cliff, heat_map
from harness.traces.serving import Serving
from harness.traces.surface import run_surface
from sim.curves import compiled
from sim.curves.convert import lookup_events
from sim.curves.readers import read_trace
from sim.curves.sources import sources
from sim.curves.stack import curve
from sim.curves.synthetic import chat_trace
from sim.curves.tiers import Replay
from sim.curves.trace import Trace
from sim.curves.tree import PrefixTree, build_tree
from sim.tiers.settings import HostSettings

SYNTHETIC_ACCESSES = 4_000_000
AGENTIC = "weka_sessions.tar.xz"
SPREAD_S = 24 * 3600.0
KV_BYTES_PER_CHUNK = 2 * 2**20  # 16 tokens of 128 KiB: the sweep's 0.5–500 GiB span the trace
COLD = "from harness.cli import main; main()"
"""The whole command line, as installed."""


def cpu_s(job: Callable[[], Any], repeats: int = 5) -> float:
    """Least CPU seconds of ``job`` over some repeats, after one that is not counted."""
    job()
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        job()
        times.append(time.process_time() - start)
    return min(times)


class Report:
    """Figures with their bars, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.missing: list[str] = []

    def add(
        self, name: str, value: float, unit: str, bar: str = "", ok: bool | None = None
    ) -> None:
        """One figure; ``bar`` says what it must be, ``ok`` whether it is."""
        self.rows.append({"name": name, "value": value, "unit": unit, "bar": bar, "ok": ok})
        mark = {True: "ok", False: "BELOW THE BAR", None: ""}[ok]
        print(f"{name:<66} {value:>12,.4g} {unit:<14} {bar:<34} {mark}".rstrip(), flush=True)

    def skip(self, what: str) -> None:
        """Something that could not be measured here."""
        self.missing.append(what)
        print(f"not measured: {what}", flush=True)


def curves(report: Report, name: str, trace: Trace, *, has_bars: bool) -> tuple[PrefixTree, float]:
    """From raw ids and from the tree, compiled and plain; returns the tree and the curve's time."""
    n = len(trace.ids)
    wide = trace.ids.astype(np.int64)
    read = min(cpu_s(trace.ids.sum), cpu_s(wide.sum))
    del wide
    report.add(f"{name}: ids.sum() over {n:,} ids", n / read / 1e6, "M ids/s")
    tree = build_tree(trace, compiled=True)
    order = tree.requests.order()
    numba = cpu_s(lambda: curve(tree, order=order, compiled=True), 15)
    build = cpu_s(lambda: build_tree(trace, compiled=True))
    rate = n / (build + numba)
    report.add(f"{name}: whole curve from raw ids, numba", rate / 1e6, "M acc/s",
               "≥ 300, or ≥ 1/15 of ids.sum()",
               rate >= min(300e6, n / read / 15))  # fmt: skip
    plain = cpu_s(lambda: curve(tree, order=order, compiled=False), 2)
    plain += cpu_s(lambda: build_tree(trace, compiled=False), 2)
    report.add(f"{name}: whole curve from raw ids, numpy only", n / plain / 1e6, "M acc/s",
               "≥ 10", n / plain >= 10e6)  # fmt: skip
    report.add(f"{name}: whole curve from the compiled tree", numba * 1e3, "ms")
    report.add(f"{name}: that ÷ reading the ids once", numba / read, "×", "≤ 1" if has_bars else "",
               numba <= read if has_bars else None)  # fmt: skip
    replay = Replay.of(tree, order=order, compiled=True)
    size, settings = tree.n_blocks // 2, HostSettings(chunk_tokens=tree.requests.block_tokens)
    gpu = cpu_s(lambda: replay.lru(size, settings.chunk_tokens, is_gpu=True))
    host = cpu_s(lambda: replay.watermark(size, settings))
    report.add(f"{name}: surface, a GPU size", gpu * 1e3, "ms")
    report.add(f"{name}: surface, a size of LMCache's server", host * 1e3, "ms")
    return tree, numba


def memory(report: Report, name: str, trace: Trace, tree: PrefixTree) -> None:
    """Most bytes held at one time from raw ids to curve, per distinct block; the file's size."""
    tracemalloc.start()
    curve(build_tree(trace, compiled=True), compiled=True)
    peak = tracemalloc.get_traced_memory()[1] / tree.n_blocks
    tracemalloc.stop()
    report.add(
        f"{name}: memory, raw ids to curve, the ids apart", peak, "B a block", "≤ 16", peak <= 16
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{compiled.SUFFIX}"
        compiled.save(tree, path)
        size = path.stat().st_size / tree.n_accesses
        report.add(f"{name}: compiled file", size, "B an access", "≤ 0.05", size <= 0.05)
        loading = cpu_s(lambda: compiled.load(path))
    report.add(f"{name}: loading the compiled file", loading * 1e3, "ms")


def lmcache_sweep(
    report: Report, name: str, tree: PrefixTree, ours: tuple[str, float], points: int
) -> None:
    """LMCache's own sweep over the same trace; its hits must be those of our forward curve.

    ``ours``: what its time is divided by, and the seconds of that. The bar is that of a trace of
    4 M accesses or more.
    """
    if importlib.util.find_spec("lmcache") is None:
        report.skip("LMCache's cache simulator: lmcache is not installed")
        return
    with contextlib.redirect_stderr(io.StringIO()):
        simulator = importlib.import_module("lmcache.tools.cache_simulator.simulator")
        plot = importlib.import_module("lmcache.tools.cache_simulator.plot_hit_rate")
    chunk = tree.requests.block_tokens
    events = list(lookup_events(tree, tree.requests.order(), chunk))
    forward = curve(tree, forward=True)
    capacities = plot.capacity_range_bytes(0.5, 500.0, 30)
    shown = capacities[:: -(-30 // points)]
    spent, wrong = 0.0, 0
    for capacity in shown:
        start = time.process_time()
        found = simulator.simulate(events, capacity, KV_BYTES_PER_CHUNK, fast=True)
        spent += time.process_time() - start
        blocks = max(1, capacity // KV_BYTES_PER_CHUNK)
        wrong += found["total_hit_tokens"] != forward.at(blocks) * chunk
    sweep = spent / len(shown) * 30
    said = "" if len(shown) == 30 else f" ({len(shown)} measured, scaled)"
    report.add(f"{name}: LMCache, default 30-point sweep{said}", sweep, "s")
    report.add(
        f"{name}: points where it disagrees with our forward curve", wrong, "", "0", not wrong
    )
    ratio = sweep / ours[1]
    is_large = tree.n_accesses >= SYNTHETIC_ACCESSES
    report.add(f"{name}: LMCache's sweep ÷ our {ours[0]}", ratio, "×",
               "≥ 1,000" if is_large else "", ratio >= 1000 if is_large else None)  # fmt: skip


def kvcache_simulator(report: Report, name: str, trace: Trace, ours_s: float) -> None:
    """One capacity of kvcache-simulator's C++ core, CPU seconds of its process."""
    if importlib.util.find_spec("kvcache_sim") is None:
        report.skip("kvcache-simulator: not installed (pip install kvcache-simulator==0.1.3)")
        return
    backend = importlib.import_module("kvcache_sim.cpp_backend")
    data = importlib.import_module("kvcache_sim.trace").TraceData(
        trace.ids.tolist(), [trace.requests.block_tokens] * len(trace.ids),
        trace.offsets.tolist(), trace.requests.block_tokens, len(trace.requests), 0, 0, 0.0, 0, 0,
    )  # fmt: skip
    try:
        backend.ensure_cpp_simulator()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        report.skip(f"kvcache-simulator: {error}")
        return
    capacity = build_tree(trace).n_blocks // 4
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    backend.run_cpp_sweep(data, capacities=[capacity], policies=["lru"], warmup_requests=0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report.add(f"{name}: kvcache-simulator, one capacity", spent, "s")
    report.add(f"{name}: that ÷ our whole curve", spent / ours_s, "×")


def ingest(report: Report, path: str) -> None:
    """Block ids a second from JSON in memory, against orjson and json on the same bytes."""
    files = list(sources(path))
    texts = [text for _, text in files]
    trace = read_trace(path, files=files, compiled=True)
    counted = len(trace.ids)
    ours = cpu_s(lambda: read_trace(path, files=files, compiled=True), 4)
    sample = texts[:: max(len(texts) // 30, 1)]
    share = sum(map(len, sample)) / sum(map(len, texts))
    rates = {"json": counted * share / cpu_s(lambda: [json.loads(t) for t in sample], 1)}
    if importlib.util.find_spec("orjson") is not None:
        loads = importlib.import_module("orjson").loads
        rates["orjson"] = counted * share / cpu_s(lambda: [loads(t) for t in sample], 1)
    else:
        report.skip("orjson: not installed")
    rate = counted / ours
    for name, other in rates.items():
        report.add(f"JSON ingest, {name} (bytes to objects)", other / 1e6, "M ids/s")
    best = rate / rates.get("orjson", np.inf)
    report.add("JSON ingest, ours (bytes to trace)", rate / 1e6, "M ids/s", "≥ 80, or ≥ 8 × orjson",
               rate >= 80e6 or best >= 8)  # fmt: skip
    for name, other in rates.items():
        report.add(f"JSON ingest, ours ÷ {name}", rate / other, "×")


def cold_plot(report: Report, mooncake: Path) -> float:
    """A fresh `kvcliff curve TRACE --plot FILE.png`, imports included, best of five; CPU seconds."""
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", COLD, "curve", str(mooncake),
                 "--plot", str(Path(folder) / "c.png")],
                check=True, cwd=Path(__file__).parents[1], capture_output=True,
            )  # fmt: skip
            walls.append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    report.add(
        "Mooncake JSONL → PNG, a fresh kvcliff", min(walls), "s wall", "≤ 2", min(walls) <= 2
    )
    report.add("the same", min(cpus), "s CPU")
    return min(cpus)


def figures(folder: Path, agentic: Path) -> None:
    """The real trace's cliff and surface, and the JSON with what the README says of them."""
    loaded = load(str(agentic), TraceOptions(spread_hours=SPREAD_S / 3600))
    shown = run_curve(loaded, Serving(), at="200k tokens,1M tokens", targets=(0.5, 0.8, 0.9, 0.95))
    save(cliff(shown), folder / "real-cliff.png")
    pairs = run_surface(loaded, Serving(), gpu="20k tokens..20M tokens:60",
                        host="20k tokens..20M tokens:60", chunk_tokens=256)  # fmt: skip
    save(heat_map(pairs), folder / "real-surface.png")
    both = run_surface(loaded, Serving(), gpu="200k tokens", host="2M tokens", chunk_tokens=256)
    text = json.dumps(shown.json | {"with_host": both.json}, indent=1, ensure_ascii=False)
    (folder / "real-curve.json").write_text(text + "\n", "utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    versions = {}
    for name in ("numpy", "numba", "lmcache", "kvcache-simulator", "orjson", "vl-convert-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(),
            "load": os.getloadavg()[0], "versions": versions}  # fmt: skip


def main() -> int:
    """Run everything that can be run here, print it, write the file; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVCLIFF_TRACES"))
    parser.add_argument("--sweep-points", type=int, default=30, choices=range(1, 31), metavar="N",
                        help="points of LMCache's sweep to measure; fewer are scaled to 30")  # fmt: skip
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="only draw the real trace there"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.figures:
        if given.traces is None:
            parser.error("the figures need the real traces: give --traces or set KVCLIFF_TRACES")
        figures(given.figures, Path(given.traces) / AGENTIC)
        return 0
    report, about = Report(), machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}; {about['versions']}")
    trace = chat_trace(1, n_accesses=SYNTHETIC_ACCESSES)
    tree, ours = curves(report, "synthetic", trace, has_bars=False)
    lmcache_sweep(report, "synthetic", tree, ("whole curve", ours), given.sweep_points)
    kvcache_simulator(report, "synthetic", trace, ours)
    if given.traces is None:
        report.skip("the real traces: give --traces or set KVCLIFF_TRACES")
    else:
        _real(report, Path(given.traces))
    if given.out:
        content = {"schema": 1, "machine": about, "figures": report.rows,
                   "not_measured": report.missing}  # fmt: skip
        given.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return int(any(row["ok"] is False for row in report.rows))


def _real(report: Report, folder: Path) -> None:
    agentic, mooncake = folder / AGENTIC, folder / "mooncake_conversation.jsonl"
    if mooncake.exists():
        cold_s = cold_plot(report, mooncake)
        small = build_tree(read_trace(str(mooncake)))
        lmcache_sweep(report, "Mooncake", small, ("process from JSONL to PNG", cold_s), 30)
    if not agentic.exists():
        report.skip(f"the agentic sessions: no {agentic.name}")
        return
    ingest(report, str(agentic))
    trace = read_trace(str(agentic), compiled=True)
    trace = Trace(trace.requests.started_over(SPREAD_S, 0), trace.ids, trace.offsets)
    tree, ours = curves(report, "real", trace, has_bars=True)
    memory(report, "real", trace, tree)
    kvcache_simulator(report, "real", trace, ours)


if __name__ == "__main__":
    sys.exit(main())
