"""Random traces with the structure of real ones: shared prefixes, conversations, repeats."""

import random
from collections.abc import Sequence

import numpy as np

from sim.curves.trace import IdArray, Requests, Trace, offsets_of


def random_trace(seed: int, *, n_requests: int = 60, longest: int = 24) -> Trace:
    """A small trace: every request continues, cuts or repeats an earlier one, or is new."""
    draw = random.Random(seed)
    n_ids = draw.choice([2, 3, 50])
    seen: list[list[int]] = [[]]
    for _ in range(n_requests):
        base = draw.choice(seen[-draw.choice([1, 5, 1000]) :])
        cut = draw.choice([len(base), draw.randint(0, len(base))])
        # Few distinct ids make different prompts meet again by chance too.
        fresh = [draw.randrange(n_ids) for _ in range(draw.randint(0, longest // 2))]
        seen.append((base[:cut] + fresh)[:longest])
    paths = seen[1:]
    block = draw.choice([1, 4, 16])
    tokens = [len(path) * block + draw.randrange(block) for path in paths]
    return trace_of(paths, block_tokens=block, input_tokens=tokens)


def trace_of(
    paths: Sequence[Sequence[int] | IdArray],
    *,
    block_tokens: int = 16,
    input_tokens: list[int] | None = None,
) -> Trace:
    """A trace of one request a second; prompts fill their blocks unless their tokens are given."""
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    n = len(paths)
    requests = Requests(
        time_ns=np.zeros(n, dtype=np.int64),
        session=np.arange(n),
        session_start_ns=np.arange(n) * 10**9,
        input_tokens=np.array(input_tokens, np.int64) if input_tokens else counts * block_tokens,
        output_tokens=np.zeros(n, dtype=np.int64),
        block_tokens=block_tokens,
        source="synthetic",
    )
    ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(p, np.int64) for p in paths)])
    return Trace(requests, ids, offsets_of(counts))


def chat_trace(seed: int, *, n_accesses: int, sessions_at_once: int = 200) -> Trace:
    """A large trace of interleaved conversations, made with numpy: at least ``n_accesses`` blocks.

    A conversation begins with one of 20 system prompts (30–60 blocks), each turn adds 2–40 blocks
    and repeats everything before it; a conversation has 1–25 turns.
    """
    draw = random.Random(seed)
    system = [np.arange(100 * s, 100 * s + draw.randint(30, 60)) for s in range(20)]
    next_id, total = 2000, 0
    running: list[tuple[IdArray, int]] = []
    parts: list[IdArray] = []
    while total < n_accesses:
        while len(running) < sessions_at_once:
            running.append((draw.choice(system), draw.randint(1, 25)))
        which = draw.randrange(len(running))
        path, turns = running[which]
        grown = draw.randint(2, 40)
        path = np.concatenate([path, np.arange(next_id, next_id + grown)])
        next_id += grown
        parts.append(path)
        total += len(path)
        if turns > 1:
            running[which] = (path, turns - 1)
        else:
            running.pop(which)
    return trace_of(parts)
