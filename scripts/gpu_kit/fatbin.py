"""Cut GPU machine code for other GPUs out of a compiled CUDA library, without relinking it.

nvcc puts a kernel's code for every GPU it was built for into one *container* in the ELF section
``.nv_fatbin``; the loader takes the entry that suits the GPU. Here the entries of one GPU are moved
to the front of their container and the rest is zeroed: no offset and no size changes, so the library
still links as it did, and zeros compress to nothing. The layout is that of CUDA 13 (``cuobjdump``
agrees, see ``tests/unit/scripts/test_gpu_kit.py``).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

SECTION: Final = b".nv_fatbin"
MACHINE_CODE: Final = 2
"""Kind of an entry that holds SASS; 1 is PTX, which any newer GPU's driver could still compile."""

_MAGIC: Final = 0xBA55ED50
_CONTAINER: Final = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes of all entries
_ENTRY: Final = struct.Struct("<HHIQ12xI")  # kind, version, header bytes, payload bytes, arch
_ALIGN: Final = 8


class NotFatbinError(ValueError):
    """The bytes are not what nvcc 13 writes: pruning them would destroy the library."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel image: bytes [start, end) of the file, header included; ``arch`` 90 is sm_90."""

    start: int
    end: int
    kind: int
    arch: int

    @property
    def size(self) -> int:
        """Bytes, header included."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Container:
    """Entries that hold the same kernels for different GPUs; bytes [start, end) of the file."""

    start: int
    body: int
    end: int
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Pruned:
    """What was kept, in bytes. ``fillers``: containers that had nothing for the GPU."""

    containers: int = 0
    fillers: int = 0
    kept_bytes: int = 0
    found_bytes: dict[str, int] = field(default_factory=dict)
    """By ``sm_90`` or ``ptx_80``."""


def prune(image: bytearray, *, arch: int) -> Pruned:
    """Keep only machine code for ``sm_{arch}`` in ``image``, a whole ELF file, in place.

    A container must not become empty: the loader reads its first entry. One without code for the
    GPU keeps the smallest piece of machine code the library has for another one, which the driver
    passes over ("no kernel image"), as it would have. A file without fatbins is left as it is.
    Raises NotFatbinError, with nothing changed, for what is no 64-bit little-endian ELF file or has a
    container that does not parse.
    """
    found = list(containers(image))
    result = Pruned(containers=len(found))
    smallest = _smallest_other(image, found, arch)
    for container in found:
        for entry in container.entries:
            name = f"{'sm' if entry.kind == MACHINE_CODE else 'ptx'}_{entry.arch}"
            result.found_bytes[name] = result.found_bytes.get(name, 0) + entry.size
        wanted = [e for e in container.entries if e.kind == MACHINE_CODE and e.arch == arch]
        kept = b"".join(bytes(image[e.start : e.end]) for e in wanted)
        if not wanted:
            result.fillers += 1
            kept = _filler(image, container, smallest)
        else:
            result.kept_bytes += len(kept)
        _rewrite(image, container, kept)
    return result


def containers(image: bytes | bytearray) -> Iterator[Container]:
    """Every container of an ELF file, in order; NotFatbinError when one does not parse."""
    for offset, size in _sections(image, SECTION):
        place, stop = offset, offset + size
        while place + _CONTAINER.size <= stop:
            magic, _, header_bytes, body_bytes = _CONTAINER.unpack_from(image, place)
            if magic != _MAGIC:  # padding between containers of different object files
                place += _ALIGN
                continue
            container = _container(image, place, header_bytes, body_bytes, stop)
            yield container
            place = offset + _aligned(container.end - offset)


def _container(
    image: bytes | bytearray, start: int, header_bytes: int, body_bytes: int, stop: int
) -> Container:
    body, end = start + header_bytes, start + header_bytes + body_bytes
    if header_bytes < _CONTAINER.size or end > stop:
        raise NotFatbinError(
            f"the container at byte {start} says it ends at {end}, after its section"
        )
    entries = []
    place = body
    while place < end:
        if place + _ENTRY.size > end:
            raise NotFatbinError(f"the container at byte {start} ends inside an entry's header")
        kind, _, entry_header, payload, arch = _ENTRY.unpack_from(image, place)
        after = place + entry_header + payload
        if entry_header < _ENTRY.size or after > end:
            raise NotFatbinError(f"the entry at byte {place} says it ends at {after}, after {end}")
        entries.append(Entry(place, after, kind, arch))
        place = after
    return Container(start, body, end, tuple(entries))


def _sections(image: bytes | bytearray, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections called ``wanted``, from the section header table."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise NotFatbinError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, n_sections, names_index = struct.unpack_from("<HHH", image, 0x3A)
    if table + entry_bytes * n_sections > len(image):
        raise NotFatbinError("the section header table lies outside the file")
    headers = [
        struct.unpack_from("<IIQQQQ", image, table + entry_bytes * i) for i in range(n_sections)
    ]
    if not headers:
        return
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        end = image.index(b"\0", names + name)
        if image[names + name : end] == wanted:
            yield offset, size


def _smallest_other(image: bytearray, found: list[Container], arch: int) -> bytes:
    """The smallest machine code for another GPU; empty when the library has none.

    Never PTX: a driver would compile it for any GPU and use it.
    """
    others = [e for c in found for e in c.entries if e.kind == MACHINE_CODE and e.arch != arch]
    if not others:
        return b""
    smallest = min(others, key=lambda e: e.size)
    return bytes(image[smallest.start : smallest.end])


def _filler(image: bytearray, container: Container, smallest: bytes) -> bytes:
    """The library's smallest piece if it fits, else the container's own smallest entry."""
    if not container.entries:
        return b""
    if smallest and len(smallest) <= container.end - container.body:
        return smallest
    own = min(container.entries, key=lambda e: e.size)
    return bytes(image[own.start : own.end])


def _rewrite(image: bytearray, container: Container, kept: bytes) -> None:
    room = container.end - container.body
    image[container.body : container.end] = kept + bytes(room - len(kept))
    struct.pack_into("<Q", image, container.start + 8, len(kept))


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN
