"""Where every prompt token comes from with the tiers that engines really have, at given sizes.

Each size is replayed: the GPU tier as vLLM's pool, the host tier as ``sim.tiers`` has it. One
request after the other, settled in between and computed in one prefill step; then the host tiers
of LMCache do not mind what the GPU holds, so each tier is replayed once a size, not once a pair.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sim.curves.jit import read_only, run, runs_compiled
from sim.curves.kernels.tiers import lru_tier, watermark_tier
from sim.curves.pool import pool_hits
from sim.curves.stack import first_counted, hit_caps, in_units, order_of
from sim.curves.trace import Ints
from sim.curves.tree import PrefixTree
from sim.tiers.host import HostRequest, HostShare
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.registry import open_host
from sim.tiers.settings import HostSettings, TierKind
from sim.tiers.spec import TierSpec

MOST_COPIED = 5_000_000
"""Blocks looked up, all sizes together, up to which second copies are followed: half a minute."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Token counts of shape (GPU capacities, host capacities), out of ``prompt_tokens``.

    Capacities in GPU blocks of ``gpu_tokens`` and host chunks of ``chunk_tokens``, ascending.
    Computed tokens are the rest, partial blocks and chunks included. ``prompt_tokens``, and
    ``accesses``, the blocks of the trace looked up, are of the ``requests`` counted.
    """

    gpu_blocks: Ints
    host_chunks: Ints
    gpu_tokens: int
    chunk_tokens: int
    gpu_hit_tokens: Ints
    host_loaded_tokens: Ints
    prompt_tokens: int
    accesses: int
    requests: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a tree in the order served; ``first``: how many of them only warm the tiers."""

    tree: PrefixTree
    order: Ints
    first: int
    last_token: bool
    compiled: bool | None = None

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        *,
        order: Ints | None = None,
        last_token: bool = False,
        warm_up: float = 0.0,
        compiled: bool | None = None,
    ) -> "Replay":
        """All requests by arrival unless an ``order`` is given; ``warm_up`` is a share of them."""
        order = order_of(tree, order)
        return cls(tree, order, first_counted(len(order), warm_up), last_token, compiled)

    @property
    def prompts(self) -> Ints:
        """Tokens of each prompt, in the order served."""
        return self.tree.requests.input_tokens[self.order]

    def lru(self, capacity: int, unit: int, *, is_gpu: bool) -> tuple[Ints, int]:
        """Units each request finds in an LRU of ``capacity``, and the second copies left out.

        The GPU's prompts take room for a partial last block, too, and compute their last token.
        """
        tokens = self.tree.requests.input_tokens
        *depths, blocks = in_units(self.tree, unit)
        cap = hit_caps(self.tree, unit, blocks, last_token=self.last_token and is_gpu)
        units = np.maximum(tokens // unit, blocks)
        room = np.maximum(-(-tokens // unit), blocks) if is_gpu else units
        hits, lists = np.zeros(len(self.order), dtype=np.int64), self._empty()
        copies = run(
            lru_tier,
            *self._paths(depths),
            *(read_only(units), read_only(room), read_only(cap)),
            *(capacity, *lists, hits),
            compiled=self._runs_compiled(),
        )
        return hits, copies

    def watermark(self, capacity: int, settings: HostSettings) -> Ints:
        """Chunks each request finds in LMCache's server of ``capacity`` chunks."""
        unit = settings.chunk_tokens
        HostChunks(capacity, watermark=settings.watermark, evict_ratio=settings.evict_ratio)
        *depths, blocks = in_units(self.tree, unit)
        units = np.maximum(self.tree.requests.input_tokens // unit, blocks)
        hits = np.zeros(len(self.order), dtype=np.int64)
        run(
            watermark_tier,
            *self._paths(depths),
            *(read_only(units), capacity, settings.watermark, settings.evict_ratio),
            *(*self._empty(), hits),
            compiled=self._runs_compiled(),
        )
        return hits

    def _paths(self, depths: Sequence[Ints]) -> list[Ints]:
        tree = self.tree
        ends, parent = read_only(tree.last_edge), read_only(tree.parent)
        return [read_only(self.order), ends, parent, *(read_only(depth) for depth in depths)]

    def _empty(self) -> tuple[Ints, Ints, Ints]:
        """What is held of each node, and the list: its ends alone."""
        n = len(self.tree.parent) + len(self.tree.requests)
        ends = np.full(n + 1, n, dtype=np.int64)
        return np.zeros(n, dtype=np.int64), ends, ends.copy()

    def _runs_compiled(self) -> bool:
        return runs_compiled(20 * len(self.order) + len(self.tree.parent), self.compiled)


def tier_surface(
    replay: Replay,
    gpu_blocks: Sequence[int],
    host_chunks: Sequence[int],
    *,
    kind: TierKind,
    settings: HostSettings,
) -> Surface:
    """The split at every pair of the sizes given, with a host tier of ``kind``.

    Raises SpecError for a kind or size whose outcome is a matter of timing (``native`` with prompts
    larger than itself), saying why.
    """
    block = replay.tree.requests.block_tokens
    gpu, host = _capacities(gpu_blocks, "GPU"), _capacities(host_chunks, "host")
    on_gpu = [gpu_tokens(replay, int(size), len(gpu)) for size in gpu]
    loaded = np.zeros((len(gpu), len(host)), dtype=np.int64)
    for j, size in enumerate(host.tolist()):
        loads = _loads(replay, size, kind, settings)
        for i, hit in enumerate(on_gpu):
            loaded[i, j] = loads(hit)[replay.first :].sum()
    counted = replay.order[replay.first :]
    hits = np.array([hit[replay.first :].sum() for hit in on_gpu], dtype=np.int64)
    return Surface(
        gpu, host, block, settings.chunk_tokens,
        np.repeat(hits[:, None], len(host), axis=1), loaded,
        prompt_tokens=int(replay.tree.requests.input_tokens[counted].sum()),
        accesses=int(replay.tree.blocks_of_requests()[counted].sum()), requests=len(counted),
    )  # fmt: skip


def _capacities(values: Sequence[int], tier: str) -> Ints:
    """``values`` sorted, each once. Raises ValueError for none, or one below 0."""
    edges = np.unique(np.asarray(values, dtype=np.int64))
    if not len(edges) or edges[0] < 0:
        raise ValueError(f"{tier} capacities {list(values)[:5]}; give at least one, none below 0")
    return edges


def gpu_tokens(replay: Replay, usable_blocks: int, n_sizes: int = 1) -> Ints:
    """Tokens each request finds in the GPU tier, second copies followed where that is affordable."""
    block = replay.tree.requests.block_tokens
    hits, copies = replay.lru(usable_blocks, block, is_gpu=True)
    has_room = int(replay.prompts.max(initial=0)) <= usable_blocks * block
    if copies and has_room and replay.tree.n_accesses * n_sizes <= MOST_COPIED:
        hits = pool_hits(replay.tree, usable_blocks, order=replay.order)
    return hits * block


def most_served(replay: Replay, chunk_tokens: int) -> int:
    """Tokens that two tiers which never evict serve."""
    unit, n_tokens = replay.tree.requests.block_tokens, int(replay.prompts.sum())
    on_gpu = replay.lru(n_tokens // unit + len(replay.order), unit, is_gpu=True)[0] * unit
    found = replay.lru(n_tokens, chunk_tokens, is_gpu=False)[0] * chunk_tokens
    return int((on_gpu + _behind(found, replay, on_gpu))[replay.first :].sum())


def _loads(
    replay: Replay, chunks: int, kind: TierKind, settings: HostSettings
) -> Callable[[Ints], Ints]:
    """Given what each request finds on the GPU, what it loads; in tokens."""
    if kind == "native":  # what it stores depends on what the GPU holds
        return lambda hit: np.array(
            [found.loaded_tokens for found in _served(replay, chunks, kind, settings, hit)],
            dtype=np.int64,
        )
    if kind == "lmcache-mp":
        found = replay.watermark(chunks, settings)
    else:
        nothing = np.zeros_like(replay.order)
        shares = _served(replay, chunks, kind, settings, nothing)
        found = np.array([share.hit_chunks for share in shares], dtype=np.int64)
    found = found * settings.chunk_tokens
    return lambda hit: _behind(found, replay, hit)


def _behind(found: Ints, replay: Replay, hit: Ints) -> Ints:
    """What a tier that ``found`` so many tokens loads behind the GPU's ``hit``.

    The last prompt token is computed, so it is not loaded (``sim.tiers.host.lmcache_load``).
    """
    most = replay.prompts - 1 if replay.last_token else replay.prompts
    return np.maximum(np.minimum(found, most) - hit, 0)


def _served(
    replay: Replay, chunks: int, kind: TierKind, settings: HostSettings, hit: Ints
) -> Iterator[HostShare]:
    """What ``sim.tiers`` of ``kind`` does for each request whose GPU ``hit`` is given."""
    tree, unit = replay.tree, settings.chunk_tokens
    begin, finish, _ = in_units(tree, unit)
    first = np.cumsum(finish - begin) - finish  # plus a unit's depth: its name
    tier = open_host(
        TierSpec(
            block_size=tree.requests.block_tokens,
            num_gpu_blocks=2,
            max_num_batched_tokens=2**61,
            host=kind,
            host_chunks=chunks,
            **settings.settings(),
        )
    )
    assert tier is not None, "a kind of TierKind is a tier"
    unnamed = int((finish - begin).sum())
    for r, gpu_hit in zip(replay.order.tolist(), hit.tolist(), strict=True):
        names: list[int] = []
        edge = int(tree.last_edge[r])
        while edge >= 0:
            names[:0] = range(first[edge] + begin[edge], first[edge] + finish[edge])
            edge = int(tree.parent[edge])
        n_prompt = int(tree.requests.input_tokens[r])
        n_behind = max(n_prompt // unit - len(names), 0)
        names += range(unnamed, unnamed + n_behind)
        unnamed += n_behind
        request = HostRequest(n_prompt, names, gpu_hit, max(n_prompt, 1))
        tier.check(request)
        yield tier.serve(request)
