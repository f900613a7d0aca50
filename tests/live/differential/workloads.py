"""Random workloads for every comparison of the simulator with an engine's own classes.

A workload is small on purpose: a handful of blocks, a vocabulary of two token ids, so that hits,
duplicates, evictions and exact multiples come up in most of them. ``tests/live/differential`` has
one driver per engine class; each serves a ``Case`` and reports an ``Outcome`` per request.
"""

import random
from dataclasses import dataclass, replace

from sim.tiers.host import align_up
from sim.tiers.settings import HostKind
from sim.tiers.spec import TierSpec

STOP_ID = 2
"""The stop token id; the other ids are 0 and 1, so it ends a request only where it is meant to."""


BYTES_PER_TOKEN = 2 * 64 * 4
"""Keys and values of the one layer every driver's engine has: one head of 64 floats."""


NO_PREFIX_CACHE = 0.1
"""Share of the workloads that run without vLLM's prefix cache."""


UNALIGNED_CHUNKS = 0.25
"""Share of the workloads of LMCache in process whose chunks are any number of tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request; ``stopped`` when its last output id is ``STOP_ID`` before its max_tokens.

    ``external_blocks``: blocks beyond the local hit that a connector loads, where the driver plays
    the connector itself. ``ticks``: of the host tier's timer after each prefill step, the last
    number for all that follow. ``are_told``: whether ``sim`` knows them; otherwise it must refuse
    where they matter.
    """

    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    stopped: bool = False
    external_blocks: int = 0
    ticks: tuple[int, ...] = (0,)
    are_told: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """One server and the requests it serves, one after the other."""

    seed: int
    tiers: TierSpec
    steps: tuple[Step, ...]

    def without(self, first: int, n: int) -> "Case":
        """This case less ``n`` requests from ``first`` on."""
        return replace(self, steps=self.steps[:first] + self.steps[first + n :])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's tokens by source and everything the tiers remember after it.

    Names are those of whole prefixes (``Prefixes``), the same on both sides. ``hashed``: name by
    block id. ``host``: names of the resident chunks, the next to be evicted first.
    """

    computed: int
    gpu_hit: int
    host_loaded: int
    stored_chunks: int
    free_order: tuple[int, ...]
    hashed: tuple[tuple[int, int], ...]
    host: tuple[int, ...] = ()


class Prefixes:
    """Names prefixes by their token ids, without any engine's hash and without ``sim``'s keys."""

    def __init__(self, tokens_each: int) -> None:
        self._tokens_each = tokens_each

    def of(self, tokens: tuple[int, ...]) -> list[int]:
        """One name per full block or chunk of ``tokens``."""
        ends = range(self._tokens_each, len(tokens) + 1, self._tokens_each)
        return [hash((end, tokens[:end])) for end in ends]


def random_case(seed: int, host: HostKind = "none", **changes: object) -> Case:
    """The workload of ``seed`` for a server with ``host``; ``changes`` replace fields of its tiers.

    Shared prefixes, whole multiples of a block, prompts that fill the GPU, prompts that go on from
    an earlier answer, early stops, prefill in one step or in many.
    """
    rng = random.Random(f"{host}/{seed}")
    tiers = replace(_tiers(rng, host), **changes)  # type: ignore[arg-type]
    room = (tiers.num_gpu_blocks - 1) * tiers.block_size
    longest = min(room, 40 * tiers.block_size)
    history: list[tuple[int, ...]] = [()]
    steps = []
    # A cache server takes a second to start and stop: fewer and longer workloads there.
    for _ in range(rng.randint(15, 40) * (4 if host == "lmcache-mp" else 1)):
        n_out = min(room, rng.choice([1, 2, 3, rng.randint(1, 2 * tiers.block_size)]))
        prompt = _prompt(rng, tiers, history, longest, room + 1 - n_out)
        outputs = [rng.randrange(2) for _ in range(n_out)]
        stopped = rng.random() < 0.15
        if stopped:
            outputs[-1] = STOP_ID
        steps.append(Step(prompt, tuple(outputs), stopped, rng.choice([0, 0, 1, 99])))
        if host == "lmcache-mp":
            steps[-1] = _with_ticks(rng, steps[-1], len(prompt) <= tiers.max_num_batched_tokens)
        history.append(rng.choice([prompt, prompt + tuple(outputs)]))
    return Case(seed, tiers, tuple(steps))


def _with_ticks(rng: random.Random, step: Step, is_one_step: bool) -> Step:
    """``step`` with ticks between its prefill steps: none, as many as do anything, or any."""
    if is_one_step:
        return step
    ticks = rng.choice([(0,), (99,), tuple(rng.randrange(3) for _ in range(12))])
    return replace(step, ticks=ticks, are_told=rng.random() < 0.7)


def _prompt(
    rng: random.Random, tiers: TierSpec, history: list[tuple[int, ...]], longest: int, most: int
) -> tuple[int, ...]:
    block, chunk = tiers.block_size, tiers.chunk_tokens
    base = rng.choice(history)
    cuts = [len(base), rng.randint(0, len(base))]
    cuts += [len(base) // unit * unit for unit in (block, chunk)]
    cut = rng.choice(cuts)
    sizes = [most, rng.randint(1, longest), cut + rng.randint(1, 2 * block)]
    sizes += [rng.randint(1, -(-longest // block)) * block]
    sizes += [(cut // chunk + rng.randint(0, 3)) * chunk]
    size = rng.choice(sizes)
    size = max(1, min(size, longest, most))
    # A vocabulary of 2 makes prefixes collide by chance too, not only by construction.
    return (base[:cut] + tuple(rng.randrange(2) for _ in range(size)))[:size]


def _tiers(rng: random.Random, host: HostKind) -> TierSpec:
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 32])
    if host == "lmcache-mp":
        block_size = max(2, block_size)  # blocks of 1 are refused, see ``sim.tiers.lmcache_mp``
    num_gpu_blocks = rng.choice([3, 5, 8, 13, 24, 40, 80])
    # Not too many steps a prompt: one step costs an engine as much as a whole prompt costs `sim`.
    steps_of = rng.choice([10**6, 10**6, 10**6, block_size, 3 * block_size + 1, 7 * block_size])
    if num_gpu_blocks * block_size < 50:
        steps_of = rng.choice([10**6, 1, 7])
    chunk_tokens = block_size * rng.choice([1, 1, 2, 3, 4])
    tiers = TierSpec(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        max_num_batched_tokens=steps_of,
        chunk_tokens=chunk_tokens,
        host=host,
    )
    tiers = replace(tiers, prefix_caching=rng.random() >= NO_PREFIX_CACHE)
    if host == "none":
        return tiers
    if host == "lmcache" and rng.random() < UNALIGNED_CHUNKS:
        chunk_tokens = rng.randint(1, 4 * block_size)
        tiers = replace(tiers, chunk_tokens=chunk_tokens)
    prompt_chunks = (num_gpu_blocks - 1) * block_size // chunk_tokens
    host_chunks = rng.choice(
        [rng.randint(1, 12), max(1, prompt_chunks), prompt_chunks + 1, 2 * prompt_chunks + 3]
    )
    tiers = replace(tiers, host_chunks=host_chunks)
    if host != "lmcache-mp":
        return tiers
    chunk_bytes = chunk_tokens * BYTES_PER_TOKEN
    return replace(
        tiers,
        max_num_batched_tokens=rng.choice([10**6, steps_of, steps_of]),
        watermark=rng.choice([0.5, 0.8, 0.8, 0.95, 1.0]),
        evict_ratio=rng.choice([0.01, 0.2, 0.2, 0.5, 1.0]),
        policy=rng.choice(["LRU", "LRU", "LRU", "noop"]),
        host_bytes=host_chunks * align_up(chunk_bytes) + rng.choice([0, 0, 1, 4000]),
        chunk_bytes=chunk_bytes,
    )
