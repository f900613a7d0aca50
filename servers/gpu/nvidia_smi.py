"""GPUs as ``nvidia-smi`` prints them: used where NVML cannot be loaded.

Its answers are text: ``[N/A]``, ``[Not Supported]``, ``[Insufficient Permissions]``, ``[Unknown
Error]``, ``ERR!`` and whatever comes next stand where a number is expected. Anything but a plain
number is unknown. One field a driver does not know makes the whole query fail, so fields are asked
in groups, and a group that fails leaves its facts unknown.
"""

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from servers.gpu.facts import (
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuState,
    MigInstance,
    Survey,
    reason_words,
)
from servers.gpu.nvml import in_pci_order, visible_pid
from sim.units import MIB

_TIMEOUT_S: Final = 20.0
_UUID: Final = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F/-]+|MIG-GPU-[0-9a-fA-F/-]+")

_MEMORY: Final = ("memory.total", "memory.used", "memory.free")
_CSV: Final = "--format=csv,noheader,nounits"
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

Ask = Callable[[Sequence[str]], str | None]
"""Runs ``nvidia-smi`` with these arguments; its output, None when it fails."""
Table = dict[str, dict[str, str]]
"""By GPU UUID: field → text."""


def _text(value: str) -> str | None:
    """A value that is no ``[message]``."""
    return None if not value or value.startswith("[") or value in ("N/A", "ERR!") else value


def _int(value: str) -> int | None:
    return int(value) if re.fullmatch("[0-9]+", value) else None


def _float(value: str) -> float | None:
    return float(value) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) else None


def _positive(value: str) -> int | None:
    return _int(value) or None


def _switch(value: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(value)


def _from_mib(value: str) -> int | None:
    mib = _int(value)
    return None if mib is None else mib * MIB


Fields = dict[str, tuple[str, Callable[[str], Any]]]
"""Each field to ask for in one query: what of a GpuState or Gpu it is, and how it is read."""

_WORK: Final[Fields] = {
    "clocks.sm": ("sm_mhz", _positive),
    "clocks.mem": ("memory_mhz", _positive),
    "temperature.gpu": ("temperature_c", _int),
    "power.draw": ("power_w", _float),
    "pcie.link.gen.current": ("pcie_generation", _positive),
    "pcie.link.width.current": ("pcie_width", _positive),
}
_FIXED: Final[Fields] = {
    "pci.bus_id": ("pci_bus_id", _text),
    "clocks.max.sm": ("sm_mhz_max", _positive),
    "clocks.max.mem": ("memory_mhz_max", _positive),
    "pcie.link.gen.max": ("pcie_generation_max", _positive),
    "pcie.link.width.max": ("pcie_width_max", _positive),
    "power.limit": ("power_limit_w", _float),
    "ecc.mode.current": ("ecc_enabled", _switch),
    "persistence_mode": ("persistence_enabled", _switch),
}
# Each was added, or renamed, at some driver version, so each is a query of its own.
_ALONE: Final[Fields] = {
    "name": ("name", _text),
    "compute_cap": ("compute_capability", _text),
    "mig.mode.current": ("mig_enabled", _switch),
}


def ask_nvidia_smi(arguments: Sequence[str]) -> str | None:
    """Its output; None when it is not there, fails, or does not answer within 20 s."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def survey_by_nvidia_smi(ask: Ask = ask_nvidia_smi) -> Survey:
    """Every GPU with what it says of each, or a Survey of none that says why."""
    table = _query(ask, _MEMORY)
    if not table:
        return Survey(None, why_not="nvidia-smi does not answer, or lists no GPU")
    _merge(table, _query(ask, _WORK), _query(ask, _FIXED), _reasons(ask))
    _merge(table, *(_query(ask, (field,)) for field in ("driver_version", *_ALONE)))
    instances, processes = parse_list(ask(["-L"]) or ""), _processes(ask)
    gpus = []
    for index, (uuid, row) in enumerate(table.items()):
        facts = _facts(row, _FIXED | _ALONE)
        mig = instances.get(uuid) if facts["mig_enabled"] else ()
        busy = None if processes is None else processes.get(uuid, ())
        gpus.append(Gpu(index, uuid, mig=mig, processes=busy, state=_state(row), **facts))
    version = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", ask(["--version"]) or "")
    driver = next((_text(row.get("driver_version", "")) for row in table.values()), None)
    return Survey("nvidia-smi", in_pci_order(gpus), driver, version[1] if version else None)


def states_by_nvidia_smi(ask: Ask = ask_nvidia_smi) -> dict[str, GpuState]:
    """The state of every GPU it lists, by UUID; empty when it does not answer."""
    table = _query(ask, _MEMORY)
    if table:
        _merge(table, _query(ask, _WORK), _reasons(ask))
    return {uuid: _state(row) for uuid, row in table.items()}


def parse_table(text: str, fields: Collection[str]) -> Table:
    """``uuid, value, …`` a line. A line of the wrong length keeps its UUID and no values.

    A single field is everything after the UUID: a name may hold a comma. Lines that do not start
    with a UUID are messages.
    """
    table: Table = {}
    for line in text.splitlines():
        uuid, comma, rest = line.partition(",")
        if not comma or not _UUID.fullmatch(uuid.strip()):
            continue
        values = [rest] if len(fields) == 1 else rest.split(",")
        row = zip(fields, values, strict=True) if len(values) == len(fields) else ()
        table[uuid.strip()] = {field: value.strip() for field, value in row}
    return table


def parse_list(text: str) -> dict[str, tuple[MigInstance, ...]]:
    """MIG instances by GPU UUID, from ``nvidia-smi -L``; their memory is not in it."""
    found: dict[str, list[MigInstance]] = {}
    for is_gpu, uuid in re.findall(r"(?m)^(GPU)?.*?\(UUID:\s*([^)\s]+)\)", text):
        if is_gpu:
            instances = found[uuid] = []
        elif found and uuid.startswith("MIG-"):
            instances.append(MigInstance(uuid))
    return {uuid: tuple(instances) for uuid, instances in found.items()}


def _query(ask: Ask, fields: Collection[str]) -> Table:
    query = f"--query-gpu={','.join(('uuid', *fields))}"
    return parse_table(ask([query, _CSV]) or "", fields)


def _reasons(ask: Ask) -> Table:
    """Under the name this driver knows; the key is the newer one."""
    for field in _REASONS:
        if table := _query(ask, (field,)):
            return {uuid: {_REASONS[0]: row.get(field, "")} for uuid, row in table.items()}
    return {}


def _merge(table: Table, *others: Table) -> None:
    for uuid, row in table.items():
        for other in others:
            row |= other.get(uuid, {})


def _facts(row: dict[str, str], fields: Fields) -> dict[str, Any]:
    return {fact: read(row.get(field, "")) for field, (fact, read) in fields.items()}


def _state(row: dict[str, str]) -> GpuState:
    total, used, free = (_from_mib(row.get(field, "")) for field in _MEMORY)
    bits = row.get(_REASONS[0], "")
    return GpuState(
        memory=GpuMemory(total, used, free) if total else GpuMemory(),
        throttle=reason_words(int(bits, 16)) if re.fullmatch("0x[0-9a-fA-F]+", bits) else None,
        **_facts(row, _WORK),
    )


def _processes(ask: Ask) -> dict[str, tuple[GpuProcess, ...]] | None:
    text = ask(["--query-compute-apps=gpu_uuid,pid,used_memory", _CSV])
    if text is None:
        return None
    found: dict[str, list[GpuProcess]] = defaultdict(list)
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and _UUID.fullmatch(parts[0]):
            pid = _int(parts[1])
            seen = None if pid is None else visible_pid(pid)
            found[parts[0]].append(GpuProcess(seen, _from_mib(parts[2])))
    return {uuid: tuple(some) for uuid, some in found.items()}
