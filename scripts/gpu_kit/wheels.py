"""From the package index to one tree of files: the wheels for the box, unpacked as pip would."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

BOX_PYTHON: Final = "3.12"
# pip matches the glibc a wheel names exactly, not "at most"; 39 is the box's.
_GLIBC_MINORS: Final = (17, 24, 26, 27, 28, 31, 34, 35, 39)
_PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_PIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.+!]*")


class KitError(Exception):
    """The kit cannot be made or used: what happened, and what to do."""


def read_pins(path: Path) -> list[str]:
    """``name==version`` lines of ``path``, without comments; KitError names file and line.

    Every name once: two versions of one would both be unpacked.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        pin = line.partition("#")[0].strip()
        if not pin:
            continue
        if not _PIN.fullmatch(pin):
            raise KitError(f"{path}:{number}: {pin!r} is no pin; expected NAME==VERSION")
        name = re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()
        if name in pins:
            raise KitError(f"{path}:{number}: {pin} pins {name} again, after {pins[name]}")
        pins[name] = pin
    return list(pins.values())


def download(pins: Iterable[str], folder: Path) -> list[Path]:
    """One wheel for the box for every pin, in ``folder``; what is there already stays.

    Nothing else may be in ``folder``. Raises KitError with pip's last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    words += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    words += ["--python-version", BOX_PYTHON, "--implementation", "cp"]
    for abi in (f"cp{BOX_PYTHON.replace('.', '')}", "abi3", "none"):
        words += ["--abi", abi]
    for platform in _PLATFORMS:
        words += ["--platform", platform]
    wanted = list(pins)
    done = subprocess.run([*words, *wanted], capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-6:])
        raise KitError(f"pip download ended with {done.returncode}:\n{last}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(wanted):
        raise KitError(
            f"{folder} holds {len(wheels)} wheels for {len(wanted)} pins; empty it and pack again"
        )
    return wheels


def unpack_wheels(wheels: Iterable[Path], site: Path) -> int:
    """Unpack every wheel into the new folder ``site``; returns its bytes.

    ``NAME.data/purelib`` and ``platlib`` are merged as an installer does; commands and headers are
    left out, since nothing on the box is started by name. RECORD files, all hashes that do not
    compress, are left out too: they serve uninstalling.
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    total = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                place = _place(member.filename)
                if place is None or member.is_dir():
                    continue
                target = site / place
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                total += member.file_size
    return total


def _place(name: str) -> str | None:
    """Where a wheel's member goes, relative to the site folder; None for nowhere."""
    parts = name.split("/")
    if ".." in parts or name.startswith("/"):
        raise KitError(f"a wheel names a file outside itself: {name!r}")
    if parts[0].endswith(".data"):
        return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None
    if parts[0].endswith(".dist-info") and parts[-1] in ("RECORD", "RECORD.jws"):
        return None
    return name
