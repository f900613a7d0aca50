"""Where a plan sits on its predicted curve: share of a replay recomputed, by GPU tier capacity."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.paired import BASE, TIER
from harness.plan import Plan
from sim.geometry import KvGeometry, host_bytes
from sim.predict import TierSpec, predict
from sim.workload import Workload, build_workload

_STEPS = 40
_WIDEST = 1.3  # of the working set: the curve is flat beyond the point where everything fits
# The block-level simulator takes about 1 µs a prompt token; this keeps a report below a minute.
_MOST_TOKENS = 40_000_000


def cliff(
    plan: Plan, summary: Mapping[str, Any], pass_name: str, *, chunk_bytes: int | None
) -> dict[str, Any]:
    """``cliff`` of ``summary.json``: predicted curve per arm and the measured points on it.

    ``share``: recomputed ÷ prompt tokens of ``pass_name``, one session. ``points`` is empty, and
    ``why_not`` says why, where the curve would take too long or the chunk size is unknown.
    """
    workload = build_workload(plan.workload.spec())
    capacities = list(_capacities(plan))
    tokens = sum(len(request.prompt) for request in workload.requests)
    why_not = None
    if tokens * len(capacities) * 2 > _MOST_TOKENS:
        why_not = f"{tokens:,} prompt tokens a session at {len(capacities)} capacities is too much"
    elif chunk_bytes is None:
        why_not = "no row tells the size of a host chunk"
    points = [] if why_not else list(_points(plan, workload, pass_name, capacities, chunk_bytes))
    return {
        "pass": pass_name,
        "working_set_tokens": working_set_tokens(plan),
        "gpu_tokens": _tokens(plan, plan.server.num_gpu_blocks),
        "points": points,
        "why_not": why_not,
        "measured": list(_measured(plan, summary, pass_name)),
    }


def working_set_tokens(plan: Plan) -> int:
    """Tokens that come again: all documents, and the questions that stay in growing prompts."""
    spec = plan.workload.spec()
    documents = sum(spec.tokens_of(document) for document in range(spec.documents))
    if spec.questions == "new":
        return documents
    kept = len(spec.passes) - 1 if spec.questions == "appended" else 1
    return documents + spec.documents * kept * spec.question_tokens


def _tokens(plan: Plan, num_gpu_blocks: int) -> int:
    return (num_gpu_blocks - 1) * plan.server.block_size  # one is vLLM's null block


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


def _points(
    plan: Plan,
    workload: Workload,
    pass_name: str,
    capacities: Iterable[int],
    chunk_bytes: int | None,
) -> Iterable[dict[str, Any]]:
    base = TierSpec(
        block_size=plan.server.block_size,
        num_gpu_blocks=plan.server.num_gpu_blocks,
        max_num_batched_tokens=plan.server.max_num_batched_tokens,
    )
    tier = base
    if chunk_bytes:
        geometry = KvGeometry(chunk_bytes // plan.host.chunk_tokens)
        tier = replace(
            base,
            host_chunks=geometry.host_chunks(plan.host.gib, plan.host.chunk_tokens),
            chunk_tokens=plan.host.chunk_tokens,
            watermark=plan.host.watermark,
            evict_ratio=plan.host.evict_ratio,
            policy=plan.host.policy,
            host_bytes=host_bytes(plan.host.gib),
            chunk_bytes=geometry.chunk_bytes(plan.host.chunk_tokens),
        )
    for blocks in capacities:
        for arm, spec in ((BASE, base), (TIER, tier)):
            share = _share(workload, replace(spec, num_gpu_blocks=blocks), pass_name)
            yield {"arm": arm, "gpu_tokens": _tokens(plan, blocks), "share": share}


def _share(workload: Workload, tiers: TierSpec, pass_name: str) -> float:
    computed = prompt = 0
    for request, found in zip(workload.requests, predict(workload.requests, tiers), strict=True):
        if request.pass_name == pass_name:
            computed += found.split.computed
            prompt += len(request.prompt)
    return computed / prompt


def _measured(plan: Plan, summary: Mapping[str, Any], pass_name: str) -> Iterable[dict[str, Any]]:
    """Each arm's measured share at its own capacity; an arm without known sources has none."""
    content = summary["passes"].get(pass_name)
    for arm, cell in (content["arms"] if content else {}).items():
        tokens = cell["tokens"]
        blocks = plan.server.num_gpu_blocks
        if arm == "control" and plan.control:
            blocks = plan.control.num_gpu_blocks
        if tokens["prompt"]:
            yield {
                "arm": arm,
                "gpu_tokens": _tokens(plan, blocks),
                "share": tokens["computed"] / tokens["prompt"],
                "n": tokens["n"],
            }
