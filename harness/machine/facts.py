"""What machine this is, for the manifest and the doctor: versions, CPU, memory, GPUs."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from servers.gpu.devices import survey
from servers.gpu.facts import Survey
from sim.units import MIB


def machine_facts() -> dict[str, Any]:
    """Facts of this machine and of the checkout the code runs from; None where unknown."""
    root = str(Path(__file__).parents[2])
    found = survey()
    # Run folders do not change what is measured.
    changes = _git("-C", root, "status", "--porcelain", "--", ".", ":!results")
    return {
        "kvcliff": _kvcliff_version(),
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_at_start": os.getloadavg()[0],
        "gpus": gpu_names(found),
        "gpu_driver": found.driver,
        "gpu_cuda": found.cuda,
    }


def _kvcliff_version() -> str:
    try:
        return version("kvcliff")
    except PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> str | None:
    """One git answer about the checkout this code runs from; None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def gpu_names(found: Survey) -> list[str] | None:
    """Name, driver and memory of every NVIDIA GPU, in PCI order; None when none is listed."""
    return [
        f"{gpu.name or 'unknown GPU'}, {found.driver or 'unknown driver'}, "
        + ("unknown" if (total := gpu.state.memory.total_bytes) is None else f"{total // MIB}")
        + " MiB"
        for gpu in found.gpus
    ] or None
