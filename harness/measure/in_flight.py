"""Several requests in flight: a worker each, which sends when its turn has come.

In a closed loop the next request goes out when an answer has ended; in an open one when it is due,
however many are still being answered.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import httpx

from harness.measure.answer import StreamResult
from harness.measure.stream import complete_prompt, open_client
from sim.workload import Request

_LOOK_S = 0.5
"""Pause between two looks at the servers while answers are awaited."""

_AHEAD_S = 2.0
"""A connection is opened or verified so long before a request is due; vLLM's server closes one that
is idle for 5 s."""

_JUST_USED_S = 1.0
"""So long after an answer its connection needs no proof."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go; ``deadline_s`` bounds each answer."""

    base_url: str
    model: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to send. ``due_s``: seconds after the pass began; None: when a worker is free."""

    request: Request
    request_id: str
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a turn; ``late_ms``: sent so long after it was due, None in a closed loop."""

    result: StreamResult
    late_ms: float | None


@dataclass(slots=True)
class _Pass:
    """What the workers of a pass share; ``began_ns`` by ``perf_counter_ns``."""

    turns: Sequence[Turn]
    target: Target
    think_s: float
    began_ns: int = 0
    sent: dict[int, Sent] = field(default_factory=dict)
    is_over: bool = False
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """The pass begins now; an open loop once its first connections are open."""
        is_open_loop = self.turns[0].due_s is not None
        self.began_ns = time.perf_counter_ns() + (round(_AHEAD_S * 1e9) if is_open_loop else 0)

    def next_turn(self) -> int | None:
        """The number of the next turn; None when there is none left."""
        with self._lock:
            if self.is_over or self._next == len(self.turns):
                return None
            self._next += 1
            return self._next - 1

    def due_ns(self, turn: Turn) -> int | None:
        return None if turn.due_s is None else self.began_ns + round(turn.due_s * 1e9)


def send_all(
    turns: Sequence[Turn],
    target: Target,
    *,
    workers: int,
    think_s: float = 0.0,
    check_alive: Callable[[], None],
) -> list[Sent]:
    """Send every turn, at most ``workers`` at once; what became of them, in order.

    ``think_s``: a worker's pause after an answer. ``check_alive`` raises when a server died; that
    and whatever a worker could not handle ends the pass.
    """
    shared = _Pass(turns, target, think_s)
    begin = threading.Barrier(workers, action=shared.begin)
    pool = ThreadPoolExecutor(workers)
    try:
        working = {pool.submit(_work, shared, begin) for _ in range(workers)}
        while working:
            ended, working = wait(working, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
            check_alive()
    finally:
        # Of a pass that is cut short no worker takes another turn, and none is waited for: their
        # answers end when the servers do.
        shared.is_over = True
        pool.shutdown(wait=False)
    return [shared.sent[number] for number in range(len(turns))]


def _work(shared: _Pass, begin: threading.Barrier) -> None:
    begin.wait()
    with open_client(shared.target.base_url, deadline_s=shared.target.deadline_s) as client:
        ended: float | None = None
        while (number := shared.next_turn()) is not None:
            shared.sent[number] = _send(shared, shared.turns[number], client, ended=ended)
            ended = time.monotonic()
            time.sleep(shared.think_s)


def _send(shared: _Pass, turn: Turn, client: httpx.Client, *, ended: float | None) -> Sent:
    """Send ``turn`` when it is due; ``ended``: when this worker's last answer did (monotonic)."""
    due_ns = shared.due_ns(turn)
    if due_ns is not None:
        _sleep_until(due_ns - round(_AHEAD_S * 1e9))
    result = complete_prompt(
        client,
        model=shared.target.model,
        prompt=turn.request.prompt,
        output_tokens=turn.request.output_tokens,
        deadline_s=shared.target.deadline_s,
        request_id=turn.request_id,
        session_id=turn.request_id,
        is_just_used=ended is not None and time.monotonic() - ended < _JUST_USED_S,
        wait_for_turn=None if due_ns is None else lambda: _sleep_until(due_ns),
    )
    if due_ns is None or result.sent_ns is None:
        return Sent(result, None)
    return Sent(result, (result.sent_ns - due_ns) / 1e6)


def _sleep_until(stamp_ns: int) -> None:
    """Sleep until ``perf_counter_ns`` says ``stamp_ns``; not at all when that is over."""
    time.sleep(max(0.0, (stamp_ns - time.perf_counter_ns()) / 1e9))
