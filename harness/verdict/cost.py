"""What the treatment costs, when it pays for itself, and what a run cannot say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.plan.arms import CONTROL, treatments
from harness.verdict.measured import ArmCell, Statistics, TokenSums
from harness.verdict.paired import CONFIDENCE
from harness.verdict.schema import Cost, DecisionEvidence, Price, Replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the plan put where, in tokens; ``host_tokens`` None when the chunk size is unknown.

    ``working_set_tokens``: all documents, without their questions. ``host_gib`` None: the
    treatment has no host tier. ``has_control``: the plan measures one.
    """

    documents: int
    working_set_tokens: int
    gpu_tokens: int
    host_tokens: int | None
    host_gib: float | None
    passes: tuple[str, ...]
    has_control: bool = False


def cost_of(statistics: Statistics, pass_name: str, *, host_gib: float | None) -> Cost:
    """Host memory, what storing adds to the first pass, and the replays that pay for one store.

    Times in ms a document, treatment − baseline, so above 0 is a price; null where a cell is
    empty, and for the host memory of a treatment without a host tier.
    """
    first = next(iter(statistics.passes), "")
    saving = _saving(statistics, pass_name) if pass_name != first else None
    cold = _saving(statistics, first)
    store = cold and Price(
        median_ms=0.0 - cold.median_ms,  # not -x, which makes -0.0 of 0
        low_ms=0.0 - cold.high_ms,
        high_ms=0.0 - cold.low_ms,
        interval=cold.interval,
    )
    arms = statistics.arms_in(first)
    stored = _tokens(arms, statistics.compared[1])
    loaded = _tokens(statistics.arms_in(pass_name), statistics.compared[1])
    return Cost(
        host_gib=host_gib,
        first_pass=first or None,
        store_cost=store,
        replay_saving=saving,
        break_even_replays=_break_even(store, saving),
        settle_after_store_ms={
            arm: arms[arm].settle_p50_ms if arm in arms else None
            for arm in statistics.compared
            if arm is not None
        },
        stored_tokens=stored.stored if stored else None,
        loaded_bytes=loaded.loaded_bytes if loaded else None,
    )


def _saving(statistics: Statistics, pass_name: str) -> Price | None:
    """Baseline − treatment."""
    pairs = statistics.pairs_in(pass_name)
    if pairs is None:
        return None
    low, high = pairs.difference_ms.low, pairs.difference_ms.high
    return Price(
        median_ms=pairs.difference_ms.median,
        low_ms=low,
        high_ms=high,
        interval=pairs.difference_ms.interval,
    )


def _break_even(store: Price | None, saving: Price | None) -> Replays:
    """Replays of a document that pay for storing it once: cheapest case to dearest case.

    0 where storing cost nothing that was measurable; null where a replay saves nothing.
    """
    if store is None or saving is None:
        return Replays(median=None, low=None, high=None)
    return Replays(
        median=_replays(store.median_ms, saving.median_ms),
        low=_replays(store.low_ms, saving.high_ms),
        high=_replays(store.high_ms, saving.low_ms),
    )


def _replays(price_ms: float, saving_ms: float) -> float | None:
    if saving_ms <= 0:
        return None
    return max(0.0, price_ms) / saving_ms


def _tokens(arms: Mapping[str, ArmCell], arm: str | None) -> TokenSums | None:
    """The token sums of an arm in a pass; None where no row knows its sources."""
    cell = arms.get(arm) if arm is not None else None
    return cell.tokens if cell and cell.tokens.n else None


def not_established(
    statistics: Statistics,
    evidence: DecisionEvidence | None,
    sizes: Sizes | None,
    environment: Mapping[str, Any],
) -> Iterator[str]:
    """What a reader might take from the numbers and must not."""
    gpus = environment.get("gpus")
    where = ", ".join(gpus) if gpus else environment.get("cpu") or "an unknown machine"
    yield f"Speeds of other hardware: every time was measured on {where}."
    if environment.get("build") == "cpu":
        yield (
            "GPU speeds: this is vLLM's CPU build. Token sources carry over, milliseconds do not."
        )
    if environment.get("model") == "tiny":
        yield "Speeds of a real model: this one is tiny, and its weights are random."
    if sizes is None:
        if not statistics.sources:
            yield "Where the prompt tokens came from: the imported rows do not say."
        yield "That the sessions were fresh servers: the imported rows do not say."
    else:
        yield "Concurrency: one request was in flight at a time."
        yield from _tier_limits(sizes)
    if evidence is not None and evidence.coverage < CONFIDENCE:
        yield (
            f"A median's interval: the range over {evidence.n_blocks} A B blocks holds it in "
            f"{evidence.coverage:.0%} of runs, not in {CONFIDENCE:.0%}."
        )
    treatment = statistics.compared[1]
    if treatment and not any(CONTROL in content.arms for content in statistics.passes.values()):
        yield f"That {treatment} does nothing where nothing is due: there is no control session."
    others = treatments(session.arm for session in statistics.sessions)
    if treatment and len(others) > 1:
        left_out = ", ".join(arm for arm in others if arm != treatment)
        yield f"How {left_out} compares with the baseline: only {treatment} is compared."
    yield "Other engines, versions, models, prompt lengths or access orders."


def _tier_limits(sizes: Sizes) -> Iterator[str]:
    if sizes.host_gib is None:
        return
    if sizes.host_tokens is None:
        yield "How large the host tier is in tokens: no row tells its chunk size."
    elif sizes.host_tokens >= sizes.working_set_tokens:
        yield (
            "A host tier smaller than the working set: this one holds "
            f"{sizes.host_tokens:,} tokens, the documents have {sizes.working_set_tokens:,}."
        )
