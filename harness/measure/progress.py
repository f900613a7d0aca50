"""The progress of a run, on stderr."""

import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.console import say
from harness.plan.experiment import Experiment, SessionPlan
from harness.record.row import Row
from harness.terminal import err


class RunProgress:
    """Follows a run: a bar per session on a terminal, one plain line per event elsewhere."""

    def __init__(self, experiment: Experiment) -> None:
        self._sessions = len(experiment.sessions)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            console=err,
            disable=not err.is_terminal,
        )
        self._task: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def session_starts(self, session: SessionPlan, *, requests: int) -> None:
        title = f"session {session.order}/{self._sessions} {session.arm.name}"
        self._task = self._bars.add_task(title, total=requests, last="starting servers")
        self._line(f"{title}: starting servers")

    def session_ready(self, session: SessionPlan, *, start_s: float) -> None:
        self._bars.update(self._task, last=f"ready after {start_s:.0f} s")
        self._line(f"session {session.order}/{self._sessions}: ready after {start_s:.0f} s")

    def row(self, row: Row) -> None:
        """One request was journalled."""
        ttft = "failed" if row.ttft_ms is None else f"{row.ttft_ms:.0f} ms"
        text = f"{row.pass_name} document {row.doc}: {ttft}"
        self._bars.update(self._task, advance=1, last=text)
        if row.seq % 10 == 0:
            elapsed = time.monotonic() - self._began
            self._line(f"  {row.session} request {row.seq}, {text} ({elapsed:.0f} s so far)")

    def _line(self, text: str) -> None:
        if not err.is_terminal:
            say(text)
