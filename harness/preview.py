"""What a plan would do, without starting anything: splits, tiers, cliffs, commands, duration."""

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.capacity import Edge, gpu_edge, host_edge, why_not
from harness.errors import InputError
from harness.hazards import TIER, Outlook, hazards
from harness.plan import Experiment
from servers.arms import Arm
from servers.command import Ports, render
from sim.predict import Prediction

# From results/20261129T174919Z-demo-a2d14adc (tiny model, one CPU thread): a session spends about
# 23 s on starting and stopping, and 0.33 ms a computed token. Only the order of magnitude is promised.
_SESSION_S = 23.0
_CPU_PREFILL_S_PER_TOKEN = 0.33e-3


def preview(experiment: Experiment) -> dict[str, Any]:
    """Everything ``kvcliff plan`` shows, as JSON-ready values; tokens and bytes are integers."""
    predictions = {name: experiment.predictions(arm) for name, arm in experiment.arms.items()}
    outlook = _outlook(experiment, predictions)
    return {
        "schema": 1,
        "plan_id": experiment.plan_id,
        "sessions": [session.name for session in experiment.sessions],
        "requests_per_session": len(experiment.workload.requests),
        "tiers": {name: _tiers(experiment, arm) for name, arm in experiment.arms.items()},
        "predicted": {name: _by_pass(experiment, p) for name, p in predictions.items()},
        "cliff": _cliff(outlook),
        "warnings": hazards(outlook),
        "commands": {name: _commands(arm) for name, arm in experiment.arms.items()},
        "estimate": _estimate(experiment, predictions),
    }


def _tiers(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    work = experiment.plan.workload
    gpu_tokens = (arm.server.num_gpu_blocks - 1) * arm.server.block_size
    host_chunks = experiment.tiers(arm).host_chunks
    return {
        "working_set_tokens": work.documents * work.document_tokens,
        "gpu_tokens": gpu_tokens,
        "gpu_bytes": gpu_tokens * experiment.geometry.bytes_per_token,
        "host_tokens": host_chunks * arm.host.chunk_tokens if arm.host and host_chunks else None,
        "host_gib": arm.host.gib if arm.host else None,
    }


def _by_pass(
    experiment: Experiment, predictions: Iterable[Prediction]
) -> dict[str, dict[str, int]]:
    passes: dict[str, dict[str, int]] = {}
    for request, prediction in zip(experiment.workload.requests, predictions, strict=True):
        sums = passes.setdefault(request.pass_name, {"computed": 0, "gpu_hit": 0, "host_loaded": 0})
        sums["computed"] += prediction.split.computed
        sums["gpu_hit"] += prediction.split.gpu_hit
        sums["host_loaded"] += prediction.split.host_loaded
    return passes


def _outlook(experiment: Experiment, predictions: dict[str, list[Prediction]]) -> Outlook:
    server, requests = experiment.plan.server, experiment.workload.requests
    if why_not(requests, server.block_size) is not None:
        return Outlook(experiment, predictions, None, None)
    tiers = experiment.tiers(experiment.arms[TIER])
    # vLLM refuses to start when one request of max_model_len does not fit.
    least = 1 + -(-server.max_model_len // server.block_size)
    try:
        gpu = gpu_edge(requests, tiers, least_blocks=least)
        host = host_edge(requests, tiers, [p.split.gpu_hit for p in predictions[TIER]])
    except ValueError as error:
        raise InputError(f"the plan cannot be predicted: {error}") from None
    return Outlook(experiment, predictions, gpu, host)


def _cliff(outlook: Outlook) -> dict[str, Any]:
    """Both axes: sizes tried with the measured requests' tokens by source, and the smallest full.

    ``gpu``: no host tier. ``host``: beside the GPU tier of the arms compared. A size is full when
    it serves every prompt as an endless tier would (``reusable_tokens`` in all). ``planned`` says
    for each arm whether its tier is. Both axes are null, and ``why_not`` says why, for a plan too
    large to try.
    """
    plan, geometry = outlook.experiment.plan, outlook.experiment.geometry
    reason = why_not(outlook.experiment.workload.requests, plan.server.block_size)
    if outlook.gpu is None or outlook.host is None:
        return {"gpu": None, "host": None, "why_not": reason}

    def gpu_size(blocks: int) -> dict[str, Any]:
        tokens = (blocks - 1) * plan.server.block_size  # one is the null block
        # The null block takes memory, too.
        gib = geometry.gib(blocks * plan.server.block_size)
        return {"blocks": blocks, "tokens": tokens, "gib": gib}

    def host_size(chunks: int) -> dict[str, Any]:
        return {
            "chunks": chunks,
            "tokens": chunks * plan.host.chunk_tokens,
            "gib": outlook.host_gib(chunks),
        }

    arms = outlook.experiment.arms.values()
    gpu_reusable, host_reusable = outlook.gpu.endless.gpu_hit, outlook.host.endless.host_loaded
    return {
        "gpu": {
            "reusable_tokens": gpu_reusable,
            "full_from": gpu_size(outlook.gpu.smallest),
            "planned": {
                arm.name: gpu_size(arm.server.num_gpu_blocks)
                | {"is_full": outlook.measured(arm.name, "gpu_hit") >= gpu_reusable}
                for arm in arms
            },
            "points": _points(outlook.gpu, gpu_size),
        },
        "host": {
            "reusable_tokens": host_reusable,
            "full_from": host_size(outlook.host.smallest),
            "is_steady": outlook.host.is_steady,
            "planned": host_size(outlook.host_chunks)
            | {"is_full": outlook.measured(TIER, "host_loaded") >= host_reusable},
            "points": _points(outlook.host, host_size),
        },
        "why_not": None,
    }


def _points(edge: Edge, size: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [size(n) | asdict(served) for n, served in edge.sizes.items()]


def _commands(arm: Arm) -> list[list[str]]:
    ports = Ports(8000, 5555, 8080) if arm.host else Ports(8000)
    commands = render(
        arm,
        ports=ports,
        model_name=f"kvcliff-{arm.name}",
        work_dir=Path("/tmp/kvcliff"),
        cache_dir=Path("~/.cache/kvcliff"),
        inherited=os.environ,
    )
    return [list(command.argv) for command in commands]


def _estimate(experiment: Experiment, predictions: dict[str, list[Prediction]]) -> str:
    sessions = experiment.sessions
    computed = sum(p.split.computed for s in sessions for p in predictions[s.arm.name])
    if experiment.plan.server.build != "cpu":
        return f"{len(sessions)} server starts and {computed:,} prompt tokens to compute"
    seconds = len(sessions) * _SESSION_S + computed * _CPU_PREFILL_S_PER_TOKEN
    return (
        f"about {max(1, round(seconds / 60))} min on the CPU build "
        f"({len(sessions)} server starts, {computed:,} prompt tokens to compute)"
    )
