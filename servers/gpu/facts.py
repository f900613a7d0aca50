"""What is known of NVIDIA GPUs, as values: None is unknown, and unknown is never 0 or free."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, Literal

# Bits of NVML's clocks event (once: throttle) reasons, nvml.h of CUDA 13.
_REASONS: Final = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}

SLOWED: Final = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
"""Reasons that say the card is in trouble: too hot, or short of power. ``sw_power_cap`` is not one:
a card at its power limit is a card at full work, and prefill takes it there."""


def reason_words(bits: int) -> tuple[str, ...]:
    """NVML's bits as words, lowest first; a bit nobody here knows keeps its number."""
    return tuple(
        _REASONS.get(1 << n, f"bit_{1 << n:#x}") for n in range(bits.bit_length()) if bits >> n & 1
    )


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's, or a MIG instance's, own memory; ``used`` includes what the driver keeps."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    """What changes while a GPU works.

    ``throttle``: why its clocks are where they are, in words; empty: nothing holds them down.
    ``pcie_generation`` falls on an idle card, to save power, and rises under load.
    """

    memory: GpuMemory = GpuMemory()
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


Reader = Callable[[], dict[str, GpuState]]
"""Reads the states of some devices now, by UUID."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on the GPU. ``pid`` None: no such process is visible from here."""

    pid: int | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One compute instance of a GPU in MIG mode; ``old_id``: its id for drivers before R470."""

    uuid: str
    old_id: str | None = None
    memory: GpuMemory = GpuMemory()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``index`` counts in PCI bus order, as CUDA_DEVICE_ORDER=PCI_BUS_ID does.

    ``mig`` is empty where MIG is not on. The PCIe maxima are those of card and slot together.
    ``processes`` may be empty on a busy GPU: a container sees none of other containers'.
    """

    index: int
    uuid: str | None
    name: str | None = None
    pci_bus_id: str | None = None
    compute_capability: str | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigInstance, ...] | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    sm_mhz_max: int | None = None
    memory_mhz_max: int | None = None
    power_limit_w: float | None = None
    ecc_enabled: bool | None = None
    persistence_enabled: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None
    state: GpuState = GpuState()

    @property
    def label(self) -> str:
        """How a person finds it: index and the start of its UUID."""
        return f"GPU {self.index} ({(self.uuid or 'UUID unknown')[:12]})"

    def unread(self) -> list[str]:
        """Names of the facts the driver does not say, those of state and memory included."""
        parts = (self, self.state, self.state.memory)
        return [f.name for part in parts for f in fields(part) if getattr(part, f.name) is None]


@dataclass(frozen=True, slots=True)
class Survey:
    """Every GPU the driver lists, in PCI order, or ``why_not``; ``cuda``: the newest it can run."""

    source: Literal["nvml", "nvidia-smi"] | None
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    why_not: str | None = None


def pci_key(bus_id: str | None) -> tuple[int, ...] | None:
    """Sort key of a PCI bus id (domain:bus:device.function, hexadecimal); None for others."""
    try:
        return tuple(int(part, 16) for part in (bus_id or "").replace(".", ":").split(":"))
    except ValueError:
        return None
