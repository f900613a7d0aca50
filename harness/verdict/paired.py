"""The two arms against each other: by document inside each A B block, then over the blocks."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal

from harness.plan.arms import BASELINE
from harness.verdict.measured import Block, DocumentRatio, Interval, OrderEffect, Paired
from harness.verdict.tally import PassRows, Tally

# Below six blocks a percentile bootstrap cannot leave out the extremes at 95 %: the smallest of 5
# values is the whole resample's median too often. Fewer blocks get their range, called a range.
MIN_BLOCKS_FOR_INTERVAL = 6
CONFIDENCE = 0.95
_RESAMPLES = 9_999
_MOST_DOCUMENTS = 1_000  # listed one by one; a longer list helps nobody and fills the file

Pair = tuple[int, float, float]  # document, TTFT of the first, TTFT of the second, in ms

LEAST_MS = 1e-6  # below a nanosecond nothing was measured, and a ratio of it is no number


def compare_arms(total: Tally, pass_name: str, treatment: str | None) -> Paired | None:
    """Baseline against treatment: ratio and difference per block and document, median over blocks.

    A block pairs the k-th session of each arm, so that in A B B A its two sessions are neighbours
    and drift enters the two blocks with opposite sign. None when no pair is complete.
    """
    if treatment is None:
        return None
    blocks: list[Block] = []
    documents: dict[int, list[Pair]] = defaultdict(list)
    arms = total.in_order(BASELINE, pass_name), total.in_order(treatment, pass_name)
    for base, treated in zip(*arms, strict=False):
        pairs = _pairs(*(total.sessions[name].passes[pass_name] for name in (base, treated)))
        if not pairs:
            continue
        ratio, difference_ms = _ratio(pairs), median(first - second for _, first, second in pairs)
        blocks.append(
            Block(sessions=(base, treated), n=len(pairs), ratio=ratio, difference_ms=difference_ms)
        )
        for pair in pairs:
            documents[pair[0]].append(pair)
    if not blocks:
        return None
    ratio_of_all = interval_of([block.ratio for block in blocks])
    return Paired(
        ratio=ratio_of_all.median,
        **ratio_of_all.model_dump(exclude={"median"}),
        difference_ms=interval_of([block.difference_ms for block in blocks]),
        blocks=blocks,
        n_documents=len(documents),
        documents=[_document(doc, pairs) for doc, pairs in sorted(documents.items())]
        if len(documents) <= _MOST_DOCUMENTS
        else None,
    )


def compare_sessions(total: Tally, pass_name: str, first: str, last: str) -> OrderEffect | None:
    """The same arm early and late, paired by document: last ÷ first, above 1 it got slower."""
    pairs = _pairs(*(total.sessions[name].passes[pass_name] for name in (last, first)))
    if not pairs:
        return None
    return OrderEffect(sessions=(first, last), n=len(pairs), last_over_first=_ratio(pairs))


def interval_of(values: Sequence[float]) -> Interval:
    """The median of ``values``, one a block, and where it may lie.

    Six or more: percentile bootstrap with a fixed seed, so that a run gives the same bytes twice.
    """
    n, low, high = len(values), min(values), max(values)
    kind: Literal["range", "bootstrap"] = "range"
    words = f"range over {n} A B block{'s' if n > 1 else ''}"
    if n < MIN_BLOCKS_FOR_INTERVAL:
        words += "; too few for a confidence interval"
    elif low != high:
        (low, high), kind = _bootstrap(values), "bootstrap"
        words = f"95 % bootstrap interval over {n} A B blocks"
    return Interval(median=median(values), low=low, high=high, interval=words, interval_kind=kind)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    import numpy as np  # here: half a second of import that short runs never need
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.asarray(values),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(1),
    ).confidence_interval
    return float(found.low), float(found.high)


def _pairs(first: PassRows, second: PassRows) -> list[Pair]:
    """Documents complete in both; a time of 0 has no ratio and is in no pair."""
    times = {
        doc: ttft for doc, ttft in zip(first.doc, first.ttft_ms, strict=True) if ttft > LEAST_MS
    }
    return [
        (doc, times[doc], ttft)
        for doc, ttft in zip(second.doc, second.ttft_ms, strict=True)
        if ttft > LEAST_MS and doc in times
    ]


def _ratio(pairs: Sequence[Pair]) -> float:
    return median(first / second for _, first, second in pairs)


def _document(doc: int, pairs: Sequence[Pair]) -> DocumentRatio:
    """One document over the blocks; low and high are the range, never an interval."""
    ratios = [first / second for _, first, second in pairs]
    return DocumentRatio(
        doc=doc,
        n_blocks=len(pairs),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        difference_ms=median(first - second for _, first, second in pairs),
    )
