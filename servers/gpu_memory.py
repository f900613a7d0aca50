"""GPU memory between sessions: the next server starts only when the last one's memory is back.

An engine that starts too early fails or, worse, sizes a smaller KV cache than its arm's.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from servers.errors import LaunchError

MIB: Final = 2**20
# What the driver keeps or a display repaints between two readings; an engine holds gigabytes.
_TOLERANCE_BYTES: Final = 256 * MIB
_POLL_S: Final = 0.25

UsedBytes = Mapping[str, int | None]
"""Used bytes by GPU UUID; None where the driver does not say (``[N/A]`` on MIG, permissions)."""


@contextmanager
def returned(
    read: Callable[[], UsedBytes] | None = None, *, deadline_s: float = 60.0
) -> Iterator[None]:
    """Around a server's life: afterwards, wait until every GPU is as free as it was before.

    Unknown readings are neither free nor busy: such a GPU cannot be waited for, and the KV
    capacity read back from the next server is what catches it. Raises LaunchError at the deadline.
    """
    read = read or read_used
    before = read()
    yield
    until = time.monotonic() + deadline_s
    while busy := _busier(before, read()):
        if time.monotonic() > until:
            raise LaunchError(
                f"{deadline_s:g} s after the server ended its GPU memory is not back: "
                + ", ".join(f"{gpu} holds {used / MIB:.0f} MiB more" for gpu, used in busy.items()),
                hint="see `nvidia-smi` for the process that holds it; nothing else may use the GPU",
            )
        time.sleep(_POLL_S)


def _busier(before: UsedBytes, now: UsedBytes) -> dict[str, int]:
    more = {
        gpu: used - known
        for gpu, used in now.items()
        if used is not None and (known := before.get(gpu)) is not None
    }
    return {gpu: extra for gpu, extra in more.items() if extra > _TOLERANCE_BYTES}


def read_used() -> dict[str, int | None]:
    """Used bytes of every GPU nvidia-smi lists; empty when it does not answer within 20 s."""
    return parse_used(ask_nvidia_smi("uuid", "memory.used", units=False) or "")


def ask_nvidia_smi(*fields: str, units: bool = True) -> str | None:
    """Its answer, one line of comma-separated ``fields`` a GPU; None when it does not answer."""
    form = "csv,noheader" if units else "csv,noheader,nounits"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={form}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def parse_used(text: str) -> dict[str, int | None]:
    """``uuid, MiB`` a line, as nvidia-smi prints it; anything but a plain number is unknown."""
    used: dict[str, int | None] = {}
    for line in text.splitlines():
        uuid, comma, value = line.partition(",")
        if comma:
            number = value.strip()
            is_number = number.isascii() and number.isdigit()
            used[uuid.strip()] = int(number) * MIB if is_number else None
    return used
