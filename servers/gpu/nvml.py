"""GPUs as NVML tells of them (nvidia-ml-py). Only ``Get`` functions are called: nothing on a card
is ever changed.

Every answer may be refused: not supported on this card or in MIG mode, no permission, a driver too
old for the function, a lost GPU. Each refusal makes that one fact unknown.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from servers.gpu.facts import (
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuState,
    MigInstance,
    Survey,
    pci_key,
    reason_words,
)

# NVML answers "not available" with all bits set, of 32 or 64.
_NOT_AVAILABLE: Final = frozenset({2**32 - 1, 2**64 - 1})
_SM, _MEM = 1, 2  # nvmlClockType_t


class NoNvml(Exception):  # noqa: N818 - says what is missing, like the other error names here
    """NVML cannot be used here; the text says why."""


@contextmanager
def nvml(library: Any = None) -> Iterator["Nvml"]:
    """NVML, initialised for the length of the block; raises NoNvml when that is not possible."""
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError as error:
            raise NoNvml(f"nvidia-ml-py is not installed ({error})") from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NoNvml(f"NVML does not start ({error})") from None
    reader = Nvml(library)
    try:
        yield reader
    finally:
        reader.ask("nvmlShutdown")


class Nvml:
    """Reads facts from an initialised NVML; may be used from several threads."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._refusals = (
            library.NVMLError,
            library.NVMLLibraryMismatchError,  # a driver too old for a structure's version
            AttributeError,  # a function this nvidia-ml-py has no name for
            UnicodeDecodeError,
        )

    def ask(self, function: str, *arguments: Any) -> Any:
        """One answer; None where it is refused or "not available"."""
        try:
            answer = getattr(self._library, function)(*arguments)
        except self._refusals:
            return None
        return None if isinstance(answer, int) and answer in _NOT_AVAILABLE else answer

    def survey(self) -> Survey:
        """Every GPU; one that cannot even be opened stays in the list with nothing known."""
        cuda = self.ask("nvmlSystemGetCudaDriverVersion_v2")
        n_gpus = self.ask("nvmlDeviceGetCount") or 0
        handles = (self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(n_gpus))
        found = [
            Gpu(index, None) if handle is None else self._gpu(index, handle)
            for index, handle in enumerate(handles)
        ]
        return Survey(
            "nvml",
            in_pci_order(found),
            driver=_text(self.ask("nvmlSystemGetDriverVersion")),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if _positive(cuda) else None,
            why_not=None if found else "NVML lists no GPU",
        )

    def state(self, gpu_uuid: str, instance_uuid: str | None = None) -> GpuState:
        """The state of a GPU now; the memory is the MIG instance's where one is named."""
        handle = self.ask("nvmlDeviceGetHandleByUUID", gpu_uuid)
        if handle is None:
            return GpuState()
        state = self._state(handle)
        if instance_uuid is None:
            return state
        instance = self.ask("nvmlDeviceGetHandleByUUID", instance_uuid)
        return replace(state, memory=self._memory(instance))

    def _gpu(self, index: int, handle: Any) -> Gpu:
        capability = self.ask("nvmlDeviceGetCudaComputeCapability", handle)
        mig_enabled = _switch(self.ask("nvmlDeviceGetMigMode", handle))
        uuid = _text(self.ask("nvmlDeviceGetUUID", handle))
        return Gpu(
            index,
            uuid,
            name=_text(self.ask("nvmlDeviceGetName", handle)),
            pci_bus_id=_text(getattr(self.ask("nvmlDeviceGetPciInfo", handle), "busId", None)),
            compute_capability=None if capability is None else "{}.{}".format(*capability),
            mig_enabled=mig_enabled,
            mig=self._mig(handle, uuid) if mig_enabled else (),
            pcie_generation_max=_positive(self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)),
            pcie_width_max=_positive(self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)),
            sm_mhz_max=_positive(self.ask("nvmlDeviceGetMaxClockInfo", handle, _SM)),
            memory_mhz_max=_positive(self.ask("nvmlDeviceGetMaxClockInfo", handle, _MEM)),
            power_limit_w=_watts(self.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
            ecc_enabled=_switch(self.ask("nvmlDeviceGetEccMode", handle)),
            persistence_enabled=_switch(self.ask("nvmlDeviceGetPersistenceMode", handle)),
            processes=self._processes(handle),
            state=self._state(handle),
        )

    def _state(self, handle: Any) -> GpuState:
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before R535 know it by its old name only
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuState(
            memory=self._memory(handle),
            sm_mhz=_positive(self.ask("nvmlDeviceGetClockInfo", handle, _SM)),
            memory_mhz=_positive(self.ask("nvmlDeviceGetClockInfo", handle, _MEM)),
            temperature_c=self._temperature(handle),
            power_w=_watts(self.ask("nvmlDeviceGetPowerUsage", handle)),
            throttle=None if reasons is None else reason_words(reasons),
            pcie_generation=_positive(self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)),
            pcie_width=_positive(self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)),
        )

    def _memory(self, handle: Any) -> GpuMemory:
        """Unknown as a whole where the total is: integrated GPUs answer zeros or nothing."""
        answer = None if handle is None else self.ask("nvmlDeviceGetMemoryInfo", handle)
        if answer is None or not _positive(answer.total):
            return GpuMemory()
        return GpuMemory(_known(answer.total), _known(answer.used), _known(answer.free))

    def _temperature(self, handle: Any) -> int | None:
        sensor = getattr(self._library, "NVML_TEMPERATURE_GPU", 0)
        value = self.ask("nvmlDeviceGetTemperatureV", handle, sensor)
        if value is None:  # before R565; the old function goes with CUDA 14
            value = self.ask("nvmlDeviceGetTemperature", handle, sensor)
        return _known(value)

    def _mig(self, handle: Any, gpu_uuid: str | None) -> tuple[MigInstance, ...] | None:
        most = self.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
        if most is None:
            return None
        handles = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most))
        instances = [(h, _text(self.ask("nvmlDeviceGetUUID", h))) for h in handles if h is not None]
        if any(uuid is None for _, uuid in instances):
            return None  # one that cannot be named makes the list incomplete
        return tuple(
            MigInstance(uuid, self._old_id(h, gpu_uuid), self._memory(h))
            for h, uuid in instances
            if uuid is not None
        )

    def _old_id(self, handle: Any, gpu_uuid: str | None) -> str | None:
        gpu_instance = self.ask("nvmlDeviceGetGpuInstanceId", handle)
        compute_instance = self.ask("nvmlDeviceGetComputeInstanceId", handle)
        if None in (gpu_instance, compute_instance, gpu_uuid):
            return None
        return f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}"

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        found = self.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if found is None:
            return None
        return tuple(GpuProcess(visible_pid(p.pid), _known(p.usedGpuMemory)) for p in found)


def in_pci_order(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Numbered by PCI bus id; the driver's own order where one of the ids is unknown.

    NVML promises no order; CUDA is told to count by PCI bus (``servers.command``).
    """
    if all(pci_key(gpu.pci_bus_id) for gpu in gpus):
        gpus = sorted(gpus, key=lambda gpu: pci_key(gpu.pci_bus_id) or ())
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))


def visible_pid(pid: int) -> int | None:
    """The pid, or None when no process here has it: the driver may count in another namespace."""
    return pid if Path(f"/proc/{pid}").exists() else None


def _text(answer: Any) -> str | None:
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
    return text.strip() or None if isinstance(text, str) else None


def _known(answer: Any) -> int | None:
    return answer if isinstance(answer, int) and answer not in _NOT_AVAILABLE else None


def _positive(answer: Any) -> int | None:
    """Zero lanes, megahertz or bytes of memory are an answer no working card can give."""
    return answer if isinstance(answer, int) and answer > 0 else None


def _watts(milliwatts: Any) -> float | None:
    return milliwatts / 1000 if _positive(milliwatts) else None


def _switch(answer: Any) -> bool | None:
    """Of a state, or of ``[current, pending]``."""
    current = answer[0] if isinstance(answer, Sequence) else answer
    return None if current is None else bool(current)
