"""Fixtures for tests against the scripted loopback server."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from servers.fake import FakeServer


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """Start ``FakeServer(spec, script=[...], ...)`` in this process; stopped after the test."""
    with contextlib.ExitStack() as stack:

        def start(*args: object, **kwargs: object) -> FakeServer:
            return stack.enter_context(FakeServer(*args, **kwargs))  # type: ignore[arg-type]

        yield start
