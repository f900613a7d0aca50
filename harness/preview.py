"""What a plan would do, without starting anything: splits, tiers, commands, duration."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.plan import Experiment
from servers.arms import Arm
from servers.command import Ports, render
from sim.predict import Prediction

# From results/20261129T162315Z-demo-ccae8dec (tiny model, one CPU thread): a session spends about
# 23 s on starting and stopping, and 0.33 ms a computed token. Only the order of magnitude is promised.
_SESSION_S = 23.0
_CPU_PREFILL_S_PER_TOKEN = 0.33e-3


def preview(experiment: Experiment) -> dict[str, Any]:
    """Everything ``kvcliff plan`` shows, as JSON-ready values; tokens and bytes are integers."""
    predictions = {name: experiment.predictions(arm) for name, arm in experiment.arms.items()}
    return {
        "schema": 1,
        "plan_id": experiment.plan_id,
        "sessions": [session.name for session in experiment.sessions],
        "requests_per_session": len(experiment.workload.requests),
        "tiers": {name: _tiers(experiment, arm) for name, arm in experiment.arms.items()},
        "predicted": {name: _by_pass(experiment, p) for name, p in predictions.items()},
        "warnings": list(_warnings(experiment, predictions)),
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


def _warnings(experiment: Experiment, predictions: dict[str, list[Prediction]]) -> Iterable[str]:
    tier = predictions["lmcache"]
    if not any(p.split.host_loaded for p in tier):
        yield (
            "the tier arm is predicted to load nothing from the host: the working set fits the "
            "GPU tier, or the host tier is too small to keep it"
        )
    if any(p.split.host_loaded for p in predictions.get("control", [])):
        yield "the control is predicted to load from the host: raise control.num_gpu_blocks"


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
        f"about {seconds / 60:.0f} minutes on the CPU build "
        f"({len(sessions)} server starts, {computed:,} prompt tokens to compute)"
    )
