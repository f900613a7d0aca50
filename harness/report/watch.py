"""A running experiment seen from its journals alone: the same numbers as the report's."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.record.folder import PREDICTION_FILE, RunFolder
from harness.record.journal import parse_record, walk_predictions
from harness.record.row import Row
from harness.verdict.measured import Statistics
from harness.verdict.stats import summarize

FRESH_S = 1.0  # between two looks; a request takes longer than that on any real model


@dataclass(frozen=True, slots=True)
class View:
    """A run as it is now: its statistics as ``summary.json`` has them, and its last row.

    ``sessions``: name, recorded, planned, in plan order. ``is_running``: a writer holds the run.
    """

    run: str
    statistics: Statistics
    sessions: tuple[tuple[str, int, int], ...]
    last: Row | None
    is_running: bool

    @property
    def is_complete(self) -> bool:
        """Whether every planned request has a row."""
        return all(recorded >= planned for _, recorded, planned in self.sessions)


@dataclass(slots=True)
class Tail:
    """Reads what was appended to a journal since the last look; a torn last line waits."""

    path: Path
    _offset: int = 0
    _lines: int = 0
    _identity: tuple[int, int] | None = None

    def was_replaced(self) -> bool:
        """Whether the file is another one than last time: a session measured again."""
        status = self.path.stat()
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        return before is not None and (before != self._identity or status.st_size < self._offset)

    def rows(self) -> Iterator[Row]:
        """The rows not read before, one at a time; InputError with file, line and field.

        Lighter than ``read_journal``: the shape of each row is checked, not that its sources
        follow from its counters. 17 µs a row.
        """
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._lines += 1
                if line.strip():
                    yield parse_record(line, Row, where=f"{self.path}, line {self._lines}")


class Watcher:
    """Looks at a run folder again and again, reading each journal line once."""

    def __init__(self, run: Path) -> None:
        """InputError when ``run`` has no plan or prediction, as an imported one."""
        self._folder = RunFolder(run)
        self._plan = self._folder.read_plan()
        self._plan_id = self._folder.read_manifest().plan_id
        predictions = walk_predictions(run / PREDICTION_FILE)
        self._planned = Counter(row.session for row in predictions)
        self._tails: dict[Path, Tail] = {}
        self._rows: dict[Path, list[Row]] = {}

    def view(self) -> View:
        """The run as it is now."""
        is_running = self._folder.is_being_measured()  # before reading: the end is not missed
        self._read()
        rows = [row for path in self._folder.journals() for row in self._rows.get(path, ())]
        recorded = Counter(row.session for row in rows)
        return View(
            run=self._folder.name,
            statistics=summarize(
                rows,
                run=self._folder.name,
                plan_id=self._plan_id,
                units=self._plan.units,
                arms=self._plan.order,
            ),
            sessions=tuple((name, recorded[name], n) for name, n in self._planned.items()),
            last=max(rows, key=lambda row: (row.order, row.seq), default=None),
            is_running=is_running,
        )

    def _read(self) -> None:
        present = self._folder.journals()
        for path in set(self._tails) - set(present):  # set aside: the session is measured again
            del self._tails[path], self._rows[path]
        for path in present:
            tail = self._tails.setdefault(path, Tail(path))
            if tail.was_replaced():
                tail = self._tails[path] = Tail(path)
                self._rows[path] = []
            self._rows.setdefault(path, []).extend(tail.rows())


def watch(
    run: Path, show: Callable[[View], None], *, pause: Callable[[float], None] = time.sleep
) -> View:
    """Call ``show`` with every new view until the run is complete or nobody measures it."""
    watcher = Watcher(run)
    while True:
        view = watcher.view()
        show(view)
        if view.is_complete or not view.is_running:
            return view
        pause(FRESH_S)
