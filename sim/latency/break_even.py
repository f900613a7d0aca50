"""From how many tokens a load from the host beats computing them anew, by a fitted latency model.

Predictions, not measurements: what each rests on beyond the calibration rows is in ``assumed``.
"""

from dataclasses import dataclass
from math import inf

from sim.latency.model import Estimate, LatencyModel, Shape


@dataclass(frozen=True, slots=True)
class LoadOrRecompute:
    """Loading ``tokens`` in whole chunks, ``loaded_bytes`` of KV, against computing them anew.

    Both after nothing cached, with the same question behind. ``saved`` is recompute − load: above 0
    the load is faster. Rates count everything a load costs: setup, chunks and bytes.
    """

    tokens: int
    loaded_bytes: int
    recompute: Estimate
    load: Estimate
    saved: Estimate
    assumed: tuple[str, ...]

    @property
    def is_established(self) -> bool:
        """Whether the load is faster beyond the fit's own error: by more than two standard errors.

        Not where the fit gives the load no time at all, or has no rows to spare for an error.
        """
        error_s = self.saved.standard_error_s
        return error_s is not None and self.load.value_s > 0 and self.saved.value_s > 2 * error_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens computed a second."""
        return _rate(self.tokens, self.recompute.value_s)

    @property
    def load_bytes_per_s(self) -> float:
        """Bytes loaded a second."""
        return _rate(self.loaded_bytes, self.load.value_s)

    @property
    def needed_bytes_per_s(self) -> float:
        """Bytes a second at which loading takes as long as computing."""
        return _rate(self.loaded_bytes, self.recompute.value_s)


def load_or_recompute(
    model: LatencyModel, *, chunks: int, chunk_tokens: int, chunk_bytes: int
) -> LoadOrRecompute:
    """The two ways to have ``chunks`` chunks of KV, by ``model``; what it assumes is said."""
    tokens, loaded = chunks * chunk_tokens, chunks * chunk_bytes
    question = int(model.ranges["computed tokens"][0])
    hit = Shape(question, tokens)
    loading, computing = Shape(question, tokens, loaded, chunks), Shape(question + tokens, 0)
    recompute = model.difference(of=computing, minus=hit)
    load = model.difference(of=loading, minus=hit)
    beyond = [
        f"{way}: {why}"
        for way, shape in (("loading", loading), ("computing", computing))
        for why in model.beyond(shape)
    ]
    saved = model.difference(of=computing, minus=loading)
    assumed = dict.fromkeys([*beyond, *recompute.assumed, *load.assumed])
    return LoadOrRecompute(tokens, loaded, recompute, load, saved, tuple(assumed))


def break_even_chunks(model: LatencyModel, *, chunk_tokens: int, chunk_bytes: int) -> int | None:
    """The fewest whole chunks from which on every calibrated load is established to be faster.

    None: the largest is not. What is saved is convex in the tokens (setup once, the rest linear,
    attention quadratic) and starts at or below 0, so a larger load than the break-even is faster,
    too, but its error may be larger than what it saves. Where ``per_pair`` had to be taken as 0,
    computing few tokens looks dearer than it is: the answer is then a lower bound.
    """
    first = None
    for chunks in range(int(model.ranges["loaded chunks"][1]), 0, -1):
        sizes = load_or_recompute(
            model, chunks=chunks, chunk_tokens=chunk_tokens, chunk_bytes=chunk_bytes
        )
        if not sizes.is_established:
            break
        first = chunks
    return first


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else inf
