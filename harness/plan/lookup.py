"""Where a model's config.json is: on this machine, or among the shapes that come with kvcliff."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from sim.errors import SpecError

_SHAPES = Path(__file__).parents[1] / "presets" / "models"


def config_of(name: str) -> Path:
    """The config.json, or the folder holding one, that ``name`` means.

    A path, a hub id that is already downloaded, or a shape that comes with kvcliff, in this order;
    nothing is downloaded. SpecError says where it looked.
    """
    shape = shape_of(name)
    try:
        return find_model(name if shape is None else hub_id(name))
    except SpecError as error:
        if shape is None:
            raise SpecError(f"{error}; kvcliff knows {', '.join(shape_names())}") from None
        return shape


def shape_names() -> list[str]:
    """Hub ids whose shape comes with kvcliff."""
    return sorted(path.stem.replace("--", "/") for path in _SHAPES.glob("*.json"))


def shape_of(name: str) -> Path | None:
    """The shape that comes with kvcliff for a hub id or its last part; None where a path wins."""
    file = _SHAPES / f"{hub_id(name).replace('/', '--')}.json"
    is_path = not name or Path(name).expanduser().exists()
    return None if is_path or not file.is_file() else file


def hub_id(name: str) -> str:
    """``name``, or the hub id of a shape that comes with kvcliff where it is the last part."""
    return next((full for full in shape_names() if full.rpartition("/")[2] == name), name)


def find_model(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder or config.json ``name`` means: a path, or a hub id that is already downloaded.

    A path wins. A hub id ("org/name") is looked up in Hugging Face's cache (HF_HUB_CACHE, else
    HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub) at the snapshot its ``refs/main`` names.
    Nothing is downloaded: SpecError says where it looked.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name in (".", ".."):
        raise SpecError(f"model {name!r} is neither a path that exists nor a hub id like org/name")
    repository = hub_cache(environ) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    snapshots = repository / "snapshots"
    if reference.is_file():
        snapshot = snapshots / reference.read_text(encoding="utf-8", errors="replace").strip()
    else:
        found = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found)
            raise SpecError(
                f"{snapshots} holds {len(found)} snapshots: give the path of one: {names}"
            )
        snapshot = found[0] if found else snapshots / "main"
    if not (snapshot / "config.json").is_file():
        raise SpecError(
            f"model {name!r} is not a path, and not downloaded: no config.json in {snapshot}"
        )
    return snapshot


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder Hugging Face's libraries download models into."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "hub"
