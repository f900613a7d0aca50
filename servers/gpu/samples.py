"""What the GPUs did during a session: clocks, temperature, power, throttling, PCIe link.

Read once a second beside the session and at its marks; nothing on a card is changed. A record goes
into the manifest, and what in it spoils a measurement is said in its ``warnings``.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from typing import Any, Final, Literal

from servers.gpu.devices import Device, state_reader
from servers.gpu.facts import SLOWED, GpuState, Reader

Moment = Literal["start", "ready", "end"]
"""Before the servers start; when they are up; after the last request, while they still are."""

_PERIOD_S: Final = 1.0
# An idle card lowers its PCIe generation to save power, so only the best of several readings under
# load says what the link can do.
_ENOUGH_SAMPLES: Final = 5
_NUMBERS: Final = [f.name for f in fields(GpuState) if f.name not in ("memory", "throttle")]


# What must be alike in all sessions, from a device's ``under_load``; None where it is not known.
_COMPARED: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {
    "PCIe generation": lambda load: load["pcie_generation"] and load["pcie_generation"][1],
    "number of PCIe lanes": lambda load: load["pcie_width"] and load["pcie_width"][1],
    "throttling": lambda load: (
        load["n_throttle"] and ("+".join(sorted(SLOWED & set(load["throttle"]))) or "none")
    ),
}


class GpuSamples:
    """States of some devices over one session; ``take_sample`` and ``mark`` may come from two threads."""

    def __init__(self, devices: Sequence[Device], read: Reader) -> None:
        self._devices = devices
        self._read = read
        self._moments: dict[Moment, dict[str, GpuState]] = {}
        self._taken: list[dict[str, GpuState]] = []

    def mark(self, moment: Moment) -> None:
        """Read the devices now and remember it under ``moment``."""
        if self._devices:
            self._moments[moment] = self._read()

    def take_sample(self) -> None:
        """One reading; those between ``ready`` and ``end`` count as taken under load."""
        if "ready" in self._moments and "end" not in self._moments:
            self._taken.append(self._read())

    def record(self) -> dict[str, Any] | None:
        """For the manifest, as JSON; None without a GPU. Every unknown is null."""
        if not self._devices:
            return None
        devices = [self._device(device) for device in self._devices]
        return {
            "devices": devices,
            "warnings": [warning for device in devices for warning in session_warnings(device)],
        }

    def _device(self, device: Device) -> dict[str, Any]:
        gpu = asdict(device.gpu)
        for changing in ("state", "processes", "mig"):
            del gpu[changing]
        bounds = [self._moments[name] for name in ("ready", "end") if name in self._moments]
        states = [taken[device.uuid] for taken in (*self._taken, *bounds)]
        return {
            **gpu,
            "uuid": device.uuid,
            "gpu_uuid": device.gpu.uuid,
            "label": device.label,
            **{moment: asdict(taken[device.uuid]) for moment, taken in self._moments.items()},
            "under_load": _summary(states),
        }


@contextmanager
def sampled(
    devices: Sequence[Device], *, read: Reader | None = None, period_s: float = _PERIOD_S
) -> Iterator[GpuSamples]:
    """Samples of ``devices`` every ``period_s`` seconds for the length of the block.

    Marks ``start`` itself. Without devices nothing is read and no thread is started.
    """
    if not devices:
        yield GpuSamples((), dict)
        return
    with nullcontext(read) if read else state_reader(devices) as read_states:
        samples = GpuSamples(devices, read_states)
        samples.mark("start")
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(period_s):
                samples.take_sample()

        thread = threading.Thread(target=sample, name="gpu-samples", daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            stop.set()
            # A driver that hangs must not keep the servers from being stopped; the thread ends
            # with the process.
            thread.join(timeout=10.0)


def session_warnings(device: Mapping[str, Any]) -> list[str]:
    """What one device of a record says against its session's times."""
    label, load = device["label"], device["under_load"]
    warnings = [
        f"{label} was slowed by {reason} in {count} of {load['n_throttle']} samples"
        + _clocks(load, device["sm_mhz_max"])
        for reason, count in load["throttle"].items()
        if reason in SLOWED
    ]
    if load["n_samples"] < _ENOUGH_SAMPLES:
        return warnings
    best, most = load["pcie_generation"], device["pcie_generation_max"]
    if best and most and best[1] < most:
        warnings.append(f"{label}: its PCIe link never rose above generation {best[1]} of {most}")
    width, lanes = load["pcie_width"], device["pcie_width_max"]
    if width and lanes and width[0] < lanes:
        warnings.append(f"{label}: its PCIe link had {_range(width)} lanes of {lanes}")
    return warnings


def session_changes(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between the sessions' records of a device: PCIe link, throttling, where known."""
    changes = []
    by_device: dict[str, dict[str, Mapping[str, Any]]] = {}
    for session, record in records.items():
        for device in record["devices"]:
            by_device.setdefault(device["uuid"], {})[session] = device
    for sessions in by_device.values():
        label = next(iter(sessions.values()))["label"]
        # A session that hardly looked is left out.
        loads = {session: device["under_load"] for session, device in sessions.items()}
        looked = {s: load for s, load in loads.items() if load["n_samples"] >= _ENOUGH_SAMPLES}
        for what, value_of in _COMPARED.items():
            values = {s: value for s, load in looked.items() if (value := value_of(load))}
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{session} {value}" for session, value in values.items())
                changes.append(f"{label}: {what} is not the same in all sessions: {listed}")
    return changes


def _summary(states: Sequence[GpuState]) -> dict[str, Any]:
    """``[min, max]`` of each number over the readings that have it, null where none has.

    ``throttle``: in how many of ``n_throttle`` readings each reason was given.
    """
    told = [state.throttle for state in states if state.throttle is not None]
    reasons = Counter(reason for throttle in told for reason in throttle)
    ranges: dict[str, list[float] | None] = {}
    for name in _NUMBERS:
        known = [value for state in states if (value := getattr(state, name)) is not None]
        ranges[name] = [min(known), max(known)] if known else None
    return {
        "n_samples": len(states),
        **ranges,
        "n_throttle": len(told),
        "throttle": dict(sorted(reasons.items())),
    }


def _clocks(load: Mapping[str, Any], most: int | None) -> str:
    if load["sm_mhz"] is None:
        return ""
    return f" (SM clock {_range(load['sm_mhz'])} MHz" + (f" of {most})" if most else ")")


def _range(pair: Sequence[Any]) -> str:
    return f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
