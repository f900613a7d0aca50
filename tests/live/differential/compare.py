"""Serve one workload by an engine's classes and by ``sim``, and say where they part."""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field, fields

import sim.predict
from sim.predict import NotPredictable, Prediction, Predictor
from tests.live.differential.workloads import Case, Outcome, Prefixes, Step

Driver = Callable[[Case], Generator[Outcome, None, None]]
"""Serves every step of a case by real classes: one outcome per step, in order."""


@dataclass(slots=True)
class Tally:
    """What a run of workloads covered; a comparison of misses alone would prove nothing.

    ``in_steps``: computed in several prefill steps. ``refused``: requests ``sim`` called
    NotPredictable; neither side served them.
    """

    workloads: int = 0
    requests: int = 0
    with_gpu_hit: int = 0
    with_host_load: int = 0
    mixed: int = 0
    in_steps: int = 0
    evictions: int = 0
    refused: int = 0
    seconds: float = 0.0
    mismatched_seeds: list[int] = field(default_factory=list)
    first_difference: str | None = None

    def __str__(self) -> str:
        shown = asdict(self)
        return ", ".join(f"{name} {value}" for name, value in shown.items() if value)


@dataclass(frozen=True, slots=True)
class Served:
    """A case as ``sim`` takes it: the requests it does not refuse, and what it says of them."""

    case: Case
    outcomes: tuple[Outcome, ...]
    refused: int
    evictions: int


def by_sim(case: Case) -> Served:
    """Serve ``case`` by the predictor; refused requests are left out, for both sides."""
    predictor = sim.predict.Predictor(case.tiers)  # looked up now: a test may plant a wrong one
    block_names: dict[int, int] = {}
    chunk_names: dict[int, int] = {}
    blocks, chunks = Prefixes(case.tiers.block_size), Prefixes(case.tiers.chunk_tokens)
    accepted: list[Step] = []
    outcomes: list[Outcome] = []
    for step in case.steps:
        try:
            said = predictor.request(
                step.prompt,
                len(step.outputs),
                output_ids=step.outputs,
                stopped=step.stopped,
                ticks=step.ticks if step.are_told else None,
            )
        except NotPredictable:
            continue
        accepted.append(step)
        tokens = step.prompt + step.outputs[:-1]
        keys = predictor._keys.of(tokens)
        block_names.update(zip(keys, blocks.of(tokens), strict=True))
        if predictor.host is not None:
            own = predictor._chunk_keys
            n_prompt = len(step.prompt)
            theirs = own.of(step.prompt) if own else predictor._block_chunks(keys, n_prompt)
            chunk_names.update(zip(theirs, chunks.of(step.prompt), strict=True))
        outcomes.append(_outcome(predictor, said, block_names, chunk_names))
    served = Case(case.seed, case.tiers, tuple(accepted))
    return Served(
        served, tuple(outcomes), len(case.steps) - len(accepted), predictor.evicted_chunks
    )


def _outcome(
    predictor: Predictor,
    said: Prediction,
    block_names: dict[int, int],
    chunk_names: dict[int, int],
) -> Outcome:
    free = predictor.gpu.free_order()
    if not predictor.tiers.prefix_caching:
        free = tuple(sorted(free))  # as in ``kv_manager.pool_state``
    named = sorted((block, block_names[key]) for block, key in predictor.gpu.hashed().items())
    host = predictor.host.recency() if predictor.host is not None else ()
    names = [chunk_names[key] for key in host]
    if predictor.tiers.policy == "noop":
        names.sort()  # the engine keeps no order either
    return Outcome(
        said.split.computed,
        said.split.gpu_hit,
        said.split.host_loaded,
        said.stored_chunks,
        free,
        tuple(named),
        tuple(names),
    )


def difference(case: Case, real: Driver, tally: Tally | None = None) -> str | None:
    """The first thing ``real`` and ``sim`` do differently on ``case``, or None.

    A driver's AssertionError, such as a load that failed or a request that hangs, is a difference.
    """
    served = by_sim(case)
    theirs = real(served.case)
    for number, ours in enumerate(served.outcomes, start=1):
        where = f"seed {case.seed}, request {number} of {len(served.outcomes)}"
        try:
            actual = next(theirs)
        except AssertionError as error:
            return f"{where}: engine: {error}"
        for part in fields(Outcome):
            if getattr(actual, part.name) != getattr(ours, part.name):
                return (
                    f"{where}: {part.name}: "
                    f"engine {getattr(actual, part.name)}, sim {getattr(ours, part.name)}"
                )
        if tally is not None:
            tally.requests += 1
            tally.with_gpu_hit += ours.gpu_hit > 0
            tally.with_host_load += ours.host_loaded > 0
            tally.in_steps += ours.computed > case.tiers.max_num_batched_tokens
            tally.mixed += ours.gpu_hit > 0 and ours.host_loaded > 0
    theirs.close()  # the engine ends now, not when the garbage is collected
    if tally is not None:
        tally.refused += served.refused
        tally.evictions += served.evictions
    return None


def compare(cases: Iterable[Case], real: Driver, *, seconds: float, min_requests: int = 0) -> Tally:
    """Take ``cases`` until ``seconds`` have passed and ``min_requests`` have been compared.

    A mismatch is minimised and described, once; later ones are counted only.
    """
    tally, started = Tally(), time.monotonic()
    for case in cases:
        tally.workloads += 1
        found = difference(case, real, tally)
        if found is not None:
            tally.mismatched_seeds.append(case.seed)
            if tally.first_difference is None:
                tally.first_difference = describe(minimise(case, real), real)
        if time.monotonic() - started >= seconds and tally.requests >= min_requests:
            break
    tally.seconds = round(time.monotonic() - started, 1)
    return tally


def minimise(case: Case, real: Driver) -> Case:
    """A part of ``case`` that still differs and of which no single request can be left out."""
    size = max(1, len(case.steps) // 2)
    while size:
        first = 0
        while first < len(case.steps):
            smaller = case.without(first, size)
            if difference(smaller, real) is not None:
                case = smaller
            else:
                first += size
        size //= 2
    return case


def describe(case: Case, real: Driver) -> str:
    """A failing case as something to paste into the table of regressions."""
    lines = [f"{difference(case, real)}", f"tiers: {case.tiers}", "steps:"]
    lines += [f"  {step}" for step in case.steps]
    return "\n".join(lines)


def caught(cases: Iterable[Case], real: Driver, spoil: Callable[[Case], Case]) -> list[int]:
    """Seeds on which a deliberately wrong ``sim`` differs from ``real``.

    ``spoil`` changes what ``sim`` believes of the tiers; the engine serves the case as it is.
    """
    return [case.seed for case in cases if _differs(case, real, spoil)]


def _differs(case: Case, real: Driver, spoil: Callable[[Case], Case]) -> bool:
    served = by_sim(spoil(case))
    theirs = real(Case(case.seed, case.tiers, served.case.steps))
    try:
        return tuple(theirs) != served.outcomes
    except AssertionError:
        return True  # such as a request that sim, spoilt, no longer refuses
