"""Errors a user can act on; ``cli.main`` turns them into one message and an exit code."""


class KvcliffError(Exception):
    """What happened, with its numbers; ``hint`` says what to do. ``exit_code`` as in the README."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class InputError(KvcliffError):
    """A plan, journal, file or argument that cannot be used."""

    exit_code = 2


class MachineError(KvcliffError):
    """This machine, or a server on it, cannot do what was asked."""

    exit_code = 3


class BugError(KvcliffError):
    """A fault of kvcliff's own; made in ``cli`` alone, of whatever else came up to it."""

    exit_code = 70  # EX_SOFTWARE of sysexits.h
