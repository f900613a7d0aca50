"""Steps that take minutes: each is timed, written down, and not repeated once it is done."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

DONE: Final = "done"
FAILED: Final = "failed"

Work = Callable[[], Mapping[str, Any] | None]
"""Does one step; what it returns is kept with the step, and must be JSON."""


def stamp(*inputs: object) -> str:
    """Sixteen hex digits that change with any of ``inputs`` (texts, numbers, lists of them)."""
    return hashlib.sha256(json.dumps(inputs, default=str).encode()).hexdigest()[:16]


class StepError(Exception):
    """A step did not do its work; ``result`` says what it found instead, and must be JSON."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(json.dumps(dict(result)))
        self.result = dict(result)


class Steps:
    """The steps of one folder, in a JSON file that is whole at any moment.

    Each is ``{"stamp", "status", "began_s", "seconds", "result"}``; ``began_s`` counts from
    ``began``, by default now: the clock is monotonic, so pass the caller's own reading of it.
    ``say`` is told of every step as it ends.
    """

    def __init__(
        self, path: Path, *, say: Callable[[str], None], began: float | None = None
    ) -> None:
        self.path = path
        self._say = say
        self._began = time.monotonic() if began is None else began
        self._steps: dict[str, dict[str, Any]] = _read(path)

    def do(
        self, name: str, work: Work, *, inputs: object = None, makes: tuple[Path, ...] = ()
    ) -> dict[str, Any]:
        """The result of step ``name``: done now, or before with the same ``inputs``.

        A step whose ``makes`` are gone is done again. What ``work`` raises is written down and
        raised on, so that the next call repeats the step.
        """
        mark = stamp(inputs)
        before = self._steps.get(name)
        is_done = before is not None and (before["status"], before["stamp"]) == (DONE, mark)
        if before is not None and is_done and all(path.exists() for path in makes):
            self._say(f"{name}: done before, in {before['seconds']:.1f} s")
            return dict(before["result"])
        began = time.monotonic()
        try:
            result = dict(work() or {})
        except StepError as error:
            self._write(name, mark, FAILED, began, error.result)
            raise
        except BaseException as error:
            self._write(name, mark, FAILED, began, {"error": f"{type(error).__name__}: {error}"})
            raise
        self._write(name, mark, DONE, began, result)
        return result

    def _write(
        self, name: str, mark: str, status: str, began: float, result: dict[str, Any]
    ) -> None:
        seconds = round(time.monotonic() - began, 2)
        self._steps[name] = {
            "stamp": mark,
            "status": status,
            "began_s": round(began - self._began, 2),
            "seconds": seconds,
            "result": result,
        }
        write_whole(self.path, json.dumps({"schema": 1, "steps": self._steps}, indent=1))
        shown = " ".join(f"{key}={_short(value)}" for key, value in result.items())
        self._say(f"{name}: {status} in {seconds:.1f} s {shown}".rstrip())


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that a reader sees the old content or the new one, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    draft.replace(path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return dict(content["steps"])


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
