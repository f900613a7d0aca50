"""What the counters of a server can be unable to say."""

from harness.errors import MachineError


class CounterError(MachineError):
    """The counters cannot say what one request did."""


class ScrapeError(CounterError):
    """A counter page could not be read or holds a value no counter can have."""


class UnreachableError(ScrapeError):
    """Nothing accepts connections on the server's port any more."""


class MissingSeries(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """A series this module needs is not exported; absent is not zero."""


class ForeignTraffic(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """More than our one request moved the counters."""


class CounterReset(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """The two readings come from different server processes, or a counter went down."""
