"""The slow, obvious cache the fast paths are tested against: one ordered dict per capacity."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

Path = Sequence[Hashable]


def prefix_keys(paths: Iterable[Sequence[int]]) -> list[list[int]]:
    """Each path with its ids replaced by numbers that are equal only for equal whole prefixes."""
    names: dict[tuple[int, int], int] = {}
    named = []
    for path in paths:
        keys, node = [], -1
        for block in path:
            node = names.setdefault((node, block), len(names))
            keys.append(node)
        named.append(keys)
    return named


class ReferenceLru:
    """An LRU of ``capacity`` units under the prefix rule; 0 holds nothing.

    ``forward`` touches a path's first unit first (LMCache's own simulator); otherwise its last
    unit first, as vLLM frees and LMCache's MP server touches.
    """

    def __init__(self, capacity: int, *, forward: bool = False) -> None:
        self._capacity = capacity
        self._forward = forward
        self._units: OrderedDict[Hashable, None] = OrderedDict()

    def serve(self, path: Path) -> int:
        """Hits of one request: its longest run of leading units that are here. Then touch all."""
        hits = 0
        while hits < len(path) and path[hits] in self._units:
            hits += 1
        for unit in path if self._forward else reversed(path):
            self._units.pop(unit, None)
            self._units[unit] = None
            while len(self._units) > self._capacity:
                self._units.popitem(last=False)
        return hits


def hits_at(paths: Iterable[Path], capacity: int, *, forward: bool = False) -> int:
    """Hits of a serial replay of ``paths`` at one capacity."""
    cache = ReferenceLru(capacity, forward=forward)
    return sum(cache.serve(path) for path in paths)


def chunk_path(path: Path, block_tokens: int, chunk_tokens: int, tokens: int) -> list[Hashable]:
    """Names of the full chunks of a prompt of ``tokens`` tokens whose blocks are ``path``.

    A chunk's name is the block its last token lies in, and where in it.
    """
    ends = range(chunk_tokens, tokens + 1, chunk_tokens)
    return [(path[(end - 1) // block_tokens], (end - 1) % block_tokens) for end in ends]


def split_at(
    paths: Sequence[Path],
    block_tokens: int,
    *,
    gpu_tokens: int,
    gpu_blocks: int,
    chunk_tokens: int,
    host_chunks: int,
) -> tuple[int, int]:
    """(GPU-hit tokens, host-loaded tokens) of a serial replay through both tiers.

    The host tier is asked about every prompt and is written through, whatever the GPU holds; what
    it loads begins where the GPU's hit ends.
    """
    gpu, host = ReferenceLru(gpu_blocks), ReferenceLru(host_chunks)
    hit = loaded = 0
    for path in paths:
        tokens = len(path) * block_tokens
        on_gpu = gpu.serve(chunk_path(path, block_tokens, gpu_tokens, tokens)) * gpu_tokens
        in_host = host.serve(chunk_path(path, block_tokens, chunk_tokens, tokens)) * chunk_tokens
        hit += on_gpu
        loaded += max(0, in_host - on_gpu)
    return hit, loaded
