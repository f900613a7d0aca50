"""NVIDIA GPUs for tests: a stand-in for the library pynvml, and texts as nvidia-smi prints them."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from servers.gpu.devices import Device
from servers.gpu.facts import Gpu, GpuMemory, GpuState
from sim.units import MIB

UUID_A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UUID_B = "GPU-8932aaaa-0000-1111-2222-333344445555"
UUID_C = "GPU-c0ffee00-0000-1111-2222-333344445555"
MIG_1 = "MIG-11111111-aaaa-5d2c-a9a5-000000000001"
MIG_2 = "MIG-22222222-aaaa-5d2c-a9a5-000000000002"


class FakeNvml:
    """pynvml with cards that answer what a test says; an exception as answer is raised.

    ``cards``: by function, the answer; a function not in it is "Not Supported". ``system``: the
    same for functions without a card. ``absent``: functions this pynvml has no name for.
    """

    class NVMLError(Exception):
        """As pynvml's."""

    class NVMLLibraryMismatchError(Exception):
        """As pynvml's."""

    def __init__(
        self,
        cards: Sequence[Mapping[str, Any]] = (),
        *,
        system: Mapping[str, Any] | None = None,
        absent: Sequence[str] = (),
    ) -> None:
        self.cards = cards
        self.system = {"Init": None, "Shutdown": None, **(system or {})}
        self.absent = absent
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml") or name in self.absent:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.called.append(name)
        special = {
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda: self._opened(self.cards[arguments[0]]),
            "nvmlDeviceGetHandleByUUID": lambda: self._by_uuid(arguments[0]),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda: self._instance(*arguments),
        }
        if name in special:
            return special[name]()
        is_card = bool(arguments) and isinstance(arguments[0], Mapping)
        answers = arguments[0] if is_card else self.system
        key = name.removeprefix("nvmlDeviceGet" if is_card else "nvml")
        if len(arguments) > 1 and (key, arguments[1]) in answers:
            key = (key, arguments[1])  # type: ignore[assignment]  # by clock or sensor
        answer = answers.get(key, self.NVMLError("Not Supported"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _opened(self, card: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(card.get("Handle"), Exception):
            raise card["Handle"]
        return card

    def _by_uuid(self, uuid: str) -> Mapping[str, Any]:
        everything = [*self.cards, *(i for card in self.cards for i in card.get("instances", ()))]
        for card in everything:
            if card.get("UUID") in (uuid, uuid.encode()):
                return card
        raise self.NVMLError("Not Found")

    def _instance(self, card: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        try:
            instance: Mapping[str, Any] = card["instances"][index]
        except IndexError:
            raise self.NVMLError("Not Found") from None
        return instance


def memory(total_mib: int, used_mib: int) -> SimpleNamespace:
    """NVML's answer on memory, in bytes."""
    free = total_mib - used_mib
    return SimpleNamespace(total=total_mib * MIB, used=used_mib * MIB, free=free * MIB)


def card(**changed: Any) -> dict[str, Any]:
    """An idle H200 that answers everything, by the end of NVML's function names."""
    answers = {
        "UUID": UUID_A, "Name": "NVIDIA H200", "PciInfo": SimpleNamespace(busId="00000000:3B:00.0"),
        "CudaComputeCapability": (9, 0), "MigMode": [0, 0], "MemoryInfo": memory(143_771, 600),
        "CurrPcieLinkGeneration": 5, "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16,
        ("ClockInfo", 1): 345, ("ClockInfo", 2): 3201,
        ("MaxClockInfo", 1): 1980, ("MaxClockInfo", 2): 3201,
        "CurrentClocksEventReasons": 1, "TemperatureV": 31, "PowerUsage": 76_543,
        "EnforcedPowerLimit": 700_000, "EccMode": [1, 1], "PersistenceMode": 1,
        "ComputeRunningProcesses": [],
    }  # fmt: skip
    return {**answers, **changed}


H200 = FakeNvml(
    [card()], system={"SystemGetDriverVersion": "580.65.06", "SystemGetCudaDriverVersion_v2": 13000}
)


def gpu(index: int, uuid: str | None, **changed: Any) -> Gpu:
    """A GPU without MIG, of which little is known."""
    return Gpu(index, uuid, **{"mig_enabled": False, "mig": (), **changed})


def device(index: int, uuid: str, **changed: Any) -> Device:
    """That GPU, in use."""
    return Device(gpu(index, uuid, **changed))


def using(used_mib: int | None) -> GpuState:
    """A state of which only the used memory is known; None: not even that."""
    return GpuState(GpuMemory(used_bytes=None if used_mib is None else used_mib * MIB))


class FakeSmi:
    """nvidia-smi: one answer for each query, by a word of its arguments; None: it fails."""

    def __init__(self, answers: Mapping[str, str | None]) -> None:
        self.answers = answers

    def __call__(self, arguments: Sequence[str]) -> str | None:
        line = " ".join(arguments)
        return next((text for word, text in self.answers.items() if word in line), None)


NO_SMI = FakeSmi({})
