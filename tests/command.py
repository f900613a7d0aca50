"""The command ``kvcliff`` in this process."""

import signal

import pytest

from harness.cli import main


def kvcliff(*words: str) -> int:
    """The exit code of the command line ``words``."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    assert isinstance(ended.value.code, int)
    return ended.value.code
