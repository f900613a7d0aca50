"""The counters over one pass of requests in flight together: what all of them did in sum.

With several in flight the counters cannot tell the requests apart, but what is attributed to each
by other means must add up to them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.counters.attribute import moved_between
from harness.counters.errors import CounterError, ForeignTraffic, MissingSeries
from harness.counters.pages import SPLIT_NAMES
from sim.split import TokenSplit


@dataclass(frozen=True, slots=True)
class PassRequest:
    """One request of a pass; ``split`` None: not known, because its answer broke or events are lost.

    ``loaded_chunks``: of the host tier, where ``split`` is known and the arm has one.
    """

    prompt_tokens: int
    split: TokenSplit | None
    loaded_chunks: int | None = None


def check_pass(
    before: Mapping[str, int], after: Mapping[str, int], requests: Iterable[PassRequest]
) -> None:
    """Raise CounterError unless ``requests`` are what the counters moved by, source by source.

    Of requests whose split is not known the counters must leave room for: at most their prompts.
    Raises as ``moved_between``, ForeignTraffic for tokens nobody asked for.
    """
    moved = moved_between(before, after)
    if missing := [name for name in SPLIT_NAMES if name not in moved]:
        raise MissingSeries(f"{', '.join(missing)} not among the counters: vLLM before 0.16")
    asked = list(requests)
    known = [r.split for r in asked if r.split is not None]
    unknown_tokens = sum(r.prompt_tokens for r in asked if r.split is None)
    sums = (
        sum(split.computed for split in known),
        sum(split.gpu_hit for split in known),
        sum(split.host_loaded for split in known),
    )
    counted = tuple(moved[name] for name in SPLIT_NAMES)
    rest = [theirs - ours for theirs, ours in zip(counted, sums, strict=True)]
    if min(rest) < 0 or (unknown_tokens == 0 and any(rest)):
        raise CounterError(
            f"by source the requests sum to {_sources(sums)} prompt tokens, the counters of the "
            f"pass say {_sources(counted)}"
        )
    if sum(rest) > unknown_tokens:
        raise ForeignTraffic(
            f"the counters have {sum(rest)} prompt tokens more than the attributed requests, and "
            f"those that are not attributed sent {unknown_tokens}",
            hint="another client uses this server; give the run a server of its own",
        )
    _check_chunks(moved, asked)


def _check_chunks(moved: Mapping[str, int], asked: Iterable[PassRequest]) -> None:
    """LMCache's server counts the chunks it loaded, in the transfer mode of GPUs and CPUs alike."""
    chunks = [r.loaded_chunks for r in asked]
    counted = moved.get("host_loaded_chunks")
    if counted is None or None in chunks:
        return
    if (due := sum(n for n in chunks if n is not None)) != counted:
        raise CounterError(f"LMCache loaded {counted} chunks in the pass, the requests need {due}")


def _sources(sums: Iterable[int]) -> str:
    computed, gpu_hit, host_loaded = sums
    return f"{computed} computed + {gpu_hit} GPU + {host_loaded} host"
