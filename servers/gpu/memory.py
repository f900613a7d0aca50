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
        before = _used(read_states())
        yield unread
        until = time.monotonic() + deadline_s
        while True:
            now = _used(read_states())
            more = {uuid: now[uuid] - used for uuid, used in before.items() if uuid in now}
            busy = [d for d in devices if more.get(d.uuid, 0) > _TOLERANCE_BYTES]
            if time.monotonic() > until or not (busy or before.keys() - now.keys()):
                break
            time.sleep(_POLL_S)
    unread += [device.label for device in devices if device.uuid not in now]
    if busy:
        raise LaunchError(
            f"{deadline_s:g} s after the server ended its GPU memory is not back: "
            + ", ".join(f"{d.label} holds {more[d.uuid] / MIB:.0f} MiB more" for d in busy),
            hint="see `nvidia-smi` for the process that holds it; nothing else may use the GPU",
        )


def _used(states: Mapping[str, GpuState]) -> dict[str, int]:
    """Bytes used by UUID, of the devices that can be read."""
    used = {uuid: state.memory.used_bytes for uuid, state in states.items()}
    return {uuid: n_bytes for uuid, n_bytes in used.items() if n_bytes is not None}
