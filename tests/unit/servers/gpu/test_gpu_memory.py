from collections.abc import Callable, Mapping

import pytest

from servers.errors import LaunchError
from servers.gpu import memory as gpu_memory
from servers.gpu.facts import GpuState, Reader
from servers.gpu.memory import freed_afterwards
from tests.gpus import UUID_A, UUID_C, device, using

A, C = device(0, UUID_A), device(1, UUID_C)


def states(*used_mib: int | None) -> dict[str, GpuState]:
    return dict(zip((UUID_A, UUID_C), map(using, used_mib), strict=False))


def reader(*readings: Mapping[str, GpuState]) -> tuple[Reader, Callable[[], int]]:
    """A reader that answers these in turn, the last for ever; and how often it was asked."""
    left, asked = list(readings), []

    def read() -> dict[str, GpuState]:
        asked.append(left.pop(0) if len(left) > 1 else left[0])
        return dict(asked[-1])

    return read, lambda: len(asked)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.0)


def test_the_next_server_waits_for_memory_on_every_gpu_not_just_the_first() -> None:
    # A57: GPU 1 alone is slow, and free at the fourth reading: one before, three after.
    read, n_asked = reader(states(10, 10), states(10, 9000), states(10, 9000), states(10, 10))
    with freed_afterwards([A, C], read=read):
        pass
    assert n_asked() == 4


def test_memory_that_never_returns_is_an_error_that_names_the_gpu_and_the_mib() -> None:
    # A57
    read, _ = reader(states(0, 0), states(0, 9000))
    with (
        pytest.raises(LaunchError, match=r"GPU 1 \(GPU-c0ffee00\) holds 9000 MiB more$"),
        freed_afterwards([A, C], read=read, deadline_s=0.01),
    ):
        pass


def test_a_gpu_that_is_not_in_use_is_not_waited_for() -> None:
    read, n_asked = reader(states(0, 0), states(0, 9000))
    with freed_afterwards([A], read=read, deadline_s=0.01):
        pass
    assert n_asked() == 2


def test_memory_used_before_the_server_started_is_not_waited_for() -> None:
    read, n_asked = reader(states(9000))
    with freed_afterwards([A], read=read):
        pass
    assert n_asked() == 2


@pytest.mark.parametrize(("more_mib", "is_busy"), [(256, False), (257, True)])
def test_what_a_driver_keeps_is_tolerated_and_a_mib_more_is_not(
    more_mib: int, is_busy: bool
) -> None:
    read, _ = reader(states(100), states(100 + more_mib))
    if is_busy:
        with (
            pytest.raises(LaunchError, match="257 MiB more"),
            freed_afterwards([A], read=read, deadline_s=0),
        ):
            pass
    else:
        with freed_afterwards([A], read=read, deadline_s=0):
            pass


def test_a_gpu_never_readable_is_neither_waited_for_nor_taken_for_free() -> None:
    # A58: the other one is still waited for.
    read, n_asked = reader(states(None, 0), states(None, 9000), states(None, 0))
    with freed_afterwards([A, C], read=read) as unread:
        pass
    assert n_asked() == 3
    assert unread == [A.label]


def test_a_gpu_that_stops_answering_is_waited_for_until_it_answers_again() -> None:
    # A58: unknown after the stop is not free; the third reading says that it still holds 9,000 MiB.
    read, n_asked = reader(states(0), states(None), states(9000), states(0))
    with freed_afterwards([A], read=read) as unread:
        pass
    assert n_asked() == 4
    assert unread == []


def test_a_gpu_that_never_answers_again_is_not_called_busy() -> None:
    read, n_asked = reader(states(0), states(None))
    with freed_afterwards([A], read=read, deadline_s=0.01) as unread:
        pass
    assert n_asked() >= 2
    assert unread == [A.label]


def test_without_a_gpu_nothing_is_read() -> None:
    read, n_asked = reader(states(0))
    with freed_afterwards([], read=read):
        pass
    assert n_asked() == 0


def test_an_error_in_the_session_is_not_delayed_by_waiting() -> None:
    read, n_asked = reader(states(0), states(9000))
    with pytest.raises(KeyError), freed_afterwards([A], read=read):
        raise KeyError
    assert n_asked() == 1
