"""The two arms against each other: by document inside each A B block, then over the blocks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb
from statistics import median

from harness.verdict.measured import Block, DocumentRatio, Interval, OrderEffect, Paired
from harness.verdict.tally import PassRows, Tally

CONFIDENCE = 0.95
_MOST_DOCUMENTS = 1_000  # listed one by one; a longer list helps nobody and fills the file

Pair = tuple[int, float, float]  # document, TTFT of the first, TTFT of the second, in ms

Neighbours = Sequence[tuple[int, int]]
"""Positions in the run, 1 first, of a baseline session and the treatment session beside it."""

LEAST_MS = 1e-6  # below a nanosecond nothing was measured, and a ratio of it is no number


def neighbours(order: Mapping[int, str], base: str, treatment: str | None) -> Neighbours:
    """The k-th session of each arm, for every k: neighbours in any order a plan may have.

    ``order``: arm by position, whether anything was measured there or not. Paired before a session
    without rows is left out, so that what remains of A B B A is never the first A and the second B.
    """
    of = (
        [position for position, arm in order.items() if arm == name] for name in (base, treatment)
    )
    return list(zip(*of, strict=False))


def compare_arms(total: Tally, pass_name: str, pairs_of_sessions: Neighbours) -> Paired | None:
    """Baseline against treatment: ratio and difference per block and document, median over blocks.

    In A B B A the two sessions of a block are neighbours, and drift enters the two blocks with
    opposite sign. None when no pair is complete.
    """
    blocks: list[Block] = []
    documents: dict[int, list[Pair]] = defaultdict(list)
    for positions in pairs_of_sessions:
        names = [total.at_position(position) for position in positions]
        rows = [total.sessions[name].passes.get(pass_name) for name in names if name is not None]
        base, treated = (*rows, None, None)[:2]
        pairs = _pairs(base, treated) if base and treated else []
        if not pairs:
            continue
        ratio, difference_ms = _ratio(pairs), median(first - second for _, first, second in pairs)
        blocks.append(
            Block(sessions=tuple(names), n=len(pairs), ratio=ratio, difference_ms=difference_ms)
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


def price_of(total: Tally, source: int, pairs_of_sessions: Neighbours) -> Interval | None:
    """What the treatment adds to a request, in ms, where its document comes from one place in both.

    ``source``: index into ``SOURCE_CLASSES``. The median over documents and passes of each block,
    then over the blocks; None where no document has that source in both arms.
    """
    blocks = []
    for positions in pairs_of_sessions:
        names = [name for at in positions if (name := total.at_position(at)) is not None]
        sessions = [total.sessions[name].passes for name in names]
        if len(sessions) < 2:
            continue
        added = [
            treated - base
            for pass_name in sessions[0].keys() & sessions[1].keys()
            for _, base, treated in _pairs(*(passes[pass_name].only(source) for passes in sessions))
        ]
        if added:
            blocks.append(median(added))
    return interval_of(blocks) if blocks else None


def compare_sessions(total: Tally, pass_name: str, first: str, last: str) -> OrderEffect | None:
    """The same arm early and late, paired by document: last ÷ first, above 1 it got slower."""
    pairs = _pairs(*(total.sessions[name].passes[pass_name] for name in (last, first)))
    if not pairs:
        return None
    return OrderEffect(sessions=(first, last), n=len(pairs), last_over_first=_ratio(pairs))


def interval_of(values: Sequence[float]) -> Interval:
    """The median of ``values``, one a block, and where the median of all such blocks may lie.

    From the k-th smallest to the k-th largest, with the largest k that holds it in 95 % of runs
    whatever the distribution is (order statistics, by the binomial of 1/2); below six blocks no k
    does, and the range of all of them is given with its share.
    """
    n, ordered = len(values), sorted(values)
    k = 1
    while _coverage(n, k + 1) >= CONFIDENCE:
        k += 1
    coverage = _coverage(n, k)
    blocks = f"{n} A B block{'s' if n > 1 else ''}"
    words = f"range over {blocks}" if k == 1 else f"ranks {k} to {n + 1 - k} of {blocks}"
    held = f"which holds the median in {coverage:.0%} of runs" if n > 1 else "which says no spread"
    return Interval(
        median=median(ordered),
        low=ordered[k - 1],
        high=ordered[n - k],
        interval=f"{words}, {held}",
        coverage=coverage,
    )


def _coverage(n: int, k: int) -> float:
    """How often the ``k``-th lowest to the ``k``-th highest of ``n`` values hold their median."""
    if 2 * k > n:
        return 0.0
    return 1 - sum(comb(n, i) for i in range(k)) / (1 << (n - 1))


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
