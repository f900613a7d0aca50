"""What the treatment costs, when it pays for itself, and what a run cannot say."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from harness.plan.labels import CONTROL, treatments
from harness.verdict.measured import Pass, Statistics, TokenSums
from harness.verdict.paired import MIN_BLOCKS_FOR_INTERVAL
from harness.verdict.schema import Cost, DecisionEvidence, Price, Replays


class PlannedSizes(Protocol):
    """The sizes of a plan in tokens; see ``harness.verdict.decision.Sizes``."""

    @property
    def working_set_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int | None: ...
    @property
    def host_gib(self) -> float | None: ...


def cost_of(statistics: Statistics, pass_name: str, *, host_gib: float | None) -> Cost:
    """Host memory, what storing adds to the first pass, and the replays that pay for one store.

    Times in ms a document, treatment − baseline, so above 0 is a price; null where a cell is
    empty, and for the host memory of a treatment without a host tier.
    """
    first = next(iter(statistics.passes), None)
    cold = statistics.passes[first] if first is not None else None
    replay = statistics.passes.get(pass_name)
    store = _treatment_minus_base(cold)
    replayed = _treatment_minus_base(replay) if pass_name != first else None
    saving = replayed and Price(
        median_ms=0.0 - replayed.median_ms,  # not -x, which makes -0.0 of 0
        low_ms=0.0 - replayed.high_ms,
        high_ms=0.0 - replayed.low_ms,
        interval=replayed.interval,
    )
    stored, loaded = (_tokens(content, statistics.compared[1]) for content in (cold, replay))
    return Cost(
        host_gib=host_gib,
        first_pass=first,
        store_cost=store,
        replay_saving=saving,
        break_even_replays=_break_even(store, saving),
        settle_after_store_ms={
            arm: _settle(cold, arm) for arm in statistics.compared if arm is not None
        },
        stored_tokens=stored.stored if stored else None,
        loaded_bytes=loaded.loaded_bytes if loaded else None,
    )


def _treatment_minus_base(content: Pass | None) -> Price | None:
    pairs = content.paired_ratio if content else None
    if pairs is None:
        return None
    difference = pairs.difference_ms
    return Price(
        median_ms=0.0 - difference.median,
        low_ms=0.0 - difference.high,
        high_ms=0.0 - difference.low,
        interval=difference.interval,
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


def _settle(content: Pass | None, arm: str) -> float | None:
    """Median wait until the counters were final, in ms: storing goes on after the first token."""
    cell = content.arms.get(arm) if content else None
    return cell.settle_p50_ms if cell else None


def _tokens(content: Pass | None, arm: str | None) -> TokenSums | None:
    """The token sums of an arm in a pass; None where no row knows its sources."""
    cell = content.arms.get(arm) if content and arm is not None else None
    return cell.tokens if cell and cell.tokens.n else None


def not_established(
    statistics: Statistics,
    evidence: DecisionEvidence | None,
    sizes: PlannedSizes | None,
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
    if evidence is not None and evidence.n_blocks < MIN_BLOCKS_FOR_INTERVAL:
        yield (
            f"A confidence interval: {evidence.n_blocks} A B blocks give a range; an interval "
            f"needs {MIN_BLOCKS_FOR_INTERVAL}."
        )
    treatment = statistics.compared[1]
    if treatment and not any(CONTROL in content.arms for content in statistics.passes.values()):
        yield f"That {treatment} does nothing where nothing is due: there is no control session."
    others = treatments(session.arm for session in statistics.sessions)
    if treatment and len(others) > 1:
        left_out = ", ".join(arm for arm in others if arm != treatment)
        yield f"How {left_out} compares with the baseline: only {treatment} is compared."
    yield "Other engines, versions, models, prompt lengths or access orders."


def _tier_limits(sizes: PlannedSizes) -> Iterator[str]:
    if sizes.host_gib is None:
        return
    if sizes.host_tokens is None:
        yield "How large the host tier is in tokens: no row tells its chunk size."
    elif sizes.host_tokens >= sizes.working_set_tokens:
        yield (
            "A host tier smaller than the working set: this one holds "
            f"{sizes.host_tokens:,} tokens, the documents have {sizes.working_set_tokens:,}."
        )
