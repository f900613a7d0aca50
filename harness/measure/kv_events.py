"""The socket on which vLLM's KV events arrive."""

import queue
import threading
from typing import Self

import zmq

from harness.counters.errors import CounterError
from harness.counters.events import KvEvents
from servers.command import EVENT_TOPIC
from servers.ports import HOST

_LOOK_MS = 100
_QUIET_S = 0.05
"""Nothing came for so long: what a settled server published is here."""


class EventSocket:
    """Listens on 127.0.0.1 from before the server starts, so that no batch is missed.

    A thread takes the batches in, because the subscription goes out to a server that connects only
    while somebody looks at the socket. They are decoded when ``drain`` is called, so that nothing
    decodes while a request is timed.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # no limit: a dropped batch is lost for good
        self._socket.setsockopt(zmq.SUBSCRIBE, EVENT_TOPIC.encode())
        self.port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._received: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        while not self._is_over.is_set():
            if self._socket.poll(_LOOK_MS):
                self._received.put(self._socket.recv_multipart())

    def drain(self, events: KvEvents) -> None:
        """Add every batch that has come, until none does for a moment.

        Raises CounterError for a message that is none of vLLM's.
        """
        while True:
            try:
                frames = self._received.get(timeout=_QUIET_S)
            except queue.Empty:
                return
            if len(frames) != 3:
                raise CounterError(f"a message of {len(frames)} frames on the KV event port")
            events.add(frames[1], frames[2])
