"""The bytes of a trace: a file, standard input, a folder or an archive, compressed or not."""

import csv
import gzip
import io
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sim.curves.trace import TraceError

READABLE = ("", ".gz", ".xz")
"""Endings after ``.json``, ``.jsonl`` or ``.ndjson`` of files that are read."""

STDIN = "-"

_UNREADABLE = (
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst", "unzstd"),
    (b"BZh", "bzip2", ".bz2", "bunzip2"),
    (b"PK\x03\x04", "zip", ".zip", "unzip"),
    (b"\x04\x22\x4d\x18", "lz4", ".lz4", "unlz4"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", ".7z", "7z x"),
)  # fmt: skip
"""What a file packed so begins with, its name, its ending, and what unpacks it."""

_KINDS = (".json", ".jsonl", ".ndjson")
_PACKED = (*READABLE, *(ending for _, _, ending, _ in _UNREADABLE))

# What is in a folder and cannot be read is refused there, not left out of the trace.
_ENDINGS = tuple(kind + packed for kind in _KINDS for packed in _PACKED)
_READ = ", ".join(kind + packed for kind in _KINDS for packed in READABLE)


def sources(path: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every file of the trace ``path``, in order of name.

    ``-`` is standard input; a folder or tar archive stands for its files that end in ``.json``,
    ``.jsonl`` or ``.ndjson``, packed or not. How a file is packed is seen by its content. Raises TraceError for what cannot be read.
    """
    if path == STDIN:
        yield from _unpacked("standard input", sys.stdin.buffer.read())
        return
    place = Path(path)
    files = files_of(place)
    if not files:
        raise TraceError(f"{path}: the folder has no file ending in {_READ}")
    for file in files:
        yield from _unpacked(str(file), _read(file))


def files_of(place: Path) -> list[Path]:
    """The files ``sources`` reads for ``place``, in order: those of a folder, or itself.

    Raises TraceError for a folder with a file both packed and not, which would be read twice.
    """
    if not place.is_dir():
        return [place]
    files = sorted(file for file in place.iterdir() if file.is_file() and _is_read(file.name))
    _refuse_twice([str(file) for file in files])
    return files


def left_out(place: Path) -> list[str]:
    """What of a folder ``sources`` does not read, by name; folders end in a slash."""
    if not place.is_dir():
        return []
    others = (file for file in place.iterdir() if file.is_dir() or not _is_read(file.name))
    return sorted(file.name + "/" * file.is_dir() for file in others)


def _is_read(name: str) -> bool:
    return name.endswith(_ENDINGS)


def _refuse_twice(names: list[str]) -> None:
    """TraceError where two of ``names`` differ in how they are packed alone."""
    seen: dict[str, str] = {}
    for name in names:
        packed = next((ending for ending in _PACKED if ending and name.endswith(ending)), "")
        first = seen.setdefault(name.removesuffix(packed), name)
        if first != name:
            raise TraceError(f"{first} and {name} are one file, packed and not: leave one of them")


def expected_bytes(path: str) -> int | None:
    """Bytes ``sources`` will give for ``path``; None where only reading tells, as of a ``.gz``."""
    try:
        read = files_of(Path(path))
        if path == STDIN or any(file.suffix not in _KINDS for file in read):
            return None
        return sum(file.stat().st_size for file in read)
    except OSError:
        return None


def csv_numbers(
    file: Path, columns: Mapping[str, Callable[[str], float]]
) -> Iterator[tuple[str, list[float]]]:
    """(file and line, numbers) of each row of a CSV whose header is the names of ``columns``.

    Each column's value is what its function makes of the text. Raises TraceError with file, line
    and field.
    """
    try:
        text = _read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not UTF-8 at byte {error.start}") from None
    rows = csv.reader(text.splitlines(), strict=True)
    try:
        if next(rows, None) != list(columns):
            raise TraceError(f"{file}:1: the header must be {','.join(columns)}")
        for row in filter(None, rows):
            where = f"{file}:{rows.line_num}"
            if len(row) != len(columns):
                raise TraceError(f"{where}: {len(row)} fields, but {len(columns)} in the header")
            cells = zip(columns.items(), row, strict=True)
            yield where, [_number(make, value, where, name) for (name, make), value in cells]
    except csv.Error as error:
        raise TraceError(f"{file}:{rows.line_num}: not CSV: {error}") from None


def _number(make: Callable[[str], float], value: str, where: str, name: str) -> float:
    try:
        return make(value)
    except ValueError:
        raise TraceError(f"{where}: field {name!r} is {value!r}; a number is needed") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from None


def _unpacked(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        elif content[:6] == b"\xfd7zXZ\x00":
            content = lzma.decompress(content)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"{name}: damaged compressed file: {error}") from None
    for magic, what, _, unpack in _UNREADABLE:
        if content.startswith(magic):
            piped = "; a compiled trace is read from its own file alone" if what == "zip" else ""
            raise TraceError(
                f"{name}: packed with {what}, which is not read: unpack it first ({unpack}); read "
                f"are plain files, gzip, xz and tar{piped}"
            )
    if content[257:262] == b"ustar":
        yield from _members(name, content)
    else:
        yield name, content.removeprefix(b"\xef\xbb\xbf")


def _members(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            found = [m for m in archive.getmembers() if m.isfile() and _is_read(m.name)]
            _refuse_twice([f"{name}:{member.name}" for member in found])
            for member in sorted(found, key=lambda m: m.name):
                file = archive.extractfile(member)
                assert file is not None
                yield from _unpacked(f"{name}:{member.name}", file.read())
    except tarfile.TarError as error:
        raise TraceError(f"{name}: damaged archive: {error}") from None
    if not found:
        raise TraceError(f"{name}: the archive has no file ending in {_READ}")
