"""GPU memory between sessions: the next server starts only when the last one's memory is back.

An engine that starts too early fails or, worse, sizes a smaller KV cache than its arm's.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

from servers.errors import LaunchError
from servers.gpu.devices import Device, state_reader
from servers.gpu.facts import GpuState, Reader
from sim.units import MIB

# What the driver keeps or a display repaints between two readings; an engine holds gigabytes.
_TOLERANCE_BYTES: Final = 256 * MIB
_POLL_S: Final = 0.25

States = Mapping[str, GpuState]


@contextmanager
def freed_afterwards(
    devices: Sequence[Device], *, read: Reader | None = None, deadline_s: float = 60.0
) -> Iterator[list[str]]:
    """Around a server's life: afterwards, wait until each of its devices is as free as before.

    Other GPUs are others' business. An unknown reading is neither free nor busy: a device never
    readable cannot be waited for (the KV capacity read back from the next server is what catches
    it); one readable before is waited for until it can be read again, or the deadline passes.
    The list it gives holds, afterwards, the labels of devices whose memory could not be read then.
    Raises LaunchError, naming GPU and MiB, when memory is not back at the deadline.
    """
    unread: list[str] = []
    if not devices:
        yield unread
        return
    with nullcontext(read) if read else state_reader(devices) as read_states:
        before = read_states()
        yield unread
        until = time.monotonic() + deadline_s
        while (busy := _busy(devices, before, now := read_states())) or _unsure(before, now):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
    unread += [device.label for device in devices if _used(now, device.uuid) is None]
    if busy:
        raise LaunchError(
            f"{deadline_s:g} s after the server ended its GPU memory is not back: "
            + ", ".join(f"{label} holds {more / MIB:.0f} MiB more" for label, more in busy.items()),
            hint="see `nvidia-smi` for the process that holds it; nothing else may use the GPU",
        )


def _busy(devices: Sequence[Device], before: States, now: States) -> dict[str, int]:
    """By label, the bytes a device holds beyond what it held before and the tolerance."""
    more = {
        device.label: used - known
        for device in devices
        if (known := _used(before, device.uuid)) is not None
        and (used := _used(now, device.uuid)) is not None
    }
    return {label: extra for label, extra in more.items() if extra > _TOLERANCE_BYTES}


def _unsure(before: States, now: States) -> bool:
    """Whether a device that could be read before cannot be read now."""
    return any(_used(before, uuid) is not None and _used(now, uuid) is None for uuid in before)


def _used(states: States, uuid: str) -> int | None:
    return states[uuid].memory.used_bytes if uuid in states else None
