"""For every test: Ctrl-C and hang-up work in the programs tests start, also under nohup."""

import signal


def pytest_configure() -> None:
    # A shell's background job, or nohup, starts us with these ignored, and children inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
