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
from collections.abc import Callable, Sequence
from typing import Final

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
_WORK: Final = (
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)
_FIXED: Final = (
    "pci.bus_id",
    "clocks.max.sm",
    "clocks.max.mem",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "power.limit",
    "ecc.mode.current",
    "persistence_mode",
)
# Each was added, or renamed, at some driver version.
_ALONE: Final = ("name", "driver_version", "compute_cap", "mig.mode.current")
_CSV: Final = "--format=csv,noheader,nounits"
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

Ask = Callable[[Sequence[str]], str | None]
"""Runs ``nvidia-smi`` with these arguments; its output, None when it fails."""
Table = dict[str, dict[str, str]]
"""By GPU UUID: field → text."""


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
    _merge(table, *(_query(ask, (field,)) for field in _ALONE))
    instances, processes = parse_list(ask(["-L"]) or ""), _processes(ask)
    gpus = [
        _gpu(index, uuid, row, instances.get(uuid), processes)
        for index, (uuid, row) in enumerate(table.items())
    ]
    version = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", ask(["--version"]) or "")
    driver = next((_text(row.get("driver_version")) for row in table.values()), None)
    return Survey("nvidia-smi", in_pci_order(gpus), driver, version[1] if version else None)


def states_by_nvidia_smi(ask: Ask = ask_nvidia_smi) -> dict[str, GpuState]:
    """The state of every GPU it lists, by UUID; empty when it does not answer."""
    table = _query(ask, _MEMORY)
    if table:
        _merge(table, _query(ask, _WORK), _reasons(ask))
    return {uuid: _state(row) for uuid, row in table.items()}


def parse_table(text: str, fields: Sequence[str]) -> Table:
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


def _query(ask: Ask, fields: Sequence[str]) -> Table:
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


def _gpu(
    index: int,
    uuid: str,
    row: dict[str, str],
    instances: tuple[MigInstance, ...] | None,
    processes: dict[str, tuple[GpuProcess, ...]] | None,
) -> Gpu:
    mig = _switch(row.get("mig.mode.current"))
    return Gpu(
        index,
        uuid,
        name=_text(row.get("name")),
        pci_bus_id=_text(row.get("pci.bus_id")),
        compute_capability=_text(row.get("compute_cap")),
        mig_enabled=mig,
        mig=instances if mig else (),
        pcie_generation_max=_positive(row.get("pcie.link.gen.max")),
        pcie_width_max=_positive(row.get("pcie.link.width.max")),
        sm_mhz_max=_positive(row.get("clocks.max.sm")),
        memory_mhz_max=_positive(row.get("clocks.max.mem")),
        power_limit_w=_float(row.get("power.limit")),
        ecc_enabled=_switch(row.get("ecc.mode.current")),
        persistence_enabled=_switch(row.get("persistence_mode")),
        processes=None if processes is None else processes.get(uuid, ()),
        state=_state(row),
    )


def _state(row: dict[str, str]) -> GpuState:
    total, used, free = (_from_mib(row.get(field)) for field in _MEMORY)
    bits = row.get(_REASONS[0], "")
    return GpuState(
        memory=GpuMemory(total, used, free) if total else GpuMemory(),
        sm_mhz=_positive(row.get("clocks.sm")),
        memory_mhz=_positive(row.get("clocks.mem")),
        temperature_c=_int(row.get("temperature.gpu")),
        power_w=_float(row.get("power.draw")),
        throttle=reason_words(int(bits, 16)) if re.fullmatch("0x[0-9a-fA-F]+", bits) else None,
        pcie_generation=_positive(row.get("pcie.link.gen.current")),
        pcie_width=_positive(row.get("pcie.link.width.current")),
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


def _text(value: str | None) -> str | None:
    """A value that is no ``[message]``."""
    return None if not value or value.startswith("[") or value in ("N/A", "ERR!") else value


def _int(value: str | None) -> int | None:
    return int(value) if value and re.fullmatch("[0-9]+", value) else None


def _float(value: str | None) -> float | None:
    return float(value) if value and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) else None


def _positive(value: str | None) -> int | None:
    return _int(value) or None


def _switch(value: str | None) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(value or "")


def _from_mib(value: str | None) -> int | None:
    mib = _int(value)
    return None if mib is None else mib * MIB
