"""The doctor's questions to NVIDIA GPUs: which, what they do not say, how free, how fast a link."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from harness.machine.check import Check, Status
from harness.machine.memory import Needs
from servers.arms import Arm, Build
from servers.errors import LaunchError
from servers.gpu.devices import VISIBLE, Device, devices_of
from servers.gpu.facts import SLOWED, GpuMemory, Survey
from sim.units import GIB

# Below this a card serves others: an idle one holds some hundred MiB of driver.
_IDLE_BYTES: Final = GIB
# Without these a run waits for nothing, or cannot say what slowed it.
_WANTED: Final = ("used_bytes", "throttle", "pcie_generation", "pcie_width", "sm_mhz", "power_w")


def check_gpus(
    found: Survey,
    *,
    build: Build | None,
    arms: Sequence[Arm],
    needs: Needs | None,
    environ: Mapping[str, str],
) -> Iterator[Check]:
    """Driver, devices in use, what they do not say, free memory, PCIe link, clocks.

    ``arms`` are the plan's; the devices are those its sessions would use.
    """
    if not found.gpus:
        yield _check_absence(found, build)
        return
    yield Check(
        "driver", "ok", f"{found.driver or 'unknown'}, CUDA up to {found.cuda or 'unknown'}"
    )
    if build == "cpu":
        yield Check(
            "GPU",
            "warning",
            f"{len(found.gpus)}: {_names_of(found)}, but the CPU build is installed",
            "make setup",
        )
        return
    if not arms:
        yield Check("GPU", "ok", f"{len(found.gpus)}: {_names_of(found)}")
        return
    try:
        devices = _devices_of_all(arms, environ, found)
    except LaunchError as error:
        yield Check("GPU", "error", str(error), error.hint)
        return
    yield _check_use(found, devices, environ)
    for device in devices:
        yield from _check_device(device, needs)


def _check_absence(found: Survey, build: Build | None) -> Check:
    if build == "gpu":
        return Check(
            "GPU",
            "error",
            f"none that can be asked: {found.why_not}",
            "install the NVIDIA driver (a container needs --gpus all), or KVCLIFF_BUILD=cpu make "
            "setup",
        )
    return Check("GPU", "ok", f"none ({found.why_not}): the CPU build is used")


def _devices_of_all(arms: Sequence[Arm], environ: Mapping[str, str], found: Survey) -> list[Device]:
    """Of all arms, which must agree: another card is another experiment."""
    by_arm = {arm.name: devices_of(arm, environ, found) for arm in arms}
    uuids = {name: [device.uuid for device in devices] for name, devices in by_arm.items()}
    if len({tuple(some) for some in uuids.values()}) > 1:
        raise LaunchError(
            "the arms would run on different GPUs: "
            + "; ".join(f"{name} on {', '.join(some)}" for name, some in uuids.items()),
            hint=f"take {VISIBLE} and parallel sizes out of [arms.NAME], or give all the same",
        )
    return next(iter(by_arm.values()), [])


def _check_use(found: Survey, devices: Sequence[Device], environ: Mapping[str, str]) -> Check:
    named = f"{VISIBLE}={environ[VISIBLE]!r}" if VISIBLE in environ else f"{VISIBLE} not set"
    listed = "; ".join(f"{d.gpu.name or 'unknown GPU'} {d.uuid}{_mig_text(d)}" for d in devices)
    text = f"{len(devices)} of {len(found.gpus)} in use ({named}, by {found.source}): {listed}"
    names = [name.strip() for name in environ.get(VISIBLE, "").split(",")]
    uuids = [device.uuid for device in devices]
    if any(d.instance for d in devices):
        # vLLM 0.32 NvmlCudaPlatform.device_control_id_to_physical_device_id takes the index NVML
        # gives a MIG instance, which counts within its GPU, for the index of a GPU.
        return Check(
            "GPU",
            "warning",
            f"{text}; vLLM 0.32 asks the whole GPU for the memory of a MIG instance",
            "use a whole GPU, or only instance 0 of GPU 0",
        )
    if any(name.startswith("GPU-") and name not in uuids for name in names):
        # NVML finds a card by its whole UUID only, and vLLM 0.32 asks it with what stands here.
        return Check(
            "GPU",
            "warning",
            f"{text}; vLLM 0.32 does not start with a shortened UUID",
            f"export {VISIBLE}={','.join(uuids)}",
        )
    return Check("GPU", "ok", text)


def _mig_text(device: Device) -> str:
    if device.instance:
        return f" (MIG instance of {device.gpu.uuid})"
    return {None: " (MIG unknown)", True: " (MIG on)", False: ""}[device.gpu.mig_enabled]


def _check_device(device: Device, needs: Needs | None) -> Iterator[Check]:
    yield _check_unread_facts(device)
    yield _check_memory(device, needs)
    yield _check_link(device)
    yield _check_clocks(device)


def _check_unread_facts(device: Device) -> Check:
    unread = device.gpu.unread()
    what = f"{device.label}: facts"
    if not unread:
        return Check(what, "ok", "0 unreadable")
    status: Status = "warning" if set(unread) & set(_WANTED) else "ok"
    remedy = "what is unknown is neither waited for nor reported; see `nvidia-smi -q`"
    text = f"{len(unread)} unreadable: {', '.join(unread)}"
    return Check(what, status, text, remedy if status == "warning" else None)


def _check_memory(device: Device, needs: Needs | None) -> Check:
    memory = device.instance.memory if device.instance else device.gpu.state.memory
    what = f"{device.label}: memory"
    if memory.free_bytes is None or memory.total_bytes is None:
        text = "free memory unknown" + _needs_text(needs, memory)
        return Check(what, "warning", text, "see `nvidia-smi`; the server says so if it is short")
    free, total = memory.free_bytes, memory.total_bytes
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free{_needs_text(needs, memory)}"
    holders = _holders_text(device)
    if needs and needs.gpu_bytes and needs.gpu_bytes > total:
        return Check(what, "error", text, "a smaller model, fewer num_gpu_blocks, or a larger GPU")
    if needs and needs.gpu_bytes and free < _bytes_at_start(needs, total):
        return Check(
            what, "error", text + holders, "end what holds it; nothing else may use the GPU"
        )
    if total - free > _IDLE_BYTES:
        return Check(what, "warning", text + holders, "measure on an idle GPU")
    return Check(what, "ok", text)


def _bytes_at_start(needs: Needs, total: int) -> float:
    """Bytes that must be free: what the plan takes, and the share vLLM insists on."""
    return max(needs.gpu_bytes or 0, (needs.gpu_share or 0) * total)


def _needs_text(needs: Needs | None, memory: GpuMemory) -> str:
    if needs is None or needs.gpu_bytes is None:
        return ""
    weights = "" if needs.weights_bytes is not None else " and weights of unknown size"
    text = f"; the plan needs {needs.gpu_bytes / GIB:.1f} GiB{weights}"
    if memory.total_bytes and needs.gpu_share:
        share = needs.gpu_share * memory.total_bytes / GIB
        text += f", vLLM starts with no less than {share:.1f} free"
    return text


def _holders_text(device: Device) -> str:
    processes = device.gpu.processes
    if not processes:
        return "; by no process that is visible from here"
    named = [
        f"{'a process not visible here' if p.pid is None else f'pid {p.pid}'} "
        + ("unknown" if p.used_bytes is None else f"{p.used_bytes / GIB:.1f} GiB")
        for p in processes
    ]
    return f"; by {', '.join(named)}"


def _check_link(device: Device) -> Check:
    state, gpu, what = device.gpu.state, device.gpu, f"{device.label}: PCIe"
    generation, width = state.pcie_generation, state.pcie_width
    text = (
        f"generation {_or_unknown(generation)} of {_or_unknown(gpu.pcie_generation_max)}, "
        f"{_or_unknown(width)} lanes of {_or_unknown(gpu.pcie_width_max)}"
    )
    if width and gpu.pcie_width_max and width < gpu.pcie_width_max:
        return Check(
            what,
            "warning",
            text,
            "loads from the host are slower by that factor: reseat the card, use another slot, or "
            "look for a shared riser; `nvidia-smi -q -d PCIE` under load shows it",
        )
    if generation and gpu.pcie_generation_max and generation < gpu.pcie_generation_max:
        return Check(what, "ok", f"{text} (an idle card lowers it; a run records it under load)")
    return Check(what, "ok", text)


def _check_clocks(device: Device) -> Check:
    state, gpu, what = device.gpu.state, device.gpu, f"{device.label}: clocks"
    reasons = "unknown" if state.throttle is None else ", ".join(state.throttle) or "none"
    text = (
        f"SM {_or_unknown(state.sm_mhz)} of {_or_unknown(gpu.sm_mhz_max)} MHz, "
        f"{_or_unknown(state.temperature_c)} °C, {_or_unknown(state.power_w)} of "
        f"{_or_unknown(gpu.power_limit_w)} W; held down by: {reasons}"
    )
    slowed = sorted(SLOWED & set(state.throttle or ()))
    if slowed:
        return Check(what, "warning", text, "let it cool down, look at its fans and power supply")
    return Check(what, "ok", text)


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _names_of(found: Survey) -> str:
    return "; ".join(f"{gpu.name or 'unknown GPU'} {gpu.uuid}" for gpu in found.gpus)
