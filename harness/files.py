"""Reading and writing the small files of a run: strict JSON, whole lines, whole files."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import InputError
from sim.errors import SpecError
from sim.strict_json import strict_json

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

# In the words of TOML and JSON, where pydantic speaks of Python's types.
_MESSAGES = {
    "tuple_type": "Input should be a list",
    "list_type": "Input should be a list",
    "dict_type": "Input should be a table (in JSON: an object)",
    "model_type": "Input should be a table (in JSON: an object)",
}

MANIFEST_FILE = "manifest.json"
"""What makes a folder a run's."""

_BUFFER_BYTES = 2**20  # a million lines of a journal in a third of the time of the default 8 KiB


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number and its line end, split on LF only; one line is held at a time.

    InputError when the file cannot be read.
    """
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their numbers; a torn last line goes to ``notes`` instead."""
    for number, line in numbered_lines(path):
        if not line.endswith(b"\n"):
            notes.append(
                f"{path}: the last line ({len(line)} bytes) has no line end: a record cut short "
                "by a kill or a full disk; it is left out"
            )
        elif line.strip():
            yield number, line[:-1]


def load_json(text: bytes, *, where: str) -> Any:
    """Parse strict JSON (``sim.strict_json``); InputError names ``where``."""
    try:
        return strict_json(text)
    except SpecError as error:
        raise InputError(f"{where}: {error}") from None


def validated(kind: "type[Model]", content: Any, *, where: str, hint: str | None = None) -> "Model":
    """``content`` as a ``kind``; InputError names ``where`` and the field."""
    from pydantic import ValidationError

    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{where}: {describe_invalid(error)}", hint=hint) from None


def describe_invalid(error: "ValidationError") -> str:
    """One problem of a validation error as ``field: message, got value``: a misspelt field first."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    if first["type"] == "missing":
        return f"{'.'.join(map(str, first['loc']))}: Field required"
    field = ".".join(str(part) for part in first["loc"]) or "record"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = _MESSAGES.get(first["type"], first["msg"])
    return f"{field}: {message}, got {_short(first.get('input'))}{more}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def dump_json(value: Any) -> str:
    """Strict one-line JSON: ASCII, no NaN or infinity (ValueError)."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8) in one step; see ``replacing``."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which takes the place of ``path`` in one step when the block ends well.

    A crash leaves the old file or the new. A link is followed. Anything that is no regular file, a
    device above all, and a folder that is not there are refused (InputError): the step is a
    rename, and would put a file in its place. Errors name ``path``, never the new file.
    """
    refuse_irregular(path)
    refuse_missing_folder(path)
    target = _resolved(path)
    # Of a fixed length, so that it fits wherever the name does.
    temporary = target.with_name(f".kvcliff-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # None: a write to a full disk
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    """``path`` with its links followed; InputError where they lead in a circle."""
    try:
        return path.resolve()
    except RuntimeError:  # Python 3.13 leaves the loop in the path instead, for the next step
        raise InputError(f"{path} cannot be written: its links lead in a circle") from None


def refuse_missing_folder(path: Path) -> None:
    """InputError when there is no folder to write ``path`` into."""
    folder = _resolved(path).parent
    if not folder.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no folder {path.parent}", hint="create it first"
        )


def refuse_irregular(path: Path) -> None:
    """InputError when ``path`` is there and no regular file: a rename would replace a device."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no regular file; give the name of a file to write")


def check_outputs(outputs: Sequence[Path], inputs: Iterable[Path] = ()) -> None:
    """InputError unless ``outputs`` are files of their own that can be written: none of ``inputs``.

    Links are followed. For a command to ask before it reads: nothing is lost, nor half written.
    """
    read = {_resolved(path) for path in inputs}
    for path in outputs:
        refuse_evidence(path)
        refuse_missing_folder(path)
        if _resolved(path) in read:
            raise InputError(f"{path} is read by this command; give the name of another file")
    if len({_resolved(path) for path in outputs}) < len(outputs):
        raise InputError(f"two outputs are one file: {', '.join(map(str, outputs))}")


def refuse_evidence(path: Path) -> None:
    """InputError when ``path`` is a file a run folder's results rest on, or no regular file."""
    refuse_irregular(path)
    target = _resolved(path)
    is_run = (target.parent / MANIFEST_FILE).exists()
    if is_run and target.suffix in (".toml", ".jsonl", ".json", ".log"):
        raise InputError(
            f"{path} lies among the files of a run and would take the place of one",
            hint="write it somewhere else",
        )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """``write_atomically`` of one line each."""
    write_atomically(path, "".join(line + "\n" for line in lines))


def write_json(path: Path, content: Any) -> None:
    """``write_atomically`` of readable, strict JSON."""
    write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
