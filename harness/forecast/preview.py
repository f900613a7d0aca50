"""What a plan would do, without starting anything: splits, tiers, memory, commands, duration."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import log, sqrt
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.forecast.cliff import working_set_tokens
from harness.forecast.edges import Edge, gpu_edge, host_edge, why_too_large
from harness.forecast.latency import (
    Expectation,
    duration_s,
    expectation_of,
    expected_passes,
    shapes_of,
)
from harness.forecast.warnings import Outlook, warnings_of
from harness.machine.memory import needs_of
from harness.plan.arms import BASELINE, CONTROL
from harness.plan.experiment import Experiment, SessionPlan
from harness.plan.power import PAIRS, SESSION_NOISE, power
from servers.arms import Arm
from servers.command import Command, render
from servers.memory import SEGMENT_HEADROOM
from servers.ports import Ports
from sim.errors import SpecError
from sim.predict import NotPredictable, Prediction
from sim.split import class_of
from sim.tiers.gpu_pool import usable_tokens
from sim.tiers.spec import engine_note

# From results/20261129T195651Z-demo-94cb9362 (tiny model, one CPU thread): a session spends about
# 27 s on starting and stopping, and 0.40 ms a computed token. Only the order of magnitude is promised.
_SESSION_S = 27.0
_CPU_PREFILL_S_PER_TOKEN = 0.40e-3

# Of the rule's ``min_ratio``: true ratios that are a little, clearly, and far above it.
_POWER_FACTORS = (1.1, 1.25, 1.5, 2.0)

Predictions = Mapping[str, list[Prediction]]


@dataclass(frozen=True, slots=True)
class Noise:
    """How much sessions of one arm differ: standard deviation of their log medians, and by whom."""

    of_sessions: float
    source: str

    @property
    def of_pairs(self) -> float:
        """The same of the log ratio of two sessions."""
        return self.of_sessions * sqrt(2)


def preview(
    experiment: Experiment, *, probe: Path | None = None, like: Noise | None = None
) -> dict[str, Any]:
    """Everything ``kvcliff plan`` shows, as JSON-ready values; tokens and bytes are integers.

    ``probe``: a file of ``scripts/pcie_probe.py`` to expect times by. ``like``: how much the
    sessions of another run differed, for the power. ``not_predicted`` says why an
    arm is missing from ``predicted``. ``environments`` are the changes that go with ``commands``;
    null means removed.
    """
    predictions, not_predicted = _predictions_by_arm(experiment)
    outlook = _outlook(experiment, predictions)
    expected = expectation_of(experiment, probe)
    note = engine_note(experiment.plan.server.engine)
    commands = {name: _commands(arm) for name, arm in experiment.arms.items()}
    return {
        "schema": 1,
        "plan_id": experiment.plan_id,
        "model": _model_facts(experiment),
        "sessions": [session.name for session in experiment.sessions],
        "requests_per_session": len(experiment.workload),
        "requests": _request_counts(experiment),
        "tiers": {name: _tier_sizes(experiment, arm) for name, arm in experiment.arms.items()},
        "memory": {name: _memory_needs(experiment, arm) for name, arm in experiment.arms.items()},
        "predicted": {
            name: _tokens_by_pass(experiment, experiment.arms[name], p)
            for name, p in predictions.items()
        },
        "documents": {
            name: _source_runs(experiment, experiment.arms[name], p)
            for name, p in predictions.items()
        },
        "not_predicted": not_predicted,
        "cliff": _cliff_json(outlook),
        "warnings": [*([note] if note else []), *warnings_of(outlook)],
        "commands": {arm: [list(c.argv) for c in those] for arm, those in commands.items()},
        "environments": {arm: [dict(c.env_diff) for c in those] for arm, those in commands.items()},
        "expected": _expected_times(experiment, predictions, expected),
        "estimate": _duration_text(experiment, predictions, expected),
        "power": _power(experiment, predictions, expected, like),
    }


def _predictions_by_arm(experiment: Experiment) -> tuple[Predictions, dict[str, str]]:
    """By arm; and why an arm has none."""
    predictions, reasons = {}, {}
    for name, arm in experiment.arms.items():
        try:
            predictions[name] = experiment.predictions(arm)
        except NotPredictable as error:
            reasons[name] = str(error)
        except SpecError as error:
            raise InputError(f"the plan cannot be predicted: {error}") from None
    return predictions, reasons


def _model_facts(experiment: Experiment) -> dict[str, Any]:
    """Which model, where its shape is known from, and whether vLLM will have to download it."""
    model = experiment.model
    server = experiment.treatment.server
    return {
        "path": model.name,
        "shape_from": model.source,
        "is_download": model.is_download,
        "weights": server.load_format,
        "dtype": server.dtype,
        "bytes_per_token": experiment.geometry.bytes_per_token,
    }


def _request_counts(experiment: Experiment) -> dict[str, int]:
    """Requests of the whole run, all sessions together: those measured, and with the warm-up."""
    asked = [experiment.workload_of(session.arm) for session in experiment.sessions]
    return {
        "measured": sum(r.phase == "measure" for workload in asked for r in workload),
        "sent": sum(len(workload) for workload in asked),
    }


def _tier_sizes(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    plan, host = experiment.plan, arm.host
    gpu_tokens = usable_tokens(arm.server.num_gpu_blocks, arm.server.block_size)
    chunks = experiment.geometry.host_chunks(host.gib, host.chunk_tokens) if host else 0
    return {
        "working_set_tokens": working_set_tokens(plan, arm.name),
        "gpu_tokens": gpu_tokens,
        "gpu_bytes": gpu_tokens * experiment.geometry.bytes_per_token,
        "host_kind": host.kind if host else None,
        "host_tokens": chunks * host.chunk_tokens if host and chunks else None,
        "host_gib": host.gib if host else None,
    }


def _memory_needs(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    """Bytes one session of ``arm`` needs: all of them estimates but tier, pool and weights.

    ``gpu_bytes`` and ``gpu_share`` as in ``harness.machine.memory``. ``shm_bytes``: what lies in /dev/shm,
    part of the host's.
    """
    needs = needs_of(replace(experiment, sessions=(SessionPlan(1, arm),)))
    shm = 0
    if arm.tier is not None and arm.server.build == "gpu":
        shm = needs.tier_bytes if arm.tier.lies_in_shm else 0
    elif arm.tier is not None and arm.tier.has_server:  # the KV pool itself, shared with it
        shm = int(needs.pool_bytes * SEGMENT_HEADROOM)
    return {**asdict(needs), "shm_bytes": shm}


def _tokens_by_pass(
    experiment: Experiment, arm: Arm, predictions: Iterable[Prediction]
) -> dict[str, dict[str, int]]:
    requests = experiment.workload_of(arm)
    passes: dict[str, dict[str, int]] = {}
    for request, prediction in zip(requests, predictions, strict=True):
        sums = passes.setdefault(request.pass_name, {"computed": 0, "gpu_hit": 0, "host_loaded": 0})
        sums["computed"] += prediction.split.computed
        sums["gpu_hit"] += prediction.split.gpu_hit
        sums["host_loaded"] += prediction.split.host_loaded
    return passes


def _source_runs(
    experiment: Experiment, arm: Arm, predictions: Iterable[Prediction]
) -> dict[str, list[dict[str, Any]]]:
    """By pass: runs of documents, in the order they are read, whose KV comes from one source."""
    passes: dict[str, list[str]] = {}
    requests = experiment.workload_of(arm)
    for request, prediction in zip(requests, predictions, strict=True):
        source = class_of(
            prediction.split, doc_tokens=request.doc_tokens, units=experiment.plan.units
        )
        passes.setdefault(request.pass_name, []).append(source)
    return {
        name: [{"source": source, "documents": len(list(run))} for source, run in groupby(sources)]
        for name, sources in passes.items()
    }


def _outlook(experiment: Experiment, predictions: Predictions) -> Outlook:
    server, requests = experiment.plan.server, experiment.workload
    if why_too_large(requests, server.block_size) is not None:
        return Outlook(experiment, predictions, None, None)
    baseline, treatment = experiment.tiers(experiment.arms[BASELINE]), experiment.treatment
    # vLLM refuses to start when one request of max_model_len does not fit.
    least = 1 + -(-server.max_model_len // server.block_size)
    host, control = None, experiment.plan.control
    try:
        gpu = gpu_edge(requests, baseline, least_blocks=least)
        if treatment.host is not None and treatment.name in predictions:
            hits = [p.split.gpu_hit for p in predictions[treatment.name]]
            host = host_edge(requests, experiment.tiers(treatment), hits)
        of_control = None
        if control is not None and control.documents is not None:
            asked = experiment.workload_of(experiment.arms[CONTROL])
            of_control = gpu_edge(asked, baseline, least_blocks=least)
    except SpecError as error:
        raise InputError(f"the plan cannot be predicted: {error}") from None
    return Outlook(experiment, predictions, gpu, host, of_control)


def _cliff_json(outlook: Outlook) -> dict[str, Any]:
    """Both axes: sizes tried with the measured requests' tokens by source, and the smallest full.

    ``gpu``: no host tier. ``host``: beside the GPU tier of the arms compared; null where the
    treatment has no host tier that can be predicted. A size is full when it serves every prompt as
    an endless tier would (``reusable_tokens`` in all). ``planned`` says for each predicted arm
    whether its tier is, ``full_from_by_arm`` from which size on: a control may be asked less.
    Both axes are null, and ``why_not`` says why, for a plan too large to try.
    """
    plan = outlook.experiment.plan
    reason = why_too_large(outlook.experiment.workload, plan.server.block_size)
    if outlook.gpu is None:
        return {"gpu": None, "host": None, "why_not": reason}
    return {"gpu": _gpu_cliff(outlook, outlook.gpu), "host": _host_cliff(outlook), "why_not": None}


def _gpu_cliff(outlook: Outlook, gpu: Edge) -> dict[str, Any]:
    block_size, geometry = outlook.experiment.plan.server.block_size, outlook.experiment.geometry

    def size_of(blocks: int) -> dict[str, Any]:
        tokens = usable_tokens(blocks, block_size)
        # The null block takes memory, too.
        return {"blocks": blocks, "tokens": tokens, "gib": geometry.gib(blocks * block_size)}

    planned, full_from = {}, {}
    for name, arm in outlook.experiment.arms.items():
        edge = outlook.gpu_of(name)
        if edge is None or name not in outlook.predictions:
            continue
        is_full = outlook.measured_tokens(name, "gpu_hit") >= edge.endless.gpu_hit
        planned[name] = size_of(arm.server.num_gpu_blocks) | {"is_full": is_full}
        full_from[name] = size_of(edge.smallest)
    return {
        "reusable_tokens": gpu.endless.gpu_hit,
        "full_from": size_of(gpu.smallest),
        "full_from_by_arm": full_from,
        "planned": planned,
        "points": _sizes_tried(gpu, size_of),
    }


def _host_cliff(outlook: Outlook) -> dict[str, Any] | None:
    host = outlook.host
    if host is None:
        return None

    def size_of(chunks: int) -> dict[str, Any]:
        tokens = chunks * outlook.experiment.plan.host.chunk_tokens
        return {"chunks": chunks, "tokens": tokens, "gib": outlook.host_gib(chunks)}

    reusable = host.endless.host_loaded
    is_full = outlook.measured_tokens(outlook.treatment, "host_loaded") >= reusable
    return {
        "reusable_tokens": reusable,
        "full_from": size_of(host.smallest),
        "is_steady": host.is_steady,
        "planned": size_of(outlook.host_chunks) | {"is_full": is_full},
        "points": _sizes_tried(host, size_of),
    }


def _sizes_tried(edge: Edge, size_of: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [size_of(n) | asdict(served) for n, served in edge.sizes.items()]


def _commands(arm: Arm) -> tuple[Command, ...]:
    """The servers' processes, with ports and folders like a run's."""
    return render(
        arm,
        ports=Ports(8000, 5555, 8080),  # those an arm has no use for are not in its commands
        model_name=f"kvcliff-{arm.name}",
        work_dir=Path("/tmp/kvcliff"),
        cache_dir=Path("~/.cache/kvcliff").expanduser(),
        inherited=os.environ,
    )


def _expected_times(
    experiment: Experiment, predictions: Predictions, expected: Expectation | None
) -> dict[str, Any] | None:
    """Expected TTFT by pass and arm; null where there is nothing to expect it by."""
    if expected is None:
        return None
    asked = [shape for found in predictions.values() for shape in shapes_of(experiment, found)]
    return {
        "is_estimate": True,
        "from": expected.source,
        "is_beyond_probe": expected.is_beyond_probe(asked),
        "coefficients": dict(expected.coefficients),
        "passes": expected_passes(experiment, predictions, expected),
    }


def _power(
    experiment: Experiment,
    predictions: Predictions,
    expected: Expectation | None,
    like: Noise | None,
) -> dict[str, Any]:
    """By number of pairs, minutes and the share of runs that are ``supported``, by true ratio."""
    noise = like or Noise(SESSION_NOISE, f"sessions that differ by {SESSION_NOISE:.0%}, a guess")
    rule = experiment.plan.decision
    seconds = _duration_s(experiment, predictions, expected)
    minutes = None if seconds is None else seconds / len(experiment.sessions) * 2 / 60
    ratios = [rule.min_ratio * factor for factor in _POWER_FACTORS]
    return {
        "session_noise": noise.of_sessions,
        "noise_from": noise.source,
        "min_ratio": rule.min_ratio,
        "by_pairs": [
            {
                "pairs": n,
                "minutes": None if minutes is None else n * minutes,
                "supported": {
                    f"{ratio:.3g}": power(log(ratio / rule.min_ratio), noise.of_pairs, n)
                    for ratio in ratios
                },
            }
            for n in PAIRS
        ],
    }


def _duration_s(
    experiment: Experiment, predictions: Predictions, expected: Expectation | None
) -> float | None:
    """Seconds the whole run takes; None where it is not known."""
    plan, sessions = experiment.plan, experiment.sessions
    if plan.server.build != "cpu":
        weights = needs_of(experiment).weights_bytes
        if expected is None:
            return None
        return duration_s(experiment, predictions, expected, weights_bytes=weights)
    if plan.model.path != "tiny":
        return None
    computed = sum(p.split.computed for s in sessions for p in predictions.get(s.arm.name, ()))
    return len(sessions) * _SESSION_S + computed * _CPU_PREFILL_S_PER_TOKEN


def _duration_text(
    experiment: Experiment, predictions: Predictions, expected: Expectation | None
) -> str:
    sessions = experiment.sessions
    computed = sum(p.split.computed for s in sessions for p in predictions.get(s.arm.name, ()))
    work = f"{len(sessions)} server starts, {computed:,} prompt tokens to compute"
    if len(predictions) < len(experiment.arms):
        work += " in the arms that are predicted"
    seconds = _duration_s(experiment, predictions, expected)
    if experiment.plan.server.build == "cpu":
        if seconds is None:
            return f"{work}; how long that takes a CPU with this model is not known"
        return f"about {_minutes(seconds)} on the CPU build, with the tiny model ({work})"
    if seconds is None:
        return work
    weights = needs_of(experiment).weights_bytes
    text = f"about {_minutes(seconds)} ({work}), nearly all of it the starts: an estimate"
    if experiment.model.is_download:
        size = "" if weights is None else f" of at least {weights / 1e9:.1f} GB"
        text += f"; before it the download{size}"
    return text


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"
