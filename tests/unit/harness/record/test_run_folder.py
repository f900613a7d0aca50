import threading
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.record.folder import PLAN_FILE, RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / PLAN_FILE).write_text("")
    return RunFolder(tmp_path)


def test_a_run_is_measured_by_one_writer_and_seen_to_be(run: RunFolder) -> None:
    assert not run.is_being_measured()
    with run.lock():
        assert run.is_being_measured()
        with pytest.raises(InputError, match="is being measured by another process"):
            run.lock().__enter__()
        assert run.is_being_measured()
    assert not run.is_being_measured()


def test_looking_at_a_run_never_refuses_the_writer_that_starts_in_that_moment(
    run: RunFolder,
) -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            run.is_being_measured()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(2_000):
            with run.lock():
                assert run.is_being_measured()
    finally:
        is_over.set()
        for looker in lookers:
            looker.join()
