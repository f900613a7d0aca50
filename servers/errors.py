"""What can go wrong with servers; every error carries what helps."""


class ServerError(Exception):
    """A server could not do its part; ``hint`` says what helps."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class LaunchError(ServerError):
    """The servers of an arm did not come up as asked, or could not be stopped."""


class ServerDied(ServerError):  # noqa: N818 - what happened, as LaunchError says what failed
    """A server ended, or declared itself broken, while it was needed."""
