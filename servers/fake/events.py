"""KV events of the loopback server, framed as vLLM 0.32 frames them (``ZmqEventPublisher``)."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from servers.command import EVENT_TOPIC
from servers.ports import HOST

_CONNECT_MS = 5_000


class EventPublisher:
    """Publishes which blocks a request named to the reader that listens on ``port``."""

    def __init__(self, port: int, block_size: int) -> None:
        self._block_size = block_size
        self._seq = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.connect(f"tcp://{HOST}:{port}")
        # vLLM's start takes longer than a connection; ours must wait for the reader's subscription.
        if self._socket.poll(_CONNECT_MS):
            self._socket.recv()

    def close(self) -> None:
        """End the connection; what the reader has not got within a moment is lost."""
        self._context.destroy(linger=200)

    def stored(
        self, tokens: Sequence[int], *, start: int, session_id: str | None, is_lost: bool = False
    ) -> None:
        """The full blocks of ``tokens`` from token ``start`` on were named by one request.

        ``is_lost``: the batch is numbered and never sent.
        """
        hashes = list(_chain(tokens, self._block_size))
        first = start // self._block_size
        if first >= len(hashes):
            return
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": list(tokens[first * self._block_size : len(hashes) * self._block_size]),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "session_id": session_id,
        }
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        seq, self._seq = self._seq, self._seq + 1
        if not is_lost:
            self._socket.send_multipart([EVENT_TOPIC.encode(), seq.to_bytes(8, "big"), payload])


def _chain(tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """A name for each full block, which depends on all tokens up to its end."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        digest.update(repr(tuple(tokens[start : start + block_size])).encode())
        yield digest.digest()
