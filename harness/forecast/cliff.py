"""Where a plan sits on its predicted curve: share of a replay recomputed, by GPU tier capacity."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from harness.plan.arms import BASELINE, CONTROL, compared
from harness.plan.experiment import arms_of, tiers_of
from harness.plan.plan import Plan, documents_of
from sim.geometry import KvGeometry
from sim.predict import NotPredictable, TierSpec, predict
from sim.tiers.gpu_pool import usable_tokens
from sim.workload import Workload, build_workload, request_keys

_STEPS = 40
_WIDEST = 1.3  # of the working set: the curve is flat beyond the point where everything fits
# The block-level simulator takes about 1 µs a prompt token; this keeps a report below a minute.
_MOST_SIMULATED_TOKENS = 40_000_000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class CliffPoint(_Part):
    """A predicted or measured share of recomputed tokens; ``n``: measured rows."""

    arm: str
    gpu_tokens: int
    share: float
    n: int | None = None


class Cliff(_Part):
    """The predicted curve this plan sits on."""

    pass_name: str = Field(alias="pass")
    working_set_tokens: int
    gpu_tokens: int
    points: list[CliffPoint]
    why_not: str | None
    measured: list[CliffPoint]


def cliff_of(
    plan: Plan, pass_name: str, *, chunk_bytes: int | None, measured: Sequence[CliffPoint]
) -> Cliff:
    """The predicted curve of each arm, with the points ``measured`` on it.

    ``share``: recomputed ÷ prompt tokens of ``pass_name``, one session. An arm has no points, and
    ``why_not`` says why, where the curve would take too long, the chunk size is unknown or the arm
    is not predictable to the token.
    """
    spec = plan.workload.spec()
    capacities = list(_capacities(plan))
    tokens = spec.longest_prompt_tokens * sum(1 for _ in request_keys(spec))
    points: list[CliffPoint] = []
    why_not = None
    if tokens * len(capacities) * 2 > _MOST_SIMULATED_TOKENS:
        why_not = f"{tokens:,} prompt tokens a session at {len(capacities)} capacities are too much"
    else:
        workload = build_workload(spec)
        arms, why_not = _tiers_of_arms(plan, chunk_bytes)
        for arm, tiers in arms.items():
            try:
                points += _points(plan, workload, pass_name, capacities, arm, tiers)
            except NotPredictable as error:
                why_not = f"{arm}: {error}"
    return Cliff(
        pass_name=pass_name,
        working_set_tokens=working_set_tokens(plan),
        gpu_tokens=gpu_tokens(plan),
        points=points,
        why_not=why_not,
        measured=list(measured),
    )


def gpu_tokens(plan: Plan, arm: str = BASELINE) -> int:
    """Tokens that the GPU tier of an arm's server holds."""
    of_control = plan.control if arm == CONTROL else None
    return usable_tokens((of_control or plan.server).num_gpu_blocks, plan.server.block_size)


def working_set_tokens(plan: Plan, arm: str = BASELINE) -> int:
    """Tokens that come again in an arm: its documents, and the questions kept in their prompts."""
    spec, n_documents = plan.workload.spec(), documents_of(plan, arm)
    documents = sum(spec.tokens_of(document) for document in range(n_documents))
    if spec.questions == "new":
        return documents
    kept = len(spec.passes) - 1 if spec.questions == "appended" else 1
    return documents + n_documents * kept * spec.question_tokens


def _capacities(plan: Plan) -> Iterable[int]:
    """GPU blocks to predict at, the null block included, from one prompt to beyond everything."""
    spec, block = plan.workload.spec(), plan.server.block_size
    prompt = spec.longest_prompt_tokens + spec.output_tokens
    smallest = -(-max(prompt, plan.server.max_model_len) // block) + 1
    largest = max(int(_WIDEST * spec.documents * prompt / block), smallest + _STEPS)
    blocks = {smallest + (largest - smallest) * i // _STEPS for i in range(_STEPS + 1)}
    blocks.add(plan.server.num_gpu_blocks)
    if plan.control:
        blocks.add(plan.control.num_gpu_blocks)
    return sorted(blocks)


def _tiers_of_arms(plan: Plan, chunk_bytes: int | None) -> tuple[dict[str, TierSpec], str | None]:
    """What the predictor needs of each arm compared; and why one of them cannot be predicted."""
    if plan.server.engine == "auto":  # of a run from before plans named it
        return {}, "the plan does not say by which vLLM version's rules it was predicted"
    geometry = KvGeometry(chunk_bytes // plan.host.chunk_tokens if chunk_bytes else 1)
    arms = arms_of(plan, model=plan.model.path)
    tiers: dict[str, TierSpec] = {}
    for name in compared(plan.order):
        if name is None:
            continue
        if arms[name].host is not None and chunk_bytes is None:
            return tiers, f"{name}: no row tells the size of a host chunk"
        try:
            tiers[name] = tiers_of(plan, arms[name], geometry)
        except NotPredictable as error:
            return tiers, f"{name}: {error}"
    return tiers, None


def _points(
    plan: Plan,
    workload: Workload,
    pass_name: str,
    capacities: Iterable[int],
    arm: str,
    tiers: TierSpec,
) -> list[CliffPoint]:
    return [
        CliffPoint(
            arm=arm,
            gpu_tokens=usable_tokens(blocks, plan.server.block_size),
            share=_recomputed_share(workload, replace(tiers, num_gpu_blocks=blocks), pass_name),
        )
        for blocks in capacities
    ]


def _recomputed_share(workload: Workload, tiers: TierSpec, pass_name: str) -> float:
    computed = prompt = 0
    for request, found in zip(workload, predict(workload, tiers), strict=True):
        if request.pass_name == pass_name:
            computed += found.split.computed
            prompt += len(request.prompt)
    return computed / prompt
