"""Which GPUs a launch uses, by UUID whatever CUDA_VISIBLE_DEVICES calls them, and how to read them.

Rules of CUDA_VISIBLE_DEVICES: CUDA Programming Guide 13, section 5.2.1 (numbers, UUIDs, any unique
start of one, MIG ids; -1 ends the list; empty hides all). Where CUDA would go on with fewer GPUs in
silence, at an unknown or doubled entry, this refuses.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from servers.arms import Arm
from servers.errors import LaunchError
from servers.flags import values_of
from servers.gpu.facts import Gpu, GpuState, MigInstance, Reader, Survey
from servers.gpu.nvidia_smi import Ask, ask_nvidia_smi, states_by_nvidia_smi, survey_by_nvidia_smi
from servers.gpu.nvml import NoNvml, nvml

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# vLLM 0.32 EngineArgs: the product is the number of worker processes, each with a GPU.
_PARALLEL: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """One thing CUDA runs on: a GPU, or a MIG instance of one."""

    gpu: Gpu
    instance: MigInstance | None = None

    @property
    def uuid(self) -> str:
        """What it is identified by, on every machine and in every order."""
        uuid = self.instance.uuid if self.instance else self.gpu.uuid
        assert uuid is not None, "a GPU without a UUID is refused before it becomes a Device"
        return uuid

    @property
    def label(self) -> str:
        """How a person finds it."""
        return f"{self.gpu.label} {self.uuid}" if self.instance else self.gpu.label


def survey(library: Any = None, ask: Ask = ask_nvidia_smi) -> Survey:
    """What the driver says of every GPU: by NVML, else by nvidia-smi, else why neither works."""
    try:
        with nvml(library) as reader:
            return reader.survey()
    except NoNvml as error:
        found = survey_by_nvidia_smi(ask)
        return found if found.gpus else Survey(None, why_not=f"{error}; {found.why_not}")


def devices_of(arm: Arm, environ: Mapping[str, str], found: Survey | None = None) -> list[Device]:
    """The devices a launch of ``arm`` uses, in CUDA's order; empty for a build without CUDA.

    Empty too when neither NVML nor nvidia-smi lists a GPU: then nothing is known of them.
    ``environ`` is what the servers inherit. Raises LaunchError when CUDA_VISIBLE_DEVICES names no
    such device, none, or fewer than the server's parallel size.
    """
    if arm.server.build != "gpu":
        return []
    found = survey() if found is None else found
    if not found.gpus:
        return []
    named = {**environ, **arm.env}.get(VISIBLE)
    devices = visible_devices(named, found.gpus)
    n_needed = parallel_size(arm.flags)
    if len(devices) < n_needed:
        raise LaunchError(
            f"arm {arm.name} needs {n_needed} GPUs, {VISIBLE}={named!r} shows {len(devices)} of "
            f"{len(found.gpus)}",
            hint=f"unset {VISIBLE}, or name {n_needed}: {_names(found.gpus)}",
        )
    return devices[:n_needed]


def visible_devices(named: str | None, gpus: Sequence[Gpu]) -> list[Device]:
    """What CUDA_VISIBLE_DEVICES=``named`` shows of ``gpus``, in CUDA's order; None: it is not set.

    Raises LaunchError for an entry that names none of them, more than one, or one named before.
    """
    if named is None:
        return _unnamed(gpus)
    devices: list[Device] = []
    for entry in _entries(named):
        device = _device(entry, gpus)
        if device.uuid in {known.uuid for known in devices}:
            raise LaunchError(
                f"{VISIBLE}={named!r} names {device.label} twice",
                hint="name each GPU once: CUDA would show none, or fewer, without an error",
            )
        devices.append(device)
    return devices


def parallel_size(flags: Sequence[str]) -> int:
    """GPUs a vLLM server with these options uses; 1 unless they say otherwise."""
    # Of each option the last value counts; what is no size is 1 here, and vLLM will refuse it.
    last = [value for names in _PARALLEL for value in [*values_of(flags, *names)][-1:]]
    return prod(int(value) for value in last if re.fullmatch("[1-9][0-9]{0,5}", value))


@contextmanager
def state_reader(
    devices: Sequence[Device], library: Any = None, ask: Ask = ask_nvidia_smi
) -> Iterator[Reader]:
    """A function that reads the devices' states now, by UUID; unknown where nobody says.

    NVML stays open for the length of the block: opening it anew may wake a card each time.
    """
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(nvml(library))
        except NoNvml:
            yield lambda: _states_by_nvidia_smi(devices, ask)
            return
        yield lambda: {
            d.uuid: reader.state(d.gpu.uuid or "", d.instance.uuid if d.instance else None)
            for d in devices
        }


def _states_by_nvidia_smi(devices: Sequence[Device], ask: Ask) -> dict[str, GpuState]:
    """A MIG instance's are unknown: what nvidia-smi lists is its whole GPU's memory."""
    states = states_by_nvidia_smi(ask)
    return {device.uuid: states.get(device.uuid, GpuState()) for device in devices}


def _entries(named: str) -> list[str]:
    """The entries CUDA reads: up to the first -1. ``NoDevFiles`` is how Slurm hides all."""
    entries = [entry.strip() for entry in named.split(",")]
    if entries in ([""], ["NoDevFiles"]):
        return []
    return entries[: entries.index("-1")] if "-1" in entries else entries


def _unnamed(gpus: Sequence[Gpu]) -> list[Device]:
    """All GPUs; with MIG on somewhere, CUDA shows one instance and no whole GPU."""
    if not any(gpu.mig for gpu in gpus):
        return [_whole(gpu) for gpu in gpus if gpu.uuid is not None or len(gpus) == 1]
    instances = [Device(gpu, instance) for gpu in gpus for instance in gpu.mig or ()]
    if len(instances) > 1:
        raise LaunchError(
            f"{VISIBLE} is not set and there are {len(instances)} MIG instances",
            hint=f"name one: {', '.join(device.uuid for device in instances)}",
        )
    return instances


def _device(entry: str, gpus: Sequence[Gpu]) -> Device:
    if re.fullmatch("[0-9]+", entry) and int(entry) < len(gpus):
        return _whole(gpus[int(entry)])
    if entry.startswith("MIG-"):
        return _instance(entry, gpus)
    if entry.startswith("GPU-"):
        wanted = entry.lower()
        matches = [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(wanted)]
        if len(matches) > 1:
            raise LaunchError(
                f"{VISIBLE} names {entry!r}, and {len(matches)} GPUs start so",
                hint=f"give more of it: {_names(matches)}",
            )
        if matches and entry != "GPU-":
            return _whole(matches[0])
    hint = f"there are: {_names(gpus)}"
    bare = [gpu for gpu in gpus if (gpu.uuid or "").lower()[4:].startswith(entry.lower())]
    if len(entry) >= 4 and len(bare) == 1:
        hint = f"write GPU-{entry}: CUDA reads a UUID by its first letters"
    raise LaunchError(
        f"{VISIBLE} names {entry!r}, which is none of the {len(gpus)} GPUs of this machine",
        hint=hint,
    )


def _instance(entry: str, gpus: Sequence[Gpu]) -> Device:
    instances = [Device(gpu, instance) for gpu in gpus for instance in gpu.mig or ()]
    for device in instances:
        assert device.instance is not None
        if entry.lower() in (device.uuid.lower(), (device.instance.old_id or "").lower()):
            return device
    if any(gpu.mig_enabled and gpu.mig is None for gpu in gpus):
        raise LaunchError(
            f"{VISIBLE} names {entry!r}, but the driver does not list its MIG instances here",
            hint="see `nvidia-smi -L`; a container needs the MIG device passed to it",
        )
    listed = ", ".join(device.uuid for device in instances) or "none"
    raise LaunchError(
        f"{VISIBLE} names {entry!r}, which is no MIG instance of this machine",
        hint=f"give the whole id; there are: {listed}",
    )


def _whole(gpu: Gpu) -> Device:
    """The GPU itself, or the one instance it is split into."""
    if gpu.uuid is None:
        raise LaunchError(
            f"GPU {gpu.index} has no readable UUID, so nothing can be said of it",
            hint="see `nvidia-smi -L`; a lost GPU needs a restart of the machine",
        )
    if not gpu.mig_enabled:
        return Device(gpu)
    if gpu.mig is not None and len(gpu.mig) == 1:
        return Device(gpu, gpu.mig[0])
    ids = ", ".join(instance.uuid for instance in gpu.mig or ())
    raise LaunchError(
        f"{gpu.label} is in MIG mode with {'unreadable' if gpu.mig is None else len(gpu.mig)} "
        "instances: a server cannot run on the whole",
        hint=f"set {VISIBLE} to one of: {ids}" if ids else "create an instance, or end MIG mode",
    )


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} = {gpu.uuid or 'UUID unknown'}" for gpu in gpus)
