from collections.abc import Callable

import pytest

from servers.errors import LaunchError
from servers.gpu_memory import MIB, UsedBytes, parse_used, returned


def reader(*readings: UsedBytes) -> tuple[Callable[[], UsedBytes], list[UsedBytes]]:
    """A reader that answers these in turn, the last for ever; and the list of what it answered."""
    left, asked = list(readings), []

    def read() -> UsedBytes:
        asked.append(left.pop(0) if len(left) > 1 else left[0])
        return asked[-1]

    return read, asked


def test_the_next_server_waits_for_memory_on_every_gpu_not_just_the_first() -> None:
    # A57: GPU 1 alone is slow.
    free = {"GPU-0": 10 * MIB, "GPU-1": 10 * MIB}
    slow = {"GPU-0": 10 * MIB, "GPU-1": 9000 * MIB}
    read, asked = reader(free, slow, slow, free)
    with returned(read):
        pass
    assert asked == [free, slow, slow, free]


def test_memory_that_never_returns_is_an_error_that_names_the_gpu() -> None:
    # A57
    read, _ = reader({"GPU-0": 0, "GPU-1": 0}, {"GPU-0": 0, "GPU-1": 9000 * MIB})
    with (
        pytest.raises(LaunchError, match="GPU-1 holds 9000 MiB more"),
        returned(read, deadline_s=0.01),
    ):
        pass


def test_memory_used_before_the_server_started_is_not_waited_for() -> None:
    read, asked = reader({"GPU-0": 9000 * MIB})
    with returned(read):
        pass
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("GPU-aa, 12\nGPU-bb, 0\n", {"GPU-aa": 12 * MIB, "GPU-bb": 0}),
        ("GPU-aa, [N/A]\n", {"GPU-aa": None}),
        ("GPU-aa, [Insufficient Permissions]\n", {"GPU-aa": None}),
        ("GPU-aa, [Not Supported]\n", {"GPU-aa": None}),
        ("MIG-aa, 12 MiB\n", {"MIG-aa": None}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_what_nvidia_smi_does_not_say_is_unknown_and_never_zero(
    text: str, used: dict[str, int | None]
) -> None:
    # A58
    assert parse_used(text) == used


def test_an_unknown_reading_is_neither_waited_for_nor_taken_for_free() -> None:
    # A58: the GPU that can be read is still waited for.
    unknown = {"GPU-0": None, "GPU-1": 9000 * MIB}
    read, asked = reader({"GPU-0": None, "GPU-1": 0}, unknown, {"GPU-0": None, "GPU-1": 0})
    with returned(read):
        pass
    assert len(asked) == 3
