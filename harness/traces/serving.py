"""How a trace's requests are served and counted, by one tier alone; what that assumes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness.traces.load import Loaded
from sim.curves.stack import Curve, curve


@dataclass(frozen=True, slots=True)
class Serving:
    """How requests are served and counted (see ``sim.curves.stack.curve``)."""

    last_token: bool = False
    decode: bool = False
    warm_up: float = 0.0
    forward: bool = False


def serial_curve(loaded: Loaded, how: Serving, unit_tokens: int | None = None) -> Curve:
    """Hits of requests one after the other; ``unit_tokens``: of a block (default: the trace's)."""
    return curve(loaded.tree, order=loaded.order, unit_tokens=unit_tokens, **asdict(how))


def shared_assumptions(loaded: Loaded, how: Serving) -> list[str]:
    """What a curve and a surface both take for granted."""
    last = (
        "the last prompt token is always computed: a prompt found whole loses its last block (that "
        "vLLM then keeps a second copy of it is left out of curves, and of surfaces of many blocks)"
        if how.last_token
        else "no last-token rule: a prompt found whole is a hit to its last block"
    )
    said = [
        "shares are of the prompt tokens; those behind the last whole block that is listed are always "
        "computed, and that block takes no room",
        last,
        "prefill_speedup_upper_bound = 1 / (1 − hit share): a bound, decode and queueing gain less",
    ]
    if how.warm_up:
        said.append(f"the first {how.warm_up:.0%} of the requests warm the cache and do not count")
    if loaded.ruler.bytes_per_token is not None:
        said.append(f"{loaded.ruler.bytes_per_token:,g} bytes of KV a token")
    return said


def gpu_too_small(loaded: Loaded, capacities: Sequence[int]) -> list[str]:
    """A warning where ``capacities`` (blocks) are below what the longest request needs."""
    small = [c for c in capacities if c < loaded.longest_blocks]
    if not small:
        return []
    return [
        f"{len(small)} of the GPU capacities are below the longest request's "
        f"{loaded.longest_blocks} blocks: vLLM could not run it there"
    ]
