"""Bytes of KV a token needs, from a local config.json: no framework, no download.

The plain case every capacity here rests on: one group of full-attention layers with one KV head
count. Anything else is refused, since a wrong size would misplace every capacity; ``sim.layout``
answers for those.
"""

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
    def from_config(
        cls,
        path: Path,
        kv_dtype: str,
        *,
        model_dtype: str = "auto",
        max_model_len: int | None = None,
    ) -> "KvGeometry":
        """Read ``path``, a config.json or the folder holding one.

        ``kv_dtype`` is what the cache is kept in ("bfloat16", "fp8", …); "auto" takes what the
        checkpoint declares for it, else ``model_dtype``, else the config's own dtype, float32 cast
        down as vLLM casts it. A window of at least ``max_model_len`` tokens (None: of what the
        config says) leaves nothing out. Raises SpecError for a model that is not predictable to
        the token (``KvLayout.why_not_predictable``) or a config with a size missing; OSError when
        there is no file.
        """
        layout = KvLayout.from_config(
            path, kv_dtype, model_dtype=model_dtype, max_model_len=max_model_len
        )
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
