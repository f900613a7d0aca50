"""Unpack a kit on the box, with the standard library alone and every core."""

import compileall
import io
import json
import lzma
import os
import platform
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from .wheels import KitError

# Imported by every server at its start; compiled here once, by all cores, instead of by the first.
_COMPILED = ("vllm", "lmcache", "openai", "pydantic", "mcp", "openai_harmony")


def read_kit(kit: Path) -> dict[str, Any]:
    """kit.json; KitError when the folder is no whole kit, or not one for this Python and CPU."""
    try:
        content: dict[str, Any] = json.loads((kit / "kit.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KitError(f"{kit} has no kit.json: no kit, or its packing did not end") from None
    except ValueError as error:
        raise KitError(f"{kit / 'kit.json'} is not JSON ({error}): carry it again") from None
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != content["python"] or platform.machine() != "x86_64":
        raise KitError(
            f"the kit is for Python {content['python']} on x86_64, this is {here} on "
            f"{platform.machine()}: start it with the Python that has torch"
        )
    return content


def unpack(kit: Path, site: Path) -> dict[str, Any]:
    """Unpack every part of ``kit`` into ``site``, compile what servers import; returns bytes.

    Raises KitError for a part that is not what was packed.
    """
    content = read_kit(kit)
    site.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=len(content["parts"])) as threads:
        jobs = [threads.submit(_unpack_part, kit, part, site) for part in content["parts"]]
        total = sum(job.result() for job in jobs)
    for name in _COMPILED:
        compileall.compile_dir(str(site / name), quiet=2, workers=os.cpu_count() or 1)
    return {"bytes": total}


def _unpack_part(kit: Path, part: dict[str, Any], site: Path) -> int:
    packed = (kit / part["name"]).read_bytes()
    if sha256(packed).hexdigest() != part["sha256"]:
        raise KitError(f"{part['name']} is not what was packed: carry it again")
    content = lzma.decompress(packed)
    if part["place"] is None:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(site, filter="data")
        return len(content)
    target = site / part["place"]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    target.chmod(0o755)
    return len(content)
