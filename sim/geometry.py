"""Bytes of KV a token needs, and which local files say so: no framework, no download.

The plain case every capacity here rests on: one group of full-attention layers with one KV head
count. Anything else is refused, since a wrong size would misplace every capacity; ``sim.layout``
answers for those.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sim.errors import SpecError
from sim.layout import KvLayout
from sim.tiers.host import align_up
from sim.units import GIB


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Size of one token's KV, all layers, summed over tensor-parallel ranks, in bytes."""

    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1:
            raise SpecError(f"{self.bytes_per_token} bytes of KV per token; at least 1 is needed")

    @classmethod
    def from_config(cls, path: Path, kv_dtype: str) -> "KvGeometry":
        """Read ``path``, a config.json or the folder holding one.

        ``kv_dtype`` is what the cache is kept in ("bfloat16", "fp8", …); "auto" takes the config's
        own dtype, unless that is float32, which vLLM's "auto" casts down. Raises SpecError for a
        model that is not predictable to the token (``KvLayout.why_not_predictable``) or a config
        with a size missing; OSError when there is no file.
        """
        layout = KvLayout.from_config(path, kv_dtype)
        if layout.why_not_predictable is not None:
            raise SpecError(f"{layout.source}: {layout.why_not_predictable}")
        return cls(sum(group.bytes_per_token or 0 for group in layout.groups))

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Bytes of one LMCache chunk, all layers in one object, before alignment."""
        return self.bytes_per_token * chunk_tokens

    def host_chunks(self, gib: float, chunk_tokens: int) -> int:
        """Chunks a host store of ``gib`` GiB holds; each takes a multiple of 4,096 bytes."""
        return host_bytes(gib) // align_up(self.chunk_bytes(chunk_tokens))

    def gib(self, n_tokens: int) -> float:
        """GiB of KV that ``n_tokens`` tokens need."""
        return n_tokens * self.bytes_per_token / GIB


def host_bytes(gib: float) -> int:
    """Bytes LMCache reserves for ``--l1-size-gb gib``; its "GB" is 2**30, cut to whole bytes."""
    return int(gib * GIB)


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
